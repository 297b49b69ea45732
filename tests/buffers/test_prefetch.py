"""Samples made ahead in threads: the same ones, in the same order, and no thread left behind."""

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, SliceSampler


def rows(first: int, count: int) -> TensorDict:
    n = torch.arange(first, first + count)
    return TensorDict({"n": n, "next": {"done": n % 10 == 9}}, [count])


def made(prefetch: int | None, **options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(options.pop("capacity", 50))
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(storage=storage, batch_size=8, prefetch=prefetch, generator=generator, **options)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("flatroll-prefetch")}


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("sampler", [None, SliceSampler(slice_len=4)])
def test_samples_are_those_of_a_buffer_without(prefetch: int, sampler: Any) -> None:
    slow = threading.Event()

    def transform(td: TensorDict) -> TensorDict:
        if int(td["n"][0]) % 3 == 0:
            slow.wait(0.002)  # threads finish in another order than they began
        return td

    found = []
    for count in (None, prefetch):
        buffer = made(count, sampler=copy.deepcopy(sampler), transform=transform)
        buffer.extend(rows(0, 50))
        found.append(torch.cat([buffer.sample()["n"] for _ in range(30)]))
    assert torch.equal(*found)


def test_another_batch_size_is_made_at_once() -> None:
    """torchrl 0.14 gives what was prefetched, of the constructor's size."""
    buffer = made(2)
    buffer.extend(rows(0, 50))
    assert [len(buffer.sample(size)) for size in (8, 3, 8, 20)] == [8, 3, 8, 20]


def test_empty_forgets_what_was_made_ahead() -> None:
    """torchrl 0.14 keeps the queue: rows of before come out afterwards."""
    buffer = made(4)
    buffer.extend(rows(0, 50))
    buffer.sample()
    buffer.empty()
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample()
    buffer.extend(rows(100, 20))
    assert all(int(buffer.sample()["n"].min()) >= 100 for _ in range(8))


def test_rows_overwritten_while_ahead_are_whole() -> None:
    buffer = made(3, capacity=20)
    for first in range(0, 400, 10):
        buffer.extend(rows(first, 10))
        sample = buffer.sample()
        assert torch.equal(sample["next", "done"], sample["n"] % 10 == 9)


def test_errors_of_transforms_reach_the_caller() -> None:
    def transform(td: TensorDict) -> TensorDict:
        if calls.pop(0):
            raise ZeroDivisionError("in a thread")
        return td

    calls = [False, True, False, False, False, False, False]
    buffer = made(1, transform=transform)
    buffer.extend(rows(0, 50))
    assert len(buffer.sample()) == 8
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        buffer.sample()
    assert len(buffer.sample()) == 8  # and it goes on


def test_an_error_while_drawing_ahead_leaves_nothing_half_done() -> None:
    buffer = made(2, sampler=SliceSampler(slice_len=4, strict_length=True))
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample()
    buffer.extend(rows(0, 3))
    with pytest.raises(RuntimeError, match="no stored trajectory has 4 consecutive rows"):
        buffer.sample()
    buffer.extend(rows(3, 20))
    assert len(buffer.sample()) == 8


def test_no_thread_and_no_memory_stay_after_the_buffer() -> None:
    before = threads()
    buffer = made(3)
    buffer.extend(rows(0, 50))
    assert threads() <= before
    sample = buffer.sample()
    workers = threads() - before
    assert 1 <= len(workers) <= 3
    storage = buffer.storage
    gc.disable()
    try:
        del buffer  # without the garbage collector's help
        for thread in workers:
            thread.join(600)
    finally:
        gc.enable()
    assert not threads() & workers and len(sample) == 8
    assert (
        len([each for each in gc.get_referrers(storage) if isinstance(each, dict) and "_ring" in each]) == 0
    )


def test_passes_end_where_they_end() -> None:
    found = []
    for count in (None, 3):
        buffer = made(count, sampler=SamplerWithoutReplacement(), capacity=20)
        buffer.extend(rows(0, 20))
        found.append([[len(sample) for sample in buffer] for _ in range(2)])
    assert found[0] == found[1] == [[8, 8, 4]] * 2


def test_copies_start_threads_of_their_own() -> None:
    buffer = made(2)
    buffer.extend(rows(0, 50))
    buffer.sample()
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert other._prefetcher is not None and other._prefetcher is not buffer._prefetcher
        assert len(other.sample()) == 8
        other.extend(rows(50, 10))
    assert len(buffer) == 50 and int(buffer[:]["n"].max()) == 49


def test_prefetch_needs_a_batch_size() -> None:
    with pytest.raises(ValueError, match="batch_size must be given"):
        ReplayBuffer(storage=LazyTensorStorage(10), prefetch=2)


def test_several_threads_sample_empty_and_save() -> None:
    """Nobody trips over another one's queue, and what was made ahead before ``empty`` stays forgotten."""
    buffer = made(2)
    errors: list[Exception] = []
    done, floor = threading.Event(), [0]

    def sample() -> None:
        while not done.is_set():
            least = floor[0]
            try:
                assert int(buffer.sample()["n"].min()) >= least
            except RuntimeError as error:
                if "empty buffer" not in str(error):
                    errors.append(error)
            except Exception as error:
                errors.append(error)

    buffer.extend(rows(0, 50))
    readers = [threading.Thread(target=sample) for _ in range(4)]
    for reader in readers:
        reader.start()
    for round in range(1, 60):
        buffer.empty()
        floor[0] = round * 100
        buffer.extend(rows(round * 100, 50))
        try:
            buffer.state_dict()
        except RuntimeError as error:  # of a sample under way when the buffer was emptied
            assert "empty buffer" in str(error)
    done.set()
    for reader in readers:
        reader.join()
    assert not errors


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_have_the_samples_made_ahead(duplicate: Any) -> None:
    """A pass without replacement that goes on in a copy has every row once."""
    buffer = made(2, sampler=SamplerWithoutReplacement(), capacity=24)
    buffer.extend(rows(0, 24))
    first = buffer.sample()
    other = duplicate(buffer)
    rest = [buffer.sample()["n"] for _ in range(2)]
    assert torch.equal(torch.cat([first["n"], *rest]).sort().values, torch.arange(24))
    assert all(torch.equal(other.sample()["n"], n) for n in rest)


def test_samples_among_writes_do_not_depend_on_the_threads() -> None:
    """A row is never overwritten between its draw and its reading, so it is never drawn anew in a thread."""
    found = []
    for slow in (False, True):
        taken = []
        buffer = made(2, capacity=20)
        if slow:
            buffer.storage.read_rows = partial(slowly, buffer.storage.read_rows)  # type: ignore[method-assign]
        for first in range(0, 300, 10):
            buffer.extend(rows(first, 10))
            taken.append(buffer.sample()["n"])
        found.append(torch.stack(taken))
    assert torch.equal(*found)


def slowly(read: Any, *args: Any, **options: Any) -> Any:
    threading.Event().wait(0.002)
    return read(*args, **options)


def test_a_write_does_not_wait_for_transforms() -> None:
    entered, go = threading.Event(), threading.Event()

    def transform(td: TensorDict) -> TensorDict:
        entered.set()
        assert go.wait(600)
        return td

    buffer = made(1, transform=transform)
    buffer.extend(rows(0, 50))
    reader = threading.Thread(target=buffer.sample)
    reader.start()
    assert entered.wait(600)
    wait_until(partial(waits_for_a_thread, buffer))

    # The thread holds one sample; the next one is drawn, and nobody reads its rows yet.
    buffer.extend(rows(50, 10))
    go.set()
    reader.join(600)
    assert not reader.is_alive() and int(buffer.sample()["n"].max()) < 50


def waits_for_a_thread(buffer: ReplayBuffer) -> bool:
    """Return whether the newest sample made ahead is drawn and queued, and no thread has taken it."""
    assert buffer._prefetcher is not None
    queue = list(buffer._prefetcher._queue)
    return bool(queue) and not queue[-1][0].running()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.001)


def test_a_failed_or_forgotten_sample_holds_up_no_write() -> None:
    buffer = made(2, transform=lambda td: 1 // 0)
    buffer.extend(rows(0, 50))
    with pytest.raises(ZeroDivisionError):
        buffer.sample()
    buffer.extend(rows(50, 10))
    buffer[0:10] = rows(0, 10)
    buffer.empty()
    buffer.extend(rows(0, 50))

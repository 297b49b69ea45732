"""One buffer in several processes, and copies that are copies."""

import copy
import multiprocessing
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing as mp

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from flatroll.buffers.storages.memmap import FileLock


def shared(rows: int = 100, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyMemmapStorage(rows), batch_size=8, **options)


def tensordict(value: float, count: int = 10) -> TensorDict:
    return TensorDict({"a": torch.full((count,), value)}, [count])


def in_child(target: Any, *args: Any) -> None:
    """Run in a forked process; AssertionError if it fails there."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join(600)
    assert process.exitcode == 0


EXAMPLE = """
import copy
import sys
import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from flatroll.buffers import (
    LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer)

def worker(rb, *others):
    # Updates the replay buffer with new data
    td = TensorDict({"a": torch.ones(10)}, [10])
    rb.extend(td)
    for other in others:
        try:
            other.extend(other[:])
        except RuntimeError as error:
            assert "pass buffer.handle()" in str(error)
        else:
            raise AssertionError("these rows are lost")
        other = copy.deepcopy(other)
        other[:] = other[:].apply(lambda t: t + 1 if t.dtype is torch.float32 else t)
        other.extend(other[:])
        assert len(other) == 20 and len(other.sample()) == 4

def many(rb, number):
    for i in range(250):
        rb.extend(TensorDict({"a": torch.full((2,), float(250 * number + i))}, [2]))

if __name__ == "__main__":
    mp.set_start_method(sys.argv[1])
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(21))
    td = TensorDict({"a": torch.zeros(10)}, [10])
    rb.extend(td)

    # buffers in memory go by value: torch's pickler alone would share their tensors, but not their counters
    done = torch.zeros(10, dtype=torch.bool)
    batch = TensorDict({"x": torch.arange(10.0), "next": {"y": torch.arange(10.0), "done": done}}, [10])
    plain = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, prefetch=2)
    index = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2), batch_size=4)
    others = (plain, index)
    for other in others:
        other.extend(batch)
        other.sample()  # starts the threads of prefetch, which no child has
    proc = mp.Process(target=worker, args=(rb, *others))
    proc.start()
    proc.join()
    assert proc.exitcode == 0
    # the replay buffer now has a length of 20, since the worker updated it
    assert len(rb) == 20
    assert (rb["_data", "a"][:10] == 0).all()  # data from main process
    assert (rb["_data", "a"][10:20] == 1).all()  # data from remote process
    assert all(len(other) == 10 and (other[:] == batch).all() for other in others)

    if sys.argv[1] == "spawn":
        print("no row lost")
        sys.exit()
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000))
    rb.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    rb.empty()
    procs = [mp.Process(target=many, args=(rb, number)) for number in range(2)]
    for proc in procs:
        proc.start()
    for proc in procs:
        proc.join()
    assert len(rb) == 1000
    assert torch.equal(rb["a"].sort().values, torch.arange(500.0).repeat_interleave(2))
    print("no row lost")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_references_example_and_two_writers(method: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    run = [sys.executable, str(script), method]
    found = interpreters.run(run, env={"PYTHONPATH": str(Path("src").absolute())})
    assert found.returncode == 0 and found.stdout.strip() == "no row lost", found.stderr


def write(buffer: ReplayBuffer, number: int, count: int, enough: Any = None) -> None:
    """Rows of one value, each of two columns: ``3 * count``, and more until ``enough`` is set."""
    written = 0
    while written < count or not (enough is None or enough.is_set()):
        value = torch.full((3,), number * 10**9 + written)
        buffer.extend(TensorDict({"wide": value[:, None].expand(-1, 500).contiguous(), "n": value}, [3]))
        written += 1


def test_readers_see_whole_rows_of_other_processes() -> None:
    """Two processes write into a small ring while a third samples: no row is half old and half new."""
    buffer = shared(31)
    write(buffer, 0, 20)
    context = multiprocessing.get_context("fork")
    enough = context.Event()
    writers = [context.Process(target=write, args=(buffer, number, 700, enough)) for number in (1, 2)]
    for process in writers:
        process.start()
    mixed, seen = 0, set[int]()
    while any(process.is_alive() for process in writers):
        for rows in (buffer.sample(), buffer[:]):
            mixed += int((rows["wide"] != rows["n"][:, None]).sum())
        seen.update(rows["n"].tolist())
        if len(seen) > 50:  # they did see them come
            enough.set()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    assert not mixed
    assert buffer.stats()["rows_written"] >= 3 * 1420 and enough.is_set()


def test_counters_are_wide() -> None:
    buffer = shared(8)
    buffer.extend(tensordict(0.0, 3))
    buffer.ring._state["head"] = buffer.ring._state["written"] = 1 << 40
    in_child(buffer.extend, tensordict(1.0, 3))
    assert buffer.stats()["rows_written"] == (1 << 40) + 3 and buffer["a"].tolist() == [1, 1, 1]


def test_copies_by_pickle_share_the_rows() -> None:
    buffer = shared(12)
    buffer.extend(tensordict(0.0))
    other = pickle.loads(pickle.dumps(buffer))
    other.extend(tensordict(1.0, 4))
    buffer.extend(tensordict(2.0, 1))
    assert buffer["a"].tolist() == other["a"].tolist() == [1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    other[0] = TensorDict({"a": torch.tensor(5.0)})
    assert buffer["a"][0] == 5
    other.empty()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample()
    buffer.extend(tensordict(3.0, 2))
    assert other["a"].tolist() == [3, 3]
    threads = [
        threading.Thread(target=lambda b=b: [b.extend(tensordict(4.0, 1)) for _ in range(50)])
        for b in (buffer, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.stats()["rows_written"] == buffer.stats()["rows_written"] == 12 * 2 + 2 + 100


def test_a_copy_or_a_child_never_removes_the_files() -> None:
    buffer = shared()
    buffer.extend(tensordict(0.0))
    folder = buffer.storage.folder
    assert isinstance(buffer.storage, LazyMemmapStorage) and folder is not None
    other = pickle.loads(pickle.dumps(buffer))
    del other
    assert folder.exists()

    def drop() -> None:
        nonlocal buffer
        del buffer

    in_child(drop)
    child = os.fork()
    if not child:  # ends as a script does, not as a worker does
        try:
            sys.exit(0)
        finally:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
    os.waitpid(child, 0)
    assert folder.exists() and buffer["a"].tolist() == [0] * 10


def test_a_lock_goes_back_when_its_holder_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    lock = FileLock(lambda: path)

    def die() -> None:
        lock.__enter__()
        os._exit(0)

    in_child(die)
    with lock:
        pass
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    path.unlink()
    with (
        pytest.raises(
            FileNotFoundError, match="lock is gone: the process that created the buffer has deleted it"
        ),
        lock,
    ):
        pass
    path.touch()
    with lock:
        pass


def test_a_process_forked_while_the_lock_is_held_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    lock, free = FileLock(lambda: path), multiprocessing.get_context("fork").Event()
    with lock:
        child = multiprocessing.get_context("fork").Process(target=free.wait, args=(60,))
        child.start()
    with FileLock(lambda: path):  # while the child lives, with a copy of the descriptor
        free.set()
    child.join()


# -- what cannot be shared says so ---------------------------------------------------------------------------------


def trajectories(count: int = 10) -> TensorDict:
    done = torch.zeros(count, dtype=torch.bool)
    x = torch.arange(count)
    return TensorDict({"x": x, "next": {"x": x + 1, "done": done}}, [count])


@pytest.mark.parametrize(
    ("sampler", "compact", "reason"),
    [
        (SliceSampler(slice_len=2), False, "a trajectory index"),
        (RandomSampler(), True, "a trajectory index"),
        (SamplerWithoutReplacement(), False, "a SamplerWithoutReplacement"),
        (PrioritizedSampler(20, 0.6, 0.4), False, "a PrioritizedSampler"),
    ],
)
def test_what_only_one_process_knows_stays_there(sampler: Any, compact: bool, reason: str) -> None:
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(20, compact_obs=compact), sampler=copy.deepcopy(sampler), batch_size=4
    )
    buffer.extend(trajectories())
    text = f"the buffer has {reason}, which other processes cannot see: pass state_dict"
    with pytest.raises(RuntimeError, match=text):
        pickle.dumps(buffer)
    process = mp.get_context("spawn").Process(target=len, args=(buffer,))
    with pytest.raises(RuntimeError, match=text):
        process.start()

    def refused() -> None:
        calls = [
            lambda: buffer.extend(trajectories()),
            lambda: buffer.sample(),
            lambda: buffer[0],
            lambda: buffer.__setitem__(0, trajectories()[0]),
            lambda: buffer.empty(),
            lambda: buffer.state_dict(),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=text):
                call()

    in_child(refused)
    buffer.extend(trajectories())
    assert len(buffer) == 20 and len(buffer.sample()) == 4


def test_a_buffer_without_files_yet_says_what_to_do() -> None:
    buffer = shared()
    text = "has no files yet, so other processes would make their own: extend the buffer once"
    with pytest.raises(RuntimeError, match=text):
        pickle.dumps(buffer)

    def refused() -> None:
        with pytest.raises(RuntimeError, match=text):
            buffer.extend(tensordict(0.0))

    in_child(refused)


def test_tensors_of_the_callers_that_are_shared_are_not_written_by_two() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(4.0).share_memory_()), batch_size=2)

    def refused() -> None:
        with pytest.raises(RuntimeError, match=r"tensors are shared.*use LazyMemmapStorage"):
            buffer.add(torch.tensor(9.0))

    in_child(refused)
    buffer.add(torch.tensor(7.0))
    assert buffer[:].tolist() == [7, 1, 2, 3]


# -- buffers in memory are copied --------------------------------------------------------------------------------


def change(buffer: ReplayBuffer, answers: Any) -> None:
    """Writes are refused, reads are not; a copy belongs to the process that makes it."""
    batch: Any = trajectories() if not isinstance(buffer.storage, ListStorage) else [1]
    writes: list[Any] = [
        lambda: buffer.extend(batch),
        lambda: buffer.add(batch[0]),
        lambda: buffer.__setitem__(0, batch[0]),
        lambda: buffer.update_priority(0, 1.0),
        buffer.empty,
    ]
    for write in [*writes, writes[0]]:  # the first one is not the only one
        text = (
            rf"belongs to process {os.getppid()}.*pass buffer.handle\(\).*LazyMemmapStorage with shared=True"
        )
        with pytest.raises(RuntimeError, match=text):
            write()
    sample, own = buffer.sample(), copy.deepcopy(buffer)
    own.extend(batch)
    answers.put((len(own), len(sample)))


def buffers_in_memory() -> list[ReplayBuffer]:
    made = [
        ReplayBuffer(storage=LazyTensorStorage(40), batch_size=4),
        ReplayBuffer(
            storage=LazyTensorStorage(40, compact_obs=True), sampler=SliceSampler(slice_len=2), batch_size=4
        ),
        ReplayBuffer(storage=TensorStorage(trajectories(20)), batch_size=4, prefetch=2),
        ReplayBuffer(storage=ListStorage(40), batch_size=4),
    ]
    for buffer in made:
        buffer.extend(trajectories() if not isinstance(buffer.storage, ListStorage) else [0] * 10)
        buffer.sample()  # starts the threads of prefetch, which no child has
    return made


def rows_of(buffer: ReplayBuffer) -> Any:
    rows = buffer[:]
    return rows if isinstance(rows, list) else rows["x"].tolist()


def test_buffers_in_memory_are_copied_by_a_fork() -> None:
    context = mp.get_context("fork")
    for buffer in buffers_in_memory():
        before, rows = len(buffer), rows_of(buffer)
        answers = context.SimpleQueue()
        process = context.Process(target=change, args=(buffer, answers))
        process.start()
        grown = {TensorStorage: 0, ListStorage: 1}.get(type(buffer.storage), 10)
        assert answers.get() == (before + grown, 4)
        process.join(600)
        assert len(buffer) == before and rows_of(buffer) == rows


def test_a_queue_copies_too() -> None:
    buffer = buffers_in_memory()[0]
    queue = mp.get_context("fork").SimpleQueue()
    queue.put(buffer)
    other = queue.get()
    other[:] = TensorDict({"x": torch.arange(100, 110)}, [10])
    assert buffer["x"].tolist() == list(range(10)) and other["x"].tolist() == list(range(100, 110))
    assert not buffer.storage.columns["x"].data.is_shared()

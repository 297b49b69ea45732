"""Work shared among threads gives what one thread gives, bit by bit."""

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flatroll.kernels import threads
from flatroll.kernels.rows import gather
from flatroll.kernels.threads import run_blocks

Shared = list[tuple[int, int]]  # blocks and threads of each call that was shared


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """Some bytes are worth a thread."""
    seen: Shared = []

    def noted(run: Any, bounds: Sequence[int], count: int) -> list[Any]:
        assert bounds[0] == 0 and all(first < stop for first, stop in pairwise(bounds))
        seen.append((len(bounds) - 1, count))
        return run_blocks(run, bounds, count)

    monkeypatch.setattr(gather, "run_blocks", noted)
    monkeypatch.setattr(gather, "HUGE_FROM", 0)
    monkeypatch.setattr(gather, "_THREAD_BYTES", 64)
    yield seen


def use(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def test_taken_rows_are_those_of_one_thread(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [torch.randn(500, 3), torch.arange(500), torch.rand(500) < 0.5, torch.zeros(500, 0)]
    block = gather.HostBlock(columns)
    slots = torch.randint(500, (800,))
    for count, blocks in ((1, 1), (2, 8), (3, 12)):
        use(monkeypatch, count)
        taken = block.take(slots)
        assert all(torch.equal(rows, column[slots]) for rows, column in zip(taken, columns, strict=True))
        assert [rows.stride() for rows in taken] == [column[slots].stride() for column in columns]
        wrong = slots.clone()
        wrong[[300, 700]] = torch.tensor([-7, 500])
        with pytest.raises(IndexError, match="slot -7 is out of range: there are 500 slots"):
            block.take(wrong)
        assert shared == [(blocks, count)] * 2
        shared.clear()


def test_torch_copies_wide_rows_of_large_samples(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = gather.HostColumns({"x": torch.randn(20, 2), "image": torch.randn(20, 32, 32)})
    slots = torch.randint(20, (50,))
    for count, names in ((1, ["x", "image"]), (2, ["x"])):
        use(monkeypatch, count)
        assert list(columns.take(slots)) == names
        assert torch.equal(columns.take(slots)["x"], columns.columns["x"][slots])
    assert columns.take(slots, ["image"]) == {}


def columns_and_slots() -> tuple[gather.HostBlock, Tensor, list[Tensor]]:
    """Columns, slots and the rows that one thread takes."""
    columns = [torch.randn(500, 3), torch.arange(500)]
    slots = torch.randint(500, (1000,))
    return gather.HostBlock(columns), slots, [column[slots] for column in columns]


def test_a_forked_child_shares_too(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    block, slots, expected = columns_and_slots()
    use(monkeypatch, 3)
    assert all(map(torch.equal, block.take(slots), expected))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a thread may still be ending
        child = os.fork()
    if not child:
        good = all(map(torch.equal, block.take(slots), expected)) and len(shared) == 2
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_several_threads_share_at_once(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    block, slots, expected = columns_and_slots()
    use(monkeypatch, 3)
    results: list[list[Tensor]] = []
    callers = [
        threading.Thread(target=lambda: results.extend(block.take(slots) for _ in range(5))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 20 and len(shared) == 20
    assert all(all(map(torch.equal, taken, expected)) for taken in results)


def test_blocks_run_in_other_threads_and_keep_their_order() -> None:
    together = threading.Barrier(3)  # three blocks wait for one another, so three threads run them
    assert run_blocks(lambda first, stop: (together.wait(600), first, stop)[1:], [0, 2, 5, 9], 3) == [
        (0, 2),
        (2, 5),
        (5, 9),
    ]
    caller = threading.get_ident()
    assert run_blocks(lambda first, stop: threading.get_ident(), [0, 1, 2], 1) == [caller] * 2


def test_the_first_error_is_raised_once_all_have_ended() -> None:
    ended = []

    def run(first: int, stop: int) -> None:
        ended.append(first)
        if first:
            raise ValueError(f"block {first}")

    for count in (1, 2, 3):
        with pytest.raises(ValueError, match="block 1"):
            run_blocks(run, range(6), count)
        assert sorted(ended) == list(range(5))
        ended.clear()


def test_an_interrupted_call_ends() -> None:
    caller, together = threading.get_ident(), threading.Barrier(2)

    def run(first: int, stop: int) -> None:
        if first < 2:  # each thread has one of these blocks
            together.wait(600)
        if threading.get_ident() == caller:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_blocks(run, range(100), 2)


def test_one_thread_does_it_all_where_no_other_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start_new_thread", refuse)
    assert run_blocks(lambda first, stop: stop - first, [0, 2, 5], 4) == [2, 3]

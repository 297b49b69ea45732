"""Work shared among threads gives what one thread gives, bit by bit."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flatroll.kernels import residual_scan, return_scan, scan, segmented_scan, threads, vtrace_scan
from flatroll.kernels.rows import gather
from flatroll.kernels.threads import run_blocks

Calls = list[Callable[[], Tensor | tuple[Tensor, Tensor]]]
Shared = list[tuple[int, int]]  # blocks and threads of each call that was shared


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """A few rows are worth a thread."""
    seen: Shared = []

    def noted(run: Any, bounds: Sequence[int], count: int) -> list[Any]:
        assert bounds[0] == 0 and all(first < stop for first, stop in pairwise(bounds))
        seen.append((len(bounds) - 1, count))
        return run_blocks(run, bounds, count)

    for module in (scan, gather):
        monkeypatch.setattr(module, "run_blocks", noted)
    monkeypatch.setattr(scan, "_THREAD_NUMBERS", 64)
    monkeypatch.setattr(gather, "_MOST", 0)
    monkeypatch.setattr(gather, "_THREAD_BYTES", 64)
    yield seen


def use(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def scans(rows: int, ends: Tensor, dtype: torch.dtype = torch.float32) -> Calls:
    """Calls of each scan over columns with NaN and inf in them."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(6, rows, generator=generator, dtype=dtype)
    numbers[:, torch.rand(rows, generator=generator) < 0.02] = torch.nan
    numbers[:, torch.rand(rows, generator=generator) < 0.02] = torch.inf
    numbers[:, torch.rand(rows, generator=generator) < 0.02] = 0.0
    b, reward, value, next_value, rho, c = numbers
    terminated = ends & (torch.rand(rows, generator=generator) < 0.5)
    after = (reward, value, next_value, terminated, ends)
    wide = b.view(-1, 1) * torch.randn(5, generator=generator, dtype=dtype)
    return [
        lambda: segmented_scan(rho, b, ends),
        lambda: segmented_scan(0.9, wide, ends),
        lambda: residual_scan(0.99, c, *after),
        lambda: return_scan(0.99, 0.95, reward, next_value, terminated, ends),
        lambda: vtrace_scan(0.99, rho, c, *after),
    ]


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether tensors are equal bit by bit, NaN too."""

    def words(x: Tensor) -> Tensor:
        return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])

    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(words(x), words(y))
        for one, other in pairs
        for x, y in zip(*(side if isinstance(side, tuple) else (side,) for side in (one, other)), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("share", [0.003, 0.05, 0.3, 1.0])
def test_scans_in_blocks_are_those_of_one_thread(
    share: float, dtype: torch.dtype, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        rows = 1000 + 77 * seed
        ends = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < share
        calls = scans(rows, ends, dtype)
        use(monkeypatch, 1)
        expected = [call() for call in calls]
        assert not shared
        for count in (2, 3):
            use(monkeypatch, count)
            assert same([call() for call in calls], expected)
            assert [used for _, used in shared] == [count] * len(calls)
            assert all(1 <= blocks <= 4 * count for blocks, _ in shared)
            if share >= 0.05:
                assert min(shared)[0] > count
            shared.clear()


def test_a_run_that_cannot_be_split_stays_whole(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    last, first, none = (torch.zeros(1000, dtype=torch.bool) for _ in range(3))
    last[-1] = first[0] = True
    middle = none.clone()
    middle[[200, 201, 900]] = True
    for ends, blocks in ((none, 1), (last, 1), (first, 1), (middle, 3)):
        calls = scans(1000, ends)
        use(monkeypatch, 1)
        expected = [call() for call in calls]
        use(monkeypatch, 2)
        assert same([call() for call in calls], expected)
        assert {count for count, _ in shared} == {blocks}
        shared.clear()


def test_few_rows_are_not_shared(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 3)
    for rows in (0, 1, 2, 25):
        for call in scans(rows, torch.ones(rows, dtype=torch.bool)):
            call()
    assert not shared
    monkeypatch.undo()
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(1) or 2)
    residual_scan(0.9, 0.9, *torch.randn(3, 100_000), *(torch.rand(2, 100_000) < 0.1))
    assert not asked


def test_taken_rows_are_those_of_one_thread(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [torch.randn(500, 3), torch.arange(500), torch.rand(500) < 0.5, torch.zeros(500, 0)]
    block = gather.HostBlock(columns)
    slots = (torch.randint(480, (40, 1)) + torch.arange(20)).flatten()
    follow = slots + 1
    follow[19::20] = -1
    for count, blocks in ((1, []), (2, [(8, 2)] * 2), (3, [(12, 3)] * 2)):
        use(monkeypatch, count)
        taken = block.take(slots)
        later = block.take(slots, follow, taken)
        assert all(torch.equal(rows, column[slots]) for rows, column in zip(taken, columns, strict=True))
        assert all(
            torch.equal(rows, column[follow.clamp(min=0)])
            for rows, column in zip(later, columns, strict=True)
        )
        assert [rows.stride() for rows in taken] == [column[slots].stride() for column in columns]
        assert shared == blocks
        shared.clear()
        slots[[300, 700]] = torch.tensor([-7, 500])
        with pytest.raises(IndexError, match="slot -7 is out of range"):
            block.take(slots)
        slots[[300, 700]] = 0
        follow = slots + 1
        shared.clear()


def test_torch_copies_wide_rows_of_large_samples(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = gather.HostColumns({"x": torch.randn(20, 2), "image": torch.randn(20, 32, 32)})
    slots = torch.randint(20, (50,))
    for count, names in ((1, ["x", "image"]), (2, ["x"])):
        use(monkeypatch, count)
        assert list(columns.take(slots)) == names
        assert torch.equal(columns.take(slots)["x"], columns.columns["x"][slots])
    assert columns.take(slots, ["image"]) == {}


def test_a_forked_child_shares_too(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = scans(1000, torch.rand(1000) < 0.05)
    use(monkeypatch, 1)
    expected = [call() for call in calls]
    use(monkeypatch, 3)
    assert same([call() for call in calls], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a thread may still be ending
        child = os.fork()
    if not child:
        shared.clear()
        good = same([call() for call in calls], expected) and len(shared) == len(calls)
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_several_threads_share_at_once(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = scans(1000, torch.rand(1000) < 0.05)
    use(monkeypatch, 1)
    expected = [call() for call in calls]
    use(monkeypatch, 3)
    results: list[list[Any]] = []
    callers = [
        threading.Thread(target=lambda: results.extend([call() for call in calls] for _ in range(5)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 20 and all(same(result, expected) for result in results)


def test_blocks_run_in_other_threads_and_keep_their_order() -> None:
    together = threading.Barrier(3)  # three blocks wait for one another, so three threads run them
    assert run_blocks(lambda first, stop: (together.wait(30), first, stop)[1:], [0, 2, 5, 9], 3) == [
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
    caller, begun = threading.get_ident(), threading.Event()

    def run(first: int, stop: int) -> None:
        if threading.get_ident() == caller:
            begun.wait(30)
            raise KeyboardInterrupt
        begun.set()

    with pytest.raises(KeyboardInterrupt):
        run_blocks(run, range(100), 2)


def test_one_thread_does_it_all_where_no_other_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start_new_thread", refuse)
    assert run_blocks(lambda first, stop: stop - first, [0, 2, 5], 4) == [2, 3]

"""Slices that begin at marked rows only, as a collector with ``state_stride`` marks them."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from flatroll.layout.keys import HAS_STATE


def rows(traj: int, first: int, count: int, marked: Any, length: int = 10_000) -> TensorDict:
    """Rows ``first ...`` of a trajectory, marked where ``marked(step)``; it ends after ``length`` rows."""
    step = torch.arange(first, first + count)
    done = (step == length - 1)[:, None]
    return TensorDict(
        {
            "step": step,
            "is_init": (step == 0)[:, None],
            "collector": {
                "traj_ids": torch.full((count,), traj),
                "has_state": torch.tensor([marked(int(s)) for s in step], dtype=torch.bool),
            },
            "next": {"done": done, "terminated": done, "truncated": torch.zeros_like(done)},
        },
        [count],
    )


def slices(sample: TensorDict) -> list[TensorDict]:
    """The sample cut at the slices' first rows; each is checked to be consecutive rows of one trajectory."""
    firsts = [i for i in range(len(sample)) if sample["is_init"][i]]
    cut = [sample[a:b] for a, b in zip(firsts, [*firsts[1:], len(sample)], strict=True)]
    for piece in cut:
        assert (piece["step"].diff() == 1).all()
        assert len(piece["collector", "traj_ids"].unique()) == 1
    return cut


@examples(40, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    windows=st.lists(st.integers(1, 6), min_size=3, max_size=8),
    stride=st.integers(1, 5),
    length=st.integers(1, 6),
    capacity=st.integers(9, 40),
    by=st.sampled_from(["trajectory", "start"]),
    strict=st.booleans(),
)
def test_any_windows_in_a_ring_that_wraps(
    lengths: list[int], windows: list[int], stride: int, length: int, capacity: int, by: Any, strict: bool
) -> None:
    """Two interleaved writers; windows cut trajectories, and their first rows are marked too."""
    sampler = SliceSampler(slice_len=length, by=by, strict_length=strict, fill=False)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, generator=torch.Generator().manual_seed(0)
    )
    at = [[0, 0], [0, 0]]  # of each writer: trajectory, step
    stored: list[tuple[int, int, bool]] = []  # trajectory, step, marked
    for number, window in enumerate(windows * 2):
        writer = number % 2
        left = window
        while left:
            traj, step = at[writer]
            whole = lengths[traj % len(lengths)]
            count = min(left, whole - step)
            first, wid = step, traj * 2 + writer
            batch = rows(wid, step, count, lambda s, f=first: s % stride == 0 or s == f, whole)
            buffer.extend(batch)
            stored += zip([wid] * count, batch["step"].tolist(), batch[HAS_STATE].tolist(), strict=True)
            at[writer] = [traj + 1, 0] if step + count == whole else [traj, step + count]
            left -= count
        check(buffer, stored[-capacity:], length, strict)


def check(buffer: Any, live: list[tuple[int, int, bool]], length: int, strict: bool) -> None:
    chains: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for traj, step, marked in live:
        chains[traj].append((step, marked))
    possible = set()
    for traj, own in chains.items():
        last = len(own) - length
        full = [i for i, (_, marked) in enumerate(own) if marked and i <= last]
        short = [] if strict else [i for i, (_, marked) in enumerate(own) if marked and i >= max(last, 0)][:1]
        if not strict and not full and not short:
            short = [i for i, (_, marked) in enumerate(own) if marked][-1:]
        possible |= {(traj, own[i][0], min(length, len(own) - i)) for i in {*full, *short}}
    if not possible:
        with pytest.raises(RuntimeError, match=r"no stored (row|trajectory)"):
            buffer.sample(8 * length)
        return
    drawn = slices(buffer.sample(8 * length))
    assert len(drawn) == 8
    for piece in drawn:
        assert piece[HAS_STATE][0]
        first = (int(piece["collector", "traj_ids"][0]), int(piece["step"][0]), len(piece))
        assert first in possible


def test_every_start_comes_as_often_as_there_are_rows_to_the_next_one() -> None:
    """100 rows, marks at 0, 16, ..., 96, slices of 32: to row 99 the slice from 80 is needed, of 20 rows."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=32),
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(rows(0, 0, 100, lambda s: s % 16 == 0))
    drawn = slices(buffer.sample(32 * 6000))
    starts = torch.tensor([int(piece["step"][0]) for piece in drawn])
    counts = starts.bincount(minlength=100)
    assert counts.nonzero().flatten().tolist() == [0, 16, 32, 48, 64, 80]
    assert ((counts[::16][:6] - 1000).abs() < 4.5 * (6000 * 5 / 36) ** 0.5).all()
    assert {len(p) for p in drawn if p["step"][0] == 80} == {20}
    strict = ReplayBuffer(
        storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=32, strict_length=True)
    )
    strict.extend(rows(0, 0, 100, lambda s: s % 16 == 0))
    assert {int(p["step"][0]) for p in slices(strict.sample(32 * 200))} == {0, 16, 32, 48, 64}


def test_a_trajectory_that_has_lost_its_marks_gives_way_to_others() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=4))
    buffer.extend(rows(0, 0, 9, lambda s: s == 0, 9))
    buffer.extend(rows(1, 0, 5, lambda s: s == 0, 5))
    for piece in slices(buffer.sample(40)):
        assert piece["step"].tolist() == [0, 1, 2, 3] and piece["collector", "traj_ids"][0] == 1
    buffer.extend(rows(2, 0, 10, lambda s: False))
    with pytest.raises(RuntimeError, match="no stored row at which a slice of 4 rows could start is marked"):
        buffer.sample(8)


@pytest.mark.parametrize("storage", ["tensor", "memmap", "compact"])
def test_marks_live_with_the_rows(storage: str, tmp_path: Any) -> None:
    """In files, in a state that is loaded, and padded."""

    def make() -> Any:
        kinds = {
            "tensor": lambda: LazyTensorStorage(30),
            "compact": lambda: LazyTensorStorage(30, compact_obs=True),
            "memmap": lambda: LazyMemmapStorage(30),
        }
        return ReplayBuffer(storage=kinds[storage](), sampler=SliceSampler(slice_len=5, pad_output=True))

    buffer = make()
    batch = rows(0, 0, 20, lambda s: s % 4 == 0)
    if storage == "compact":
        batch["next", "step"] = batch["step"] + 1
    buffer.extend(batch)
    again = make()
    again.load_state_dict(buffer.state_dict())
    for one in (buffer, again):
        sample = one.sample(50)
        assert len(sample) == 50
        assert (sample["step"].view(10, 5)[:, 0] % 4 == 0).all()


def test_a_key_of_ones_own_and_none() -> None:
    batch = rows(0, 0, 20, lambda s: s % 4 == 0)
    batch["begin"] = (batch["step"] == 7)[:, None]
    own = ReplayBuffer(storage=LazyTensorStorage(30), sampler=SliceSampler(slice_len=5, start_key="begin"))
    own.extend(batch)
    assert {int(p["step"][0]) for p in slices(own.sample(100))} == {7}
    anywhere = ReplayBuffer(storage=LazyTensorStorage(30), sampler=SliceSampler(slice_len=5, start_key=None))
    anywhere.extend(batch)
    assert len({int(p["step"][0]) for p in slices(anywhere.sample(1000))}) == 16


def test_errors_say_what_is_wrong() -> None:
    batch = rows(0, 0, 20, lambda s: s % 4 == 0)

    def fill(sampler: Any, data: TensorDict = batch) -> None:
        ReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler).extend(data)

    with pytest.raises(KeyError, match="batch has no entry 'begin'"):
        fill(SliceSampler(slice_len=5, start_key="begin"))
    with pytest.raises(TypeError, match=r"has_state'.*must be bool, got torch.int64"):
        fill(SliceSampler(slice_len=5), batch.clone().set(HAS_STATE, batch["step"]))
    with pytest.raises(ValueError, match="span allows other start rows"):
        fill(SliceSampler(slice_len=5, span=True))
    with pytest.raises(
        ValueError, match=r"SliceSamplerWithoutReplacement .*are cut once for the whole pass.*exclude"
    ):
        fill(SliceSamplerWithoutReplacement(slice_len=5))
    with pytest.raises(ValueError, match=r"PrioritizedSliceSampler .*by the priority of their first row"):
        fill(PrioritizedSliceSampler(30, 1.0, 1.0, slice_len=5))
    fill(SliceSamplerWithoutReplacement(slice_len=5), batch.exclude(HAS_STATE))

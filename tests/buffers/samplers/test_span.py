"""Slices that reach beyond the ends of their trajectory: which there are, how often, and how long."""

from collections import Counter
from typing import Any

import pytest
import torch

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler, TrajectoryIndex
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.layout import run_ends

Place = tuple[int, int]  # first slot, rows


def places(chain: list[int], length: int, span: tuple[int, int], strict: bool) -> list[Place]:
    """Each place of a slice of ``length`` rows, by what of it lies within the trajectory."""
    rows, (early, late) = len(chain), span
    if rows < length and (strict or rows - length + early + late < 0):
        return [] if strict else [(chain[0], rows)]
    found = []
    for start in range(-early, rows - length + late + 1):
        first, stop = max(start, 0), min(start + length, rows)
        found.append((chain[first], stop - first))
    return found


def rates(model: Any, length: int, span: tuple[int, int], by: str, strict: bool) -> dict[Place, float]:
    each = [places(chain, length, span, strict) for chain in model.trajectories().values()]
    each = [found for found in each if found]
    expected: Counter[Place] = Counter()
    total = sum(map(len, each))
    for found in each:
        for place in found:
            expected[place] += 1 / total if by == "start" else 1 / len(each) / len(found)  # type: ignore[assignment]
    return dict(expected)


@pytest.fixture
def wrapped(world: Any) -> tuple[TrajectoryIndex, Any]:
    """A ring of 97 rows, wrapped several times by three interleaved writers."""
    index, model = TrajectoryIndex(97), world.Model(97)
    writers = world.writers(3, seed=3, longest=25)
    for i in range(60):
        steps = world.windows(writers, [(i % 3, i % 9 + 1), ((i + 1) % 3, 1)])
        index.write(Fragments.read(world.to_batch(steps), BoundaryKeys()))
        model.extend(steps)
    return index, model


@pytest.mark.parametrize("by", ["trajectory", "start"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("length", "span"), [(2, (1, 1)), (5, (0, 1)), (7, (3, 0)), (9, (8, 8)), (13, (2, 12))]
)
def test_every_place_is_drawn_at_its_rate(
    wrapped: tuple[TrajectoryIndex, Any],
    by: Any,
    strict: bool,
    length: int,
    span: tuple[int, int],
    generator: torch.Generator,
) -> None:
    index, model = wrapped
    expected = rates(model, length, span, by, strict)
    count = 20_000
    draw = index.draw(count, length, by=by, strict=strict, span=span, generator=generator)
    rows = draw.lasts - draw.firsts + 1
    drawn = Counter(zip(draw.slots[draw.firsts].tolist(), rows.tolist(), strict=True))
    assert set(drawn) <= set(expected)
    chi2 = sum((drawn[place] - count * p) ** 2 / (count * p) for place, p in expected.items())
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5 + 8  # about one in 10⁴
    following = model.next_slot()
    inner = torch.ones(len(draw.slots), dtype=torch.bool)
    inner[draw.lasts] = False
    for at in inner.nonzero()[:500, 0].tolist():
        assert following[int(draw.slots[at])] == int(draw.slots[at + 1])


def test_all_rows_come_equally_often(
    wrapped: tuple[TrajectoryIndex, Any], generator: torch.Generator
) -> None:
    """What a span is for: without one the rows at both ends of a trajectory come less often."""
    index, model = wrapped
    count, length = 40_000, 6
    shares = {}
    for span in ((0, 0), (5, 5)):
        draw = index.draw(count, length, by="start", span=span, generator=generator)
        drawn = torch.bincount(draw.slots, minlength=97)[sorted(model.slots())]
        shares[span] = drawn / drawn.float().mean()
    assert shares[0, 0].min() < 0.5
    assert (shares[5, 5] - 1).abs().max() < 0.12  # 5 standard deviations


def filled(world: Any, lengths: list[int], length: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=length, fill=False, **options),
        batch_size=40 * length,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(world.to_batch([s for e, n in enumerate(lengths) for s in world.episode(0, e, n)]))
    return buffer


@pytest.mark.parametrize(
    ("span", "shortest", "at_start", "at_end"),
    [
        (False, 5, False, False),
        (0, 5, False, False),
        (True, 1, True, True),
        (2, 3, True, True),
        ((0, 1), 4, False, True),
        ((False, 4), 1, False, True),
        ((True, False), 1, True, False),
        ((1, 3), 2, True, True),
    ],
)
def test_samples_have_all_slices_of_the_lengths_that_the_span_says(
    world: Any, span: Any, shortest: int, at_start: bool, at_end: bool
) -> None:
    """No slice is empty, and the right span is the right one."""
    buffer = filled(world, [30, 12, 40], 5, span=span)
    seen = set()
    for _ in range(25):
        sample = buffer.sample()
        lasts = run_ends(sample).nonzero()[:, 0]
        firsts = torch.cat([torch.tensor([0]), lasts[:-1] + 1])
        assert len(lasts) == 40  # none is missing
        assert sample["is_init"][:, 0].nonzero()[:, 0].tolist() == firsts.tolist()
        assert sample["next", "done"][:, 0].nonzero()[:, 0].tolist() == lasts.tolist()
        traj, step = sample["collector", "traj_ids"], sample["step_count"][:, 0]
        inner = (step[1:] == step[:-1] + 1) & (traj[1:] == traj[:-1])
        inner[lasts[:-1]] = True
        assert bool(inner.all())
        rows = lasts - firsts + 1
        short = rows < 5
        assert bool(((step[firsts] == 0) | sample["next", "truncated"][lasts, 0])[short].all())
        seen |= set(rows.tolist())
        cut_early = short & (step[firsts] == 0)
        cut_late = short & ((step[lasts] + 1)[:, None] == torch.tensor([30, 12, 40])).any(1)
        assert at_start or not (cut_early & ~cut_late).any()
        assert at_end or not (cut_late & ~cut_early).any()
    assert seen == set(range(shortest, 6))


def test_short_trajectories_give_what_they_have(world: Any) -> None:
    for span, lengths in ((False, {3}), (1, {3}), ((0, 8), {2, 3}), (True, {1, 2, 3})):
        buffer = filled(world, [3], 10, span=span)
        sample = buffer.sample()
        assert set(run_ends(sample).nonzero()[:, 0].diff().tolist()) == lengths, span


def test_a_strict_span_leaves_short_trajectories_out(world: Any) -> None:
    sample = filled(world, [4, 20], 5, span=True, strict_length=True).sample()
    assert sample["collector", "traj_ids"].unique().tolist() == [1]
    assert len(sample) < 200


def test_padding_fills_what_the_span_left_out(world: Any) -> None:
    sample = filled(world, [12], 5, span=True, pad_output=True).sample().reshape(40, 5)
    rows = sample["collector", "mask"].sum(1)
    assert set(rows.tolist()) == {1, 2, 3, 4, 5}
    assert torch.equal(sample["is_init"][..., 0].sum(1), torch.ones(40, dtype=torch.int64))


@pytest.mark.parametrize("bad", [-1, 1.5, (1,), (1, 2, 3), "1", (0, -2), None])
def test_a_span_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"span must be a bool, a number of rows or a pair"):
        SliceSampler(slice_len=5, span=bad)


def test_a_span_that_leaves_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="span=5 leaves no row of a slice of 5: use at most 4, or True"):
        SliceSampler(slice_len=5, span=5)
    with pytest.raises(ValueError, match=r"span=\(0, 7\) leaves no row of a slice of 5"):
        SliceSampler(slice_len=5, span=(0, 7))
    sampler = SliceSampler(num_slices=4, span=(0, 7))  # the length is not known yet
    ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=32)
    with pytest.raises(ValueError, match=r"span=\(0, 7\) leaves no row of a slice of 7"):
        ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=28)
    index = TrajectoryIndex(9)
    with pytest.raises(ValueError, match=r"span must be two numbers from 0 to length - 1 = 2, got \(3, 0\)"):
        index.draw(1, 3, span=(3, 0))

"""What the trajectory index says, and how often it draws what."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import TrajectoryIndex
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments

KEYS = BoundaryKeys()


def write(index: TrajectoryIndex, world: Any, model: Any, steps: list[Any]) -> None:
    index.write(Fragments.read(world.to_batch(steps), KEYS))
    model.extend(steps)


@pytest.fixture
def wrapped(world: Any) -> tuple[TrajectoryIndex, Any]:
    """A ring of 97 rows, wrapped several times by three writers with windows of one to nine rows."""
    index, model = TrajectoryIndex(97), world.Model(97)
    writers = world.writers(3, seed=3, longest=30)
    for i in range(60):
        write(index, world, model, world.windows(writers, [(i % 3, i % 9 + 1), ((i + 1) % 3, 1)]))
    return index, model


def expected_rates(model: Any, length: int, by: str, strict: bool) -> dict[int, float]:
    legal = model.starts(length, strict)
    if by == "start":
        return {slot: 1 / len(legal) for slot in legal}
    chains = [[slot for slot in chain if slot in legal] for chain in model.trajectories().values()]
    chains = [chain for chain in chains if chain]
    return {slot: 1 / len(chains) / len(chain) for chain in chains for slot in chain}


@pytest.mark.parametrize("by", ["trajectory", "start"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 13])
def test_every_legal_start_is_drawn_at_its_rate(
    wrapped: tuple[TrajectoryIndex, Any], by: Any, strict: bool, length: int, generator: torch.Generator
) -> None:
    index, model = wrapped
    rates = expected_rates(model, length, by, strict)
    count = 20_000
    draw = index.draw(count, length, by=by, strict=strict, generator=generator)
    drawn = Counter(draw.slots[draw.firsts].tolist())
    assert set(drawn) <= set(rates)
    chi2 = sum((drawn[slot] - count * p) ** 2 / (count * p) for slot, p in rates.items())
    freedom = len(rates) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5 + 8  # about one in 10⁴


def test_what_follows_the_rows_of_slices_is_what_follows_them_alone(
    wrapped: tuple[TrajectoryIndex, Any], generator: torch.Generator
) -> None:
    index, model = wrapped
    draw = index.draw(300, 6, generator=generator, follow=True)
    assert draw.follow is not None
    assert torch.equal(draw.follow.slots, index.follow(draw.slots).slots)
    following = model.next_slot()
    assert draw.follow.slots.tolist() == [following[slot] for slot in draw.slots.tolist()]


def test_rates_stay_right_while_the_ring_turns(world: Any, generator: torch.Generator) -> None:
    """Weights are updated, not rebuilt: one draw after each write, at rates that change."""
    index, model = TrajectoryIndex(40), world.Model(40)
    writers = world.writers(2, seed=5, longest=15)
    score = terms = 0.0
    for i in range(400):
        write(index, world, model, world.windows(writers, [(i % 2, i % 5 + 1)]))
        rates = expected_rates(model, 4, "start", False)
        draw = index.draw(64, 4, by="start", generator=generator)
        drawn = Counter(draw.slots[draw.firsts].tolist())
        assert set(drawn) <= set(rates)
        score += sum((drawn[slot] - 64 * p) ** 2 / (64 * p) for slot, p in rates.items())
        terms += len(rates) - 1
    assert abs(score - terms) < 4 * (2 * terms) ** 0.5


def test_slices_cross_fragments_and_the_end_of_the_ring(world: Any) -> None:
    index, model = TrajectoryIndex(10), world.Model(10)
    a, b = world.episode(0, 0, 8), world.episode(1, 0, 8)
    for i in range(0, 8, 2):
        write(index, world, model, a[i : i + 2] + b[i : i + 2])
    # slots:   0   1   2   3   4   5   6   7   8   9
    # rows:   a5  b4  b5  a6  a7  b6  b7  b3* a4* ...   after 16 rows in a ring of 10
    assert index.find_rows(0).tolist() == [8, 9, 2, 3][-4:]
    assert index.find_rows(1000).tolist() == [6, 7, 0, 1, 4, 5]
    draw = index.draw(50, 4, strict=True)
    for first in draw.firsts.tolist():
        got = draw.slots[first : first + 4].tolist()
        assert got == [8, 9, 2, 3] or got in ([6, 7, 0, 1], [7, 0, 1, 4], [0, 1, 4, 5])


def test_a_lost_row_cuts_the_trajectory(world: Any) -> None:
    steps = world.episode(0, 0, 10)
    index = TrajectoryIndex(20)
    index.write(Fragments.read(world.to_batch(steps[:4]), KEYS))
    index.write(Fragments.read(world.to_batch(steps[5:]), KEYS))  # step 4 never came
    assert (index.trajectories, index.longest) == (2, 5)
    assert index.next_row(torch.tensor([3])).item() == -1


def test_without_step_count_the_id_alone_goes_on(world: Any) -> None:
    steps = world.episode(0, 0, 10)
    index = TrajectoryIndex(20)
    for part in (steps[:4], steps[5:]):
        index.write(Fragments.read(world.to_batch(part, without=["step_count"]), KEYS))
    assert (index.trajectories, index.longest) == (1, 9)


def test_without_ids_the_next_extend_goes_on_unless_done_or_is_init(world: Any) -> None:
    index = TrajectoryIndex(40)
    first, second = world.episode(0, 0, 6), world.episode(0, 1, 4)
    for part in (first[:4], first[4:], second[:2], second[2:], world.episode(0, 2, 3)[:2]):
        index.write(Fragments.read(world.to_batch(part, ids=""), KEYS))
    assert (index.trajectories, index.longest, index.open_trajectories) == (3, 6, 1)
    index.write(
        Fragments.read(world.to_batch(world.episode(0, 3, 3), ids=""), KEYS)
    )  # is_init: the open one is cut
    assert (index.trajectories, index.open_trajectories) == (4, 1)
    assert index.find_rows(0).tolist() == [0, 1, 2, 3, 4, 5]  # numbered as they begin


def test_many_open_trajectories_are_found_again(world: Any) -> None:
    """The id table is rebuilt as it fills; no open trajectory gets lost, ended ones are forgotten."""
    index = TrajectoryIndex(100_000)
    for step in range(3):
        for block in range(0, 2000, 500):
            column = torch.arange(block, block + 500) * 2**33
            done = torch.zeros(500, dtype=torch.bool)
            batch = TensorDict(
                {"collector": {"traj_ids": column}, "next": {"done": done | (step == 2)}}, [500]
            )
            index.write(Fragments.read(batch, KEYS))
    assert (index.trajectories, index.longest, index.open_trajectories) == (2000, 3, 0)
    assert index.starts(3) == 2000


def test_tables_stay_small_when_trajectories_are_whole(world: Any) -> None:
    index, one = TrajectoryIndex(1000), world.to_batch(world.episode(0, 0, 100), without=["collector"])
    for _ in range(200):
        index.write(Fragments.read(one, KEYS))
    assert (index.trajectories, len(index)) == (10, 1000)
    assert index.nbytes < 20_000


def test_a_trajectory_written_in_one_place_is_one_fragment(world: Any) -> None:
    steps = world.episode(0, 0, 60)
    index = TrajectoryIndex(100)
    for i in range(0, 60, 4):
        index.write(Fragments.read(world.to_batch(steps[i : i + 4]), KEYS))
    assert index.fragments == 1


def test_same_seed_same_draws(wrapped: tuple[TrajectoryIndex, Any]) -> None:
    index, _ = wrapped
    first, second = (index.draw(9, 5, generator=torch.Generator().manual_seed(7)).slots for _ in range(2))
    assert torch.equal(first, second)
    torch.manual_seed(3)
    third = index.draw(9, 5).slots
    torch.manual_seed(3)
    assert torch.equal(third, index.draw(9, 5).slots)


def test_an_interrupted_change_leaves_right_weights(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index, model = TrajectoryIndex(30), world.Model(30)
    for e in range(6):
        write(index, world, model, world.episode(0, e, 5))
    assert index.starts(3) == 18

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(index, "_update_weights", interrupt)
        index.claim(12)
    assert index.starts(3) == 9 + 1  # three whole episodes, and three rows of a fourth
    assert index.draw(50, 5).slots.max() < 30


def test_errors_say_what_is_wrong(world: Any) -> None:
    index = TrajectoryIndex(30)
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer: extend it"):
        index.draw(1, 4)
    index.write(Fragments.read(world.to_batch(world.episode(0, 0, 5) + world.episode(0, 1, 7)), KEYS))
    with pytest.raises(
        RuntimeError, match=r"no stored trajectory has 8 consecutive rows, the longest has 7: .*strict"
    ):
        index.draw(1, 8, strict=True)
    with pytest.raises(ValueError, match="by must be 'trajectory' or 'start', got 'row'"):
        index.draw(1, 4, by="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length must be an integer of at least 1, got 0"):
        index.starts(0)
    with pytest.raises(KeyError, match="no row of trajectory 99 is stored"):
        index.find_rows(99)
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1, got 0"):
        TrajectoryIndex(0)


def test_columns_tell_what_their_batch_tells(world: Any) -> None:
    """By key, of other integer types, flat or not, in any layout of memory."""
    steps = [*world.episode(0, 0, 5), *world.episode(0, 1, 3)[:2], *world.episode(3, 0, 4)]
    batch = world.to_batch(steps)
    cuts = torch.arange(len(steps)) == 3
    columns: dict[Any, torch.Tensor] = {key: batch[key] for key in batch.keys(True, True)}
    other = columns | {
        "step_count": batch["step_count"][:, 0].int(),
        ("collector", "traj_ids"): batch["collector", "traj_ids"].to(torch.int16)[:, None],
        "is_init": batch["is_init"].expand(-1, 2)[:, :1],
        ("next", "done"): torch.stack([batch["next", "done"]] * 2)[1],
    }
    expected = Fragments.read(batch, KEYS, cuts)
    assert expected.firsts.tolist() == [0, 4, 5, 7] and expected.joined.tolist() == [
        False,
        True,
        False,
        False,
    ]
    for form in (columns, other):
        for got, wanted in zip(Fragments.read(form, KEYS, cuts), expected, strict=True):
            assert np.array_equal(got, wanted)


def test_wrong_markers_are_named(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 5))
    with pytest.raises(TypeError, match=r"traj_ids.*must be an integer column, got torch.float32"):
        Fragments.read(batch.clone().set(("collector", "traj_ids"), torch.zeros(5)), KEYS)
    with pytest.raises(TypeError, match=r"done.*must be bool, got torch.float32"):
        Fragments.read(batch.clone().set(("next", "done"), torch.zeros(5, 1)), KEYS)
    with pytest.raises(ValueError, match=r"step_count.*one number per row, got 10 for 5 rows"):
        Fragments.read(batch.clone().set("step_count", torch.zeros(5, 2, dtype=torch.int64)), KEYS)
    with pytest.raises(KeyError, match="InitTracker"):
        Fragments.read(TensorDict({"observation": torch.zeros(5)}, [5]), KEYS)

"""Next observations put back into samples of compact batches."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    NextObservationDelta,
    NextStateReconstructor,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.layout import encode_delta


def compact_buffer(
    world: Any, steps: list[Any], sampler: Any, transform: Any, batch_size: int
) -> ReplayBuffer:
    batch = world.to_batch(steps)
    batch, _ = world.compacted(batch, steps)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(len(steps)),
        sampler=sampler,
        transform=transform,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(batch)
    return buffer


def nan_rows(sample: Any) -> list[int]:
    rows: list[int] = sample["next", "observation"].isnan().any(-1).nonzero()[:, 0].tolist()
    return rows


@pytest.mark.parametrize("truncated_key", [("next", "truncated"), None])
def test_adjacent_slices_of_one_trajectory_are_kept_apart(world: Any, truncated_key: Any) -> None:
    """One trajectory of 200 rows, slices of 20: NaN at the end of each slice, the true observation elsewhere."""
    sampler = SliceSampler(slice_len=20, traj_key=("collector", "traj_ids"), truncated_key=truncated_key)
    buffer = compact_buffer(world, world.episode(0, 0, 200), sampler, NextStateReconstructor(), 40)
    for _ in range(20):
        sample = buffer.sample()
        assert nan_rows(sample) == [19, 39]
        inner = [i for i in range(40) if i not in (19, 39)]
        expected = sample["observation"] + torch.tensor([0, 0, 1])
        assert torch.equal(sample["next", "observation"][inner], expected[inner])


def test_slices_across_windows_and_writers_know_their_next_rows(world: Any) -> None:
    steps = [s for pair in zip(world.episode(0, 0, 30), world.episode(1, 0, 30), strict=True) for s in pair]
    buffer = compact_buffer(world, steps, SliceSampler(slice_len=10), NextStateReconstructor(), 30)
    sample = buffer.sample()
    assert nan_rows(sample) == [9, 19, 29]


def test_rows_drawn_one_by_one_have_no_next_row(world: Any) -> None:
    """Two random rows of one trajectory side by side are no transition."""
    buffer = compact_buffer(world, world.episode(0, 0, 50), RandomSampler(), NextStateReconstructor(), 12)
    assert nan_rows(buffer.sample()) == list(range(12))


def test_stored_rows_are_followed_up_to_the_write_head(world: Any) -> None:
    steps = [s for e in range(5) for s in world.episode(0, e, 8, "")]
    batch, _ = world.compacted(world.to_batch(steps, ids=""), steps)
    transform = NextStateReconstructor(strict=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform)
    for part in batch.split(5):
        buffer.extend(part)
    rows = buffer[:]  # the newest row stands in slot 19, the oldest in slot 0
    ended = (rows["step_count"][:, 0] == 7).nonzero()[:, 0].tolist()
    assert nan_rows(rows) == ended
    buffer.extend(batch[:5])  # 5 newest rows in slots 0 to 4, row 5 is the oldest
    assert 4 in nan_rows(buffer[:])


def test_step_count_cuts_where_rows_are_missing(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 10)).exclude(("next", "observation"))
    gap = torch.cat([batch[:3], batch[5:]])
    assert nan_rows(NextStateReconstructor()(gap)) == [7]
    assert nan_rows(NextStateReconstructor(step_count_key="step_count")(gap)) == [2, 7]


def test_the_input_is_left_alone(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 5)).exclude(("next", "observation"))
    keys = set(batch.keys(True, True))
    NextStateReconstructor()(batch)
    assert set(batch.keys(True, True)) == keys


def test_keys_nest_and_one_string_is_one_key(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 4), "dict")
    expected = batch.clone()
    batch = batch.exclude(("next", "eye"), ("next", "body"))
    out = NextStateReconstructor([("body", "leg")])(batch)
    assert torch.equal(out["next", "body", "leg"][:3], expected["next", "body", "leg"][:3])
    assert NextStateReconstructor("eye").keys == ["eye"]
    filled = NextStateReconstructor("eye", fill_value=7)(batch)["next", "eye"]
    assert filled.dtype == torch.uint8 and bool((filled[3] == 7).all())
    assert torch.equal(filled[:3], expected["next", "eye"][:3])


def test_errors_name_what_is_wrong(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 4), "uint8")
    with pytest.raises(
        TypeError, match=r"'observation'\] is torch.uint8, which has no NaN: pass fill_value=0"
    ):
        NextStateReconstructor()(batch)
    with pytest.raises(ValueError, match=r"takes flat batches \[N\], got \[2, 2\]"):
        NextStateReconstructor()(batch.reshape(2, 2))
    with pytest.raises(KeyError, match="TrajId"):
        NextStateReconstructor()(batch.exclude("collector"))
    with pytest.raises(KeyError, match="no entry 'pixels'"):
        NextStateReconstructor("pixels")(batch)
    loose = batch.exclude("collector", ("next", "done"))
    loose["observation"] = loose["observation"].float()
    assert nan_rows(NextStateReconstructor(strict=False)(loose)) == [3]  # is_init alone


def test_deltas_come_back_everywhere(world: Any) -> None:
    """The delta path: finite everywhere, slice ends included."""
    batch = world.to_batch(world.episode(0, 0, 40) + world.episode(0, 1, 40))
    delta = encode_delta(batch["observation"], batch["next", "observation"])
    batch = batch.exclude(("next", "observation")).set(("next", "delta", "observation"), delta)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(80),
        sampler=SliceSampler(slice_len=20),
        transform=NextObservationDelta(in_keys=["observation"]),
        batch_size=40,
    )
    buffer.extend(batch)
    sample = buffer.sample()
    assert ("next", "delta", "observation") not in sample.keys(True, True)
    assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))


def test_transforms_see_the_marks_and_run_in_order(world: Any) -> None:
    seen: list[Any] = []

    class Scale:
        def forward(self, td: Any) -> Any:
            seen.append(td["is_init"].flatten().tolist())
            return td.set("observation", td["observation"] * 2)

        def inv(self, td: Any) -> Any:
            return td.clone(recurse=False).set("observation", td["observation"] / 2)

    def shift(td: TensorDict) -> TensorDict:
        return td.set("observation", td["observation"] + 1)

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3), batch_size=6, transform=Scale()
    )
    assert buffer.append_transform(shift) is buffer
    batch = world.to_batch(world.episode(1, 0, 3))
    buffer.extend(batch)
    sample = buffer.sample()
    assert seen == [[True, False, False] * 2]
    assert torch.equal(sample["observation"], batch["observation"].repeat(2, 1) + 1)
    with pytest.raises(TypeError, match=r"must have forward\(td\) or be a function of td, got int"):
        buffer.append_transform(3)  # type: ignore[arg-type]


def test_a_tuple_of_several_strings_is_ambiguous() -> None:
    """("agents", "obs") may be one nested key or two keys: nothing is guessed."""
    with pytest.raises(
        ValueError, match=r"write \[\('agents', 'obs'\)\] for the nested key, \['agents', 'obs'\]"
    ):
        NextStateReconstructor(("agents", "obs"))
    assert NextStateReconstructor([("agents", "obs")]).keys == [("agents", "obs")]
    assert NextStateReconstructor(["agents", "obs"]).keys == ["agents", "obs"]
    assert NextStateReconstructor(("observation",)).keys == ["observation"]
    assert NextStateReconstructor((("agents", "obs"), "eye")).keys == [("agents", "obs"), "eye"]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_observations_are_filled(world: Any, dtype: torch.dtype) -> None:
    batch = world.to_batch(world.episode(0, 0, 4)).exclude(("next", "observation"))
    batch["observation"] = batch["observation"].to(dtype)
    filled = NextStateReconstructor(fill_value=7)(batch)["next", "observation"]
    assert filled.dtype == dtype and filled[:, 2].tolist() == [1, 2, 3, 7]


@pytest.mark.parametrize("key", ["traj_key", "done_key"])
def test_a_marker_that_is_none_is_not_read(key: str) -> None:
    """The other one alone says where trajectories end; without both a batch is one trajectory."""
    entry = {"traj_key": ("collector", "traj_ids"), "done_key": ("next", "done")}[key]
    done = torch.tensor([False, False, True, False, False])
    batch = TensorDict(
        {"observation": torch.arange(5.0), ("collector", "traj_ids"): torch.tensor([0, 1, 1, 1, 1])}, [5]
    )
    batch["next", "done"] = done
    ends = {"traj_key": [2, 4], "done_key": [0, 4]}[key]
    for given in (batch, batch.exclude(entry)):
        after = NextStateReconstructor(**{key: None})(given)["next", "observation"]  # type: ignore[arg-type]
        assert after.isnan().nonzero().flatten().tolist() == ends
    whole = NextStateReconstructor(traj_key=None, done_key=None)
    assert whole(batch)["next", "observation"].isnan().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize(
    "options", [{"traj_key": None}, {"done_key": None}, {"traj_key": None, "done_key": None}]
)
def test_slices_are_kept_apart_without_markers(world: Any, options: dict[str, None]) -> None:
    buffer = compact_buffer(
        world, world.episode(0, 0, 50), SliceSampler(slice_len=10), NextStateReconstructor(**options), 20
    )
    assert nan_rows(buffer.sample()) == [9, 19]

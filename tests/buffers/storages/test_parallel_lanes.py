"""Storages of several dimensions: steps of parallel lanes."""

import math
from typing import Any

import gymnasium as gym
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)

Lanes = tuple[int, ...]


def steps(lanes: Lanes, first: int, count: int, ids: bool = False, episode: int = 7) -> TensorDict:
    """Steps ``first ...`` of all lanes, ``[*lanes, count]``; the observation is (lane, step), episodes are short."""
    step = torch.arange(first, first + count).expand(*lanes, count)
    lane = torch.arange(math.prod(lanes)).view(*lanes, 1).expand(*lanes, count)
    done = ((step + lane) % episode == episode - 1)[..., None]
    data: dict[str, Any] = {
        "observation": torch.stack([lane, step], -1),
        "next": {
            "observation": torch.stack([lane, step + 1], -1),
            "reward": step[..., None] * 0.5,
            "done": done,
            "truncated": done,
        },
    }
    if ids:
        data["collector"] = {"traj_ids": lane * 1000 + (step + lane) // episode}
    return TensorDict(data, [*lanes, count])


def buffer_of(lanes: Lanes, rows: int = 60, **options: Any) -> ReplayBuffer:
    kind = options.pop("kind", LazyTensorStorage)
    storage = kind(rows, ndim=len(lanes) + 1, compact_obs=options.pop("compact", False))
    return ReplayBuffer(storage=storage, **options)


def test_one_flat_storage_for_two_envs() -> None:
    """The references' example: two envs, steps of both, and slices of each one's trajectories."""
    envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100, ndim=2),
        sampler=SliceSampler(
            num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False
        ),
        batch_size=64,
    )
    obs, _ = envs.reset(seed=0)
    count = torch.zeros(2, dtype=torch.int64)
    traj = torch.arange(2)
    for _ in range(101):
        later, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
        done = torch.from_numpy(terminated | truncated)
        td = TensorDict(
            {
                "observation": torch.from_numpy(obs),
                "step_count": count[:, None],
                "collector": {"traj_ids": traj.clone()},
                "next": {
                    "observation": torch.from_numpy(later),
                    "reward": torch.from_numpy(reward)[:, None],
                    "done": done[:, None],
                    "step_count": count[:, None] + 1,
                },
            },
            [2],
        )
        rb.extend(td.unsqueeze(1))
        obs, count, traj = later, torch.where(done, 0, count + 1), torch.where(done, traj + 2, traj)
    envs.close()
    assert len(rb) == 100, len(rb)
    assert rb[:]["next", "step_count"].squeeze().shape == (50, 2)
    for _ in range(10):
        sample = rb.sample()
        inside = ~sample["is_init"][1:, 0]
        ids = sample["collector", "traj_ids"]
        assert bool((ids[1:] == ids[:-1])[inside].all())
        assert bool((sample["step_count"][1:] == sample["step_count"][:-1] + 1)[inside].all())


@examples(40, derandomize=True)
@given(
    lanes=st.sampled_from([(1,), (2,), (3,), (2, 3), (1, 2, 2)]),
    rows=st.integers(12, 70),
    sizes=st.lists(st.integers(0, 13), min_size=1, max_size=12),
    compact=st.booleans(),
    ids=st.booleans(),
)
def test_lanes_are_rings_side_by_side(
    lanes: Lanes, rows: int, sizes: list[int], compact: bool, ids: bool
) -> None:
    count = math.prod(lanes)
    room = -(-rows // count)  # steps, rounded up
    buffer = buffer_of(lanes, rows, compact=compact, sampler=SliceSampler(slice_len=4), batch_size=40)
    written = 0
    slots: dict[int, int] = {}  # step by place
    at = 0
    for size in sizes:
        places = buffer.extend(steps(lanes, written, size, ids))
        kept = min(size, room)
        expected = [(at + i) % room for i in range(kept)]
        assert places.shape == (kept * count, len(lanes) + 1)
        assert places[:, 0].tolist() == [place for place in expected for _ in range(count)]
        slots.update(zip(expected, range(written + size - kept, written + size), strict=True))
        at, written = (at + kept) % room, written + size
    assert len(buffer) == len(slots) * count
    if not slots:
        return
    whole = buffer[:]
    assert whole.batch_size == (len(slots), *lanes)
    assert whole["observation"][..., 1].flatten(1)[:, 0].tolist() == [slots[place] for place in sorted(slots)]
    assert torch.equal(whole["observation"][0, ..., 0].flatten(), torch.arange(count))
    assert torch.equal(whole["next", "observation"], whole["observation"] + torch.tensor([0, 1]))
    sample, info = buffer.sample(return_info=True)
    assert info["index"].shape == (len(sample), len(lanes) + 1)
    place = tuple(info["index"].unbind(-1))
    assert torch.equal(whole["observation"][place], sample["observation"])
    assert torch.equal(buffer[place]["observation"], sample["observation"])
    obs, inside = sample["observation"], ~sample["is_init"][1:, 0]
    assert torch.equal(sample["next", "observation"], obs + torch.tensor([0, 1]))
    assert bool((obs[1:] - obs[:-1] == torch.tensor([0, 1]))[inside].all())
    episode = (obs[:, 0] + obs[:, 1]) // 7
    assert bool((episode[1:] == episode[:-1])[inside].all())


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_positions_are_step_and_lane(kind: Any) -> None:
    buffer = buffer_of((3,), 8, kind=kind)  # rounded up to 9
    assert buffer.extend(steps((3,), 0, 2)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert len(buffer) == 6 and buffer[:].batch_size == (2, 3)
    assert (
        buffer.extend(steps((3,), 2, 9))[:, 0].tolist() == [2] * 3 + [0] * 3 + [1] * 3
    )  # its last three steps
    assert buffer["observation"][..., 1].tolist() == [[9] * 3, [10] * 3, [8] * 3]
    assert buffer[0].batch_size == (3,) and buffer[0, 1]["observation"].tolist() == [1, 9]
    assert buffer[:, 1]["observation"][:, 1].tolist() == [9, 10, 8]
    assert buffer[-1]["observation"][:, 1].tolist() == [8] * 3
    assert buffer[[0, 2], [1, 0]]["observation"].tolist() == [[1, 9], [0, 8]]
    for wrong in (3, (0, 3), -4):
        with pytest.raises(IndexError, match="is out of range: 9 rows are stored"):
            buffer[wrong]
    buffer[1, 2] = TensorDict({"next": {"reward": torch.tensor([7.0])}})
    buffer[0] = TensorDict({"next": {"reward": torch.tensor([[1.0], [2.0], [3.0]])}}, [3])
    assert buffer["next", "reward"][:2, :, 0].tolist() == [[1, 2, 3], [5, 5, 7]]
    assert buffer.add(steps((3,), 30, 1)[:, 0]) == 2
    assert buffer[2]["observation"][:, 1].tolist() == [30] * 3
    buffer.empty()
    assert buffer.extend(steps((3,), 0, 1)).tolist() == [[0, 0], [0, 1], [0, 2]]
    assert buffer[:].batch_size == (1, 3)
    assert len(buffer.sample(5)) == 5


def test_any_dimension_may_be_time() -> None:
    expected = buffer_of((2, 3))
    expected.extend(steps((2, 3), 0, 4))
    for dim in range(3):
        buffer = buffer_of((2, 3), dim_extend=dim)
        batch = steps((2, 3), 0, 4).permute(*range(dim), 2, *range(dim, 2))
        assert batch.batch_size[dim] == 4
        assert buffer.extend(batch).shape == (24, 3)
        assert bool((buffer[:] == expected[:]).all())
        assert buffer.add(batch[(slice(None),) * dim + (0,)]) == 4
    for ndim, dim in ((2, 2), (1, 1), (2, -1)):
        with pytest.raises(
            ValueError, match=rf"dim_extend must be an integer from 0 to {ndim - 1}, got {dim}"
        ):
            ReplayBuffer(storage=LazyTensorStorage(10, ndim=ndim), dim_extend=dim)


def test_tensors_trees_and_given_ones() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(7, ndim=2), batch_size=3)
    buffer.extend(torch.arange(6).view(2, 3))
    assert buffer[:].tolist() == [[0, 3], [1, 4], [2, 5]] and buffer.sample().shape == (3,)
    trees = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    trees.extend((torch.arange(6).view(2, 3), {"a": torch.zeros(2, 3, 4)}))
    assert trees[:][0].tolist() == [[0, 3], [1, 4], [2, 5]] and trees[0][1]["a"].shape == (2, 4)
    assert trees.add((torch.tensor([7, 8]), {"a": torch.ones(2, 4)})) == 3
    with pytest.raises(
        ValueError, match=r"all leaves must have the same first 2 sizes, got \[\[2, 3\], \[2, 4\]\]"
    ):
        trees.extend((torch.zeros(2, 3), {"a": torch.zeros(2, 4, 4)}))
    source = torch.arange(12).view(6, 2)
    filled = ReplayBuffer(storage=TensorStorage(source, ndim=2))
    assert len(filled) == 12 and filled.extend(torch.tensor([[77], [88]])).tolist() == [[0, 0], [0, 1]]
    assert source[:2].tolist() == [[77, 88], [2, 3]]
    part = ReplayBuffer(storage=TensorStorage(torch.arange(12).view(6, 2), max_size=5, ndim=2))
    assert len(part) == 4 and part[:].tolist() == [[0, 1], [2, 3]]


def test_a_slice_of_lanes_that_are_not_there_is_no_batch_of_zero_rows() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(torch.arange(6).view(2, 3))
    for index, lanes in [((0, slice(3, 4)), 2), ((slice(None), slice(2, None)), 2), ((..., slice(5, 9)), 2)]:
        with pytest.raises(IndexError, match=rf"selects no lane: dimension 1 has {lanes} lanes"):
            buffer[index]
        with pytest.raises(IndexError, match="selects no lane"):
            buffer[index] = torch.zeros(0)
    assert buffer[0, 1:2].tolist() == [3] and buffer[:, 0:1].tolist() == [[0], [1], [2]]
    assert buffer[..., 1].tolist() == [3, 4, 5] and buffer[5:, :].shape == (0, 2)


@pytest.mark.parametrize(
    "sampler", [SamplerWithoutReplacement(), PrioritizedSampler(60, alpha=0.7, beta=0.5)]
)
def test_other_samplers_name_rows_by_position(sampler: Any) -> None:
    buffer = buffer_of((2, 3), sampler=sampler, batch_size=30)
    buffer.extend(steps((2, 3), 0, 10))
    sample, info = buffer.sample(return_info=True)
    place = tuple(info["index"].unbind(-1))
    assert info["index"].shape == (30, 3)
    assert torch.equal(buffer["observation"][place], sample["observation"])
    if isinstance(sampler, PrioritizedSampler):
        one = torch.tensor([[3, 1, 2]])
        buffer.update_priority(buffer.extend(steps((2, 3), 10, 0)), torch.zeros(0))
        every = torch.cartesian_prod(torch.arange(10), torch.arange(2), torch.arange(3))
        buffer.update_priority(every, 0.0)
        buffer.update_priority(one, 1e9)
        assert buffer.sample(return_info=True)[1]["index"].tolist() == one.tolist() * 30


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (steps((4,), 0, 2), ValueError, r"batches must have the lanes of the first one, \[3\], got \[4\]"),
        (
            steps((3,), 0, 2)[0],
            ValueError,
            r"the storage has ndim=2: extend it with batches of 2 batch dim.*got \[2\]; leave ndim out for .* batches",
        ),
        (torch.zeros(3, 4), TypeError, "the storage holds tensordicts, got Tensor"),
        (
            steps((2, 3), 0, 2),
            ValueError,
            r"batches must have the lanes of the first one, \[3\], got \[2\]",
        ),
    ],
)
def test_batches_of_other_lanes_are_refused(batch: Any, error: type[Exception], text: str) -> None:
    buffer = buffer_of((3,))
    buffer.extend(steps((3,), 0, 2))
    with pytest.raises(error, match=text):
        buffer.extend(batch)
    assert len(buffer) == 6


def test_a_storage_smaller_than_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_size=2 is too small for one step of \[3\] lanes"):
        buffer_of((3,), 2).extend(steps((3,), 0, 2))
    buffer = buffer_of((3,), 3)
    buffer.extend(steps((3,), 0, 2))
    assert buffer["observation"][..., 1].tolist() == [[1, 1, 1]]

"""Samples of slices have exactly ``batch_size`` rows, unless ``fill=False``."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from flatroll.estimators import GAE
from flatroll.layout import audit, run_ends
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

CAPACITY = 60


def prioritized(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.9, **options)


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "slices": SliceSampler,
    "prioritized": prioritized,
    "without replacement": SliceSamplerWithoutReplacement,
}


def buffer_of(sampler: Sampler, batch_size: int, compact: bool = False, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, compact_obs=compact),
        sampler=sampler,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def short_ones(world: Any) -> Any:
    """Trajectories of 1, 2, 3, 1, 2, 3, ... rows."""
    return world.to_batch([step for e in range(24) for step in world.episode(0, e, 1 + e % 3)])


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_filled_sample_begins_as_the_short_one(world: Any, name: str, compact: bool) -> None:
    """It is the same draw, continued: its last slice alone is cut, and marked as an end."""
    drawn = {}
    for fill in (False, True):
        buffer = buffer_of(SAMPLERS[name](slice_len=6, fill=fill), 24, compact)
        buffer.extend(short_ones(world))
        drawn[fill] = buffer.sample(return_info=True)
    (short, short_info), (full, full_info) = drawn[False], drawn[True]
    rows = len(short)
    assert rows <= 12 and len(full) == 24 and set(short_info) == set(full_info)
    for key, value in short.items(True, True):
        assert torch.equal(full[key][:rows], value), key
    for key, value in short_info.items():
        assert torch.equal(full_info[key][:rows], value), key
    done, truncated = full["next", "done"][:, 0], full["next", "truncated"][:, 0]
    assert bool(done[-1]) and torch.equal(done, run_ends(full))
    assert bool(truncated[-1] | full["next", "terminated"][-1])
    audit(full)


def test_the_last_slice_is_cut(world: Any) -> None:
    buffer = buffer_of(SliceSampler(slice_len=5, fill=True, truncated_key=("next", "truncated")), 10)
    buffer.extend(world.to_batch(world.episode(0, 0, 4, "terminated")))
    sample = buffer.sample()
    assert sample["step_count"].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert sample["is_init"].flatten().nonzero().flatten().tolist() == [0, 4, 8]
    assert sample["next", "truncated"].flatten().nonzero().flatten().tolist() == [9]
    assert sample["next", "done"].flatten().nonzero().flatten().tolist() == [3, 7, 9]


def test_a_pass_goes_on_with_the_rest_of_the_slice_that_was_cut(world: Any) -> None:
    sampler = SliceSamplerWithoutReplacement(slice_len=4, by="start", shuffle=False, fill=True)
    buffer = buffer_of(sampler, 8)
    buffer.extend(world.to_batch(world.episode(0, 0, 7) + world.episode(0, 1, 6)))
    samples = [sample["step_count"].flatten().tolist() for sample in buffer]
    assert samples == [[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5]]
    buffer.sample()
    state = buffer.state_dict()  # in the middle of a slice
    buffer.sample()
    buffer.load_state_dict(state)
    assert buffer.sample()["step_count"].flatten().tolist() == samples[1]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_filled_pass_has_every_row_once(world: Any, shuffle: bool, drop_last: bool) -> None:
    sampler = SliceSamplerWithoutReplacement(
        slice_len=4, by="start", shuffle=shuffle, fill=True, drop_last=drop_last
    )
    buffer = buffer_of(sampler, 8)
    batch = short_ones(world)  # 48 rows
    buffer.extend(batch[: 48 - 3])
    seen: Counter[int] = Counter()
    for _ in range(3):
        sizes = []
        for sample in buffer:
            sizes.append(len(sample))
            seen.update((sample["collector", "traj_ids"] * 100 + sample["step_count"][:, 0]).tolist())
        assert sizes == [8] * 5 + ([] if drop_last else [5])
    assert (set(seen.values()) == {3} and len(seen) == 45) or drop_last
    empty = buffer_of(SliceSamplerWithoutReplacement(slice_len=4, fill=True, drop_last=True), 8)
    empty.extend(batch[:5])
    with pytest.raises(RuntimeError, match="a pass has 5 rows, fewer than the 8 of a batch"):
        empty.sample()


def test_the_last_sample_of_a_filled_pass_is_short(world: Any) -> None:
    buffer = buffer_of(SliceSamplerWithoutReplacement(slice_len=8, fill=True), 40)
    buffer.extend(short_ones(world))  # 48 rows
    assert [len(sample) for sample in buffer] == [40, 8]  # a warning would be an error


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_filled_samples_follow_the_generator(world: Any, name: str, prefetch: int | None) -> None:
    samples = []
    for _ in range(2):
        buffer = buffer_of(SAMPLERS[name](slice_len=4, fill=True), 16, prefetch=prefetch)
        buffer.extend(short_ones(world))
        samples.append([buffer.sample()["observation"] for _ in range(5)])
    assert all(torch.equal(a, b) for a, b in zip(*samples, strict=True))
    assert not torch.equal(samples[0][0], samples[0][1])


def test_members_of_an_ensemble_fill_their_part(world: Any) -> None:
    """So that samples of short trajectories can be stacked."""
    members = [buffer_of(SliceSampler(slice_len=4, fill=True), 8) for _ in range(2)]
    for member in members:
        member.extend(short_ones(world))
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=16)
    assert ensemble.sample().batch_size == (2, 8)


def test_padded_samples_are_full_anyway(world: Any) -> None:
    samples = []
    for fill in (False, True):
        buffer = buffer_of(SliceSampler(slice_len=4, pad_output=True, fill=fill), 16)
        buffer.extend(short_ones(world))
        samples.append(buffer.sample())
    assert len(samples[0]) == 16 and (samples[0] == samples[1]).all()
    buffer = buffer_of(SliceSamplerWithoutReplacement(slice_len=4, pad_output=True, fill=True), 16)
    buffer.extend(short_ones(world))
    assert {len(sample) for sample in buffer} == {16}


def test_lanes_are_filled() -> None:
    done = torch.zeros(4, 9, 1, dtype=torch.bool)
    done[:, 2::3] = True
    where = torch.arange(36).view(4, 9)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(36, ndim=2), sampler=SliceSampler(slice_len=6, fill=True), batch_size=18
    )
    buffer.extend(TensorDict({"x": where, "next": {"done": done}}, [4, 9]))
    sample, info = buffer.sample(return_info=True)
    assert len(sample) == 18 and info["index"].shape == (18, 2)
    assert torch.equal(buffer[tuple(info["index"].unbind(-1))]["x"], sample["x"])
    assert bool(((sample["x"].diff() == 1) | sample["is_init"][1:, 0]).all())


@pytest.mark.parametrize("compact", [False, True])
def test_estimators_take_what_a_collector_and_a_filled_buffer_give(compact: bool) -> None:
    """The advantages of a filled sample are those of its slices, one by one; the cut slice is bootstrapped."""
    script = Script(2, lengths=[[3, 2], [4]], ends=[["terminated"], ["truncated"]])
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100, compact_obs=compact),
        sampler=SliceSampler(slice_len=8, fill=True),
        batch_size=32,
        transform=MultiStepTransform(1, 0.9),
    )
    for batch in Collector(ScriptedVectorEnv(script), frames_per_batch=16, total_frames=48):
        buffer.extend(batch)

    class Critic(torch.nn.Module):
        in_keys, out_keys = ["observation"], ["state_value"]

        def forward(self, data: Any) -> Any:
            return data.set("state_value", data["observation"].float().sum(-1, keepdim=True) / 10)

    estimator = GAE(gamma=0.9, lmbda=0.8, value_network=Critic())  # type: ignore[arg-type]
    for _ in range(20):
        sample = buffer.sample()
        ends = [0, *(run_ends(sample).nonzero()[:, 0] + 1).tolist()]
        assert len(sample) == 32 and ends[-1] == 32
        parts = [estimator(sample[a:b].clone())["advantage"] for a, b in itertools.pairwise(ends)]
        torch.testing.assert_close(estimator(sample.clone())["advantage"], torch.cat(parts))


def test_filled_slices_begin_at_marked_rows(world: Any) -> None:
    batch = world.to_batch([step for e in range(9) for step in world.episode(0, e, 5)])
    batch["begin"] = batch["step_count"] % 2 == 0
    buffer = buffer_of(SliceSampler(slice_len=4, start_key="begin", fill=True), 36)
    buffer.extend(batch)
    for _ in range(20):
        sample = buffer.sample()
        starts = sample["is_init"][:, 0]
        assert len(sample) == 36 and bool(sample["begin"][starts].all())
        assert bool(((sample["step_count"].flatten().diff() == 1) | starts[1:]).all())


# --- what every slice must be -------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(SAMPLERS)),
    fill=st.booleans(),
    strict=st.booleans(),
    pad=st.booleans(),
    compact=st.booleans(),
    longest=st.integers(1, 20),
    length=st.integers(1, 9),
    slices=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
@examples(40)
def test_any_slices_are_runs_of_one_trajectory(
    world: Any,
    name: str,
    fill: bool,
    strict: bool,
    pad: bool,
    compact: bool,
    longest: int,
    length: int,
    slices: int,
    seed: int,
) -> None:
    """Rows between two slice starts are consecutive steps of one episode, with their true next observations."""
    options: dict[str, Any] = {"slice_len": length, "strict_length": strict, "fill": fill}
    if name != "prioritized" and not strict:
        options["pad_output"] = pad
    padded = options.get("pad_output", False)
    writers = world.writers(3, seed=seed, longest=longest)
    buffer = buffer_of(SAMPLERS[name](**options), slices * length, compact)
    for i in range(12):
        made = world.windows(writers, [(i % 3, i % 7 + 1), ((i + 1) % 3, 5)])
        batch = world.to_batch(made)
        buffer.extend(batch)
        try:
            sample = buffer.sample()
        except RuntimeError as error:
            assert strict and "no stored trajectory has" in str(error)
            continue
        starts = sample["is_init"][:, 0]
        mask = sample["collector", "mask"] if padded else torch.ones(len(sample), dtype=torch.bool)
        obs, following = sample["observation"], sample["next", "observation"]
        assert bool(starts[0]) and not bool((starts & ~mask).any())
        step = torch.tensor([0.0, 0.0, 1.0])
        within = (mask & ~starts)[1:]
        assert torch.equal((obs[1:] - obs[:-1])[within], step.expand(int(within.sum()), 3))
        assert torch.equal(following - obs, step.expand(len(obs), 3))
        each = torch.bincount(starts.cumsum(0) - 1, weights=mask.double())
        assert each.max() <= length and (not strict or fill or each.min() == length)
        last = name == "without replacement"  # the last sample of a pass is what is left of it
        if fill and not padded:
            assert len(sample) == slices * length or (last and len(sample) < slices * length)
        elif padded:
            assert len(sample) == len(each) * length


@pytest.mark.parametrize("name", ["slices", "prioritized"])
@pytest.mark.parametrize("by", ["trajectory", "start"])
def test_filling_leaves_the_chances_of_starts_alone(world: Any, name: str, by: str) -> None:
    """Chi-square of the first rows of slices, all but the cut one, over all starts of the trajectories."""
    options: dict[str, Any] = {"slice_len": 4, "fill": True} | ({} if name == "prioritized" else {"by": by})
    buffer = buffer_of(SAMPLERS[name](**options), 400)
    lengths = [2, 7, 1, 5]
    buffer.extend(world.to_batch([s for e, n in enumerate(lengths) for s in world.episode(0, e, n)]))
    places = [max(1, n - 3) for n in lengths]
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(60):
        sample = buffer.sample()
        first = sample[sample["is_init"][:, 0]]
        episode, step = first["observation"][:, 1].long().tolist(), first["step_count"][:, 0].tolist()
        counts.update(
            zip(episode[:100], step[:100], strict=True)
        )  # the first slices, as many as without fill
    total = sum(counts.values())
    uniform = by == "start" or name == "prioritized"
    chances = {
        (e, at): 1 / sum(places) if uniform else 1 / len(places) / n
        for e, n in enumerate(places)
        for at in range(n)
    }
    assert set(counts) == set(chances)
    square = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in chances.items())
    assert square < 27.9, counts  # of 8 - 1 degrees of freedom: one in 4,000


# --- the default --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"slice_len": 8}, {"num_slices": 4}])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_filled_by_default(world: Any, name: str, options: dict[str, int]) -> None:
    """Without a warning, whatever the trajectories' lengths: short ones take part, and every sample can be reshaped."""
    buffer = buffer_of(SAMPLERS[name](**options), 32)
    buffer.extend(short_ones(world))
    for _ in range(20):
        sample = buffer.sample()
        last = name == "without replacement" and len(sample) == 16  # of a pass over 48 rows
        assert (last or len(sample) == 32) and sample.reshape(-1, 8).shape[1] == 8


def test_priorities_of_a_filled_sample_are_those_of_its_starts(world: Any) -> None:
    """Weights and updates of further slices are as right as those of the first ones, the cut one's included."""
    buffer = buffer_of(PrioritizedSliceSampler(CAPACITY, alpha=1.0, beta=1.0, eps=0.0, slice_len=8), 32)
    rows = buffer.extend(short_ones(world))
    first = buffer[:]["is_init"][:, 0]
    priority = torch.where(first, torch.arange(len(rows)) % 5 + 1.0, 0.0)
    buffer.update_priority(rows, priority)
    for _ in range(10):
        sample, info = buffer.sample(return_info=True)
        starts = sample["is_init"][:, 0]
        of_row = priority[info["index"]][starts][starts.cumsum(0) - 1]
        torch.testing.assert_close(info["priority_weight"], priority[first].min() / of_row)
        priority[info["index"][starts]] = of_row[starts] % 5 + 1
        buffer.update_priority(info["index"], priority[info["index"]], generation=info["index_generation"])


def test_without_filling_short_samples_stay_short(world: Any) -> None:
    half = buffer_of(SliceSampler(slice_len=6, fill=False), 12)
    half.extend(world.to_batch(world.episode(0, 0, 3)))
    assert len(half.sample()) == 6
    one_left = buffer_of(SliceSamplerWithoutReplacement(slice_len=3), 12)
    one_left.extend(world.to_batch([s for e in range(5) for s in world.episode(0, e, 3)]))
    assert [len(sample) for sample in one_left] == [12, 3]  # the end of a pass

"""``max_policy_lag``: rows whose policy is too old are never drawn, the others as they would be without them."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

VERSION = ("collector", "policy_version")


def rows(versions: list[int], trajectory: int = 0, first: int = 0) -> TensorDict:
    """Rows of one trajectory, which is not done, of these policy versions."""
    count = len(versions)
    marks = {"traj_ids": torch.full((count,), trajectory), "policy_version": torch.tensor(versions)}
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict(
        {"x": torch.arange(first, first + count), "collector": marks, "next": {"done": done}}, [count]
    )


def buffer_of(sampler: Sampler, capacity: int = 100, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, generator=generator, **options)


def is_close(drawn: torch.Tensor, chances: dict[int, float]) -> bool:
    """Whether a chi-square test finds that values are drawn with these chances, and no others."""
    counts, total = Counter(drawn.tolist()), sum(chances.values())
    assert counts.keys() <= {value for value, chance in chances.items() if chance}, counts
    expected = {value: chance / total * len(drawn) for value, chance in chances.items() if chance}
    square = sum((counts[value] - mean) ** 2 / mean for value, mean in expected.items())
    freedom = len(expected) - 1
    return square < freedom + 4 * (2 * freedom) ** 0.5  # four deviations


@pytest.mark.parametrize("old", [5, 90], ids=["few are stale", "most are stale"])
def test_fresh_rows_are_drawn_uniformly_across_the_end_of_the_ring(old: int) -> None:
    """Fresh and stale rows in any order, as two workers write them."""
    buffer = buffer_of(RandomSampler(max_policy_lag=1), capacity=100)
    buffer.extend(rows([9] * 30))  # overwritten
    buffer.extend(rows([2, *[0] * (old - 1)], first=1000))
    fresh = list(range(2000, 2000 + 100 - old))
    versions = [1 + i % 3 % 2 for i in range(100 - old)]  # 1, 2, 1, 1, 2, 1
    buffer.extend(rows(versions, first=2000))
    assert buffer.sampler.policy_version == -1  # nobody has looked yet
    sample = buffer.sample(20_000)
    assert bool((sample[VERSION] >= 1).all()) and buffer.sampler.policy_version == 2
    assert is_close(sample["x"], dict.fromkeys([1000, *fresh], 1.0))


def test_a_newer_version_leaves_older_rows_out() -> None:
    buffer = buffer_of(sampler := RandomSampler(max_policy_lag=0))
    for version in range(4):
        buffer.extend(rows([version] * 5, first=10 * version))
        assert set(buffer.sample(200)["x"].tolist()) == set(range(10 * version, 10 * version + 5))
    sampler.policy_version = 2  # it never falls
    assert sampler.policy_version == 3 and len(buffer.sample(5)) == 5
    sampler.policy_version = 4
    with pytest.raises(
        RuntimeError, match=r"newest policy version is 4, and max_policy_lag=0 allows only versions from 4 on"
    ):
        buffer.sample(5)
    buffer.extend(rows([4]))
    assert buffer.sample(5)[VERSION].tolist() == [4] * 5


def test_slices_are_those_without_the_option_given_that_all_rows_are_fresh() -> None:
    """Trajectory 0 is half stale, 1 stale, 2 fresh; by trajectory, of which each has its share of starts."""
    for by in ("trajectory", "start"):
        buffer = buffer_of(SliceSampler(slice_len=3, by=by, max_policy_lag=1))  # type: ignore[arg-type]
        buffer.extend(rows([0] * 5 + [1] * 2 + [2] * 3, trajectory=0))
        buffer.extend(rows([0] * 10, trajectory=1, first=100))
        buffer.extend(rows([2] * 5, trajectory=2, first=200))
        starts = buffer.sample(9000)["x"].view(-1, 3)
        assert bool((starts.diff(dim=1) == 1).all())
        # Starts 5, 6, 7 of the eight of trajectory 0, and all three of trajectory 2.
        share = {"trajectory": (1 / 8, 1 / 3), "start": (1.0, 1.0)}[by]
        chances: dict[int, float] = dict.fromkeys((5, 6, 7), share[0]) | dict.fromkeys(
            (200, 201, 202), share[1]
        )
        assert is_close(starts[:, 0], chances)


@pytest.mark.parametrize(
    "options", [{"fill": True}, {"pad_output": True}, {"span": 2}, {"strict_length": True}]
)
def test_options_of_slices_go_together_with_it(options: dict[str, Any]) -> None:
    buffer = buffer_of(SliceSampler(slice_len=4, max_policy_lag=0, **options))
    buffer.extend(rows([0] * 5 + [1] * 6))
    buffer.extend(rows([1] * 3, trajectory=1, first=100))
    sample = buffer.sample(400)
    assert bool((sample[VERSION] == 1).all())
    if "span" not in options:
        assert len(sample) == 400


def test_slices_that_do_not_fit_between_stale_rows_are_an_error() -> None:
    buffer = buffer_of(SliceSampler(slice_len=3, strict_length=True, max_policy_lag=0))
    buffer.extend(rows([0, 0, 0, 0, 1, 1]))
    with pytest.raises(RuntimeError, match=r"slices drawn have no row older than version 1"):
        buffer.sample(9)


def test_stale_rows_have_no_weight_and_do_not_count_in_the_minimum() -> None:
    buffer = buffer_of(
        sampler := PrioritizedSampler(20, alpha=1.0, beta=1.0, eps=0.0, max_policy_lag=0), capacity=20
    )
    buffer.extend(rows([1] * 12))
    slots = buffer.extend(rows([0, 0, 1, 1, 1, 1], first=100))
    buffer.extend(rows([1] * 8, first=200))  # around the end
    priority = torch.tensor([0.1, 9.0, 1.0, 2.0, 3.0, 4.0])
    buffer.update_priority(torch.arange(20), 0.0)
    buffer.update_priority(slots, priority)
    for alpha in (1.0, 2.0):  # set, all weights are computed anew
        sampler.alpha = alpha
        sample, info = buffer.sample(8000, return_info=True)
        assert is_close(sample["x"], {102 + i: (i + 1.0) ** alpha for i in range(4)})
        assert float(info["priority_weight"].max()) == 1.0
        ones = info["priority_weight"][sample["x"] == 102]
        assert bool((ones == 1).all())  # of the lowest fresh priority
        buffer.update_priority(slots[:2], 50.0)  # a stale row stays out
    sampler.policy_version = 2
    with pytest.raises(RuntimeError, match="all stored rows are too old"):
        buffer.sample(2)
    buffer.extend(rows([2], first=300))
    assert buffer.sample(2)["x"].tolist() == [300, 300]


def test_prioritized_slices_begin_at_fresh_rows() -> None:
    sampler = PrioritizedSliceSampler(
        50, alpha=1.0, beta=1.0, slice_len=3, strict_length=True, max_policy_lag=1
    )
    buffer = buffer_of(sampler, capacity=50)
    buffer.extend(rows([0] * 5 + [1] * 2))
    buffer.extend(rows([2] * 3, first=7))
    sample = buffer.sample(3000)
    assert is_close(sample["x"].view(-1, 3)[:, 0], dict.fromkeys((5, 6, 7), 1.0))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_has_each_fresh_row_once(shuffle: bool) -> None:
    sampler = SamplerWithoutReplacement(shuffle=shuffle, max_policy_lag=0)
    buffer = buffer_of(sampler, capacity=10, batch_size=3)
    buffer.extend(rows([1] * 8))
    buffer.extend(rows([0, 1, 0, 1, 1], first=100))
    drawn = [sample["x"].tolist() for sample in buffer]
    assert sorted(itertools.chain(*drawn)) == [3, 4, 5, 6, 7, 101, 103, 104]
    buffer.sample()
    sampler.policy_version = 2
    buffer.extend(rows([2, 2], first=200))
    assert sorted(itertools.chain(*(sample["x"].tolist() for sample in buffer))) == [200, 201]


def test_a_pass_over_slices_leaves_stale_ones_out() -> None:
    sampler = SliceSamplerWithoutReplacement(slice_len=2, by="start", shuffle=False, max_policy_lag=0)
    buffer = buffer_of(sampler, batch_size=2)
    buffer.extend(rows([0, 0, 0, 1, 1, 1, 1, 1]))
    assert [sample["x"].tolist() for sample in buffer] == [[4, 5], [6, 7]]
    sampler.policy_version = 2
    with pytest.raises(RuntimeError, match="all stored rows are too old"):
        buffer.sample()


def test_a_writer_that_keeps_the_best_rows_goes_together_with_it() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=RandomSampler(1),
        writer=TensorDictMaxValueWriter("x"),
        batch_size=100,
    )
    buffer.extend(rows([0, 1, 2, 0, 1, 2]))
    assert set(buffer.sample()["x"].tolist()) == {2, 4, 5}


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(2),
        SliceSampler(slice_len=2, max_policy_lag=2),
        PrioritizedSampler(9, 1.0, 1.0, max_policy_lag=2),
    ],
)
def test_rows_without_a_version_are_refused_when_they_come(sampler: Sampler) -> None:
    buffer = buffer_of(sampler, capacity=9)
    with pytest.raises(KeyError, match="track_policy_version=True"):
        buffer.extend(rows([0, 1]).exclude(VERSION))
    with pytest.raises(TypeError, match=r"must be int64, got torch\.float32"):
        buffer.extend(rows([0, 1]).set(VERSION, torch.zeros(2)))
    with pytest.raises(TypeError, match="tensordict"):
        buffer.extend(torch.zeros(2))
    assert len(buffer) == 0
    buffer.extend(rows([0, 1]))
    assert len(buffer) == 2


def test_what_cannot_go_together_is_told() -> None:
    with pytest.raises(TypeError, match="max_policy_lag needs a storage of columns"):
        ReplayBuffer(storage=ListStorage(10), sampler=RandomSampler(1))
    with pytest.raises(ValueError, match="max_policy_lag must be an integer of at least 0"):
        RandomSampler(max_policy_lag=-1)
    with pytest.raises(TypeError, match="RandomSampler does not use policy versions"):
        _ = RandomSampler().policy_version
    with pytest.raises(RuntimeError, match="empty buffer"):
        buffer_of(RandomSampler(1)).sample(2)


def test_an_emptied_and_a_loaded_buffer_begin_anew() -> None:
    buffer = buffer_of(RandomSampler(0))
    buffer.extend(rows([3] * 4))
    early = buffer.state_dict()
    buffer.extend(rows([5] * 4, first=10))
    assert set(buffer.sample(50)["x"].tolist()) == {10, 11, 12, 13}
    buffer.load_state_dict(early)
    assert set(buffer.sample(50)["x"].tolist()) == {0, 1, 2, 3}
    buffer.empty()
    buffer.extend(rows([3, 7], first=20))
    assert set(buffer.sample(50)["x"].tolist()) == {21}


def test_a_collector_writes_the_versions() -> None:
    buffer = buffer_of(RandomSampler(max_policy_lag=0))
    env = ScriptedVectorEnv(Script(2, lengths=5))
    collector = Collector(
        env, frames_per_batch=10, total_frames=30, replay_buffer=buffer, track_policy_version=True
    )
    for version, _ in enumerate(collector):
        assert buffer.sample(20)[VERSION].tolist() == [version] * 20
        collector.policy_version += 1

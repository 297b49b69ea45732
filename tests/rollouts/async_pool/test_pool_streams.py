"""envpool's async mode: each env's rows are those of the sync pool, whichever env is done first."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_pool import ScriptedPool, by_env, same, same_streams, take
from split_envs import CountingState

from flatroll.layout.inspect.audit import audit
from flatroll.rollouts import Collector, RandomPolicy, rollout
from flatroll.wrappers import CompactObs, InitTracker, RewardSum, StepCounter, TrajId, as_vector_env


def by_place(obs: Any) -> torch.Tensor:
    """A deterministic policy."""
    leaf = obs["policy"] if isinstance(obs, dict) else obs
    return (leaf.flatten(1).sum(-1) % 5).long()


def stack(pool: Any) -> Any:
    return RewardSum(StepCounter(pool))


@examples(20)
@given(
    num_envs=st.integers(2, 5),
    fewer=st.integers(0, 4),
    order=st.integers(0, 10**6),
    frames=st.integers(1, 23),
    obs=st.sampled_from(["float32", "uint8", "dict"]),
    policy=st.sampled_from([None, by_place]),
    options=st.fixed_dictionaries(
        {"info_keys": st.just(["played", "t"])},
        optional={
            "set_truncated": st.just(False),
            "trajs_per_batch": st.just(2),
            "track_policy_version": st.just(True),
        },
    ),
)
def test_streams_are_those_of_the_sync_pool(
    num_envs: int, fewer: int, order: int, frames: int, obs: Any, policy: Any, options: Any
) -> None:
    def collect(batch_size: int) -> list[Any]:
        pool = ScriptedPool(num_envs, batch_size, order, obs=obs)
        with Collector(stack(pool), policy, frames_per_batch=frames, **options) as collector:
            if policy is None:
                collector._runner.random.seed(5)  # the pool itself takes no seed
            return [next(collector) for _ in range(60 // frames + 1)]

    sync = collect(num_envs)
    rows = collect(max(1, num_envs - fewer))
    same_streams(sync, rows, num_envs)
    for batch in rows:
        assert audit(batch) == []
        if "trajs_per_batch" not in options:
            assert len(batch) == frames
        # What the env was given is what the row says.
        played = batch["next", "played"]
        assert torch.equal(played.flatten(), batch["action"].flatten())
    ids = torch.cat([batch["collector", "traj_ids"] for batch in rows])
    places = torch.stack([ids, torch.cat([batch["step_count"] for batch in rows]).squeeze(-1)], 1)
    assert len(places.unique(dim=0)) == len(places)  # no row twice


@pytest.mark.parametrize("action", ["box", "dict"])
def test_actions_of_other_spaces(action: Any) -> None:
    def collect(batch_size: int) -> list[Any]:
        collector = Collector(ScriptedPool(4, batch_size, action=action), RandomPolicy(), frames_per_batch=20)
        collector._runner.random.seed(3)
        return take(collector, 4)

    same_streams(collect(4), collect(3), 4)


@examples(15)
@given(
    order=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 12), min_size=2, max_size=8),
    size=st.integers(1, 4),
)
def test_cutting_the_stream_into_other_windows_changes_no_row(order: int, cuts: list[int], size: int) -> None:
    def collector() -> Collector:
        return Collector(
            stack(ScriptedPool(5, size, order)), by_place, frames_per_batch=1, track_policy_version=True
        )

    def collect(cuts: list[int]) -> list[Any]:
        with collector() as made:
            batches = []
            for made.frames_per_batch in cuts:
                batches.append(next(made))
            return batches

    whole, parts = collect([sum(cuts)]), collect(cuts)
    assert [len(batch) for batch in parts] == cuts
    # The same rows, not only the same streams: they are taken in the order in which they came.
    for one, other in zip(by_env(whole, 5), by_env(parts, 5), strict=True):
        same(one, other)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_batches_take_rows_in_the_order_in_which_they_came(size: int) -> None:
    pool = ScriptedPool(5, size)
    rows = take(Collector(pool, by_place, frames_per_batch=1), 30)
    assert [int(row["observation"][0, 0]) for row in rows] == pool.came[:30]


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_recurrent_states_go_with_their_envs(size: int, stride: int) -> None:
    def collect(size: int, compact: bool = False) -> Collector:
        pool = stack(ScriptedPool(5, size))
        return Collector(pool, CountingState(), frames_per_batch=11, compact_obs=compact, state_stride=stride)

    rows = take(collect(size), 9)
    if stride == 1:
        same_streams(take(collect(5), 9), rows, 5)
        for batch in rows:
            assert torch.equal(batch["steps"], batch["step_count"].float())
            assert torch.equal(batch["next", "steps"], batch["steps"] + 1)
    else:
        for batch in rows:
            kept = batch["collector", "has_state"]
            assert torch.equal(batch["steps"][kept], batch["step_count"][kept].float())
            assert bool(kept[batch["step_count"].squeeze(-1) % stride == 0].all())
    compact = collect(size, compact=True)
    for batch in rows:
        lean = next(compact)
        assert compact.final is not None
        assert audit(lean) == []
        shared = [key for key in lean.keys(True, True) if key in batch.keys(True, True)]
        same(lean, batch.select(*shared))
        assert "observation" not in lean["next"]
        # The next observations that no later row holds are all there, and only these.
        ends = compact.final["row"]
        assert torch.equal(compact.final["next", "observation"], batch["next", "observation"][ends])
        goes_on = torch.ones(len(batch), dtype=torch.bool)
        goes_on[ends] = False
        after = goes_on.nonzero().squeeze(-1) + 1
        assert torch.equal(batch["observation"][after], batch["next", "observation"][goes_on])
        assert torch.equal(batch["collector", "traj_ids"][after], batch["collector", "traj_ids"][goes_on])


def test_wrappers_that_are_there_already_and_an_env_made_by_a_function() -> None:
    def make(size: int) -> Any:
        return CompactObs(
            TrajId(InitTracker(as_vector_env(ScriptedPool(4, size), dtype=torch.float64)), writer=3)
        )

    batches = []
    for size in (4, 3):
        collector = Collector(lambda size=size: make(size), by_place, frames_per_batch=30, writer=3)
        batch = next(collector)
        assert collector.final is not None and batch["observation"].dtype is torch.float64
        collector.spec.assert_is_in(batch)
        batches.append(batch)
        pool = collector.env.unwrapped
        collector.shutdown()
        assert pool.closed_times == 1
    ids = [batch["collector", "traj_ids"] - (3 << 40) for batch in batches]
    assert set(ids[1].tolist()) <= set(range(40)) and int(ids[1].min()) == 0


def test_without_ids_runs_of_neighbouring_envs_stay_apart() -> None:
    for batch in take(Collector(ScriptedPool(3, 2), by_place, frames_per_batch=7, track_traj_ids=False), 6):
        env, starts = batch["observation"][:, 0], batch["is_init"].squeeze(-1)
        changes = env[1:] != env[:-1]
        assert bool(starts[0]) and bool(starts[1:][changes].all())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_rollout_is_that_of_the_sync_pool(size: int) -> None:
    kept: Any = {"num_steps": 17, "info_keys": ["played"]}
    whole = rollout(stack(ScriptedPool(5, 5)), CountingState(), **kept)
    same(whole, rollout(stack(ScriptedPool(5, size)), CountingState(), **kept))


def test_one_env_is_a_sync_pool() -> None:
    whole = take(Collector(ScriptedPool(1), by_place, frames_per_batch=9), 3)
    for one, other in zip(
        whole, take(Collector(ScriptedPool(1, 1), by_place, frames_per_batch=9), 3), strict=True
    ):
        same(one, other)


def test_set_truncated_marks_the_cuts() -> None:
    for batch in take(Collector(ScriptedPool(4, 2), by_place, frames_per_batch=9, set_truncated=True), 6):
        ids, done = batch["collector", "traj_ids"], batch["next", "done"].squeeze(-1)
        assert bool(done[:-1][ids[1:] != ids[:-1]].all()) and bool(done[-1])

"""A collector that has loaded a state goes on in the middle of its episodes, or begins new ones."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDictBase

from flatroll.disk.state_tree import pack, unpack
from flatroll.modules import actor
from flatroll.rollouts import Collector, RandomPolicy
from flatroll.wrappers import RewardSum, StepCounter
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv, make_scripted

SCRIPT = Script(3, lengths=[[3, 4], [5], [7, 2]], ends=[["terminated"], ["truncated"], ["both"]])


def cartpoles(mode: str = "NextStep") -> Any:
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=12)] * 3, autoreset_mode=mode)


ENVS: dict[str, Callable[[], Any]] = {
    "single": lambda: gym.make("CartPole-v1"),
    "its own vector env": lambda: gym.make_vec("CartPole-v1", num_envs=3),
    **{f"sync, {mode}": lambda mode=mode: cartpoles(mode) for mode in ("NextStep", "SameStep", "Disabled")},
    **{
        f"scripted {backend}, {mode}": lambda backend=backend, mode=mode: make_scripted(
            SCRIPT, backend=backend, autoreset_mode=mode
        )
        for backend in ("sync", "native")
        for mode in ("NextStep", "SameStep", "Disabled")
    },
    "torch": lambda: ScriptedTorchEnv(SCRIPT),
    "torch, hidden finals": lambda: ScriptedTorchEnv(SCRIPT, final_obs="absent"),
    "markers": lambda: StepCounter(RewardSum(make_scripted(SCRIPT)), max_steps=4),
}


def assert_same(one: TensorDictBase, other: TensorDictBase) -> None:
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key, column in one.items(True, True):
        torch.testing.assert_close(other[key], column, rtol=0, atol=0, equal_nan=True, msg=str(key))


def assert_goes_on(make: Callable[[int], Collector], *, before: int = 3, after: int = 8) -> None:
    """Save after some batches, in the form of a file; compare what follows with a collector of another seed."""
    one = make(0)
    for _ in range(before):
        next(one)
    state = unpack(*pack(one.state_dict(episodes=True)))
    expected = [next(one).clone() for _ in range(after)]

    for seed in (5, 6):  # the second loads the same state
        other = make(seed)
        other.load_state_dict(state)
        for batch in expected:
            assert_same(batch, next(other))
            assert other.final is None or one.final is not None


@pytest.mark.parametrize("frames", [10, 12])
@pytest.mark.parametrize("name", ENVS)
def test_rows_go_on(name: str, frames: int) -> None:
    """With 10 rows for a batch, rows of the last step are left over."""
    assert_goes_on(lambda seed: Collector(ENVS[name](), frames_per_batch=frames, seed=seed))


@pytest.mark.parametrize(
    "options",
    [
        {"compact_obs": True},
        {"trajs_per_batch": 2},
        {"info_keys": ["t"]},
        {"track_policy_version": True},
        {"track_envs": True},
        {"init_random_frames": 35},
        {"max_frames_per_traj": 3},
        {"set_truncated": True},
    ],
    ids=str,
)
def test_rows_go_on_with_options(options: dict[str, Any]) -> None:
    def make(seed: int) -> Collector:
        env = ScriptedVectorEnv(SCRIPT, autoreset_mode="Disabled")
        return Collector(env, RandomPolicy(), frames_per_batch=10, seed=seed, **options)

    assert_goes_on(make)


@pytest.mark.parametrize("recurrent", [None, "gru", "lstm"])
@pytest.mark.parametrize("stride", [1, 3])
def test_states_of_the_policy_go_on(recurrent: Any, stride: int) -> None:
    if recurrent is None and stride > 1:
        pytest.skip("has no states")

    def make(seed: int) -> Collector:
        torch.manual_seed(seed)
        env = cartpoles()
        policy = actor(env, hidden=(4,), recurrent=recurrent)
        return Collector(
            env, policy, frames_per_batch=10, seed=seed, state_stride=stride, exploration_type="mode"
        )

    assert_goes_on(make)


def test_leftover_rows_stay_unique() -> None:
    make = ENVS["scripted native, NextStep"]
    whole = Collector(make(), frames_per_batch=10, seed=0)
    rows = torch.cat([next(whole) for _ in range(6)])

    first = Collector(make(), frames_per_batch=10, seed=0)
    parts = [next(first) for _ in range(3)]
    second = Collector(make(), frames_per_batch=10, seed=0)
    second.load_state_dict(first.state_dict(episodes=True))
    parts += [next(second) for _ in range(3)]
    assert_same(rows, torch.cat(parts))


def test_a_collector_that_has_not_begun() -> None:
    one = Collector(cartpoles(), frames_per_batch=6, seed=0)
    state = one.state_dict(episodes=True)
    assert state["episodes"] is None
    other = Collector(cartpoles(), frames_per_batch=6, seed=3)
    other.load_state_dict(state)
    assert_same(next(one), next(other))


def test_after_reset_the_random_numbers_go_on() -> None:
    """Unseeded episodes follow from the env's generators."""
    one, other = (Collector(cartpoles(), RandomPolicy(), frames_per_batch=6) for _ in range(2))
    next(one)
    one.reset()
    other.load_state_dict(one.state_dict(episodes=True))
    batch = next(one)
    assert batch["is_init"][0].all()
    assert_same(batch, next(other))


def test_other_episodes_are_refused() -> None:
    one = Collector(cartpoles(), frames_per_batch=6, seed=0)
    next(one)
    state = one.state_dict(episodes=True)

    other = Collector(gym.make_vec("CartPole-v1", num_envs=3), frames_per_batch=6, seed=0)
    with pytest.raises(
        ValueError, match=r"the snapshot is one of .* SyncVectorEnv .*: make the env as the one"
    ):
        other.load_state_dict(state)
    assert next(other)["is_init"][0].all()

    joined = Collector(cartpoles(), frames_per_batch=6, trajs_per_batch=1, seed=0)
    with pytest.raises(ValueError, match="trajs_per_batch"):
        joined.load_state_dict(state)

    env = cartpoles()
    with_memory = Collector(env, actor(env, recurrent="gru"), frames_per_batch=6, seed=0)
    with pytest.raises(ValueError, match="the policy carries the states"):
        with_memory.load_state_dict(state | {"policy": None})


def test_what_cannot_be_saved_is_named() -> None:
    lake = Collector(gym.make("FrozenLake-v1"), frames_per_batch=4, seed=0)
    assert lake.snapshot_problem == "FrozenLakeEnv has no get_snapshot and set_snapshot"
    with pytest.raises(
        ValueError, match="episodes=True needs an env whose state can be saved: FrozenLakeEnv"
    ):
        lake.state_dict(episodes=True)
    nameless = Collector(cartpoles(), frames_per_batch=4, track_traj_ids=False)
    assert "track_traj_ids=False" in str(nameless.snapshot_problem)


@pytest.mark.parametrize("entry", [{}, {"seed": None, "seeded_at": 0}])
def test_a_state_without_a_seed_leaves_the_collector_its_own(entry: dict[str, Any]) -> None:
    unseeded = Collector(cartpoles(), frames_per_batch=6)
    next(unseeded)
    state = unseeded.state_dict()
    assert state["seed"] is None
    del state["seed"], state["seeded_at"]

    one, other = (Collector(cartpoles(), frames_per_batch=6, seed=7) for _ in range(2))
    for resumed in (one, other):
        resumed.load_state_dict(state | entry)
        assert resumed.seeded
    first = next(one)
    assert_same(first, next(other))
    fresh = next(Collector(cartpoles(), frames_per_batch=6, seed=7))
    assert not torch.equal(first["observation"], fresh["observation"])  # its first episodes are not repeated


def test_the_seed_of_a_state_counts() -> None:
    one = Collector(cartpoles(), frames_per_batch=6, seed=1)
    next(one)
    other = Collector(cartpoles(), frames_per_batch=6, seed=2)
    other.load_state_dict(one.state_dict())
    one.restart()
    assert_same(next(one), next(other))

"""A collector that has loaded a state goes on in the middle of its episodes, or begins new ones."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict, TensorDictBase

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


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_a_policy_that_draws_goes_on_to_the_last_bit(recurrent: Any) -> None:
    """The first call of a policy may make log-probabilities that differ in the last digit from those of later calls."""

    def make() -> Collector:
        torch.manual_seed(0)
        env = cartpoles("Disabled")
        return Collector(env, actor(env, hidden=(4,), recurrent=recurrent), frames_per_batch=7, seed=0)

    one = make()
    for _ in range(12):
        next(one)
        state = one.state_dict(episodes=True)
        numbers = torch.get_rng_state()
        expected = next(one).clone()

        other = make()
        other.load_state_dict(state)
        torch.set_rng_state(numbers)
        assert_same(expected, next(other))


class Shares(gym.Env):  # type: ignore[type-arg]
    """Gives away the arrays that it changes, and keeps those that it gets."""

    observation_space = gym.spaces.Box(-99, 99, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.random(2, np.float32)
        return self.at.copy(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self.at.copy(), 1.0, bool(self.at[0] > 5), False, {}

    def get_snapshot(self) -> Any:
        return {"at": self.at, "random": self.np_random.bit_generator.state}

    def set_snapshot(self, snapshot: Any) -> None:
        self.at = snapshot["at"]
        self.np_random.bit_generator.state = snapshot["random"]


def test_a_state_stays_what_it_was() -> None:
    one = Collector(Shares(), frames_per_batch=3, seed=0)
    next(one)
    state = one.state_dict(episodes=True)
    expected = [next(one).clone() for _ in range(4)]
    for seed in (1, 2):
        other = Collector(Shares(), frames_per_batch=3, seed=seed)
        other.load_state_dict(state)
        for batch in expected:
            assert_same(batch, next(other))


@pytest.mark.parametrize(
    ("mode", "script", "words"),
    [
        ("NextStep", Script(2), "num_envs 3, .*num_envs 2,"),
        ("SameStep", SCRIPT, "num_envs 3, autoreset_mode NextStep, .*autoreset_mode SameStep,"),
    ],
)
def test_another_number_of_envs_or_mode_is_refused(mode: Any, script: Script, words: str) -> None:
    one = Collector(ScriptedVectorEnv(SCRIPT), frames_per_batch=6, seed=0)
    next(one)
    other = Collector(ScriptedVectorEnv(script, autoreset_mode=mode), frames_per_batch=6, seed=0)
    with pytest.raises(
        ValueError, match=f"of the snapshot has {words}.*: make the env as the one that was saved"
    ):
        other.load_state_dict(one.state_dict(episodes=True))


def test_leftover_rows_stay_unique() -> None:
    make = ENVS["scripted native, NextStep"]
    whole = Collector(make(), frames_per_batch=10, seed=0)
    rows: Any = TensorDict.cat([next(whole) for _ in range(6)])

    first = Collector(make(), frames_per_batch=10, seed=0)
    parts = [next(first) for _ in range(3)]
    second = Collector(make(), frames_per_batch=10, seed=0)
    second.load_state_dict(first.state_dict(episodes=True))
    parts += [next(second) for _ in range(3)]
    joined: Any = TensorDict.cat(parts)
    assert_same(rows, joined)


def test_a_collector_that_has_not_begun() -> None:
    one = Collector(cartpoles(), frames_per_batch=6, seed=0, track_envs=True)
    state = one.state_dict(episodes=True)
    assert state["episodes"] is None
    other = Collector(cartpoles(), frames_per_batch=6, seed=3, track_envs=True)
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

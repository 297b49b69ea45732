"""What is no env for us, or a wrong adapter: an error that names the way out, or the right thing."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from flatroll.modules import actor
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import (
    Capabilities,
    MarkerWrapper,
    NextObservationDelta,
    StepCounter,
    VectorSource,
    VectorStream,
    as_vector_env,
)
from flatroll.wrappers.testing import Script, ScriptedVectorEnv, make_scripted


class Walk(VectorSource):
    """Counts steps; episodes of three; SAME_STEP if told so."""

    def __init__(self, same_step: bool = False, **can: Any) -> None:
        box, actions = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
        super().__init__(None, 2, box, actions, Capabilities(torch.device("cpu"), "numpy", **can))
        self.at, self.same_step = np.zeros((2, 1), np.float32), same_step

    def reset(self, seed: Any, options: Any, rows: Any = None) -> Any:
        self.at[slice(None) if rows is None else rows] = 0
        return self.at.copy(), {}

    def step(self, actions: Any) -> Any:
        self.at += 1
        done = self.at[:, 0] == 3
        if self.same_step:
            self.at[done] = 0
        return self.at.copy(), done, done, np.zeros_like(done), {}


@pytest.mark.parametrize("mode", ["Disabled", AutoresetMode.DISABLED])
def test_a_stream_takes_the_value_of_a_mode(mode: Any) -> None:
    for env in (VectorStream(Walk(), mode), as_vector_env(Walk(), autoreset_mode=mode)):
        batch = rollout(env, num_steps=7)
        assert (batch["next", "observation"] - batch["observation"] == 1).all()
    with pytest.raises(ValueError, match="Off"):
        VectorStream(Walk(), "Off")


def test_a_source_without_a_mode_is_told_what_is_missing() -> None:
    with pytest.raises(TypeError, match="autoreset_mode is needed: Walk"):
        as_vector_env(Walk())


def test_a_same_step_env_that_shows_no_last_observation_must_say_so() -> None:
    with pytest.raises(ValueError, match=r"Walk resets ended envs.*hides_final_obs=True"):
        rollout(VectorStream(Walk(same_step=True), AutoresetMode.SAME_STEP), num_steps=5)
    hides = VectorStream(Walk(same_step=True, hides_final_obs=True), AutoresetMode.SAME_STEP)
    assert rollout(hides, num_steps=5)["next", "observation"].isnan().sum() == 2
    given = as_vector_env(Walk(same_step=True), autoreset_mode="SameStep", final_obs=None)
    assert rollout(given, num_steps=5)["next", "observation"].isnan().sum() == 2


def test_a_gymnasium_wrapper_that_drops_last_observations_is_named() -> None:
    class Drops(VectorWrapper):
        def step(self, actions: Any) -> Any:
            return *self.env.step(actions)[:4], {}

    env = Drops(make_scripted(Script(2, lengths=2), autoreset_mode="SameStep"))
    with pytest.raises(ValueError, match="Drops resets ended envs in the same step"):
        rollout(env, num_steps=5)


def test_an_env_of_torchrl_is_refused_by_its_name() -> None:
    envs = pytest.importorskip("torchrl.envs")
    for call in (rollout, as_vector_env, lambda env: Collector(env, frames_per_batch=2)):
        with pytest.raises(TypeError, match=r"torchrl envs are not supported.*gymnasium.make\(") as error:
            call(envs.GymEnv("CartPole-v1"))
        assert "factory" not in str(error.value)


def test_what_makes_an_env_is_told_for_what_is_none() -> None:
    with pytest.raises(TypeError, match=r"got str: gymnasium.make_vec\('CartPole-v1', num_envs="):
        as_vector_env("CartPole-v1")
    with pytest.raises(
        TypeError, match=r"got list: gymnasium.vector.SyncVectorEnv\(...\) makes one of a list"
    ):
        as_vector_env([lambda: gym.make("CartPole-v1")])
    with pytest.raises(TypeError, match="got function: call the factory first"):
        as_vector_env(lambda: gym.make("CartPole-v1"))


def test_an_envpool_with_the_interface_of_dm_env_is_refused() -> None:
    envpool = pytest.importorskip("envpool")
    with pytest.raises(TypeError, match=r"dm_env: .*envpool.make_gymnasium"):
        as_vector_env(envpool.make_dm("CartPole-v1", num_envs=2))


class NumPyDuck:
    """Has the methods of a vector env and returns arrays, as those of SuperSuit do."""

    num_envs = 2
    single_observation_space = spaces.Box(-1, 1, (3,))
    single_action_space = spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        return np.zeros((2, 3), np.float32), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}


def test_a_vector_env_of_arrays_without_the_base_class_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"NumPyDuck is not a gymnasium.vector.VectorEnv.*ndarray.*VectorSource"
    ):
        rollout(as_vector_env(NumPyDuck(), autoreset_mode="SameStep"), num_steps=2)


def test_a_vector_env_without_single_spaces_is_refused() -> None:
    class Concat(VectorEnv[Any, Any, Any]):
        num_envs, metadata = 2, {"autoreset_mode": "SameStep"}
        observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)

    with pytest.raises(TypeError, match=r"single_observation_space and single_action_space.*Concat"):
        as_vector_env(Concat())


def test_a_marker_without_its_methods_is_refused() -> None:
    env = gym.make("CartPole-v1")
    with pytest.raises(TypeError, match=r"MarkerWrapper must implement _on_reset.*and step"):
        MarkerWrapper(env, "mine")

    class Half(MarkerWrapper):
        def _on_reset(self, obs: Any, info: Any, rows: Any) -> None: ...

    with pytest.raises(TypeError, match=r"Half must implement"):
        Half(env, "mine")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_entries_inside_an_info_entry_are_stored(mode: Any) -> None:
    if mode == "SameStep" and tuple(map(int, gym.__version__.split(".")[:2])) < (1, 4):
        pytest.skip(
            "before Gymnasium 1.4 the wrapper leaves out the first step of an episode that began in a step"
        )
    env = RecordEpisodeStatistics(make_scripted(Script(2, lengths=[[3], [2]]), autoreset_mode=mode))
    batch = rollout(env, num_steps=6, info_keys=[("episode", "r"), ("episode", "l")])
    ended = batch["next", "done"].squeeze(-1)
    assert batch["next", "episode", "l"][ended].tolist() == [3, 3, 2, 2, 2]
    first = batch["next", "episode", "r"][ended][0]
    assert first == batch["next", "reward"][:3].sum() and batch["episode", "r"].shape == (12,)


def test_a_dict_of_entries_is_refused_with_the_names_of_its_parts() -> None:
    env = RecordEpisodeStatistics(make_scripted(Script(2, lengths=3), autoreset_mode="SameStep"))
    with pytest.raises(TypeError, match=r"\('episode', 'r'\).*RewardSum"):
        rollout(env, num_steps=6, info_keys=["episode"])
    with pytest.raises(KeyError, match="RewardSum"):
        rollout(env, num_steps=1, info_keys=[("episode", "r")])


@pytest.mark.parametrize("kind", [gym.vector.AsyncVectorEnv, gym.vector.SyncVectorEnv])
@pytest.mark.parametrize("wrapper", [NextObservationDelta, StepCounter])
def test_a_wrapper_inside_the_envs_of_a_vector_env_is_refused(kind: Any, wrapper: Any) -> None:
    """Its rows would be ``[N, 1, 4]``, without what it adds."""
    env = kind([lambda: wrapper(gym.make("CartPole-v1"))] * 2)
    for use in (as_vector_env, NextObservationDelta, lambda env: Collector(env, frames_per_batch=4)):
        with pytest.raises(
            ValueError, match=rf"inside {kind.__name__} are vector envs, as.*NextObservationDelta.*around"
        ):
            use(env)
    env.close()
    around = wrapper(kind([lambda: gym.make("CartPole-v1")] * 2))
    assert next(Collector(around, frames_per_batch=4)).shape == (4,)
    around.close()


class TwoRewards(gym.Env[Any, Any]):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), np.ones(2, np.float32), False, False, {}


@pytest.mark.parametrize(
    "make",
    [
        TwoRewards,
        lambda: gym.vector.SyncVectorEnv([TwoRewards] * 2),
        lambda: gym.vector.AsyncVectorEnv([TwoRewards] * 2),
    ],
    ids=["one", "sync", "async"],
)
def test_a_reward_vector_is_refused(make: Any) -> None:
    env = make()
    with pytest.raises(ValueError, match=r"reward must be one number for each env and step.*TransformReward"):
        rollout(env, num_steps=2)
    env.close()


def of_module(module: str, name: str, **attributes: Any) -> Any:
    """An object with reset and step whose class is from another package."""
    methods = {"reset": lambda self: None, "step": lambda self, action: None, **attributes}
    return type(name, (), {"__module__": module, **methods})()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            of_module("gym.wrappers.time_limit", "TimeLimit"),
            r"env is gym\.wrappers\.time_limit\.TimeLimit, .*shimmy",
        ),
        (of_module("dm_env._environment", "Env"), r"env is dm_env\._environment\.Env, .*dm_env: shimmy"),
        (of_module("pgx.tic_tac_toe", "TicTacToe"), r"env is pgx\.tic_tac_toe\.TicTacToe, .* not supported"),
        (
            of_module("pufferlib.vector", "Serial", num_envs=2),
            r"env is pufferlib\.vector\.Serial, which is not a Gymnasium vector env: pass the Gymnasium envs",
        ),
        (
            of_module("supersuit.vector.markov", "MarkovVectorEnv", num_envs=2),
            r"env is supersuit\.vector\.markov\.MarkovVectorEnv, .* pass the PettingZoo game itself",
        ),
        (of_module("somewhere.envs", "Env"), r"env must be a gymnasium\.Env, .* got somewhere\.envs\.Env$"),
    ],
)
def test_envs_of_other_interfaces_are_named_with_their_module(env: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        as_vector_env(env)


def test_the_way_to_a_limit_of_ale_s_vector_env() -> None:
    class AtariVectorEnv(ScriptedVectorEnv):
        __module__ = "ale_py.vector_env"
        batch_size = 2  # of its envs
        autoreset_mode = AutoresetMode.NEXT_STEP

    with pytest.raises(
        ValueError, match=r"AtariVectorEnv cannot: set the limit in the env, max_num_frames_per_episo"
    ):
        StepCounter(AtariVectorEnv(Script(2)), max_steps=5)
    with pytest.raises(
        ValueError, match=r"ScriptedVectorEnv cannot: make it with .*'sync', .*max_episode_steps"
    ):
        StepCounter(ScriptedVectorEnv(Script(2)), max_steps=5)


def test_a_recurrent_policy_called_by_keyword_names_the_batch_size() -> None:
    policy = actor(gym.make("CartPole-v1"), recurrent="gru")
    with pytest.raises(ValueError, match=r"got \(2, 1\): call it with a TensorDict of batch size \[2\]"):
        policy(observation=torch.zeros(2, 4), is_init=torch.ones(2, 1, dtype=torch.bool))

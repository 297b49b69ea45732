"""FlatVecEnv: Stable-Baselines3 sees every env as it sees DummyVecEnv, with the true last observations."""

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, VecTransposeImage

from flatroll.rollouts import rollout
from flatroll.trainers.sb3 import FlatVecEnv, split_info
from flatroll.wrappers import StepCounter, as_vector_env
from flatroll.wrappers.testing import (
    Script,
    ScriptedEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    decode,
    expected_rows,
    make_scripted,
)

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])
ENVS: dict[str, Any] = {
    **{f"sync {mode}": (lambda mode=mode: make_scripted(SCRIPT, autoreset_mode=mode)) for mode in MODES},
    "native SameStep": lambda: make_scripted(SCRIPT, backend="native", autoreset_mode="SameStep"),
    "native Disabled": lambda: make_scripted(SCRIPT, backend="native", autoreset_mode="Disabled"),
    "async": lambda: make_scripted(SCRIPT, backend="async"),
    "buffers reused": lambda: make_scripted(SCRIPT, reuse_buffer=True, copy=False),
    "torch": lambda: ScriptedTorchEnv(SCRIPT),
    "torch Disabled": lambda: ScriptedTorchEnv(SCRIPT, autoreset=False, reuse_obs=True),
    "marked": lambda: StepCounter(make_scripted(SCRIPT)),
}


def cartpole(mode: str = "NextStep", num_envs: int = 2) -> Any:
    return gym.make_vec("CartPole-v1", num_envs, "sync", {"autoreset_mode": gym.vector.AutoresetMode(mode)})


def played(env: Any, steps: int) -> list[tuple[Any, ...]]:
    """What an algorithm sees of each step of each env, and at the ends what it reads from info."""
    rows: list[tuple[Any, ...]] = []
    env.seed(0)
    before = decode("float32", env.reset())
    for _ in range(steps):
        observations, rewards, dones, infos = env.step(np.zeros(env.num_envs, np.int64))
        after = decode("float32", observations)
        for i, info in enumerate(infos):
            row: tuple[Any, ...] = (
                *before[i].tolist(),
                *after[i].tolist(),
                float(rewards[i]),
                bool(dones[i]),
            )
            if dones[i]:
                last = decode("float32", info["terminal_observation"]).tolist()
                row = (*row, last, info["TimeLimit.truncated"], info["episode"]["r"], info["episode"]["l"])
            else:
                assert not {"terminal_observation", "episode"} & set(info)
            rows.append(row)
        before = after
    return rows


def true_rows(steps: int) -> list[tuple[Any, ...]]:
    rows = []
    for row in expected_rows(SCRIPT, steps):
        e, episode, step = (int(row[name]) for name in ("env", "episode", "step"))
        ended = bool(row["terminated"] | row["truncated"])
        after = (e, episode + 1, 0) if ended else (e, episode, step + 1)
        shown: tuple[Any, ...] = (e, episode, step, *after, float(row["reward"]), ended)
        if ended:
            rewards = sum(100 * episode + k + 1 for k in range(step + 1))
            shown = (*shown, [e, episode, step + 1], bool(not row["terminated"]), float(rewards), step + 1)
        rows.append(shown)
    return rows


@pytest.mark.parametrize("name", ENVS)
def test_every_row_and_every_end_is_true(name: str) -> None:
    env = FlatVecEnv(ENVS[name]())
    try:
        assert played(env, 30) == true_rows(30)
    finally:
        env.close()


def test_it_is_what_dummy_vec_env_shows() -> None:
    dummy = DummyVecEnv([lambda i=i: Monitor(ScriptedEnv(SCRIPT, i)) for i in range(2)])
    assert played(dummy, 30) == true_rows(30)


@pytest.mark.parametrize("kind", ["dict", "discrete", "uint8"])
def test_last_observations_of_every_kind(kind: Any) -> None:
    env = FlatVecEnv(make_scripted(Script(2, lengths=[3], obs=kind)))
    env.reset()
    for _ in range(3):
        observations, _, dones, infos = env.step(np.zeros(2, np.int64))
    assert dones.all()
    last = infos[1]["terminal_observation"]
    assert decode(kind, last).tolist() == [1, 0, 3]
    assert decode(kind, observations).tolist() == [[0, 1, 0], [1, 1, 0]]
    assert env.observation_space.contains(last)


def test_infos_of_ended_rows_share_nothing() -> None:
    env = FlatVecEnv(make_scripted(Script(2, lengths=[1])))
    env.reset()
    observations, _, _, infos = env.step(np.zeros(2, np.int64))
    for info in infos:
        assert not np.shares_memory(info["terminal_observation"], observations)
        info["terminal_observation"][:] = -1
    assert not np.shares_memory(infos[0]["terminal_observation"], infos[1]["terminal_observation"])
    assert decode("float32", observations).tolist() == [[0, 1, 0], [1, 1, 0]]
    after = env.step(np.zeros(2, np.int64))[3][0]["terminal_observation"]
    assert after.tolist() == [0, 1, 1]


class Talks(ScriptedEnv):
    """Says at each step and reset which one it is."""

    def reset(self, **arguments: Any) -> Any:
        obs, _ = super().reset(**arguments)
        return obs, {"born": self.clock.episode.item(), "asked": str(arguments.get("options") or None)}

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return (*rest, {"step": self.clock.step.item(), "pair": np.array([1.0, self.clock.step.item()])})


@pytest.mark.parametrize("mode", MODES)
def test_the_info_of_an_ended_row_is_the_step_s(mode: Any) -> None:
    fns = [lambda i=i: Talks(Script(2, lengths=[[1], [2]]), i) for i in range(2)]
    env = FlatVecEnv(gym.vector.SyncVectorEnv(fns, autoreset_mode=mode))
    env.set_options({"level": 3})
    env.reset()
    assert [info["asked"] for info in env.reset_infos] == ["{'level': 3}"] * 2
    infos = env.step(np.zeros(2, np.int64))[3]
    assert (infos[0]["step"], infos[1]["step"]) == (1, 1)
    assert infos[0]["pair"].tolist() == [1.0, 1.0]
    assert "born" not in infos[0]
    assert env.reset_infos[0] == {"born": 1, "asked": "None"}
    assert env.reset_infos[1]["born"] == 0
    env.reset()
    assert env.reset_infos[1]["asked"] == "None"  # options are used once


class Forgets(ScriptedVectorEnv):
    """Resets ended envs in the same step, with ``final_obs`` and no ``final_info``; its info has integer keys."""

    def _info(self) -> dict[Any, Any]:
        told = self.clock.step > 0
        return {"lives": self.clock.step + 10, 7: {0: self.clock.step.copy()}, 8: self.clock.step, "_8": told}


def test_what_a_native_env_says_of_a_reset_is_not_the_step_s() -> None:
    env = FlatVecEnv(Forgets(Script(2, lengths=[[1, 3], [2]]), autoreset_mode="SameStep"))
    env.reset()
    assert env.reset_infos[0] == {"lives": 10, 7: {0: 0}}
    infos = env.step(np.zeros(2, np.int64))[3]
    assert set(infos[0]) == {"TimeLimit.truncated", "terminal_observation", "episode"}
    assert env.reset_infos[0] == {"lives": 10, 7: {0: 0}}
    assert infos[1] == {"lives": 11, 7: {0: 1}, 8: 1}


def test_seeds_are_those_of_dummy_vec_env() -> None:
    dummy = DummyVecEnv([lambda: gym.make("CartPole-v1") for _ in range(3)])
    env = FlatVecEnv(cartpole(num_envs=3))
    for each in (dummy, env):
        each.seed(7)
    first = env.reset()
    np.testing.assert_array_equal(dummy.reset(), first)
    assert (env.reset() != first).any()  # seeds are used once
    env._seeds = [5, 5, None]
    again = env.reset()
    np.testing.assert_array_equal(again[0], again[1])


def test_options_must_be_the_same_for_all_envs() -> None:
    env = FlatVecEnv(cartpole())
    env.set_options([{"low": -0.1}, {"low": -0.2}])
    with pytest.raises(ValueError, match="options must be the same for all envs, got"):
        env.reset()


def test_attributes_and_methods_of_the_envs() -> None:
    env = FlatVecEnv(cartpole())
    assert env.get_attr("gravity") == [9.8, 9.8]
    env.set_attr("gravity", 1.0, indices=1)
    assert env.get_attr("gravity") == [9.8, 1.0]
    assert env.get_attr("gravity", [1]) == [1.0]
    assert [callable(method) for method in env.get_attr("render")] == [True, True]
    assert env.env_method("get_wrapper_attr", "gravity", indices=1) == [1.0]
    assert env.has_attr("gravity") and not env.has_attr("levity")
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(gym.wrappers.TimeLimit, [0]) == [True]
    assert env.env_is_wrapped(gym.wrappers.ClipAction) == [False, False]


def test_attributes_of_envs_in_processes() -> None:
    env = FlatVecEnv(make_scripted(SCRIPT, backend="async"))
    try:
        assert not env.has_attr("levity")  # and the workers live
        env.set_attr("levity", 1)
        env.set_attr("levity", 2, indices=1)
        assert env.get_attr("levity") == [1, 2]
        assert env.env_method("has_wrapper_attr", "levity") == [True, True]
        with pytest.raises(
            ValueError, match=r"env_method\('close'\) with indices=\[1\] needs access to single envs"
        ):
            env.env_method("close", indices=1)
        env.reset()
    finally:
        env.close()


def test_attributes_of_an_env_that_steps_all_rows() -> None:
    env = FlatVecEnv(ScriptedTorchEnv(SCRIPT))
    env.set_attr("colour", "red")
    assert env.get_attr("colour", indices=0) == ["red"]
    assert not env.has_attr("shape")
    assert env.render_mode is None
    with pytest.raises(ValueError, match=r"set_attr\('colour'\) with indices=\[0\] needs access"):
        env.set_attr("colour", "blue", indices=0)


def test_pictures() -> None:
    env = FlatVecEnv(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2))
    pytest.importorskip("pygame")
    env.reset()
    assert env.render_mode == "rgb_array"
    assert [image.shape for image in env.get_images() if image is not None] == [(400, 600, 3)] * 2


@pytest.mark.parametrize("mode", MODES)
def test_ppo_learns_and_is_evaluated_without_a_warning(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PPO("MlpPolicy", FlatVecEnv(cartpole(mode)), n_steps=32, batch_size=64, seed=0, device="cpu")
        model.learn(256)
        mean, _ = evaluate_policy(model, FlatVecEnv(cartpole(mode)), n_eval_episodes=4)
    assert mean > 5
    assert len(model.ep_info_buffer) > 0


def test_ppo_has_the_weights_that_dummy_vec_env_gives() -> None:
    def weights(env: Any) -> Any:
        model = PPO("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=2, seed=3, device="cpu").learn(256)
        return torch.nn.utils.parameters_to_vector(model.policy.parameters())

    dummy = DummyVecEnv([lambda: gym.make("CartPole-v1") for _ in range(2)])
    assert torch.equal(weights(dummy), weights(FlatVecEnv(cartpole())))


def test_dqn_and_sac_and_the_wrappers_of_sb3() -> None:
    DQN("MlpPolicy", FlatVecEnv(cartpole()), learning_starts=50, device="cpu").learn(300)
    pendulum = gym.make_vec("Pendulum-v1", 2, "sync")
    env = VecNormalize(FlatVecEnv(pendulum))
    SAC("MlpPolicy", env, learning_starts=50, buffer_size=500, device="cpu").learn(60)


def test_images_are_turned_for_the_network_and_the_last_ones_too() -> None:
    class Film(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(0, 255, (4, 5, 1), np.uint8), gym.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.full((4, 5, 1), 7, np.uint8), {}

        def step(self, action: Any) -> Any:
            return np.full((4, 5, 1), 9, np.uint8), 0.0, True, False, {}

    env = VecTransposeImage(FlatVecEnv(gym.vector.SyncVectorEnv([Film, Film])))
    env.reset()
    observations, _, _, infos = env.step(np.zeros(2, np.int64))
    assert observations.shape == (2, 1, 4, 5) and (observations == 7).all()
    assert infos[1]["terminal_observation"].shape == (1, 4, 5)
    assert (infos[1]["terminal_observation"] == 9).all()


def test_envpool_in_32_bits() -> None:
    envpool = pytest.importorskip("envpool")
    pool = envpool.make_gymnasium("InvertedPendulum-v4", num_envs=2, max_episode_steps=6, seed=1)
    env = FlatVecEnv(pool, dtype=torch.float32)
    assert env.observation_space.dtype == np.float32
    observations = env.reset()
    ends = 0
    for _ in range(40):
        observations, _, dones, infos = env.step(np.zeros((2, 1), np.float32))
        assert observations.dtype == np.float32
        for i in np.flatnonzero(dones):
            ends += 1
            assert infos[i]["terminal_observation"].dtype == np.float32
            assert infos[i]["TimeLimit.truncated"] is (infos[i]["episode"]["l"] == 6)
            assert not np.array_equal(infos[i]["terminal_observation"], observations[i])
    assert ends > 4
    PPO("MlpPolicy", env, n_steps=16, batch_size=32, device="cpu").learn(64)


def test_multi_binary_actions() -> None:
    class Switches(ScriptedEnv):
        def __init__(self, i: int) -> None:
            super().__init__(SCRIPT, i)
            self.action_space = gym.spaces.MultiBinary(3)

    env = FlatVecEnv(gym.vector.SyncVectorEnv([lambda i=i: Switches(i) for i in range(2)]))
    PPO("MlpPolicy", env, n_steps=8, batch_size=16, n_epochs=1, device="cpu").learn(32)


def test_what_is_no_env_for_it() -> None:
    dummy = DummyVecEnv([lambda: gym.make("CartPole-v1")])
    with pytest.raises(TypeError, match="env is Stable-Baselines3's DummyVecEnv already"):
        FlatVecEnv(dummy)
    for env in (dummy, FlatVecEnv(cartpole())):
        with pytest.raises(
            TypeError, match=r"env is a VecEnv of Stable-Baselines3.*SyncVectorEnv\(functions\)"
        ):
            rollout(env, num_steps=2)
    assert (
        as_vector_env(Monitor(gym.make("CartPole-v1"))).num_envs == 1
    )  # its wrappers of single envs are taken
    hiding = FlatVecEnv(ScriptedTorchEnv(SCRIPT, final_obs="absent"))
    hiding.reset()
    with pytest.raises(ValueError, match="does not show their last observations"):
        played(hiding, 5)
    env = as_vector_env(cartpole())
    env.reset()
    with pytest.raises(ValueError, match="must be set before the env's first reset"):
        FlatVecEnv(env)


def test_info_is_split_with_its_masks_and_dicts() -> None:
    info = {
        "a": {"b": np.array([1, 2]), "_b": np.array([False, True])},
        "_a": np.array([False, True]),
        "c": torch.tensor([[1.0], [2.0]]),
        "final_obs": np.zeros((2, 3)),
        "_final_obs": np.zeros(2, bool),
    }
    rows = split_info(info, [1, 0])
    assert rows[0]["a"] == {"b": 2}
    assert set(rows[1]) == {"c"}
    assert [row["c"].tolist() for row in rows] == [[2.0], [1.0]]

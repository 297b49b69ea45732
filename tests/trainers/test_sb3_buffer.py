"""FlatReplayBuffer: a model of Stable-Baselines3 gets the same weights, bit by bit, as with SB3's own buffers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DQN, SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from flatroll.trainers.sb3 import FlatVecEnv
from flatroll.trainers.sb3_buffer import FlatReplayBuffer
from flatroll.wrappers.testing import Script, make_scripted


class Parts(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole's observation in a Dict, with a Discrete part."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        box = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(pole=box, cart=box, side=gym.spaces.Discrete(2))

    def observation(self, observation: Any) -> Any:
        return {"cart": observation[:2], "pole": observation[2:], "side": int(observation[0] > 0)}


def envs(name: str, num_envs: int, limit: int, wrap: Callable[[Any], Any] = lambda env: env) -> Any:
    """Envs whose episodes are truncated after ``limit`` steps."""
    return DummyVecEnv([lambda: wrap(gym.make(name, max_episode_steps=limit)) for _ in range(num_envs)])


def cartpole(num_envs: int = 1, wrap: Callable[[Any], Any] = lambda env: env) -> Any:
    return envs("CartPole-v1", num_envs, 9, wrap)


def pendulum(num_envs: int = 1) -> Any:
    return envs("Pendulum-v1", num_envs, 30)


FAST: dict[str, Any] = {
    "buffer_size": 150,
    "batch_size": 16,
    "learning_starts": 40,
    "train_freq": 4,
    "gradient_steps": 2,
    "seed": 2,
    "device": "cpu",
}
STEPS = 400


def dqn(env: Any, policy: str = "MlpPolicy", **options: Any) -> Any:
    network = {"policy_kwargs": {"net_arch": [16]}, "target_update_interval": 20}
    return DQN(policy, env, **{**FAST, **network, **options})


def sac(env: Any, **options: Any) -> Any:
    network = {"policy_kwargs": {"net_arch": [16]}, "train_freq": 12}
    return SAC("MlpPolicy", env, **{**FAST, **network, **options})


def weights(model: Any) -> Any:
    return torch.nn.utils.parameters_to_vector(model.policy.parameters())


# How the model is made, what SB3's has besides, and our buffer's arguments. 150 rows: the ring is wrapped.
SETUPS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "SAC": (lambda **more: sac(pendulum(), **more), {}, {}),
    "SAC, 4 envs": (lambda **more: sac(pendulum(4), **more), {}, {}),
    "DQN": (lambda **more: dqn(cartpole(), **more), {}, {}),
    "DQN, 4 envs": (lambda **more: dqn(cartpole(4), **more), {}, {}),
    "n-step": (
        lambda **more: dqn(cartpole(2), **more),
        {"n_steps": 3, "gamma": 0.97},
        {"n_steps": 3, "gamma": 0.97},
    ),
    "Dict": (lambda **more: dqn(cartpole(2, Parts), "MultiInputPolicy", **more), {}, {}),
    "VecNormalize": (lambda **more: sac(VecNormalize(pendulum(2)), **more), {}, {}),
    "time limits are ends": (
        lambda **more: dqn(cartpole(2), **more),
        {"replay_buffer_kwargs": {"handle_timeout_termination": False}},
        {"handle_timeout_termination": False},
    ),
    "VecNormalize, n-step, not compact": (
        lambda **more: sac(VecNormalize(pendulum(2), clip_reward=0.5), **more),
        {"n_steps": 5, "gamma": 0.9},
        {"n_steps": 5, "gamma": 0.9, "compact": False},
    ),
}


def trained(model: Any, *rounds: int, between: Callable[[Any], object] = lambda model: None) -> Any:
    """Let a model learn; all random numbers begin anew, which they would share with a model made before."""
    model.set_random_seed(model.seed)
    for steps in rounds:
        model.learn(steps, reset_num_timesteps=False)
        between(model)
    return model


def with_ours(make: Callable[..., Any], theirs: dict[str, Any], ours: dict[str, Any]) -> Any:
    """The model with our buffer, of SB3's discount."""
    more = {"gamma": theirs["gamma"]} if "gamma" in theirs else {}
    return make(replay_buffer_class=FlatReplayBuffer, replay_buffer_kwargs=ours, **more)


@pytest.mark.parametrize("name", SETUPS)
def test_the_weights_are_those_with_sb3_s_buffer(name: str) -> None:
    make, theirs, ours = SETUPS[name]
    expected, model = make(**theirs), with_ours(make, theirs, ours)
    trained(expected, STEPS), trained(model, STEPS)
    assert torch.equal(weights(model), weights(expected))
    buffer = model.replay_buffer
    assert isinstance(buffer, FlatReplayBuffer)
    assert buffer.full and (buffer.pos, buffer.size()) == (
        expected.replay_buffer.pos,
        expected.replay_buffer.size(),
    )
    if name != "time limits are ends":
        timeouts = expected.replay_buffer.timeouts
        assert timeouts.any() and (
            "SAC" in str(type(model)) or (expected.replay_buffer.dones > timeouts).any()
        )


@pytest.mark.parametrize("name", ["n-step", "Dict", "SAC, 4 envs"])
def test_a_saved_buffer_goes_on(name: str, tmp_path: Path) -> None:
    """The model goes on with a pickle of its buffer, saved within a window and an episode, twice."""
    make, theirs, ours = SETUPS[name]
    expected, model = make(**theirs), with_ours(make, theirs, ours)

    def save_and_load(model: Any) -> None:
        model.save_replay_buffer(tmp_path / "buffer")
        model.load_replay_buffer(tmp_path / "buffer")

    rounds = (52, 120, 28, 100)
    trained(expected, *rounds), trained(model, *rounds, between=save_and_load)
    assert torch.equal(weights(model), weights(expected))
    assert model.replay_buffer.pos == expected.replay_buffer.pos


def test_a_new_model_goes_on_with_a_new_trajectory(tmp_path: Path) -> None:
    """Its env is reset, so n-step returns must not reach over the place where the saved buffer ends."""
    ours = {"n_steps": 3, "gamma": 0.5, "window": 16}
    first = sac(pendulum(2), replay_buffer_class=FlatReplayBuffer, replay_buffer_kwargs=ours).learn(48)
    last = first.replay_buffer.pos - 1
    first.save_replay_buffer(tmp_path / "buffer")
    model = sac(pendulum(2), replay_buffer_class=FlatReplayBuffer, replay_buffer_kwargs=ours)
    model.load_replay_buffer(tmp_path / "buffer")
    model.learn(48)
    check_cut_after(model.replay_buffer, last)


def check_cut_after(buffer: Any, step: int) -> None:
    """Both envs' rows at ``step`` are no ends, and begin anew with the next one."""
    rows = buffer.writer.read([step, step, step + 1, step + 1], [0, 1, 0, 1])
    assert rows["is_init"].flatten().tolist() == [False, False, True, True]
    assert not rows["next", "done"][:2].any()
    assert rows["discounts"].flatten().tolist() == [0.5, 0.5, 0.125, 0.125]


def test_a_second_learn_resets_the_envs_without_a_warning() -> None:
    ours = {"n_steps": 3, "gamma": 0.5}
    model = sac(pendulum(2), replay_buffer_class=FlatReplayBuffer, replay_buffer_kwargs=ours).learn(48)
    last = model.replay_buffer.pos - 1
    check_cut_after(model.learn(48).replay_buffer, last)


def test_n_step_returns_have_the_model_s_gamma_or_none() -> None:
    """Three rewards of 1 at gamma 0.9 are worth 2.71; a default of the buffer would be another discount."""

    def make(**ours: Any) -> Any:
        return dqn(
            envs("CartPole-v1", 1, 500),
            gamma=0.9,
            learning_starts=1000,
            replay_buffer_class=FlatReplayBuffer,
            replay_buffer_kwargs={"n_steps": 3, **ours},
        )

    with pytest.raises(ValueError, match=r"gamma is needed with n_steps=3.*'n_steps': 3, 'gamma': 0.99"):
        make()
    sample = make(gamma=0.9).learn(100).replay_buffer.sample(64)
    full = sample.rewards > 2  # three steps lie within the episode
    assert full.any()
    torch.testing.assert_close(sample.rewards[full].max(), torch.tensor(1 + 0.9 + 0.81))
    torch.testing.assert_close(sample.discounts[full].min(), torch.tensor(0.729))


def test_a_reset_buffer_is_empty() -> None:
    model = with_ours(lambda **more: dqn(cartpole(2), **more), {}, {})
    expected = dqn(cartpole(2))
    for each in (model, expected):
        trained(each, 100, 100, between=lambda model: model.replay_buffer.reset())
        assert each.replay_buffer.size() == 0
        each.learn(100)
    assert torch.equal(weights(model), weights(expected))


SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])


@pytest.mark.parametrize("compact", [True, False])
def test_every_row_of_a_scripted_env_is_right(compact: bool) -> None:
    """Observations are (env, episode, step): each row says by itself what it must be."""
    buffer_kwargs = {"compact": compact, "window": 8}
    model = with_ours(
        lambda **more: dqn(FlatVecEnv(make_scripted(SCRIPT)), learning_starts=10_000, **more),
        {},
        buffer_kwargs,
    )
    model.learn(2 * 100)
    buffer = model.replay_buffer
    assert buffer.size() == 75 and buffer.full
    seen = set()
    for batch in (buffer.sample(500) for _ in range(4)):
        for now, later, reward, done in zip(
            batch.observations, batch.next_observations, batch.rewards, batch.dones, strict=True
        ):
            env, episode, step = now.int().tolist()
            seen.add((env, episode, step))
            lengths = SCRIPT.lengths[env]
            assert later.int().tolist() == [env, episode, step + 1]
            assert float(reward) == 100 * episode + step + 1
            ends = SCRIPT.ends[env]
            last = step + 1 == lengths[episode % len(lengths)]
            terminated = last and ends[episode % len(ends)] != "truncated"
            assert bool(done) == terminated
    assert len(seen) == 150

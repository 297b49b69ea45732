"""A replay log of JAX simulators: a function that makes the env is all it needs."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from replay_logs import check_log

from flatroll.datasets import ReplayLog
from flatroll.wrappers import FunctionalEnv, StepCounter, as_functional, as_vector_env

jax = pytest.importorskip("jax")
jnp = jax.numpy


def first(key: Any) -> tuple[Any, Any]:
    """An episode is a number, which is how long it lasts; every third is cut."""
    episode = jax.random.randint(key, (), 1, 7)
    return jnp.stack([episode, 0]).astype(jnp.float32), {"episode": episode, "t": 0}


def after(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
    """Steps draw, too."""
    t = state["t"] + 1
    obs = jnp.stack([state["episode"], t + jax.random.uniform(key)]).astype(jnp.float32)
    over = t >= state["episode"]
    cut = over & (state["episode"] % 3 == 0)
    return obs, {"episode": state["episode"], "t": t}, action * 1.0, over & ~cut, cut, {"doubled": 2 * t}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("num_envs", [1, 5])
def test_pure_functions(tmp_path: Path, framework: Any, num_envs: int) -> None:
    def make() -> Any:
        count = FunctionalEnv(first, after, spaces.Discrete(5), name="Count")
        return StepCounter(as_vector_env(count, num_envs=num_envs, framework=framework))

    rows = check_log(tmp_path / "log", make, info_keys=["doubled"])
    assert rows["next", "truncated"].any()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Catch-bsuite"])
def test_gymnax(tmp_path: Path, name: str) -> None:
    gymnax = pytest.importorskip("gymnax")

    def make() -> Any:
        env, params = gymnax.make(name)
        if name != "Catch-bsuite":
            params = params.replace(max_steps_in_episode=12)
        return as_vector_env(as_functional(env, params=params), num_envs=4, dtype=torch.float64)

    rows = check_log(tmp_path / "log", make)
    assert rows["next", "done"].any()
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        assert {"gymnax", "jax", "jaxlib"} <= set(log.versions)
        assert name in repr(log)


def test_brax(tmp_path: Path) -> None:
    envs = pytest.importorskip("brax.envs")

    def make() -> Any:
        return as_vector_env(envs.get_environment("inverted_pendulum"), num_envs=2)

    check_log(tmp_path / "log", make)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v0"])
def test_phys2d(tmp_path: Path, name: str) -> None:
    pytest.importorskip("flax")
    check_log(tmp_path / "log", lambda: gym.make_vec(f"phys2d/{name}", num_envs=3))

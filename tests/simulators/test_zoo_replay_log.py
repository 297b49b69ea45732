"""A replay log of MuJoCo and MiniGrid, single and vectorized, in all modes, and of some other packages' envs."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from replay_logs import MODES, check_log

VECTORIZERS = [SyncVectorEnv, AsyncVectorEnv]


def make_mujoco(name: str) -> Any:
    pytest.importorskip("mujoco")
    return gym.make(name, max_episode_steps=15)


def make_minigrid(name: str) -> Any:
    """The mission is a text, which a batch does not hold."""
    minigrid = pytest.importorskip("minigrid")
    gym.register_envs(minigrid)
    from minigrid.wrappers import ImgObsWrapper  # pyright: ignore[reportMissingImports]

    return ImgObsWrapper(gym.make(name, max_episode_steps=15))


MAKERS = {
    "Hopper-v5": make_mujoco,
    "HalfCheetah-v5": make_mujoco,
    "MiniGrid-DoorKey-5x5-v0": make_minigrid,
    "MiniGrid-Dynamic-Obstacles-5x5-v0": make_minigrid,
}


@pytest.mark.parametrize("name", MAKERS)
def test_single_envs(tmp_path: Path, name: str) -> None:
    check_log(tmp_path / "log", MAKERS[name](name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorizer", VECTORIZERS)
@pytest.mark.parametrize("name", MAKERS)
def test_vectors(tmp_path: Path, name: str, vectorizer: Any, mode: str) -> None:
    env = vectorizer([lambda: MAKERS[name](name)] * 2, autoreset_mode=mode)
    check_log(tmp_path / "log", env)
    env.close()

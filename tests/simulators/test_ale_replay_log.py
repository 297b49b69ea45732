"""A replay log of Atari games: ale-py's single envs, vectorized in all modes, and its own vector env."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

pytest.importorskip("ale_py")
import ale_py  # pyright: ignore[reportMissingImports]
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from replay_logs import MODES, check_log

gym.register_envs(ale_py)


def bare(sticky: float = 0.25, frameskip: Any = 4) -> Any:
    return gym.make(
        "ALE/Breakout-v5",
        repeat_action_probability=sticky,
        frameskip=frameskip,
        obs_type="ram",
        max_episode_steps=25,
    )


def preprocessed(sticky: float) -> Any:
    env = gym.make(
        "ALE/Breakout-v5", frameskip=1, repeat_action_probability=sticky, max_num_frames_per_episode=200
    )
    return FrameStackObservation(AtariPreprocessing(env, screen_size=12, terminal_on_life_loss=True), 4)


@pytest.mark.parametrize(("sticky", "frameskip"), [(0.0, 4), (0.25, 4), (0.5, (2, 5))], ids=str)
def test_a_single_game(tmp_path: Path, sticky: float, frameskip: Any) -> None:
    check_log(tmp_path / "log", bare(sticky, frameskip))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vectorizer", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_vectors(tmp_path: Path, sticky: float, vectorizer: Any, mode: str) -> None:
    env = vectorizer([lambda: preprocessed(sticky)] * 2, autoreset_mode=mode)
    check_log(tmp_path / "log", env)
    env.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_the_vector_env_of_ale(tmp_path: Path, sticky: float, mode: str) -> None:
    def make() -> Any:
        return gym.make_vec(
            "ALE/Breakout-v5",
            num_envs=2,
            vectorization_mode="vector_entry_point",
            autoreset_mode=mode,
            img_height=12,
            img_width=12,
            max_num_frames_per_episode=200,
            repeat_action_probability=sticky,
        )

    check_log(tmp_path / "log", make)

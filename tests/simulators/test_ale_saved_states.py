"""Replay logs of Atari games: slices begin at saved states, with sticky actions, too."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

pytest.importorskip("ale_py")
import ale_py  # pyright: ignore[reportMissingImports]
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing
from replay_logs import MODES, assert_equal, check_slices, collect

from flatroll.datasets import ReplayLog
from flatroll.datasets.replay_log import recorder
from flatroll.datasets.replay_log.replay import Replayer
from flatroll.datasets.replay_log.windows import Save
from flatroll.wrappers import get_snapshot, set_snapshot

gym.register_envs(ale_py)


def make(sticky: float, mode: str) -> Any:
    return gym.make_vec(
        "ALE/Pong-v5",
        num_envs=2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        repeat_action_probability=sticky,
        obs_type="grayscale",
        max_episode_steps=150,
    )


@pytest.mark.parametrize("sticky", [0.0, 0.25])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_slice_of_pong_begins_at_a_saved_state(
    tmp_path: Path, sticky: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_FAR", 60)
    monkeypatch.setattr(recorder, "_BYTES_PER_ROW", 20)
    generator = torch.Generator().manual_seed(1)

    def policy(obs: Any) -> torch.Tensor:
        return torch.randint(6, (2,), generator=generator)

    rows = collect(tmp_path / "log", make(sticky, mode), batches=25, rows=40, policy=policy)
    begun: list[Any] = []
    env_rows = Replayer.env_rows

    def noted(self: Replayer, *arguments: Any) -> Any:
        begun.append(arguments[-1][1])
        return env_rows(self, *arguments)

    monkeypatch.setattr(Replayer, "env_rows", noted)
    with ReplayLog(tmp_path / "log") as log:
        assert log.kept == 0
        assert log.stats()["states"] > 6
        for first in (980, 700, 860):
            assert_equal(log.rows(first, first + 15), rows[first : first + 15])
        assert any(isinstance(origin, Save) for origin in begun)
        assert log._replayer is not None
        assert not log._replayer._wrong_saves
        check_slices(log, rows, 3)


def test_states_of_another_form_are_not_given_to_the_emulator() -> None:
    """Checked before the emulator sees them."""
    env = gym.make("ALE/Pong-v5")
    env.reset(seed=0)
    snapshot = get_snapshot(env)
    state = snapshot[-1][2]["state"]
    checksum = state.index(b"60e0ea3c")

    for wrong in (b"", state[:-1], state + b"0", state[:checksum] + b"f" + state[checksum + 1 :], 3):
        changed = [*snapshot[:-1], [*snapshot[-1][:2], {**snapshot[-1][2], "state": wrong}]]
        with pytest.raises(ValueError, match="no state of this game's emulator"):
            set_snapshot(env, changed)

    changed = [*snapshot[:-1], [*snapshot[-1][:2], {**snapshot[-1][2], "held": 99}]]
    with pytest.raises(ValueError, match="holds the action 99, expected 0 to 5"):
        set_snapshot(env, changed)
    set_snapshot(env, snapshot)


def preprocessed(sticky: float, mode: str) -> Any:
    def make_one() -> Any:
        env = gym.make(
            "ALE/Breakout-v5",
            frameskip=1,
            repeat_action_probability=sticky,
            max_num_frames_per_episode=1200,
        )
        return AtariPreprocessing(env, noop_max=7, frame_skip=2, screen_size=20, terminal_on_life_loss=True)

    return SyncVectorEnv([make_one] * 2, autoreset_mode=mode)


@pytest.mark.parametrize("sticky", [0.0, 0.25])
@pytest.mark.parametrize("mode", MODES)
def test_preprocessed_games_go_on_from_saved_states(
    tmp_path: Path, sticky: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_FAR", 60)
    monkeypatch.setattr(recorder, "_BYTES_PER_ROW", 20)
    make_all = partial(preprocessed, sticky, mode)

    rows = collect(tmp_path / "log", make_all, batches=8, rows=60)
    with ReplayLog(tmp_path / "log", create_env_fn=make_all) as log:
        assert log.kept == 0
        assert log.stats()["states"] > 3
        for first in (470, 320, 200):
            assert_equal(log.rows(first, first + 5), rows[first : first + 5])
        assert log._replayer is not None
        assert not log._replayer._wrong_saves

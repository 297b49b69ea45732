"""ale-py's single envs go on in the middle of an episode, with frame skip and sticky actions."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("ale_py")
import ale_py  # pyright: ignore[reportMissingImports]
from forms import is_long
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.disk import Checkpoint
from flatroll.estimators import DQNLoss, update_step
from flatroll.layout import run_ends
from flatroll.modules import q_network, set_epsilon
from flatroll.rollouts import Collector, RandomPolicy
from flatroll.wrappers import get_snapshot, set_snapshot, snapshot_problem
from flatroll.wrappers.testing import check_snapshots

gym.register_envs(ale_py)


def bare(sticky: float = 0.25, frameskip: Any = 4, **options: Any) -> Any:
    return gym.make(
        "ALE/Breakout-v5",
        repeat_action_probability=sticky,
        frameskip=frameskip,
        obs_type="ram",
        max_episode_steps=40,
        **options,
    )


def preprocessed() -> Any:
    env = gym.make("ALE/Breakout-v5", frameskip=1, max_num_frames_per_episode=400)
    return FrameStackObservation(AtariPreprocessing(env, screen_size=12, terminal_on_life_loss=True), 4)


@pytest.mark.parametrize(
    ("sticky", "frameskip"), [(0.0, 4), (0.25, 4), (0.25, 1), (0.5, (2, 5)), (0.9, 1)], ids=str
)
def test_sticky_actions_and_frame_skip(sticky: float, frameskip: Any) -> None:
    check_snapshots(lambda: bare(sticky, frameskip), steps=60)


def test_a_snapshot_changes_nothing() -> None:
    """It tries actions in the emulator to find the one that sticks, and puts all back."""
    one, other = (bare(0.9, 1) for _ in range(2))
    assert np.array_equal(one.reset(seed=3)[0], other.reset(seed=3)[0])
    moves = random.Random(0)
    for step in range(60):
        if step % 20 == 10:
            get_snapshot(one)
        action = moves.randrange(4)
        assert np.array_equal(one.step(action)[0], other.step(action)[0])


def test_without_the_held_action_it_would_differ() -> None:
    """So that the test above tests something."""
    differs = 0
    for seed in range(8):
        one, other = (bare(0.9, 1) for _ in range(2))
        one.reset(seed=seed)
        moves = random.Random(seed)
        for _ in range(30):
            one.step(moves.randrange(4))
        other.reset(seed=seed + 100)
        snapshot = get_snapshot(one)
        for *_, state in snapshot:
            if isinstance(state, dict) and "held" in state:
                assert state["held"] is not None
                state["held"] = (state["held"] + 2) % 4
        set_snapshot(other, snapshot)
        played, elsewhere = ([env.step(2)[0] for _ in range(20)] for env in (one, other))
        differs += not np.array_equal(played, elsewhere)
    assert differs > 0


def test_the_preprocessing_goes_on() -> None:
    check_snapshots(preprocessed, steps=40)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rows_of_a_sync_env(mode: str) -> None:
    def make(seed: int) -> Collector:
        env = SyncVectorEnv([bare] * 2, autoreset_mode=mode)
        return Collector(env, RandomPolicy(), frames_per_batch=31, seed=seed)

    one = make(0)
    for _ in range(3):
        next(one)
    state = one.state_dict(episodes=True)
    other = make(5)
    other.load_state_dict(state)
    for _ in range(4):
        batch, again = next(one), next(other)
        assert (batch == again).all()


def test_what_is_refused() -> None:
    assert "above 0.95" in str(snapshot_problem(bare(0.99)))
    assert "sticky continuous actions" in str(snapshot_problem(bare(0.25, continuous=True)))
    assert snapshot_problem(bare(0.0, continuous=True)) is None
    vector = gym.make_vec("ALE/Breakout-v5", num_envs=2, vectorization_mode="vector_entry_point")
    problem = "AtariVectorEnv has no get_snapshot and set_snapshot"
    assert Collector(vector, frames_per_batch=4).snapshot_problem == problem


class Run:
    """DQN on two sticky games; a save after the batches that are asked for.

    Attributes:
        playing: by the number of batches, whether a game was in the middle of an episode behind them.
    """

    def __init__(self, path: Path, seed: int) -> None:
        torch.manual_seed(seed)
        env = SyncVectorEnv([preprocessed] * 2)
        policy = q_network(env, hidden=(16,))
        set_epsilon(policy, 0.3)
        loss = DQNLoss(policy)
        self.step = update_step(loss, torch.optim.Adam(loss.parameters(), lr=0.01))
        self.collector = Collector(env, policy, frames_per_batch=15, seed=seed)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(200, compact_obs=True, frame_stack={"observation": 4}),
            sampler=SliceSampler(slice_len=4),
            batch_size=16,
        )
        self.checkpoint = Checkpoint(
            path,
            buffer=self.buffer,
            collector=self.collector,
            loss=loss,
            optimizer=self.step.optimizer,
            exact=True,
        )
        self.playing: dict[int, bool] = {}

    def load(self) -> int:
        """The number of batches behind the newest checkpoint."""
        if not self.checkpoint.versions():
            return 0
        return int(self.checkpoint.load()["batch"])

    def go_on(self, until: int, *, save_at: Container[int], first: int | None = None) -> None:
        if first is None:
            first = self.load()
        for batch in range(first + 1, until + 1):
            rows = next(self.collector)
            self.playing[batch] = not bool(rows["next", "done"][run_ends(rows)].all())
            self.buffer.extend(rows)
            self.step(self.buffer.sample())
            if batch in save_at:
                self.checkpoint.save(batch=batch)


def assert_equal(one: Run, other: Run) -> None:
    """The rows and weights of two runs."""
    rows = one.buffer.oldest_first()
    again = other.buffer.oldest_first()
    assert len(rows) == len(again) > 0
    assert (rows == again).all()
    for weights, same in zip(one.step.loss.parameters(), other.step.loss.parameters(), strict=True):
        assert torch.equal(weights, same)


def test_a_run_in_pieces_equals_one_that_never_saved(tmp_path: Path) -> None:
    """Two random moments, in the long form ten."""
    moments = sorted(random.Random(1).sample(range(1, 30), 10 if is_long() else 2))
    last = moments[-1] + 3
    whole = Run(tmp_path / "whole", 0)
    whole.go_on(last, save_at=set())

    for number, moment in enumerate(moments):
        piece = Run(tmp_path / "pieces", number)
        piece.go_on(moment, save_at={moment})
    piece = Run(tmp_path / "pieces", 77)
    piece.go_on(last, save_at=set())

    assert_equal(piece, whole)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """With kill -9; three kills, in the long form ten. No process ends on its own, so each one is killed."""
    moments = random.Random(0)
    command = [sys.executable, __file__, str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(10 if is_long() else 3):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it has saved, and goes on
            time.sleep(moments.uniform(0.0, 0.5))
            process.kill()
        assert process.returncode == -signal.SIGKILL

    killed = Run(tmp_path / "killed", 0)
    resumed = killed.load()
    killed.go_on(resumed + 3, save_at=(), first=resumed)
    whole = Run(tmp_path / "whole", 0)
    whole.go_on(resumed + 3, save_at=())

    assert_equal(killed, whole)
    assert sum(whole.playing.values()) > len(whole.playing) // 2  # games were in the middle of their episodes


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = Run(Path(sys.argv[1]), 0)
    behind = run.load()
    run.go_on(behind + 2, save_at=[behind + 2], first=behind)
    print("saved", flush=True)
    run.go_on(sys.maxsize, save_at=range(0, sys.maxsize, 2), first=behind + 2)

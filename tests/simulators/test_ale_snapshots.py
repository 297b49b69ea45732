"""ale-py's single envs go on in the middle of an episode, with frame skip and sticky actions."""

import random
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
    """DQN on two sticky games; a save after every batch."""

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

    def go_on(self, until: int, *, save_at: set[int]) -> None:
        first = int(self.checkpoint.load()["batch"]) if self.checkpoint.versions() else 0
        for batch in range(first, until):
            self.buffer.extend(next(self.collector))
            self.step(self.buffer.sample())
            if batch + 1 in save_at:
                self.checkpoint.save(batch=batch + 1)


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

    rows, again = whole.buffer.oldest_first(), piece.buffer.oldest_first()
    assert len(rows) == len(again) > 0
    assert (rows == again).all()
    for one, other in zip(whole.step.loss.parameters(), piece.step.loss.parameters(), strict=True):
        assert torch.equal(one, other)

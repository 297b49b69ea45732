"""Hindsight goals in stable-baselines3's loop."""

from typing import Any

import pytest
import torch

from flatroll.buffers import HindsightTransform
from flatroll.examples.hindsight import BitFlip, reached, reward

pytest.importorskip("stable_baselines3")
sb3_buffer: Any = pytest.importorskip("flatroll.trainers.sb3_buffer")


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_dqn_samples_goals_of_the_trajectory(n_envs: int, compact: bool) -> None:
    """An episode's goals are at most as many flips away as it has steps; rewards and ends go with the goals."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    transform = HindsightTransform(reward, goal_selection_strategy="final", terminated_fn=reached)
    model = DQN(
        "MultiInputPolicy",
        make_vec_env(lambda: BitFlip(20), n_envs, seed=0),
        replay_buffer_class=sb3_buffer.FlatReplayBuffer,
        replay_buffer_kwargs={"transform": transform, "compact": compact},
        buffer_size=600,
        learning_starts=200,
        batch_size=32,
        device="cpu",
        seed=0,
    )
    model.learn(390)
    buffer: Any = model.replay_buffer
    sample = buffer.sample(500)
    goal, later = sample.observations["desired_goal"], sample.next_observations
    assert torch.equal(goal, later["desired_goal"])
    hit = reached(later["achieved_goal"], goal, {}).float()[:, None]
    assert torch.equal(sample.rewards, hit - 1) and torch.equal(sample.dones, hit)
    away = (goal != sample.observations["achieved_goal"]).sum(1)
    # Random goals of 20 bits are 10 flips away; those that random flips reach are fewer.
    assert 0.02 < hit.mean() < 0.3 and (away <= 7).double().mean() > 0.5


def test_the_page_s_example_runs() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    section = page.split("## Hindsight goals in SB3")[1]
    code = section.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/trainers.md", "exec"), {})

"""What the tutorial on memory-efficient training begins with: a batch of CartPole, and two whole slices of it."""

from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, NextStateReconstructor, ReplayBuffer, SliceSampler
from flatroll.rollouts import Collector


def env_maker() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def collect(env: Any, **kwargs: Any) -> TensorDict:
    """200 rows."""
    torch.manual_seed(0)
    collector = Collector(create_env_fn=env, frames_per_batch=200, total_frames=200, seed=0, **kwargs)
    data = next(iter(collector))
    collector.shutdown()
    assert isinstance(data, TensorDict)
    return data


def sample_of(compact_data: TensorDict) -> TensorDict:
    """40 rows of a compact batch, with next observations put back: two slices of 20, with this seed."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=20, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=40,
    )
    rb.extend(compact_data)
    torch.manual_seed(2)
    drawn = rb.sample()
    assert isinstance(drawn, TensorDict)
    return drawn

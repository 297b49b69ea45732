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


def two_whole_slices(rb: ReplayBuffer) -> TensorDict:
    """The first sample of 40 rows, which the tutorial's text is about; a slice of a shorter episode is shorter."""
    drawn = next(drawn for drawn in rb if len(drawn) == 40)
    assert isinstance(drawn, TensorDict)
    return drawn


def sample_of(compact_data: TensorDict) -> TensorDict:
    """Two slices of 20 rows of a compact batch, with next observations put back."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=20, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=40,
    )
    rb.extend(compact_data)
    return two_whole_slices(rb)

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Images in 200 bytes per row
#
# Agents for Atari see the last four frames, 4 x 84 x 84 bytes, and a transition has two such stacks: 56,448 bytes. A
# million of them do not fit into the memory of most machines. Most of these bytes are redundant: the next observation
# is the observation of the next row, three of four frames are in the previous row, and most of a frame is background.
#
# This notebook uses a small game instead of Atari. If `ale-py` is installed, create the env with
# `gym.make("ALE/Pong-v5")` and Gymnasium's `AtariPreprocessing` instead; nothing else changes.

# %%
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import Collector


class Catch(gym.Env[Any, Any]):
    """A ball falls from the top; move a paddle of 12 pixels at the bottom to catch it."""

    observation_space: spaces.Space[Any] = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def frame(self) -> npt.NDArray[np.uint8]:
        """Draw the ball and the paddle."""
        seen = np.zeros((84, 84), np.uint8)
        seen[self.y : self.y + 3, self.x : self.x + 3] = 255
        seen[81:, self.paddle : self.paddle + 12] = 128
        return seen

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.y, self.paddle = int(self.np_random.integers(81)), 0, 36
        return self.frame(), {}

    def step(self, action: Any) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self.paddle = int(np.clip(self.paddle + 4 * (int(action) - 1), 0, 72))
        self.y += 3
        landed = self.y >= 78
        caught = landed and self.paddle - 2 <= self.x < self.paddle + 12
        return self.frame(), float(caught), landed, False, {}


# %% [markdown]
# With `compact_obs`, the batch has no next observations. Those that no row holds are in `collector.final`.

# %%
envs = gym.vector.SyncVectorEnv([lambda: FrameStackObservation(Catch(), 4)] * 4)
collector = Collector(envs, frames_per_batch=500, total_frames=1000, compact_obs=True, seed=0)
options: dict[str, dict[str, Any]] = {
    "each observation once": {},
    "each frame once": {"frame_stack": {"observation": 4}},
    "and compressed": {"frame_stack": {"observation": 4}, "codec": {"observation": "zstd"}},
}
buffers = {
    name: ReplayBuffer(storage=LazyTensorStorage(1000, compact_obs=True, **more), batch_size=64)
    for name, more in options.items()
}
for batch in collector:
    for buffer in buffers.values():
        buffer.extend(batch, final=collector.final)

# %%
print(f"{'plain tensors':22} {2 * 4 * 84 * 84:7,} bytes a row")
for name, buffer in buffers.items():
    print(f"{name:22} {buffer.stats()['bytes'] // len(buffer):7,} bytes a row")

# %% [markdown]
# All rows are equal bit for bit, including next observations.

# %%
first, *others = (buffer[:] for buffer in buffers.values())
assert all(bool((rows == first).all()) for rows in others)
print(first["observation"].shape, first["next", "observation"].shape)
envs.close()

"""A wrapper that adds the last action to the observation, for recurrent agents."""

from typing import Any

import gymnasium as gym
import numpy as np


class LastAction(gym.vector.VectorWrapper):
    """Appends the action that led to an observation, as -1 or 1; 0 in the first observation of an episode.

    For vector envs that reset in the step after an episode's last one (Gymnasium's default, ``NEXT_STEP``).

    >>> env = LastAction(gym.make_vec("CartPole-v1", num_envs=2))
    >>> seen, _ = env.reset(seed=0)
    >>> seen.shape, seen[:, -1].tolist(), env.step(np.array([0, 1]))[0][:, -1].tolist()
    ((2, 5), [0.0, 0.0], [-1.0, 1.0])
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        size = env.single_observation_space.shape[0] + 1
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)
        self.ended = np.ones(env.num_envs, np.bool_)

    def reset(self, **options: Any) -> Any:
        seen, info = self.env.reset(**options)
        self.ended[:] = False
        return np.column_stack([seen, np.zeros(len(seen), np.float32)]), info

    def step(self, actions: Any) -> Any:
        seen, reward, terminated, truncated, info = self.env.step(actions)
        led = np.where(self.ended, 0.0, 2.0 * actions - 1.0)  # this step only resets envs that have ended
        self.ended = terminated | truncated
        return np.column_stack([seen, led.astype(np.float32)]), reward, terminated, truncated, info

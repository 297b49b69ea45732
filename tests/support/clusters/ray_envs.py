"""Envs for actors, which import this file."""

import os
import signal
from functools import partial

import numpy as np
from gymnasium import Env, spaces
from list_collector import make
from torch import nn

make_env = partial(make, "SameStep")


class Wide(Env):
    """Observations of ``size`` float32 numbers, all of which are the step's number; episodes of 50 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, size):
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def observed(self):
        return np.full(self.observation_space.shape, self.count, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observed(), {}

    def step(self, action):
        self.count += 1
        return self.observed(), 1.0, self.count == 50, False, {}


class Dies(Wide):
    """Kills its process at the tenth step."""

    def step(self, action):
        if self.count == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Greedy(nn.Module):
    """The action with the largest output of a network."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, observation):
        return self.network(observation).argmax(-1)


def falls():
    raise ValueError("the robot fell over")

"""Envs and policies for workers, which import this file, and a comparison of what they give."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from split_envs import Part
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from flatroll.modules import GRUModule


class Seeded(gym.Env[Any, Any]):
    """The observation is (draw of the seeded generator, episode, step); the reward is the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(5)
    episode = 0

    def __init__(self, lengths: tuple[int, int] = (3, 7)) -> None:
        self._lengths = lengths

    def observed(self) -> Any:
        return np.array([self.np_random.random(), self.episode, self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        self.length = int(self.np_random.integers(self._lengths[0], self._lengths[1] + 1))
        return self.observed(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observed(), float(action), self.count == self.length, False, {"count": self.count}


class Faulty(Seeded):
    """Does what ``fault`` does in each step from its second episode on."""

    def __init__(self, fault: Callable[[], Any]) -> None:
        super().__init__()
        self._fault = fault

    def step(self, action: Any) -> Any:
        if self.episode >= 2:
            self._fault()
        return super().step(action)


class Odd(Exception):
    """Cannot be made from its text alone, nor pickled."""

    def __init__(self, lock: Any, text: str) -> None:
        super().__init__(text)
        self.lock = lock


def falls() -> None:
    raise ValueError("the robot fell over")


def is_odd() -> None:
    raise Odd(threading.Lock(), "an odd end")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(1000)


class Once:
    """Does what ``fault`` does, in the first process that creates the file."""

    def __init__(self, file: Path, fault: Callable[[], Any]) -> None:
        self.file, self.fault = file, fault

    def __call__(self) -> None:
        try:
            self.file.touch(exist_ok=False)
        except FileExistsError:
            return
        self.fault()


class ItsWeight(nn.Module):
    """Acts with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.weight.long().expand(len(obs)) % 5


def recurrent() -> nn.Module:
    gru = GRUModule(3, 5, in_key="observation", out_key="hidden")
    head = TensorDictModule(lambda hidden: (hidden.sum(-1) * 100).long() % 5, ["hidden"], ["action"])
    return TensorDictSequential(gru, head)


def envs(count: int, env: Callable[[], Any] = Seeded) -> Callable[[], Any]:
    return lambda: gym.vector.SyncVectorEnv([env] * count)


def assert_equal(one: TensorDictBase | None, other: TensorDictBase | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    columns, others = dict(one.items(True, True)), dict(other.items(True, True))
    assert columns.keys() == others.keys() and one.batch_size == other.batch_size
    for key, column in columns.items():
        assert torch.equal(column, others[key]), key


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_here(*_: Any) -> None:
    raise LookupError("the hook stops")


def half(count: int) -> Any:
    return Part(0, count)

"""An environment adapter as somebody else would write it: a VectorSource of two methods."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import Capabilities, InitTracker, VectorSource, VectorStream, as_vector_env
from flatroll.wrappers.testing import check_vector_env


class Countdown(VectorSource):
    """Row e counts its steps in one array that it never gives away, and ends after e + 2."""

    def __init__(self, num_envs: int, torch_env: bool) -> None:
        self.closed = False
        self.at: Any = np.zeros((num_envs, 1), np.float32)
        self.length: Any = np.arange(num_envs) + 2
        if torch_env:
            self.at, self.length = torch.from_numpy(self.at), torch.from_numpy(self.length)
        framework: Any = "torch" if torch_env else "numpy"
        box = spaces.Box(0, 100, (1,))
        can = Capabilities(torch.device("cpu"), framework)
        super().__init__(None, num_envs, box, spaces.Discrete(2), can)

    def reset(self, seed: Any, options: Any, rows: Any = None) -> tuple[Any, dict[str, Any]]:
        self.at[...] = 0 * self.at if rows is None else self.at * ~rows[:, None]
        return self.at + 0, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.at += 1
        ended = self.at[:, 0] == self.length
        return self.at + 0, self.at[:, 0] + 0, ended, ended & False, {}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("torch_env", [False, True])
def test_an_adapter_of_two_methods_keeps_the_contract(torch_env: bool) -> None:
    env = VectorStream(Countdown(3, torch_env), AutoresetMode.DISABLED)
    assert as_vector_env(env) is env
    check_vector_env(env, actions=lambda k: np.zeros(3, np.int64))
    batch = rollout(InitTracker(env), num_steps=4)
    assert batch["observation"].squeeze(-1).tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 0, 1, 2, 3]
    assert batch["next", "observation"].squeeze(-1).tolist() == [1, 2, 1, 2, 1, 2, 3, 1, 1, 2, 3, 4]
    assert batch["is_init"].squeeze(-1).tolist() == [x == 0 for x in batch["observation"].squeeze(-1)]


def test_a_collector_closes_it_and_an_adapter_without_an_env_can_be_closed() -> None:
    source = Countdown(2, False)
    collector = Collector(VectorStream(source, AutoresetMode.DISABLED), frames_per_batch=4)
    next(collector)
    collector.shutdown()
    assert source.closed
    VectorSource.close(source)


def test_a_source_must_reset_and_step() -> None:
    class Half(VectorSource):
        def reset(self, seed: Any, options: Any, rows: Any = None) -> tuple[Any, dict[str, Any]]:
            return None, {}

    with pytest.raises(TypeError, match="abstract method"):
        Half(None, 1, spaces.Box(0, 1), spaces.Discrete(2), Capabilities(torch.device("cpu"), "numpy"))  # type: ignore[abstract]

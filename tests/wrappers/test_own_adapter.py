"""An environment adapter as somebody else would write it: a VectorSource of two methods."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import assert_close
from torch import Tensor

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


class Resetting(Countdown):
    """Resets ended rows in the same step, and shows the observations before; reports what it is given."""

    def __init__(self, torch_env: bool, whole: bool) -> None:
        super().__init__(3, torch_env)
        self.capabilities = replace(self.capabilities, whole_finals=whole)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, ended, truncated, info = super().step(actions)
        self.last = obs
        if not self.capabilities.whole_finals:  # then nobody may read the other rows
            self.last = obs * ended[:, None] - 1.0 * ~ended[:, None]
        self.at *= ~ended[:, None]
        return self.at + 0, reward, ended, truncated, info

    def final_obs(self, info: Any, obs: Any, ended: Any, given: Any = None) -> Any:
        return self.last


@pytest.mark.parametrize("torch_env", [False, True])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("frames", [3, 7, 30])  # 7 rows of 3 envs leave some for the next batch
def test_final_observations_of_all_rows_make_the_same_batches(
    torch_env: bool, compact: bool, frames: int
) -> None:
    batches = []
    for whole in (False, True):
        env = VectorStream(Resetting(torch_env, whole), AutoresetMode.SAME_STEP)
        collector = Collector(env, frames_per_batch=frames, compact_obs=compact, seed=0)
        batches.append([next(collector) for _ in range(4)])
        finals = [] if collector.final is None else [collector.final]
        batches[-1] += finals
    for one, other in zip(*batches, strict=True):
        assert assert_close(one, other)
    if not compact:
        for batch in batches[1]:
            assert torch.equal(batch["next", "observation"], batch["observation"] + 1)


@pytest.mark.parametrize(("drawn", "kind"), [(None, np.ndarray), (lambda obs: torch.zeros(3).long(), Tensor)])
def test_random_actions_of_an_env_in_numpy_are_arrays_that_the_check_need_not_look_at(
    drawn: Any, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = VectorStream(Countdown(3, False), AutoresetMode.DISABLED)
    check, came = env._check_actions, []

    def look(actions: Any, known: bool) -> Any:
        came.append((type(actions), known))
        return check(actions, known)

    monkeypatch.setattr(env, "_check_actions", look)
    next(Collector(env, drawn, frames_per_batch=6))
    assert came == [(kind, drawn is None)] * 2


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

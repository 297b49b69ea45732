"""An envpool that follows a script: which envs are done first is known beforehand, and misuse is an AssertionError."""

import random
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict

from flatroll.rollouts import Collector
from flatroll.wrappers.arrays import map_tree
from flatroll.wrappers.testing import Script, ScriptedEnv

LENGTHS: Any = [[3, 1, 4], [2, 5], [6], [1, 1, 7], [4]]
ENDS: Any = [
    ["terminated", "truncated"],
    ["truncated", "terminated"],
    ["terminated"],
    ["truncated"],
    ["terminated"],
]


class ScriptedPool(VectorEnv[Any, Any, Any]):
    """``batch_size`` None: in sync mode. ``order`` seeds how long steps take; env e's take longer than those before.

    ``info["played"]`` is the action that the env was given, -1 where it only reset.
    """

    def __init__(
        self, num_envs: int = 5, batch_size: int | None = None, order: int = 0, **kinds: Any
    ) -> None:
        script = Script(num_envs, lengths=LENGTHS[:num_envs], ends=ENDS[:num_envs], **kinds)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.batch_size = num_envs, batch_size or num_envs
        self.config = {"num_envs": num_envs, "batch_size": self.batch_size}
        self.envs = [ScriptedEnv(script, env) for env in range(num_envs)]
        self.over = [True] * num_envs
        self.under_way: dict[int, Any] = {}  # env -> when its row is done, and the row
        self.random, self.time, self.steps = random.Random(order), 0.0, [0] * num_envs
        self.closed_times = 0
        self.came: list[int] = []  # the envs of the transitions, in their order

    observation_space = property(lambda self: self.envs[0].observation_space)
    action_space = property(lambda self: self.envs[0].action_space)

    def async_reset(self) -> None:
        assert not self.under_way, "reset of envs that are at work"
        for env in range(self.num_envs):
            self.begin(env, None)

    def reset(self, **options: Any) -> Any:
        assert self.batch_size == self.num_envs
        self.async_reset()
        obs, _, _, _, info = self.recv()
        return obs, info

    def begin(self, env: int, action: Any) -> None:
        assert env not in self.under_way, "an env that is at work got an action"
        self.steps[env] += 1
        if action is None or self.over[env]:
            obs, info = self.envs[env].reset()
            row = obs, 0.0, False, False, {**info, "played": -1}
        else:
            obs, reward, terminated, truncated, info = self.envs[env].step(action)
            played = action["press"] if isinstance(action, dict) else np.ravel(action)[0]
            row = obs, reward, terminated, truncated and not terminated, {**info, "played": played}
        self.over[env] = row[2] or row[3]
        self.under_way[env] = self.time + self.random.expovariate(1 / (1 + env)), row

    def send(self, actions: Any, env_id: Any = None) -> None:
        ids = range(self.num_envs) if env_id is None else env_id.tolist()
        for i, env in enumerate(ids):
            self.begin(env, map_tree(lambda leaf, i=i: leaf[i], actions))

    def recv(self) -> Any:
        assert len(self.under_way) >= self.batch_size, "recv would wait for ever"
        ids = sorted(self.under_way, key=lambda env: self.under_way[env][0])[: self.batch_size]
        self.time = self.under_way[ids[-1]][0]
        if self.batch_size == self.num_envs:
            ids.sort()
        rows = [self.under_way.pop(env)[1] for env in ids]
        self.came += [env for env, row in zip(ids, rows, strict=True) if row[4]["played"] >= 0]
        obs = map_tree(lambda *leaves: np.stack(leaves), *(row[0] for row in rows))
        info: dict[str, Any] = {key: np.array([row[4][key] for row in rows]) for key in ("t", "played")}
        info["env_id"] = np.array(ids, np.int32)
        reward, terminated, truncated = (np.array([row[i] for row in rows]) for i in (1, 2, 3))
        return obs, reward.astype(np.float32), terminated, truncated, info

    def close(self, **options: Any) -> None:
        self.closed_times += 1


ScriptedPool.__module__ = "envpool.scripted"  # which is how its kind is told


def same(one: Any, other: Any) -> None:
    """Equal keys, dtypes and values."""
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    for key in one.keys(True, True):
        assert one[key].dtype is other[key].dtype, key
        assert torch.equal(one[key], other[key]), (key, one[key], other[key])


def by_env(batches: list[Any], num_envs: int) -> list[Any]:
    rows: Any = TensorDict.cat(batches)
    return [rows[rows["collector", "traj_ids"] % num_envs == env] for env in range(num_envs)]


def same_streams(batches: list[Any], others: list[Any], num_envs: int) -> None:
    """Each env's rows in time order are equal, as far as both go."""
    compared = 0
    for one, other in zip(by_env(batches, num_envs), by_env(others, num_envs), strict=True):
        shared = min(len(one), len(other))
        same(one[:shared], other[:shared])
        compared += shared
    assert compared > 0


def take(collector: Collector, batches: int) -> list[Any]:
    taken = [next(collector) for _ in range(batches)]
    collector.shutdown()
    return taken

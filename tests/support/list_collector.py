"""A collector written with Python lists, and the script that it and the library's collector are given."""

from collections import defaultdict
from types import SimpleNamespace

import gymnasium as gym
import torch

from flatroll.rollouts import Collector
from flatroll.wrappers import (
    as_vector_env,
)
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

LENGTHS = [[3, 1, 4], [2, 5], [6]]
ENDS = [["terminated", "truncated", "both"], ["truncated", "terminated"], ["terminated"]]
GYM_MODES = ["NextStep", "SameStep", "Disabled"]
MODES = [*GYM_MODES, "torch", "torch NextStep"]
IDS = ("collector", "traj_ids")


def script(**options):
    return Script(3, **{"lengths": LENGTHS, "ends": ENDS, **options})


def make(which, own=None, **options):
    """The script as an env of this autoreset mode or kind."""
    own = own or script()
    if which == "torch":
        return ScriptedTorchEnv(own, **options)
    if which == "torch NextStep":
        return as_vector_env(ScriptedVectorEnv(own, **options), framework="torch")
    return ScriptedVectorEnv(own, autoreset_mode=which, **options)


def always_four(obs):
    return torch.full((len(obs),), 4)


class ListEnv:
    """The script, one Python object per row; `step` gives the transitions as dicts."""

    def __init__(self, own, which):
        self.script, self.gap = own, "NextStep" in which
        self.episode, self.time = [-1] * own.num_envs, [0] * own.num_envs
        self.pending = [False] * own.num_envs

    def reset(self):
        for env in range(self.script.num_envs):
            self.begin(env)

    def begin(self, env):
        self.episode[env] += 1
        self.time[env], self.pending[env] = 0, False

    def step(self):
        rows = []
        for env in range(self.script.num_envs):
            if self.pending[env]:
                self.begin(env)
                continue
            episode, time = self.episode[env], self.time[env]
            self.time[env] += 1
            ended = self.time[env] == self.script.length(env, episode)
            end = self.script.end(env, episode)
            rows.append(
                {
                    "place": (env, episode, time),
                    "id": episode * self.script.num_envs + env,
                    "reward": 100.0 * episode + time + 1,
                    "terminated": ended and end != "truncated",
                    "truncated": ended and end != "terminated",
                    "done": ended,
                    "is_init": time == 0,
                    "count": time,
                }
            )
            if ended and self.gap:
                self.pending[env] = True
            elif ended:
                self.begin(env)
        return rows


class ListCollector:
    """What the collector must yield: windows of rows in order of time, each laid out env after env."""

    def __init__(self, own, which, frames, reset_each=False):
        self.env, self.frames, self.reset_each = ListEnv(own, which), frames, reset_each
        self.queue, self.started, self.collected = [], False, 0
        self.starts = []  # of each vector step: how many rows came before it

    def window(self, begins_batch=True):
        if not self.started or (self.reset_each and begins_batch and len(self.queue) < self.frames):
            self.env.reset()
            self.started = True
        while len(self.queue) < self.frames:
            before = self.collected + len(self.queue)
            self.queue += [{**row, "before": before} for row in self.env.step()]
        window, self.queue = self.queue[: self.frames], self.queue[self.frames :]
        self.collected += self.frames
        return sorted(window, key=lambda row: row["place"][0])

    def trajectories(self, windows, per_batch):
        """Batches of complete trajectories, and the smaller one at the end."""
        open_rows, ready, batches = defaultdict(list), [], []
        begins_batch = True
        for i in range(windows):
            for row in self.window(begins_batch):
                open_rows[row["id"]].append(row)
            for key in sorted(key for key, rows in open_rows.items() if rows[-1]["done"]):
                ready.append(open_rows.pop(key))
            begins_batch = len(ready) >= per_batch
            while len(ready) >= per_batch or (ready and i + 1 == windows):
                batches.append(ready[:per_batch])
                ready = ready[per_batch:]
        return [[row for trajectory in batch for row in trajectory] for batch in batches]


def cut_rows(rows):
    """The positions of rows that end a run without being done."""
    last = [i for i in range(len(rows)) if i + 1 == len(rows) or rows[i]["id"] != rows[i + 1]["id"]]
    return {i for i in last if not rows[i]["done"]}


def check(batch, rows, *, ids=True, marked=False, num_envs=3):
    """The batch has exactly these rows, but for their next observations."""
    cut = cut_rows(rows) if marked else set()
    assert batch["observation"].tolist() == [list(row["place"]) for row in rows]
    assert batch["next", "reward"].squeeze(-1).tolist() == [row["reward"] for row in rows]
    assert batch["next", "terminated"].squeeze(-1).tolist() == [row["terminated"] for row in rows]
    for key in ("truncated", "done"):
        assert batch["next", key].squeeze(-1).tolist() == [row[key] or i in cut for i, row in enumerate(rows)]
    assert batch["step_count"].squeeze(-1).tolist() == [row["count"] for row in rows]
    if ids:
        assert batch[IDS].tolist() == [row["id"] for row in rows]
    else:
        assert IDS not in batch.keys(True, True)
    envs = [row["place"][0] for row in rows]
    starts = [num_envs > 1 and not ids and (i == 0 or envs[i] != envs[i - 1]) for i in range(len(rows))]
    assert batch["is_init"].squeeze(-1).tolist() == [
        row["is_init"] or start for row, start in zip(rows, starts, strict=True)
    ]


def next_obs(batch, final=None):
    """The next observations, from the batch or from its later rows and its final ones."""
    if final is None:
        return batch["next", "observation"].tolist()
    assert ("next", "observation") not in batch.keys(True, True)
    assert final["row"].dtype is torch.int64
    assert final["row"].tolist() == sorted(set(final["row"].tolist()))
    following = batch["observation"].roll(-1, 0)
    following[final["row"]] = final["next", "observation"]
    return following.tolist()


def true_next(rows):
    return [[env, episode, time + 1] for env, episode, time in (row["place"] for row in rows)]


class FakeBuffer:
    """Remembers what it was given."""

    def __init__(self, fails=False):
        self.batches, self.fails = [], fails

    def extend(self, batch, **options):
        if self.fails:
            raise OSError("disk full")
        self.batches.append((batch, options))


def cartpole(seed, **options):
    env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    return Collector(env, frames_per_batch=20, total_frames=60, seed=seed, **options)


class Counter(torch.nn.Module):
    """A recurrent policy whose state counts the steps since the episode's start, from 7."""

    in_keys = ("observation", "state", "is_init")
    out_keys = ("action", ("next", "state"))

    def forward(self, td):
        assert td["is_init"].shape == (*td.shape, 1)
        td["next", "state"] = td["state"] + 1
        td["action"] = torch.zeros(td.shape, dtype=torch.int64)
        return td

    def make_tensordict_primer(self):
        return SimpleNamespace(defaults={"state": torch.full((1,), 7.0)})


def keys_of(batch):
    return {key if isinstance(key, str) else tuple(key) for key in batch.keys(True, True)}

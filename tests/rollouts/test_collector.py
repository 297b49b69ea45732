"""Every argument of the collector, against a collector written with Python lists."""

import contextlib
import copy
import inspect
import io
import itertools
from collections import defaultdict
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import (
    ClipAction,
    NormalizeObservation,
    RescaleAction,
    TransformAction,
    TransformReward,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.layout import audit, join, run_ends
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import (
    CompactObs,
    InitTracker,
    NextObservationDelta,
    RewardSum,
    StepCounter,
    TrajId,
    as_vector_env,
)
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv, make_scripted

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


# --- the oracle ---------------------------------------------------------------------------------------------


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

    def window(self):
        if not self.started or (self.reset_each and len(self.queue) < self.frames):
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
        open_rows, ready = defaultdict(list), []
        for _ in range(windows):
            for row in self.window():
                open_rows[row["id"]].append(row)
            for key in sorted(key for key, rows in open_rows.items() if rows[-1]["done"]):
                ready.append(open_rows.pop(key))
        batches = [ready[i : i + per_batch] for i in range(0, len(ready), per_batch)]
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


lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(
    lengths=lengths,
    which=st.sampled_from(MODES),
    frames=st.integers(1, 14),
    windows=st.integers(1, 6),
    reset_each=st.booleans(),
    compact=st.booleans(),
    marked=st.booleans(),
    ids=st.booleans(),
)
def test_any_windows_of_any_script(lengths, which, frames, windows, reset_each, compact, marked, ids):
    own = Script(len(lengths), lengths=lengths, ends=ENDS[0])
    oracle = ListCollector(own, which, frames, reset_each)
    collector = Collector(
        StepCounter(make(which, own)),
        frames_per_batch=frames,
        total_frames=frames * windows,
        reset_at_each_iter=reset_each,
        compact_obs=compact,
        set_truncated=marked,
        track_traj_ids=ids,
        seed=0,
    )
    seen = 0
    for batch in collector:
        rows = oracle.window()
        check(batch, rows, ids=ids, marked=marked, num_envs=own.num_envs)
        assert next_obs(batch, collector.final) == true_next(rows)
        assert (collector.final is None) == (not compact)
        seen += 1
    assert seen == windows


@settings(deadline=None, max_examples=80)
@given(
    lengths=lengths,
    which=st.sampled_from(["SameStep", "torch"]),
    frames=st.integers(1, 14),
    windows=st.integers(1, 6),
    reset_each=st.booleans(),
    compact=st.booleans(),
    ids=st.booleans(),
)
def test_any_script_of_an_env_that_hides_its_last_observations(
    lengths, which, frames, windows, reset_each, compact, ids
):
    """What is not known is said to be unknown; everything else is as in any env, cuts by a reset included."""
    own = Script(len(lengths), lengths=lengths, ends=ENDS[0])
    oracle = ListCollector(own, which, frames, reset_each)
    collector = Collector(
        StepCounter(make(which, own, final_obs="absent")),
        frames_per_batch=frames,
        total_frames=frames * windows,
        reset_at_each_iter=reset_each,
        compact_obs=compact,
        track_traj_ids=ids,
        seed=0,
    )
    for batch in collector:
        rows = oracle.window()
        check(batch, rows, ids=ids, num_envs=own.num_envs)
        known = [not row["done"] for row in rows]
        assert batch["collector", "next_known"].tolist() == known
        following = next_obs(batch, collector.final)
        assert [obs for obs, there in zip(following, known, strict=True) if there] == [
            obs for obs, there in zip(true_next(rows), known, strict=True) if there
        ]
        if compact:
            assert not {i for i, there in enumerate(known) if not there} & set(
                collector.final["row"].tolist()
            )
        else:
            assert batch["next", "observation"].isnan().all(-1).tolist() == [not there for there in known]


@settings(deadline=None, max_examples=80)
@given(
    lengths=lengths,
    which=st.sampled_from(MODES),
    frames=st.integers(1, 14),
    windows=st.integers(1, 8),
    per_batch=st.integers(1, 4),
    reset_each=st.booleans(),
    compact=st.booleans(),
)
def test_complete_trajectories_of_any_script(lengths, which, frames, windows, per_batch, reset_each, compact):
    own = Script(len(lengths), lengths=lengths, ends=ENDS[0])
    expected = ListCollector(own, which, frames, reset_each).trajectories(windows, per_batch)
    collector = Collector(
        StepCounter(make(which, own)),
        frames_per_batch=frames,
        total_frames=frames * windows,
        trajs_per_batch=per_batch,
        reset_at_each_iter=reset_each,
        compact_obs=compact,
        seed=0,
    )
    seen = []
    for batch in collector:
        seen.append(batch)
        rows = expected[len(seen) - 1]
        check(batch, rows)
        assert next_obs(batch, collector.final) == true_next(rows)
    assert len(seen) == len(expected)


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths,
    which=st.sampled_from(MODES),
    frames=st.integers(1, 14),
    windows=st.integers(1, 6),
    random=st.integers(0, 40),
    reset_each=st.booleans(),
)
def test_random_rows_of_any_script(lengths, which, frames, windows, random, reset_each):
    """At least the first ``random`` rows, and no vector step that begins after them."""
    own = Script(len(lengths), lengths=lengths, action="box")
    oracle = ListCollector(own, which, frames, reset_each)
    collector = Collector(
        make(which, own),
        lambda obs: torch.full((own.num_envs, 2), 9.0),
        frames_per_batch=frames,
        total_frames=frames * windows,
        init_random_frames=random,
        reset_at_each_iter=reset_each,
    )
    for batch in collector:
        drawn = (batch["action"].abs() <= 1).all(-1)
        assert torch.equal(drawn, (batch["action"] != 9).any(-1))
        assert drawn.tolist() == [row["before"] < random for row in oracle.window()]


# --- counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODES)
@pytest.mark.parametrize("frames", range(1, 7))
def test_batches_have_exactly_so_many_rows(which, frames):
    collector = Collector(make(which), frames_per_batch=frames, total_frames=5 * frames)
    batches = list(collector)
    assert [batch.batch_size for batch in batches] == [torch.Size([frames])] * 5
    assert collector.frames == 5 * frames


def test_one_env_and_many():
    for num_envs in (1, 1024):
        own = Script(num_envs, lengths=[3, 5])
        oracle = ListCollector(own, "NextStep", 1500)
        for batch in Collector(StepCounter(make("NextStep", own)), frames_per_batch=1500, total_frames=3000):
            rows = oracle.window()
            check(batch, rows, num_envs=num_envs)
            assert next_obs(batch) == true_next(rows)


def test_a_total_that_is_no_multiple_is_rounded_up_with_a_warning():
    with pytest.warns(
        UserWarning, match="total_frames=25 is no multiple of frames_per_batch=10: 30 frames will"
    ):
        collector = Collector(make("SameStep"), frames_per_batch=10, total_frames=25)
    assert len(list(collector)) == 3
    assert collector.frames == 30
    assert list(collector) == []


def test_without_a_total_there_is_no_end():
    collector = Collector(make("SameStep"), frames_per_batch=10)
    assert [len(batch) for batch, _ in zip(collector, range(20), strict=False)] == [10] * 20


def test_steps_are_limited_and_the_env_is_told():
    env = make_scripted(Script(2, lengths=50))
    collector = Collector(env, frames_per_batch=12, max_frames_per_traj=2, seed=0)
    batch = next(collector)
    assert batch["step_count"].max() == 1
    ends = batch["step_count"] == 1
    assert torch.equal(batch["next", "truncated"], ends)
    assert not batch["next", "terminated"].any()


# --- trajectories -------------------------------------------------------------------------------------------


def test_trajectories_of_different_envs_interleave_and_come_out_whole():
    own = Script(3, lengths=[[7], [2], [3]], ends="terminated")
    collector = Collector(
        StepCounter(make("SameStep", own)), frames_per_batch=3, total_frames=42, trajs_per_batch=2, seed=0
    )
    places = [batch["observation"].tolist() for batch in collector]
    assert [sorted({(env, episode) for env, episode, _ in rows}) for rows in places] == [
        [(1, 0), (2, 0)],
        [(1, 1), (2, 1)],
        [(0, 0), (1, 2)],
        [(1, 3), (2, 2)],
        [(1, 4), (2, 3)],
        [(0, 1), (1, 5)],
        [(1, 6)],
    ]
    for rows in places:
        for (env, episode, time), (env2, episode2, time2) in itertools.pairwise(rows):
            assert time2 == (time + 1 if (env, episode) == (env2, episode2) else 0)


def test_every_joined_batch_has_its_own_final_observations():
    """One window may complete several batches; each must come with its own final."""
    own = Script(4, lengths=1)
    collector = Collector(
        make("SameStep", own),
        frames_per_batch=12,
        total_frames=12,
        trajs_per_batch=2,
        compact_obs=True,
        seed=0,
    )
    for batch in collector:
        assert collector.final["row"].tolist() == [0, 1]
        following = batch["observation"] + torch.tensor([0.0, 0.0, 1.0])
        assert torch.equal(collector.final["next", "observation"], following)


def test_batches_that_are_ready_survive_a_break():
    own = Script(4, lengths=1)
    collector = Collector(
        make("SameStep", own), frames_per_batch=12, total_frames=12, trajs_per_batch=2, seed=0
    )
    seen = []
    while len(seen) < 6:
        for batch in collector:
            seen += [batch]
            break
    assert sorted(torch.cat([batch[IDS] for batch in seen]).tolist()) == list(range(12))


def test_open_trajectories_that_a_reset_cuts_are_dropped():
    """They can never end: kept, they would fill the memory."""
    own = Script(3, lengths=[[50], [50], [2]])
    collector = Collector(
        make("SameStep", own), frames_per_batch=10, trajs_per_batch=1, reset_at_each_iter=True, seed=0
    )
    for _ in range(50):
        next(collector)
    assert len(collector._joiner._open) <= 10


def test_trajectories_go_into_a_buffer_whole():
    for compact in (False, True):
        buffer = FakeBuffer()
        collector = Collector(
            make("SameStep"),
            frames_per_batch=10,
            total_frames=60,
            trajs_per_batch=3,
            replay_buffer=buffer,
            compact_obs=compact,
            seed=0,
        )
        yielded = list(collector)
        assert yielded == [None] * len(buffer.batches)
        for batch, options in buffer.batches:
            ends = run_ends(batch)
            assert torch.equal(ends, batch["next", "done"].squeeze(-1))
            assert list(options) == (["final"] if compact else [])
        assert len({int(i) for batch, _ in buffer.batches for i in batch[IDS]}) == sum(
            int(run_ends(batch).sum()) for batch, _ in buffer.batches
        )


# --- cuts, resets, padding ----------------------------------------------------------------------------------


def test_cut_rows_are_marked_only_when_asked():
    plain, marked = (
        next(Collector(make("SameStep"), frames_per_batch=10, set_truncated=flag, seed=0))
        for flag in (False, True)
    )
    ends = run_ends(plain).unsqueeze(-1)
    cut = ends & ~plain["next", "done"]
    assert cut.any()
    assert torch.equal(marked["next", "done"], plain["next", "done"] | cut)
    assert torch.equal(marked["next", "truncated"], plain["next", "truncated"] | cut)
    assert torch.equal(marked["next", "terminated"], plain["next", "terminated"])


def test_a_marked_trajectory_keeps_its_id_in_the_next_batch():
    collector = Collector(
        make("SameStep", Script(1, lengths=20)), frames_per_batch=4, total_frames=12, set_truncated=True
    )
    batches = list(collector)
    assert [batch[IDS].unique().tolist() for batch in batches] == [[0], [0], [0]]
    assert [int(batch["is_init"].sum()) for batch in batches] == [1, 0, 0]


@pytest.mark.parametrize("which", MODES)
def test_a_reset_with_more_rows_waiting_than_a_batch_takes(which):
    """Ten envs, batches of three: a second reset must not overwrite what follows the waiting rows."""
    own = Script(10, lengths=[4, 2])
    oracle = ListCollector(own, which, 3, reset_each=True)
    collector = Collector(
        StepCounter(make(which, own)), frames_per_batch=3, total_frames=60, reset_at_each_iter=True, seed=0
    )
    for batch in collector:
        rows = oracle.window()
        check(batch, rows)
        assert next_obs(batch) == true_next(rows)


def test_splitting_warns_and_gives_what_join_undoes():
    with pytest.warns(UserWarning, match="split_trajs=True pads every trajectory"):
        collector = Collector(make("SameStep"), frames_per_batch=10, split_trajs=True, seed=0)
    padded = next(collector)
    assert padded.ndim == 2 and padded["collector", "mask"].dtype is torch.bool
    flat = next(Collector(make("SameStep"), frames_per_batch=10, seed=0))
    assert (join(padded) == flat).all()


def test_splitting_without_ids_or_with_finals_on_their_way_is_refused():
    with pytest.raises(ValueError, match="split_trajs=True needs track_traj_ids=True"):
        Collector(make("SameStep"), frames_per_batch=10, split_trajs=True, track_traj_ids=False)
    with pytest.raises(ValueError, match="trajs_per_batch needs track_traj_ids=True"):
        Collector(make("SameStep"), frames_per_batch=10, trajs_per_batch=1, track_traj_ids=False)
    for env, options in ((make("SameStep"), {}), (CompactObs(make("SameStep")), {"compact_obs": True})):
        with pytest.raises(ValueError, match="split_trajs=True cannot go with a replay_buffer"):
            Collector(env, frames_per_batch=10, split_trajs=True, replay_buffer=FakeBuffer(), **options)


# --- postproc, hooks, buffer --------------------------------------------------------------------------------


class FakeBuffer:
    """Remembers what it was given."""

    def __init__(self, fails=False):
        self.batches, self.fails = [], fails

    def extend(self, batch, **options):
        if self.fails:
            raise OSError("disk full")
        self.batches.append((batch, options))


def test_postproc_hooks_and_buffer_come_in_this_order():
    log = []

    def note(what, value=None):
        log.append(what)
        return value

    class Buffer(FakeBuffer):
        def extend(self, batch, **options):
            note(f"extend {sorted(options)} {len(batch)}")

    collector = Collector(
        make("SameStep"),
        lambda obs: note("act", torch.zeros(3, dtype=torch.int64)),
        frames_per_batch=6,
        total_frames=12,
        pre_collect_hook=lambda: note("pre"),
        postproc=lambda batch: note("postproc", batch[:4]),
        post_collect_hook=lambda batch: note(f"post {len(batch)}"),
        replay_buffer=Buffer(),
    )
    assert list(collector) == [None, None]
    assert log == ["pre", "act", "act", "postproc", "post 4", "extend [] 4"] * 2


def test_the_result_of_postproc_is_yielded_and_that_of_the_hook_is_not():
    collector = Collector(
        make("SameStep"),
        frames_per_batch=6,
        postproc=lambda batch: batch.select("action"),
        post_collect_hook=lambda batch: "ignored",
    )
    assert list(next(collector).keys()) == ["action"]


def test_the_hook_before_collecting_comes_before_the_reset():
    log = []

    class Env(ScriptedVectorEnv):
        def reset(self, **options):
            log.append("reset")
            return super().reset(**options)

    collector = Collector(
        Env(script(), autoreset_mode="SameStep"),
        frames_per_batch=6,
        reset_at_each_iter=True,
        pre_collect_hook=lambda: log.append("pre"),
        post_collect_hook=lambda batch: log.append("post"),
    )
    next(collector)
    next(collector)
    assert log == ["pre", "reset", "post"] * 2


def test_a_buffer_gets_the_final_observations_only_of_compact_batches():
    for compact in (False, True):
        buffer = FakeBuffer()
        collector = Collector(
            make("SameStep"), frames_per_batch=10, total_frames=30, replay_buffer=buffer, compact_obs=compact
        )
        assert list(collector) == [None] * 3
        for batch, options in buffer.batches:
            assert len(batch) == 10
            assert list(options) == (["final"] if compact else [])
        assert (buffer.batches[-1][1].get("final") is collector.final) or not compact


# --- random actions and seeds -------------------------------------------------------------------------------


def cartpole(seed, **options):
    env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    return Collector(env, frames_per_batch=20, total_frames=60, seed=seed, **options)


def test_a_seed_makes_env_and_random_actions_reproducible():
    one, same, other = (list(cartpole(seed)) for seed in (5, 5, 6))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0]["observation"], other[0]["observation"])
    assert not torch.equal(one[0]["action"], other[0]["action"])


def test_without_a_seed_torch_reproduces_the_random_actions():
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(next(Collector(make("SameStep"), frames_per_batch=60))["action"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    torch.manual_seed(1)
    one, other = (next(Collector(make("SameStep"), frames_per_batch=60))["action"] for _ in range(2))
    assert not torch.equal(one, other)


def test_windows_change_no_random_action():
    runs = []
    for frames in (3, 300):
        collector = Collector(make("SameStep"), frames_per_batch=frames, total_frames=600, seed=1)
        batch = torch.cat(list(collector))
        runs.append(batch["action"][batch["observation"][:, 0] == 1])
    assert torch.equal(*runs)


def test_random_frames_of_a_random_policy_change_nothing():
    one, other = (
        torch.cat(
            list(
                Collector(make("SameStep"), frames_per_batch=9, total_frames=90, seed=1, init_random_frames=n)
            )
        )
        for n in (0, 40)
    )
    assert (one == other).all()


def test_the_policy_sees_the_random_rows_too():
    """Its states go on and its other outputs are recorded, so columns are there from the first row on."""
    module = Counter()
    module.script_action = True
    collector = Collector(make("SameStep"), module, frames_per_batch=30, init_random_frames=15, seed=0)
    batch = next(collector)
    assert torch.equal(batch["state"].squeeze(-1), 7 + batch["observation"][:, 2])


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


# --- info entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize("mode", GYM_MODES)
def test_info_entries_stand_with_the_observation_and_with_the_step(mode, backend):
    """The scripted envs say ``t``; SAME_STEP moves that of the last step to ``final_info``."""
    env = make_scripted(script(), backend=backend, autoreset_mode=mode)
    collector = Collector(env, frames_per_batch=20, total_frames=40, info_keys=["t"], seed=0)
    for batch in collector:
        assert torch.equal(batch["t"].double(), batch["observation"][:, 2].double())
        later = batch["next", "t"] == batch["t"] + 1
        if backend == "native" and mode == "SameStep":  # this env keeps the last ``t`` to itself
            later |= batch["next", "done"].squeeze(-1)
        assert later.all()


class Telling(ScriptedVectorEnv):
    """Its info has what ``tell(step)`` gives, the same array again and again."""

    def __init__(self, tell, at_reset=None, mode="SameStep"):
        super().__init__(Script(2, lengths=50), autoreset_mode=mode)
        self.tell, self.at_reset, self.steps = tell, at_reset or {}, 0

    def reset(self, **options):
        return super().reset(**options)[0], dict(self.at_reset)

    def step(self, actions):
        *result, _ = super().step(actions)
        self.steps += 1
        return *result, self.tell(self.steps)


def test_info_entries_that_come_now_and_then_are_zero_elsewhere():
    """Not what an earlier batch left in the same place."""
    env = Telling(lambda n: {"hit": np.full(2, float(n))} if n % 3 == 0 else {})
    collector = Collector(env, frames_per_batch=8, total_frames=40, info_keys=["hit"])
    batch = torch.cat(list(collector))
    time = batch["observation"][:, 2] + 1
    assert torch.equal(batch["next", "hit"], torch.where(time % 3 == 0, time, 0.0).double())
    before = time - 1
    assert torch.equal(batch["hit"], torch.where((before % 3 == 0) & (before > 0), before, 0.0).double())


def test_an_entry_that_begins_as_an_integer_is_not_truncated():
    env = Telling(lambda n: {"gap": np.full(2, n + 0.5)}, at_reset={"gap": np.zeros(2, np.int64)})
    batch = next(Collector(env, frames_per_batch=8, info_keys=["gap"]))
    assert batch["next", "gap"].tolist() == [1.5, 2.5, 3.5, 4.5] * 2
    assert batch["gap"].tolist() == [0, 1.5, 2.5, 3.5] * 2


def test_batches_have_the_same_columns_whenever_an_entry_first_comes():
    collector = Collector(
        Telling(lambda n: {"gap": np.full(2, n)}), frames_per_batch=2, total_frames=8, info_keys=["gap"]
    )
    state = collector.state_dict()
    for _ in range(2):
        keys = [sorted(map(str, batch.keys(True, True))) for batch in collector]
        assert keys == [keys[0]] * 4 and "gap" in keys[0]
        collector.load_state_dict(state)


def test_a_policy_reads_info_entries():
    seen = []
    module = TensorDictModule(
        lambda gap: seen.append(gap.tolist()) or torch.zeros(2, dtype=torch.int64),
        in_keys=["gap"],
        out_keys=["action"],
    )
    env = Telling(lambda n: {"gap": np.full(2, n)}, at_reset={"gap": np.zeros(2, np.int64)})
    next(Collector(env, module, frames_per_batch=6, info_keys=["gap"]))
    assert seen == [[0, 0], [1, 1], [2, 2]]


def test_info_entries_of_a_torch_env():
    env = as_vector_env(make_scripted(script(), autoreset_mode="SameStep"), framework="torch")
    batch = next(Collector(env, frames_per_batch=30, info_keys=["t"], seed=0))
    assert torch.equal(batch["next", "t"], batch["t"] + 1)


# --- iterating, closing, saving -----------------------------------------------------------------------------


def test_next_and_iteration_share_one_stream():
    oracle = ListCollector(script(), "SameStep", 10)
    collector = Collector(StepCounter(make("SameStep")), frames_per_batch=10, total_frames=50, seed=0)
    batches = [next(collector)]
    for batch in collector:
        batches.append(batch)
        if len(batches) == 3:
            break
    batches += [next(collector), *collector]
    for batch in batches:
        check(batch, oracle.window())
    assert len(batches) == 5
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(collector)
    assert list(collector) == []


class Closing(ScriptedVectorEnv):
    """Counts how often it was closed."""

    closings = 0

    def close_extras(self, **kwargs):
        self.closings += 1


def test_shutdown_closes_the_env_once():
    env = Closing(script(), autoreset_mode="SameStep")
    collector = Collector(env, frames_per_batch=10)
    next(collector)
    collector.shutdown()
    collector.shutdown()
    assert env.closings == 1
    for use in (lambda: next(collector), lambda: next(iter(collector)), lambda: list(collector)):
        with pytest.raises(RuntimeError, match=r"the collector is closed .* make a new one"):
            use()


def test_a_context_closes_the_env():
    env = Closing(script(), autoreset_mode="SameStep")
    with Collector(env, frames_per_batch=10) as collector:
        next(collector)
    assert env.closings == 1


def test_shutdown_inside_the_loop_ends_it():
    collector = Collector(make("SameStep"), frames_per_batch=10)
    for count, _ in enumerate(collector):
        if count == 2:
            collector.shutdown()
    assert count == 2


def test_leaving_the_loop_does_not_close():
    env = Closing(script(), autoreset_mode="SameStep")
    collector = Collector(env, frames_per_batch=10)
    for _ in collector:
        break
    with contextlib.suppress(ZeroDivisionError):
        for _ in collector:
            raise ZeroDivisionError  # the reader's own trouble
    assert env.closings == 0
    assert len(next(collector)) == 10


def test_a_file_of_the_state_goes_on_with_new_ids_and_the_same_random_actions(tmp_path):
    def collector():
        return Collector(make("SameStep"), frames_per_batch=30, total_frames=120, seed=3)

    whole = list(collector())
    first = collector()
    begun = [next(first), next(first)]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = collector()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = list(second)
    assert second.frames == 120 and len(rest) == 2
    old, new = (torch.cat([batch[IDS] for batch in part]) for part in (begun, rest))
    assert not torch.isin(new, old).any()
    assert new.min() > old.max()
    assert rest[0]["is_init"][rest[0]["observation"][:, 2] == 0].all()
    assert [batch["action"].tolist() for batch in rest] == [batch["action"].tolist() for batch in whole[2:]]


def test_a_run_that_goes_on_does_not_meet_its_first_episodes_again():
    first = cartpole(3)
    start = next(first)
    state = first.state_dict()
    again = []
    for _ in range(2):
        second = cartpole(3)
        second.load_state_dict(state)
        again.append(next(second))
    assert (again[0] == again[1]).all()
    heads = [batch["observation"][batch["is_init"].squeeze(-1)] for batch in (start, again[0])]
    assert not torch.isin(heads[1], heads[0]).any()


def test_loading_into_a_running_collector_drops_what_waits():
    collector = Collector(
        StepCounter(make("SameStep")), frames_per_batch=10, total_frames=50, trajs_per_batch=20, seed=0
    )
    state = collector.state_dict()
    assert sum(1 for _ in collector) == 1  # the last, smaller batch
    collector.load_state_dict(state)
    rows = torch.cat(list(collector))
    assert audit(rows) == []
    assert collector.frames == 50
    expected = ListCollector(script(), "SameStep", 10).trajectories(5, 20)
    assert len(rows) == len(expected[0])


def test_loading_drops_the_open_trajectories():
    """Their ids are handed out once more, and their heads must not get the new tails."""
    collector = Collector(
        StepCounter(make("SameStep", Script(2, lengths=[[5], [9]]))),
        frames_per_batch=8,
        total_frames=160,
        trajs_per_batch=1,
    )
    next(collector)
    state = collector.state_dict()
    for _ in range(3):
        next(collector)
    collector.load_state_dict(state)
    for batch in collector:
        assert batch["step_count"].squeeze(-1).tolist() == list(range(len(batch)))
        assert batch["observation"][:, 2].tolist() == list(range(len(batch)))


def test_a_collector_at_its_end_goes_on_after_loading():
    collector = Collector(make("SameStep"), frames_per_batch=10, total_frames=20)
    state = collector.state_dict()
    for _ in range(2):
        assert [len(next(collector)) for _ in range(2)] == [10, 10]
        with pytest.raises(StopIteration):
            next(collector)
        collector.load_state_dict(state)


def test_the_parameters_of_a_policy_are_in_the_state():
    def build():
        torch.manual_seed(0)
        policy = torch.nn.Sequential(torch.nn.Linear(3, 5), ArgMax())
        return policy, Collector(make("SameStep"), policy, frames_per_batch=10)

    policy, collector = build()
    with torch.no_grad():
        policy[0].weight.fill_(0.25)
    other, fresh = build()
    fresh.load_state_dict(collector.state_dict())
    assert torch.equal(other[0].weight, policy[0].weight)


class ArgMax(torch.nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def test_the_progress_bar_counts_rows_and_tells_returns():
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        collector = Collector(
            RewardSum(make("SameStep")), frames_per_batch=20, total_frames=60, progress=True, seed=0
        )
        list(collector)
    shown = text.getvalue()
    assert "60.0/60.0" in shown and "frame/s" in shown
    assert "return=" in shown
    silent = io.StringIO()
    with contextlib.redirect_stderr(silent):
        list(Collector(make("SameStep"), frames_per_batch=20, total_frames=60))
    assert silent.getvalue() == ""


# --- devices ------------------------------------------------------------------------------------------------


def test_batches_are_put_where_they_are_wanted():
    for options in (
        {"storing_device": "meta"},
        {"storing_device": torch.device("meta"), "compact_obs": True},
    ):
        collector = Collector(make("SameStep"), frames_per_batch=10, **options)
        batch = next(collector)
        assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
        if collector.final is not None:
            assert {leaf.device.type for leaf in collector.final.values(True, True)} == {"meta"}
    for options in ({"device": "cpu"}, {"policy_device": "cpu", "env_device": "cpu", "no_cuda_sync": True}):
        oracle = ListCollector(script(), "SameStep", 10)
        collector = Collector(
            StepCounter(make("SameStep")), always_four, frames_per_batch=10, seed=0, **options
        )
        check(next(collector), oracle.window())


def test_a_policy_gets_its_input_where_it_wants_it():
    seen = []

    def policy(obs):
        seen.append(obs.device.type)
        return np.zeros(3, np.int64)

    collector = Collector(make("SameStep"), policy, frames_per_batch=6, policy_device="meta")
    next(collector)
    assert seen == ["meta", "meta"]
    seen.clear()
    own = script(obs="tuple")
    next(
        Collector(make("SameStep", own), lambda obs: policy(obs[1]), frames_per_batch=6, policy_device="meta")
    )
    assert seen == ["meta", "meta"]


def test_an_env_elsewhere_is_an_error():
    with pytest.raises(ValueError, match=r"env_device='meta', but the env's arrays are on cpu: move the env"):
        Collector(make("SameStep"), frames_per_batch=10, env_device="meta")


def test_a_whole_collector_on_a_device_without_values():
    """Nothing on the meta device can be read, so nothing is."""
    env = ScriptedTorchEnv(script(), device="meta", final_obs="dense")
    collector = Collector(
        RewardSum(StepCounter(env)),
        lambda obs: torch.zeros(3, dtype=torch.int64, device="meta"),
        frames_per_batch=10,
        set_truncated=True,
        reset_at_each_iter=True,
        init_random_frames=7,
    )
    for _ in range(3):
        batch = next(collector)
        assert batch["next", "observation"].device.type == "meta"
        assert batch.batch_size == (10,)


class ForbidHostSync(TorchDispatchMode):
    """Raises where a GPU would be waited for, had the tensors been on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item", "unique2")

    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        bool_index = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        )
        if name in self.FORBIDDEN or bool_index:
            raise AssertionError(f"{func} would wait for the device")
        self.ops += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("final_obs", ["dense", "absent"])
@pytest.mark.parametrize("kind", ["float32", "dict"])
def test_collecting_from_a_torch_env_waits_for_nothing(kind, final_obs):
    env = ScriptedTorchEnv(script(obs=kind), final_obs=final_obs)
    collector = Collector(
        RewardSum(StepCounter(env)), Counter(), frames_per_batch=10, set_truncated=True, info_keys=()
    )
    next(collector)
    with ForbidHostSync() as watch:
        for _ in range(3):
            next(collector)
    assert watch.ops > 100


def test_the_watch_sees_what_waits():
    """What does wait, once per batch: final observations are picked, deltas are checked."""
    for env, options in (
        (ScriptedTorchEnv(script()), {"compact_obs": True}),
        (NextObservationDelta(ScriptedTorchEnv(script())), {}),
        (ScriptedTorchEnv(script()), {"trajs_per_batch": 1}),
    ):
        collector = Collector(env, frames_per_batch=10, **options)
        with pytest.raises(AssertionError, match="would wait for the device"), ForbidHostSync():
            next(collector)


# --- compact batches ----------------------------------------------------------------------------------------


def keys_of(batch):
    return {key if isinstance(key, str) else tuple(key) for key in batch.keys(True, True)}


@pytest.mark.parametrize("which", MODES)
def test_a_compact_batch_lacks_just_what_its_rows_repeat(which):
    def run(**options):
        return next(Collector(RewardSum(StepCounter(make(which))), Counter(), frames_per_batch=10, **options))

    full, compact = run(), run(compact_obs=True)
    assert keys_of(full) - keys_of(compact) == {
        ("next", "observation"),
        ("next", "step_count"),
        ("next", "state"),
    }
    assert keys_of(compact) <= keys_of(full)
    bare, slim = (
        next(Collector(make(which), frames_per_batch=10, compact_obs=flag)) for flag in (False, True)
    )
    assert keys_of(bare) - keys_of(slim) == {("next", "observation")}


def test_deltas_stay_in_compact_batches():
    collector = Collector(NextObservationDelta(make("SameStep")), frames_per_batch=10, compact_obs=True)
    batch = next(collector)
    assert ("next", "delta", "observation") in keys_of(batch)
    assert set(collector.final.keys()) == {"row"}


@pytest.mark.parametrize("env", ["torch", "SameStep"])
def test_hidden_final_observations_are_in_no_final(env):
    def run(**options):
        collector = Collector(make(env, final_obs="absent"), frames_per_batch=24, seed=0, **options)
        return next(collector), collector.final

    (full, _), (batch, final) = run(), run(compact_obs=True)
    known = full["collector", "next_known"]
    assert torch.equal(batch["collector", "next_known"], known)
    assert final["row"].tolist() == torch.nonzero(run_ends(full) & known).squeeze(-1).tolist()
    assert full["next", "observation"][~known].isnan().all()
    true = full["observation"] + torch.tensor([0.0, 0.0, 1.0])
    following = torch.tensor(next_obs(batch, final))
    assert torch.equal(following[known], true[known])
    assert torch.equal(full["next", "observation"][known], true[known])


@pytest.mark.parametrize("env", ["torch", "SameStep"])
def test_integers_have_no_nan_for_what_is_hidden(env):
    """The observation itself stands there, not the first one of the next episode."""
    batch = next(Collector(make(env, script(obs="uint8"), final_obs="absent"), frames_per_batch=24, seed=0))
    hidden = ~batch["collector", "next_known"]
    assert hidden.any()
    assert torch.equal(batch["next", "observation"][hidden], batch["observation"][hidden])


def test_a_rollout_keeps_its_next_observations():
    batch = rollout(CompactObs(make("SameStep")), num_steps=5, seed=0)
    assert torch.equal(batch["next", "observation"], batch["observation"] + torch.tensor([0.0, 0.0, 1.0]))


# --- memory -------------------------------------------------------------------------------------------------


def test_batches_own_their_memory():
    """Env, info and policy write into the same arrays again and again."""
    info, action = np.zeros(3), torch.zeros(3, dtype=torch.int64)

    class Env(ScriptedVectorEnv):
        def step(self, actions):
            *result, told = super().step(actions)
            np.add(info, 1, out=info)
            return *result, {**told, "mine": info}

    extra = torch.zeros(3, 2)
    module = TensorDictModule(
        lambda obs: (action.copy_(obs[:, 2] % 5), extra.copy_(obs[:, 1:])),
        in_keys=["observation"],
        out_keys=["action", "extra"],
    )
    for options in ({}, {"compact_obs": True}, {"trajs_per_batch": 2}, {"storing_device": "cpu"}):
        env = Env(script(), autoreset_mode="NextStep", reuse_buffer=True)
        collector = Collector(
            env, module, frames_per_batch=8, total_frames=120, info_keys=["mine"], **options
        )
        kept = []
        for batch in collector:
            parts = [batch] if collector.final is None else [batch, collector.final]
            kept += [(part, part.clone()) for part in parts]
        assert all((part == copy).all() for part, copy in kept)
        assert torch.equal(kept[0][0]["extra"], kept[0][0]["observation"][:, 1:])


# --- other people's wrappers --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GYM_MODES)
def test_rewards_may_be_changed_inside_and_between(mode):
    def double(reward):
        return 2 * reward

    inside = TransformReward(make_scripted(script(), autoreset_mode=mode), double)
    between = TransformReward(as_vector_env(make_scripted(script(), autoreset_mode=mode)), double)
    plain = next(Collector(make_scripted(script(), autoreset_mode=mode), frames_per_batch=20, seed=0))
    for env in (inside, between):
        batch = next(Collector(RewardSum(env), frames_per_batch=20, seed=0))
        assert torch.equal(batch["next", "reward"], 2 * plain["next", "reward"])
        first = batch["is_init"]
        assert torch.equal(batch["next", "episode_reward"][first], batch["next", "reward"][first])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: RescaleAction(env, np.float32(0), np.float32(10)),
        ClipAction,
        lambda env: TransformAction(env, lambda action: action.clip(-1, 1)),
    ],
    ids=["rescale", "clip", "transform"],
)
def test_the_stored_action_is_what_the_policy_did(wrap):
    """A log-probability belongs to the policy's action, not to what a wrapper made of it."""
    for inside in (False, True):
        bare = ScriptedVectorEnv(script(action="box"), autoreset_mode="SameStep", record_actions=True)
        env = wrap(bare if inside else as_vector_env(bare))
        collector = Collector(env, lambda obs: torch.full((3, 2), 5.0), frames_per_batch=6)
        assert (next(collector)["action"] == 5).all()
        assert all(np.abs(action).max() <= 1 for action in bare.actions)


@pytest.mark.parametrize("inside", [True, False])
def test_normalized_observations_are_those_that_came(inside):
    """The statistics move at every step: a next observation normalized anew would differ."""
    came = set()

    class Spy(NormalizeObservation):
        def observations(self, observations):
            made = super().observations(observations)
            came.update(map(tuple, made.tolist()))
            return made

    bare = make_scripted(script(), autoreset_mode="NextStep")
    env = Spy(bare if inside else as_vector_env(bare))
    rows = torch.cat(list(Collector(StepCounter(env), frames_per_batch=20, total_frames=60, seed=0)))
    assert set(map(tuple, rows["observation"].tolist())) <= came
    assert set(map(tuple, rows["next", "observation"].tolist())) <= came
    assert len(came) > 60


def test_a_step_limit_outside_of_an_observation_wrapper_is_refused():
    env = NormalizeObservation(as_vector_env(make_scripted(script(), autoreset_mode="NextStep")))
    with pytest.raises(ValueError, match="max_steps=2 with NormalizeObservation around an adapted env"):
        Collector(env, frames_per_batch=6, max_frames_per_traj=2)


# --- spaces -------------------------------------------------------------------------------------------------

OBSERVATIONS = {
    "box": spaces.Box(-1, 1, (2, 3)),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "float16": spaces.Box(-1, 1, (3,), np.float16),
    "uint8": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "uint16": spaces.Box(0, 2**16 - 1, (2, 2), np.uint16),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "discrete": spaces.Discrete(7, start=-3),
    "multi discrete": spaces.MultiDiscrete([3, 4, 5]),
    "grid": spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
    "multi binary": spaces.MultiBinary([2, 3]),
    "scalar": spaces.Box(-1, 1, ()),
    "nested": spaces.Dict(
        {
            "eyes": spaces.Tuple((spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3))),
            "body": spaces.Dict({"legs": spaces.MultiBinary(4), "pose": spaces.Box(-1, 1, (2,), np.float64)}),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), spaces.Dict({"a": spaces.Box(-1, 1, (2,))}))),
}
ACTIONS = {
    "discrete": spaces.Discrete(5, start=2),
    "multi discrete": spaces.MultiDiscrete([3, 4], start=[1, -2]),
    "multi binary": spaces.MultiBinary(5),
    "box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "uint8": spaces.Box(0, 3, (2,), np.uint8),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "nested": spaces.Dict(
        {
            "arm": spaces.Box(-1, 1, (3,)),
            "hands": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"grip": spaces.MultiBinary(2)}))),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,)))),
}
if "dtype" in inspect.signature(spaces.Discrete).parameters:  # Gymnasium 1.2.2 or newer
    ACTIONS["small"] = spaces.Discrete(3, dtype=np.uint8)


class SpaceEnv(gym.Env):
    """Observations drawn from any space, five steps per episode; it checks the actions it is given."""

    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), (self.action_space, action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


def leaves(space, key):
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [leaf for name, child in items for leaf in leaves(child, (*key, str(name)))]
    return [(key, space)]


@pytest.mark.parametrize("mode", GYM_MODES)
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_every_space(name, mode):
    def run(**options):
        own = [lambda: SpaceEnv(copy.deepcopy(OBSERVATIONS[name])) for _ in range(2)]
        collector = Collector(
            SyncVectorEnv(own, autoreset_mode=AutoresetMode(mode)), frames_per_batch=16, seed=1, **options
        )
        return next(collector), collector.final

    (batch, _), (compact, final) = run(), run(compact_obs=True)
    ends = run_ends(batch)
    root = () if isinstance(OBSERVATIONS[name], spaces.Dict) else ("observation",)
    for key, space in leaves(OBSERVATIONS[name], root):
        column, following = batch[key], batch[("next", *key)]
        assert column.shape == following.shape == (16, *space.shape)
        expected = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        assert column.dtype is following.dtype is expected
        assert all(space.contains(np.asarray(row)) for row in column.numpy())
        inner = (~ends[:-1]).numpy()
        np.testing.assert_array_equal(following.numpy()[:-1][inner], column.numpy()[1:][inner])
        np.testing.assert_array_equal(compact[key].numpy(), column.numpy())
        np.testing.assert_array_equal(final[("next", *key)].numpy(), following.numpy()[final["row"].numpy()])


@pytest.mark.parametrize("name", ACTIONS)
def test_random_actions_of_every_space(name):
    """The env itself asserts that it gets members of its space."""
    own = [lambda: SpaceEnv(spaces.Box(-1, 1, (1,)), ACTIONS[name]) for _ in range(2)]
    batch = next(Collector(SyncVectorEnv(own), frames_per_batch=50, seed=0))
    for key, space in leaves(ACTIONS[name], ("action",)):
        assert batch[key].shape == (50, *space.shape)
        assert batch[key].dtype is torch.from_numpy(np.zeros(0, space.dtype)).dtype


@pytest.mark.parametrize("name", ["nested", "tuple"])
def test_nested_actions_of_a_module(name):
    space = ACTIONS[name]
    keys = [key for key, _ in leaves(space, ("action",))]

    def act(obs):
        return tuple(
            torch.zeros((len(obs), *leaf.shape), dtype=torch.from_numpy(np.zeros(0, leaf.dtype)).dtype)
            for _, leaf in leaves(space, ("action",))
        )

    module = TensorDictModule(act, in_keys=["observation"], out_keys=keys)
    own = [lambda: SpaceEnv(spaces.Box(-1, 1, (1,)), space) for _ in range(2)]
    batch = next(Collector(SyncVectorEnv(own), module, frames_per_batch=10))
    assert all((batch[key] == 0).all() for key in keys)
    assert set(keys) == {key for key in keys_of(batch) if key[0] == "action"}


# --- markers ------------------------------------------------------------------------------------------------


def test_markers_of_the_user_are_kept_with_their_keys():
    env = InitTracker(
        StepCounter(TrajId(make("SameStep"), writer=2, traj_key="id"), step_count_key="n"), init_key="first"
    )
    collector = Collector(env, frames_per_batch=10, total_frames=30, compact_obs=True, seed=0)
    oracle = ListCollector(script(), "SameStep", 10)
    for batch in collector:
        rows = oracle.window()
        assert batch["id"].tolist() == [2 * 2**40 + row["id"] for row in rows]
        assert batch["n"].squeeze(-1).tolist() == [row["count"] for row in rows]
        assert batch["first"].squeeze(-1).tolist() == [row["is_init"] for row in rows]
        assert {"is_init", "step_count", IDS} & keys_of(batch) == set()
        assert next_obs(batch, collector.final) == true_next(rows)


def test_the_markers_are_added_once():
    env = InitTracker(TrajId(make("SameStep")))
    assert Collector(env, frames_per_batch=10).env is env
    added = Collector(make("SameStep"), frames_per_batch=10).env
    assert isinstance(added, TrajId) and isinstance(added.env, InitTracker)


def test_a_factory_or_a_class_makes_the_env():
    class Env(ScriptedVectorEnv):
        def __init__(self):
            super().__init__(script(), autoreset_mode="SameStep")

    for create in (Env, lambda: make("SameStep"), lambda: InitTracker(make("SameStep"))):
        assert len(next(Collector(create, frames_per_batch=10))) == 10

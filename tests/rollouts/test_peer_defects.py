"""Defects and weaknesses measured in TorchRL 0.14.1 that markers, collector and layout must be free of.

Each docstring names the item: its section, and the experiment that showed it. Weaknesses of speed are held by
counting operations, not by clocks.
"""

import io
import sys
from collections import Counter
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.layout import audit, decode_delta, join, run_ends, split_trajectories
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, NextObservationDelta, RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import (
    Script,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    check_vector_env,
    make_scripted,
)

LENGTHS = [[3, 1, 4], [2, 5], [6]]
IDS = ("collector", "traj_ids")


def make(which="SameStep", **options):
    own = Script(3, **{"lengths": LENGTHS, **options})
    return ScriptedTorchEnv(own) if which == "torch" else ScriptedVectorEnv(own, autoreset_mode=which)


def collect(env, frames, policy=None, **options):
    collector = Collector(env, policy, frames_per_batch=frames, seed=0, **options)
    return next(collector), collector.final


def true_next(batch):
    """What follows the observation (env, episode, step) of a scripted env."""
    return batch["observation"] + torch.tensor([0.0, 0.0, 1.0])


class Buffer:
    """Keeps what it is given."""

    def __init__(self):
        self.batches = []

    def extend(self, batch):
        self.batches.append(batch)


class Ops(TorchDispatchMode):
    """Counts torch operations, and refuses those that would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")

    def __init__(self):
        super().__init__()
        self.count = Counter()
        self.made = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        self.count[name] += 1
        out = func(*args, **(kwargs or {}))
        view = isinstance(out, torch.Tensor) and any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
            for a in args
        )
        if isinstance(out, torch.Tensor) and not view:
            self.made[tuple(out.shape), out.dtype] += 1
        return out


def python_calls(function):
    """How many Python functions a call runs through."""
    calls = [0]
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.__setitem__(0, calls[0] + (event == "call")))
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls[0]


# --- 1.3 trajectory ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["SameStep", "torch"])
def test_ids_go_on_beyond_two_to_the_31(which):
    """1.3 [BUG] E19: the pool is int32, and after 2**31 - 1 ids comes -2147483647."""
    env = TrajId(make(which))
    env.load_state_dict({"writer": 0, "episode": 2**31 // 3 - 1})
    batch, _ = collect(StepCounter(env), 60)
    ids = batch[IDS]
    assert ids.dtype is torch.int64
    assert ids.min() < 2**31 < ids.max()
    assert audit(batch) == []
    assert len(ids.unique()) == int(batch["is_init"].sum())


def test_ids_of_writers_and_restarts_never_meet():
    """1.3: a shared, locked pool is not needed, the writer's number stands in the high bits."""
    ids = [collect(TrajId(make(), writer=writer), 30)[0][IDS] for writer in (0, 1, 2**23 - 1)]
    assert all(not torch.isin(a, b).any() for a, b in zip(ids, ids[1:] + ids[:1], strict=True))
    assert all((a >= 0).all() for a in ids)


def test_a_step_in_which_no_episode_ends_draws_no_ids():
    """1.3 [BUG] E19: asking the pool for 0 ids is an IndexError."""
    env = TrajId(make(lengths=100))
    _, info = env.reset()
    for _ in range(10):
        after = env.step(np.zeros(3, np.int64))[-1]
        assert after["traj_ids"].tolist() == info["traj_ids"].tolist() == [0, 1, 2]


def test_ids_cost_the_same_few_operations_at_every_step():
    """1.3 [W]: ``.any()``, ``.sum()`` and Python per step. Here: no wait, and the same count for any E and ends."""
    counts = set()
    for num_envs, length in ((2, 1), (2, 100), (512, 1), (512, 100)):
        own = Script(num_envs, lengths=length)
        action = torch.zeros(num_envs, dtype=torch.int64)
        bare, with_ids = as_vector_env(ScriptedTorchEnv(own)), TrajId(ScriptedTorchEnv(own))
        totals = []
        for env in (bare, with_ids):
            env.reset()
            with Ops() as ops:
                for _ in range(5):
                    env.step(action)
            totals.append(sum(ops.count.values()))
        counts.add(totals[1] - totals[0])
    assert len(counts) == 1
    assert counts.pop() <= 5 * 4


# --- 1.4 deltas ---------------------------------------------------------------------------------------------


class Jumps(gym.Env):
    """Shows the numbers it is given, one after the other."""

    def __init__(self, values, dtype=np.float32):
        self.values = np.asarray(values, dtype)
        low, high = (-np.inf, np.inf) if self.values.dtype.kind == "f" else (0, np.iinfo(dtype).max)
        self.observation_space = spaces.Box(low, high, (1,), dtype)
        self.action_space = spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.values[:1], {}

    def step(self, action):
        self.time += 1
        ended = self.time == len(self.values) - 1
        return self.values[self.time : self.time + 1], 0.0, ended, False, {}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_delta_that_does_not_fit_is_an_error(framework):
    """1.4 [BUG] E26: 0 -> 1e5 in float16 comes back as infinity."""
    env = as_vector_env(Jumps([0, 1, 1e5, 2]), framework=framework)
    with pytest.raises(
        OverflowError, match=r"the delta of 'observation' does not fit torch.float16: .* 99999"
    ):
        collect(NextObservationDelta(env), 6)
    wide = as_vector_env(Jumps([0, 1, 1e5, 2]), framework=framework)
    batch, _ = collect(NextObservationDelta(wide, delta_dtype=torch.float32), 6)
    restored = decode_delta(batch["observation"], batch["next", "delta", "observation"])
    assert restored.squeeze(-1).tolist() == [1, 1e5, 2] * 2


def test_small_deltas_are_lost_only_below_what_is_documented():
    """1.4 [BUG] E26: 1e-9 in float16 is 0. An error of at most 3e-8, and 2**-11 of the difference, is stated."""
    values = np.cumsum([0, 1e-9, 1e-7, 1e-3, 1, 100]).astype(np.float64)
    batch, _ = collect(NextObservationDelta(Jumps(values, np.float64)), 5)
    restored = decode_delta(batch["observation"], batch["next", "delta", "observation"]).squeeze(-1)
    true = torch.from_numpy(values[1:])
    difference = (true - batch["observation"].squeeze(-1)).abs()
    assert ((restored - true).abs() <= torch.clamp(difference * 2**-11, min=3.1e-8)).all()


def test_deltas_are_finite_at_every_row_ends_included():
    """9.2: "delta reconstructs finite everywhere" must be kept."""
    for which in ("NextStep", "SameStep", "Disabled", "torch"):
        batch, _ = collect(NextObservationDelta(make(which)), 40)
        assert torch.equal(
            decode_delta(batch["observation"], batch["next", "delta", "observation"]), true_next(batch)
        )


def test_an_env_with_deltas_keeps_the_env_contract():
    """1.4 [BUG] E26: check_env_specs over NextObservationDelta raises KeyError: observation."""
    check_vector_env(NextObservationDelta(make()))
    check_vector_env(NextObservationDelta(make("torch")))


def test_rows_with_a_key_only_under_next_go_through_every_tool(tmp_path):
    """1.4 [BUG] E23: checkpointers crash on delta batches, whose key exists only under "next"."""
    batch, _ = collect(StepCounter(NextObservationDelta(make())), 30)
    assert audit(batch) == []
    assert (join(split_trajectories(batch)) == batch).all()
    assert (join(split_trajectories(batch, as_nested=True)) == batch).all()
    file = io.BytesIO()
    torch.save(batch.to_dict(), file)
    file.seek(0)
    assert (TensorDict(torch.load(file, weights_only=True), [30]) == batch).all()
    assert (TensorDict.load_memmap(batch.memmap(tmp_path).saved_path) == batch).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int64])
def test_integers_have_an_exact_delta_modulo_their_width(dtype):
    """1.4 [W]: integer observations are left out, where memory matters most."""
    top = np.iinfo(dtype).max
    batch, _ = collect(NextObservationDelta(Jumps([0, top, 1, top - 3, 0], dtype)), 4)
    delta = batch["next", "delta", "observation"]
    assert delta.dtype is batch["observation"].dtype
    assert decode_delta(batch["observation"], delta).squeeze(-1).tolist() == [top, 1, top - 3, 0]
    assert ("next", "observation") not in batch.keys(True, True)


def test_one_final_observation_per_end_instead_of_a_delta_per_row():
    """1.4 [W]: a delta is stored at every step, though only ends say what the next row does not."""
    full, _ = collect(make(), 300)
    compact, final = collect(make(), 300, compact_obs=True)
    row = full["observation"][0].numel() * full["observation"].element_size()
    ends = int(run_ends(full).sum())
    assert full.bytes() - compact.bytes() == 300 * row
    assert final["next"].bytes() == ends * row
    following = compact["observation"].roll(-1, 0)
    following[final["row"]] = final["next", "observation"]
    assert torch.equal(following, full["next", "observation"])


# --- 1.5 compact batches ------------------------------------------------------------------------------------


class Recurrent:
    """Counts its own steps in a state of 7, 8, 9, ..."""

    in_keys = ("observation", "state", "is_init")
    out_keys = ("action", ("next", "state"))

    def __init__(self):
        self.seen = []

    def __call__(self, td):
        self.seen.append(td["state"].clone())
        td["next", "state"] = td["state"] + 1
        td["action"] = torch.zeros(td.shape, dtype=torch.int64)
        return td

    def make_tensordict_primer(self):
        return SimpleNamespace(defaults={"state": torch.full((1,), 7.0)})


def test_compact_batches_do_not_repeat_the_recurrent_state():
    """1.5 [BUG/DOC] E28e: ("next", "h") is kept, though often larger than the observation."""
    full, _ = collect(StepCounter(make()), 30, Recurrent())
    compact, _ = collect(StepCounter(make()), 30, Recurrent(), compact_obs=True)
    assert sorted(full["next"].keys()) == [
        "done", "observation", "reward", "state", "step_count", "terminated", "truncated",
    ]  # fmt: skip
    assert sorted(compact["next"].keys()) == ["done", "reward", "terminated", "truncated"]


@pytest.mark.parametrize("which", ["NextStep", "SameStep", "Disabled", "torch"])
def test_no_final_observation_is_lost(which):
    """1.5 [W] E8: 4 dones in 100 frames, and 0 of the terminal observations."""
    collector = Collector(make(which), frames_per_batch=20, total_frames=100, compact_obs=True, seed=0)
    for batch in collector:
        ends, final = run_ends(batch), collector.final
        assert final["row"].tolist() == ends.nonzero().squeeze(-1).tolist()
        assert torch.equal(final["next", "observation"], true_next(batch)[ends])


# --- 1.9 splitting ------------------------------------------------------------------------------------------


def rows(ids, **columns):
    ids = torch.tensor(ids)
    return TensorDict(
        {"x": torch.arange(1, len(ids) + 1), "collector": {"traj_ids": ids}, **columns}, [len(ids)]
    )


def test_an_id_that_comes_back_is_another_piece():
    """1.9 [BUG] E11: ids t0, t1, t0 raise RuntimeError in split_with_sizes."""
    batch = rows([0] * 3 + [1] * 2 + [0] * 4)
    padded = split_trajectories(batch)
    assert padded["collector", "mask"].sum(-1).tolist() == [3, 2, 4]
    assert (join(padded) == batch).all()


def test_slices_of_one_trajectory_side_by_side_stay_apart():
    """1.9 [BUG] E11: two adjacent slices of one trajectory become one row [1, 6]."""
    start = torch.tensor([True, False, False, True, False, False]).unsqueeze(-1)
    padded = split_trajectories(rows([0] * 6, is_init=start))
    assert padded["x"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_splitting_by_done_takes_leading_dimensions():
    """1.9 [BUG] E11: a done-based split of three-dimensional input raises."""
    done = torch.zeros(2, 2, 3, 1, dtype=torch.bool)
    done[0, 1, 0] = True
    batch = TensorDict({"x": torch.arange(12).view(2, 2, 3), "next": {"done": done}}, [2, 2, 3])
    padded = split_trajectories(batch)
    assert padded["collector", "mask"].sum(-1).tolist() == [3, 1, 2, 3, 3]
    assert padded["x"].tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0], [6, 7, 8], [9, 10, 11]]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # torch's own, of strided ones
def test_the_nested_layout_that_was_asked_for():
    """1.9 [BUG] E11: as_nested=torch.jagged gives the strided layout; one trajectory gives a dense tensor."""
    for ids, time in ([0, 0, 1], -1), ([0, 0, 0], 3), ([0, 1, 2], 1):
        for layout in (torch.jagged, torch.strided):
            parts = split_trajectories(rows(ids), as_nested=layout)
            nested = parts["x"]
            assert nested.is_nested and nested.layout is layout
            assert sum(len(piece) for piece in nested.unbind()) == 3
            assert join(parts).batch_size == (3,)
            # In the strided layout time is a batch dimension, as in the peer's: -1, or the one length of all.
            assert parts.batch_size == (
                (len(set(ids)), time) if layout is torch.strided else (len(set(ids)),)
            )
            if layout is torch.strided and time == -1:
                assert parts.to_padded_tensor(mask_key="mask")["mask"].sum() == 3
    assert split_trajectories(rows([0, 0, 1]), as_nested=True)["x"].layout is torch.jagged


@pytest.mark.parametrize("as_nested", [False, torch.jagged])
def test_splitting_costs_the_same_operations_for_few_and_many_trajectories(as_nested):
    """1.9 [W]: O(N * n), 464 ms for 2,000 trajectories of 5 steps."""

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.total += 1
            return func(*args, **(kwargs or {}))

    totals = []
    for n in (2, 2000):
        batch = rows(np.repeat(np.arange(n), 5).tolist())
        with Count() as count:
            split_trajectories(batch, as_nested=as_nested)
        totals.append(count.total)
    assert totals[0] == totals[1]


# --- 1.10 primers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["NextStep", "SameStep", "torch"])
def test_the_state_that_starts_an_episode_is_the_one_the_policy_had(which):
    """1.10 [BUG] E28c: a primer state that is not zero is zeroed while collecting and used in training."""
    policy = Recurrent()
    batch, _ = collect(make(which), 30, policy)
    assert (batch["state"][batch["is_init"].squeeze(-1)] == 7).all()
    assert torch.equal(batch["state"], 7 + batch["observation"][:, 2:])
    assert (policy.seen[0] == 7).all()


def test_nothing_is_asked_of_a_policy_without_states():
    """1.10 E28e: markers are added whether needed or not; here is_init is part of the layout, states are not."""
    env = make_scripted(Script(3, lengths=LENGTHS))
    batch, _ = collect(env, 10, lambda obs: torch.zeros(3, dtype=torch.int64))
    assert sorted(map(str, batch.keys(True, True))) == [
        "('collector', 'traj_ids')",
        *(f"('next', '{name}')" for name in ("done", "observation", "reward", "terminated", "truncated")),
        "action",
        "is_init",
        "observation",
    ]


# --- 6.1 the collector --------------------------------------------------------------------------------------


def test_a_vector_step_costs_the_same_python_for_any_number_of_envs():
    """6.1 [W] e16: 164 us per frame with 1 env, 123 with 8: Python for each frame and env."""
    calls = []
    for num_envs in (1, 64, 1024):
        own = Script(num_envs, lengths=[2, 3])
        env = InitTracker(
            StepCounter(TrajId(ScriptedVectorEnv(own, autoreset_mode="SameStep", final_obs="dense")))
        )
        action = torch.zeros(num_envs, dtype=torch.int64)
        collector = Collector(env, lambda obs, action=action: action, frames_per_batch=num_envs * 32)
        next(collector)
        calls.append(python_calls(lambda collector=collector: next(collector)))
    assert max(calls) - min(calls) <= 32  # one per step at most: a policy that is traced, a lambda
    assert max(calls) < 32 * 150


def test_each_column_of_a_batch_is_made_once():
    """6.1 [W]: three copies per batch (a list of tensordicts, its stack, a clone)."""
    env = RewardSum(StepCounter(make("torch")))
    collector = Collector(env, lambda obs: torch.zeros(3, dtype=torch.int64), frames_per_batch=30)
    next(collector)
    with Ops() as ops:
        batch = next(collector)
    # observation and next observation; reward and return
    assert ops.made[(30, 3), torch.float32] == 2
    assert ops.made[(30,), torch.float32] == 2
    assert (
        ops.count["clone"] <= 10 * 12
    )  # of single rows, by the source that owns its buffers; none of a batch
    assert batch["observation"].shape == (30, 3)


def test_a_buffer_gets_one_plain_tensordict_per_batch():
    """6.1 [W] e16: with a buffer 377 us per frame instead of 164, for writing a lazy stack."""

    buffer = Buffer()
    list(Collector(make(), frames_per_batch=30, total_frames=90, replay_buffer=buffer))
    assert [type(batch) for batch in buffer.batches] == [TensorDict] * 3
    assert all(leaf.is_contiguous() for batch in buffer.batches for leaf in batch.values(True, True))


def test_an_error_is_not_swallowed():
    """6.1 [BUG] E33: an exception in the collecting thread just ends it; the learner is never told."""

    def fails(obs):
        raise ZeroDivisionError("policy")

    collector = Collector(make, fails, frames_per_batch=6)
    with pytest.raises(ZeroDivisionError, match="policy"):
        next(collector)
    with pytest.raises(RuntimeError, match="the collector is closed"):
        next(collector)


def test_an_interrupted_batch_is_neither_yielded_nor_counted():
    """6.1 [BUG] e17: 5 of 20 steps done, the batch has 15 unused rows with ids of -1 and counts 20 frames."""
    calls = []

    def interrupt(obs):
        calls.append(len(obs))
        if len(calls) == 13:
            raise KeyboardInterrupt
        return torch.zeros(3, dtype=torch.int64)

    collector = Collector(StepCounter(make()), interrupt, frames_per_batch=30, set_truncated=True)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(collector)
    assert collector.frames == 30
    batch = next(
        Collector(StepCounter(make()), lambda obs: torch.zeros(3, dtype=torch.int64), frames_per_batch=30)
    )
    assert (batch[IDS] >= 0).all()
    assert audit(batch) == []


def test_a_cut_row_is_marked_at_the_last_row_that_there_is():
    """6.1 [BUG] e17: set_truncated marks the unused last row of a batch."""
    for frames in (1, 2, 7, 10):
        batch, _ = collect(make("NextStep"), frames, set_truncated=True)
        assert torch.equal(run_ends(batch), batch["next", "done"].squeeze(-1))
        assert torch.equal(batch["next", "observation"], true_next(batch))


def test_a_trajectory_that_goes_on_keeps_its_id():
    """1.3 E8, 6.1: cut by the end of a batch, marked or not, it is the same trajectory in the next one."""
    for marked in (False, True):
        collector = Collector(
            make(lengths=100), frames_per_batch=9, total_frames=27, set_truncated=marked, seed=0
        )
        assert [batch[IDS].unique().tolist() for batch in collector] == [[0, 1, 2]] * 3


def test_looking_at_the_state_changes_nothing():
    """6.2 E34, 9.5: a checkpoint asked for while iterating throws a rollout away, or hangs."""
    plain = list(Collector(make(), frames_per_batch=10, total_frames=60, seed=0))
    watched = Collector(make(), frames_per_batch=10, total_frames=60, seed=0)
    for batch, expected in zip(watched, plain, strict=True):
        watched.state_dict()
        assert (batch == expected).all()


def test_every_write_of_joined_trajectories_is_complete():
    """9.5: "each extend is a complete trajectory" holds in every batch, the last one included."""

    buffer = Buffer()
    list(
        Collector(
            make("NextStep"), frames_per_batch=7, total_frames=140, trajs_per_batch=2, replay_buffer=buffer
        )
    )
    for batch in buffer.batches:
        assert torch.equal(run_ends(batch), batch["next", "done"].squeeze(-1))
        starts = run_ends(batch).roll(1)
        assert torch.equal(batch["is_init"].squeeze(-1), starts)
    assert [int(run_ends(batch).sum()) for batch in buffer.batches[:-1]] == [2] * (len(buffer.batches) - 1)

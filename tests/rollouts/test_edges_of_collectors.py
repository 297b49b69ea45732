"""Collectors at their edges: states, cut and interrupted batches, final observations, what a step costs."""

from types import SimpleNamespace

import pytest
import torch
from counting import Ops, python_calls
from scripted_batches import IDS, LENGTHS, collect, make, true_next
from tensordict import TensorDict

from flatroll.layout import audit, run_ends
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, RewardSum, StepCounter, TrajId
from flatroll.wrappers.testing import Script, ScriptedVectorEnv, make_scripted


class Buffer:
    """Keeps what it is given."""

    def __init__(self):
        self.batches = []

    def extend(self, batch):
        self.batches.append(batch)


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
    """A recurrent state, often larger than the observation, is stored once a row."""
    full, _ = collect(StepCounter(make()), 30, Recurrent())
    compact, _ = collect(StepCounter(make()), 30, Recurrent(), compact_obs=True)
    assert sorted(full["next"].keys()) == [
        "done", "observation", "reward", "state", "step_count", "terminated", "truncated",
    ]  # fmt: skip
    assert sorted(compact["next"].keys()) == ["done", "reward", "terminated", "truncated"]


@pytest.mark.parametrize("which", ["NextStep", "SameStep", "Disabled", "torch"])
def test_no_final_observation_is_lost(which):
    collector = Collector(make(which), frames_per_batch=20, total_frames=100, compact_obs=True, seed=0)
    for batch in collector:
        ends, final = run_ends(batch), collector.final
        assert final["row"].tolist() == ends.nonzero().squeeze(-1).tolist()
        assert torch.equal(final["next", "observation"], true_next(batch)[ends])


@pytest.mark.parametrize("which", ["NextStep", "SameStep", "torch"])
def test_the_state_that_starts_an_episode_is_the_one_the_policy_had(which):
    """A primer state other than zero is what the policy sees and what the rows hold."""
    policy = Recurrent()
    batch, _ = collect(make(which), 30, policy)
    assert (batch["state"][batch["is_init"].squeeze(-1)] == 7).all()
    assert torch.equal(batch["state"], 7 + batch["observation"][:, 2:])
    assert (policy.seen[0] == 7).all()


def test_nothing_is_asked_of_a_policy_without_states():
    """``is_init`` is part of the layout; states are not."""
    env = make_scripted(Script(3, lengths=LENGTHS))
    batch, _ = collect(env, 10, lambda obs: torch.zeros(3, dtype=torch.int64))
    assert sorted(map(str, batch.keys(True, True))) == [
        "('collector', 'traj_ids')",
        *(f"('next', '{name}')" for name in ("done", "observation", "reward", "terminated", "truncated")),
        "action",
        "is_init",
        "observation",
    ]


def test_a_vector_step_costs_the_same_python_for_any_number_of_envs():
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
    env = RewardSum(StepCounter(make("torch")))
    collector = Collector(env, lambda obs: torch.zeros(3, dtype=torch.int64), frames_per_batch=30)
    next(collector)
    with Ops() as ops:
        batch = next(collector)
    # observation and next observation; reward and return: env after env, then flat without a copy
    assert ops.made[(3, 10, 3), torch.float32] == 2
    assert ops.made[(3, 10), torch.float32] == 2
    assert not any(shape[:1] == (30,) and dtype is torch.float32 for shape, dtype in ops.made)
    assert (
        ops.count["clone"] <= 10 * 12
    )  # of single rows, by the source that owns its buffers; none of a batch
    assert batch["observation"].shape == (30, 3)


def test_a_buffer_gets_one_plain_tensordict_per_batch():
    """Never a lazy stack."""

    buffer = Buffer()
    list(Collector(make(), frames_per_batch=30, total_frames=90, replay_buffer=buffer))
    assert [type(batch) for batch in buffer.batches] == [TensorDict] * 3
    assert all(leaf.is_contiguous() for batch in buffer.batches for leaf in batch.values(True, True))


def test_an_error_is_not_swallowed():
    """An error of the policy reaches the caller and closes the collector."""

    def fails(obs):
        raise ZeroDivisionError("policy")

    collector = Collector(make, fails, frames_per_batch=6)
    with pytest.raises(ZeroDivisionError, match="policy"):
        next(collector)
    with pytest.raises(RuntimeError, match="the collector is closed"):
        next(collector)


def test_an_interrupted_batch_is_neither_yielded_nor_counted():
    """No batch has rows that were never collected."""
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
    for frames in (1, 2, 7, 10):
        batch, _ = collect(make("NextStep"), frames, set_truncated=True)
        assert torch.equal(run_ends(batch), batch["next", "done"].squeeze(-1))
        assert torch.equal(batch["next", "observation"], true_next(batch))


def test_a_trajectory_that_goes_on_keeps_its_id():
    """Cut by the end of a batch, marked or not, it is the same trajectory in the next one."""
    for marked in (False, True):
        collector = Collector(
            make(lengths=100), frames_per_batch=9, total_frames=27, set_truncated=marked, seed=0
        )
        assert [batch[IDS].unique().tolist() for batch in collector] == [[0, 1, 2]] * 3


def test_looking_at_the_state_changes_nothing():
    """A state read while iterating loses no row."""
    plain = list(Collector(make(), frames_per_batch=10, total_frames=60, seed=0))
    watched = Collector(make(), frames_per_batch=10, total_frames=60, seed=0)
    for batch, expected in zip(watched, plain, strict=True):
        watched.state_dict()
        assert (batch == expected).all()


def test_every_write_of_joined_trajectories_is_complete():
    """Each extend gives whole trajectories, the last one included."""

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

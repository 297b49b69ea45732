"""Iterating, closing, saving and loading a collector."""

import contextlib
import copy
import io
import pickle
import random
import re

import pytest
import torch
from list_collector import (
    IDS,
    ListCollector,
    cartpole,
    check,
    make,
    script,
)
from tensordict import TensorDict

from flatroll.layout import audit
from flatroll.rollouts import Collector
from flatroll.wrappers import (
    RewardSum,
    StepCounter,
)
from flatroll.wrappers.testing import Script, ScriptedVectorEnv


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


@pytest.mark.parametrize("trajs_per_batch", [None, 3])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_rows_around_errors_are_never_joined(mode, trajs_per_batch):
    """Whatever is interrupted wherever, each id stands for consecutive steps of one episode, from its first one."""
    throws = random.Random(0)
    zeros, errors = torch.zeros(3, dtype=torch.long), 0

    def perhaps(*arguments):
        if throws.random() < 0.2:
            raise throws.choice([KeyboardInterrupt, ZeroDivisionError])
        return zeros

    collector = Collector(
        StepCounter(make(mode)),
        perhaps,
        frames_per_batch=7,
        trajs_per_batch=trajs_per_batch,
        post_collect_hook=perhaps,
        seed=0,
    )
    batches = []
    while len(batches) < 25:
        try:
            batches.append(next(collector))
        except (KeyboardInterrupt, ZeroDivisionError):
            errors += 1
    assert errors > 5
    rows = torch.cat(batches)
    assert all(len(batch) == 7 for batch in batches) or trajs_per_batch
    for number in rows[IDS].unique():
        one = rows[rows[IDS] == number]
        steps = list(range(len(one)))
        assert one["step_count"].squeeze(-1).tolist() == one["observation"][:, 2].tolist() == steps
        assert one["is_init"].squeeze(-1).tolist() == [step == 0 for step in steps]
        assert len(one["observation"][:, :2].unique(dim=0)) == 1
        assert not one["next", "done"][:-1].any()
        assert one["next", "done"][-1] or not trajs_per_batch


def test_final_stays_that_of_the_last_batch_after_an_error():
    failing = [False]

    def hook(batch):
        if failing[0]:
            raise ZeroDivisionError

    collector = Collector(make("SameStep"), frames_per_batch=7, compact_obs=True, post_collect_hook=hook)
    next(collector)
    final, failing[0] = collector.final, True
    with pytest.raises(ZeroDivisionError):
        next(collector)
    assert collector.final is final


def test_a_collector_that_has_begun_cannot_be_copied_and_one_that_has_not_can():
    collector = Collector(make("SameStep"), frames_per_batch=7, seed=0)
    twin = pickle.loads(pickle.dumps(collector))
    assert (next(twin) == next(collector)).all()
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"state_dict.*Collector\(make_env, "):
            copies(collector)


def test_rollout_is_one_more_batch_whatever_the_total():
    oracle = ListCollector(script(), "SameStep", 10)
    collector = Collector(StepCounter(make("SameStep")), frames_per_batch=10, total_frames=20, seed=0)
    batches = [collector.rollout(), *collector.iterator(), collector.rollout()]
    for batch in batches:
        check(batch, oracle.window())
    assert len(batches) == 3 and collector.frames == 30
    collector.shutdown()
    with pytest.raises(RuntimeError, match="the collector is closed"):
        collector.rollout()


def test_a_seed_set_later_is_that_of_a_new_collector():
    fresh, later = cartpole(3), cartpole(8)
    next(later)
    assert later.set_seed(3) == 3 + later.env.num_envs
    first, again = next(fresh), next(later)
    for key in ("observation", "action", ("next", "done")):
        assert torch.equal(first[key], again[key])
    assert again[IDS].min() > first[IDS].max()
    again = later.set_seed(3) and next(later)
    assert torch.equal(first["observation"], again["observation"])


def test_weights_are_copied_into_the_policy():
    def build(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 5), ArgMax())

    policy = build(0)
    collector = Collector(make("SameStep"), policy, frames_per_batch=10)
    collector.update_policy_weights_()
    collector.update_policy_weights_(policy)
    for seed, weights in enumerate(
        (lambda net: net, lambda net: net.state_dict(), TensorDict.from_module), start=1
    ):
        source = build(seed)
        collector.update_policy_weights_(weights(source))
        assert torch.equal(policy[0].weight, source[0].weight) and policy[0].weight is not source[0].weight
    with pytest.raises(TypeError, match="has no weights"):
        Collector(make("SameStep"), frames_per_batch=10).update_policy_weights_(policy)


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
    assert "return=" in shown and re.search(r"steps/s=[\d.]+[kM]?\b", shown)
    silent = io.StringIO()
    with contextlib.redirect_stderr(silent):
        list(Collector(make("SameStep"), frames_per_batch=20, total_frames=60))
    assert silent.getvalue() == ""


def test_a_collector_shows_what_it_collects():
    def act(obs):
        return torch.zeros(len(obs), dtype=torch.int64)

    collector = Collector(make("SameStep"), frames_per_batch=20, total_frames=60)
    assert repr(collector).startswith(
        "Collector(0 of 60 frames, env=<TrajId, <InitTracker, VectorStream(Scripted"
    )
    assert repr(collector).endswith("policy=random actions, frames_per_batch=20)")
    next(collector)
    page = collector._repr_html_()
    assert "<b>Collector: 20 of 60 frames</b>" in page and "&lt;TrajId" in page
    collector.shutdown()
    assert repr(collector).endswith(", state=closed)")
    assert "policy=act" in repr(Collector(make("SameStep"), act, frames_per_batch=20))
    assert "policy=ArgMax" in repr(Collector(make("SameStep"), ArgMax(), frames_per_batch=20))

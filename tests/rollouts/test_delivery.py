"""What is done with a finished batch: postproc, hooks, buffer; compact batches."""

import pytest
import torch
from list_collector import MODES, Counter, FakeBuffer, keys_of, make, next_obs, script

from flatroll.layout import run_ends
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import (
    CompactObs,
    NextObservationDelta,
    RewardSum,
    StepCounter,
)
from flatroll.wrappers.testing import ScriptedVectorEnv

# --- postproc, hooks, buffer --------------------------------------------------------------------------------


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


# --- compact batches ----------------------------------------------------------------------------------------


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


def test_stats_count_what_was_collected_and_what_waits():
    collector = Collector(make("SameStep"), frames_per_batch=5)
    next(collector)
    collector.update_policy_weights_()
    assert collector.stats() == {"frames": 5, "rows_held": 1, "policy_version": 1}

"""The collector on any script, windows and arguments, against a collector written with Python lists."""

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from list_collector import ENDS, MODES, ListCollector, check, make, next_obs, true_next

from flatroll.rollouts import Collector
from flatroll.wrappers import (
    StepCounter,
)
from flatroll.wrappers.testing import Script

lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5)


@examples(150)
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


@examples(80)
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


@examples(80)
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


@pytest.mark.filterwarnings("ignore:actions must lie in")  # those that are not random, to tell them apart
@examples(60)
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

"""How many rows a batch has, complete trajectories, and what happens where a batch cuts them."""

import itertools

import pytest
import torch
from counting import count_calls
from list_collector import (
    IDS,
    MODES,
    FakeBuffer,
    ListCollector,
    always_four,
    check,
    make,
    next_obs,
    true_next,
)

from flatroll.layout import join, run_ends
from flatroll.rollouts import Collector, window
from flatroll.wrappers import (
    CompactObs,
    StepCounter,
)
from flatroll.wrappers.testing import Script, make_scripted

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
        UserWarning, match="total_frames=25 is not a multiple of frames_per_batch=10: 30 frames will"
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


@pytest.mark.parametrize("which", MODES)
def test_episodes_longer_than_a_window_end_though_each_batch_resets(which):
    """A reset before every window of a batch would never let one end, and the batch would never come."""
    left = iter(range(1000))

    def policy(obs):
        next(left)  # StopIteration, not a hang
        return torch.zeros(len(obs), dtype=torch.int64)

    collector = Collector(
        make(which, Script(2, lengths=[[7], [9]])),
        policy,
        frames_per_batch=3,
        trajs_per_batch=2,
        reset_at_each_iter=True,
    )
    for _ in range(4):
        batch = next(collector)
        assert sorted(run_ends(batch).nonzero().squeeze(-1).diff(prepend=torch.tensor([-1])).tolist()) == [
            7,
            9,
        ]
        assert torch.equal(run_ends(batch), batch["next", "done"].squeeze(-1))


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
        with pytest.raises(ValueError, match="split_trajs=True cannot be combined with a replay_buffer"):
            Collector(env, frames_per_batch=10, split_trajs=True, replay_buffer=FakeBuffer(), **options)


@pytest.mark.parametrize("which", MODES)
@pytest.mark.parametrize("compact", [False, True])
def test_few_rows_and_many_are_picked_alike(which, compact, monkeypatch):
    """NumPy picks the rows of small batches, torch those of large ones."""
    made = []
    for few in (0, 10**9):
        monkeypatch.setattr(window, "_FEW_ROWS", few)
        collector = Collector(
            StepCounter(make(which)), frames_per_batch=13, total_frames=52, compact_obs=compact, seed=0
        )
        made.append([(batch, collector.final) for batch in collector])
    for (one, final), (other, other_final) in zip(*made, strict=True):
        assert (one == other).all() and set(one.keys(True, True)) == set(other.keys(True, True))
        assert not compact or (final == other_final).all()


@pytest.mark.parametrize(("options", "most"), [({}, 330), ({"compact_obs": True}, 480)], ids=["", "compact"])
def test_a_batch_of_one_row_takes_few_calls(options, most):
    """Counted, since clocks differ: a batch of one row is made of some hundred calls, not of thousands."""
    env = make("SameStep", Script(1, lengths=50))
    batches = iter(Collector(env, always_four, frames_per_batch=1, **options))
    for _ in range(3):
        next(batches)
    calls = count_calls(lambda: next(batches), "call", "c_call")
    assert calls < most, calls

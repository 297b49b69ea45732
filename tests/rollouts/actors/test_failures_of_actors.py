"""What happens when actors die, or raise; Ray is replaced by a fake with the same calls."""

import logging
from functools import partial

import pytest
from fake_ray import FakeRay
from list_collector import IDS, always_four, make
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, RayReplayBuffer
from flatroll.rollouts import RayCollector
from flatroll.sharing import WorkerDied, WorkerTraceback

make_env = partial(make, "SameStep")


def collect(fake, *, env=make_env, **options):
    given = {"num_collectors": 2, "frames_per_batch": 6, **options}
    return RayCollector(env, always_four, calls=fake, **given)


class Falls:
    """Its hook raises when it is called often enough."""

    def __init__(self, after):
        self.left = after

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise ValueError("the robot fell over")


def cannot_be_made():
    raise OSError("no such robot")


def counts(rows):
    """Step numbers without gaps in each trajectory, each of which begins at 0."""
    for number in rows[IDS].unique():
        steps = rows["observation"][rows[IDS] == number][:, 2].tolist()
        assert steps == list(range(len(steps)))


@pytest.mark.parametrize("sync", [False, True], ids=["first come", "in step"])
def test_a_dead_actor_is_an_error_that_names_it(sync):
    fake = FakeRay(dies={1: 3})
    actors = collect(fake, sync=sync)
    batches = []
    with pytest.raises(WorkerDied, match=r"^collector 1 \(writer 1\): killed"):
        batches += [next(actors) for _ in range(20)]
    with pytest.raises(RuntimeError, match="the collector is closed"):
        next(actors)
    assert all(actor.dead for actor in fake.actors)
    assert fake.closed == 1


@pytest.mark.parametrize("sync", [False, True], ids=["first come", "in step"])
def test_a_dead_actor_is_replaced_by_one_with_other_ids(sync, caplog):
    fake = FakeRay(dies={1: 4, 2: 3})
    with collect(fake, sync=sync, on_failure="replace", total_frames=120, writer=10) as actors:
        with caplog.at_level(logging.WARNING, "flatroll.rollouts"):
            batches = list(actors)
        stats = actors.stats()
    assert [len(batch) for batch in batches] == [6] * 20
    rows = TensorDict.cat(batches)
    assert (rows[IDS] >> 40).unique().tolist() == [10, 11, 12, 13]
    assert len(rows[IDS].unique()) == int(rows["is_init"].sum())  # no id came back
    counts(rows)
    assert (stats["actors_made"], stats["actors_lost"]) == (4, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "collector 1 (writer 11) failed and is replaced: WorkerDied: collector 1 (writer 11): killed",
        "collector 1 (writer 12) failed and is replaced: WorkerDied: collector 1 (writer 12): killed",
    ]
    if sync:  # the batch in which it died is complete all the same
        assert all(len((batch[IDS] >> 40).unique()) == 2 for batch in batches)


def test_a_replacement_begins_with_the_newest_weights_and_another_seed():
    fake = FakeRay(dies={1: 4})
    options = {"init_random_frames": 1000, "track_policy_version": True, "total_frames": 120}
    with collect(fake, sync=True, on_failure="replace", seed=3, **options) as actors:
        seen = {}
        for update, batch in enumerate(actors):
            assert batch["collector", "policy_version"].tolist() == [update] * 6
            actors.update_policy_weights_()
            for writer in (batch[IDS] >> 40).unique().tolist():
                own = batch[batch[IDS] >> 40 == writer]
                seen.setdefault(writer, []).extend(own["action"].flatten().tolist())
    first = {writer: actions[:9] for writer, actions in seen.items()}
    assert first.keys() == {0, 1, 2} and len(set(map(tuple, first.values()))) == 3


@pytest.mark.parametrize("sync", [False, True], ids=["first come", "in step"])
def test_the_others_go_on_where_an_actor_is_dropped(sync):
    fake = FakeRay(dies={1: 4})
    with collect(fake, sync=sync, num_collectors=3, on_failure="drop", total_frames=120) as actors:
        batches = list(actors)
        assert actors.frames == sum(map(len, batches)) >= 120
        assert len(actors.stats()["collectors"]) == 2
    counts(TensorDict.cat(batches))
    assert {len(batch) for batch in batches} == {6}
    if sync:  # the others share its part
        assert {tuple((batch[IDS] >> 40).tolist()) for batch in batches[-3:]} == {(0, 0, 0, 2, 2, 2)}


def test_the_last_actor_is_not_dropped():
    with pytest.raises(WorkerDied, match="killed"):
        list(collect(FakeRay(dies={0: 3, 1: 3}), on_failure="drop"))


def test_trajectories_that_a_lost_actor_was_to_collect_are_collected_by_others():
    for mode in ("drop", "replace"):
        fake = FakeRay(dies={1: 4})
        with collect(
            fake, on_failure=mode, frames_per_batch=10, total_frames=200, trajs_per_batch=3
        ) as actors:
            rows = TensorDict.cat(list(actors))
            assert 200 <= actors.frames <= 210
        counts(rows)
        assert int(rows["is_init"].sum()) == int(rows["next", "done"].sum())


@pytest.mark.parametrize("mode", ["raise", "replace"])
def test_what_an_actor_raises_comes_with_type_text_and_traceback(mode):
    with pytest.raises(ValueError, match="the robot fell over") as caught:
        list(collect(FakeRay(), pre_collect_hook=Falls(2), on_failure=mode, max_failures=1))
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert 'raise ValueError("the robot fell over")' in str(caught.value.__cause__)
    notes = ["raised in collector 0 (writer 0)"]
    if mode == "replace":
        notes = ["raised in collector 1 (writer 1)", "2 workers failed within 60 s, more than max_failures=1"]
    assert caught.value.__notes__ == notes


@pytest.mark.parametrize("mode", ["raise", "drop", "replace"])
def test_a_collector_that_cannot_be_made_is_an_error_at_once_and_no_loop(mode):
    fake = FakeRay()
    with pytest.raises(OSError, match="no such robot") as caught:
        collect(fake, env=[make_env, cannot_be_made], num_collectors=None, on_failure=mode)
    assert "cannot_be_made" in str(caught.value.__cause__)
    assert caught.value.__notes__ == ["raised in collector 1 (writer 1), while its collector was made"]
    assert len(fake.actors) == 2 and all(actor.dead for actor in fake.actors) and fake.closed == 1


def test_an_actor_that_dies_again_and_again_while_it_starts_is_an_error_in_the_end():
    fake = FakeRay(dies=dict.fromkeys(range(1, 50), 0))
    with pytest.raises(WorkerDied, match=r"collector 1 \(writer 4\): killed") as caught:
        collect(fake, on_failure="replace", max_failures=3)
    assert caught.value.__notes__ == ["4 workers failed within 60 s, more than max_failures=3"]


def test_old_failures_do_not_count(monkeypatch):
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr("flatroll.rollouts.workers.team.monotonic", lambda: float(next(clock)))
    fake = FakeRay(dies=dict.fromkeys(range(1, 9), 2))
    with collect(fake, on_failure="replace", max_failures=2, total_frames=120, start_timeout=1e6) as actors:
        assert sum(map(len, actors)) == 120
        assert actors.stats()["actors_lost"] > 3


def test_a_cluster_without_room_is_an_error_that_names_what_was_asked_for():
    fake = FakeRay(nowhere={1})
    with pytest.raises(TimeoutError) as caught:
        collect(fake, remote_configs=[{"num_gpus": 1}, {"num_gpus": 2, "num_cpus": 3}], start_timeout=0.01)
    assert str(caught.value) == (
        "no node had room for an actor, or its env took too long to be made, within start_timeout=0.01 s: collector 1 "
        "(writer 1) asks for {'num_cpus': 3, 'num_gpus': 2}. Ask for less with remote_configs, or add nodes"
    )


def test_a_dead_buffer_is_an_error_and_what_is_in_a_saved_state_is_not_lost():
    fake = FakeRay()
    buffer = RayReplayBuffer(storage=partial(LazyTensorStorage, 100), batch_size=4, calls=fake)
    buffer.extend(TensorDict({"observation": [1.0, 2.0]}, [2]))
    state = buffer.state_dict()
    fake.kill(fake.actors[0])
    with pytest.raises(
        WorkerDied, match=r"the replay buffer's actor: killed\. Make a new buffer, and give it the last"
    ):
        buffer.sample()
    other = RayReplayBuffer(storage=partial(LazyTensorStorage, 100), batch_size=4, calls=fake)
    other.load_state_dict(state)
    assert other[:]["observation"].tolist() == [1.0, 2.0]


def test_after_loading_a_state_ids_and_versions_go_on():
    first = collect(FakeRay(), writer=3)
    for _ in range(3):
        next(first)
    first.update_policy_weights_()
    state = first.state_dict()
    assert state == {"frames": 18, "next_writer": 5, "seeds_used": 2, "policy": None, "policy_version": 1}
    first.shutdown()
    options = {"total_frames": 30, "init_random_frames": 18, "track_policy_version": True}
    with collect(FakeRay(), writer=3, **options) as second:
        second.load_state_dict(state)  # the rows with random actions are over
        rows = TensorDict.cat(list(second))
        assert second.frames == 30 and len(rows) == 12
        assert set((rows[IDS] >> 40).tolist()) <= {5, 6}
        assert rows["collector", "policy_version"].tolist() == [1] * 12
        assert (rows["action"] == 4).all()

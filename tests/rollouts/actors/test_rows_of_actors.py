"""Actors give the rows of single collectors, each exactly once; Ray is replaced by a fake with the same calls."""

from functools import partial

import pytest
import torch
from fake_ray import FakeRay
from list_collector import IDS, always_four, make
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from worker_envs import assert_equal, recurrent

from flatroll.buffers import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, SliceSampler
from flatroll.rollouts import Collector, RayCollector

VERSIONS = ("collector", "policy_version")
make_env = partial(make, "NextStep")
in_whole_steps = partial(make, "SameStep")  # three rows in each: windows of 6 or 12 hold none back


def collect(fake, *, env=make_env, policy=always_four, **options):
    return RayCollector(env, policy, calls=fake, **options)


def alone(writer, batches, **options):
    """The rows of a single collector with this writer number."""
    collector = Collector(make_env, always_four, writer=writer, **options)
    return TensorDict.cat([collector.rollout() for _ in range(batches)])


def of_writer(rows, writer):
    return rows[rows[IDS] >> 40 == writer]


class ActsItsWeight(torch.nn.Module):
    """The action is the weight, which counts the updates, modulo the number of actions."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0), requires_grad=False)
        self.register_buffer("unused", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, observation):
        return self.weight.expand(len(observation)) % 5


def learned():
    return TensorDictModule(ActsItsWeight(), ["observation"], ["action"])


@pytest.mark.parametrize("sync", [False, True], ids=["first come", "in step"])
def test_each_actor_gives_the_stream_of_a_single_collector(sync):
    fake = FakeRay(slow={1: 3})
    with collect(
        fake, num_collectors=3, sync=sync, frames_per_batch=11, total_frames=132, writer=5
    ) as actors:
        batches = list(actors)
        assert [len(batch) for batch in batches] == [11] * 12
        assert actors.frames == 132
        assert len(actors.rollout()) == 11  # one more
    rows = TensorDict.cat(batches)
    if sync:  # in the order of the actors, the first ones giving a row more
        assert all((batch[IDS] >> 40).tolist() == [5] * 4 + [6] * 4 + [7] * 3 for batch in batches)
    sizes = {5: 4, 6: 4, 7: 3} if sync else dict.fromkeys((5, 6, 7), 11)
    for writer, size in sizes.items():
        own = of_writer(rows, writer)
        assert not len(own) % size
        expected = alone(writer, len(own) // size, frames_per_batch=size)
        assert (own == expected).all()
    if not sync:  # the slow one gave less, nobody waited for it
        assert len(of_writer(rows, 6)) < len(of_writer(rows, 5))


def test_an_actor_of_two_workers_gives_rows_of_both():
    options = {"sync": True, "frames_per_batch": 12, "total_frames": 24}
    with collect(FakeRay(), workers_per_actor=2, writer=4, **options) as actors:
        assert [(batch[IDS] >> 40).tolist() for batch in actors] == [[4] * 6 + [5] * 6] * 2


def test_compact_batches_of_several_actors_have_one_final():
    options = {"sync": True, "frames_per_batch": 11, "total_frames": 44}
    dense = collect(FakeRay(), num_collectors=2, **options)
    compact = collect(FakeRay(), num_collectors=2, compact_obs=True, **options)
    for batch, full in zip(compact, dense, strict=True):
        row = compact.final["row"]
        assert row.tolist() == sorted(set(row.tolist()))
        following = batch["observation"].roll(-1, 0)
        following[row] = compact.final["next", "observation"]
        assert torch.equal(following, full["next", "observation"])


def test_recurrent_policies_with_states_in_few_rows():
    torch.manual_seed(0)
    policy = recurrent()
    options = {"frames_per_batch": 11, "state_stride": 3, "compact_obs": True}
    with collect(FakeRay(), policy=policy, num_collectors=2, total_frames=66, **options) as actors:
        batches = list(actors)
    single = {writer: Collector(make_env, policy, writer=writer, **options) for writer in (0, 1)}
    for batch in batches:
        assert_equal(batch, single[int(batch[IDS][0]) >> 40].rollout())


@pytest.mark.parametrize("sync", [False, True], ids=["first come", "in step"])
def test_batches_of_whole_trajectories(sync):
    with collect(
        FakeRay(), num_collectors=2, sync=sync, frames_per_batch=20, total_frames=80, trajs_per_batch=4
    ) as actors:
        batches = list(actors)
        assert actors.frames == 80
        held = actors.stats()["rows_held"]
    rows = TensorDict.cat(batches)
    assert len(rows) + held == 80
    for batch in batches:  # each begins and ends in it
        ids = batch[IDS]
        count = len(ids.unique())
        assert int(batch["is_init"].sum()) == int(batch["next", "done"].sum()) == count
    assert len(rows[IDS].unique()) == int(rows["next", "done"].sum())


def test_random_frames_are_shared_out():
    with collect(
        FakeRay(),
        env=in_whole_steps,
        num_collectors=2,
        frames_per_batch=12,
        total_frames=48,
        init_random_frames=24,
        seed=1,
    ) as actors:
        rows = TensorDict.cat(list(actors))
    for writer in (0, 1):
        own = of_writer(rows, writer)["action"].flatten()
        assert (own[:12] != 4).any() and (own[12:] == 4).all()


def test_a_seeded_run_in_step_repeats_itself_and_actors_differ():
    def run():
        options = {"frames_per_batch": 12, "total_frames": 24, "init_random_frames": 24}
        with collect(FakeRay(), num_collectors=2, sync=True, seed=7, **options) as actors:
            return TensorDict.cat(list(actors))

    first, again = run(), run()
    assert (first == again).all()
    assert of_writer(first, 0)["action"].tolist() != of_writer(first, 1)["action"].tolist()


def test_no_more_windows_are_under_way_than_said_and_the_store_stays_flat():
    fake = FakeRay()
    with collect(fake, num_collectors=3, max_in_flight=2, frames_per_batch=6) as actors:
        kept = []
        for number, batch in zip(range(300), actors, strict=False):
            kept.append(batch)
            if number == 20:
                references, most = len(fake.live), fake.most_bytes
        assert len(fake.live) == references and fake.most_bytes == most
        assert fake.most_in_flight == 6
        # What was yielded stands in memory of its own, which the store may give away.
        kept[0]["observation"].zero_()
        assert all(place["in_flight"] <= 2 for place in actors.stats()["collectors"])


def test_in_step_every_row_acts_with_the_version_of_the_moment_when_it_was_asked_for():
    fake, policy = FakeRay(), learned()
    with collect(
        fake,
        env=in_whole_steps,
        policy=policy,
        num_collectors=2,
        sync=True,
        frames_per_batch=12,
        total_frames=60,
        track_policy_version=True,
    ) as actors:
        puts = fake.puts
        for update, batch in enumerate(actors):
            assert batch[VERSIONS].tolist() == [update] * 12
            assert batch["action"].flatten().tolist() == [update] * 12
            policy.module.weight += 1
            actors.update_policy_weights_()
        assert actors.policy_version == 5
        assert fake.puts - puts == 5  # one for each version, however many actors there are
        assert actors.stats()["policy_lag"] == {"min": 0, "mean": 0.0, "max": 0}


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_without_steps_in_common_rows_are_as_old_as_the_windows_under_way(in_flight):
    policy = learned()
    with collect(
        FakeRay(),
        env=in_whole_steps,
        policy=policy,
        max_in_flight=in_flight,
        frames_per_batch=12,
        total_frames=120,
        track_policy_version=True,
    ) as actors:
        for update, batch in enumerate(actors):
            assert (batch[VERSIONS] % 5).tolist() == batch["action"].flatten().tolist()
            assert batch[VERSIONS].tolist() == [max(0, update - in_flight + 1)] * 12
            new = {name: value + 1 for name, value in policy.state_dict().items()}
            actors.update_policy_weights_(new)
    assert policy.module.weight == 10


def test_a_policy_made_in_the_actors_takes_weights_too():
    with collect(
        FakeRay(), policy=None, policy_factory=learned, sync=True, frames_per_batch=6, total_frames=12
    ) as actors:
        assert next(actors)["action"].flatten().tolist() == [0] * 6
        with pytest.raises(TypeError, match="pass the weights: the policy is created in the actors"):
            actors.update_policy_weights_()
        policy = learned()
        policy.module.weight += 3
        actors.update_policy_weights_(policy)
        assert next(actors)["action"].flatten().tolist() == [3] * 6
        with pytest.raises(StopIteration):
            next(actors)


def test_a_state_that_is_loaded_brings_its_weights():
    policy = learned()
    policy.module.weight += 2
    with collect(FakeRay(), policy=policy, frames_per_batch=6) as actors:
        state = actors.state_dict()
    with collect(FakeRay(), policy=learned(), frames_per_batch=6) as actors:
        actors.load_state_dict(state)
        assert actors.policy_version == 0
        assert next(actors)["action"].flatten().tolist() == [2] * 6


def test_a_local_buffer_follows_trajectories_over_windows_of_all_actors():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(1000, compact_obs=True), sampler=SliceSampler(slice_len=3, traj_key=IDS)
    )
    with collect(
        FakeRay(),
        num_collectors=2,
        frames_per_batch=7,
        total_frames=70,
        compact_obs=True,
        replay_buffer=buffer,
    ) as actors:
        assert list(actors) == [None] * 10
    assert len(buffer) == 70
    assert buffer.stats()["trajectories"] == len(buffer[:][IDS].unique())


def test_rows_go_from_actor_to_buffer_actor_without_the_driver():
    fake = FakeRay()
    buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 1000, compact_obs=True),
        sampler=partial(SliceSampler, slice_len=3, traj_key=IDS),
        batch_size=30,
        prefetch=2,
        calls=fake,
    )
    seen, get = [], fake.get
    fake.get = lambda reference: seen.append(get(reference)) or seen[-1]
    with collect(
        fake, num_collectors=2, frames_per_batch=7, total_frames=70, compact_obs=True, replay_buffer=buffer
    ) as actors:
        assert list(actors) == [None] * 10
    assert not [value for value in seen if type(value) is tuple]  # rows
    assert len(buffer) == 70
    assert buffer.stats()["trajectories"] == len(buffer[:][IDS].unique())
    assert 0 < len(buffer.sample()) <= 30
    joined = collect(
        fake,
        num_collectors=2,
        sync=True,
        frames_per_batch=7,
        total_frames=7,
        compact_obs=True,
        writer=9,
        replay_buffer=buffer,
    )
    assert list(joined) == [None] and len(buffer) == 77


def test_complete_trajectories_tell_the_buffer_how_many_rows_wait():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    heard = []
    buffer.note_waiting = heard.append
    with collect(
        FakeRay(), frames_per_batch=9, total_frames=36, trajs_per_batch=2, replay_buffer=buffer
    ) as actors:
        list(actors)
        assert heard[-1] == actors.stats()["rows_held"] == 36 - len(buffer)


class Interrupted(FakeRay):
    """Ctrl-C comes while the driver waits, when ``left`` waits are over."""

    left = 10**9

    def wait(self, references, timeout=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().wait(references, timeout)


@pytest.mark.parametrize("sync", [False, True], ids=["first come", "in step"])
def test_nothing_is_lost_by_a_keyboard_interrupt(sync):
    batches = []
    with collect(fake := Interrupted(), num_collectors=3, sync=sync, frames_per_batch=12) as actors:
        for _ in range(8):
            fake.left = 2
            with pytest.raises(KeyboardInterrupt):
                while True:
                    batches.append(next(actors))
            fake.left = 10**9
            batches.append(next(actors))
    assert {len(batch) for batch in batches} == {12}
    rows = TensorDict.cat(batches)
    for writer in range(3):
        own = of_writer(rows, writer)
        size = 4 if sync else 12
        assert (own == alone(writer, len(own) // size, frames_per_batch=size)).all()

"""Shards in actors are sampled as one buffer, keep trajectories whole, and go on without a shard that is lost."""

import logging
import os
import signal
from functools import partial

import pytest
import torch
from fake_ray import FakeRay
from list_collector import IDS, always_four
from process_ray import ProcessRay
from ray_envs import make_env
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    RayReplayBufferEnsemble,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.rollouts import Collector, RayCollector
from flatroll.sharing import Nursery, WorkerDied

SHARD = ("collector", "buffer_ids")
storage = partial(LazyTensorStorage, 1000)


def rows(count, first=0):
    return TensorDict({"observation": torch.arange(first, first + count)}, [count])


def shards(count, calls=None, **options):
    calls = calls or FakeRay()
    return [RayReplayBuffer(storage=storage, calls=calls, seed=i, **options) for i in range(count)]


def seeded():
    return torch.Generator().manual_seed(0)


def test_rows_come_from_shards_in_proportion_to_their_rows():
    made = shards(4)
    for shard, count, first in zip(made, (10, 30, 0, 60), (0, 100, 0, 200), strict=True):
        if count:
            shard.extend(rows(count, first))
    rb = RayReplayBufferEnsemble(*made, batch_size=5000, generator=seeded())
    sample, info = rb.sample(return_info=True)
    assert len(rb) == 100 and sample.shape == (5000,) == info["index"].shape
    counts = info["buffer_ids"].bincount(minlength=4)
    assert (counts - torch.tensor([500, 1500, 0, 3000])).abs().max() < 110  # three standard deviations
    assert torch.equal(sample[SHARD], info["buffer_ids"])
    firsts = torch.tensor([0, 100, 0, 200])
    assert torch.equal(sample["observation"], firsts[info["buffer_ids"]] + info["index"])
    made[2].extend(rows(900, 300))  # its weight is reported with the next answer
    for _ in range(2):
        shares = rb.sample()[SHARD].bincount(minlength=4) / 5000
    assert (shares - torch.tensor([0.01, 0.03, 0.9, 0.06])).abs().max() < 0.02


def test_priorities_and_their_weights_are_those_of_one_buffer():
    sampler = partial(PrioritizedSampler, 1000, alpha=0.7, beta=0.5, eps=0.0)
    rb = RayReplayBufferEnsemble(*shards(3, sampler=sampler), generator=seeded())
    one = ReplayBuffer(storage=storage(), sampler=sampler(), generator=seeded())
    for shard in rb.shards:
        shard.extend(rows(4))
        one.extend(rows(4))
    priority = torch.tensor([5.0, 1.0, 2.0, 8.0, 0.5, 3.0, 1.0, 1.0, 9.0, 4.0, 2.0, 7.0])
    rb.update_priority(torch.arange(12) % 4, priority, buffer_ids=torch.arange(12) // 4)
    one.update_priority(torch.arange(12), priority)
    _, info = rb.sample(6000, return_info=True)
    _, expected = one.sample(6000, return_info=True)
    number = 4 * info["buffer_ids"] + info["index"]
    shares = priority**0.7 / (priority**0.7).sum()
    assert (number.bincount(minlength=12) / 6000 - shares).abs().max() < 0.02
    weight = torch.zeros(12).index_put((expected["index"],), expected["priority_weight"])
    torch.testing.assert_close(info["priority_weight"], weight[number])
    rb.update_priority(torch.tensor([0]), 1e6, buffer_ids=torch.tensor([1]))
    for _ in range(2):
        sample = rb.sample(100)
    assert (sample[SHARD] == 1).all()


@pytest.mark.parametrize("compact", [False, True])
def test_trajectories_stay_whole_and_in_order(compact):
    slices = partial(SliceSampler, slice_len=2)
    storage = partial(LazyTensorStorage, 1000, **({"compact_obs": True} if compact else {}))
    calls = FakeRay()
    rb = RayReplayBufferEnsemble(
        *(RayReplayBuffer(storage=storage, sampler=slices, calls=calls) for _ in range(3))
    )
    one, expected = ReplayBuffer(storage=storage(), sampler=slices()), 0
    for writer in range(2):
        collector = Collector(make_env, always_four, frames_per_batch=7, writer=writer, compact_obs=compact)
        for _ in range(6):
            batch = collector.rollout()
            final = {"final": collector.final} if compact else {}
            expected += rb.extend(batch, **final)
            one.extend(batch, **final)
    whole = one[:]
    held = [shard[:] for shard in rb.shards]
    assert sum(map(len, held)) == len(whole) == expected == len(rb) == 84
    for each in held:
        assert len(each) > 10
        for number in each[IDS].unique():
            assert (each[each[IDS] == number] == whole[whole[IDS] == number]).all()
    assert torch.equal(torch.cat([each[IDS].unique() for each in held]).sort()[0], whole[IDS].unique())
    sample = rb.sample(40)
    assert len(sample[IDS].unique()) > 3
    with pytest.raises(ValueError, match="batch_size must be a multiple of slice_len=2, got 3"):
        rb.sample(3)


def test_windows_of_actors_go_to_their_shard_without_the_driver():
    calls = FakeRay()
    rb = RayReplayBufferEnsemble(*shards(2, calls))
    with RayCollector(
        make_env, always_four, num_collectors=4, frames_per_batch=6, total_frames=96, replay_buffer=rb, calls=calls
    ) as collector:  # fmt: skip
        assert list(collector) == [None] * 16
    held = [shard[:][IDS].unique() for shard in rb.shards]
    assert len(rb) == 96 and not set(held[0].tolist()) & set(held[1].tolist())
    assert [sorted({number >> 40 for number in ids.tolist()}) for ids in held] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_lost_node_takes_its_shard_and_the_rest_goes_on(prefetch, caplog):
    with Nursery(preload=("flatroll.buffers",)) as nursery, caplog.at_level(logging.WARNING):
        made = shards(3, ProcessRay(nursery))
        rb = RayReplayBufferEnsemble(*made, batch_size=30, prefetch=prefetch, generator=seeded())
        ids = torch.arange(30) // 5

        def batch():
            return TensorDict({"observation": torch.arange(30), "collector": {"traj_ids": ids}}, [30])

        rb.extend(batch())
        assert len(rb) == 30 and rb.sample()[SHARD].unique().tolist() == [0, 1, 2]
        before = [shard[:]["observation"] for shard in (made[0], made[2])]
        os.kill(nursery.workers[1].pid, signal.SIGKILL)
        for _ in range(4):
            assert rb.sample().shape == (30,)
        assert rb.lost == (1,) and "shard 1 is lost with its rows, 2 are left" in caplog.text
        assert set(rb.sample()[SHARD].tolist()) == {0, 2}
        assert len(rb) == 20 and rb.stats()["lost"] == 1
        assert rb.extend(batch()) == 30 and len(rb) == 50
        # Trajectories of the others stay where they were; those of the lost shard go to the next one.
        assert torch.equal(made[0][:]["observation"], before[0].repeat(2))
        assert made[2][:]["collector", "traj_ids"].unique().tolist() == [1, 2, 4, 5]
        state = rb.state_dict()
        assert [each is None for each in state["shards"]] == [False, True, False]
        os.kill(nursery.workers[0].pid, signal.SIGKILL)
        assert rb.extend(batch()) == 30 and rb.lost == (0, 1) and len(rb) == 60
        rb.load_state_dict(state)
        assert len(rb) == 30
        os.kill(nursery.workers[2].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="the replay buffer's actor"):
            rb.sample(8)


def test_a_lost_shard_may_be_an_error():
    calls = FakeRay()
    rb = RayReplayBufferEnsemble(*shards(2, calls), batch_size=4, on_loss="raise")
    rb.extend(rows(4))
    rb.extend(rows(6))
    calls.kill(calls.actors[0])
    with pytest.raises(WorkerDied, match="the replay buffer's actor"):
        rb.sample()
    assert rb.lost == ()


def test_wrong_arguments():
    with pytest.raises(TypeError, match="shards must be RayReplayBuffers, at least one, got none"):
        RayReplayBufferEnsemble()
    with pytest.raises(TypeError, match="got ReplayBuffer"):
        RayReplayBufferEnsemble(ReplayBuffer(storage=storage()))
    for wrong, text in (
        ({"prefetch": 1}, "prefetch needs a batch_size"),
        ({"on_loss": "forget"}, "on_loss"),
    ):
        with pytest.raises(ValueError, match=text):
            RayReplayBufferEnsemble(*shards(1), **wrong)
    with RayReplayBufferEnsemble(*shards(2)) as rb:
        with pytest.raises(ValueError, match="batch_size must be given"):
            rb.sample()
        with pytest.raises(RuntimeError, match="cannot sample: no shard has rows"):
            rb.sample(2)
        assert "shards" in repr(rb)
    rb = RayReplayBufferEnsemble(*shards(2, sampler=partial(SliceSampler, num_slices=2)))
    with pytest.raises(ValueError, match="needs slice_len"):
        rb.sample(2)


def test_pending_samples_are_not_pickled_and_are_dropped_with_the_rows():
    rb = RayReplayBufferEnsemble(*shards(2), batch_size=4, prefetch=1)
    rb.extend(rows(4))
    rb.extend(rows(6))
    assert [len(sample) for _, sample in zip(range(3), rb, strict=False)] == [4] * 3
    assert len(rb._under_way) == 1 and not rb.__getstate__()["_under_way"]
    rb.empty()
    assert len(rb) == 0 and not rb._under_way

"""Collecting on a cluster of three nodes, one of which is lost."""

import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch
from list_collector import IDS, always_four
from ray_envs import Dies, Greedy, Wide, falls, make_env
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from flatroll.buffers import LazyTensorStorage, RayReplayBuffer, RayReplayBufferEnsemble, SliceSampler
from flatroll.modules import TransformerModule, set_recurrent_mode
from flatroll.rollouts import Collector, RayCollector
from flatroll.sharing import WorkerDied, WorkerTraceback

ray = pytest.importorskip("ray")
STORE = 100 * 2**20


@pytest.fixture(scope="module")
def cluster(paths):
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "resources": {"first": 4}, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=1, resources={"away": 1}, object_store_memory=STORE)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def of_writer(rows, writer):
    return rows[rows[IDS] >> 40 == writer]


def test_rows_of_actors_on_three_nodes_are_those_of_single_collectors(cluster):
    with RayCollector(
        make_env, always_four, num_collectors=3, remote_configs=[{}, away(), away()],
        sync=True, frames_per_batch=36, total_frames=144, compact_obs=True,
    ) as actors:  # fmt: skip
        batches = list(actors)
    assert [len(batch) for batch in batches] == [36] * 4
    rows = TensorDict.cat(batches)
    for writer in range(3):
        collector = Collector(make_env, always_four, frames_per_batch=12, writer=writer, compact_obs=True)
        alone = TensorDict.cat([collector.rollout() for _ in range(4)])
        assert (of_writer(rows, writer) == alone).all()


def test_caches_of_a_transformer_stay_with_their_actors(cluster):
    memory = TransformerModule(3, 8, 2, 2, context=5, in_key="observation", out_key="features")
    with torch.no_grad():
        memory.network.embed.weight.mul_(0.01)  # observations count steps
    policy = TensorDictSequential(
        memory, TensorDictModule(nn.Linear(8, 5), ["features"], ["logits"]),
        TensorDictModule(partial(torch.argmax, dim=-1), ["logits"], ["action"]),
    )  # fmt: skip
    with RayCollector(make_env, policy, num_collectors=2, sync=True, frames_per_batch=48) as actors:
        batch = next(iter(actors))
    assert not any("_cache" in str(key) for key in batch.keys(True, True))
    with set_recurrent_mode("recurrent"), torch.no_grad():
        again = policy(batch.clone())
    torch.testing.assert_close(again["logits"], batch["logits"], atol=1e-5, rtol=0)


def command(process):
    """Programs of processes that start workers stand in their command lines."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def away():
    return {"num_cpus": 0, "resources": {"away": 1}}


def test_a_node_is_lost_and_collecting_goes_on(cluster):
    policy = torch.nn.Linear(3, 5)
    buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 100_000, compact_obs=True),
        sampler=partial(SliceSampler, slice_len=4, traj_key=IDS),
        batch_size=32,
        prefetch=2,
        remote_config={"resources": {"first": 1}},
    )
    lost = cluster.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=STORE)
    anywhere = [{"num_cpus": 0, "resources": {"first": 1}}, {"num_cpus": 0, "resources": {"doomed": 1}}]
    with RayCollector(
        make_env, lambda obs: policy(obs).argmax(-1), num_collectors=2, remote_configs=anywhere,
        frames_per_batch=30, compact_obs=True, replay_buffer=buffer, on_failure="replace", start_timeout=60,
    ) as actors:  # fmt: skip
        for _ in range(4):
            assert next(actors) is None
        assert len(buffer) == 120
        cluster.remove_node(lost)
        # A node that takes its place; without one, the error names what is asked for (tested with the fake).
        cluster.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=STORE)
        windows = 4
        while actors.stats()["actors_lost"] == 0 or actors.stats()["collectors"][1]["windows"] < windows:
            next(actors)
            time.sleep(0.02)
            assert 0 < len(buffer.sample()) <= 32
            if actors.stats()["actors_lost"] and windows == 4:
                windows = actors.stats()["collectors"][1]["windows"] + 2
        assert actors.stats()["actors_lost"] == 1
        rows = buffer[:]
        assert len(rows) == actors.frames
    writers = (rows[IDS] >> 40).unique().tolist()
    assert writers == [0, 1, 2]
    rows = rows[rows[IDS].argsort(stable=True)]
    steps, first = rows["observation"][:, 2], rows["is_init"][:, 0]
    assert (steps[first] == 0).all() and (
        steps.diff()[~first[1:]] == 1
    ).all()  # nothing is missing inside a trajectory
    assert first.sum() == len(rows[IDS].unique())
    buffer.shutdown()


def test_a_node_is_lost_with_its_shard_and_the_others_go_on(cluster):
    lost = cluster.add_node(num_cpus=1, resources={"shard": 1}, object_store_memory=STORE)
    nodes = [{"resources": {"first": 1}}, {"resources": {"shard": 1}}, {"resources": {"away": 1}}]
    storage, sampler = partial(LazyTensorStorage, 100_000), partial(SliceSampler, slice_len=4, traj_key=IDS)
    made = [RayReplayBuffer(storage=storage, sampler=sampler, remote_config=node) for node in nodes]
    with (
        RayReplayBufferEnsemble(*made, batch_size=32, prefetch=1) as buffer,
        RayCollector(
            make_env, always_four, num_collectors=3, frames_per_batch=30, replay_buffer=buffer,
            remote_configs=[{"num_cpus": 0, "resources": {"first": 1}}] * 3,
        ) as actors,
    ):  # fmt: skip
        for _ in range(6):
            assert next(actors) is None
        held = [set(shard[:][IDS].tolist()) for shard in made]
        assert (
            len(buffer) == 180 and not held[0] & held[1] and not held[0] & held[2] and not held[1] & held[2]
        )
        assert 0 < len(buffer.sample()) <= 32
        cluster.remove_node(lost)
        while buffer.lost == ():
            next(actors)
            time.sleep(0.02)
            assert 0 < len(buffer.sample()) <= 32
        before = len(buffer)
        for _ in range(6):
            next(actors)
            assert set(buffer.sample()["collector", "buffer_ids"].tolist()) <= {0, 2}
        assert buffer.lost == (1,) and len(buffer) == before + 180
        ids = [set(made[shard][:][IDS].tolist()) for shard in (0, 2)]
        assert not ids[0] & ids[1]


def test_the_buffer_is_the_same_in_another_process(cluster):
    with RayReplayBuffer(storage=partial(LazyTensorStorage, 100), batch_size=4) as buffer:
        buffer.extend(TensorDict({"observation": torch.arange(5)}, [5]))

        @ray.remote
        def trainer(buffer):
            buffer.extend(TensorDict({"observation": torch.arange(5, 20)}, [15]))
            return buffer.sample()["observation"]

        assert ray.get(trainer.remote(buffer)).shape == (4,)
        assert len(buffer) == 20


def test_an_actor_holds_a_whole_multi_collector(cluster):
    """Two processes in one actor, in step: rows, ids and policy versions are those of the driver's count."""
    policy = torch.nn.Linear(3, 5)
    seen = []
    with RayCollector(
        make_env, TensorDictModule(Greedy(policy), ["observation"], ["action"]), workers_per_actor=2, sync=True,
        frames_per_batch=24, total_frames=72, track_policy_version=True, writer=4, seed=0,
    ) as actors:  # fmt: skip
        for batch in actors:
            assert (batch[IDS] >> 40).tolist() == [4] * 12 + [5] * 12
            seen.append(batch["collector", "policy_version"].unique().tolist())
            for _ in range(3):  # the actor hears of the last one only
                actors.update_policy_weights_()
        started = [
            process
            for process in psutil.Process().children(recursive=True)
            if "import run_helper" in command(process)
        ]
    assert seen == [[0], [3], [6]]
    assert started and psutil.wait_procs(started, timeout=600)[1] == []  # its processes go with the actor


def test_a_cluster_that_the_environment_names_is_joined_and_left_as_it_was(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    program = """
from list_collector import always_four
from ray_envs import make_env
from flatroll.rollouts import RayCollector
if __name__ == "__main__":
    config = {"object_store_memory": 10**8, "num_cpus": 1, "log_to_driver": False}  # only for one who starts it
    with RayCollector(make_env, always_four, frames_per_batch=6, total_frames=12, ray_init_config=config) as actors:
        print([len(batch) for batch in actors], len(__import__("ray").nodes()) >= 3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[6, 6] True", done.stderr
    assert sum(node["Alive"] for node in ray.nodes()) >= 3


def test_what_goes_wrong_in_an_actor_comes_as_it_was(cluster):
    with pytest.raises(ValueError, match="the robot fell over") as caught:
        RayCollector(falls, always_four, frames_per_batch=10)
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "in falls" in str(caught.value.__cause__)
    dying = RayCollector(partial(Dies, 3), None, frames_per_batch=100)
    with pytest.raises(WorkerDied, match=r"collector 0 \(writer 0\): the actor is gone"):
        next(dying)


def test_the_object_store_stays_flat_while_the_learner_sleeps(cluster):
    """Windows of 128 KiB, which go through the object store; 1,000 of them would fill it."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    def in_use():
        reply = get_memory_info_reply(get_state_from_address(cluster.address))
        return reply.store_stats.object_store_bytes_used

    window = 16 * 2 * 4 * 1024
    policy = torch.nn.Linear(1024, 2)
    seen = []
    with RayCollector(
        partial(Wide, 1024), lambda obs: policy(obs).argmax(-1), num_collectors=2, frames_per_batch=16,
        total_frames=16_000,
    ) as actors:  # fmt: skip
        kept = []
        for number, batch in enumerate(actors):
            kept.append(batch)
            assert len(batch) == 16 and batch["observation"].shape == (16, 1024)
            if number % 200 == 99:
                time.sleep(2)  # actors do all that they may; Ray frees what nobody has once a second
                seen.append(in_use())
    assert len(kept) == 1000
    # Two windows of each actor less the one in hand, and little more for each.
    assert 0 < max(seen) <= 4 * 1.2 * window, seen
    assert torch.equal(kept[0]["observation"][:, 0], torch.arange(16.0))

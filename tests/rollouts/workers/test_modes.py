"""How batches are made of windows: whole trajectories, stacks, pads, early ends, buffers, weights, lag."""

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from worker_envs import Faulty, ItsWeight, Seeded, envs

from flatroll.buffers import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from flatroll.layout import split_trajectories
from flatroll.rollouts import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from flatroll.rollouts.workers.delivery import Delivery
from flatroll.rollouts.workers.gather import Filled
from flatroll.rollouts.workers.on_ray.actors import Actor
from flatroll.rollouts.workers.processes import Process, Processes
from flatroll.rollouts.workers.transport import Note
from flatroll.rollouts.workers.worker import Signals, Watch
from flatroll.sharing import Nursery, SharedWeights
from flatroll.wrappers import RewardSum

pytestmark = pytest.mark.usefixtures("transport")
PROCESSES = pytest.mark.parametrize("transport", ["processes"], indirect=True)

IDS = ("collector", "traj_ids")
BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def assert_whole(batch: Any, frames: int | None = None) -> None:
    """Each transition of the trajectories in a batch is there, once, in order."""
    for trajectory in split_trajectories(batch).unbind(0):
        rows = trajectory[trajectory["collector", "mask"]]
        assert rows["observation"][:, 2].tolist() == list(range(len(rows)))
        assert rows["next", "done"].flatten().tolist() == [False] * (len(rows) - 1) + [True]


class Buffer(list[Any]):
    """Keeps the batches."""

    waiting = -1

    def extend(self, batch: Any, final: Any) -> None:  # type: ignore[override]
        assert (
            not batch["next", "done"][final["row"]].logical_not().any()
        )  # whole ones end inside their episode
        self.append(batch)

    def note_waiting(self, rows: int) -> None:
        self.waiting = rows


@BOTH
def test_complete_trajectories(sync: bool, nursery: Nursery) -> None:
    buffer = Buffer()
    with MultiCollector(
        envs(2),
        num_workers=2,
        sync=sync,
        frames_per_batch=8,
        total_frames=96,
        trajs_per_batch=5,
        compact_obs=True,
        replay_buffer=buffer,
        nursery=nursery,
        seed=1,
    ) as collector:
        assert set(collector) == {None}
        numbers = [len(batch[IDS].unique()) for batch in buffer]
        assert max(numbers) == 5 and sum(numbers) >= 14
        if sync:
            assert set(numbers[:2]) == {5}
        else:  # only the last one of each worker may be smaller
            for place in range(2):
                own = [n for n, b in zip(numbers, buffer, strict=True) if b[IDS][0] >> 40 == place]
                assert set(own[:-1]) <= {5}
        for batch in buffer:
            assert_whole(batch)
            if sync:  # worker 0 gives 3 of the 5, and stands first
                assert (batch[IDS] >> 40).diff().ge(0).all()
        ids = torch.cat([batch[IDS].unique() for batch in buffer])
        assert len(ids.unique()) == len(ids)
        assert 96 <= collector.frames <= 96 + 2 * 8
        assert list(collector) == [] and buffer.waiting >= 0


@BOTH
def test_a_total_is_rounded_up_to_whole_batches(sync: bool, nursery: Nursery) -> None:
    with pytest.warns(UserWarning, match="total_frames=9 is not a multiple of frames_per_batch=4: 12 frames"):
        made = MultiCollector(
            Seeded, num_workers=2, sync=sync, frames_per_batch=4, total_frames=9, nursery=nursery
        )
    with made as collector:
        assert [len(batch) for batch in collector] == [4] * 3
        assert collector.frames == 12 and list(collector) == []


def test_total_of_complete_trajectories_that_never_end(nursery: Nursery) -> None:
    for sync in (True, False):
        with MultiCollector(
            lambda: Seeded((10**6, 10**6)),
            num_workers=2,
            sync=sync,
            frames_per_batch=10,
            total_frames=30,
            trajs_per_batch=2,
            nursery=nursery,
        ) as collector:
            assert list(collector) == [] and 30 <= collector.frames <= 40


def test_early_end_of_a_batch_loses_nothing(
    nursery: Nursery, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second episode on, worker 1 makes a step only once the batch at work is to end."""
    batches: list[Any] = []

    def cut_and_note(cut: Any) -> Any:
        def note(link: Any) -> None:
            cut(link)
            (tmp_path / str(len(batches))).touch()

        return note

    def count_window() -> None:  # in the worker's process; what it is sent comes part by part
        os.environ["WINDOW_AT_WORK"] = str(int(os.environ.get("WINDOW_AT_WORK", "-1")) + 1)

    def wait_for_the_end() -> None:
        while not (tmp_path / os.environ["WINDOW_AT_WORK"]).exists():
            time.sleep(0.001)

    for kind in (Process, Actor):
        monkeypatch.setattr(kind, "cut", cut_and_note(kind.cut))
    with MultiSyncCollector(
        [Seeded, lambda: Faulty(wait_for_the_end)],
        pre_collect_hook=count_window,
        frames_per_batch=60,
        preemptive_threshold=0.5,
        nursery=nursery,
        seed=0,
    ) as collector:
        for _ in range(4):
            batches.append(collector.rollout())
        sizes = [len(batch) for batch in batches]
        most = 38 if transport == "processes" else 60  # an actor makes steps until it hears that it is to end
        assert all(31 <= size <= most for size in sizes) and collector.frames == sum(sizes)
        assert all((batch[IDS] >> 40 == 0).sum() == 30 for batch in batches)
        rows = torch.cat(batches)
        for id in rows[IDS].unique():
            steps = rows["observation"][rows[IDS] == id][:, 2]
            assert steps.tolist() == list(range(len(steps)))


@PROCESSES
def test_one_window_is_cut_and_not_the_next() -> None:
    signals = Signals()
    watch = Watch(signals, SharedWeights({}), 0, None, looks=False, timed=False)
    watch.attach(SimpleNamespace())  # type: ignore[arg-type]
    cuts = []
    for window in (1, 2, 3):
        watch.begin_window()
        cuts.append(watch.is_set())
        if window != 2:
            signals.cut(window)
        cuts.append(watch.is_set())
    assert cuts == [False, True, False, False, False, True]


@PROCESSES
def test_the_oldest_version_of_a_window_is_that_of_its_first_step() -> None:
    weights = SharedWeights({})
    watch = Watch(Signals(), weights, 3, None, looks=True, timed=False)
    watch.attach(SimpleNamespace())  # type: ignore[arg-type]
    watch.begin_window()
    assert watch.versions() is None
    for _ in range(2):
        weights.publish({})
        watch.is_set()
    assert watch.versions() == (4, 4.5, 5)


def test_stacked(nursery: Nursery) -> None:
    both: Any = {"frames_per_batch": 12, "seed": 5, "num_workers": 3, "nursery": nursery}
    with (
        MultiSyncCollector(Seeded, **both) as flat,
        MultiSyncCollector(Seeded, cat_results="stack", compact_obs=True, **both) as stacked,
    ):
        for _ in range(2):
            rows, stack = next(flat), next(stacked)
            assert stack.batch_size == (3, 4)
            assert (stack.reshape(12) == rows.select(*stack.keys(True, True))).all()
            assert torch.equal(
                rows["next", "observation"][stacked.final["row"]], stacked.final["next", "observation"]
            )


@PROCESSES  # actors deliver flat batches
def test_padded(nursery: Nursery) -> None:
    both: Any = {"frames_per_batch": 12, "seed": 5, "num_workers": 3, "nursery": nursery}
    with pytest.warns(UserWarning, match="split_trajs=True pads"):
        padded = MultiSyncCollector(Seeded, split_trajs=True, postproc=lambda batch: batch.clone(), **both)
    with padded, MultiSyncCollector(Seeded, **both) as flat:
        for _ in range(3):
            assert (next(padded) == split_trajectories(next(flat))).all()


@BOTH
def test_a_buffer_takes_the_batches(sync: bool, nursery: Nursery) -> None:
    sampler = SliceSampler(slice_len=4, strict_length=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000, compact_obs=True), sampler=sampler, batch_size=64)
    with MultiCollector(
        envs(2),
        num_workers=3,
        sync=sync,
        frames_per_batch=20,
        total_frames=400,
        compact_obs=True,
        replay_buffer=buffer,
        nursery=nursery,
    ) as collector:
        assert list(collector) == [None] * 20 and len(buffer) == 400
    rows = buffer[:]
    key = ("next", "observation")
    inside = ~rows["next", "done"].squeeze(-1)
    assert torch.equal(rows["observation"][inside][:, 2] + 1, rows[key][inside][:, 2])
    for id in rows[IDS].unique():  # interleaved windows join
        steps = rows["observation"][rows[IDS] == id][:, 2]
        assert steps.tolist() == list(range(len(steps)))
    slices = buffer.sample().view(16, 4)
    assert (slices[IDS].diff() == 0).all() and (slices["observation"][..., 2].diff() == 1).all()


def test_a_buffer_that_keeps_what_it_is_given_gets_copies(nursery: Nursery) -> None:
    for buffer in (ReplayBuffer(storage=ListStorage(100)), ReplayBuffer(storage=LazyTensorStorage(100))):
        with MultiAsyncCollector(
            Seeded, frames_per_batch=5, total_frames=50, replay_buffer=buffer, slots=1, nursery=nursery
        ) as collector:
            list(collector)
            assert collector.final is None and buffer.copies_rows == isinstance(
                buffer.storage, LazyTensorStorage
            )
        steps = torch.stack([row["observation"] for row in buffer[:]])[:, 1:].tolist()
        assert len({*map(tuple, steps)}) == 50  # each (episode, step) once
        assert steps == sorted(steps)


@BOTH
def test_workers_act_with_the_weights_that_their_rows_name(sync: bool, nursery: Nursery) -> None:
    policy = ItsWeight()
    with MultiCollector(
        Seeded,
        policy,
        num_workers=2,
        sync=sync,
        frames_per_batch=8,
        track_policy_version=True,
        nursery=nursery,
    ) as collector:
        seen: list[tuple[int, int]] = []
        # At least nine versions, and more where a worker is slow to begin: both are to be heard of.
        while collector.policy_version < 9 or len({worker for worker, _ in seen}) < (1 if sync else 2):
            version = collector.policy_version
            batch = collector.rollout()
            versions = batch["collector", "policy_version"]
            assert torch.equal(batch["action"].flatten(), versions % 5)
            if sync:
                assert (versions == version).all()  # with one env nothing is held back
            seen += [(int(batch[IDS][0]) >> 40, int(value)) for value in versions.unique()]
            policy.weight.data += 1
            given = [None, policy, policy.state_dict(), TensorDict.from_module(policy).data]
            collector.update_policy_weights_(given[version % 4])
            assert collector.policy_version == version + 1
        for worker in range(2):
            assert sorted(mine := [v for at, v in seen if at == worker]) == mine
        lag = [worker["policy_lag"] for worker in collector.stats()["workers"]]
        versions = collector.policy_version
        assert all(0 <= each["min"] <= each["mean"] <= each["max"] <= versions for each in lag)
        assert max(each["max"] for each in lag) == 0 if sync else True
        with pytest.raises(
            ValueError, match=r"weight 'weight' was shared as float32 \[\], got float32 \[2\]"
        ):
            collector.update_policy_weights_({"weight": torch.zeros(2)})


@PROCESSES
def test_windows_wait_their_turn(nursery: Nursery) -> None:
    """A learner that is slow, so that all slots are full, gets windows of all workers, at most `slots` + 1 behind."""
    with MultiAsyncCollector(
        Seeded,
        ItsWeight(),
        num_workers=3,
        frames_per_batch=5,
        slots=2,
        track_policy_version=True,
        nursery=nursery,
    ) as collector:
        turns: list[int] = []
        gatherer: Any = collector._supply.gatherer
        for _ in range(30):
            batch = collector.rollout()
            turns.append(int(batch[IDS][0]) >> 40)
            collector.policy.weight.data += 1
            collector.update_policy_weights_()
            lag = collector.policy_version - 1 - batch["collector", "policy_version"].min()
            # each of the other workers is served at most once between two windows of one
            assert 0 <= lag <= 3 * (2 + 1)
            while len(gatherer.queue) < 3 * 2:
                for event in gatherer.team.events(gatherer.team.members):
                    gatherer.take(event)
        assert turns[1:] == [*turns[1:4]] * 9 + turns[1:3] and {*turns[1:4]} == {0, 1, 2}


def test_policy_factories(nursery: Nursery, transport: str) -> None:
    arguments: Any = {"num_workers": 2, "frames_per_batch": 6, "nursery": nursery}
    with MultiSyncCollector(Seeded, policy_factory=lambda: ItsWeight(), **arguments) as collector:
        assert isinstance(collector.policy, nn.Module) == (transport == "processes")
        assert "policy=ItsWeight" in repr(collector) or "policy=of a policy_factory" in repr(collector)
        assert (next(collector)["action"] == 0).all()
        collector.update_policy_weights_({"weight": torch.tensor(3.0)})
        assert (next(collector)["action"] == 3).all()


@PROCESSES  # a RayCollector takes one or the other
def test_policy_factories_beside_a_policy(nursery: Nursery) -> None:
    arguments: Any = {"num_workers": 2, "frames_per_batch": 6, "nursery": nursery}
    learner = ItsWeight()
    learner.weight.data += 2
    with MultiSyncCollector(
        Seeded, learner, policy_factory=[ItsWeight] * 2, update_at_each_batch=True, **arguments
    ) as collector:
        assert (next(collector)["action"] == 2).all()
        learner.weight.data += 1
        assert (next(collector)["action"] == 3).all() and collector.policy_version == 2


@PROCESSES
def test_kept_batches_hold_no_mappings(nursery: Nursery) -> None:
    with MultiAsyncCollector(Seeded, num_workers=2, frames_per_batch=2, nursery=nursery) as collector:
        kept = [next(collector) for _ in range(20)]
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        kept += [next(collector) for _ in range(200)]
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 20
    steps = torch.cat(kept)
    for id in steps[IDS].unique():  # nobody wrote into them
        mine = steps["observation"][steps[IDS] == id][:, 2]
        assert mine.tolist() == list(range(len(mine)))


class Reused:
    """A window whose memory is written to as soon as it is given back."""

    owned = False

    def __init__(self, first: int) -> None:
        reward = torch.arange(first, first + 3.0)
        final = {"row": torch.tensor([2]), "next": torch.tensor([float(first)])}
        self.tables: list[Any] = [{"reward": reward}, final]
        self.note = Note(3, 3, (3,), 0, 0.0, None)

    def release(self) -> None:
        for table in self.tables:
            for column in table.values():
                column.fill_(-1)
        self.tables = []

    def __enter__(self) -> "Reused":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@PROCESSES
@pytest.mark.parametrize("count", [1, 2])
def test_windows_are_given_back_after_their_rows_were_copied(count: int) -> None:
    member = SimpleNamespace(link=SimpleNamespace(name="worker 0"))
    filled: Any = [Filled(member, Reused(3 * i), 3) for i in range(count)]  # type: ignore[arg-type]
    delivery = Delivery(None, None, False)
    batch = delivery.batch(filled)
    assert batch["reward"].tolist() == list(range(3 * count)) and delivery.final is not None
    assert delivery.final["row"].tolist() == [2, 5][:count]
    assert delivery.final["next"].tolist() == [0, 3][:count]
    assert not any(window.tables for _, window, _ in filled)


def test_hooks_run_in_the_worker(nursery: Nursery) -> None:
    calls: list[str] = []  # each worker has a copy

    def with_facts(batch: Any) -> Any:
        facts = torch.tensor([os.getpid(), len(calls), torch.get_num_threads()])
        return batch[1:].set("facts", facts.expand(len(batch) - 1, 3))

    with MultiSyncCollector(
        Seeded,
        num_workers=2,
        frames_per_batch=6,
        pre_collect_hook=lambda: calls.append("before"),
        post_collect_hook=lambda batch: calls.append(str(len(batch))),
        postproc=with_facts,
        compact_obs=True,
        nursery=nursery,
    ) as collector:
        for i in range(3):
            batch = next(collector)
            assert len(batch) == 4 and collector.frames == 6 * (i + 1)
            pids, counts, threads = batch["facts"].unbind(-1)
            assert len(pids.unique()) == 2 and os.getpid() not in pids and (threads == 1).all()
            assert (counts == 2 * i + 1).all()
            # `final` counts the rows before
            assert 2 in collector.final["row"] and 5 in collector.final["row"]
        assert not calls


def test_a_bar_over_all_workers(nursery: Nursery, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({}, {"cat_results": "stack"}):
        with MultiSyncCollector(
            lambda: RewardSum(Seeded()),
            num_workers=2,
            frames_per_batch=20,
            total_frames=40,
            progress=True,
            nursery=nursery,
            **options,
        ) as collector:
            list(collector)
        text = capsys.readouterr().err
        assert "40.0/40.0" in text and "return=" in text and "steps/s" in text


@PROCESSES
def test_an_owner_reads_and_waits_once_for_all_windows_that_have_come(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One system call reads a worker's announcements; nothing is read, and nobody waited for, while some are left."""
    calls: dict[str, int] = {"read": 0, "wait": 0}
    receive, wait = socket.recv_fds, Processes.wait

    def count(name: str, call: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return call(*arguments)

        return counted

    with MultiAsyncCollector(Seeded, num_workers=4, frames_per_batch=5, nursery=nursery) as collector:
        gatherer: Any = collector._supply.gatherer
        next(collector)
        while len(gatherer.queue) < 4 * 2:  # all slots are full
            for event in gatherer.team.events(gatherer.team.members):
                gatherer.take(event)
        monkeypatch.setattr(socket, "recv_fds", count("read", receive))
        monkeypatch.setattr(Processes, "wait", count("wait", wait))
        for _ in range(8):
            next(collector)
        assert calls == {"read": 0, "wait": 0}
        for _ in range(60):
            next(collector)
        # An announcement may come in a read of its own, never in more; a few reads find the end of what was known.
        assert 0 < calls["wait"] <= 62 and 0 < calls["read"] <= 68

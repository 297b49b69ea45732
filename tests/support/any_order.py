"""Ctrl-C at every place of a call, and forks, threads, copies and saves in any order, while rows come and go.

    python tests/support/any_order.py N SEED

presses Ctrl-C at every place of each case (at every 37th with N=0), then plays N random programs. After each press a
second call must work, and no delivered row may be lost, doubled or mixed; nothing may hang, and no process may be left.
"""

import copy
import faulthandler
import gc
import pickle
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from fake_ray import FakeRay
from interrupts import points, press
from tensordict import TensorDict
from worker_envs import ItsWeight, Seeded, envs

from flatroll.buffers import (
    DiskStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.rollouts import Collector, MultiCollector, RayCollector
from flatroll.sharing import Nursery

IDS = ("collector", "traj_ids")


def assert_whole(rows: TensorDict) -> None:
    """Each trajectory from its first row on, without a gap, in order of time."""
    ids, steps = rows[IDS].tolist(), rows["observation"][:, 2].tolist()
    seen: dict[int, int] = {}
    for id, step in zip(ids, steps, strict=True):
        assert step == seen.get(id, -1) + 1, (id, step, seen.get(id))
        seen[id] = int(step)
    went_on = ~rows["next", "done"].squeeze(-1)
    assert (rows["next", "observation"][went_on, 2] == rows["observation"][went_on, 2] + 1).all()


class Case:
    """One call, pressed at each of its places; ``fresh``: each time in a new world."""

    fresh = False

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery, self.folder = nursery, folder

    def make(self) -> None:
        """Make what is called."""

    def call(self) -> Any:
        """The call."""
        raise NotImplementedError

    def after(self, result: Any, where: str | None) -> None:
        """Check what must hold after it; ``where`` Ctrl-C interrupted it, None if it did not."""

    def end(self) -> None:
        """Check what must hold at the end."""


class PlainNext(Case):
    """`next` of a collector: what was at work is lost, as documented, and no row comes after a gap."""

    def make(self) -> None:
        self.batches: list[TensorDict] = []
        self.collector = Collector(envs(3)(), frames_per_batch=10, seed=0)

    def call(self) -> Any:
        return next(self.collector)

    def after(self, result: Any, where: str | None) -> None:
        for batch in (result, next(self.collector)):
            if batch is not None:
                self.batches.append(batch)
        assert len(self.batches[-1]) == 10

    def end(self) -> None:
        assert_whole(torch.cat(self.batches))


class PlainBuffer(Case):
    """A collector that writes into a small ring, from which slices are drawn."""

    def make(self) -> None:
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(64, compact_obs=True), sampler=SliceSampler(slice_len=3), batch_size=12
        )
        self.collector = Collector(envs(3)(), frames_per_batch=10, seed=0, replay_buffer=self.buffer)
        next(self.collector)

    def call(self) -> Any:
        return next(self.collector)

    def after(self, result: Any, where: str | None) -> None:
        next(self.collector)
        check_buffer(self.buffer)


def check_buffer(buffer: ReplayBuffer) -> None:
    """What is stored and drawn are rows as they were given, those of a slice one after another."""
    for rows in (buffer[:], buffer.sample()):
        went_on = ~rows["next", "terminated"].squeeze(-1)
        assert (rows["next", "observation"][:, 2] == rows["observation"][:, 2] + 1).all()
        assert (rows["next", "observation"][:, 1] == rows["observation"][:, 1]).all()
        same = (rows[IDS][1:] == rows[IDS][:-1]) & (rows["observation"][1:, 2] > rows["observation"][:-1, 2])
        follows = same & (rows["observation"][1:, 2] == rows["observation"][:-1, 2] + 1) & went_on[:-1]
        assert (rows["observation"][1:][follows] == rows["next", "observation"][:-1][follows]).all()


class SharedNext(Case):
    """`next` of a collector with workers: nothing is lost."""

    sync, buffer = True, False

    def make(self) -> None:
        self.batches: list[TensorDict] = []
        self.stored = ReplayBuffer(storage=LazyTensorStorage(10**5)) if self.buffer else None
        self.collector = self.made()

    def made(self) -> Any:
        return MultiCollector(
            Seeded, num_workers=2, sync=self.sync, frames_per_batch=12, seed=0, replay_buffer=self.stored,
            nursery=self.nursery, compact_obs=self.buffer,
        )  # fmt: skip

    def call(self) -> Any:
        return (next(self.collector),)

    def after(self, result: Any, where: str | None) -> None:
        for made in (result, (next(self.collector),)):
            if made is not None and made[0] is not None:
                assert len(made[0]) == 12
                self.batches.append(made[0])

    def end(self) -> None:
        frames = self.collector.frames
        self.collector.shutdown()
        rows = torch.cat(self.batches) if self.stored is None else self.stored[:]
        assert_whole(rows)
        # A batch that an interrupt kept back comes with the call after it, so nothing is under way now.
        assert len(rows) == frames, (len(rows), frames)


class AsyncNext(SharedNext):
    sync = False


class SyncBuffer(SharedNext):
    buffer = True


class AsyncBuffer(SharedNext):
    sync, buffer = False, True


class Actors(SharedNext):
    def made(self) -> Any:
        calls: Any = FakeRay()
        return RayCollector(Seeded, num_collectors=3, sync=self.sync, frames_per_batch=12, calls=calls)


class AsyncActors(Actors):
    sync = False


class Weights(Case):
    """`update_policy_weights_`: a version is whole, and rows name the one that they were made with."""

    def make(self) -> None:
        self.policy = ItsWeight()
        self.collector = MultiCollector(
            Seeded,
            self.policy,
            sync=False,
            frames_per_batch=4,
            nursery=self.nursery,
            track_policy_version=True,
        )
        self.value = 0
        self.acts = {0: 0}  # the action of each version

    def call(self) -> Any:
        self.collector.update_policy_weights_()
        return True

    def after(self, result: Any, where: str | None) -> None:
        version = self.collector.policy_version
        if version not in self.acts:
            self.acts[version] = self.value
        self.value = (self.value + 1) % 5
        self.policy.weight.data.fill_(self.value)
        self.collector.update_policy_weights_()
        self.acts[self.collector.policy_version] = self.value
        batch = next(self.collector)
        versions = batch["collector", "policy_version"].tolist()
        assert [self.acts[version] for version in versions] == batch["action"].tolist()

    def end(self) -> None:
        self.collector.shutdown()


class Shutdown(Case):
    """`shutdown`: a second one finishes what the first one had begun."""

    fresh = True

    def make(self) -> None:
        self.before = len(self.nursery.workers)
        self.collector = MultiCollector(
            Seeded, num_workers=2, sync=False, frames_per_batch=4, nursery=self.nursery
        )
        next(self.collector)
        self.pids = [worker.pid for worker in self.nursery.workers[self.before :]]

    def call(self) -> Any:
        self.collector.shutdown(0.5)

    def after(self, result: Any, where: str | None) -> None:
        self.collector.shutdown()
        assert len(self.nursery.workers) == self.before
        assert_gone(self.pids)


def assert_gone(pids: list[int], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.005)


class Making(Case):
    """A collector that is interrupted while it is made leaves no worker, and the nursery starts others."""

    fresh = True

    def make(self) -> None:
        self.before = len(self.nursery.workers)
        self.children = set(children_of_helper(self.nursery))

    def call(self) -> Any:
        return MultiCollector(Seeded, num_workers=2, frames_per_batch=4, nursery=self.nursery)

    def after(self, result: Any, where: str | None) -> None:
        if result is not None:
            result.shutdown()
        gc.collect()
        assert len(self.nursery.workers) == self.before, where
        assert_gone(list(set(children_of_helper(self.nursery)) - self.children))
        with MultiCollector(Seeded, frames_per_batch=4, nursery=self.nursery) as collector:
            assert len(next(collector)) == 4


def children_of_helper(nursery: Nursery) -> list[int]:
    return [child.pid for child in psutil.Process(nursery.helper.pid).children()]


class StartPause(Case):
    """The thread of `start`: it can be paused and started again after an interrupt, and nothing is lost."""

    def make(self) -> None:
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(10**6))
        self.collector = MultiCollector(
            Seeded, sync=False, frames_per_batch=16, replay_buffer=self.buffer, nursery=self.nursery
        )

    def call(self) -> Any:
        self.collector.start()
        self.collector.pause()
        return True

    def after(self, result: Any, where: str | None) -> None:
        self.collector.pause()
        assert not self.collector.stats()["running"]
        self.collector.start()
        self.collector.pause()

    def end(self) -> None:
        next(self.collector)
        self.collector.shutdown()
        assert_whole(self.buffer[:])
        assert len(self.buffer) == self.collector.frames


def numbered(first: int, count: int, writer: int) -> TensorDict:
    """Rows of one trajectory that end it; each says its number three times over."""
    number = torch.arange(first, first + count)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = True
    return TensorDict(
        {
            "observation": number[:, None].expand(-1, 40).contiguous(),
            "check": -number,
            "is_init": (number == first)[:, None],
            "collector": {"traj_ids": torch.full((count,), writer)},
            "next": {"observation": (number + 1)[:, None].expand(-1, 40).contiguous(), "done": done},
        },
        [count],
    )


def check_numbered(rows: TensorDict) -> None:
    """No row is a mixture of others."""
    number = -rows["check"]
    assert (rows["observation"] == number[:, None]).all(), "rows are mixed"
    assert (rows["next", "observation"] == number[:, None] + 1).all(), "next observations are mixed"


class Extend(Case):
    """`extend` of a ring that is full: each row is there as it was given, or not at all."""

    def make(self) -> None:
        self.made, self.writer = 0, 0
        self.buffer = self.made_buffer()
        for _ in range(5):
            self.call()

    def made_buffer(self) -> ReplayBuffer:
        storage = LazyTensorStorage(64, compact_obs=True)
        return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=3), batch_size=12)

    def call(self) -> Any:
        self.made, self.writer = self.made + 17, self.writer + 1
        return self.buffer.extend(numbered(self.made, 17, self.writer))

    def after(self, result: Any, where: str | None) -> None:
        for _ in range(2):
            check_numbered(self.buffer[:])
            assert len(self.buffer[:]["check"].unique()) == len(self.buffer)  # no row twice
            sample = self.buffer.sample()
            number = -sample["check"]
            check_numbered(sample)
            assert ((number[1:] == number[:-1] + 1) | sample["is_init"][1:, 0]).all()
            self.call()
        newest = (-self.buffer[:]["check"]).max()
        assert newest == self.made + 16


class ExtendPrioritized(Extend):
    def made_buffer(self) -> ReplayBuffer:
        sampler = PrioritizedSampler(64, 0.6, 0.4)
        return ReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=12, prefetch=2)

    def after(self, result: Any, where: str | None) -> None:
        for _ in range(2):
            check_numbered(self.buffer[:])
            rows, info = self.buffer.sample(return_info=True)
            check_numbered(rows)
            self.buffer.update_priority(info["index"], torch.rand(len(rows)))
            self.call()


class Sample(ExtendPrioritized):
    """`sample` with threads that make samples ahead, and new priorities."""

    def make(self) -> None:
        super().make()
        self.next_call = super().call

    def call(self) -> Any:
        if self.made < 5 * 17:
            return super().call()
        rows, info = self.buffer.sample(return_info=True)
        self.buffer.update_priority(info["index"], torch.rand(len(rows)))
        return rows

    def after(self, result: Any, where: str | None) -> None:
        check_numbered(self.buffer.sample())
        self.made, self.writer = self.made + 17, self.writer + 1
        self.buffer.extend(numbered(self.made, 17, self.writer))
        check_numbered(self.buffer[:])


class Save(Extend):
    """`dumps` into one folder again and again: it can always be loaded, and the next save works."""

    def make(self) -> None:
        super().make()
        self.path = Path(tempfile.mkdtemp(dir=self.folder))
        self.buffer.dumps(self.path)

    def call(self) -> Any:
        if not hasattr(self, "path"):
            return super().call()
        return self.buffer.dumps(self.path)

    def after(self, result: Any, where: str | None) -> None:
        other = self.made_buffer()
        other.loads(self.path)
        check_numbered(other[:])
        self.made, self.writer = self.made + 17, self.writer + 1
        self.buffer.extend(numbered(self.made, 17, self.writer))
        check_numbered(self.buffer[:])
        self.buffer.dumps(self.path)
        other.loads(self.path)
        assert torch.equal(other[:]["check"], self.buffer[:]["check"])


class FirstSave(Save):
    """The first `dumps` into a folder."""

    def make(self) -> None:
        Extend.make(self)
        self.path = self.folder / "none"

    def call(self) -> Any:
        if not hasattr(self, "path"):
            return Extend.call(self)
        self.path = Path(tempfile.mkdtemp(dir=self.folder)) / "saves"
        return self.buffer.dumps(self.path)

    def after(self, result: Any, where: str | None) -> None:
        self.buffer.dumps(self.path)
        other = self.made_buffer()
        other.loads(self.path)
        assert torch.equal(other[:]["check"], self.buffer[:]["check"])
        shutil.rmtree(self.path)


class Load(Save):
    """`loads`: the buffer is as it was, or as it was saved."""

    def call(self) -> Any:
        if not hasattr(self, "other"):
            if hasattr(self, "path"):
                self.other = self.made_buffer()
                self.other.loads(self.path)
            return Extend.call(self)
        return self.other.loads(self.path)

    def after(self, result: Any, where: str | None) -> None:
        check_numbered(self.other[:])
        self.other.sample()
        super().after(result, where)


class LogStorage(Extend):
    """A storage whose rows are files."""

    def made_buffer(self) -> ReplayBuffer:
        path = Path(tempfile.mkdtemp(dir=self.folder))
        storage = DiskStorage(64, path, segment_bytes=4000)
        return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=3), batch_size=12)


class Copies(Extend):
    """Copies and pickles: the original stays what it was, and what was copied is whole."""

    def call(self) -> Any:
        if self.writer < 5:
            return super().call()
        return copy.deepcopy(self.buffer), pickle.loads(pickle.dumps(self.buffer))

    def after(self, result: Any, where: str | None) -> None:
        for buffer in (self.buffer, *(result or ())):
            check_numbered(buffer[:])
            self.made, self.writer = self.made + 17, self.writer + 1
            buffer.extend(numbered(self.made, 17, self.writer))
            check_numbered(buffer[:])
            check_numbered(buffer.sample())


CASES: list[type[Case]] = [
    PlainNext,
    PlainBuffer,
    SharedNext,
    AsyncNext,
    SyncBuffer,
    AsyncBuffer,
    Actors,
    AsyncActors,
    Weights,
    Shutdown,
    Making,
    StartPause,
    Extend,
    ExtendPrioritized,
    Sample,
    Save,
    FirstSave,
    Load,
    LogStorage,
    Copies,
]


def sweep(
    kind: type[Case], nursery: Nursery, folder: Path, every: int = 1, first: int = 1
) -> tuple[int, int]:
    """Press at each ``every``-th place from ``first`` on; return the places tried, and how many interrupted."""
    case = kind(nursery, folder)
    case.make()
    found = points(case.call)
    case.after(None, None) if not isinstance(case, SharedNext | PlainNext) else None
    if isinstance(case, SharedNext | PlainNext):  # the batch that was counted is not among those checked
        case.end() if isinstance(case, PlainNext) and case.batches else None
        if isinstance(case, SharedNext):
            case.collector.shutdown()
        case.make()
    tried = hit = 0
    for at in range(first, found + every, every):
        if case.fresh and at > first:
            case.make()
        try:
            result, where = press(case.call, at)
            case.after(result, where)
        except BaseException as error:
            error.add_note(f"{kind.__name__}, Ctrl-C at place {at} of {found}")
            raise
        tried, hit = tried + 1, hit + (where is not None)
    case.end()
    return tried, hit


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    only = sys.argv[3:]
    faulthandler.enable()
    with (
        tempfile.TemporaryDirectory() as kept,
        Nursery(preload=("flatroll.rollouts", "worker_envs")) as started,
    ):
        failed = 0
        for each in CASES:
            if only and each.__name__ not in only:
                continue
            faulthandler.dump_traceback_later(900, exit=True)
            began = time.monotonic()
            try:
                counts = sweep(
                    each, started, Path(kept), 37 if number == 0 else 1, 1 + seed % 37 if number == 0 else 1
                )
                print(
                    f"{each.__name__}: {counts[0]} places, {counts[1]} interrupts, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
            except Exception:
                import traceback

                failed += 1
                print(f"{each.__name__}: FAILED", flush=True)
                traceback.print_exc()
        sys.exit(bool(failed))

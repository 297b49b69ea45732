"""Ctrl-C at every place of a call, and forks, threads, copies and saves in any order, while rows come and go.

    PYTHONPATH=tests/support/clusters python tests/support/any_order.py N SEED

presses Ctrl-C at N places of each case (all, if it has fewer), then plays N random programs. After each press a second
call must work, and no delivered row may be lost, doubled or mixed; nothing may hang, and no process may be left.
"""

import copy
import faulthandler
import gc
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
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


def assert_gone(pids: list[int], seconds: float = 600) -> None:
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
    """A storage whose rows are files. Rows that reached a file are not taken back: the folder is opened anew."""

    def made_buffer(self) -> ReplayBuffer:
        self.path = getattr(self, "path", None) or Path(tempfile.mkdtemp(dir=self.folder))
        self.storage = DiskStorage(64, self.path, segment_bytes=4000)
        return ReplayBuffer(storage=self.storage, sampler=SliceSampler(slice_len=3), batch_size=12)

    def after(self, result: Any, where: str | None) -> None:
        try:
            super().after(result, where)
        except RuntimeError as error:
            assert where is not None and "again to use them" in str(error)
            self.storage.close()
            self.buffer = self.made_buffer()
            super().after(result, where)


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
    kind: type[Case], nursery: Nursery, folder: Path, places: int, seed: int = 0
) -> tuple[int, int, int]:
    """Press at so many places, evenly spread (all, if there are fewer); return how many there are, presses, interrupts.

    A call may have fewer places than the one that was counted.
    """
    case = kind(nursery, folder)
    case.make()
    if case.fresh:  # what is counted is not what is checked
        found = points(case.call)
        case.after(None, None)
        case.make()
    else:
        results: list[Any] = []
        for _ in range(2):  # the second call is as all that follow
            found = points(lambda: results.append(case.call()))
            case.after(results.pop(), None)
    every = max(1, found // places)
    presses = interrupts = 0
    for at in range(1 + seed % every, found + 1, every):
        if case.fresh and presses:
            case.make()
        try:
            result, where = press(case.call, at)
            case.after(result, where)
        except BaseException as error:
            error.add_note(f"{kind.__name__}, Ctrl-C at place {at} of {found}")
            raise
        presses += 1
        interrupts += where is not None
    case.end()
    return found, presses, interrupts


class Program:
    """Collectors, buffers, forks, threads, copies, saves and Ctrl-C at any moment, in an order that a seed draws."""

    def __init__(self, nursery: Nursery, folder: Path, seed: int) -> None:
        self.draw, self.nursery, self.folder = random.Random(seed), nursery, folder
        self.workers = len(nursery.workers)
        shared: dict[str, Any] = {"create_env_fn": Seeded, "nursery": nursery, "seed": seed}
        self.apart = {
            sync: MultiCollector(num_workers=2, sync=sync, frames_per_batch=12, **shared)
            for sync in (True, False)
        }
        self.rows: dict[bool, list[TensorDict]] = {True: [], False: []}
        self.stored = ReplayBuffer(
            storage=LazyTensorStorage(10**5), sampler=SliceSampler(slice_len=2), batch_size=8
        )
        self.filling = MultiCollector(
            num_workers=1, sync=False, frames_per_batch=16, replay_buffer=self.stored, **shared
        )
        self.ring = PlainBuffer(nursery, folder)
        self.ring.make()
        self.saves = Path(tempfile.mkdtemp(dir=folder))
        self.interrupts = 0
        next(self.filling)
        # Numba loads a kernel under a lock of its own, which a child would find held if a thread is at it.
        self.copies()
        self.ring.buffer.extend(self.ring.buffer[:0])

    def take(self) -> None:
        """Take a batch; a loop hands it over without a place for Ctrl-C, as the builtin `next` does not."""
        sync = self.draw.random() < 0.5
        for batch in self.apart[sync]:
            self.rows[sync].append(batch)
            break

    def step(self) -> None:
        next(self.ring.collector)

    def start(self) -> None:
        if not self.filling.stats()["running"]:
            self.filling.start()

    def pause(self) -> None:
        self.filling.pause()

    def fork(self) -> None:
        """A child that uses what is not its own is refused, and its end ends nobody."""
        uses = [
            lambda: next(self.apart[True]),
            lambda: next(self.apart[False]),
            self.filling.start,
            self.filling.update_policy_weights_,
            lambda: self.stored.extend(self.ring.buffer[:]),
            self.ring.buffer.empty,
        ]
        self.draw.shuffle(uses)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            status = 0
            try:
                for use in uses:
                    try:
                        use()
                        status = 1
                    except RuntimeError:
                        pass
                check_buffer(copy.deepcopy(self.ring.buffer))
                for collector in (*self.apart.values(), self.filling):
                    collector.shutdown()
            except BaseException:
                traceback.print_exc()
                status = 2
            finally:
                os._exit(status)
        while True:
            try:
                _, status = os.waitpid(pid, 0)
                break
            except KeyboardInterrupt:
                self.interrupts += 1
            except ChildProcessError:  # Ctrl-C came when it was waited for already: its status is lost
                return
        assert status == 0, f"the child: {os.waitstatus_to_exitcode(status)}"

    def threads(self) -> None:
        """Threads sample while this one collects."""
        wrong: list[BaseException] = []

        def sample() -> None:
            try:
                for _ in range(5):
                    check_buffer(self.stored)
            except BaseException as error:
                wrong.append(error)

        running = [threading.Thread(target=sample) for _ in range(2)]
        for thread in running:
            thread.start()
        try:
            self.step()
        finally:
            for thread in running:
                if thread.ident is not None:
                    thread.join()
        assert not wrong, wrong

    def copies(self) -> None:
        for copied in (copy.deepcopy(self.ring.buffer), pickle.loads(pickle.dumps(self.stored))):
            check_buffer(copied)
        for collector in (self.apart[True], self.filling):
            try:
                pickle.dumps(collector)
            except TypeError:
                continue
            raise AssertionError("a collector was pickled")

    def save(self) -> None:
        self.ring.buffer.dumps(self.saves)

    def load(self) -> None:
        if any(self.saves.iterdir()):
            self.ring.buffer.dumps(self.saves)
            other = ReplayBuffer(
                storage=LazyTensorStorage(64, compact_obs=True),
                sampler=SliceSampler(slice_len=3),
                batch_size=12,
            )
            other.loads(self.saves)
            check_buffer(other)

    def play(self, length: int) -> None:
        """Play, and check."""
        does = [self.take, self.take, self.step, self.start, self.pause, self.threads, self.copies]
        does += [self.save, self.load, self.fork]
        for _ in range(length):
            do = self.draw.choice(does)
            pressed = threading.Timer(self.draw.random() ** 3 * 0.05, os.kill, (os.getpid(), signal.SIGINT))
            presses = self.draw.random() < 0.5
            try:
                if presses:
                    pressed.start()
                do()
            except KeyboardInterrupt:
                self.interrupts += 1
            while presses:
                try:
                    pressed.join()
                    presses = False
                except KeyboardInterrupt:
                    self.interrupts += 1
        self.filling.pause()
        check_buffer(self.ring.buffer)
        for sync, collector in self.apart.items():
            self.rows[sync].append(next(collector))
            assert_whole(torch.cat(self.rows[sync]))
            assert collector.frames == sum(map(len, self.rows[sync]))
        next(self.filling)
        assert_whole(self.stored[:])
        assert len(self.stored) == self.filling.frames
        pids = [worker.pid for worker in self.nursery.workers[self.workers :]]
        for collector in (*self.apart.values(), self.filling):
            collector.shutdown()
        assert len(self.nursery.workers) == self.workers
        assert_gone(pids)


def play(nursery: Nursery, folder: Path, seed: int, length: int = 30) -> int:
    """Play one program; return how many interrupts came."""
    program = Program(nursery, folder, seed)
    try:
        program.play(length)
    except BaseException as error:
        error.add_note(f"the program of seed {seed}")
        raise
    return program.interrupts


def main(number: int, seed: int, only: list[str]) -> int:
    """Run all; return how many cases and programs failed."""
    os.fsync = os.fstat  # type: ignore[assignment]  # nothing here loses power
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Nursery(preload=("flatroll.rollouts", "worker_envs")) as nursery,
    ):
        for kind in CASES:
            if only and kind.__name__ not in only:
                continue
            faulthandler.dump_traceback_later(1800, exit=True)
            began = time.monotonic()
            try:
                found, pressed, hit = sweep(kind, nursery, Path(folder), number, seed)
            except Exception:
                traceback.print_exc()
                failed += 1
            else:
                spent = time.monotonic() - began
                counts = f"{pressed} presses at {found} places, {hit} interrupts"
                print(f"{kind.__name__}: {counts}, {spent:.0f} s", flush=True)
        done = interrupts = 0
        for each in range(seed, seed + number if not only or "Program" in only else seed):
            faulthandler.dump_traceback_later(600, exit=True)
            try:
                interrupts += play(nursery, Path(folder), each)
                done += 1
            except Exception:
                traceback.print_exc()
                failed += 1
        print(f"{done} programs of {number}, {interrupts} interrupts, {failed} failed", flush=True)
    return failed


if __name__ == "__main__":
    given = sys.argv[1:]
    numbers = [int(each) for each in given[:2]] + [20, 0][len(given[:2]) :]
    sys.exit(bool(main(*numbers, given[2:])))

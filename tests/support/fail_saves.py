"""Every way to save, with a kill, an error or Ctrl-C at any system call; then the documented loop goes on.

    python fail_saves.py [TRIALS PER WAY] [SEED] [WAY ...]

A run saves step by step and tells of each save that returned. It is stopped at a call drawn at random: killed before
it, or an OSError or Ctrl-C comes instead of it, or right after it; or the disk is full from then on until it is told.
The same run must then go on if it lives, and a new one in any case: from the last step that it was told of, or the one
after that, with exactly the rows of that step.
"""

import errno
import faulthandler
import fcntl
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

from flatroll.buffers import (
    DiskStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
)
from flatroll.buffers.checkpointers import saving
from flatroll.datasets import BaseDatasetExperienceReplay, TrajectoryReplayBuffer, convert
from flatroll.disk import Checkpoint, DamagedFileError
from flatroll.export import export, import_parquet

PER_STEP, STEPS, CAPACITY = 7, 5, 24  # rows of a step, steps of a run, rows of a buffer: it wraps
CALLS = (
    "open",
    "write",
    "fsync",
    "close",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "scandir",
    "preadv",
    "ftruncate",
)
MODES = ("kill", "error", "full", "interrupt", "interrupt after")
_real = {name: getattr(os, name) for name in CALLS}
_real_flock = fcntl.flock


class Way(NamedTuple):
    """A way to save.

    Args:
        begin: opens what is in a folder as the pages say; returns a run, and how many steps it has.
        step: does a step, unless the run has its rows, and saves.
        rows: numbers of the rows of a run.
        close: ends a run.
        partly: whether rows of a step that was not told of may be there in part.
    """

    begin: Callable[[Path], tuple[Any, int]]
    step: Callable[[Any, int], Any]
    rows: Callable[[Any], list[int]]
    close: Callable[[Any], Any] = id
    partly: bool = False


def batch(first: int, end: int) -> TensorDict:
    row = torch.arange(first, end)
    ids, done = {"traj_ids": row // 10}, (row % 10 == 9)[:, None]
    after = {"observation": row[:, None] + 1.0, "done": done}
    root = {"row": row, "observation": row[:, None].float(), "collector": ids, "next": after}
    return TensorDict(root, [end - first])


def fill(buffer: ReplayBuffer, step: int) -> None:
    """Write the rows that a run is to have after a step."""
    end = (step + 1) * PER_STEP
    if buffer.ring.written < end:
        buffer.extend(batch(buffer.ring.written, end))


def rows_of(buffer: ReplayBuffer) -> list[int]:
    if not len(buffer):
        return []
    rows: Any = buffer.oldest_first()
    found: list[int] = [int(row["row"]) for row in rows] if isinstance(rows, list) else rows["row"].tolist()
    return found


def checkpoints(make: Callable[[Path], ReplayBuffer], close: Callable[[Any], Any] = id) -> Way:
    """The loop of docs/disk.md."""

    def begin(path: Path) -> tuple[Any, int]:
        buffer, policy = make(path), nn.Linear(2, 1)
        checkpoint = Checkpoint(path / "saved", buffer=buffer, policy=policy)
        try:
            first = checkpoint.load()["step"] if checkpoint.versions() else 0
        except BaseException:
            close((buffer, None))
            raise
        if not first and len(buffer):  # rows of a log that no version knows: another log is begun
            close((buffer, None))
            shutil.rmtree(path / "rows")
            return begin(path)
        return (buffer, checkpoint), first

    def step(run: Any, number: int) -> None:
        fill(run[0], number)
        run[1].save(step=number + 1)

    return Way(begin, step, lambda run: rows_of(run[0]), close)


def memory(**options: Any) -> Callable[[Path], ReplayBuffer]:
    return lambda path: ReplayBuffer(storage=LazyTensorStorage(CAPACITY, compact_obs=True), **options)


def sliced(path: Path) -> ReplayBuffer:
    return memory(
        sampler=SliceSampler(slice_len=2), generator=torch.Generator().manual_seed(0), batch_size=4
    )(path)


def files(path: Path) -> ReplayBuffer:
    """Of a run whose rows are files."""
    return ReplayBuffer(storage=DiskStorage(CAPACITY, path / "rows", compact_obs=True))


def close_storage(run: Any) -> None:
    buffer = run[0] if isinstance(run, tuple) else run
    buffer.storage.close()


def ensemble_way() -> Way:
    def make(path: Path) -> Any:
        return ReplayBufferEnsemble(memory()(path), memory()(path))

    def begin(path: Path) -> tuple[Any, int]:
        buffer = make(path)
        checkpoint = Checkpoint(path, buffer=buffer)
        return (buffer, checkpoint), checkpoint.load()["step"] if checkpoint.versions() else 0

    def step(run: Any, number: int) -> None:
        for member in (run[0][0], run[0][1]):
            fill(member, number)
        run[1].save(step=number + 1)

    def rows(run: Any) -> list[int]:
        assert rows_of(run[0][0]) == rows_of(run[0][1])
        return rows_of(run[0][0])

    return Way(begin, step, rows)


def dumps_way(make: Callable[[Path], ReplayBuffer]) -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        buffer = make(path)
        if buffer.saved_versions(path):
            buffer.loads(path)
        return (buffer, path), buffer.ring.written // PER_STEP

    def step(run: Any, number: int) -> None:
        fill(run[0], number)
        run[0].dumps(run[1], keep=1)

    return Way(begin, step, lambda run: rows_of(run[0]))


def without_a_buffer() -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        policy = nn.Linear(1, 1, bias=False)
        checkpoint = Checkpoint(path, policy=policy)
        first = checkpoint.load()["step"] if checkpoint.versions() else 0
        assert not first or float(policy.weight.detach()) == first
        return (policy, checkpoint), first

    def step(run: Any, number: int) -> None:
        run[0].weight.data.fill_(number + 1)
        run[1].save(step=number + 1)

    return Way(begin, step, lambda run: [])


def log_way() -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        buffer = ReplayBuffer(storage=DiskStorage(100, path, compact_obs=True, flush_rows=3))
        assert rows_of(buffer) == list(range(len(buffer)))
        return buffer, len(buffer) // PER_STEP

    def step(buffer: Any, number: int) -> None:
        fill(buffer, number)
        buffer.storage.flush()

    return Way(begin, step, rows_of, close_storage, partly=True)


def kept(rows: list[int]) -> list[dict[str, Any]]:
    return [{"rewards": torch.full((3, 2), float(row))} for row in rows]


def numbers_of(buffer: TrajectoryReplayBuffer) -> list[int]:
    return [int(buffer.trajectory(number)["rewards"][0, 0]) for number in buffer.trajectory_ids]


def trajectories_way() -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, flush_rows=4)
        assert numbers_of(buffer) == list(range(len(buffer)))
        return buffer, len(buffer) // 2

    def step(buffer: Any, number: int) -> None:
        if len(buffer) < 2 * number + 2:
            buffer.add_trajectories(kept(list(range(len(buffer), 2 * number + 2))))
        buffer.flush()

    return Way(begin, step, lambda buffer: [], lambda buffer: buffer.close(), partly=True)


def saved_trajectories_way() -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        buffer = TrajectoryReplayBuffer()
        with suppress(FileNotFoundError):  # none was saved
            buffer.load_checkpoint(path / "saved")
        assert numbers_of(buffer) == list(range(len(buffer)))
        return (buffer, path), len(buffer)

    def step(run: Any, number: int) -> None:
        if len(run[0]) < number + 1:
            run[0].add_trajectories(kept([number]))
        run[0].save_checkpoint(run[1] / "saved")

    return Way(begin, step, lambda run: [], lambda run: run[0].close())


def set_way(make: Callable[[Path, int], Any]) -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        try:
            rows = BaseDatasetExperienceReplay(path / "set")[:]["x"].tolist()
        except FileNotFoundError:
            return path, 0
        assert len(set(rows)) == 1 and len(rows) == 9
        return path, rows[0]

    return Way(begin, lambda path, number: make(path / "set", number), lambda path: [])


def of_value(value: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.full((9,), value)}, [9])]


def anew(path: Path, number: int) -> None:
    convert(of_value(number + 1), path, overwrite=True, progress=False, segment_bytes=16)


def plus_one(rows: Any) -> Any:
    return rows.set("x", rows["x"] + 1)


def in_place(path: Path, number: int) -> None:
    if not number:
        anew(path, 0)
        return
    data = BaseDatasetExperienceReplay(path)
    if int(data[:]["x"][0]) == number:  # else an interrupt came when all was done
        data.preprocess(plus_one, progress=False, num_chunks=2)


def export_way() -> Way:
    def begin(path: Path) -> tuple[Any, int]:
        there = sorted(path.glob("*.parquet"))
        for number, file in enumerate(there):
            assert import_parquet(file)["x"].tolist() == [number] * 9
        return path, len(there)

    def step(path: Path, number: int) -> None:
        if not (path / f"{number}.parquet").exists():
            export(of_value(number)[0], path / f"{number}.parquet", progress=False)

    return Way(begin, step, lambda path: [])


WAYS: dict[str, Way] = {
    "checkpoint": checkpoints(sliced),
    "flat": checkpoints(memory(checkpointer=FlatStorageCheckpointer())),
    "nested": checkpoints(memory(checkpointer=NestedStorageCheckpointer())),
    "list": checkpoints(lambda path: ReplayBuffer(storage=ListStorage(CAPACITY))),
    "h5": checkpoints(memory(checkpointer=H5StorageCheckpointer())),
    "linked": checkpoints(files, close_storage),
    "ensemble": ensemble_way(),
    "dumps": dumps_way(sliced),
    "run": without_a_buffer(),
    "log": log_way(),
    "trajectories": trajectories_way(),
    "saved trajectories": saved_trajectories_way(),
    "set": set_way(anew),
    "preprocess": set_way(in_place),
    "export": export_way(),
}


class Fault:
    """Stops the process at the number-th of the system calls that `CALLS` names; counts them with ``number=0``."""

    def __init__(self, number: int, mode: str) -> None:
        self.number, self.mode, self.count, self.full = number, mode, 0, False
        for name in CALLS:
            setattr(os, name, self.wrapped(name, os.fstat if name == "fsync" else _real[name]))
        fcntl.flock = self.wrapped("flock", _real_flock)

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            if main or not self.mode.startswith("interrupt"):  # Ctrl-C comes in the main thread
                self.count += 1
            here = self.count == self.number and (main or not self.mode.startswith("interrupt"))
            if here and self.mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self.full |= here and self.mode == "full"
            if name == "close" and (here or self.full) and self.mode != "interrupt":
                real(*arguments)  # the descriptor is gone, whatever comes
                self.number += here and self.mode != "interrupt after"
                here, real_call = here and self.mode == "interrupt after", id
            else:
                real_call = real
            if (self.full and name in ("open", "write", "mkdir", "link", "ftruncate")) or (
                here and self.mode == "error"
            ):
                code = errno.ENOSPC if self.full else errno.EIO
                raise OSError(code, os.strerror(code))
            if here and self.mode == "interrupt":
                raise KeyboardInterrupt
            result = real_call(*arguments, **options)
            if here and self.mode == "interrupt after":
                if name in ("open", "scandir"):  # what nobody has yet is closed by Python, as it would be
                    _real["close"](result) if name == "open" else result.close()
                raise KeyboardInterrupt
            return result

        return call


def restore() -> None:
    for name, function in _real.items():
        setattr(os, name, function)
    fcntl.flock = _real_flock


def expected(steps: int) -> list[int]:
    end = steps * PER_STEP
    return list(range(max(0, end - CAPACITY), end))


def check(way: Way, run: Any, steps: int) -> None:
    rows = way.rows(run)
    if rows and not way.partly:
        assert rows[-1] == steps * PER_STEP - 1 and rows == list(range(rows[0], rows[-1] + 1)), (steps, rows)
        assert len(rows) == min(CAPACITY, steps * PER_STEP), (steps, rows)


def finish(way: Way, path: Path, least: int, most: int) -> None:
    """The loop of the pages, in a new run."""
    run, first = way.begin(path)
    assert least <= first <= most, f"{first} steps are there, told of were {least}"
    check(way, run, first)
    for number in range(first, STEPS):
        way.step(run, number)
    check(way, run, STEPS)
    way.close(run)
    run, last = way.begin(path)
    assert last == STEPS, f"{last} steps are there in the end"
    check(way, run, STEPS)
    way.close(run)


def go(way: Way, path: Path, number: int, mode: str, told: int) -> int:
    """What the process does that is stopped: write to ``told`` how many steps are saved; return the number of calls."""
    fault, done, tries, run = Fault(number, mode), 0, 0, None
    while done < STEPS:
        try:
            if run is None:
                run, first = way.begin(path)
                assert first in (done, done + 1), f"{first} steps are there, told of were {done}"
                done = first
            while done < STEPS:
                way.step(run, done)
                done += 1
                _real["write"](told, bytes([done]))
        except (OSError, KeyboardInterrupt, DamagedFileError) as error:
            # A file that could not be read is a damaged one.
            assert not isinstance(error, DamagedFileError) or os.strerror(errno.EIO) in str(error), error
            fault.full, fault.mode = False, "none"
            tries += 1
            assert tries < 4, f"it does not go on: {error!r}"
        except RuntimeError as error:
            fault.full, fault.mode = False, "none"
            tries += 1
            assert "anew" in str(error) and tries < 4, f"it does not go on: {error!r}"
            way.close(run)
            run = None
    fault.full, fault.mode = False, "none"
    way.close(run)
    restore()
    return fault.count


def trial(way: Way, path: Path, number: int, mode: str) -> tuple[int, int, str]:
    """Run a process that is stopped; return what it told, how many calls it made, and what went wrong in it."""
    told, telling = os.pipe()
    wrong, complaint = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 0
        try:
            faulthandler.dump_traceback_later(300, exit=True)
            _real["write"](complaint, f"calls {go(way, path, number, mode, telling)}".encode())
        except BaseException:
            restore()
            os.write(complaint, traceback.format_exc()[-3000:].encode())
            code = 3
        os._exit(code)
    os.close(telling)
    os.close(complaint)
    with open(told, "rb") as pipe, open(wrong, "rb") as texts:
        steps, text = pipe.read(), texts.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        return max(steps, default=0), 0, text or f"it ended with {code}"
    return max(steps, default=0), int(text.removeprefix("calls ") or 0), ""


def main(count: int, seed: int, names: list[str]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    saving.LEAST_BYTES = 1  # files of few rows, so that a save writes several, and merges them
    warnings.simplefilter("ignore")
    memory_disk = "/dev/shm" if os.path.isdir("/dev/shm") else None
    failures = 0
    for name in names or WAYS:
        way, stopped = WAYS[name], 0
        with tempfile.TemporaryDirectory(dir=memory_disk) as place:
            _, calls, text = trial(way, Path(place), 0, "none")
            assert calls, text
        for attempt in range(count):
            draw = random.Random(f"{name} {seed} {attempt}")
            number, mode = draw.randrange(1, calls + 1), draw.choice(MODES)
            what = f"{name} {seed} {attempt}: {mode} at call {number} of {calls}"
            print(what, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=memory_disk) as place:
                told, made, text = trial(way, Path(place), number, mode)
                stopped += not made
                try:
                    assert not text, text
                    finish(way, Path(place), told, min(told + 1, STEPS))
                except BaseException:
                    failures += 1
                    print(f"{what}\n{traceback.format_exc()[-3000:]}", flush=True)
        print(name, f"{count} stopped at {calls} calls, {stopped} killed", flush=True)
    print("all right" if not failures else f"{failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    count, seed = [*map(int, sys.argv[1:3]), *[3, 0][len(sys.argv) - 1 :]]
    main(count, seed, sys.argv[3:])

"""The thread that writes the files of a `DiskStorage`: interrupted extends, errors, closing, and who else may write."""

import errno
import gc
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import DiskStorage, RandomSampler, ReplayBuffer, SliceSampler
from flatroll.buffers.storages.disk.log import RowLog
from flatroll.disk import files
from flatroll.kernels.rows.host_memory import host_memory


def rows_of(first: int, count: int) -> TensorDict:
    row = torch.arange(first, first + count)
    return TensorDict({"row": row, "next": {"row": row + 1, "done": row % 7 == 6}}, [count])


def make(folder: Path, max_size: int | None = 1000, **options: Any) -> ReplayBuffer:
    storage = DiskStorage(max_size, folder, **{"sync": False, "segment_bytes": 170, **options})
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=8)


def log_of(buffer: ReplayBuffer) -> RowLog:
    log: RowLog = buffer.storage._log  # type: ignore[attr-defined]
    return log


def check(buffer: ReplayBuffer, rows: range) -> None:
    """The buffer has these rows, oldest first."""
    got = buffer[:]
    assert got["row"].tolist() == list(rows)
    assert got["next", "row"].tolist() == [row + 1 for row in rows]


class Gate:
    """Lets the thread that writes wait before it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, write = threading.Event(), RowLog._write

        def later(log: RowLog, end: int) -> None:
            if threading.current_thread() is log.thread:
                assert self.open.wait(600)
            write(log, end)

        monkeypatch.setattr(RowLog, "_write", later)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def until_flushed(buffer: ReplayBuffer) -> None:
    for _ in range(30_000):  # bounded
        if not buffer.stats()["rows_unflushed"]:
            return
        time.sleep(0.01)
    raise AssertionError("rows are not flushed")


@pytest.mark.parametrize("compact", [False, True])
def test_an_extend_that_fails_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    """Some of its blocks are made already: nothing of them comes back, and no row is where they were."""
    buffer = make(tmp_path, compact_obs=compact)
    buffer.extend(rows_of(0, 5))
    calls = [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:  # the second new block
            raise MemoryError
        return host_memory(*args)

    monkeypatch.setattr("flatroll.buffers.storages.disk.log.host_memory", failing)
    with pytest.raises(MemoryError):
        buffer.extend(rows_of(503, 60))  # the first of them ends a trajectory
    monkeypatch.undo()
    check(buffer, range(5))
    for first in range(5, 45, 20):
        buffer.extend(rows_of(first, 20))
        check(buffer, range(first + 20))
    buffer.storage.close()  # type: ignore[attr-defined]
    check(make(tmp_path), range(45))


@pytest.mark.parametrize("flushed", [False, True])
def test_an_extend_that_is_interrupted_before_the_buffer_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    buffer = make(tmp_path, compact_obs=True, segment_bytes=10_000)
    buffer.extend(rows_of(0, 5))

    def interrupted(*args: Any) -> Any:
        if flushed:
            log_of(buffer).flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(buffer.storage, "keep_next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.extend(rows_of(500, 20))
    check(buffer, range(5))
    if flushed:
        with pytest.raises(RuntimeError, match="interrupted after its rows had been written to a file: open"):
            buffer.extend(rows_of(5, 20))
        check(buffer, range(5))
        return
    buffer.extend(rows_of(5, 20))
    check(buffer, range(25))
    buffer.storage.close()  # type: ignore[attr-defined]
    check(make(tmp_path), range(25))


def test_an_interrupt_while_the_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It publishes nothing that the buffer does not count."""
    buffer, start = make(tmp_path, flush_rows=10), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.extend(rows_of(500, 30))
    buffer.extend(rows_of(0, 30))
    buffer.storage.close()  # type: ignore[attr-defined]
    check(make(tmp_path), range(30))


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 5))
    buffer.extend(rows_of(5, 5))
    with pytest.raises(RuntimeError, match="row 10 is the next one, not 3"):
        log_of(buffer).append(dict(rows_of(3, 1).items(True, True)), torch.zeros(0).long().numpy(), {}, 3)
    check(buffer, range(10))


def test_close_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 5))

    def failing(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", failing)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                buffer.storage.close()  # type: ignore[attr-defined]
    buffer.storage.close()  # type: ignore[attr-defined]
    buffer.storage.close()  # type: ignore[attr-defined]
    check(make(tmp_path), range(5))


def test_a_thread_that_begins_after_a_failed_flush_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has the error: only who asks next tries again."""
    buffer, begin, run = make(tmp_path), threading.Event(), RowLog._run

    def later(log: RowLog) -> None:
        assert begin.wait(600)
        run(log)

    def failing(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RowLog, "_run", later)
    buffer.extend(rows_of(0, 25))
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", failing)
        with pytest.raises(OSError, match="No space"):
            buffer.storage.flush()  # type: ignore[attr-defined]
    begin.set()
    thread = log_of(buffer).thread
    assert thread is not None
    thread.join(600)
    assert buffer.stats()["rows_unflushed"] == 25
    buffer.storage.close()  # type: ignore[attr-defined]
    check(make(tmp_path), range(25))


@pytest.mark.parametrize("what", ["save", "flush", "empty", "close"])
def test_what_waits_for_the_thread(tmp_path: Path, gate: Gate, what: str) -> None:
    """The thread has begun, and not got to the folder: nobody waits for it who has that."""
    buffer = make(tmp_path / "rows")
    buffer.extend(rows_of(0, 45))  # whole blocks: the thread begins
    calls = {
        "save": lambda: buffer.storage.save(tmp_path / "saved"),  # type: ignore[attr-defined]
        "flush": buffer.storage.flush,  # type: ignore[attr-defined]
        "empty": buffer.empty,
        "close": buffer.storage.close,  # type: ignore[attr-defined]
    }
    caller = threading.Thread(target=calls[what], daemon=True)
    caller.start()
    time.sleep(0.02)
    gate.open.set()
    caller.join(600)
    assert not caller.is_alive()
    if what == "save":
        check(make(tmp_path / "saved"), range(45))


def test_rows_that_come_while_the_thread_writes_are_due_too(tmp_path: Path, gate: Gate) -> None:
    """The thread goes on with what became due meanwhile, by the clock or by number, though no extend follows."""
    rules: list[dict[str, Any]] = [{"flush_seconds": 0.01}, {"flush_rows": 5}]
    for options in rules:
        gate.open.clear()
        buffer = make(tmp_path / str(options), **options)
        buffer.extend(rows_of(0, 15))
        buffer.extend(rows_of(15, 3))
        time.sleep(0.05)  # the clock's thread finds the other one at work
        assert buffer.stats()["rows_unflushed"] == 18
        gate.open.set()
        until_flushed(buffer)


def test_whole_blocks_make_files(tmp_path: Path) -> None:
    """The first rows of the next block wait for the others, and are not written twice."""
    buffer = make(tmp_path)
    for first in range(0, 60, 3):
        buffer.extend(rows_of(first, 3))
    for _ in range(30_000):  # bounded
        if buffer.stats()["rows_unflushed"] <= 10:
            break
        time.sleep(0.01)
    assert {segment.rows for segment in log_of(buffer).folder.segments} == {10}


def test_nothing_is_taken_by_a_log_that_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes in the middle of an extend: that is an error, and no row is lost silently."""
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 5))
    monkeypatch.setattr(RowLog, "check", lambda log: log.close())
    with pytest.raises(ValueError, match="is closed: open the folder again"):
        buffer.extend(rows_of(5, 5))
    check(buffer, range(5))
    check(make(tmp_path), range(5))


def test_a_storage_collected_on_its_own_thread_is_closed(tmp_path: Path) -> None:
    kept = [make(tmp_path, flush_rows=10)]
    log = log_of(kept[0])
    append = log.folder.append

    def collected(*args: Any, **options: Any) -> None:
        kept.clear()
        gc.collect()
        append(*args, **options)

    log.folder.append = collected  # type: ignore[method-assign]
    kept[0].extend(rows_of(0, 25))
    for _ in range(30_000):  # bounded
        if log.closed and log.folder._lock is None:
            break
        time.sleep(0.01)

    # The thread that closes has begun to give the folder back.
    for thread in threading.enumerate():
        if thread.name == "flatroll close":
            thread.join(600)
    check(make(tmp_path), range(25))


@pytest.mark.parametrize("compact", [False, True])
def test_the_next_buffer_of_a_storage(tmp_path: Path, compact: bool) -> None:
    """It begins with the rows of the one that is gone, those in memory, too; trajectories that were open are cut."""
    buffer = make(tmp_path, 60, compact_obs=compact)
    storage = buffer.storage
    for first in range(0, 75, 15):
        buffer.extend(rows_of(first, 15))
    with pytest.raises(ValueError, match="belongs to another buffer"):
        make_over(storage)
    rows = buffer[buffer.ring.slots_by_age(torch.arange(60))]
    assert rows["row"].tolist() == list(range(15, 75))  # as before
    del buffer
    other = make_over(storage)
    check(other, range(15, 75))
    other.extend(rows_of(75, 3))
    assert other.index is not None and other.index.longest == 7
    rows = other[other.ring.slots_by_age(torch.arange(60))]
    assert rows["row"].tolist() == list(range(18, 78))
    storage.close()  # type: ignore[attr-defined]
    again = make(tmp_path, 60)
    check(again, range(18, 78))
    assert again.index is not None and other.index.trajectories == again.index.trajectories


def make_over(storage: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=8)


def test_a_closed_folder_is_free_though_a_child_is_alive(tmp_path: Path) -> None:
    """A process that was forked meanwhile has a copy of the lock's descriptor."""
    buffer = make(tmp_path)
    buffer.extend(rows_of(0, 5))
    places = {int(name): f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    locks = [number for number, place in places.items() if os.path.realpath(place) == str(tmp_path / "lock")]
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=locks)
    with child:
        assert len(locks) == 1
        buffer.storage.close()  # type: ignore[attr-defined]
        other = make(tmp_path)
        forked = os.fork()
        if not forked:
            try:
                log_of(other).folder.close()  # of its copy of the descriptor
            finally:
                os._exit(0)
        os.waitpid(forked, 0)
        with pytest.raises(BlockingIOError):
            make(tmp_path)
    check(other, range(5))


def test_the_clock_does_not_try_again_before_an_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make(tmp_path, flush_seconds=0.3)

    def failing(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", failing)
        buffer.extend(rows_of(0, 25))
        thread, clock = log_of(buffer).thread, log_of(buffer)._timer
        assert thread is not None
        thread.join(600)
    if clock is not None:
        clock.join(600)
    assert buffer.stats()["rows_unflushed"] == 25
    with pytest.raises(OSError, match="No space"):
        buffer.extend(rows_of(25, 5))
    buffer.storage.close()  # type: ignore[attr-defined]
    check(make(tmp_path), range(25))


def test_a_folder_forgets_where_runs_began_whose_rows_are_gone(tmp_path: Path) -> None:
    for first in range(0, 60, 20):
        buffer = make(tmp_path, 30)
        buffer.extend(rows_of(first, 20))
        buffer.storage.close()  # type: ignore[attr-defined]
    layout = log_of(buffer).layout
    assert layout is not None
    assert layout.seams == [40]


def test_an_emptied_folder_takes_rows_at_any_size(tmp_path: Path) -> None:
    buffer = make(tmp_path, 50)
    buffer.extend(rows_of(0, 30))
    buffer.empty()
    buffer.storage.close()  # type: ignore[attr-defined]
    buffer = make(tmp_path, 30)
    buffer.extend(rows_of(0, 25))
    check(buffer, range(25))


def test_dtypes_that_files_cannot_hold_are_refused_at_once(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=DiskStorage(100, tmp_path), sampler=RandomSampler())
    with pytest.raises(TypeError, match=r"cannot store torch\.float8_e8m0fnu"):
        buffer.extend(TensorDict({"x": torch.zeros(3, dtype=torch.uint8).view(torch.float8_e8m0fnu)}, [3]))
    buffer.extend(TensorDict({"x": torch.zeros(3, dtype=torch.complex64)}, [3]))
    assert len(buffer) == 3

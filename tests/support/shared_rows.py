"""Processes that use one buffer by its handle, some killed in between: ``python tests/support/shared_rows.py SECONDS``.

Each row says who wrote it and when, and holds a checksum of that, so that a mixture of two rows shows.
"""

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.buffers import BufferHandle, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from flatroll.sharing import Channel

WIDTH = 64  # float64 numbers of each row


def far(buffer: Any) -> BufferHandle:
    """A handle that goes through the owner's thread, as one in another process does."""
    here, there = Channel.pair()
    here.send("handle", buffer.handle())
    handle = there.receive("handle")
    assert isinstance(handle, BufferHandle)
    return handle


def rows_of(writer: int, first: int, count: int) -> TensorDict:
    """Rows ``first ... first + count - 1`` of a writer."""
    number = torch.arange(first, first + count)
    payload = (writer * 1_000_003 + number)[:, None] * 131.0 + torch.arange(WIDTH, dtype=torch.float64)
    columns = {"writer": torch.full((count,), writer), "number": number, "payload": payload}
    return TensorDict({**columns, "check": payload.sum(1)}, [count])


def wrong(rows: TensorDict) -> int:
    """Number of rows that nobody wrote so."""
    payload = rows["payload"]
    first = (rows["writer"] * 1_000_003 + rows["number"]) * 131.0
    right = (payload - first[:, None] == torch.arange(WIDTH, dtype=torch.float64)).all(1)
    return int((~(right & (payload.sum(1) == rows["check"]))).sum())


def write(handle: BufferHandle, writer: int) -> None:
    """Extend without end, by windows of 1 to 400 rows, small ones in messages and large ones in slots."""
    torch.set_num_threads(1)
    sizes, first = random.Random(writer), 0
    while True:
        count = sizes.choice((1, 7, 60, 200, 400))
        handle.extend(rows_of(writer, first, count))
        first += count


def read(handle: BufferHandle, results: Any, stop: Any) -> None:
    """Count samples and wrong rows in them until told to stop."""
    torch.set_num_threads(1)
    samples = bad = 0
    while not (samples and stop.is_set()):
        bad += wrong(handle.sample(500))
        samples += 1
    results.put((samples, bad))


def start(target: Any, *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def open_files() -> int:
    """Number of open descriptors; there is no way to ask for them but on Linux."""
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def gaps(rows: TensorDict) -> int:
    """Number of places where a writer's rows, in the order in which they are stored, do not count on by one."""
    found = 0
    for writer in rows["writer"].unique():
        found += int((rows["number"][rows["writer"] == writer].diff() != 1).sum())
    return found


def run(seconds: float, writers: int = 2) -> dict[str, int]:
    """Let writers and a reader use a buffer, kill a writer or a second reader now and then, and count what is wrong."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=64)
    handle, context = buffer.handle(), multiprocessing.get_context("fork")
    handle.extend(rows_of(0, 0, 1))
    results, stop, choose = context.SimpleQueue(), context.Event(), random.Random(0)
    gc.collect()  # what earlier tests left
    before = open_files()
    reader = start(read, handle, results, stop)
    killed = [start(write, handle, number + 1) for number in range(writers)]
    killed.append(start(read, handle, results, context.Event()))
    number, kills, here = writers, 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or kills < 5:
        time.sleep(choose.uniform(0.02, 0.2))
        place = choose.randrange(len(killed))
        os.kill(killed[place].pid or 0, signal.SIGKILL)
        killed[place].join()
        killed[place].close()
        kills, number = kills + 1, number + 1
        again = (read, handle, results, context.Event()) if place == writers else (write, handle, number)
        killed[place] = start(*again)
        here += wrong(buffer.sample(500))
    stop.set()
    samples, bad = results.get()
    for process in (*killed, reader):
        process.kill()
        process.join()
        process.close()
    rows = buffer[:]
    written = buffer.ring.written
    order = torch.arange(max(0, written - 20_000), written).remainder(20_000)
    end = time.monotonic() + 600
    while open_files() > before and time.monotonic() < end:  # the owner is about to notice that all are gone
        time.sleep(0.01)
    return {
        "kills": kills,
        "rows": written,
        "samples": samples,
        "wrong": bad + here + wrong(rows),
        "gaps": gaps(rows[order]),
        "more open files": open_files() - before,
    }


def example(handle: BufferHandle) -> None:
    """What a worker does: it stores ten rows."""
    handle.extend(TensorDict({"a": torch.ones(10)}, [10]))


def shares(method: str) -> int:
    """Rows in this process's buffer after a worker of that start method has stored its own."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(21))
    buffer.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    process = multiprocessing.get_context(method).Process(target=example, args=(buffer.handle(),))  # type: ignore[attr-defined]
    process.start()
    process.join(600)
    assert process.exitcode == 0
    assert bool((buffer["a"][:10] == 0).all()) and bool((buffer["a"][10:20] == 1).all())
    return len(buffer)


if __name__ == "__main__":
    print({method: shares(method) for method in ("fork", "spawn", "forkserver")})
    print(run(float(sys.argv[1])))

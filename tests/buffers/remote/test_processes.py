"""Handles in other processes: every way there, kills, forks, threads, and the end of the owner."""

import copy
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from shared_rows import far, run, shares
from tensordict import TensorDict

from flatroll.buffers import (
    BufferHandle,
    LazyMemmapStorage,
    LazyTensorStorage,
    OwnerGoneError,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.buffers.remote import LETTER, Connection
from flatroll.rollouts import Collector
from flatroll.sharing import Channel, Nursery
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


def rows(value: float, count: int = 4, width: int = 1) -> TensorDict:
    return TensorDict({"x": torch.full((count, width), value)}, [count])


def buffer_of(capacity: int = 100, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=4, **options)


class Child:
    """A forked process that runs ``function(pipe, *arguments)``, and is killed at the end of a ``with`` block."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=function, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def get(self) -> Any:
        assert self.pipe.poll(600)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()  # by its number: a sibling may hold what a limit of time would wait for

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so, ten minutes at most."""
    end = time.monotonic() + 600
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    assert true()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_parent_sees_what_a_worker_stores(method: str) -> None:
    assert shares(method) == 20


def test_files_that_processes_share_need_no_owner(tmp_path: Path) -> None:
    """But may have one."""

    def work(pipe: Pipe, buffer: ReplayBuffer, handle: BufferHandle) -> None:
        buffer.extend(rows(1.0, 10))
        handle.extend(rows(2.0, 5))
        pipe.send(len(buffer))

    buffer = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path), batch_size=4, shared=True)
    buffer.extend(rows(0.0, 10))
    with Child(work, buffer, buffer.handle()) as child:
        assert child.get() == 25
    assert buffer["x"][:, 0].tolist() == [0.0] * 10 + [1.0] * 10 + [2.0] * 5


SCRIPT = Script(2, lengths=[[9, 3], [7]], ends=[["terminated"], ["truncated"]])


def collect(channel: Channel, handles: dict[str, BufferHandle], number: int) -> None:
    """What a worker of a nursery does: it collects into shared buffers."""
    options: dict[str, dict[str, Any]] = {"compact": {"compact_obs": True}, "plain": {"trajs_per_batch": 2}}
    for name, handle in handles.items():
        collector = Collector(
            ScriptedVectorEnv(SCRIPT),
            frames_per_batch=30,
            total_frames=90,
            replay_buffer=handle,
            writer=number,
            **options[name],
        )
        for _ in collector:
            pass
    channel.send("collected")


def test_collectors_in_workers_write_into_one_buffer() -> None:
    """Compact windows with their last observations; whole trajectories, which are kept back until they end."""
    plain = ReplayBuffer(storage=LazyTensorStorage(500), sampler=SliceSampler(slice_len=5), batch_size=50)
    compact = ReplayBuffer(
        storage=LazyTensorStorage(500, compact_obs=True), sampler=SliceSampler(slice_len=5), batch_size=50
    )
    handles = {"plain": plain.handle(), "compact": compact.handle()}
    with Nursery(preload=["flatroll.rollouts", "flatroll.buffers"]) as nursery:
        workers = [nursery.start(collect, handles=handles, number=number) for number in (1, 2)]
        for worker in workers:
            worker.receive("collected", timeout=600)
    alone: Any = ReplayBuffer(
        storage=LazyTensorStorage(500), sampler=SliceSampler(slice_len=5), batch_size=50
    )
    for _ in Collector(
        ScriptedVectorEnv(SCRIPT), frames_per_batch=30, total_frames=90, replay_buffer=alone, writer=1
    ):
        pass
    written = alone[:]
    for buffer in (compact, plain):
        stored = buffer[:]
        ids = stored["collector", "traj_ids"]
        assert set((ids >> 40).tolist()) == {1, 2}
        for trajectory in ids[ids >> 40 == 1].unique():
            at, there = ids == trajectory, written["collector", "traj_ids"] == trajectory
            for key in ("observation", ("next", "observation"), "is_init", ("next", "done")):
                got, expected = stored[key][at], written[key][there]
                assert torch.equal(got, expected[: len(got)]), key
        assert len(compact) == 180
        sample = buffer.sample()
        assert bool(
            (sample["next", "observation"][:-1] == sample["observation"][1:])[~sample["is_init"][1:, 0]].all()
        )


def test_kills_in_the_middle_of_anything_corrupt_nothing() -> None:
    found = run(1.5)
    assert found["kills"] > 2 and found["samples"] > 0
    assert [found[name] for name in ("wrong", "gaps", "more open files")] == [0, 0, 0]


def test_a_half_sent_message_is_none() -> None:
    handle = (buffer := buffer_of()).handle()
    descriptor = handle.door.enter()
    os.write(descriptor, b"\xff\0\0\0")  # of a length of eight bytes
    assert len(far(buffer)) == 0
    os.close(descriptor)
    (other := far(buffer)).extend(rows(1.0))
    owner = buffer.service.owner
    assert owner is not None and len(buffer) == 4
    until(lambda: len(owner.clients) == 1)
    assert len(other) == 4


def test_what_is_no_socket_does_not_come_in() -> None:
    handle = (buffer := buffer_of()).handle()
    with Path(__file__).open() as file:
        socket.send_fds(handle.door._socket, [b"."], [file.fileno()])
    handle.door._socket.send(b"nothing")
    assert len(far(buffer)) == 0


def test_a_stopped_client_delays_nobody() -> None:
    def extend(pipe: Pipe, handle: BufferHandle) -> None:
        pipe.send(handle.extend(rows(1.0, 4, 30_000)).tolist())
        while True:
            handle.sample(40)

    buffer = buffer_of()
    with Child(extend, buffer.handle()) as child:
        assert child.get() == [0, 1, 2, 3]
        assert child.process.pid is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        handle = far(buffer)
        for _ in range(20):
            handle.extend(rows(2.0, 4, 30_000))
        assert len(handle) == 84


@pytest.fixture
def served() -> Iterator[tuple[ReplayBuffer, BufferHandle]]:
    buffer = buffer_of()
    buffer.extend(rows(0.0))
    yield buffer, far(buffer)


def test_what_the_buffer_refuses_is_raised_where_it_was_asked_for(
    served: tuple[ReplayBuffer, BufferHandle],
) -> None:
    buffer, handle = served
    for width in (1, 30_000):  # in a message, and in a slot
        with pytest.raises(ValueError, match="x") as caught:
            handle.extend(TensorDict({"x": torch.zeros(4, width + 1)}, [4]))
        assert f"raised in process {os.getpid()}, which owns the buffer" in caught.value.__notes__
        assert "Traceback" in str(caught.value.__cause__) and "_write" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="has no priorities: use PrioritizedSampler"):
        handle.update_priority(torch.zeros(1, dtype=torch.int64), 1.0)
    with pytest.raises(ValueError, match="batch_size"):
        handle.sample(-1)
    assert len(handle) == len(buffer) == 4 and bool((buffer["x"] == 0).all())


def test_what_cannot_be_sent_is_refused_and_the_handle_goes_on(
    served: tuple[ReplayBuffer, BufferHandle],
) -> None:
    _, handle = served
    with pytest.raises(TypeError, match="pickle"):
        handle.extend(threading.Lock())
    assert len(handle) == 4


def test_an_interrupted_call_does_not_shift_the_answers(
    served: tuple[ReplayBuffer, BufferHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = served
    assert len(handle) == 4

    def interrupted(self: Connection) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.stats()
    assert len(handle) == 4  # not the statistics


@pytest.mark.parametrize(
    ("kind", "content", "text"),
    [
        ("gossip", None, "was not expected"),
        (LETTER, (b"", []), "."),
        (LETTER, 5, "."),
        ("mailbox: window", (0, 0, [10**9], b""), "slot 0 of block 0 was announced"),
        ("mailbox: free", (0, 0), "."),
    ],
)
def test_messages_that_make_no_sense_change_nothing(
    served: tuple[ReplayBuffer, BufferHandle], kind: str, content: Any, text: str
) -> None:
    buffer, handle = served
    assert len(handle) == 4 and handle.post is not None
    handle.post.channel.send(kind, content)
    if text != ".":
        outcome, error, _ = handle.post.receive()
        assert outcome == "lost" and text in str(error)
    handle.hang_up()
    assert len(handle) == len(buffer) == 4


def test_a_window_of_more_rows_than_its_slot_is_refused(served: tuple[ReplayBuffer, BufferHandle]) -> None:
    buffer, handle = served
    big = buffer_of()
    handle = far(big)
    handle.extend(rows(1.0, 4, 30_000))
    assert handle.post is not None
    handle.post.channel.send("mailbox: window", (0, 0, [5, 0], b""))
    _, error, _ = handle.post.receive()
    assert "more than the slot has room for" in str(error) and len(big) == 4 and len(buffer) == 4


def test_only_what_handles_have_can_be_asked_for(served: tuple[ReplayBuffer, BufferHandle]) -> None:
    _, handle = served
    with pytest.raises(ValueError, match=r"a handle can call .*, not '__class__'"):
        handle._call("__class__")


def test_threads_share_a_handle(served: tuple[ReplayBuffer, BufferHandle]) -> None:
    buffer, handle = served
    buffer.empty()
    wrong: list[Any] = []

    def work(value: float) -> None:
        for _ in range(10):
            slots = handle.extend(rows(value, 2))
            if not bool((buffer[slots]["x"] == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not wrong and len(handle) == 80


def test_a_handle_goes_on_in_a_process_forked_after_its_use(
    served: tuple[ReplayBuffer, BufferHandle],
) -> None:
    buffer, used = served
    assert len(used) == 4  # by a channel, which the child must not share

    def work(pipe: Pipe) -> None:
        for _ in range(20):
            used.extend(rows(1.0, 2))
        pipe.send((len(used), repr(used)))
        pipe.recv()  # its end would end its channel

    with Child(work) as child:
        for _ in range(20):
            assert used.sample().shape == (4,)
        assert child.get() == (44, f"BufferHandle(of a buffer in process {os.getpid()})")
        # The parent's channel ends with the parent's handle, although the child had a copy of it.
        owner = buffer.service.owner
        assert owner is not None
        until(lambda: len(owner.clients) == 2)
        used.hang_up()
        until(lambda: len(owner.clients) == 1)


def test_a_handle_is_where_its_buffer_is_without_a_detour(served: tuple[ReplayBuffer, BufferHandle]) -> None:
    buffer, _ = served
    handle = buffer.handle()
    assert handle is buffer.handle() and len(handle) == 4
    assert handle.post is None
    handle.extend(rows(1.0))
    assert len(buffer) == 8


def test_the_end_of_the_owner_is_told_at_once() -> None:
    """Also while a sibling lives that was forked from the owner and has copies of its descriptors."""

    def own(pipe: Pipe, channel: Channel) -> None:
        buffer = buffer_of()
        buffer.extend(rows(3.0))
        channel.send("handle", buffer.handle())
        channel.receive("used")
        sibling = os.fork()
        if sibling:
            pipe.send(sibling)
        time.sleep(1000)
        os._exit(0)

    here, there = Channel.pair()
    with Child(own, there) as owner:
        handle: BufferHandle = here.receive("handle", timeout=600)
        assert handle.sample()["x"].unique().tolist() == [3.0]
        here.send("used")
        sibling = owner.get()
        try:
            ends: list[BaseException] = []

            def wait_for_an_answer() -> None:
                try:
                    handle.post.receive()  # type: ignore[union-attr]
                except EOFError as error:
                    ends.append(error)

            thread = threading.Thread(target=wait_for_an_answer)
            thread.start()
            owner.kill()
            thread.join(600)
            assert len(ends) == 1
            for _ in range(2):
                with pytest.raises(
                    OwnerGoneError, match=r"its process has ended, or the buffer was deleted there"
                ):
                    handle.extend(rows(1.0))
        finally:
            os.kill(sibling, signal.SIGKILL)


def test_the_owner_ends_with_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatroll.buffers.remote._PATIENCE", 600)  # however slow the system is
    buffer = buffer_of()
    here, used, unused = buffer.handle(), far(buffer), far(buffer)
    with pytest.raises(ValueError, match="batch_size"):
        used.sample(-1)  # an error keeps nothing alive
    used.extend(rows(1.0, 4, 30_000))
    owner = buffer.service.owner
    assert owner is not None
    del buffer
    assert not owner.thread.is_alive()
    for handle in (here, used, unused):
        with pytest.raises(OwnerGoneError, match="Keep the buffer, on which handle"):
            len(handle)


def test_a_copy_of_an_owned_buffer_has_no_handle_in_another_process() -> None:
    def work(pipe: Pipe, buffer: ReplayBuffer, pickled: bytes) -> None:
        with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
            buffer.extend(rows(1.0))
        for other in (buffer, pickle.loads(pickled)):
            if other is not buffer:
                other.extend(rows(1.0))  # its own rows
            try:
                other.handle()
            except RuntimeError as error:
                pipe.send((len(other), str(error)))

    buffer = buffer_of()
    buffer.extend(rows(0.0))
    buffer.handle()
    with Child(work, buffer, pickle.dumps(buffer)) as child:
        for expected in (4, 8):
            count, text = child.get()
            assert count == expected
            assert f"of the one that process {os.getpid()} owns: call handle() there" in text
    assert len(buffer) == 4


def test_copies_in_one_process_own_themselves() -> None:
    buffer = buffer_of()
    buffer.extend(rows(0.0))
    handle = far(buffer)
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        far(other).extend(rows(1.0))
        assert len(other) == 8 and len(handle) == len(buffer) == 4


def test_a_copy_goes_on_where_the_owner_has_ended() -> None:
    def own(pipe: Pipe) -> None:
        buffer = buffer_of()
        buffer.extend(rows(0.0))
        buffer.handle()
        pipe.send(pickle.dumps(buffer))

    with Child(own) as child:
        buffer = pickle.loads(child.get())
        child.process.join(600)
        assert len(far(buffer)) == 4


def test_a_handle_cannot_be_kept_in_a_file() -> None:
    with pytest.raises(TypeError, match=r"pass it to a process as an argument of multiprocessing.Process"):
        pickle.dumps(buffer_of().handle())


ENDS = """
import os, time, torch
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
handle = buffer.handle()
child = os.fork()
if not child:
    for _ in range(10**9):
        try:
            handle.extend(torch.zeros(8, 10_000))
            time.sleep(0.005)
        except RuntimeError as error:
            os._exit(5 if type(error).__name__ == "OwnerGoneError" else 6)
while not len(buffer):
    time.sleep(0.01)
print(child)
"""


def test_a_program_ends_when_its_last_line_is_done() -> None:
    """The owner's thread, which is at work, neither keeps it alive nor prints anything."""
    done = interpreters.run([sys.executable, "-W", "ignore", "-c", ENDS])
    assert (done.returncode, done.stderr) == (0, "")
    child = int(done.stdout)
    until(lambda: has_ended(child))


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return True

"""Replay buffers for other processes: a `BufferHandle` is the client, an `Owner` the server, `Connection` the channel.

Each end sends one value and then waits for one. Large tensors travel through shared memory, small ones in the message.
"""

import os
import select
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol, overload

import psutil
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.positions import Index
from flatroll.buffers.transforms.transform import TransformLike, changes_stored
from flatroll.sharing.block import Key, dtype_name
from flatroll.sharing.channel import Channel, Closed, Listener, forget_in_children
from flatroll.sharing.mailbox import BLOCK, WINDOW, Inbox, Outbox, pack, unpack
from flatroll.sharing.worker import WorkerTraceback, portable_error

#: Methods that a handle may call.
CALLS = frozenset(
    {
        "__len__",
        "add",
        "batch_size",
        "empty",
        "extend",
        "mark_update",
        "note_waiting",
        "sample",
        "stats",
        "update_priority",
        "update_tensordict_priority",
    }
)
# The first value of an answer: the call returned, it raised, or its message was unreadable and the owner has
# closed the channel.
DONE = "done"
FAILED = "failed"
LOST = "lost"
_GONE = (
    "the owner of this shared buffer is gone: its process has ended, or the buffer was deleted there. Keep the buffer, "
    "on which handle() was called, as long as its handles are used"
)
_PATIENCE = 5.0  # seconds to wait for a running call when closing
LETTER = "buffer: letter"  # kind of self-contained messages
_SMALL = 1 << 16  # maximum bytes sent inline: a socket accepts them without a reader


class Served(Protocol):
    """A replay buffer or an ensemble; handles call its methods named in ``CALLS``."""

    transforms: list[TransformLike]

    @property
    def storage(self) -> object:
        """Where the rows are."""
        ...


class Connection:
    """One end of a channel between the owner of a buffer and a client.

    Each end sends one value and then waits for one. A received value therefore confirms that the last sent one was
    read and its slot can be reused.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._in_slot = False  # whether the last value was sent in a slot
        self._outbox = Outbox(channel, slots=1)
        self._inbox = Inbox(channel)

    def send(self, value: Any) -> None:
        """Send a value that cloudpickle can pickle; nothing is sent if it cannot.

        Raises:
            Closed: the other end has closed.
        """
        rest, tensors = pack(value)
        if len(rest) + sum(tensor.nbytes for tensor in tensors) <= _SMALL:
            parts = [(dtype_name(tensor), tuple(tensor.shape), _bytes(tensor)) for tensor in tensors]
            self.channel.send(LETTER, (rest, parts))
            return

        self._take_back()  # the slot is still in use if the last answer was unreadable

        # Columns of equal length form a table: a batch, or its ``final``.
        tables: dict[int, dict[Key, Tensor]] = {}
        for place, tensor in enumerate(tensors):
            tables.setdefault(len(tensor), {})[str(place)] = tensor

        if len(rest) > _SMALL:  # the pickle itself may be large
            packed: dict[Key, Tensor] = {"rest": torch.frombuffer(bytearray(rest), dtype=torch.uint8)}
            self._outbox.put(*tables.values(), packed, note=None)
        else:
            self._outbox.put(*tables.values(), *[{}] * (2 - len(tables)), note=rest)

        self._in_slot = True

    def _take_back(self) -> None:
        if self._in_slot:
            self._outbox.take_back(*self._outbox.place)
            self._in_slot = False

    def open(self, kind: str, content: Any, keep: bool) -> tuple[Any] | None:
        """Return the value of a message in a tuple; None if it has none.

        Args:
            kind: of the message.
            content: of the message.
            keep: copy the tensors; otherwise they are valid until the next `send`.

        Raises:
            ValueError: the message is invalid or does not match the memory.
        """
        if kind == LETTER:
            rest, parts = content
            tensors = [_tensor(*part) for part in parts]
        elif kind in (BLOCK, WINDOW):
            window = self._inbox.open(kind, content)
            if window is None:
                return None

            columns = {key: column for table in window.tables for key, column in table.items()}
            rest = window.note
            if rest is None:
                rest = columns.pop("rest").numpy().tobytes()
            tensors = [columns[str(place)] for place in range(len(columns))]

            if keep:
                tensors = [tensor.clone() for tensor in tensors]
        else:
            raise ValueError(f"a message of kind {kind!r} was not expected")

        self._take_back()
        return (unpack(rest, tensors),)

    def receive(self) -> Any:
        """Wait for a value and copy its tensors; `Closed` if none will come."""
        while True:
            kind, content = self.channel.receive(LETTER, BLOCK, WINDOW)
            opened = self.open(kind, content, keep=True)
            if opened is not None:
                return opened[0]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:  # frombuffer refuses empty memory
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape)


class OwnerGoneError(RuntimeError):
    """The owner process of a shared buffer has exited or deleted the buffer."""


class BufferHandle:
    """A client for another process's replay buffer, created by ``buffer.handle()``.

    Pass a handle to other processes as an argument of ``multiprocessing.Process`` (fork, spawn, forkserver) or of
    `Nursery.start`, or inherit it by a fork. A thread of the owner executes each call, with the buffer's own
    arguments, results and errors. Rows are sent through anonymous shared memory. Samples are in host memory, whatever
    the storage's device. Threads may share a handle: calls are serialized.

    Every method raises `OwnerGoneError` at once if the owner process has exited or deleted the buffer.

    >>> import torch
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    >>> handle = buffer.handle()  # to be given to other processes
    >>> handle.extend(torch.arange(3))
    tensor([0, 1, 2])
    >>> len(buffer), handle.sample().shape
    (3, torch.Size([2]))
    >>> del buffer
    >>> len(handle)
    Traceback (most recent call last):
    ...
    flatroll.buffers.remote.OwnerGoneError: the owner of this shared buffer is gone: its process has ended, ...
    """

    def __init__(self, door: Listener, owner: int, here: Callable[[], Served | None] | None = None) -> None:
        self.door = door
        self._owner = owner
        self._here = here
        self.post: Connection | None = None  # this process's channel, opened by its first call
        self._lock = threading.Lock()
        forget_in_children(self)

    def extend(
        self, data: Any, final: TensorDictBase | None = None, *, update_priority: bool | None = None
    ) -> Tensor:
        """Store rows, as `ReplayBuffer.extend`; when this returns they can be sampled."""
        # An ensemble's method has neither option and raises its own error.
        arguments = [data]
        options = {}
        if final is not None:
            arguments.append(final)
        if update_priority is not None:
            options["update_priority"] = update_priority
        stored: Tensor = self._call("extend", *arguments, **options)
        return stored

    def add(self, data: Any) -> int:
        """Store one item, as `ReplayBuffer.add`."""
        return int(self._call("add", data))

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> Any: ...

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True]
    ) -> tuple[Any, dict[str, Tensor]]: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a sample, as `ReplayBuffer.sample`; its tensors own their memory."""
        return self._call("sample", batch_size, return_info)

    def update_priority(
        self, index: Index, priority: Tensor | float, generation: Tensor | None = None, **options: Any
    ) -> None:
        """Set the priorities of rows, as the buffer's method does (an ensemble's also takes ``buffer_ids``)."""
        if generation is not None:
            options["generation"] = generation
        self._call("update_priority", index, priority, **options)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows, as `TensorDictReplayBuffer.update_tensordict_priority`."""
        self._call("update_tensordict_priority", data)

    def mark_update(self, index: Index) -> None:
        """Give rows the priority of new ones, as `ReplayBuffer.mark_update`."""
        self._call("mark_update", index)

    def empty(self) -> None:
        """Remove all rows."""
        self._call("empty")

    def stats(self) -> dict[str, Any]:
        """Return the buffer's statistics."""
        return dict(self._call("stats"))

    def note_waiting(self, rows: int) -> None:
        """Record how many rows a collector holds back, for the error of an empty buffer."""
        self._call("note_waiting", rows)

    @property
    def batch_size(self) -> int | None:
        """Rows per sample, unless ``sample(batch_size)`` overrides it."""
        size: int | None = self._call("batch_size")
        return size

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __repr__(self) -> str:
        return f"BufferHandle(of a buffer in process {self._owner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferHandle, (self.door, self._owner)

    def forget(self) -> None:
        """Drop a channel inherited from the parent process."""
        if self.post is not None:
            self.post.channel.forget()
        self.post, self._lock = None, threading.Lock()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the buffer."""
        if self._here is not None and self._owner == os.getpid():
            buffer = self._here()
            if buffer is None:
                raise OwnerGoneError(_GONE)
            return call(buffer, name, arguments, options)

        with self._lock:
            try:
                if self.post is None:
                    self.post = Connection(Channel(self.door.enter()))
                self.post.send((name, arguments, options))
                outcome, value, trace = self.post.receive()
            except (Closed, ConnectionError):
                self.hang_up()
                raise OwnerGoneError(_GONE) from None
            except BaseException:  # a late answer must not be taken for that of the next call
                self.hang_up()
                raise
            if outcome == LOST:
                self.hang_up()

        if outcome != DONE:
            value.add_note(f"raised in process {self._owner}, which owns the buffer")
            raise value from WorkerTraceback(f"\n{trace}")

        if isinstance(value, range):
            return torch.arange(value.start, value.stop)
        return value

    def hang_up(self) -> None:
        """Close this process's channel; the next call opens a new one."""
        if self.post is not None:
            self.post.channel.close()
        self.post = None


def call(buffer: Served, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call an allowed method of ``buffer`` or return an attribute; ValueError for other names."""
    if name not in CALLS:
        raise ValueError(f"a handle can call {sorted(CALLS)}, not {name!r}")

    found = getattr(buffer, name)
    if callable(found):
        return found(*arguments, **options)
    return found


def shortened(value: Any) -> Any:
    """Replace consecutive positions with a range, which saves a kilobyte per 128 rows."""
    if isinstance(value, Tensor) and value.dtype is torch.int64 and value.ndim == 1 and len(value) > 1:
        first = int(value[0])
        last = int(value[-1])
        if last - first == len(value) - 1 and (value.diff() == 1).all():
            return range(first, last + 1)
    return value


def send_quietly(post: Connection, *answer: Any) -> None:
    """Send an answer; do nothing if the client is gone."""
    with suppress(Closed):
        post.send(answer)


class Owner:
    """Serves a buffer to other processes in a thread that ends with the buffer or the interpreter.

    The thread waits for new clients and messages. Only it and the buffer's own process write: a killed client has
    sent a whole message or none, and its memory is freed with its channel.

    Args:
        buffer: the buffer, held by a weak reference.
    """

    def __init__(self, buffer: Served) -> None:
        self.process = os.getpid()
        self._closed = False
        self._buffer = weakref.ref(buffer)

        self._inside, outside = Listener.pair()
        self.handle = BufferHandle(outside, self.process, self._buffer)
        self.clients: dict[int, Connection] = {}  # by descriptor

        self._poll = select.poll()
        self._poll.register(self._inside.fileno(), select.POLLIN)

        self.thread = threading.Thread(target=self._serve, name="flatroll buffer owner", daemon=True)
        forget_in_children(self)
        weakref.finalize(buffer, self.close)  # also at interpreter exit
        self.thread.start()

    def close(self) -> None:
        """Stop the thread; clients get `OwnerGoneError`. Does nothing in a forked process."""
        if os.getpid() != self.process:
            return

        self._closed = True
        self._inside.shut()  # wakes the thread
        if threading.current_thread() is not self.thread:
            self.thread.join(_PATIENCE)

    def forget(self) -> None:
        """Close a forked process's copies of the descriptors, which clients would mistake for a living owner."""
        self._inside.forget()
        for post in self.clients.values():
            post.channel.forget()

    def _serve(self) -> None:
        """Accept clients and serve their calls until closed."""
        door = self._inside.fileno()
        try:
            while True:
                for descriptor, _ in self._poll.poll():
                    if self._closed:
                        return
                    if descriptor == door:
                        entered = self._inside.admit()
                        if entered is not None:  # a valid client
                            self.clients[entered] = Connection(Channel(entered))
                            self._poll.register(entered, select.POLLIN)
                    elif descriptor in self.clients:
                        self._hear(descriptor)
        finally:
            for post in self.clients.values():
                post.channel.close()
            self._inside.forget()

    def _hear(self, descriptor: int) -> None:
        """Read and answer a client's message; drop a client that is gone or sends invalid data."""
        post = self.clients[descriptor]
        try:
            post.channel.feed()
            while message := post.channel.pop():
                self._answer(post, *message)
            if not post.channel.ended:
                return
        except BaseException as error:  # reading failed, so the start of the next message is unknown
            send_quietly(post, LOST, portable_error(error), traceback.format_exc())

        self._poll.unregister(descriptor)
        del self.clients[descriptor]
        post.channel.close()

    def _answer(self, post: Connection, kind: str, content: Any) -> None:
        """Execute a message; the buffer's errors are sent to the client."""
        buffer = self._buffer()

        # A list storage or a transform's `inv` may keep the tensors, so they must not be in memory that the client
        # overwrites.
        keep = buffer is not None and (
            any(map(changes_stored, buffer.transforms)) or not isinstance(buffer.storage, ColumnStorage)
        )
        opened = post.open(kind, content, keep=keep)
        if opened is None or buffer is None:  # closed meanwhile
            return

        try:
            ((name, arguments, options),) = opened
            answer = DONE, shortened(call(buffer, name, arguments, options)), ""
        except BaseException as error:
            trace = traceback.format_exc()
            # Without the frames, which refer to the buffer.
            answer = FAILED, portable_error(error).with_traceback(None), trace
        del buffer

        try:
            send_quietly(post, *answer)
        except BaseException as error:  # the result cannot be sent
            send_quietly(post, FAILED, portable_error(error), traceback.format_exc())


class Service:
    """The server thread of a buffer or an ensemble.

    Copies remember the owner's process.
    """

    def __init__(self, owned_by: tuple[int, float] | None = None) -> None:
        self.owner: Owner | None = None
        self._owned_by = owned_by  # pid and start time of the owner's process

    def __reduce__(self) -> tuple[Any, ...]:
        return Service, (self._owned_by,)

    def handle(self, buffer: Served) -> BufferHandle:
        """Return the handle of this process's ``buffer``; see `ReplayBuffer.handle`."""
        if self.owner is not None and self.owner.process == os.getpid():
            return self.owner.handle

        if self._owned_by is not None and self._owned_by[0] != os.getpid() and _runs(*self._owned_by):
            raise RuntimeError(
                f"this buffer is a copy, by pickle or fork, of the one that process {self._owned_by[0]} owns: call "
                "handle() there, and give this process the handle instead of the buffer"
            )

        self._owned_by = os.getpid(), psutil.Process().create_time()
        self.owner = Owner(buffer)
        return self.owner.handle


def _runs(process: int, start: float) -> bool:
    """Return whether the process with this pid and start time is alive."""
    try:
        # The start time is computed from the system's boot time, which is adjusted now and then: allow 2 s.
        return bool(abs(psutil.Process(process).create_time() - start) < 2)
    except psutil.NoSuchProcess:
        return False

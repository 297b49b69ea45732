"""Replay buffers that other processes use: `BufferHandle` asks there, `Owner` answers here, `Post` carries both.

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
from flatroll.sharing.channel import Channel, Closed, Door, forget_in_children
from flatroll.sharing.mailbox import BLOCK, WINDOW, Inbox, Outbox, pack, unpack
from flatroll.sharing.worker import WorkerTraceback, portable

#: What a handle may ask the owner to do with the buffer.
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
# First value of an answer: the call returned, it raised an error, or its message could not be read and the owner has
# closed the channel.
DONE, FAILED, LOST = "done", "failed", "lost"
_GONE = (
    "the owner of this shared buffer is gone: its process has ended, or the buffer was deleted there. Keep the buffer, "
    "on which handle() was called, as long as its handles are used"
)
_PATIENCE = 5.0  # seconds that closing waits for a call under way
LETTER = "buffer: letter"  # kind of the messages that hold all bytes themselves
_SMALL = 1 << 16  # bytes that still go into a message: a socket takes them without a reader


class Served(Protocol):
    """What handles are made for: a replay buffer or an ensemble. They call the methods named in ``CALLS``."""

    transforms: list[TransformLike]

    @property
    def storage(self) -> object:
        """Where the rows are."""
        ...


class Post:
    """One end of a channel to or from the owner of a buffer.

    Each end sends one value and then waits for one. So a value that comes says, too, that the one sent before was read
    and that its slot may be written again: no message has to.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._in_slot = False  # the value sent last
        self._outbox, self._inbox = Outbox(channel, slots=1), Inbox(channel)

    def send(self, value: Any) -> None:
        """Send a value: anything that cloudpickle takes; nothing is sent of one that it does not.

        Raises:
            Closed: the other end is gone.
        """
        rest, tensors = pack(value)
        if len(rest) + sum(tensor.nbytes for tensor in tensors) <= _SMALL:
            self.channel.send(LETTER, (rest, [(dtype_name(t), tuple(t.shape), _bytes(t)) for t in tensors]))
            return
        self._take_back()  # where no answer came to an answer that could not be read
        # Columns of one length make a table: the rows of a batch, and those of its ``final``.
        tables: dict[int, dict[Key, Tensor]] = {}
        for place, tensor in enumerate(tensors):
            tables.setdefault(len(tensor), {})[str(place)] = tensor
        if len(rest) > _SMALL:  # the pickle itself, of very many items
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
        """Return the value that a message brings, in a tuple; None if it brings none.

        Args:
            kind: of the message.
            content: of the message.
            keep: give tensors of their own memory; the others hold the value until the next `send`.

        Raises:
            ValueError: the message is none of a post, or does not fit to the memory.
        """
        if kind == LETTER:
            rest, parts = content
            tensors = [_tensor(*part) for part in parts]
        elif kind in (BLOCK, WINDOW):
            window = self._inbox.open(kind, content)
            if window is None:
                return None
            columns = {key: column for table in window.tables for key, column in table.items()}
            rest = columns.pop("rest").numpy().tobytes() if window.note is None else window.note
            tensors = [columns[str(place)] for place in range(len(columns))]
            if keep:
                tensors = [tensor.clone() for tensor in tensors]
        else:
            raise ValueError(f"a message of kind {kind!r} came, which no end of a post sends")
        self._take_back()
        return (unpack(rest, tensors),)

    def receive(self) -> Any:
        """Wait for a value, whose tensors own their memory; `Closed` if none will come."""
        while True:
            kind, content = self.channel.receive(LETTER, BLOCK, WINDOW)
            opened = self.open(kind, content, keep=True)
            if opened is not None:
                return opened[0]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:  # frombuffer refuses to look at nothing
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape)


class OwnerGone(RuntimeError):
    """The process that owns a shared buffer has ended, or has deleted the buffer."""


class BufferHandle:
    """Uses a replay buffer that one process owns, from any process: made by ``buffer.handle()``.

    A handle goes to other processes as an argument of ``multiprocessing.Process`` (fork, spawn, forkserver) or of
    `Nursery.start`, or is there after a fork. Every call is made by a thread of the owner, with the arguments and
    the results of the buffer's own method, and raises what that raises. Rows travel through anonymous shared memory. A
    sample comes in host memory, whichever device the storage is on. Several threads may use a handle: they take turns.

    Every method raises `OwnerGone`, at once, when the owner's process has ended or the buffer was deleted there.

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
    flatroll.buffers.remote.OwnerGone: the owner of this shared buffer is gone: its process has ended, ...
    """

    def __init__(self, door: Door, owner: int, here: Callable[[], Served | None] | None = None) -> None:
        self.door, self._owner, self._here = door, owner, here
        self.post: Post | None = None  # of this process, made with its first call
        self._lock = threading.Lock()
        forget_in_children(self)

    def extend(
        self, data: Any, final: TensorDictBase | None = None, *, update_priority: bool | None = None
    ) -> Tensor:
        """Store rows, as `ReplayBuffer.extend`; when this returns they can be sampled."""
        options = {} if update_priority is None else {"update_priority": update_priority}
        # An ensemble's method has neither option, and says itself that it takes no rows.
        stored: Tensor = self._call("extend", data, *(() if final is None else (final,)), **options)
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
        """Note how many rows a collector keeps back, for the error of an empty buffer."""
        self._call("note_waiting", rows)

    @property
    def batch_size(self) -> int | None:
        """Rows per sample, unless ``sample(batch_size)`` names another number."""
        size: int | None = self._call("batch_size")
        return size

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __repr__(self) -> str:
        return f"BufferHandle(of a buffer in process {self._owner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferHandle, (self.door, self._owner)

    def forget(self) -> None:
        """Let go of a channel that belongs to the process that this one was forked from."""
        if self.post is not None:
            self.post.channel.forget()
        self.post, self._lock = None, threading.Lock()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Have a method of the buffer called."""
        if self._here is not None and self._owner == os.getpid():
            buffer = self._here()
            if buffer is None:
                raise OwnerGone(_GONE)
            return call(buffer, name, arguments, options)
        with self._lock:
            try:
                if self.post is None:
                    self.post = Post(Channel(self.door.enter()))
                self.post.send((name, arguments, options))
                outcome, value, trace = self.post.receive()
            except (Closed, ConnectionError):
                self.hang_up()
                raise OwnerGone(_GONE) from None
            except BaseException:  # as Ctrl-C: the answer may still come, and is not that of the next call
                self.hang_up()
                raise
            if outcome == LOST:
                self.hang_up()
        if outcome != DONE:
            value.add_note(f"raised in process {self._owner}, which owns the buffer")
            raise value from WorkerTraceback(f"\n{trace}")
        return torch.arange(value.start, value.stop) if isinstance(value, range) else value

    def hang_up(self) -> None:
        """Close this process's channel; the next call makes another."""
        if self.post is not None:
            self.post.channel.close()
        self.post = None


def call(buffer: Served, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a method of ``buffer`` that handles have, or return an attribute; ValueError for any other name."""
    if name not in CALLS:
        raise ValueError(f"a handle can ask for {sorted(CALLS)}, not for {name!r}")
    found = getattr(buffer, name)
    return found(*arguments, **options) if callable(found) else found


def shortened(value: Any) -> Any:
    """A range in place of positions that count up by one, as those of most windows do: a kilobyte less per 128 rows."""
    if isinstance(value, Tensor) and value.dtype is torch.int64 and value.ndim == 1 and len(value) > 1:
        first, last = int(value[0]), int(value[-1])
        if last - first == len(value) - 1 and bool((value.diff() == 1).all()):
            return range(first, last + 1)
    return value


def send_quietly(post: Post, *answer: Any) -> None:
    """Send an answer; that nobody is there to read it is no error."""
    with suppress(Closed):
        post.send(answer)


class Owner:
    """Serves one buffer to other processes on one thread, which ends with the buffer or with the interpreter.

    The thread waits on the door and on all clients at once. Only it, and whoever has the buffer itself, ever writes:
    a client that is killed has sent a whole message or none, and its memory goes with its channel.

    Args:
        buffer: the buffer, which is not kept alive.
    """

    def __init__(self, buffer: Served) -> None:
        self.process, self._closed = os.getpid(), False
        self._buffer = weakref.ref(buffer)
        self._inside, outside = Door.pair()
        self.handle = BufferHandle(outside, self.process, self._buffer)
        self.clients: dict[int, Post] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(self._inside.fileno(), select.POLLIN)
        self.thread = threading.Thread(target=self._serve, name="flatroll buffer owner", daemon=True)
        forget_in_children(self)
        weakref.finalize(buffer, self.close)  # also when the interpreter ends
        self.thread.start()

    def close(self) -> None:
        """End the thread; clients get `OwnerGone`. Does nothing in a forked process."""
        if os.getpid() != self.process:
            return
        self._closed = True
        self._inside.shut()  # which wakes the thread
        if threading.current_thread() is not self.thread:
            self.thread.join(_PATIENCE)

    def forget(self) -> None:
        """Close a forked process's copies of the descriptors: clients would take them for a living owner."""
        self._inside.forget()
        for post in self.clients.values():
            post.channel.forget()

    def _serve(self) -> None:
        """Admit clients and do what they ask for, until the door is shut."""
        door = self._inside.fileno()
        try:
            while True:
                for descriptor, _ in self._poll.poll():
                    if self._closed:
                        return
                    if descriptor == door:
                        entered = self._inside.admit()
                        if entered is not None:  # a client, and not something else that came through the door
                            self.clients[entered] = Post(Channel(entered))
                            self._poll.register(entered, select.POLLIN)
                    elif descriptor in self.clients:
                        self._hear(descriptor)
        finally:
            for post in self.clients.values():
                post.channel.close()
            self._inside.forget()

    def _hear(self, descriptor: int) -> None:
        """Read from a client, answer it, and drop it if it is gone or what it sends makes no sense."""
        post = self.clients[descriptor]
        try:
            post.channel.feed()
            while message := post.channel.pop():
                self._answer(post, *message)
            if not post.channel.ended:
                return
        except BaseException as error:  # of reading: where the next message begins is unknown
            send_quietly(post, LOST, portable(error), traceback.format_exc())
        self._poll.unregister(descriptor)
        del self.clients[descriptor]
        post.channel.close()

    def _answer(self, post: Post, kind: str, content: Any) -> None:
        """Do what a message asks for. Whatever the buffer raises goes back to the client."""
        buffer = self._buffer()
        # A list storage and the `inv` of a transform may keep the very tensors that they are given: these must not be
        # in memory that the client writes to again.
        keep = buffer is not None and (
            any(map(changes_stored, buffer.transforms)) or not isinstance(buffer.storage, ColumnStorage)
        )
        opened = post.open(kind, content, keep=keep)
        if opened is None or buffer is None:  # the door is shut by now
            return
        try:
            ((name, arguments, options),) = opened
            answer = DONE, shortened(call(buffer, name, arguments, options)), ""
        except BaseException as error:
            trace = traceback.format_exc()
            answer = FAILED, portable(error).with_traceback(None), trace  # its frames hold the buffer
        del buffer
        try:
            send_quietly(post, *answer)
        except BaseException as error:  # the result cannot be sent
            send_quietly(post, FAILED, portable(error), traceback.format_exc())


class Service:
    """What a buffer or an ensemble knows of the thread that serves it to other processes.

    Copies know which process that is.
    """

    def __init__(self, owned_by: tuple[int, float] | None = None) -> None:
        self.owner: Owner | None = None
        self._owned_by = owned_by  # number and start of the owner's process

    def __reduce__(self) -> tuple[Any, ...]:
        return Service, (self._owned_by,)

    def handle(self, buffer: Served) -> BufferHandle:
        """Return the handle of ``buffer``, which is this process's own; see `ReplayBuffer.handle`."""
        if self.owner is None or self.owner.process != os.getpid():
            if self._owned_by is not None and self._owned_by[0] != os.getpid() and _runs(*self._owned_by):
                raise RuntimeError(
                    f"this buffer is a copy, by pickle or fork, of the one that process {self._owned_by[0]} owns: call "
                    "handle() there, and give this process the handle instead of the buffer"
                )
            self._owned_by = os.getpid(), psutil.Process().create_time()
            self.owner = Owner(buffer)
        return self.owner.handle


def _runs(process: int, start: float) -> bool:
    """Whether the process of this number that began at ``start`` is alive."""
    try:
        # The start is counted from that of the system, which is corrected now and then.
        return bool(abs(psutil.Process(process).create_time() - start) < 2)
    except psutil.NoSuchProcess:
        return False

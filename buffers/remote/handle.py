"""`BufferHandle`: a replay buffer that another process owns."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, overload

import torch
from torch import Tensor

from flatroll.buffers.remote.post import Post
from flatroll.sharing.channel import Channel, Closed
from flatroll.sharing.door import Door
from flatroll.sharing.forks import forget_in_children
from flatroll.sharing.worker import WorkerTraceback

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
# What an answer begins with: the call was made, it raised an error, or its message could not be read and the owner
# has closed the channel.
DONE, FAILED, LOST = "done", "failed", "lost"
_GONE = (
    "the owner of this shared buffer is gone: its process has ended, or the buffer was deleted there. Keep the buffer, "
    "on which handle() was called, as long as its handles are used"
)


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
    flatroll.buffers.remote.handle.OwnerGone: the owner of this shared buffer is gone: its process has ended, ...
    """

    def __init__(self, door: Door, owner: int, here: Callable[[], Any] | None = None) -> None:
        self._door, self._owner, self._here = door, owner, here
        self._post: Post | None = None  # of this process, made with its first call
        self._lock = threading.Lock()
        forget_in_children(self)

    def extend(self, data: Any, final: Any = None, *, update_priority: bool | None = None) -> Tensor:
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

    def update_priority(self, index: Any, priority: Any, generation: Any = None, **options: Any) -> None:
        """Set the priorities of rows, as the buffer's method does (an ensemble's also takes ``buffer_ids``)."""
        if generation is not None:
            options["generation"] = generation
        self._call("update_priority", index, priority, **options)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of a sample's rows, as `TensorDictReplayBuffer.update_tensordict_priority`."""
        self._call("update_tensordict_priority", data)

    def mark_update(self, index: Any) -> None:
        """Give rows the priority of new ones, as `ReplayBuffer.mark_update`."""
        self._call("mark_update", index)

    def empty(self) -> None:
        """Remove all rows."""
        self._call("empty")

    def stats(self) -> dict[str, Any]:
        """Return the buffer's statistics."""
        return dict(self._call("stats"))

    def note_waiting(self, rows: int) -> None:
        """Say how many rows a collector keeps back, for the error of an empty buffer."""
        self._call("note_waiting", rows)

    @property
    def batch_size(self) -> int | None:
        """Rows per sample, if ``sample`` is not told."""
        size: int | None = self._call("batch_size")
        return size

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __repr__(self) -> str:
        return f"BufferHandle(of a buffer in process {self._owner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferHandle, (self._door, self._owner)

    def forget(self) -> None:
        """Let go of a channel that belongs to the process that this one was forked from."""
        if self._post is not None:
            self._post.channel.forget()
        self._post, self._lock = None, threading.Lock()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Have a method of the buffer called."""
        if self._here is not None and self._owner == os.getpid():
            buffer = self._here()
            if buffer is None:
                raise OwnerGone(_GONE)
            return call(buffer, name, arguments, options)
        with self._lock:
            try:
                if self._post is None:
                    self._post = Post(Channel(self._door.enter()))
                self._post.send((name, arguments, options))
                outcome, value, trace = self._post.receive()
            except (Closed, ConnectionError):
                self._hang_up()
                raise OwnerGone(_GONE) from None
            except BaseException:  # as Ctrl-C: the answer may still come, and is not that of the next call
                self._hang_up()
                raise
            if outcome == LOST:
                self._hang_up()
        if outcome != DONE:
            value.add_note(f"raised in process {self._owner}, which owns the buffer")
            raise value from WorkerTraceback(f"\n{trace}")
        return torch.arange(value.start, value.stop) if isinstance(value, range) else value

    def _hang_up(self) -> None:
        """Close the channel; the next call makes another."""
        if self._post is not None:
            self._post.channel.close()
        self._post = None


def call(buffer: Any, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
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

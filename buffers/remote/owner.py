"""`Owner`: the thread that does what the handles of a buffer ask for; `Service` makes its `handle`."""

import os
import select
import threading
import traceback
import weakref
from typing import Any

import psutil

from flatroll.buffers.remote.handle import DONE, FAILED, LOST, BufferHandle, call, send_quietly, shortened
from flatroll.buffers.remote.post import Post
from flatroll.buffers.step_reader import changes_stored
from flatroll.sharing.channel import Channel
from flatroll.sharing.door import Door
from flatroll.sharing.forks import forget_in_children
from flatroll.sharing.worker import portable

_PATIENCE = 5.0  # seconds that closing waits for a call under way


class Owner:
    """Serves one buffer to other processes, by one thread. It ends with the buffer, or with the interpreter.

    The thread waits on the door and on all clients at once. Only it, and whoever has the buffer itself, ever writes:
    a client that is killed has sent a whole message or none, and its memory goes with its channel.

    Args:
        buffer: the buffer, which is not kept alive.
    """

    def __init__(self, buffer: Any) -> None:
        self.process, self._closed = os.getpid(), False
        self._buffer = weakref.ref(buffer)
        self._inside, outside = Door.pair()
        self.handle = BufferHandle(outside, self.process, self._buffer)
        self._clients: dict[int, Post] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(self._inside.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="flatroll buffer owner", daemon=True)
        forget_in_children(self)
        weakref.finalize(buffer, self.close)  # also when the interpreter ends
        self._thread.start()

    def close(self) -> None:
        """End the thread; clients are told that the owner is gone. In a forked process nothing happens."""
        if os.getpid() != self.process:
            return
        self._closed = True
        self._inside.shut()  # which wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)

    def forget(self) -> None:
        """Close a forked process's copies of the descriptors: clients would take them for a living owner."""
        self._inside.forget()
        for post in self._clients.values():
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
                        self._admit()
                    elif descriptor in self._clients:
                        self._hear(descriptor)
        finally:
            for post in self._clients.values():
                post.channel.close()
            self._inside.forget()

    def _admit(self) -> None:
        """Take a new client in, if what comes through the door is one."""
        descriptor = self._inside.admit()
        if descriptor is not None:
            self._clients[descriptor] = Post(Channel(descriptor))
            self._poll.register(descriptor, select.POLLIN)

    def _hear(self, descriptor: int) -> None:
        """Read from a client, answer it, and drop it if it is gone or what it sends makes no sense."""
        post = self._clients[descriptor]
        try:
            post.channel.feed()
            while message := post.channel.pop():
                self._answer(post, *message)
            if not post.channel.ended:
                return
        except BaseException as error:  # of reading: what comes next cannot be told
            send_quietly(post, LOST, portable(error), traceback.format_exc())
        self._poll.unregister(descriptor)
        del self._clients[descriptor]
        post.channel.close()

    def _answer(self, post: Post, kind: str, content: Any) -> None:
        """Do what a message asks for. Whatever the buffer raises goes back to the client."""
        buffer = self._buffer()
        opened = post.open(kind, content, keep=buffer is not None and _keeps_rows(buffer))
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


def _keeps_rows(buffer: Any) -> bool:
    """Whether the buffer may keep the very tensors that it is given, as a list storage or an ``inv`` of a transform
    does: then they must not be in memory that the client writes to again."""
    return any(map(changes_stored, buffer.transforms)) or not hasattr(buffer.storage, "allocated")


class Service:
    """What a buffer or an ensemble knows of the thread that serves it to other processes.

    Copies know which process that is.
    """

    def __init__(self, owned_by: tuple[int, float] | None = None) -> None:
        self.owner: Owner | None = None
        self._owned_by = owned_by  # number and start of the owner's process

    def __reduce__(self) -> tuple[Any, ...]:
        return Service, (self._owned_by,)

    def handle(self, buffer: Any) -> BufferHandle:
        """Return the handle of ``buffer``, which is this process's own; see `ReplayBuffer.handle`."""
        if self.owner is None or self.owner.process != os.getpid():
            if self._owned_by is not None and self._owned_by[0] != os.getpid() and _runs(*self._owned_by):
                raise RuntimeError(
                    f"this buffer is a copy of the one that process {self._owned_by[0]} owns, which came here by "
                    "pickle or fork: rows given to it would never reach the other. Call handle() there, and give the "
                    "handle to this process instead of the buffer"
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

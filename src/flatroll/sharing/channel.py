"""`Channel`: messages with descriptors between two processes; `Listener`: opens channels for other processes."""

import io
import os
import pickle
import select
import socket
import stat
import struct
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from time import monotonic
from typing import Any, NoReturn, Protocol

import cloudpickle

from flatroll.sharing.block import Memory

_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux; on other systems set after receiving
_HEADER = struct.Struct("=QI")  # size of the message in bytes, number of descriptors sent with it
_CHUNK = 1 << 18
_FEW = 1 << 12  # bytes of some tens of small messages; no memory is mapped for them
_MOST_DESCRIPTORS = 64  # in one message; Linux takes 253


class Closed(EOFError):
    """The other end of a channel is closed or its process has exited."""


class Channel:
    """One end of an unnamed socket pair. Messages have a kind and a content, and arrive once, in order.

    Contents are pickled by cloudpickle, so that functions and classes of ``__main__`` and lambdas may be among them;
    `Memory` (and what holds it, as `Block`), doors and channels go along as descriptors. Nothing can connect to
    a channel, which has no name: what is unpickled comes from a process that this one, or its parent, started.

    Sending never waits for a receiver that waits to send: while the socket is full, what comes in is read.

    Args:
        descriptor: of a connected socket, which belongs to the channel from here on; see `pair`.

    >>> here, there = Channel.pair()
    >>> here.send("greeting", {"to": "you"})
    >>> there.receive("greeting")
    {'to': 'you'}
    >>> here.close()
    >>> there.receive("greeting")
    Traceback (most recent call last):
    ...
    flatroll.sharing.channel.Closed: the other end of the channel is closed
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptors: deque[int] = deque()  # received with the bytes
        self._socket = _Socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._bytes = bytearray()  # received, but not yet a whole message
        self._messages: deque[tuple[str, Any]] = deque()
        self._ended = False

    @staticmethod
    def pair() -> "tuple[Channel, Channel]":
        """Return two connected ends."""
        one, other = socket.socketpair()
        return Channel(one.detach()), Channel(other.detach())

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message.

        Raises:
            Closed: the other end has closed.
            TypeError, pickle.PicklingError, …: the content cannot be pickled; nothing is sent.
        """
        if type(content) is tuple and all(type(part) is int for part in content):
            data = pickle.dumps((kind, content))  # a fifth of the cost of cloudpickle
            self._write(memoryview(_HEADER.pack(len(data), 0) + data), [])
            return

        written = _Message(_HEADER.size)
        pickler = MessagePickler(written)
        pickler.dump((kind, content))
        message = memoryview(written)
        descriptors = [passed.fileno() for passed in pickler.passed]
        if len(descriptors) > _MOST_DESCRIPTORS:
            raise ValueError(
                f"a message carries at most {_MOST_DESCRIPTORS} descriptors, got {len(descriptors)}"
            )

        _HEADER.pack_into(message, 0, len(message) - _HEADER.size, len(descriptors))
        self._write(message, descriptors)

    def _write(self, data: memoryview, descriptors: list[int]) -> None:
        """Write the bytes; the descriptors travel with the first of them."""
        while data:
            if self._socket.fileno() < 0:
                raise Closed("this channel is closed")
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], descriptors)
                else:  # plain bytes, at half the cost
                    sent = self._socket.send(data)
            except BlockingIOError:
                poll = select.poll()
                events = select.POLLOUT
                if not self._ended:
                    events |= select.POLLIN
                poll.register(self._socket, events)
                if any(event & select.POLLIN for _, event in poll.poll()):
                    self.feed()
            except (BrokenPipeError, ConnectionResetError):
                raise Closed("the other end of the channel is closed") from None
            else:
                data = data[sent:]
                descriptors = []

    def receive(self, *kinds: str, timeout: float | None = None) -> Any:
        """Wait for the next message of one of these kinds (default: any); others stay for later.

        Args:
            kinds: the kinds to take. Of several kinds, or of any, the result is ``(kind, content)``.
            timeout: seconds to wait. Default None: without end.

        Raises:
            Closed: none is there, and the other end is closed.
            TimeoutError: none came in time.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while (message := self.pop(*kinds)) is None:
            if self._ended:
                raise Closed("the other end of the channel is closed")
            left = None if deadline is None else deadline - monotonic()
            if not self.wait(left):
                raise TimeoutError(f"no message of kind {kinds} came within {timeout} s")
            self.feed()

        if len(kinds) == 1:
            return message[1]
        return message

    def pop(self, *kinds: str) -> tuple[str, Any] | None:
        """Return the next message of one of these kinds (default: any) already read; None if there is none."""
        for place, message in enumerate(self._messages):
            if not kinds or message[0] in kinds:
                del self._messages[place]
                return message
        return None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds for data or the end of the channel."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if timeout is not None:
            timeout = max(0, timeout) * 1000  # in milliseconds
        return bool(poll.poll(timeout))

    def feed(self, once: bool = False) -> None:
        """Read available data without waiting; with ``once`` by one system call, which may leave some for later."""
        size = _FEW if once else _CHUNK
        while not self._ended:
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._socket, size, _MOST_DESCRIPTORS, _CLOSE_ON_EXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
                descriptors = []
                flags = 0

            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._descriptors.extend(descriptors)
            if flags & socket.MSG_CTRUNC:
                raise OSError("a descriptor was lost: this process has too many open files (see ulimit -n)")

            if not data:
                self._ended = True
                return

            self._bytes += data
            self._take_messages()
            if once:
                return

    def _take_messages(self) -> None:
        """Unpickle complete messages."""
        while len(self._bytes) >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + size
            if len(self._bytes) < end:
                return

            data = self._bytes[_HEADER.size : end]
            del self._bytes[:end]

            descriptors = [self._descriptors.popleft() for _ in range(count)]
            if count:
                message = _Unpickler(io.BytesIO(data), descriptors).load()
            else:
                message = pickle.loads(data)
            self._messages.append(message)

    @property
    def ended(self) -> bool:
        """Whether the other end was closed when this one was last read."""
        return self._ended

    def has_messages(self) -> bool:
        """Whether an unreceived message has been read."""
        return bool(self._messages)

    def hung_up(self) -> bool:
        """Whether the other end is closed, or closed for writing, now. One system call: cheap enough for each step."""
        if not self._ended and self.wait(0):
            self.feed()
        return self._ended

    def fileno(self) -> int:
        """The descriptor, which is ready for reading when there is something to read."""
        return self._socket.fileno()

    def finish(self) -> None:
        """Shut down sending: the other end sees the channel closed, but may still send."""
        self._shut(socket.SHUT_WR)

    def close(self) -> None:
        """Close the channel, also for copies in forked processes; a second call does nothing."""
        if self._socket.fileno() >= 0:
            self._shut(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptor only: a process to which it was sent, or that was forked, keeps its own."""
        self._socket.close()
        self._ended = True

    def _shut(self, how: int) -> None:
        with suppress(OSError):  # the other end closed first
            self._socket.shutdown(how)

    def __del__(self) -> None:
        while getattr(self, "_descriptors", None):  # missing if Ctrl-C interrupted the constructor
            os.close(self._descriptors.popleft())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a channel cannot be pickled: send it through another channel")


class _Socket(socket.socket):
    """A socket that is closed without a warning when it is garbage-collected."""

    def __del__(self) -> None:
        self.close()


class Listener:
    """One end of an unnamed socket pair; whoever holds it can send the door's maker one end of a new channel.

    Each message is one datagram with one descriptor: it arrives whole or not at all, so any number of processes may
    use copies of a door at once. A copy travels in a message of a `Channel`, as an argument of
    ``multiprocessing.Process`` (every start method), and to a forked process.

    Args:
        descriptor: of a connected socket of datagrams, which belongs to the door from here on; see `pair`.

    >>> inside, outside = Listener.pair()
    >>> mine = outside.enter()  # the descriptor of a connected socket
    >>> theirs = inside.admit()
    >>> os.write(mine, b"hello"), os.read(theirs, 5)
    (5, b'hello')
    >>> os.close(mine), os.close(theirs)
    (None, None)
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)

    @staticmethod
    def pair() -> "tuple[Listener, Listener]":
        """Return the maker's end, for `admit`, and the client's end, for `enter`."""
        inside, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return Listener(inside.detach()), Listener(outside.detach())

    def enter(self) -> int:
        """Make a connected pair of sockets, send one end through the door, and return the descriptor of the other.

        Raises:
            ConnectionError: the maker's end is closed.
        """
        mine, theirs = socket.socketpair()
        with mine, theirs:
            try:
                socket.send_fds(self._socket, [b"."], [theirs.fileno()])
            except OSError as error:  # refused, reset, broken pipe, closed here
                raise ConnectionError(f"the process that opened the door is gone ({error})") from None
            return mine.detach()

    def admit(self) -> int | None:
        """Wait for a socket to come through the door, and return its descriptor; None if anything else comes, or the
        door is closed."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 16, 1, _CLOSE_ON_EXEC)
        except OSError:
            return None

        for descriptor in descriptors:  # at most one: the buffer has no room for more
            os.set_inheritable(descriptor, False)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        return None

    def fileno(self) -> int:
        """Return the descriptor; ready for reading if a process connects or the door was closed."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Close the door, also for copies in forked processes; wakes a waiting `admit`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close this process's descriptor only."""
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Otherwise DupFd would open a named listening socket until the descriptor is fetched.
        if get_spawning_popen() is None:
            raise TypeError(
                "a handle cannot be pickled to a file or string: pass it to a process as an argument of "
                "multiprocessing.Process(args=...), or send it through a Channel"
            )
        return _rebuild_door, (DupFd(self.fileno()),)


def _rebuild_door(duplicate: Any) -> Listener:
    return Listener(duplicate.detach())


class _Message(bytearray):
    """Bytes that a pickler appends to.

    From Python 3.13 on, an io.BytesIO prints a BufferError if the garbage collector frees it before a view of it.
    """

    __slots__ = ()
    write = bytearray.extend


class MessagePickler(cloudpickle.Pickler):
    """Replaces objects with descriptors in the pickle and lists them."""

    def __init__(self, file: io.BytesIO | _Message) -> None:
        super().__init__(file)
        self.passed: list[Memory | Channel | Listener] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if type(obj) not in (Memory, Channel, Listener):
            return None

        for place, known in enumerate(self.passed):
            if known is obj:
                return type(obj).__name__, place
        self.passed.append(obj)
        return type(obj).__name__, len(self.passed) - 1


_OPENED: dict[str, Callable[[int], Memory | Channel | Listener]] = {
    "Memory": Memory.from_descriptor,
    "Channel": Channel,
    "Listener": Listener,
}


class _Unpickler(pickle.Unpickler):
    """Restores the objects that `MessagePickler` replaced."""

    def __init__(self, file: io.BytesIO, descriptors: list[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors
        self._made: dict[int, Memory | Channel | Listener] = {}

    def persistent_load(self, pid: tuple[str, int]) -> Memory | Channel | Listener:
        name, place = pid
        if place not in self._made:
            descriptor = self._descriptors[place]
            self._made[place] = _OPENED[name](descriptor)
        return self._made[place]


class Forgets(Protocol):
    """Something with descriptors that belong to one process."""

    def forget(self) -> None:
        """Close this process's copies of the descriptors; those of the other process stay open."""


def forget_in_children(holder: Forgets) -> None:
    """Call ``holder.forget()`` in each process forked from now on, as long as ``holder`` lives.

    Without this a forked process, which has copies of all descriptors, keeps a socket open whose owner was killed: the
    other end would see no end of it.
    """
    _holders().add(holder)


@cache
def _holders() -> "weakref.WeakSet[Any]":
    """All holders of this process, for whom one function runs after a fork."""
    holders: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget() -> None:
        for holder in list(holders):
            holder.forget()

    os.register_at_fork(after_in_child=forget)
    return holders

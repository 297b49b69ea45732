"""`Door`: the way of any process that has it to a channel with the one process that made it."""

import os
import socket
import stat
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux; elsewhere set after they came


class Door:
    """One end of an unnamed pair of sockets; who has it hands its maker one end of a new channel.

    Each message is one datagram with one descriptor: it arrives whole or not at all, so any number of processes may
    use copies of a door at once. A copy travels in a message of a `Channel`, as an argument of
    ``multiprocessing.Process`` (every start method), and to a forked process.

    Args:
        descriptor: of a connected socket of datagrams, which belongs to the door from here on; see `pair`.

    >>> inside, outside = Door.pair()
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
    def pair() -> "tuple[Door, Door]":
        """The maker's end, for `admit`, and the end to give away, for `enter`."""
        inside, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return Door(inside.detach()), Door(outside.detach())

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
                raise ConnectionError(f"the maker of the door is gone ({error})") from None
            return mine.detach()

    def admit(self) -> int | None:
        """Wait for what comes through the door: the descriptor of a socket; None if it is anything else, or the door is
        closed."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 16, 1, CLOSE_ON_EXEC)
        except OSError:
            return None
        for descriptor in descriptors:  # one at most: there is room for no more
            os.set_inheritable(descriptor, False)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        return None

    def fileno(self) -> int:
        """The descriptor; ready for reading when somebody enters, and when the door was closed."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Let nobody in any more, for copies of this end in forked processes, too; who waits in `admit` wakes up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close this process's descriptor only."""
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere DupFd would open a named socket that listens until somebody fetches the descriptor.
        if get_spawning_popen() is None:
            raise TypeError(
                "a handle has no name that a pickle could hold: give it to a process as an argument of "
                "multiprocessing.Process(args=...), or send it through a Channel"
            )
        return _arrived, (DupFd(self.fileno()),)


def _arrived(duplicate: Any) -> Door:
    return Door(duplicate.detach())

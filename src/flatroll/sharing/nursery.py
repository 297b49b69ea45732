"""`Nursery` starts workers from a prepared process; `Worker` is the parent's view of one."""

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from itertools import count
from multiprocessing.connection import wait as wait_for_any
from pickle import PickleError
from time import monotonic
from typing import Any, Literal

from flatroll.sharing.channel import Channel, Closed, MessagePickler
from flatroll.sharing.helper import BROKEN, ENDED, KILL, READY, START, STARTED, kill_group
from flatroll.sharing.worker import FAILED, RUN, WorkerTraceback

#: The helper's interpreter. The libraries of linear algebra read these names when they are loaded, and would start
#: threads, which a fork loses.
HELPER_PROGRAM = """
import os, sys
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.putenv(name, sys.argv[1])
descriptor, parent, fork, preloaded = map(int, sys.argv[2:6])
preload, sys.path[:] = sys.argv[6 : 6 + preloaded], sys.argv[6 + preloaded :]
from flatroll.sharing.helper import main
main(descriptor, parent, bool(fork), preload)
"""


class WorkerDied(RuntimeError):
    """A worker's process ended without a word: it was killed, or crashed."""


class Nursery:
    """Starts workers quickly and leaves none behind.

    A helper process imports ``preload`` once, with a single thread and CUDA untouched, and forks each worker from
    itself: a fork of this process would copy locks that its threads hold and a CUDA context that cannot work. The first
    worker waits for these imports, each further one takes some milliseconds.

    Workers end with this process, however it ends: the helper kills them when its channel is closed, or when this
    process is gone. Each worker has a process group of its own: Ctrl-C reaches this process only, and the children that
    a worker has go with it. One thread at a time may use a nursery and its workers.

    Args:
        start_method: ``"fork"`` as said, or ``"spawn"``: each worker is a fresh interpreter, for what cannot be
            forked. Default None: fork on Linux, spawn elsewhere, where system libraries may not be used after a fork.
        preload: modules to import before the forks.
        num_threads: threads that torch and the libraries of linear algebra may use in a worker. With fork the
            latter use one. Default 1.

    Raises:
        ValueError: unknown ``start_method``, or ``num_threads`` below 1.

    >>> def double(channel, number):
    ...     channel.send("result", 2 * number)
    >>> with Nursery() as nursery:
    ...     worker = nursery.start(double, number=4)
    ...     worker.receive("result")
    8
    """

    def __init__(
        self,
        start_method: Literal["fork", "spawn"] | None = None,
        *,
        preload: Iterable[str] = ("torch",),
        num_threads: int = 1,
    ) -> None:
        if start_method not in (None, "fork", "spawn"):
            raise ValueError(f'start_method is "fork", "spawn" or None, got {start_method!r}')
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        self.num_threads = num_threads
        self._helper = _Helper(self.start_method == "fork", list(preload), num_threads)
        self._workers: list[Worker] = []
        self._numbers = count()
        self._end = weakref.finalize(self, self._helper.end)

    def start(
        self, function: Callable[..., Any], /, *, name: str | None = None, **arguments: Any
    ) -> "Worker":
        """Run ``function(channel, **arguments)`` in a new worker, whose end of the channel it gets.

        Args:
            function: any function, also a lambda or one of ``__main__``.
            name: what errors call the worker. Default: "worker 0", "worker 1", ….
            arguments: anything that cloudpickle takes, `Block`, `SharedWeights` and `Channel` included.

        Raises:
            TypeError: the function or an argument cannot be pickled; the text says which.
            RuntimeError: the nursery is closed, or its preparation failed.
        """
        number = next(self._numbers)
        # "Started" is answered before anything is sent to the worker, so it reads while this process writes.
        worker = self._helper.start(number, name or f"worker {number}")
        try:
            worker.channel.send(RUN, (function, arguments, self.num_threads))
        except Closed:  # it is dead already: receive() says so
            pass
        except BaseException as error:
            worker.kill()
            parts = {"function": function, **arguments}
            culprits = [part for part, value in parts.items() if not _can_be_pickled(value)]
            if not culprits:
                raise
            raise TypeError(
                f"{' and '.join(culprits)} cannot be sent to a process, since pickling fails with: {error}. Make such "
                "things in the worker, in a function that is sent instead"
            ) from error
        self._workers.append(worker)
        return worker

    @property
    def workers(self) -> "tuple[Worker, ...]":
        """All that were started, in this order."""
        return tuple(self._workers)

    def wait(
        self,
        workers: "Iterable[Worker] | None" = None,
        timeout: float | None = None,
        also: Iterable[Any] = (),
    ) -> "list[Worker]":
        """Wait until a worker has sent something or ended, ``timeout`` seconds at most.

        Args:
            workers: those to wait for. Default: all.
            timeout: in seconds. Default None: without end.
            also: further things with a descriptor; one of them that can be read ends the wait.

        Returns:
            The workers whose next `Worker.receive` does not wait; none after ``timeout``, and perhaps none if one of
            ``also`` can be read.
        """
        waiting = self.workers if workers is None else tuple(workers)
        deadline = None if timeout is None else monotonic() + timeout
        others = list(also)
        while not (ready := self._with_news(waiting)):
            left = None if deadline is None else deadline - monotonic()
            if not waiting or (left is not None and left <= 0):
                break
            channels = [worker.channel for worker in waiting if not worker.channel.ended]
            if set(others) & set(wait_for_any([*channels, self._helper.control, *others], left)):  # type: ignore[list-item]
                return self._with_news(waiting)
        return ready

    def _with_news(self, workers: "Iterable[Worker]") -> "list[Worker]":
        """Those for which there is something to receive."""
        self._helper.feed()
        return [worker for worker in workers if worker.read_news()]

    def _running(self, workers: "Iterable[Worker]") -> "list[Worker]":
        """Those whose process is not gone."""
        self._helper.feed()
        return [worker for worker in workers if not worker.known_to_have_ended()]

    def end(self, workers: "Iterable[Worker]", timeout: float = 5.0) -> None:
        """End these workers and forget them; workers that have ended are no error.

        Each sees its channel closed, and may use the time to close its env. What is left after ``timeout`` seconds is
        killed.
        """
        if not self._helper.is_mine():
            return
        ending, deadline = list(workers), monotonic() + timeout
        for worker in ending:
            worker.channel.finish()
        left = self._running(ending)
        while left and monotonic() < deadline:
            wait_for_any([self._helper.control], max(0, deadline - monotonic()))  # type: ignore[list-item]
            left = self._running(left)
        for worker in left:
            worker.kill()
        for worker in ending:
            worker.channel.close()
            if worker in self._workers:
                self._workers.remove(worker)

    def close(self, timeout: float = 5.0) -> None:
        """End all workers as `end` does, and the process that starts them; a second call does nothing."""
        if self._end.alive:
            self.end(self.workers, timeout)
            self._end()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker:
    """A worker as its parent sees it: its ``channel``, ``name``, ``pid``, and errors that say what became of it."""

    def __init__(self, helper: "_Helper", number: int, name: str, channel: Channel) -> None:
        self.name, self.channel = name, channel
        #: Number of its process.
        self.pid = -1
        self._helper, self._number = helper, number

    @property
    def exitcode(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed it."""
        self._helper.feed()
        return self._helper.exitcodes.get(self._number)

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        self._helper.feed()
        return self.known_to_have_ended()

    def known_to_have_ended(self) -> bool:
        """Whether the helper has said so in what was read from it.

        Who asks for several workers before a wait reads once, before all of them. Reading for each would take the
        word of a worker that was asked about before, and nothing would end the wait.
        """
        return self._number in self._helper.exitcodes or self._helper.gone

    def has_news(self) -> bool:
        """Whether it has sent something that was not received, or ended."""
        self._helper.feed()
        return self.read_news()

    def read_news(self) -> bool:
        """The same by what was read from the helper, see `known_to_have_ended`."""
        ended = self.known_to_have_ended()  # asked first: what it sent before its end is then there to read
        self.channel.feed()
        return self.channel.has_messages() or ended

    def send(self, kind: str, content: Any = None) -> None:
        """Send it a message. That it is gone is no error here: the next `receive` says so."""
        with suppress(Closed):
            self.channel.send(kind, content)

    def receive(self, *kinds: str, timeout: float | None = None) -> Any:
        """Wait for its next message of these kinds, as `Channel.receive`.

        Raises:
            WorkerDied: it ended otherwise than by an error, or its function has returned. All that it sent before is
                received first.
            TimeoutError: nothing came in time.
            BaseException: what its function raised, with the traceback there as its cause.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            ended = self.has_ended()
            self.channel.feed()
            message = self.channel.pop(*(kinds and (*kinds, FAILED)))
            if message is not None and message[0] != FAILED:
                return message[1] if len(kinds) == 1 else message
            if message is not None:
                self._raise(*message[1])
            if ended:
                raise WorkerDied(f"{self.name} (pid {self.pid}) {self._how_it_ended()}")
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"{self.name} (pid {self.pid}) sent no {' or '.join(kinds)} within {timeout} s"
                )
            # Once its end of the channel is closed, only the helper can still say how it ended.
            channels = [self._helper.control] if self.channel.ended else [self.channel, self._helper.control]
            wait_for_any(channels, left)  # type: ignore[arg-type]

    def _raise(self, error: BaseException, trace: str) -> None:
        error.add_note(f"raised in {self.name} (pid {self.pid})")
        raise error from WorkerTraceback(f"\n{trace}")

    def _how_it_ended(self) -> str:
        code = self.exitcode
        if code is None:
            return "was killed, since the process that starts workers is gone"
        if code >= 0:
            return f"ended with status {code}"
        return f"was killed by signal {-code} ({signal.strsignal(-code)}: {signal.Signals(-code).name})"

    def kill(self) -> None:
        """Kill it and its children, also in the middle of a step."""
        self._helper.kill(self._number)


class _Helper:
    """The parent's end of the helper: what it says about workers, and how to end it."""

    def __init__(self, fork: bool, preload: list[str], threads: int) -> None:
        self.exitcodes: dict[int, int] = {}
        self.gone = False
        self._pids: dict[int, int] = {}  # of workers not known to have ended
        self._owner = os.getpid()
        self.control, theirs = Channel.pair()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", HELPER_PROGRAM, str(1 if fork else threads)),
                    *map(str, (theirs.fileno(), self._owner, int(fork), len(preload))),
                    *(*preload, *sys.path),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal goes to this process alone
            )
        finally:
            theirs.forget()
        self._ready = False

    def is_mine(self) -> bool:
        """Whether this process made it; False in a forked copy, which must let the workers be."""
        return os.getpid() == self._owner

    def start(self, number: int, name: str) -> Worker:
        """Have a worker forked, and wait until it is."""
        if not self._ready:
            self._receive(READY)
            self._ready = True
        ours, theirs = Channel.pair()
        worker = Worker(self, number, name, ours)
        try:
            self.control.send(START, (number, theirs))
            started = -1
            while started != number:  # one before, whose answer Ctrl-C left unread
                started, worker.pid = self._receive(STARTED)
        except Closed:
            self.gone = True
            raise self._closed() from None
        finally:
            theirs.forget()
        self._pids[number] = worker.pid
        return worker

    def _receive(self, kind: str) -> Any:
        try:
            got, content = self.control.receive(kind, BROKEN)
        except Closed:
            self.gone = True
            raise self._closed() from None
        if got == BROKEN:
            error, trace = content
            error.add_note("raised in the process that starts workers")
            raise error from WorkerTraceback(f"\n{trace}")
        return content

    def _closed(self) -> RuntimeError:
        return RuntimeError(
            "the process that starts workers is gone: it was killed, or the nursery is closed"
        )

    def feed(self) -> None:
        """Read which workers ended. With the helper all end."""
        self.control.feed()
        while message := self.control.pop(ENDED):
            number, code = message[1]
            self.exitcodes[number] = code
            self._pids.pop(number, None)
        if self.control.ended and not self.gone:
            self.gone = True
            self._kill_rest()

    def kill(self, number: int) -> None:
        """Have a worker killed; nothing if it has ended."""
        try:
            self.control.send(KILL, number)
        except Closed:
            self._kill_rest()

    def _kill_rest(self) -> None:
        """Kill what a helper that was itself killed could not."""
        if self.is_mine():
            for pid in self._pids.values():
                kill_group(pid)
            self._pids.clear()

    def end(self) -> None:
        """End the helper, which kills the workers. In a forked copy of the owner nothing happens."""
        if not self.is_mine():
            return
        self.feed()  # the last exit codes
        self.control.close()
        self.gone = True
        if not self._ready:  # it may still be importing, and has no workers
            self._process.kill()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # stopped, or the system is very slow
            self._process.kill()
            self._process.wait()
            self._kill_rest()


def _can_be_pickled(value: Any) -> bool:
    """Whether a channel would take it."""
    try:
        MessagePickler(BytesIO()).dump(value)
    except (AttributeError, PickleError, RuntimeError, TypeError, ValueError):
        return False
    return True

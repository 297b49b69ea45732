"""`Nursery` starts workers from a prepared process; `Worker` is the parent's view of one."""

import errno
import os
import resource
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
from threading import RLock
from time import monotonic
from typing import Any, Literal

from flatroll.sharing.channel import Channel, Closed, MessagePickler
from flatroll.sharing.worker import (
    BROKEN,
    ENDED,
    FAILED,
    KILL,
    RUN,
    START,
    STARTED,
    WorkerDied,
    kill_group,
)

#: The helper's interpreter. Linear algebra libraries read these variables when they are loaded, and would
#: otherwise start threads, which a fork loses. Imports may take long, and the parent may be killed meanwhile:
#: a thread watches for that (through the parent's end of the channel where the system has no process
#: descriptors) and ends before the first fork.
HELPER_PROGRAM = """
import os, select, sys, threading
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.putenv(name, sys.argv[1])
descriptor, parent, fork, preloaded = map(int, sys.argv[2:6])
preload, sys.path[:] = sys.argv[6 : 6 + preloaded], sys.argv[6 + preloaded :]
imported, done = os.pipe()
def watch():
    try:
        alive = os.pidfd_open(parent)
    except (AttributeError, OSError):
        alive = descriptor
    if os.getppid() != parent:
        os._exit(1)
    poll = select.poll()
    for each in (alive, imported):
        poll.register(each, select.POLLIN)
    if imported not in dict(poll.poll()):
        os._exit(1)
    if alive != descriptor:
        os.close(alive)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
def end_watch():
    os.write(done, b".")
    watcher.join()
    # Python's thread ends a moment before the system's, which must not be there at a fork.
    while os.path.exists(f"/proc/self/task/{watcher.native_id}"):
        os.sched_yield()
    os.close(done)
    os.close(imported)
from flatroll.sharing.worker import run_helper
run_helper(descriptor, parent, bool(fork), preload, end_watch)
"""
_OF_A_START = 8  # file descriptors needed while a worker starts, with some to spare


def need_descriptors(count: int) -> None:
    """Raise OSError if this process may not open ``count`` more files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    opened = len(os.listdir("/dev/fd"))
    if most != resource.RLIM_INFINITY and opened + count > most:
        raise OSError(
            errno.EMFILE,
            f"{count} more file descriptors are needed, but {opened} of {most} are in use: raise the limit to "
            f"{opened + count} or more with ulimit -n",
        )


class Nursery:
    """Starts workers quickly and terminates all of them at the end.

    A helper process imports ``preload`` once, with a single thread and CUDA untouched, and forks each worker from
    itself: a fork of this process would copy locks held by its threads and an unusable CUDA context. The first worker
    waits for these imports, each further one takes a few milliseconds.

    Workers end with this process, however it ends: the helper kills them when its channel is closed or this process has
    exited. Each worker has its own process group: Ctrl-C only reaches this process, and a worker's children are killed
    with it. Several threads may use a nursery, but each worker only by one thread at a time.

    Args:
        start_method: ``"fork"``, see above, or ``"spawn"``: each worker is a new interpreter, for code that cannot be
            forked. Default None: fork on Linux, spawn elsewhere, where system libraries may not be used after a fork.
        preload: modules to import before the forks.
        num_threads: threads that torch and the libraries of linear algebra may use in a worker. With fork the
            latter use one. Default 1.

    Raises:
        ValueError: unknown ``start_method``, or ``num_threads`` below 1.
        OSError: this process may open too few files.

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
            raise ValueError(f'start_method must be "fork", "spawn" or None, got {start_method!r}')
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if start_method is None:
            start_method = "fork" if sys.platform == "linux" else "spawn"

        self.start_method = start_method
        self.num_threads = num_threads
        need_descriptors(_OF_A_START)
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
            TypeError: the function or an argument cannot be pickled; the message says which.
            RuntimeError: the nursery is closed, its preparation failed, or it was made by another process.
            OSError: this process may open too few files.
        """
        need_descriptors(_OF_A_START)
        number = next(self._numbers)

        # The helper confirms the start before anything is sent to the worker, so the worker reads while this
        # process writes.
        worker = self._helper.start(number, name or f"worker {number}")
        try:
            worker.channel.send(RUN, (function, arguments, self.num_threads))
        except Closed:  # it is dead already; receive() raises
            pass
        except BaseException as error:
            worker.kill()
            parts = {"function": function, **arguments}
            culprits = [part for part, value in parts.items() if not _can_be_pickled(value)]
            if not culprits:
                raise
            raise TypeError(
                f"{' and '.join(culprits)} cannot be sent to a process, because pickling fails: {error}. Create "
                "such objects in the worker, in a function that is sent instead"
            ) from error

        self._workers.append(worker)
        return worker

    def prepare(self) -> None:
        """Wait until workers can be started; same errors as `start`, which also waits."""
        self._helper.prepare()

    @property
    def helper(self) -> "subprocess.Popen[bytes]":
        """The process that starts workers."""
        return self._helper.process

    @property
    def workers(self) -> "tuple[Worker, ...]":
        """All started workers, in order."""
        return tuple(self._workers)

    def wait(
        self,
        workers: "Iterable[Worker] | None" = None,
        timeout: float | None = None,
        also: Iterable[Any] = (),
    ) -> "list[Worker]":
        """Wait at most ``timeout`` seconds until a worker sends something or exits.

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

        while not (ready := [worker for worker in waiting if worker.has_news()]):
            left = None if deadline is None else deadline - monotonic()
            if not waiting or (left is not None and left <= 0):
                break
            sources: list[Any] = [source for worker in waiting for source in worker.sources()]
            if set(others) & set(wait_for_any([*sources, *others], left)):
                return [worker for worker in waiting if worker.has_news()]

        return ready

    def end(self, workers: "Iterable[Worker]", timeout: float = 5.0) -> None:
        """Stop these workers and drop them; workers that have exited are ignored.

        Each sees its channel closed, and may use the time to close its env. Workers that remain after ``timeout``
        seconds are killed. Does nothing in a forked copy of the owner. An interrupted call may be repeated.
        """
        if not self._helper.is_mine():
            return

        ending = list(workers)
        deadline = monotonic() + timeout

        for worker in ending:
            worker.channel.finish()
        while (left := [worker for worker in ending if not worker.has_ended()]) and monotonic() < deadline:
            wait_for_any([worker.report for worker in left], max(0, deadline - monotonic()))  # type: ignore[misc]

        for worker in left:
            worker.kill()

        for worker in ending:
            worker.channel.close()
            if worker in self._workers:
                self._workers.remove(worker)

    def close(self, timeout: float = 5.0) -> None:
        """End all workers as `end` does, and the process that starts them; a second call does nothing, or finishes
        what Ctrl-C interrupted."""
        if self._end.alive:
            self.end(self.workers, timeout)
            self._helper.end()
            self._end.detach()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker:
    """The parent's handle of a worker: its ``channel``, ``name``, ``pid`` and errors."""

    def __init__(self, helper: "_Helper", number: int, name: str, channel: Channel, report: Channel) -> None:
        self.name = name
        self.channel = channel
        #: The helper's report of the worker's exit; ready for reading once it has exited.
        self.report = report
        #: Its process id.
        self.pid = -1
        self._helper = helper
        self._number = number
        self._exitcode: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed it."""
        self.has_ended()
        return self._exitcode

    def has_ended(self) -> bool:
        """Whether its process has exited. Workers exit with the helper."""
        if self._exitcode is None and not self.report.ended:
            self.report.feed()
            if message := self.report.pop(ENDED):
                self._exitcode = message[1]
                self.report.forget()
                self._helper.forget(self._number)
            elif self.report.ended:
                self._helper.kill_what_is_left(self._number)
        return self.report.ended

    def has_unread(self) -> bool:
        """Whether a message, or its exit, was read and not yet received: `sources` may then stay silent."""
        return self.channel.has_messages() or self.report.ended

    def has_news(self) -> bool:
        """Whether it has sent something not yet received, or has exited."""
        if not self.channel.has_messages():
            self.channel.feed(once=True)
        if self.channel.has_messages() or not self.has_ended():  # each check is a system call
            return self.channel.has_messages()
        self.channel.feed()  # what it sent before it ended has arrived by now
        return True

    def sources(self) -> list[Channel]:
        """Return what becomes readable when it sends a message or ends; call it after `has_news` has returned False."""
        # Once its end of the channel is closed, only the helper can report how it ended.
        if self.channel.ended:
            return [self.report]
        return [self.channel, self.report]

    def send(self, kind: str, content: Any = None) -> None:
        """Send it a message. If it has ended, do nothing: the next `receive` raises."""
        with suppress(Closed):
            self.channel.send(kind, content)

    def receive(self, *kinds: str, timeout: float | None = None) -> Any:
        """Wait for its next message of these kinds, as `Channel.receive`.

        Raises:
            WorkerDied: it ended otherwise than by an error, as by ``sys.exit``, or its function has returned. All that
                it sent before is received first.
            TimeoutError: nothing came in time.
            Exception: what its function raised, with the traceback there as its cause; a RuntimeError with its type
                and text if it cannot be made here.
        """
        deadline = None if timeout is None else monotonic() + timeout
        ended = False
        wanted = kinds and (*kinds, FAILED)

        while True:
            message = self.channel.pop(*wanted)
            if message is None:  # only now, because each read is a system call
                ended = self.has_ended()
                self.channel.feed()
                message = self.channel.pop(*wanted)

            if message is not None:
                if message[0] == FAILED:
                    message[1].throw(f"{self.name} (pid {self.pid})")
                if len(kinds) == 1:
                    return message[1]
                return message

            if ended:
                raise WorkerDied(f"{self.name} (pid {self.pid}) {self._exit_status()}")

            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"{self.name} (pid {self.pid}) sent no {' or '.join(kinds)} within {timeout} s"
                )
            wait_for_any(self.sources(), left)  # type: ignore[arg-type]

    def _exit_status(self) -> str:
        code = self.exitcode
        if code is None:
            return "was killed, since the process that starts workers is gone"
        if code >= 0:
            return f"ended with status {code}"
        names = {each.value: f": {each.name}" for each in signal.Signals}  # real-time signals have none
        return f"was killed by signal {-code} ({signal.strsignal(-code)}{names.get(-code, '')})"

    def kill(self) -> None:
        """Kill it and its children, also in the middle of a step."""
        self._helper.kill(self._number)


class _Helper:
    """The parent's handle of the helper process, which starts and kills workers."""

    def __init__(self, fork: bool, preload: list[str], threads: int) -> None:
        self._pids: dict[int, int] = {}  # pids of workers not known to have exited
        self._owner = os.getpid()
        self._lock = RLock()  # held by the thread that writes to the helper, or waits until it is ready
        if fork:
            threads = 1
        program = (sys.executable, "-c", HELPER_PROGRAM, str(threads))

        self._control, theirs = Channel.pair()
        try:
            numbers = (theirs.fileno(), self._owner, int(fork), len(preload))
            self.process = subprocess.Popen(
                [*program, *map(str, numbers), *preload, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal reaches only this process
            )
        finally:
            theirs.forget()

        self._ready = False

    def is_mine(self) -> bool:
        """Whether this process created it; False in a forked copy, which must not touch the workers."""
        return os.getpid() == self._owner

    def prepare(self) -> None:
        """Wait until it has done its imports."""
        if not self.is_mine():
            raise RuntimeError(
                f"this nursery belongs to process {self._owner}, which made it: make another one"
            )

        with self._lock:
            while not self._ready:
                self._control.feed()
                if broken := self._control.pop(BROKEN):
                    broken[1].throw("the process that starts workers")
                if self._control.has_messages():  # READY, left unread: Ctrl-C cannot lose it
                    self._ready = True
                elif self._control.ended:
                    raise self._ended_error()
                else:
                    self._control.wait()

    def _ended_error(self) -> RuntimeError:
        return RuntimeError(
            "the process that starts workers is gone: it was killed, or the nursery is closed"
        )

    def start(self, number: int, name: str) -> Worker:
        """Request the fork of a worker, and wait for it."""
        self.prepare()
        ours, theirs = Channel.pair()
        report, reported = Channel.pair()
        worker = Worker(self, number, name, ours, report)

        try:
            with self._lock:
                self._control.send(START, (number, theirs, reported))
            for sent in (theirs, reported):
                sent.forget()
            worker.pid = report.receive(STARTED)
        except Closed:
            with self._lock:
                self._control.feed()
                if broken := self._control.pop(BROKEN):
                    broken[1].throw("the process that starts workers")
            raise self._ended_error() from None
        finally:
            for sent in (theirs, reported):
                sent.forget()

        self._pids[number] = worker.pid
        return worker

    def forget(self, number: int) -> None:
        """Record that a worker has exited."""
        self._pids.pop(number, None)

    def kill(self, number: int) -> None:
        """Request that a worker be killed; does nothing if it has exited, or in a forked copy of the owner."""
        if number in self._pids and self.is_mine():
            try:
                with self._lock:
                    self._control.send(KILL, number)
            except Closed:
                self.kill_what_is_left(number)

    def kill_what_is_left(self, number: int) -> None:
        """Kill a worker that the helper cannot kill, because it was killed itself."""
        pid = self._pids.pop(number, None)
        if pid is not None and self.is_mine():
            kill_group(pid)

    def end(self) -> None:
        """Stop the helper, which kills the workers. Does nothing in a forked copy of the owner."""
        if not self.is_mine():
            return

        self._control.close()
        if not self._ready:  # it may still be importing, and has no workers yet
            self.process.kill()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # the helper is stopped, or the system is very slow
            self.process.kill()
            self.process.wait()
            for number in list(self._pids):
                self.kill_what_is_left(number)


def _can_be_pickled(value: Any) -> bool:
    """Whether a channel would take it."""
    try:
        MessagePickler(BytesIO()).dump(value)
    except (AttributeError, PickleError, RuntimeError, TypeError, ValueError):
        return False
    return True

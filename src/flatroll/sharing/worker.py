"""What runs in other processes: the function that a parent sent and the report of how it ended; and the `Helper` that
forks workers for a `Nursery`, reports how they end, and kills what is left."""

import gc
import importlib
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from flatroll.sharing.channel import Channel, Closed

# kinds of messages between owner and worker
RUN = "run"
FAILED = "failed"
# kinds of messages to the helper
START = "start"
KILL = "kill"
# kinds of messages from the helper
READY = "ready"
STARTED = "started"
ENDED = "ended"
BROKEN = "broken"


class WorkerTraceback(Exception):
    """The traceback of an error in another process, set as the cause of the error in this one."""


class WorkerDied(RuntimeError):
    """A worker's process has ended: it was killed, crashed, or called ``sys.exit``."""


@dataclass(frozen=True)
class Failure:
    """An error raised in another process, in a form that can always be sent.

    Attributes:
        name: of the error's type.
        text: of the error.
        trace: its traceback.
        pickled: the error itself, if it can be pickled.
        ends: whether it is no ``Exception`` but ends a program, as SystemExit does.
    """

    name: str
    text: str
    trace: str
    pickled: bytes | None
    ends: bool

    @staticmethod
    def of(error: BaseException, trace: str | None = None) -> "Failure":
        """Describe an error; its own methods may fail, too.

        >>> Failure.of(ValueError("wrong action")).error()
        ValueError('wrong action')
        >>> Failure.of(SystemExit(3)).error()
        WorkerDied('ended by SystemExit: 3')
        """
        name = type(error).__name__
        ends = not isinstance(error, Exception)

        try:
            text = str(error)
        except Exception as other:  # its __str__ may raise anything
            text = f"(its text cannot be had: __str__ raised {type(other).__name__})"

        if trace is None:
            trace = "".join(format_exception(error))

        try:
            pickled = None
            if not ends:
                pickled = cloudpickle.dumps(error)
        except Exception:  # and so may its __reduce__
            pickled = None

        failure = Failure(name, text, trace, pickled, ends)
        if failure._unpickle_error() is not None:
            return failure
        return Failure(name, text, trace, None, ends)

    def _unpickle_error(self) -> Exception | None:
        """Return the error itself; None if it cannot be unpickled, for example if its class cannot be imported."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
            same = type(error).__name__ == self.name and str(error) == self.text
        except Exception:  # an import fails, __init__ takes other arguments, __str__ raises
            return None
        if same and isinstance(error, Exception):
            return error
        return None

    def error(self) -> Exception:
        """Return the error itself if this process can unpickle it, else a RuntimeError with its type and text.

        What ends a program there (SystemExit, KeyboardInterrupt, GeneratorExit) is a `WorkerDied` here.
        """
        if self.ends:
            return WorkerDied(f"ended by {self.name}: {self.text}")
        return self._unpickle_error() or RuntimeError(f"{self.name}: {self.text}")

    def throw(self, name: str) -> NoReturn:
        """Raise the error here, noted as raised in ``name``, with the traceback from there as its cause."""
        error = self.error()
        error.add_note(f"raised in {name}")
        raise error from WorkerTraceback(f"\n{self.trace}")


def run_worker(descriptor: int, starter: int) -> None:
    """Run in a fresh interpreter: the channel is ``descriptor``, and process ``starter`` started this one."""
    die_with(starter)
    os.set_inheritable(descriptor, False)
    sys.exit(run(Channel(descriptor)))


def run(channel: Channel) -> int:
    """Run the function that comes over the channel, with the channel as its first argument.

    A function that lets `Closed` out has seen that the parent closed the channel: an ordinary end. Whatever else it
    raises is reported to the parent.

    Returns:
        The exit status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C

    try:
        function, arguments, threads = channel.receive(RUN)

        torch: Any = sys.modules.get("torch")
        # Forked siblings inherit the same generator state and would all draw the same numbers.
        random.seed()
        np.random.seed()
        if torch is not None:
            torch.set_num_threads(threads)
            torch.seed()

        function(channel, **arguments)
    except Closed:
        return 0
    except BaseException as error:
        try:
            channel.send(FAILED, Failure.of(error))
        except Closed:  # the other end has closed
            return 0
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def portable_error(error: BaseException) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError with its type and text."""
    return Failure.of(error, trace="").error()


def die_with(starter: int) -> None:
    """Make the system kill this process when its parent exits (Linux only).

    Elsewhere the channel tells a worker, when it next uses it.
    """
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    if os.getppid() != starter:  # it exited before the call
        os._exit(1)


#: A worker's own interpreter. Environment variables are set below Python, before anything that reads them is loaded.
WORKER_PROGRAM = """
import sys
sys.path[:] = sys.argv[3:]
from flatroll.sharing.worker import run_worker
run_worker(int(sys.argv[1]), int(sys.argv[2]))
"""


def run_helper(
    descriptor: int, parent: int, fork: bool, preload: list[str], end_watch: Callable[[], None]
) -> None:
    """Serve the parent until its end of the channel is closed; then kill the remaining workers.

    Args:
        descriptor: of the channel to the parent.
        parent: number of its process.
        fork: whether workers are forked from this process; else each is a fresh interpreter.
        preload: modules to import before the first fork.
        end_watch: ends the thread that waits for the parent's death while this process imports.
    """
    # The parent may have blocked signals; with SIGCHLD blocked, exits of workers would go unnoticed.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # This interpreter inherited it; the interpreters of the workers must not.
    os.set_inheritable(descriptor, False)

    control = Channel(descriptor)
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    helper = Helper(control, parent, fork)
    try:
        if fork:
            for name in preload:
                importlib.import_module(name)
        end_watch()
        if fork:
            prepare_forks(preload)
        control.send(READY)
        helper.serve()
    except (Closed, SystemExit):  # the parent has exited; a signal
        pass
    except BaseException as error:
        with suppress(Closed):
            control.send(BROKEN, Failure.of(error))
    finally:
        helper.kill_all()
        # A normal exit would run the exit functions of all loaded modules.
        os._exit(0)


def prepare_forks(preload: list[str]) -> None:
    """Check that this process can still be forked after these imports."""
    threads = thread_count()
    if threads > 1:
        raise RuntimeError(
            f"{threads} threads run after {', '.join(preload)} were imported, and a fork would lose them: "
            'use start_method="spawn", or preload less'
        )

    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            f"importing {', '.join(preload)} initialized CUDA, which does not survive a fork: "
            'use start_method="spawn", or preload less'
        )

    # Freeze everything loaded so far: otherwise the garbage collector would write to these pages, which
    # copies them into each worker.
    gc.collect()
    gc.freeze()


def thread_count() -> int:
    """Number of threads of this process; if the system does not report it, of Python threads only."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir():
        return len(list(tasks.iterdir()))
    return threading.active_count()


class Helper:
    """Forks workers on request. Each is the leader of a process group, so that its own children go with it.

    Each worker's end is reported on a separate channel, so that threads of the parent that wait for different workers
    never read each other's reports.
    """

    def __init__(self, control: Channel, parent: int, fork: bool) -> None:
        self._control = control
        self._parent_pid = parent
        self._fork = fork
        self._pids: dict[int, int] = {}  # pid of each worker number
        self._reports: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

        # The end of a child writes a byte into this pair, which wakes the loop.
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

        # Another child of the parent may hold a copy of the parent's end of the channel, so that the parent's
        # death does not close it.
        self._parent = watch_death(parent)
        if self._parent is not None:
            self._selector.register(self._parent, selectors.EVENT_READ)

    def serve(self) -> None:
        """Start, kill and report until the parent is gone."""
        while os.getppid() == self._parent_pid:
            for key, _ in self._selector.select():
                if key.fileobj is self._parent:
                    return

            with suppress(BlockingIOError):
                self._wake.recv(4096)
            self._reap()
            self._control.feed()

            while message := self._control.pop():
                kind, content = message
                if kind == START:
                    self._start(*content)
                elif content in self._pids:
                    kill_group(self._pids[content])

            if self._control.ended:
                return

    def _start(self, number: int, channel: Channel, report: Channel) -> None:
        helper = os.getpid()

        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                report.forget()
                self._become_worker(channel, helper)
                status = run(channel)
            finally:
                os._exit(status)

        with suppress(ProcessLookupError, PermissionError):  # parent and child both do it
            os.setpgid(pid, pid)
        channel.forget()
        self._pids[number] = pid
        self._reports[number] = report

        with suppress(Closed):  # Ctrl-C interrupted the waiting parent
            report.send(STARTED, pid)

    def _become_worker(self, channel: Channel, helper: int) -> None:
        """Drop the helper's resources; if workers are not forked, exec a fresh interpreter."""
        signal.set_wakeup_fd(-1)
        for changed in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(changed, signal.SIG_DFL)

        if not self._fork:
            os.set_inheritable(channel.fileno(), True)
            arguments = [str(channel.fileno()), str(helper), *sys.path]
            os.execv(sys.executable, [sys.executable, "-c", WORKER_PROGRAM, *arguments])

        self._selector.close()
        self._wake.close()
        self._waker.close()
        for held in (self._control, *self._reports.values()):
            held.forget()
        if self._parent is not None:
            self._parent.close()
        die_with(helper)

    def _reap(self) -> None:
        """Report workers that ended, and kill what they leave behind."""
        for number, pid in list(self._pids.items()):
            # Checked without reaping it: until it is reaped, its pid cannot be reused.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue

            kill_group(pid)
            _, status = os.waitpid(pid, 0)
            del self._pids[number]
            with suppress(Closed):  # the parent has released the worker
                self._reports[number].send(ENDED, os.waitstatus_to_exitcode(status))
            self._reports.pop(number).forget()

    def kill_all(self) -> None:
        """Kill the workers and what they started."""
        for pid in self._pids.values():
            kill_group(pid)
        for pid in self._pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def kill_group(pid: int) -> None:
    """Kill a process and its children that are still in its group."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises it for a group of zombies
        os.killpg(pid, signal.SIGKILL)


def watch_death(pid: int) -> Any:
    """Return an object with a descriptor that is readable once the process has exited; None if not supported."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # an old kernel, a container that forbids it, or a process that has exited
            return open(os.pidfd_open(pid), "rb", buffering=0)

    select: Any = importlib.import_module("select")
    if hasattr(select, "kqueue"):
        queue = select.kqueue()
        event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        with suppress(OSError):
            queue.control([event], 0)
        return queue
    return None

"""What runs in the prepared process of a `Nursery`: it starts workers, reports how they end, and kills what is left."""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatroll.sharing.channel import Channel, Closed
from flatroll.sharing.worker import Failure, die_with, run

START, KILL = "start", "kill"  # kinds of messages to the helper
READY, STARTED, ENDED, BROKEN = "ready", "started", "ended", "broken"  # kinds of messages from it

#: A worker's own interpreter. Environment variables are set below Python, before anything that reads them is loaded.
WORKER_PROGRAM = """
import sys
sys.path[:] = sys.argv[3:]
from flatroll.sharing.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


def main(descriptor: int, parent: int, fork: bool, preload: list[str], end_watch: Callable[[], None]) -> None:
    """Serve the parent until its end of the channel is closed; then kill the workers that are left.

    Args:
        descriptor: of the channel to the parent.
        parent: number of its process.
        fork: whether workers are forked from this process; else each is a fresh interpreter.
        preload: modules to import before the first fork.
        end_watch: ends the thread that waits for the parent's death while this process imports.
    """
    # The parent may have blocked signals, and a blocked SIGCHLD would never tell that a worker ended.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # It was passed to this interpreter, and must not be passed on to those of the workers.
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
    except (Closed, SystemExit):  # the parent is gone; a signal
        pass
    except BaseException as error:
        with suppress(Closed):
            control.send(BROKEN, Failure.of(error))
    finally:
        helper.kill_all()
        # An ordinary exit would run the exit functions of whatever was loaded.
        os._exit(0)


def prepare_forks(preload: list[str]) -> None:
    """See that this process can still be forked after these imports."""
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
    # What is loaded now stays: the collector would else write into these pages and so copy them into each worker.
    gc.collect()
    gc.freeze()


def thread_count() -> int:
    """Number of threads of this process; where the system does not tell, only those of Python."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


class Helper:
    """Forks workers on request. Each is the leader of a process group, so that its own children go with it.

    What becomes of a worker is reported on a channel of its own, so that threads of the parent that wait for different
    workers never read each other's reports.
    """

    def __init__(self, control: Channel, parent: int, fork: bool) -> None:
        self._control, self._parent_pid, self._fork = control, parent, fork
        self._pids: dict[int, int] = {}  # of each worker's number
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
        # A child of the parent may hold a copy of its end of the channel, which then is not closed by its death.
        self._parent = death_of(parent)
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
        with suppress(ProcessLookupError, PermissionError):  # both do it, since either may come first
            os.setpgid(pid, pid)
        channel.forget()
        self._pids[number], self._reports[number] = pid, report
        with suppress(Closed):  # Ctrl-C came while the parent waited
            report.send(STARTED, pid)

    def _become_worker(self, channel: Channel, helper: int) -> None:
        """Let go of what is the helper's; where workers are not forked, turn into a fresh interpreter."""
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
            # Looked at before it is waited for: until then nobody else can get the number.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)
            _, status = os.waitpid(pid, 0)
            del self._pids[number]
            with suppress(Closed):  # the parent has let go of the worker
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
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of zombies
        os.killpg(pid, signal.SIGKILL)


def death_of(pid: int) -> Any:
    """Something with a descriptor that is ready to read once the process is gone; None where the system has none."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # an old kernel, a container that forbids it, or the process is gone
            return open(os.pidfd_open(pid), "rb", buffering=0)
    if hasattr(select := importlib.import_module("select"), "kqueue"):
        queue = select.kqueue()
        event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        with suppress(OSError):
            queue.control([event], 0)
        return queue
    return None

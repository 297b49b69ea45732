"""Interpreters that start in milliseconds: forked from one that has torch loaded, where a new one imports for seconds.

    done = run([sys.executable, "-c", program], timeout=100)

`Interpreter` is a `subprocess.Popen`, and `run` does what `subprocess.run` does: a program finds its own arguments,
environment, folder, descriptors, session and ``__main__``, and ends as an interpreter ends. Two servers wait for
requests, each started when it is first needed:

- ``"libraries"``: torch and tensordict are loaded, nothing else; for programs that look at what flatroll imports;
- ``"flatroll"``: forked from that one; the buffers and the collectors are loaded too.

A server is one thread, and knows nothing of the tests: what is forked is like new. What differs from a new interpreter:
modules are loaded before the program sets its environment or its filters of warnings, and torch has one thread.
Tests about those start `sys.executable` itself. So does everything where there is no Linux.
"""

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[2] / "src")

#: What each server imports.
MODULES = {
    "libraries": ("torch", "tensordict", "tensordict.nn"),
    "flatroll": ("flatroll.buffers", "flatroll.rollouts"),
}

# Of the system's headers: orphans become children of the nearest ancestor that asked for them.
SET_CHILD_SUBREAPER = 36
#: That of the servers, as it is before tests change it. Libraries of linear algebra read it when they are loaded.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
    "OMP_NUM_THREADS": "1"
}
#: Above each descriptor that a program is given.
HIGH_DESCRIPTOR = 500


# -- the requests --


@dataclass
class Program:
    """What a command line of Python runs."""

    kind: str  # "-c", "-m" or "file"
    what: str
    arguments: list[str]
    warnings: list[str]

    @classmethod
    def of(cls, command: Sequence[Any]) -> "Program | None":
        """None if it is no command of this interpreter, or has options that a running interpreter cannot take."""
        (python, *words) = map(os.fspath, command)
        if python != sys.executable:
            return None

        # As the environment says, and so for the server too: processes that are spawned are told once more.
        if words[:1] == ["-B"]:
            words = words[1:]

        filters = []
        while words[:1] == ["-W"] and words[1] in ("error", "ignore"):
            filters.append(words[1])
            words = words[2:]

        if words and words[0] in ("-c", "-m"):
            return cls(words[0], words[1], words[2:], filters)
        if words and not words[0].startswith("-"):
            return cls("file", words[0], words[1:], filters)
        return None


@dataclass
class Request:
    """All that a new interpreter takes over from the process that starts it."""

    program: Program
    parent: int
    folder: str
    environment: dict[str, str]
    descriptors: list[int]  # the numbers that those which come along have in the program
    new_session: bool


# -- the side of the tests --


class Server:
    """A process that forks interpreters, which become children of this process."""

    def __init__(self, name: str) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        (self._socket, theirs) = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))

        self._process: subprocess.Popen[Any] = starts(name)(
            [sys.executable, __file__, str(theirs.fileno()), *MODULES[name]],
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def is_mine(self) -> bool:
        """Whether this process started it; False in a forked copy, which is no ancestor of it."""
        return os.getpid() == self._owner

    def fork(self, request: Request, descriptors: list[int]) -> int:
        """Return the number of a new process, a child of this one, which runs the program."""
        with self._lock:
            set_subreaper(True)
            try:
                socket.send_fds(self._socket, [b"."], descriptors)
                self._connection.send(request)
                # The new process has a session of its own, if it is to have one; and what forked it has ended, so that
                # it is an orphan, and ours. Whichever comes first: one is its number, the other one 0.
                numbers: list[int] = [self._connection.recv() for _ in range(2)]
            finally:
                set_subreaper(False)
        return max(numbers)

    def close(self) -> None:
        """End it; forked copies of this process may hold its socket."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._socket.close()
        self._process.wait()


_SERVERS: dict[str, Server] = {}


def server(name: str) -> Server:
    """The server of this process, which may have to be started."""
    if name not in _SERVERS or not _SERVERS[name].is_mine():
        _SERVERS[name] = Server(name)
    return _SERVERS[name]


def close_servers() -> None:
    """End those of this process."""
    for name in list(_SERVERS):
        ending = _SERVERS.pop(name)
        if ending.is_mine():
            ending.close()


def starts(name: str) -> Any:
    """How a server is started: the first one as a new interpreter, the second one from the first."""
    if name == "libraries":
        return subprocess.Popen
    return OfLibraries


def set_subreaper(on: bool) -> None:
    """Let processes that lose their parent become children of this process, or no longer."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def fork_interpreter(
    program: Program,
    environment: dict[str, str],
    folder: str,
    descriptors: dict[int, int],
    new_session: bool,
    name: str = "flatroll",
) -> int:
    """Let a server fork; ``descriptors`` has the number in the program of each descriptor of this process."""
    request = Request(program, os.getpid(), folder, environment, list(descriptors), new_session)
    return server(name).fork(request, list(descriptors.values()))


class Interpreter(subprocess.Popen[Any]):
    """A `subprocess.Popen` that has the command forked, if it is one of Python that can be."""

    forks = True
    preloaded = "flatroll"

    def _execute_child(self, *arguments: Any) -> None:
        start_new: Any = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(start_new).bind(*arguments).arguments

        program = Program.of(given["args"])
        if program is None or not self.forks or sys.platform != "linux":
            start_new(*arguments)
            return

        # -1: the program gets that of this process.
        ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        descriptors = {number: number if end == -1 else end for number, end in enumerate(ends)}
        descriptors.update({number: number for number in given["pass_fds"]})

        environment = os.environ if given["env"] is None else given["env"]
        self.pid = fork_interpreter(
            program,
            {os.fspath(key): os.fspath(value) for key, value in environment.items()},
            os.path.abspath(given["cwd"] or "."),
            descriptors,
            given["start_new_session"],
            self.preloaded,
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        close_theirs: Any = self._close_pipe_fds  # type: ignore[attr-defined]
        close_theirs(*(given[pipe] for pipe in pipes))


class OfLibraries(Interpreter):
    """One that finds torch and tensordict loaded, but nothing of flatroll."""

    preloaded = "libraries"


def run(
    command: Sequence[Any],
    *,
    timeout: float = 200,
    check: bool = False,
    kind: type[Interpreter] = Interpreter,
    **options: Any,
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` with its output kept as text. After ``timeout`` seconds it ends, and its error is its stack."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with kind(command, **options) as process:
        try:
            (output, errors) = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            (output, errors) = abort(process)
        except BaseException:
            process.kill()
            raise

    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check and done.returncode:
        raise AssertionError(f"{done.args} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def abort(process: Interpreter) -> tuple[str, str]:
    """End a process that hangs; return what it printed, and in the end its stack."""
    process.send_signal(signal.SIGABRT)  # which faulthandler hears
    try:
        (output, errors) = process.communicate(timeout=20)
    except subprocess.TimeoutExpired as error:
        # It is stopped, or processes that it has started hold its pipes.
        process.kill()
        output = (error.stdout or b"").decode()
        errors = (error.stderr or b"").decode()
    return output, errors


class OfCollectors(Interpreter):
    """In place of the `subprocess.Popen` of a `flatroll.sharing.Nursery`: workers of collectors are prepared at once.

    Helpers that load nothing of flatroll start as they do for users: tests of the nursery itself look at them.
    """

    def __init__(self, command: Sequence[Any], **options: Any) -> None:
        self.forks = any(str(word).startswith("flatroll.") for word in command[3:])
        super().__init__(command, **options)


def spawn_forked(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, which starts the processes of the start method "spawn"."""
    from multiprocessing import util

    words = [os.fsdecode(word) for word in arguments]
    program = Program.of(words) if "--multiprocessing-fork" in words else None
    if program is None or sys.platform != "linux":
        return int(util.spawnv_passfds(path, arguments, descriptors))
    numbers = {number: number for number in (0, 1, 2, *descriptors)}
    return fork_interpreter(program, dict(os.environ), os.getcwd(), numbers, new_session=False)


# -- the side of the server --


def serve(channel: int, modules: list[str]) -> Request:
    """Fork for each request, until there are no more. Returns in the forked processes alone."""
    # Ctrl-C is for the tests, and for the programs: one that reaches a program before it runs waits until then. Raised
    # here, it could be lost: in a `__del__` Python prints an error, and goes on.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})
    sys.path.insert(0, SOURCE)
    for module in modules:
        importlib.import_module(module)
    sys.path.remove(SOURCE)
    sys.modules["torch"].set_num_threads(1)

    # Out of the way of the numbers that programs have for their descriptors; and no fork writes to what is there.
    high = fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    os.close(channel)
    gc.collect()
    gc.freeze()

    with socket.socket(fileno=high) as requests, Connection(os.dup(high)) as connection:
        while True:
            descriptors = socket.recv_fds(requests, 1, 100)[1]
            try:
                request: Request = connection.recv()
            except EOFError:
                os._exit(0)

            # Forked twice: where the first process ends, the second one becomes a child of the tests' process.
            between = os.fork()
            if between == 0:
                if os.fork() == 0:
                    if request.new_session:
                        os.setsid()
                    connection.send(os.getpid())
                    break
                os._exit(0)
            os.waitpid(between, 0)
            connection.send(0)
            for descriptor in descriptors:
                os.close(descriptor)

    become(request, descriptors)
    return request


def become(request: Request, descriptors: list[int]) -> None:
    """Take over what the request says, as a new interpreter would."""
    while os.getppid() != request.parent:
        time.sleep(0.0005)

    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable()

    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()

    sys.warnoptions[:] = request.program.warnings
    for action in request.program.warnings:
        warnings.simplefilter(action)  # type: ignore[arg-type]


def run_program(program: Program) -> None:
    """Run it as ``__main__``."""
    first = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.abspath(program.what))}
    extra = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # The first entry is the folder of this file; the rest is Python's own.
    sys.path[:] = [first[program.kind], *extra, *sys.path[1:]]
    importlib.invalidate_caches()

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if program.kind == "-m":
        sys.argv[:] = ["-m", *program.arguments]
        runpy.run_module(program.what, run_name="__main__", alter_sys=True)
    elif program.kind == "-c":
        sys.argv[:] = ["-c", *program.arguments]
        exec(compile(program.what, "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = [program.what, *program.arguments]
        main.__file__ = os.path.abspath(program.what)
        exec(compile(Path(program.what).read_bytes(), program.what, "exec"), vars(main))


if __name__ == "__main__":
    run_program(serve(int(sys.argv[1]), sys.argv[2:]).program)

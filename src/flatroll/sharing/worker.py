"""What runs in a worker: the function that the parent sent, and the report of how it ended."""

import os
import pickle
import random
import signal
import sys
from dataclasses import dataclass
from traceback import format_exception
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from flatroll.sharing.channel import Channel, Closed

RUN, FAILED = "run", "failed"  # kinds of messages


class WorkerTraceback(Exception):
    """Where in another process an error was raised: the cause of the error in this one."""


class WorkerDied(RuntimeError):
    """A worker's process has ended: it was killed, crashed, or called ``sys.exit``."""


@dataclass(frozen=True)
class Failure:
    """An error raised in another process, in a form that always arrives.

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
        name, ends = type(error).__name__, not isinstance(error, Exception)
        try:
            text = str(error)
        except Exception as other:  # whatever its author's __str__ raises
            text = f"(its text cannot be had: __str__ raised {type(other).__name__})"
        if trace is None:
            trace = "".join(format_exception(error))
        try:
            pickled = None if ends else cloudpickle.dumps(error)
        except Exception:  # likewise for __reduce__
            pickled = None
        failure = Failure(name, text, trace, pickled, ends)
        return failure if failure._unpickled() is not None else Failure(name, text, trace, None, ends)

    def _unpickled(self) -> Exception | None:
        """The error itself; None where it cannot be made again, as one of a class that only its process can import."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
            same = type(error).__name__ == self.name and str(error) == self.text
        except (
            Exception
        ):  # an import that fails, an __init__ that wants other arguments, a __str__ that raises
            return None
        return error if same and isinstance(error, Exception) else None

    def error(self) -> Exception:
        """The error itself if this process can make it, else a RuntimeError with its type and text.

        What ends a program there (SystemExit, KeyboardInterrupt, GeneratorExit) is a `WorkerDied` here.
        """
        if self.ends:
            return WorkerDied(f"ended by {self.name}: {self.text}")
        return self._unpickled() or RuntimeError(f"{self.name}: {self.text}")

    def throw(self, name: str) -> NoReturn:
        """Raise the error here, as raised in ``name``, with the traceback of there as its cause."""
        error = self.error()
        error.add_note(f"raised in {name}")
        raise error from WorkerTraceback(f"\n{self.trace}")


def main(descriptor: int, starter: int) -> None:
    """Run in a fresh interpreter: the channel is ``descriptor``, and process ``starter`` started this one."""
    die_with(starter)
    os.set_inheritable(descriptor, False)
    sys.exit(run(Channel(descriptor)))


def run(channel: Channel) -> int:
    """Run the function that comes over the channel, with the channel as its first argument.

    A function that lets `Closed` out has seen that the parent closed the channel: an ordinary end. Whatever else it
    raises is told to the parent.

    Returns:
        The exit status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    try:
        function, arguments, threads = channel.receive(RUN)
        torch: Any = sys.modules.get("torch")
        # Forked siblings have the same generators: without this they would all draw the same numbers.
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
        except Closed:  # nobody is there to read it
            return 0
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def portable(error: BaseException) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError with its type and text."""
    return Failure.of(error, trace="").error()


def die_with(starter: int) -> None:
    """Let the system kill this process when the one that started it is gone, where the system can (Linux).

    Elsewhere the channel tells a worker, when it next uses it.
    """
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != starter:  # it went before that
        os._exit(1)

"""What runs in a worker: the function that the parent sent, and the report of how it ended."""

import os
import pickle
import random
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np

from flatroll.sharing.channel import Channel, Closed

RUN, FAILED = "run", "failed"  # kinds of messages


class WorkerTraceback(Exception):
    """Where in another process an error was raised: the cause of the error in this one."""


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
        failure = (portable(error), "".join(traceback.format_exception(error)))
        try:
            channel.send(FAILED, failure)
        except Closed:  # nobody is there to read it
            return 0
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, else a RuntimeError with its type and text."""
    with suppress(
        AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError, pickle.PickleError
    ):
        again = pickle.loads(cloudpickle.dumps(error))
        if type(again) is type(error) and str(again) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


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

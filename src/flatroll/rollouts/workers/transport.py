"""`Transport`: starts workers, sends them requests and receives their windows.

The owner's logic (`Team`, `Gatherer`, `Delivery`) works over any transport. There are two: local processes
(`flatroll.rollouts.workers.processes`) and actors of a Ray cluster (`flatroll.rollouts.workers.on_ray.actors`).

On the worker's side `flatroll.rollouts.workers.worker.WindowMaker` creates the collector and its windows, with
`Signals` for cuts and heartbeats. It seeds the process's torch, NumPy and `random`, so use one per process.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# message kinds, see Link.receive
READY = "ready"
WINDOW = "window"
END = "end"
WITHOUT_END = -1  # no row limit


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker needs to create its collector.

    Attributes:
        place: index of the worker. ``writer`` is its number in trajectory ids, ``seed`` the seed of env, random
            actions, torch, NumPy and `random`.
        create_env_fn, frames_per_batch, trajs_per_batch, init_random_frames: of `Collector`.
        policy: the owner's policy; `Transport.start` sends a copy, unless ``policy_factory`` creates it in the
            worker.
        sync: whether to make one window per request, with the weights at its start; else windows are made
            continuously, with the newest weights.
        slots: windows that the worker may have finished or in progress, if not ``sync``.
        timed: whether `Link.quiet` will be called.
        options: further arguments of `Collector`.
    """

    place: int
    create_env_fn: Any
    policy: Any
    policy_factory: Any
    frames_per_batch: int
    trajs_per_batch: int | None
    sync: bool
    slots: int
    timed: bool
    options: Mapping[str, Any]
    writer: int = 0
    seed: int = 0
    init_random_frames: int = 0

    def collector_arguments(self) -> dict[str, Any]:
        """Return the arguments of the worker's collector, beside its env and policy and the options."""
        return {
            "frames_per_batch": self.frames_per_batch,
            "trajs_per_batch": self.trajs_per_batch,
            "init_random_frames": self.init_random_frames,
            "seed": self.seed,
            "writer": self.writer,
        }

    def without_parts(self) -> "Job":
        """Return the job without the user's objects, which transports send separately."""
        return replace(self, create_env_fn=None, policy=None, policy_factory=None, options={})


class Ready(NamedTuple):
    """Sent when a worker has created its collector.

    Attributes:
        returns: key of episodes' returns, if the env counts them.
        row_bytes: bytes per row according to the collector's spec.
        scaled: whether a running normalisation scales the env's observations.
    """

    returns: Any
    row_bytes: int
    scaled: bool = False


class Note(NamedTuple):
    """Statistics sent with a window or, without rows, at the end.

    Attributes:
        frames: rows that the worker has collected so far.
        rows: rows of this window before ``postproc``.
        shape: batch size of the worker's batch.
        held: rows collected for later windows.
        waited: total seconds it has waited for a request or a free slot.
        versions: oldest, mean and newest policy version in this window's steps; None without a step.
    """

    frames: int
    rows: int
    shape: tuple[int, ...]
    held: int
    waited: float
    versions: tuple[int, float, int] | None


class WorkerWindow(Protocol):
    """A received window of rows.

    Attributes:
        tables: columns ``[N, *S]`` by key: the rows, and the *final* if there is one, see `Collector.final`.
        note: see `Note`.
        owned: whether the columns own their memory, so that nobody overwrites it later.
    """

    tables: list[dict[Any, Tensor]]
    note: Note
    owned: bool

    def keep(self) -> None:
        """Copy the columns, so that they are owned and the worker can reuse its memory."""

    def release(self) -> None:
        """Declare that the columns are no longer used."""


@dataclass
class LocalWindow:
    """A window in this process's memory."""

    tables: list[dict[Any, Tensor]]
    note: Note
    owned: bool = True

    def keep(self) -> None:
        """Do nothing: the columns are owned already."""

    def release(self) -> None:
        """Drop the columns."""
        self.tables = []


@dataclass
class RowsElsewhere(LocalWindow):
    """A window whose rows a buffer in another process fetches by ``reference``."""

    reference: Any = field(kw_only=True)


class Link(Protocol):
    """The owner's connection to a worker.

    Attributes:
        name: its name in notes and logs; ``str(link)`` may add details such as the process id.
    """

    name: str

    def ask(self, rows: int, limit: int) -> None:
        """Request one window of ``rows`` rows if ``Job.sync``, else windows until the next `ask`.

        The worker stops once it has collected ``limit`` rows in total (`WITHOUT_END`: no limit). If it is dead, this
        does nothing; `receive` raises the error.
        """

    def go_on(self, windows: int) -> None:
        """Allow up to ``windows`` more windows; called before each wait if not ``Job.sync``.

        Does nothing in a transport whose workers continue whenever `Window.release` frees a slot.
        """

    def cut(self) -> None:
        """Make the worker deliver the current window with the rows collected so far."""

    def receive(self) -> tuple[str, Any] | None:
        """Return the next message without waiting; None if there is none.

        Messages are ``(READY, Ready)``, ``(WINDOW, Window)``, and ``(END, Note)`` once the limit of the last `ask` is
        reached. If an asynchronous worker reached the limit of an earlier `ask` when the next one arrived, that END
        is left out.

        It may be called again after an exception such as KeyboardInterrupt, which has lost nothing.

        Raises:
            WorkerDied: the worker died, as after `kill`.
            Exception: the worker's error, with a `WorkerTraceback` as its cause (`flatroll.sharing.worker.Failure`
                carries and raises it); without that cause the owner treats it as its own error.
        """

    def quiet(self, since: float, limit: float) -> float:
        """Return the seconds since the worker's current step began, or since ``since`` if no step is running.

        ``since`` is a time of ``time.monotonic``. The result may be inexact, as long as it is right whether it is at
        least ``limit``.
        """
        ...

    def not_ready(self, limit: float) -> str:
        """Return the error message for a worker that was not ready within ``limit`` seconds."""
        ...

    def kill(self) -> None:
        """Kill the worker at once, even in the middle of a step; `receive` then raises `WorkerDied`."""


class Transport(Protocol):
    """Starts workers, sends them weights and receives windows. The life of a worker::

        transport.share(weights)
        link = transport.start(job)      # comes back at once
        transport.wait([link], None)     # until link.receive() gives (READY, ...)
        link.ask(rows, limit)
        transport.wait([link], None)     # until link.receive() gives (WINDOW, ...)
        window.release()
        transport.end([link], timeout)
        transport.close()

    Attributes:
        version: version of the last published weights; the owner sets it when it loads a state.
        makes_policies: whether ``policy_factory`` is called in workers only, so that the initial weights are unknown.
        writers_of_each: writer numbers that each worker uses; more than 1 if it has workers itself.
    """

    makes_policies: bool
    writers_of_each: int

    @property
    def version(self) -> int: ...

    @version.setter
    def version(self, version: int) -> None: ...

    def share(self, state: Mapping[str, Tensor]) -> None:
        """Set the initial weights before any worker starts."""

    def publish(self, state: Mapping[str, Tensor]) -> None:
        """Publish these weights as the next version; ValueError if names, shapes or dtypes have changed."""

    def fetch_into(self, state: Mapping[str, Tensor]) -> None:
        """Copy the last published weights into these tensors."""

    def start(self, job: Job) -> Link:
        """Start a worker; `Link.receive` raises the errors of its collector."""
        ...

    def wait(self, links: Sequence[Any], timeout: float | None, wake: "Wake | None" = None) -> None:
        """Wait for a message or death of one of these workers, for ``wake``, or for ``timeout`` seconds.

        No message is read, so an interrupt loses nothing. It may return early.
        """

    def end(self, links: Sequence[Any], timeout: float) -> None:
        """Stop these workers, which have ``timeout`` seconds to end a step and close their envs.

        A second call does nothing, or finishes an interrupted one.
        """

    def close(self) -> None:
        """Close what the transport itself has started; a second call does nothing."""


class Wake:
    """Like a ``threading.Event``, with a file descriptor to wait for.

    >>> wake = Wake()
    >>> wake.set()
    >>> wake.is_set()
    True
    """

    _read = _write = -1

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._set = False

    def set(self) -> None:
        """Make `fileno` ready for reading, permanently."""
        if not self._set:
            self._set = True
            os.write(self._write, b".")

    def is_set(self) -> bool:
        """Return whether `set` was called."""
        return self._set

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._read

    def __del__(self) -> None:
        if self._read >= 0:  # Ctrl-C may come before the descriptors exist
            os.close(self._read)
            os.close(self._write)

"""`Transport`: how the owner of workers starts them, asks them for windows, and hears what comes.

One owner logic (`Team`, `Gatherer`, `Delivery`) works over any transport. There are two here: processes of this machine
(`flatroll.rollouts.workers.processes`) and actors of a Ray cluster (`flatroll.rollouts.workers.actors`).

The worker's side is `flatroll.rollouts.workers.worker.WindowMaker`: it makes the collector and its windows, with
`Signals` for cuts and heartbeats. It seeds torch, NumPy and `random`, so each process has one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

READY, WINDOW, END = "ready", "window", "end"  # kinds of messages, see Link.receive
WITHOUT_END = -1  # a limit that is none


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker needs to make its collector.

    Attributes:
        place: i of W; ``writer`` is its number in trajectory ids, ``seed`` that of env, random actions, torch, NumPy
            and `random`.
        create_env_fn, frames_per_batch, trajs_per_batch, init_random_frames: of `Collector`.
        policy: the owner's; `Transport.start` gives the worker a copy, unless ``policy_factory`` makes one there.
        sync: whether a window is made for each request, with the weights that are there when it begins; else window
            after window, with the newest weights that the transport can bring.
        slots: windows that the worker may have ready or at work, if not ``sync``.
        timed: whether `Link.quiet` will be asked for.
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

    def without_parts(self) -> "Job":
        """The job without what users wrote, which transports send one by one, so that errors can name it."""
        return replace(self, create_env_fn=None, policy=None, policy_factory=None, options={})


class Ready(NamedTuple):
    """What comes when a worker has made its collector.

    Attributes:
        returns: key of episodes' returns, if the env counts them.
        row_bytes: bytes of a row as far as the collector's spec says.
        scaled: whether a running normalisation scales the env's observations.
    """

    returns: Any
    row_bytes: int
    scaled: bool = False


class Note(NamedTuple):
    """What comes with a window, or, without rows, with the word that there will be no more.

    Attributes:
        frames: rows that the worker has collected so far.
        rows: rows of this window as they were collected, before ``postproc``.
        shape: batch size of what the worker yielded.
        held: rows that it has collected and keeps for later windows.
        waited: seconds that it has waited so far, for a request or for a free slot.
        versions: of the policy in the steps made for this window: oldest, mean and newest; None if none was made.
    """

    frames: int
    rows: int
    shape: tuple[int, ...]
    held: int
    waited: float
    versions: tuple[int, float, int] | None


class Window(Protocol):
    """Rows that have come.

    Attributes:
        tables: columns ``[N, *S]`` by key: the rows, and those of *final* if there is one, see `Collector.final`.
        note: see `Note`.
        owned: whether the columns are memory of their own, which nobody writes to later.
    """

    tables: list[dict[Any, Tensor]]
    note: Note
    owned: bool

    def keep(self) -> None:
        """Let the worker go on as if the window had been used: its columns become owned."""

    def release(self) -> None:
        """Say that the columns are used no more."""


@dataclass
class Rows:
    """A window in memory of this process's own."""

    tables: list[dict[Any, Tensor]]
    note: Note
    owned: bool = True

    def keep(self) -> None:
        """They stay anyway."""

    def release(self) -> None:
        """Forget the columns."""
        self.tables = []


@dataclass
class RowsElsewhere(Rows):
    """A window whose rows stay where a buffer in another process can fetch them, by ``reference``."""

    reference: Any = field(kw_only=True)


class Link(Protocol):
    """One worker as its owner sees it.

    Attributes:
        name: what notes and the log call it; ``str(link)`` may say more, such as the number of its process.
    """

    name: str

    def ask(self, rows: int, limit: int) -> None:
        """Ask for windows of ``rows`` rows until it has collected ``limit`` in all (`WITHOUT_END`: on and on): for one
        window with ``Job.sync``, else until something else is asked for. A worker that is gone is no error here."""

    def go_on(self, windows: int) -> None:
        """Let it make up to ``windows`` further windows, where ``Job.sync`` is False; called before each wait. A
        transport whose workers go on by themselves, as `Window.release` frees slots, does nothing here."""

    def cut(self) -> None:
        """Let it deliver the window at work with the rows that it has."""

    def receive(self) -> tuple[str, Any] | None:
        """What has come next, without waiting: ``(READY, Ready)``, ``(WINDOW, Window)``, ``(END, Note)`` once all up to
        the limit of the last `ask` is collected; None if there is nothing. An asynchronous worker may have ended an
        earlier `ask` when the next one came: that end is left out.

        It may be called again after an exception such as KeyboardInterrupt, which has lost nothing.

        Raises:
            WorkerDied: the worker is gone, as after `kill`.
            Exception: what it raised, with a `WorkerTraceback` as its cause (`flatroll.sharing.worker.Failure` carries
                and raises it): without that cause the owner takes an error for its own.
        """

    def quiet(self, since: float, limit: float) -> float:
        """Seconds since its step under way began, or since the time ``since`` (of ``time.monotonic``) if it makes none.
        Only whether they are ``limit`` or more needs to be right."""
        ...

    def not_ready(self, limit: float) -> str:
        """The text of the error that it was not ready within ``limit`` seconds."""
        ...

    def kill(self) -> None:
        """End it at once, also in the middle of a step; `receive` then raises `WorkerDied`."""


class Transport(Protocol):
    """Starts workers, and brings weights to them and windows back. A worker starts, answers and ends in this order::

        transport.share(weights)
        link = transport.start(job)      # comes back at once
        transport.wait([link], None)     # until link.receive() gives (READY, ...)
        link.ask(rows, limit)
        transport.wait([link], None)     # until link.receive() gives (WINDOW, ...)
        window.release()
        transport.end([link], timeout)
        transport.close()

    Attributes:
        version: number of the policy's weights that were published last; the owner sets it when it loads a state.
        makes_policies: whether a ``policy_factory`` is called in workers only, so that nobody knows the first weights.
        writers_of_each: numbers in trajectory ids that each worker takes: more than 1 if it has workers itself.
    """

    makes_policies: bool
    writers_of_each: int

    @property
    def version(self) -> int: ...

    @version.setter
    def version(self, version: int) -> None: ...

    def share(self, state: Mapping[str, Tensor]) -> None:
        """Begin with these weights, before any worker is started."""

    def publish(self, state: Mapping[str, Tensor]) -> None:
        """Make these weights the next version; ValueError if names, shapes or dtypes have changed."""

    def fetch_into(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights that were published last into these tensors."""

    def start(self, job: Job) -> Link:
        """Start a worker. Errors of its collector come by `Link.receive`."""
        ...

    def wait(self, links: Sequence[Any], timeout: float | None, wake: "Wake | None" = None) -> None:
        """Wait until one of these workers has sent something or ended, or ``wake`` is set, ``timeout`` seconds at most.
        Nothing is taken, so that an interrupt loses nothing; it may return early."""

    def end(self, links: Sequence[Any], timeout: float) -> None:
        """End these workers, which may take ``timeout`` seconds to end a step and close their envs; a second call does
        nothing, or finishes what was interrupted."""

    def close(self) -> None:
        """End what the transport itself has started; a second call does nothing."""


class Wake:
    """Like a ``threading.Event``, with a descriptor that others than threads' locks can wait for.

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
        """Let `fileno` be ready for reading, for good."""
        if not self._set:
            self._set = True
            os.write(self._write, b".")

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def fileno(self) -> int:
        """The descriptor."""
        return self._read

    def __del__(self) -> None:
        if self._read >= 0:  # Ctrl-C may come before
            os.close(self._read)
            os.close(self._write)

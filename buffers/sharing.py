"""How a replay buffer goes to other processes: its locks, its copies, and what of it others can see."""

import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.prefetcher import Prefetcher
from flatroll.buffers.storages.base import Storage

#: Attributes that are made anew in another process and in a copy.
_PER_PROCESS = ("_lock", "_write_lock", "_prefetcher", "_process")


class Part(Protocol):
    """A sampler or a writer, as far as sharing goes."""

    @property
    def stateful(self) -> bool:
        """Whether it remembers something of the rows."""
        ...


class Shareable:
    """The part of `ReplayBuffer` that makes its locks, in every process and copy anew."""

    storage: Storage
    prefetch: int | None
    _ring: Ring

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # torch's pickler for other processes would share the memory of the tensors, but not the counters.
        ForkingPickler.register(cls, _by_value)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # bookkeeping: held for microseconds
        self._write_lock = (
            self.storage.write_lock()
        )  # one writer at a time, of all processes; taken before _lock
        self._prefetcher: Prefetcher[Any] | None = Prefetcher(self.prefetch) if self.prefetch else None
        self._process = os.getpid()

    def _after_fork(self) -> None:
        """Be ready in this process, to which the buffer may have come by ``fork``; RuntimeError if it cannot be."""
        if self._process != os.getpid():
            self.storage.enter_process()
            self._make_locks()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()
        self.storage.reattach(self._ring)


def unshareable_part(ring: Ring, storage: Storage, *parts: Part) -> str | None:
    """Name of the component whose state other processes cannot see (for the error); None if the buffer can be shared.

    Only the rows in files and the counters of a plain ring can be put where other processes see them.
    """
    if isinstance(ring, TrajectoryIndex):
        return "a trajectory index"
    stateful = [type(part).__name__ for part in parts if part.stateful]
    if type(ring) is not Ring:
        stateful.append(type(ring).__name__)
    name = next(iter(stateful), storage.own_column)
    return None if name is None else f"a {name}"


def _by_value(buffer: Shareable) -> tuple[Any, ...]:
    return pickle.loads, (pickle.dumps(buffer),)

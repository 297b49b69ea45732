"""Pickles and forks replay buffers: each process and each copy gets locks of its own."""

import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.prefetcher import Prefetcher
from flatroll.buffers.storages.base import Storage

#: Attributes that are made anew in another process and in a copy.
_PER_PROCESS = ("_lock", "_write_lock", "_prefetcher", "_process")


class Shareable:
    """The part of `ReplayBuffer` that creates new locks in each process and in each copy."""

    storage: Storage
    prefetch: int | None
    _ring: Ring

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # torch's pickler for other processes would share the memory of the tensors, but not the counters.
        ForkingPickler.register(cls, lambda buffer: (pickle.loads, (pickle.dumps(buffer),)))

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # bookkeeping: held for microseconds
        # One writer at a time, of all processes; taken before _lock, never after it.
        self._write_lock = self.storage.write_lock()
        self._prefetcher: Prefetcher[Any] | None = Prefetcher(self.prefetch) if self.prefetch else None
        self._process = os.getpid()

    def note_waiting(self, rows: int) -> None:
        """Note how many rows a collector keeps back until their trajectories end, for the error of an empty buffer."""
        self._ring.waiting = rows

    def _after_fork(self) -> None:
        """Be ready in this process, to which the buffer may have come by ``fork``; RuntimeError if it cannot be."""
        if self._process != os.getpid():
            # A lock may be held here by a thread that did not come along; nobody would release it.
            self.storage.enter_process()
            self._make_locks()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()
        self.storage.reattach(self._ring)

"""Pickles, copies and forks replay buffers: each process and each copy gets locks of its own."""

import copy
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch
from torch.utils.data import get_worker_info

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.prefetcher import Prefetcher
from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.storages.storage import Storage

#: Attributes that are made anew in another process and in a copy.
_PER_PROCESS = ("_lock", "_write_lock", "_prefetcher", "_process", "_failure", "_step_writers", "_owner")
#: Attributes that a write changes, one after the other.
_WRITTEN = ("storage", "sampler", "writer", "_ring", "_keys", "_started")

#: The buffer that began to use a sampler or a writer last.
_USERS: weakref.WeakKeyDictionary[Any, "weakref.ref[Shareable]"] = weakref.WeakKeyDictionary()


class Shareable:
    """The part of `ReplayBuffer` that creates new locks in each process and in each copy."""

    storage: Storage
    sampler: Sampler
    writer: Any
    prefetch: int | None
    generator: torch.Generator | None
    _ring: Ring
    _started: bool
    _transforms: list[Any]

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
        self._failure: Callable[[], Any] | None = (
            None  # raises what ended a thread that writes into the buffer
        )
        self._step_writers: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose steps may wait
        self.storage.attach(self)

    def note_waiting(self, rows: int) -> None:
        """Note how many rows a collector keeps back until their trajectories end, for the error of an empty buffer."""
        self._ring.waiting = rows

    @property
    def copies_rows(self) -> bool:
        """Whether `extend` will keep nothing of its batch but copies, so that its memory may be written again."""
        storage = self.storage
        plain = not self._transforms and not self.writer.stateful
        return self._started and storage.copies_rows and storage.own_column is None and plain

    def note_failure(self, tell: Callable[[], Any]) -> None:
        """Let the next use of the buffer call this function, which raises what ended a thread that filled it."""
        self._failure = tell
        self._process = -os.getpid()  # so that it is looked at, at no cost for all other uses

    def _own_parts(self) -> None:
        """ValueError if the sampler or the writer keeps state about the rows of another buffer, which is alive."""
        for part in (self.sampler, self.writer):
            user = _USERS.get(part, lambda: None)()
            if part.stateful and user is not None and user is not self:
                raise ValueError(
                    f"the {type(part).__name__} remembers rows of another buffer already: make one for each buffer"
                )
        _USERS.update({part: weakref.ref(self) for part in (self.sampler, self.writer)})

    def _after_fork(self) -> None:
        """Be ready in this process, to which the buffer may have come by ``fork`` or by pickle; RuntimeError if it
        cannot be."""
        process = os.getpid()
        if self._process == process:
            return
        if self._process != -process:
            # A lock may be held here by a thread that did not come along; nobody would release it.
            self.storage.enter_process()
            self._make_locks()
        self._process = process
        reseed_in_worker(self.generator)
        tell, self._failure = self._failure, None
        if tell is not None:
            tell()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: the rows of one moment, although other threads write meanwhile.

        The steps that wait in step writers are stored first. A storage whose rows other processes share is not copied:
        the pickle names its files.
        """
        self._after_fork()
        self._store_steps()
        state = {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}
        if self.storage.by_reference:
            return state
        # pickle reads the parts when no lock is held any more, so it gets copies, made under the locks.
        return state | self._copy_written({id(self): self})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()
        # Only the first use tells whether this is a worker of a DataLoader, which unpickles too early.
        self._process = -os.getpid()
        self.storage.reattach(self._ring)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a buffer of its own with the rows of one moment, although other threads write meanwhile; the steps
        that wait in step writers are stored first."""
        self._after_fork()
        self._store_steps()
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(self._copy_written(memo))
        rest = self.__dict__.keys() - {*_WRITTEN, *_PER_PROCESS}
        other.__dict__.update(copy.deepcopy({name: self.__dict__[name] for name in rest}, memo))
        other._make_locks()
        other.storage.reattach(other._ring)
        return other

    def _store_steps(self) -> None:
        # A copy of a step writer may be made after that of its buffer, which has to have all its steps.
        for writer in list(self._step_writers):
            writer.flush()

    def _copy_written(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Copies of the parts that writes and draws change, all of one moment."""
        with self._write_lock:
            copy.deepcopy(self.storage, memo)  # long, so readers go on: they change nothing in it
            with self._lock:  # ``memo`` has the storage's copy
                return copy.deepcopy({name: self.__dict__[name] for name in _WRITTEN}, memo)


def reseed_in_worker(generator: torch.Generator | None) -> None:
    """Give ``generator`` numbers of its own in a worker of a `torch.utils.data.DataLoader`; elsewhere nothing changes.

    Every worker begins with a copy of one generator. The new seed depends on the generator's state and on the worker's
    seed, so that two buffers of one worker differ too, and a loader with a seeded generator repeats itself.
    """
    worker = get_worker_info()
    if generator is not None and worker is not None:
        number = torch.randint(2**62, (), generator=generator)
        generator.manual_seed(int(number) ^ worker.seed)

"""The replay buffer: rows in, marked samples out."""

import copy
from typing import Any

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.reading import BufferReading
from flatroll.buffers.writing import BufferWriting


class ReplayBuffer(BufferReading, BufferWriting):
    """Stores rows in a ring and samples from it.

    Rows are those of flat tensordict batches; tensors and trees of tensors (tuples, dicts, nested) will do, and with
    `ListStorage` any items at all. When the storage is full, each new row overwrites the oldest one. A sample
    owns its memory, has the same entries every time, and carries the sampler's marks before transforms see it.

    ``extend`` and ``sample`` may run on several threads: a row is sampled only when all its columns are in, and a
    sample during which one of its rows was overwritten is drawn again.

    Args:
        storage: where the rows are kept, default ``ListStorage(1000)``.
        sampler: which rows a sample takes, default :class:`RandomSampler`.
        writer: where new rows go, default :class:`RoundRobinWriter`.
        collate_fn: makes a batch of what the storage gives: a list of items from `ListStorage`, else a batch.
        prefetch: samples made ahead by as many threads, default none; needs ``batch_size``. Rows are drawn in order
            in the caller's thread, so samples do not depend on the threads, but up to ``prefetch`` of them were
            drawn before the latest ``extend`` or ``update_priority``.
        transform: applied to samples, see :meth:`append_transform`.
        batch_size: rows per sample; ``sample(batch_size)`` overrides it.
        dim_extend: for a storage with ``ndim`` of 2 or more, the time dimension of batches, default the last.
        generator: CPU random generator of all draws; None is torch's global one (``torch.manual_seed``).

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    >>> buffer.extend(TensorDict({"observation": torch.arange(6.0)}, [6]))
    tensor([0, 1, 2, 3])
    >>> len(buffer), buffer[:]["observation"], buffer.sample().batch_size
    (4, tensor([2., 3., 4., 5.]), torch.Size([2]))
    """

    def stats(self) -> dict[str, int]:
        """Numbers to log: rows, capacity, rows ever written, bytes, and what the trajectory index counts.

        ``bytes`` are those of the storage and the index, ``bytes_saved`` what ``compact_obs``, ``frame_stack`` and
        ``codec`` save of it.
        """
        storage = self.storage
        with self._lock:
            ring = self._ring
            numbers = {
                "rows": len(ring),
                "capacity": ring.capacity,
                "rows_written": ring.written,
                "bytes_per_row": storage.bytes_per_row,
                "bytes": storage.nbytes,
                "bytes_saved": storage.bytes_saved,
            }
            if isinstance(ring, TrajectoryIndex):
                numbers["bytes"] += ring.nbytes
                numbers["trajectories"] = ring.trajectories
                numbers["open_trajectories"] = ring.open_trajectories
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Rows, counters, index, sampler, writer, generator and samples made ahead, for :meth:`load_state_dict`.

        It owns its memory, and goes through ``torch.save`` and ``torch.load(..., weights_only=False)``. Transforms
        are not in it.
        """
        self._enter()
        ahead = [] if self._ahead is None else copy.deepcopy(self._ahead.results())
        with self._write_lock, self._lock:
            ring = self._ring
            entries = ring.pool_size if isinstance(ring, TrajectoryIndex) else 0
            return {
                "storage": self.storage.state_dict(ring.used, entries),
                "ring": ring.state_dict() if self._started else None,
                "keys": self._keys,
                "sampler": self.sampler.state_dict(),
                "writer": self.writer.state_dict(),
                "generator": None if self.generator is None else self.generator.get_state(),
                "ahead": ahead,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what the buffer that gave ``state`` held, and draw as it would have drawn.

        Rows stored before are gone. Trajectories that were open are cut: rows written from now on do not continue
        them, since the envs that wrote them are not in the state. A state that does not fit changes nothing.

        Args:
            state: of a buffer with a storage, a sampler and a writer made with the same arguments; the storage may
                be in memory here and in files there. Samples made ahead are taken over if both buffers prefetch.

        Raises:
            ValueError: a storage of another capacity, kind or other entries; no trajectory index where one is
                needed; a generator on one side only.
            MemoryError, OSError: the storage had no rows yet, and they do not fit in memory or on the disk.
        """
        self._enter()
        if missing := {"storage", "ring", "keys", "sampler", "writer", "generator"} - set(state):
            raise ValueError(
                f"state is none of a ReplayBuffer: it lacks {sorted(missing)}, and has {sorted(state)}"
            )
        if (state["generator"] is None) != (self.generator is None):
            raise ValueError(
                "the state was saved with a generator and this buffer has none, or the other way round: give "
                "ReplayBuffer(generator=torch.Generator()) on both sides to draw the same rows"
            )
        if state["ring"] is None:
            self.empty()
        if self._ahead is not None:
            self._ahead.wait()
        with self._write_lock, self._lock:
            ring = None if state["ring"] is None else self._ring_of(state)
            before = self.sampler.state_dict(), self.writer.state_dict()
            try:
                self.sampler.load_state_dict(state["sampler"])
                self.writer.load_state_dict(state["writer"])
                if ring is not None:
                    self._load_rows(ring, state)
            except BaseException:
                self.sampler.load_state_dict(before[0])
                self.writer.load_state_dict(before[1])
                if not len(self._ring):  # interrupted while rows were copied
                    self.sampler.emptied()
                raise
            if self.generator is not None:
                self.generator.set_state(state["generator"])
            if self._ahead is not None:
                self._ahead.replace(copy.deepcopy(state["ahead"]))

    def _ring_of(self, state: dict[str, Any]) -> Ring:
        """The ring of ``state``; ValueError if this buffer cannot have it or the rows."""
        needs = self._follows()
        if needs is not None and state["keys"] is None:
            raise ValueError(
                f"the state was saved without a trajectory index, which {needs} needs: extend this buffer with the "
                "rows of the other one"
            )
        ring = self.writer.ring(state["ring"]["capacity"], state["keys"] is not None)
        ring.load_state_dict(state["ring"])
        self.storage.check_state_dict(state["storage"], ring.capacity)
        return ring

    def _load_rows(self, ring: Ring, state: dict[str, Any]) -> None:
        alone, first = self._alone(ring), not self._started
        if not first:  # nobody reads a mixture of old and new rows, in other processes neither
            self._ring = self.writer.ring(ring.capacity, state["keys"] is not None)
            self.storage.attach(self._ring, alone)
        self.storage.load_state_dict(state["storage"])
        self.storage.attach(ring, alone, first)
        self._ring, self._keys, self._started = ring, state["keys"], True

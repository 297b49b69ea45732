"""The replay buffer: rows in, marked samples out."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.compact import Columns
from flatroll.buffers.index import TrajectoryIndex
from flatroll.buffers.ring import Draw, Ring
from flatroll.buffers.runs import BoundaryKeys
from flatroll.buffers.samplers import RandomSampler, Sampler
from flatroll.buffers.storages import LazyTensorStorage, Rows, nest
from flatroll.buffers.transforms import TransformLike, apply
from flatroll.layout.keys import MASK, marker

Informed: TypeAlias = tuple[TensorDictBase, dict[str, Tensor]]

_LOCKS = ("_lock", "_write_lock")


class ReplayBuffer:
    """Stores flat batches in a ring and samples from it.

    When the storage is full, each new row overwrites the oldest one. A sample owns its memory, has the same
    entries every time, and carries the sampler's marks before the transforms see it.

    ``extend`` and ``sample`` may run on several threads: a row is sampled only when all its columns are in, and a
    sample during which one of its rows was overwritten is drawn again.

    Args:
        storage: where the rows are kept.
        sampler: which rows a sample takes, default :class:`RandomSampler`.
        transform: applied to samples, see :meth:`append_transform`.
        batch_size: rows per sample; ``sample(batch_size)`` overrides it.
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

    def __init__(
        self,
        *,
        storage: LazyTensorStorage,
        sampler: Sampler | None = None,
        transform: TransformLike | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"generator must be a CPU generator (rows are drawn on the host), got {generator.device}"
            )
        self.storage = storage
        self.sampler: Sampler = RandomSampler() if sampler is None else sampler
        self.batch_size = batch_size
        self.generator = generator
        if batch_size is not None:
            self._checked(batch_size)
        self._transforms: list[TransformLike] = []
        if transform is not None:
            self.append_transform(transform)
        self._ring = Ring(storage.max_size)
        self._keys: BoundaryKeys | None = None
        self._started = False
        self._lock = threading.Lock()  # bookkeeping: held for microseconds
        self._write_lock = threading.Lock()  # one writer at a time

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _LOCKS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in _LOCKS:
            setattr(self, name, threading.Lock())

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        kind, sampler = type(self.storage).__name__, type(self.sampler).__name__
        return f"ReplayBuffer({len(self)} of {self.storage.max_size} rows, {kind}, {sampler})"

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index; None before the first extend, and where neither sampler nor storage needs one."""
        return self._ring if isinstance(self._ring, TrajectoryIndex) else None

    def append_transform(self, transform: TransformLike) -> "ReplayBuffer":
        """Add a transform after those there are: an object with ``forward(td)`` and perhaps ``inv(td)``, or a
        function. Samples go through ``forward`` in order, batches to store through ``inv`` in reverse order."""
        if not callable(transform) and not hasattr(transform, "forward"):
            raise TypeError(
                f"transform must have forward(td) or be a function of td, got {type(transform).__name__}"
            )
        self._transforms.append(transform)
        return self

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(self, batch: TensorDictBase, final: TensorDictBase | None = None) -> Tensor:
        """Store the rows of ``batch`` (``[N]``); their positions in the storage, int64.

        A batch larger than the storage leaves its last rows. A batch that does not fit raises before anything is
        stored.

        Args:
            batch: consecutive rows, trajectories end to end, any number of them, whole or cut.
            final: the next observations that no row of a compact batch holds (``collector.final``).

        Raises:
            TypeError: ``batch`` is no tensordict, or a marker has the wrong dtype.
            ValueError: the batch is not flat, holds padding, or differs from the first one in entries, shapes or
                dtypes.
            KeyError: a marker that the sampler or the storage needs is missing.
        """
        _check_flat(batch)
        for transform in reversed(self._transforms):
            inverse = getattr(transform, "inv", None)
            batch = batch if inverse is None else inverse(batch)
        _check_not_padded(batch)
        if not len(batch):
            return torch.zeros(0, dtype=torch.int64)
        with self._write_lock:
            ring = self._ring if self._started else self._first_ring(batch)
            rows = self.storage.prepare(batch, final, self._keys)
            if not self._started:
                with self._lock:
                    self._ring, self._started = ring, True
            return self._store(ring, rows)

    def _first_ring(self, batch: TensorDictBase) -> Ring:
        self._keys = self.sampler.boundary_keys(batch)
        if self._keys is None and self.storage.compact_obs:
            self._keys = BoundaryKeys.probe(batch)
        return Ring(self.storage.max_size) if self._keys is None else TrajectoryIndex(self.storage.max_size)

    def _store(self, ring: Ring, rows: Rows) -> Tensor:
        """Claim, copy, publish."""
        with self._lock:
            first = ring.claim(rows.count)
        self.storage.write(first % ring.capacity, rows)
        if not isinstance(ring, TrajectoryIndex) or rows.runs is None:
            with self._lock:
                ring.publish(rows.count)
            return ring.slots(first, rows.count)
        before = ring.link(rows.runs)
        pool = self.storage.pool
        entries = released = None
        if pool is not None:
            entries, released = pool.place(ring, rows.runs, before, rows.columns, rows.tails)
        with self._lock:
            ring.enter(rows.runs, before, entries, released)
        return ring.slots(first, rows.count)

    def add(self, row: TensorDictBase) -> int:
        """Store one row (batch size ``[]``); its position in the storage."""
        if row.batch_dims:
            raise ValueError(f"add takes one row of batch size [], got {list(row.batch_size)}: use extend")
        return int(self.extend(row.unsqueeze(0))[0])

    def empty(self) -> None:
        """Forget all rows. The storage keeps its memory and its columns."""
        with self._write_lock, self._lock:
            self._ring = type(self._ring)(self._ring.capacity)

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False
    ) -> TensorDictBase: ...

    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> Informed: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> TensorDictBase | Informed:
        """Draw a sample: a tensordict ``[n]``; with ``return_info`` also a dict with the rows' positions.

        Args:
            batch_size: rows, default that of the buffer. Short trajectories may give fewer (see the sampler).
            return_info: return ``(sample, {"index": int64 [n]})``.

        Raises:
            RuntimeError: the buffer is empty, or holds no trajectory long enough.
            ValueError: no batch size, or one that does not fit the sampler.
        """
        size = self._checked(batch_size)
        draw, columns = self._read(
            lambda ring: self.sampler.draw(ring, size, self.generator, self.storage.compact_obs)
        )
        self.sampler.mark(columns, draw)
        sample = self._transformed(columns, len(draw.slots), lambda: _slice_ends(draw))
        return (sample, {"index": draw.slots}) if return_info else sample

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Samples without end."""
        while True:
            yield self.sample()

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> TensorDictBase:
        """Stored rows by position in the storage (not by age), transformed but not marked.

        Positions that a write under way, or one that failed, has given up are left out of slices; asked for one
        by one they raise IndexError.
        """
        slots = torch.arange(min(self._ring.written, self._ring.capacity))
        try:
            slots = slots[index]
        except IndexError:
            raise IndexError(f"index {index!r} is out of range: {len(self)} rows are stored") from None
        listed = not isinstance(index, slice)
        draw, columns = self._read(
            lambda ring: _given(ring, slots.reshape(-1), listed, self.storage.compact_obs)
        )
        asked = draw.slots
        ends = torch.ones(len(asked), dtype=torch.bool)
        numbers = self._ring.numbers(asked, draw.stamp[0])
        ends[:-1] = numbers[1:] != numbers[:-1] + 1
        rows = self._transformed(columns, len(asked), lambda: ends)
        return rows[0] if slots.ndim == 0 else rows

    def _checked(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"batch_size must be an integer of at least 1, got {size!r}")
        return self.sampler.check(size)

    def _read(self, choose: Callable[[Ring], Draw]) -> tuple[Draw, Columns]:
        """Draw and gather; again if a writer overwrote one of the rows meanwhile."""
        for _ in range(8):
            with self._lock:
                ring = self._ring
                draw = choose(ring)
            columns = self._gather(draw)
            with self._lock:
                if ring is self._ring and ring.intact(draw):
                    return draw, columns
        with self._write_lock:  # the ring is small and the writers fast: they wait for once
            with self._lock:
                draw = choose(self._ring)
            return draw, self._gather(draw)

    def _gather(self, draw: Draw) -> Columns:
        return self.storage.get(draw.slots, draw.follow, slices=draw.firsts is not None)

    def _transformed(self, columns: Columns, rows: int, ends: Callable[[], Tensor]) -> TensorDictBase:
        sample: TensorDictBase = nest(columns, rows)
        for transform in self._transforms:
            sample = apply(transform, sample, ends)
        return sample

    def stats(self) -> dict[str, int]:
        """Numbers to log: rows, capacity, rows ever written, bytes, and what the trajectory index counts.

        ``bytes`` are those of the storage and the index, ``bytes_saved`` what ``compact_obs`` saves of it.
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


def _check_flat(batch: TensorDictBase) -> None:
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"batch must be a TensorDict of batch size [N], got {type(batch).__name__}")
    if batch.batch_dims == 0:
        raise ValueError("batch has batch size []: use add for one row, or batch.unsqueeze(0)")
    if batch.batch_dims > 1:
        raise ValueError(
            f"batch must be flat, [N], got {list(batch.batch_size)}: batch.reshape(-1) lays [envs, time] end to "
            'end, and ("collector", "traj_ids") tells the trajectories apart'
        )


def _check_not_padded(batch: TensorDictBase) -> None:
    if batch.get(MASK, None) is None:
        return
    padding = ~marker(batch, MASK)
    if bool(padding.any()):
        raise ValueError(
            f"the batch has {int(padding.sum())} rows of padding, where batch[{MASK!r}] is False, which would be "
            'stored as transitions: extend with batch[batch["collector", "mask"]], or with '
            "flatroll.layout.join(batch) of what split_trajectories gave"
        )


def _slice_ends(draw: Draw) -> Tensor:
    """Rows after which the sample goes on elsewhere."""
    if draw.lasts is None:
        return torch.ones(len(draw.slots), dtype=torch.bool)
    ends = torch.zeros(len(draw.slots), dtype=torch.bool)
    ends[draw.lasts] = True
    return ends if draw.mask is None else ends | ~draw.mask


def _given(ring: Ring, slots: Tensor, listed: bool, follow: bool) -> Draw:
    """The rows in ``slots``; those that may not be read are left out, or refused if ``listed`` one by one."""
    stamp = ring.stamp()
    ring.check_not_empty()
    readable = ring.numbers(slots, ring.head) < ring.written
    if not bool(readable.all()):
        if listed:
            raise IndexError(
                f"position {int(slots[~readable][0])} holds no row: a write has given it up, and its new row is "
                "not there yet"
            )
        slots = slots[readable]
    there = ring.follow(slots) if follow and isinstance(ring, TrajectoryIndex) else None
    return Draw(slots, follow=there, stamp=stamp)

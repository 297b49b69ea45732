"""Where rows are kept: one tensor per column, allocated from the first batch."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers.compact import (
    Columns,
    NextPool,
    check_final_covers,
    final_columns,
    next_columns,
    state_pairs,
    take_rows,
)
from flatroll.buffers.ring import Array, Follow
from flatroll.buffers.runs import BoundaryKeys, Runs
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import NestedKey, next_key

_CACHE, _SAMPLE = 2**26, 2**20  # bytes: a storage larger than the one, a sample smaller than the other


@dataclass(frozen=True, slots=True)
class Rows:
    """A checked batch, ready to be copied into a storage.

    Attributes:
        count: number of rows.
        columns: what the storage keeps per row, by key.
        runs: the fragments of the batch; None where no trajectory index is kept.
        tails: compact storage: next observation of each fragment's last row, by root key.
    """

    count: int
    columns: Columns
    runs: Runs | None = None
    tails: Columns = field(default_factory=dict)


class LazyTensorStorage:
    """Rows in contiguous tensors, one per entry, allocated at the first extend.

    Every batch must have the entries, shapes and dtypes of the first one; nothing is dropped or cast silently.

    Args:
        max_size: number of rows.
        device: where the tensors are kept, default ``"cpu"``.
        ndim: number of batch dimensions; 1 (flat batches).
        compact_obs: keep each observation once. Every entry that stands both at the root and under ``"next"``
            (observations, step counts, recurrent states) is stored at the root only; ``("next", ...)`` of a row
            is read from the row that follows it, or from a side pool where no stored row agrees with it bit by
            bit (ends of trajectories and of interrupted writes). Samples are bit-equal to those of a full storage.

    Raises:
        ValueError: ``max_size`` below 1, or ``ndim`` other than 1.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import ReplayBuffer
    >>> obs = torch.arange(4.0)
    >>> batch = TensorDict({"observation": obs[:3], "next": {"observation": obs[1:],
    ...     "done": torch.tensor([False, False, True])}}, [3])
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100, compact_obs=True))
    >>> rows = buffer.extend(batch)
    >>> buffer[:]["next", "observation"], buffer.storage.bytes_per_row  # 4 for obs, 1 for done
    (tensor([1., 2., 3.]), 5)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compact_obs: bool = False,
    ) -> None:
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise ValueError(f"max_size must be an integer of at least 1, got {max_size!r}")
        if ndim != 1:
            raise ValueError(
                f"ndim must be 1, got {ndim!r}: store flat batches; trajectories of several envs are told apart "
                'by ("collector", "traj_ids")'
            )
        self.max_size = max_size
        self.device = torch.device(device)
        self.compact_obs = compact_obs
        self._columns: Columns = {}
        self._like: dict[NestedKey, tuple[torch.dtype, torch.Size]] = {}
        self._pool: NextPool | None = None
        self._bytes: tuple[tuple[Array, ...], Array] | None = None

    @property
    def allocated(self) -> bool:
        """Whether a first batch has fixed the columns."""
        return bool(self._columns)

    @property
    def pool(self) -> NextPool | None:
        """The next observations that no row holds; None unless compact."""
        return self._pool

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row's columns; 0 before the first extend."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._like.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and the pool."""
        return self.bytes_per_row * self.max_size + (0 if self._pool is None else self._pool.nbytes)

    @property
    def bytes_saved(self) -> int:
        """Bytes that a storage with two columns per pair would need on top; 0 unless compact."""
        if self._pool is None:
            return 0
        pairs = (self._like[key] for key in self._pool.pairs)
        second = sum(math.prod(shape) * dtype.itemsize for dtype, shape in pairs)
        return second * self.max_size - self._pool.nbytes

    def prepare(self, batch: TensorDictBase, final: TensorDictBase | None, keys: BoundaryKeys | None) -> Rows:
        """Check ``batch`` and lay it out; allocates at the first call. Nothing is stored yet.

        Args:
            batch: ``[N]``; if N exceeds ``max_size``, its last ``max_size`` rows are taken.
            final: the final observations that come with a compact batch.
            keys: markers by which to find the fragments; None to leave them out.

        Raises:
            ValueError: entries, shapes or dtypes that differ from the first batch; a compact batch without the
                ``final`` that its storage needs.
        """
        count = len(batch)
        columns = leaves(batch)
        row, kept = (None, {}) if final is None else final_columns(final, columns, count)
        skip = max(0, count - self.max_size)
        if skip:
            batch, columns, count = batch[skip:], {k: c[skip:] for k, c in columns.items()}, count - skip
            if row is not None:
                late = row >= skip
                row, kept = row[late] - skip, {k: v[late] for k, v in kept.items()}
        if row is not None:
            found = keys or BoundaryKeys.probe(batch)
            ends = run_ends(batch, is_init_key=found.is_init, done_key=found.done, traj_key=found.traj)
            check_final_covers(row, ends, columns)
        if self.compact_obs:
            return self._prepare_compact(batch, columns, row, kept, keys or BoundaryKeys.probe(batch))
        if row is not None:
            columns |= {next_key(k): v for k, v in next_columns(columns, row, kept).items()}
        runs = None if keys is None else Runs.of(batch, keys)
        self._check(columns)
        return Rows(count, columns, runs)

    def _prepare_compact(
        self, batch: TensorDictBase, columns: Columns, row: Tensor | None, kept: Columns, keys: BoundaryKeys
    ) -> Rows:
        pairs = state_pairs(columns)
        pairs += [key for key in kept if key not in pairs]
        if not pairs and row is not None:
            raise ValueError(
                "the storage has compact_obs=True, but neither the batch nor the final that came with it has a "
                'next observation ("next", <observation>): there is nothing to keep once. If next observations '
                "are kept as deltas, use a storage without compact_obs and transform=NextObservationDelta()"
            )
        if not pairs:
            raise ValueError(
                'the storage has compact_obs=True, but the batch has no ("next", <observation>) and no final '
                "came with it: extend(batch, final=collector.final), or use a storage without compact_obs and "
                "NextStateReconstructor"
            )
        pool = self._pool or NextPool(pairs)
        if missing := [key for key in pool.pairs if key not in pairs]:
            raise ValueError(
                f"the batch lacks {next_key(missing[0])!r}, which the first extend had: pass it in the batch or "
                "in final"
            )
        if self._pool is not None and (extra := [key for key in pairs if key not in pool.pairs]):
            raise ValueError(f"the batch has {next_key(extra[0])!r}, which the first extend did not have")
        runs = Runs.of(batch, keys, pool.cuts(columns, row))
        tails = pool.tails(columns, row, kept, runs.lasts)
        stored = {key: c for key, c in columns.items() if key not in {next_key(k) for k in pairs}}
        self._check(stored)
        if self._pool is None:
            pool.allocate(stored, self.device)
            self._pool = pool
        return Rows(len(batch), stored, runs, tails)

    def _check(self, columns: Columns) -> None:
        """ValueError unless ``columns`` are those of the first batch, which allocates."""
        if not self._columns:
            self._like = {key: (c.dtype, c.shape[1:]) for key, c in columns.items()}
            self._columns = {
                key: _empty((self.max_size, *c.shape[1:]), c.dtype, self.device) for key, c in columns.items()
            }
            return
        for key, column in columns.items():
            there = self._like.get(key)
            if there is not None and there == (column.dtype, column.shape[1:]):
                continue
            if there is None:
                raise ValueError(
                    f"the batch has an entry {key!r} that the first extend did not have: "
                    f"the storage keeps {sorted(map(repr, self._columns))}"
                )
            raise ValueError(
                f"batch[{key!r}] is {column.dtype} {tuple(column.shape[1:])} per row, the storage keeps "
                f"{there[0]} {tuple(there[1])} since the first extend"
            )
        if len(columns) != len(self._columns):
            missing = next(key for key in self._columns if key not in columns)
            raise ValueError(f"the batch lacks the entry {missing!r} that the first extend had")

    def write(self, slot: int, rows: Rows) -> None:
        """Copy ``rows`` to ``slot`` and the slots after it, going on at slot 0 after the last one."""
        fit = min(rows.count, self.max_size - slot)
        for key, column in rows.columns.items():
            to = self._columns[key]
            if fit == rows.count:
                to[slot : slot + fit] = column
            else:
                to[slot:] = column[:fit]
                to[: rows.count - fit] = column[fit:]

    def get(self, slots: Tensor, follow: Follow | None = None, *, slices: bool = False) -> Columns:
        """Copies of rows, by key.

        Args:
            slots: int64 ``[N]``, positions of the rows.
            follow: where their next observations stand; a compact storage needs it to give them.
            slices: whether the slots come in stretches of neighbours (a hint, for speed).
        """
        if slices and self._worth_touching(len(slots)):
            self._touch(slots)
        slots = slots.to(self.device)
        columns = {key: take_rows(column, slots) for key, column in self._columns.items()}
        if self._pool is not None and follow is not None:
            for key in self._pool.pairs:
                columns[next_key(key)] = self._pool.read(key, self._columns[key], follow)
        return columns

    def _worth_touching(self, rows: int) -> bool:
        """Whether the columns are too large for the caches and the sample is not."""
        size = self.bytes_per_row
        return self.device.type == "cpu" and size * self.max_size > _CACHE and size * rows < _SAMPLE

    def _touch(self, slots: Tensor) -> None:
        from flatroll.kernels.slices import touch

        if self._bytes is None:
            flat = tuple(c.view(-1).view(torch.uint8).numpy() for c in self._columns.values() if c.numel())
            self._bytes = flat, np.array([len(f) // self.max_size for f in flat])
        touch(*self._bytes, slots.numpy())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_bytes": None}  # views, which a copy would not share with its columns


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unset memory; on the host from NumPy, which asks the system for large pages where they pay."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64  # the start of a cache line
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)


def leaves(batch: TensorDictBase, path: tuple[str, ...] = ()) -> Columns:
    """The tensors of ``batch`` by key; TypeError for an entry that is none (it would be dropped silently)."""
    columns: Columns = {}
    for name, value in batch.items():
        key = (*path, name)
        if isinstance(value, Tensor):
            columns[key if path else name] = value
        elif isinstance(value, TensorDictBase):
            columns |= leaves(value, key)
        else:
            shown = key if path else name
            raise TypeError(f"batch[{shown!r}] is a {type(value).__name__}: this storage takes tensors only")
    return columns


def nest(columns: Columns, rows: int) -> TensorDict:
    """The tensordict of batch size ``[rows]`` with these columns.

    >>> nest({"a": torch.zeros(2), ("next", "a"): torch.ones(2)}, 2)["next", "a"]
    tensor([1., 1.])
    """
    root: dict[str, Any] = {}
    for key, column in columns.items():
        if isinstance(key, str):
            root[key] = column
            continue
        node = root
        for step in key[:-1]:
            node = node.setdefault(step, {})
        node[key[-1]] = column
    # The checks of the public constructor cost 20 of a sample's 150 µs; these columns passed them at extend.
    return TensorDict._new_unsafe(root, batch_size=torch.Size([rows]))

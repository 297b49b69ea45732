"""Where rows are kept: one tensor per column, allocated from the first batch."""

from dataclasses import dataclass, field
from typing import Any

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
)
from flatroll.buffers.index import BoundaryKeys, Runs
from flatroll.buffers.ring import Follow
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import as_tuple, next_key


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
        self._pool: NextPool | None = None

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
        return sum(c[:1].numel() * c.element_size() for c in self._columns.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and the pool."""
        return self.bytes_per_row * self.max_size + (0 if self._pool is None else self._pool.nbytes)

    @property
    def bytes_saved(self) -> int:
        """Bytes that a storage with two columns per pair would need on top; 0 unless compact."""
        if self._pool is None:
            return 0
        pairs = (self._columns[key] for key in self._pool.pairs)
        second = sum(c[:1].numel() * c.element_size() for c in pairs)
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
        columns = dict(batch.items(True, True))
        for key, column in columns.items():
            if not isinstance(column, Tensor):
                raise TypeError(
                    f"batch[{key!r}] is a {type(column).__name__}: this storage takes tensors only"
                )
        row, kept = (None, {}) if final is None else final_columns(final, columns, count)
        skip = max(0, count - self.max_size)
        if skip:
            batch, columns, count = batch[skip:], {k: c[skip:] for k, c in columns.items()}, count - skip
            if row is not None:
                late = row >= skip
                row, kept = row[late] - skip, {k: v[late] for k, v in kept.items()}
        if row is not None:
            keys = keys or BoundaryKeys()
            ends = run_ends(batch, is_init_key=keys.is_init, done_key=keys.done, traj_key=keys.traj)
            check_final_covers(row, ends, columns)
        if self.compact_obs:
            return self._prepare_compact(batch, columns, row, kept, keys or BoundaryKeys())
        if row is not None:
            columns |= {next_key(k): v for k, v in next_columns(columns, row, kept).items()}
        self._check(columns)
        return Rows(count, columns, None if keys is None else Runs.of(batch, keys))

    def _prepare_compact(
        self, batch: TensorDictBase, columns: Columns, row: Tensor | None, kept: Columns, keys: BoundaryKeys
    ) -> Rows:
        pairs = state_pairs(columns)
        pairs += [key for key in kept if key not in pairs]
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
            self._columns = {
                key: torch.empty((self.max_size, *c.shape[1:]), dtype=c.dtype, device=self.device)
                for key, c in columns.items()
            }
            return
        for key, column in columns.items():
            there = self._columns.get(key)
            if there is None:
                raise ValueError(
                    f"the batch has an entry {key!r} that the first extend did not have: "
                    f"the storage keeps {sorted(map(repr, self._columns))}"
                )
            if there.shape[1:] != column.shape[1:] or there.dtype != column.dtype:
                raise ValueError(
                    f"batch[{key!r}] is {column.dtype} {tuple(column.shape[1:])} per row, the storage keeps "
                    f"{there.dtype} {tuple(there.shape[1:])} since the first extend"
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

    def get(self, slots: Tensor, follow: Follow | None = None) -> Columns:
        """Copies of the rows in ``slots`` (int64 ``[N]``), by key; a compact storage needs ``follow``."""
        slots = slots.to(self.device)
        columns = {key: column.index_select(0, slots) for key, column in self._columns.items()}
        if self._pool is not None and follow is not None:
            for key in self._pool.pairs:
                columns[next_key(key)] = self._pool.read(key, self._columns[key], follow)
        return columns


def nest(columns: Columns, rows: int) -> TensorDict:
    """The tensordict of batch size ``[rows]`` with these columns.

    >>> nest({"a": torch.zeros(2), ("next", "a"): torch.ones(2)}, 2)["next", "a"]
    tensor([1., 1.])
    """
    root: dict[str, Any] = {}
    for key, column in columns.items():
        *path, name = as_tuple(key)
        node = root
        for step in path:
            node = node.setdefault(step, {})
        node[name] = column
    # The checks of the public constructor cost 20 of a sample's 150 µs; these columns passed them at extend.
    return TensorDict._new_unsafe(root, batch_size=torch.Size([rows]))

"""Rows of any source gathered into pieces of one size, next observations once where they are views of the others."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.column import Columns, differ, put_rows, take_rows
from flatroll.buffers.storages.continuity import state_pairs
from flatroll.buffers.storages.item_kinds import leaves
from flatroll.layout.export import Array
from flatroll.layout.keys import NestedKey, next_key, plain_key

#: Rows as `convert` takes them: a flat batch, its tensors by key, or arrays by dotted name.
Batch: TypeAlias = TensorDictBase | Columns | Mapping[str, Array]


class Piece(NamedTuple):
    """Consecutive rows ``[N]``.

    Attributes:
        columns: ``[N, ...]`` by key, without the next entries that ``tails`` tells.
        ends: int64 ``[E]``, ascending: the rows whose next entry is not the root entry of the row after, as far as the
            source told; the last of them is row N - 1. Empty without ``tails``.
        tails: next entries of these rows ``[E, ...]``, by root key.
    """

    columns: Columns
    ends: Tensor = torch.empty(0, dtype=torch.int64)
    tails: Mapping[NestedKey, Tensor] = {}

    def cuts(self) -> Tensor:
        """Return where the next entry differs from the root entry of the row after; bool ``[N]``."""
        cut = torch.zeros(int(self.ends[-1]) + 1, dtype=torch.bool)
        inner = self.ends[:-1]
        for key, tails in self.tails.items():
            cut[inner] |= differ(tails[:-1], take_rows(self.columns[key], inner + 1))
        return cut

    def following(self, rows: Tensor) -> Columns:
        """Return the next entries ``[M, ...]`` of ``rows`` (int64 ``[M]``, ascending) by root key."""
        last = int(self.ends[-1])
        # Where each of the rows stands among `ends`, if it is one of them.
        places = torch.searchsorted(self.ends, rows)
        known = (self.ends[places] == rows).nonzero().squeeze(-1)
        found: Columns = {}
        for key, tails in self.tails.items():
            found[key] = take_rows(self.columns[key], (rows + 1).clamp_(max=last))
            put_rows(found[key], known, take_rows(tails, places[known]))
        return found

    def whole(self) -> "Piece":
        """Return the piece with all next entries in its columns."""
        if not self.tails:
            return self
        following = self.following(torch.arange(int(self.ends[-1]) + 1))
        return Piece({**self.columns, **{next_key(key): values for key, values in following.items()}})


def gather(batches: Iterable[Batch], piece_bytes: int) -> Iterator[Piece]:
    """Yield the rows of all batches in pieces of ``piece_bytes`` (the last one: less).

    A piece is valid until the next one is asked for, whose rows take its memory.

    Raises:
        ValueError: a batch is not flat, or differs from the first one in entries, shapes or dtypes.
        TypeError: an entry is not of numbers or bools.
    """
    room: _Room | None = None
    names: dict[str, NestedKey] = {}
    for number, batch in enumerate(batches):
        columns = _by_key(batch, names, number)
        counts = {value.shape[:1] for value in columns.values()}
        if len(counts) > 1 or () in counts:
            shapes = {key: list(value.shape) for key, value in columns.items()}
            raise ValueError(f"batch {number} must have one number of rows, its shapes are {shapes}")
        count = next(iter(counts), (0,))[0]
        room = room or _Room(columns, piece_bytes)
        room.check(columns, number)
        first = 0
        while first < count:
            first = room.fill(columns, first, count)
            if room.used == room.rows:
                yield room.piece()
    if room is not None and room.used:
        yield room.piece()


class _Room:
    """Memory of one piece, which is filled again and again: pages that are new each time cost more than the copies."""

    def __init__(self, like: Mapping[NestedKey, Tensor | Array], piece_bytes: int) -> None:
        self.kinds = {key: (value.dtype, value.shape[1:]) for key, value in like.items()}
        # from here on tensors, so that torch's names of the dtypes stand in `columns`
        rows = {key: _tensor(value[:0]) for key, value in like.items()}
        self.roots = state_pairs(rows)
        # Whether next entries of all batches so far were views of the root entries, so that no file needs them.
        self.shifted = bool(self.roots) and self._views(like)
        self.left_out = {next_key(key) for key in self.roots} if self.shifted else set()
        stored = [row for key, row in rows.items() if key not in self.left_out]
        self.rows = max(1, piece_bytes // max(1, sum(row.shape[1:].numel() * row.itemsize for row in stored)))
        self.used = 0
        self.columns = {
            key: row.new_empty((self.rows, *row.shape[1:]), device="cpu") for key, row in rows.items()
        }
        # Memory that is never written to takes no room: as many tails as rows would fit.
        self.tails = {key: torch.empty_like(self.columns[key]) for key in self.roots}
        self.ends: list[int] = []

    def check(self, columns: Mapping[NestedKey, Tensor | Array], number: int) -> None:
        """Raise ValueError if a batch is not of the kind of the first one."""
        if columns.keys() != self.kinds.keys():
            differing = sorted(map(str, columns.keys() ^ self.kinds.keys()))
            raise ValueError(
                f"batch {number} must have the entries of those before it: {differing} are not in both"
            )
        for key, value in columns.items():
            dtype, shape = self.kinds[key]
            if value.dtype != dtype or value.shape[1:] != shape:
                raise ValueError(
                    f"batch {number}: {key!r} is {value.dtype} {list(value.shape[1:])} a row, before it was "
                    f"{dtype} {list(shape)}"
                )
        if self.shifted and not self._views(columns):
            self._unshift()

    def fill(self, columns: Mapping[NestedKey, Tensor | Array], first: int, count: int) -> int:
        """Copy rows of a batch from ``first`` on, as many as fit, and return the first one that is left."""
        stop = min(count, first + self.rows - self.used)
        end = self.used + stop - first
        for key, value in columns.items():
            if key not in self.left_out:
                _put(self.columns[key], self.used, end, value[first:stop])
        if self.shifted:
            for key in self.roots:
                _put(
                    self.tails[key],
                    len(self.ends),
                    len(self.ends) + 1,
                    columns[next_key(key)][stop - 1 : stop],
                )
            self.ends.append(end - 1)
        self.used = end
        return stop

    def piece(self) -> Piece:
        """Return what is there, and begin anew."""
        rows, ends = self.used, torch.tensor(self.ends, dtype=torch.int64)
        self.used, self.ends = 0, []
        if not self.shifted:
            return Piece({key: column[:rows] for key, column in self.columns.items()})
        columns = {key: column[:rows] for key, column in self.columns.items() if key not in self.left_out}
        return Piece(columns, ends, {key: tails[: len(ends)] for key, tails in self.tails.items()})

    def _views(self, columns: Mapping[NestedKey, Tensor | Array]) -> bool:
        return all(_is_view(columns[key], columns[next_key(key)]) for key in self.roots)

    def _unshift(self) -> None:
        """From now on copy next entries, too."""
        rows = self.used
        if rows:
            whole = self.piece().whole()
            for key in map(next_key, self.roots):
                self.columns[key][:rows] = whole.columns[key]
        self.used, self.shifted, self.left_out = rows, False, set()


def _by_key(batch: Batch, names: dict[str, NestedKey], number: int) -> Mapping[NestedKey, Tensor | Array]:
    """Columns of a batch; ``names`` keeps the keys of dotted names."""
    if isinstance(batch, TensorDictBase):
        if batch.batch_dims != 1:
            raise ValueError(f"batch {number} must be flat, [N], got {list(batch.batch_size)}")
        return leaves(batch)
    if not any(isinstance(value, np.ndarray) for value in batch.values()):
        return cast(Columns, batch)
    found: dict[NestedKey, Tensor | Array] = {}
    for name, array in cast(Mapping[str, Array], batch).items():
        if array.dtype.kind not in "biufc":
            raise TypeError(f"column {name!r} must be of numbers or bools, got {array.dtype}: leave it out")
        if name not in names:
            names[name] = plain_key(tuple(name.split(".")))
        found[names[name]] = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return found


def _tensor(value: Tensor | Array) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.from_numpy(value.copy())


def _put(target: Tensor, first: int, end: int, value: Tensor | Array) -> None:
    """Copy values to the rows ``[first, end)`` of ``target``."""
    if isinstance(value, Tensor):
        target[first:end].copy_(value.detach())
    else:
        target.numpy()[first:end] = value


def _is_view(root: Tensor | Array, following: Tensor | Array) -> bool:
    """Whether row i of ``following`` is, in memory, row i + 1 of ``root``."""
    if isinstance(root, Tensor) and isinstance(following, Tensor):
        same = root.device == following.device and root.stride() == following.stride()
        same &= root.is_conj() == following.is_conj() and root.is_neg() == following.is_neg()
        return same and following.data_ptr() == root.data_ptr() + root.stride(0) * root.itemsize
    places = [values.__array_interface__["data"][0] for values in (root, following)]  # type: ignore[union-attr]
    return root.strides == following.strides and places[1] == places[0] + root.strides[0]  # type: ignore[union-attr]

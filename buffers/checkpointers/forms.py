"""Checkpointers that write observations once, and, for the nested one, where trajectories begin."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpointers.base import Span, StorageCheckpointerBase, TensorStorageCheckpointer
from flatroll.buffers.columns.column import check_values, differ, put_rows
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.storages.item_kinds import nest
from flatroll.disk.segments import Column, Ragged
from flatroll.disk.segments import column_name
from flatroll.layout.boundaries import run_starts
from flatroll.layout.keys import NestedKey, next_key, plain_key

_STARTS = "#starts"  # bool per row: a run begins here
_AFTER = "#after"  # next values that are not those of the row after


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """Writes a next observation only where it is not, bit by bit, the observation of the row after it.

    So rows in the TED format take little more than half of the space. Nothing is assumed of them: observations that are
    not the shift of each other, as n-step ones, are written in full, and what comes back is bit-equal. All entries are
    written, markers at the root too.

    Args:
        done_keys, reward_keys: entries that must be among the rows, as torchrl's scripts name them; default none.

    >>> import tempfile
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=FlatStorageCheckpointer())
    >>> rows = torch.arange(4.0)
    >>> at = buffer.extend(TensorDict({"observation": rows[:3], "next": {"observation": rows[1:]}}, [3]))
    >>> dumped = buffer.storage.checkpointer.dump(buffer.storage, torch.arange(3))
    >>> dumped["next/observation#after"].values
    tensor([3.])
    """

    def __init__(
        self,
        done_keys: Iterable[NestedKey] | None = None,
        reward_keys: Iterable[NestedKey] | None = None,
    ) -> None:
        super().__init__()
        self.done_keys, self.reward_keys = (
            [plain_key(key) for key in keys or ()] for keys in (done_keys, reward_keys)
        )

    @override
    def check(self, storage: Any) -> None:
        super().check(storage)
        for name, keys in (("done_keys", self.done_keys), ("reward_keys", self.reward_keys)):
            for key in keys:
                if storage.columns and key not in storage.columns and next_key(key) not in storage.columns:
                    present = sorted(map(repr, storage.columns))
                    raise KeyError(f"{name} names {key!r}, which the rows do not have: {present}")

    @override
    def dump(self, storage: Any, slots: Tensor) -> dict[str, Column]:
        dumped = super().dump(storage, slots)
        for key in storage.columns:
            name, later = column_name(key), column_name(next_key(key))
            now, after = dumped.get(name), dumped.get(later)
            if not isinstance(now, Tensor) or not isinstance(after, Tensor) or now.dtype is not after.dtype:
                continue
            if now.shape != after.shape or not len(now):
                continue
            kept = torch.ones(len(now), dtype=torch.bool, device=now.device)  # the last row's always
            kept[:-1] = differ(after[:-1], now[1:])
            del dumped[later]
            dumped[later + _AFTER] = Ragged(after[kept], kept.long())
        return dumped

    @override
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        return super().restore(
            storage, tables, (Span(slots, partial(_filled, read)) for slots, read in spans), rows
        )


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """A `FlatStorageCheckpointer` that also writes where trajectories begin: the column ``#starts``, bool per row.

    A reader of the files finds the trajectories by it, as `layout.run_starts` does; each file begins one. Loading does
    not need it.

    Args:
        done_keys, reward_keys: see `FlatStorageCheckpointer`.
    """

    @override
    def dump(self, storage: Any, slots: Tensor) -> dict[str, Column]:
        names = BoundaryKeys()
        markers = [names.is_init, names.done, names.traj, "episode"]
        columns = {key: storage.columns[key].take(slots) for key in markers if key in storage.columns}
        if not columns:
            raise KeyError(
                f"{type(self).__name__} needs rows with a marker of trajectories, one of {markers}: use "
                "FlatStorageCheckpointer"
            )
        batch = nest(columns, slots.shape)
        keys = BoundaryKeys.probe(batch)
        starts = run_starts(batch, is_init_key=keys.is_init, done_key=keys.done, traj_key=keys.traj)
        return {**super().dump(storage, slots), _STARTS: starts}

    @override
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        kept = (Span(slots, partial(_without_starts, read)) for slots, read in spans)
        return super().restore(storage, tables, kept, rows)


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """The checkpointer of `StorageEnsemble`: each member's own writes its rows, to a folder of their own."""

    @override
    def check(self, storage: Any) -> None:
        if not hasattr(storage, "parts"):
            raise TypeError(
                f"StorageEnsembleCheckpointer is for a StorageEnsemble, this is a {type(storage).__name__}"
            )

    @override
    def dump(self, storage: Any, slots: Tensor) -> dict[str, Column]:
        raise TypeError("a StorageEnsemble has no rows of its own: its members are saved")

    @override
    def restore(
        self, storage: Any, tables: dict[str, Any], spans: Iterable[Span], rows: int
    ) -> dict[str, Any]:
        raise TypeError("a StorageEnsemble has no rows of its own: its members are loaded")


def _without_starts(read: Callable[[Any], Any], targets: Any) -> dict[str, Column]:
    """The columns of a span but for where runs begin."""
    return {name: values for name, values in read(targets).items() if name != _STARTS}


def _filled(read: Callable[[Any], Any], targets: Any) -> dict[str, Column]:
    """The columns of a span with all next values."""
    tensors = read(targets)
    filled = {name: values for name, values in tensors.items() if not name.endswith(_AFTER)}
    for name, kept in tensors.items():
        if not name.endswith(_AFTER):
            continue
        later = name.removesuffix(_AFTER)
        now = tensors.get(later.partition("/")[2])
        if not isinstance(kept, Ragged) or not isinstance(now, Tensor):
            raise damaged(f"its rows lack what the entry {later!r} is the next value of")
        check_values("next values", kept.values, now.dtype, now.shape[1:])
        if bool((kept.lengths > 1).any()) or (len(now) and int(kept.lengths[-1]) != 1):
            raise damaged(f"the next values of {later!r} are not one a row, or lack the last")
        after = now.roll(-1, 0)
        put_rows(after, kept.lengths.nonzero().squeeze(1), kept.values)
        filled[later] = after
    return filled

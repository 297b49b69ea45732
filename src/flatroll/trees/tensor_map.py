"""`TensorDictMap`: maps rows of a tensordict, by their values, to rows of another one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.buffers import Storage
from flatroll.kernels.rows.row_index import occurrences
from flatroll.layout.checks import check_whole_number
from flatroll.layout.keys import NestedKey, require
from flatroll.layout.tensordict_seam import nest
from flatroll.trees.query import Hash, QueryModule
from flatroll.trees.rows import GrowingColumns, flat_columns

K = TypeVar("K")
V = TypeVar("V")


class TensorMap(ABC, Generic[K, V]):
    """The interface of maps from batches of keys to batches of values."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all keys and values."""

    @abstractmethod
    def __getitem__(self, item: K) -> V: ...

    @abstractmethod
    def __setitem__(self, key: K, value: V) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def contains(self, item: K) -> Tensor:
        """Return which keys are in the map, bool ``[*B]``."""

    def __contains__(self, item: K) -> bool:
        """Return whether all keys of ``item`` are in the map."""
        return bool(self.contains(item).all())


class TensorDictMap(TensorDictModuleBase, TensorMap[TensorDictBase, TensorDictBase]):
    """A dict for batches: keys and values are rows of tensordicts; keys are compared by some of their entries.

    ``map[keys] = values`` stores values for keys of batch size ``[*B]``, or for a single row, and writes the keys'
    positions and hashes into ``keys`` (`QueryModule`). Of equal keys in one batch the last one wins. ``map[keys]``
    returns values, ``map.contains(keys)`` returns which keys are in the map, ``len(map)`` is the number of distinct
    keys. A write that fails changes nothing.

    Args:
        query_module: finds keys.
        storage: an empty `Storage` that nothing else uses, with room for all distinct keys. Default: memory that
            grows.
        collate_fn: turns what the storage returns for a batch into a tensordict. Default: stacks lists.
        out_keys: entries of values to store. Default: all entries of the first values.
        write_fn: combines values: ``write_fn(new)`` for new keys, ``write_fn(new, old)`` for existing ones, all
            tensordicts ``[n]``, returns the values to store. Equal keys in one batch are combined one after another.
        max_size: maximum number of distinct keys. Default: the storage's, or no limit.

    >>> from tensordict import TensorDict
    >>> names = TensorDictMap(query_module=QueryModule(["x"]))
    >>> names[TensorDict({"x": torch.tensor([3, 5])}, [2])] = TensorDict({"y": torch.tensor([0.3, 0.5])}, [2])
    >>> asked = TensorDict({"x": torch.tensor([5, 4])}, [2])
    >>> names.contains(asked), names.get(asked, default=0.0)["y"], len(names)
    (tensor([ True, False]), tensor([0.5000, 0.0000]), 2)
    """

    def __init__(
        self,
        *,
        query_module: QueryModule,
        storage: Storage | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        write_fn: Callable[..., TensorDictBase] | None = None,
        max_size: int | None = None,
    ) -> None:
        super().__init__()
        if storage is not None and (not isinstance(storage, Storage) or len(storage)):
            raise ValueError(f"storage must be an empty flatroll.buffers.Storage, got {storage!r}")
        if len(query_module):
            raise ValueError(
                "query_module must not have seen any rows, since the map would have no values for them"
            )

        keys: list[Any] = query_module.in_keys  # tensordict annotates a wider type
        self._read: list[NestedKey] = keys
        self.in_keys = query_module.in_keys  # pyright: ignore[reportAttributeAccessIssue]

        self.query_module = query_module
        self.index_key = query_module.index_key
        self.storage = GrowingColumns() if storage is None else storage
        self.collate_fn = _stack_list if collate_fn is None else collate_fn

        self.write_fn = write_fn
        self._count = 0
        self._stored_keys = list[NestedKey]()
        self._wanted = None if out_keys is None else list(out_keys)

        if max_size is not None:
            check_whole_number("max_size", max_size)
        of_storage = None if storage is None else storage.max_size
        limits = [limit for limit in (max_size, of_storage) if limit is not None]
        self.max_size = min(limits, default=None)

    @classmethod
    def from_tensordict_pair(
        cls,
        source: TensorDictBase,
        dest: TensorDictBase,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] | None = None,
        max_size: int | None = None,
        storage_constructor: Callable[[], Storage] | None = None,
        hash_module: Hash | list[Hash] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        write_fn: Callable[..., TensorDictBase] | None = None,
        consolidated: bool | None = None,
    ) -> "TensorDictMap":
        """Build an empty map for keys and values like those given.

        Args:
            source: keys, only used to check that they have ``in_keys``.
            dest: values, only used to check that they have ``out_keys``.
            in_keys: entries by which keys are compared.
            out_keys: entries of values to store. Default: all.
            max_size: maximum number of distinct keys. Default: no limit.
            storage_constructor: called without arguments, returns the storage. Default: memory that grows.
            hash_module: see `QueryModule`. Default: keys are compared exactly.
            collate_fn: see `TensorDictMap`.
            write_fn: see `TensorDictMap`.
            consolidated: accepted for compatibility, without effect.

        Raises:
            KeyError: an entry is missing.
        """
        for key in in_keys:
            require(source, key)
        for key in out_keys or ():
            require(dest, key)

        query_module = QueryModule(list(in_keys), hash_module=hash_module)
        storage = None if storage_constructor is None else storage_constructor()
        if out_keys is None:
            out_keys = list(dest.keys(True, True))
        return cls(
            query_module=query_module,
            storage=storage,
            collate_fn=collate_fn,
            out_keys=out_keys,
            write_fn=write_fn,
            max_size=max_size,
        )

    @property
    def out_keys(self) -> list[NestedKey]:
        """Entries of the values; empty before the first write if not given."""
        if self._wanted is not None:
            return self._wanted
        return self._stored_keys

    @out_keys.setter
    def out_keys(self, value: list[NestedKey]) -> None:
        self._wanted = value

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Remove all keys and values. A given storage keeps its rows until they are overwritten."""
        self.query_module.clear()
        self._count = 0
        self._stored_keys = []
        if isinstance(self.storage, GrowingColumns):
            self.storage.clear()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the values of keys ``[*B]``: the same as ``map[tensordict]``."""
        return self[tensordict]

    def contains(self, item: TensorDictBase) -> Tensor:
        """Return which keys ``[*B]`` are in the map, bool ``[*B]``."""
        found = self._find(item)
        return ((found >= 0) & (found < len(self))).reshape(item.batch_size)

    def __getitem__(self, item: TensorDictBase) -> TensorDictBase:
        return self.get(item)

    def get(self, item: TensorDictBase, default: TensorDictBase | float | None = None) -> TensorDictBase:
        """Return the values of keys.

        Args:
            item: keys ``[*B]``; not modified.
            default: value for unknown keys: a tensordict ``[]`` or ``[*B]`` with the values' entries, or a number for
                all entries. Default None: KeyError.

        Raises:
            KeyError: keys are unknown and there is no default; the message counts them and names the first one.
        """
        found = self._find(item)
        unknown = (found < 0) | (found >= len(self))
        values: TensorDictBase | None = None

        if bool(unknown.any()):
            row = int(unknown.nonzero()[0, 0])
            if default is None or (not len(self) and not isinstance(default, TensorDictBase)):
                first = {key: require(item, key).reshape(len(found), -1)[row].tolist() for key in self._read}
                raise KeyError(
                    f"{int(unknown.sum())} of {len(found)} keys are not in the map, the first in row {row}: "
                    f"{first}. Check with contains(), or pass default="
                )
            if isinstance(default, TensorDictBase):
                values = default.expand(item.batch_size).reshape(len(found)).clone()

        if values is None or not bool(unknown.all()):
            known = (~unknown).nonzero().squeeze(-1)
            stored = self.collate_fn(self.storage.get(found[known]))
            if len(known) == len(found):
                return cast(TensorDictBase, stored.reshape(item.batch_size))
            if values is None:
                filled = cast(TensorDictBase, torch.full_like(stored[:1], cast(float, default)))
                values = filled.expand(len(found)).clone()
            values = values.select(*stored.keys(True, True))
            values[known] = stored

        return values.reshape(item.batch_size)

    def __setitem__(self, item: TensorDictBase, value: TensorDictBase) -> None:
        query = self.query_module
        count = self._count
        columns = query.columns(item)

        if value.batch_size != item.batch_size:
            raise ValueError(
                f"keys and values must be of one batch size, got {list(item.batch_size)} and {list(value.batch_size)}"
            )
        keys = self.out_keys or list(value.keys(True, True))
        for key in keys:
            require(value, key)
        new = flat_columns(value, keys)

        at, hashes = query.number(columns)
        done = False
        try:
            if self.max_size is not None and len(query) > self.max_size:
                raise RuntimeError(
                    f"{len(query) - count} new keys do not fit: the map has {count} of at most {self.max_size}. "
                    "Nothing was written"
                )
            self._write(at, new, count)
            reached = int(at.max()) + 1 if len(at) else 0
            self._count = max(count, reached)
            self._stored_keys = list(new)
            done = True
        finally:
            if not done:
                query.truncate(count)

        if not item.is_locked:
            query.write(item, at, hashes)

    def _write(self, at: Tensor, new: dict[NestedKey, Tensor], count: int) -> None:
        """Write rows at positions; those from ``count`` on are new."""
        if not len(at):
            return

        turn = occurrences(at)
        last = torch.zeros(int(at.max()) + 1, dtype=torch.int64, device=at.device)
        # Where positions repeat, store the value of the row with the highest turn: the last one, or the
        # combination of all.
        last.scatter_reduce_(0, at, torch.arange(len(at), device=at.device), "amax")

        if self.write_fn is not None:
            new = {key: column.clone() for key, column in new.items()}
            before = torch.zeros_like(last)  # row of the previous turn at each position
            for round_ in range(int(turn.max()) + 1):
                rows = (turn == round_).nonzero().squeeze(-1)
                if round_:
                    previous = {key: column[before[at[rows]]] for key, column in new.items()}
                    self._combine(new, rows, previous)
                else:
                    known = at[rows] < count
                    self._combine(new, rows[~known], None)
                    if bool(known.any()):
                        stored = self.collate_fn(self.storage.get(at[rows[known]]))
                        self._combine(new, rows[known], flat_columns(stored))
                before[at[rows]] = rows

        rows = last[at] == torch.arange(len(at), device=at.device)
        rows = rows.nonzero().squeeze(-1)
        if len(rows):
            rows = rows[at[rows].argsort()]
            self._store(at[rows], {key: column[rows] for key, column in new.items()})

    def _store(self, at: Tensor, columns: dict[NestedKey, Tensor]) -> None:
        """Store rows at ascending positions, over old rows or right after them."""
        if isinstance(self.storage, GrowingColumns):
            self.storage.check(columns)
            self.storage.set(at, columns)
        else:
            self.storage.set(at, nest(columns, len(at)))

    def _combine(
        self, new: dict[NestedKey, Tensor], rows: Tensor, old: dict[NestedKey, Tensor] | None
    ) -> None:
        """Replace the given rows of ``new`` by the results of ``write_fn``."""
        if not len(rows):
            return
        assert self.write_fn is not None

        values = [nest({key: column[rows] for key, column in new.items()}, len(rows))]
        if old is not None:
            values.append(nest(old, len(rows)))
        made = flat_columns(self.write_fn(*values))

        for key in new:
            if key not in made:
                raise KeyError(f"write_fn must return the entry {key!r}, got {sorted(map(str, made))}")
            new[key][rows] = made[key]

    def _find(self, item: TensorDictBase) -> Tensor:
        query = self.query_module
        return query.number(query.columns(item), extend=False)[0]

    def get_extra_state(self) -> dict[str, Any]:
        """Return the values for ``state_dict()``; the keys are in the query module's."""
        values = None
        if len(self):
            values = dict(flat_columns(self.storage.get(torch.arange(len(self)))))
        return {"values": values}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._count = 0
        if isinstance(self.storage, GrowingColumns):
            self.storage.clear()
        if state["values"] is not None:
            self._count = len(next(iter(state["values"].values())))
            self._stored_keys = list(state["values"])
            self._store(torch.arange(self._count), state["values"])


def _stack_list(values: Any) -> Any:
    if isinstance(values, list):
        if values:
            return torch.stack(values)
        return TensorDict({}, [0])
    return values

"""`QueryModule`: finds the position of each row of a tensordict by its entries."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.kernels.rows.words import hash_words, pack_rows
from flatroll.layout.checks import check_flags, check_function, check_key_names, check_keys
from flatroll.layout.keys import NestedKey, missing_marker
from flatroll.layout.tensordict_seam import get_entry, set_entry
from flatroll.trees.rows import RowNumbers

Hash = Callable[[Any], Any]


class QueryModule(TensorDictModuleBase):
    """Writes each row's position in a map, determined by the values of some entries.

    Positions are dense, in the order in which rows are first seen; rows are compared exactly, unless a hash module is
    given. The hash of a row is a 64-bit integer that is the same in every process.

    Args:
        in_keys: the entries by which rows are compared.
        index_key: where positions are written, int64 ``[*B]``. Default ``"_index"``.
        hash_key: key under which hashes are written, int64 ``[*B]``. Default ``"_hash"``.
        hash_module: maps an entry's rows ``[N, *F]`` to ``[N]`` or ``[N, H]``; rows are equal if its values
            are. One module for all entries (copied for each), or a list with one per entry. Default None: rows are
            equal if the entries are.
        hash_to_int: maps hashes ``[N]`` and a keyword ``extend`` to positions, as `HashToInt` does. Default: exact
            numbering inside this module.
        aggregator: maps the stacked hashes ``[N, len(in_keys)]`` to one hash ``[N]``; not used with one entry. Default:
            rows are equal if all hashes are.
        clone: write to a shallow copy. Default False: to the tensordict given.

    Raises:
        ValueError: there are no ``in_keys``, or the number of hash modules differs from theirs.

    >>> from tensordict import TensorDict
    >>> query = QueryModule(in_keys=["x", "y"])
    >>> rows = TensorDict({"x": torch.tensor([[1.0], [1.0], [1.0], [2.0]]), "y": torch.tensor([3, 3, 2, 3])}, [4])
    >>> query(rows)["_index"]
    tensor([0, 0, 1, 2])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | NestedKey,
        index_key: NestedKey = "_index",
        hash_key: NestedKey = "_hash",
        *,
        hash_module: Hash | list[Hash] | None = None,
        hash_to_int: Callable[..., Tensor] | None = None,
        aggregator: Hash | None = None,
        clone: bool = False,
    ) -> None:
        super().__init__()
        check_keys(index_key=index_key, hash_key=hash_key)
        check_flags(clone=clone)

        keys: list[NestedKey] = [
            cast(Any, unravel_key(key)) for key in check_key_names("in_keys", in_keys, one=True)
        ]
        index_key = cast(Any, unravel_key(index_key))
        hash_key = cast(Any, unravel_key(hash_key))
        if not keys:
            raise ValueError("in_keys must name at least one entry, got an empty list")

        self._read = keys
        self.in_keys, self.out_keys = keys, [index_key, hash_key]  # pyright: ignore[reportAttributeAccessIssue]
        self.index_key = index_key
        self.hash_key = hash_key
        self.clone = clone

        if hash_module is not None and not isinstance(hash_module, list):
            hash_module = [hash_module, *(deepcopy(hash_module) for _ in keys[1:])]
        if hash_module is not None and len(hash_module) != len(keys):
            raise ValueError(
                f"hash_module must have one module for each of the {len(keys)} in_keys, got {len(hash_module)}"
            )

        for module in hash_module or ():
            check_function("hash_module", module, "a module or a function of rows")
        if hash_to_int is not None:
            check_function("hash_to_int", hash_to_int, "a function of hashes")
        if aggregator is not None:
            check_function("aggregator", aggregator, "a function of hashes")

        # Modules among them are registered, so that state_dict() includes them.
        self.hash_module = hash_module
        for i, module in enumerate(hash_module or ()):
            if isinstance(module, torch.nn.Module):
                self.add_module(f"hash_module_{i}", module)

        self.hash_to_int = hash_to_int
        self.aggregator = aggregator if len(keys) > 1 else None
        names: Sequence[NestedKey] = keys
        if hash_module is not None or self.aggregator is not None:
            names = ["hash"] * len(keys)
        self._rows = RowNumbers(names)

    def __len__(self) -> int:
        """Number of distinct rows seen."""
        if self.hash_to_int is None:
            return len(self._rows)
        return len(cast(Any, self.hash_to_int))

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        extend: bool = True,
        write_hash: bool = True,
        clone: bool | None = None,
    ) -> TensorDictBase:
        """Write positions and hashes.

        Args:
            tensordict: ``[*B]`` with the in-keys.
            extend: give positions to rows that have none. Default True. False: they get ``len(self)``.
            write_hash: write hashes as well. Default True.
            clone: overrides the option of this name.

        Raises:
            KeyError: an in-key is missing.
            TypeError: an entry has another dtype or shape than in the rows before, or a hash module returns no tensor.
        """
        index, hashes = self.number(self.columns(tensordict), extend)
        if not extend and self.hash_to_int is None:
            index = torch.where(index < 0, len(self), index)

        if clone is None:
            clone = self.clone
        if clone:
            tensordict = tensordict.copy()
        written_hashes = hashes if write_hash else None
        self.write(tensordict, index, written_hashes)
        return tensordict

    def write(self, tensordict: TensorDictBase, index: Tensor, hashes: Tensor | None) -> None:
        """Write positions and hashes, ``[N]`` each, into a tensordict ``[*B]`` of N rows."""
        rows = tensordict.batch_size
        for key, column in ((self.index_key, index), (self.hash_key, hashes)):
            if column is not None:
                if len(rows) != 1:
                    column = column.reshape((*rows, *column.shape[1:]))
                set_entry(tensordict, key, column)

    def columns(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return the columns ``[N, *F]`` that identify rows, in-keys or their hashes, over all batch dims."""
        if not hasattr(tensordict, "batch_size"):
            raise TypeError(
                f"keys must be a tensordict with the entries {self._read}, got {type(tensordict).__name__}: "
                "pass e.g. TensorDict(observation=..., action=...)"
            )

        rows = tensordict.batch_size.numel()
        columns = [get_entry(tensordict, key) for key in self._read]
        for key, column in zip(self._read, columns, strict=True):
            if column is None:
                raise missing_marker(key, tensordict.keys(True, True))

        if tensordict.batch_dims != 1:
            columns = [column.reshape(rows, *column.shape[tensordict.batch_dims :]) for column in columns]

        if self.hash_module is not None:
            columns = [module(column) for module, column in zip(self.hash_module, columns, strict=True)]
            for key, column in zip(self._read, columns, strict=True):
                if not isinstance(column, Tensor):
                    raise TypeError(
                        f"hash_module must return a tensor for {key!r}, got {type(column).__name__}: "
                        "SipHash and similar modules do so with as_tensor=True"
                    )

        if self.aggregator is None:
            return columns
        return [self.aggregator(torch.stack(columns, -1))]

    def number(self, columns: list[Tensor], extend: bool = True) -> tuple[Tensor, Tensor]:
        """Positions and hashes, int64 ``[N]`` each, of rows given as :meth:`columns` returns them.

        New rows get new positions if ``extend``, else -1, or what the given ``hash_to_int`` returns for them.
        """
        hashed = self.hash_module is not None or self.aggregator is not None
        if self.hash_to_int is None and not (hashed and len(columns) == 1):
            return self._rows.number(columns, extend)

        if hashed and len(columns) == 1:
            hashes = columns[0]
        else:
            hashes = hash_words(pack_rows(columns))

        if self.hash_to_int is None:
            return self._rows.number(columns, extend)[0], hashes
        return self.hash_to_int(hashes, extend=extend), hashes

    def truncate(self, count: int) -> None:
        """Forget the rows from position ``count`` on; a ``hash_to_int`` without ``truncate`` is left unchanged."""
        numbering: Any = self._rows if self.hash_to_int is None else self.hash_to_int
        if hasattr(numbering, "truncate"):
            numbering.truncate(count)

    def clear(self) -> None:
        """Forget all rows, and their dtypes and shapes."""
        if self.hash_to_int is None:
            self._rows.truncate(0)
        else:
            cast(Any, self.hash_to_int).clear()

    def get_extra_state(self) -> dict[str, Any]:
        """The rows in the order of their positions; part of ``state_dict()``."""
        return self._rows.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)

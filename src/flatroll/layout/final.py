"""Reads and checks ``final=``: the next observations that no row of a compact batch holds.

A compact batch holds each observation once: the next observation of a row is the observation of the next row. The
last rows of runs have no next row, so the collector reports their K next observations separately
(``collector.final``): ``"row"``, int64 ``[K]`` ascending, the rows of the batch that they follow, and ``("next",
<observation>)`` ``[K, *F]``.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.keys import (
    MASK,
    NEXT,
    NEXT_KNOWN,
    NestedKey,
    as_tuple,
    marker,
    next_key,
    plain_key,
    require,
)


class Final(NamedTuple):
    """The contents of ``final``: row numbers, and next observations by key.

    Attributes:
        row: int64 ``[K]``, the rows of the batch that the observations follow; None if there is no such entry.
        next: next observations ``[K, *F]``, by the key that they have at the root of the batch.
    """

    row: Tensor | None
    next: dict[NestedKey, Tensor]


def read_final(
    final: object, keys: Iterable[NestedKey] | None = None, *, wanted: str = "collector.final"
) -> Final:
    """Read ``final``: the next observations of ``keys`` that it has; by default all entries.

    Args:
        final: what the caller passed as ``final=``.
        keys: keys of observations at the root of the batch. Default: all entries but ``"row"``.
        wanted: expected form of ``final``, for the error.

    Raises:
        TypeError: ``final`` is not a tensordict.
        ValueError: all entries are read and one is not under ``"next"``.

    >>> from tensordict import TensorDict
    >>> final = TensorDict({"row": torch.tensor([1]), "next": {"pos": torch.ones(1)}}, [1])
    >>> read_final(final), read_final(final, ["velocity"]).next
    (Final(row=tensor([1]), next={'pos': tensor([1.])}), {})
    """
    if not isinstance(final, TensorDictBase):
        raise TypeError(f"final must be a tensordict, {wanted}, got {type(final).__name__}")

    present: dict[NestedKey, Tensor] = {}
    if keys is not None:
        entries = {key: final.get(next_key(key), None) for key in keys}
        present = {key: column for key, column in entries.items() if column is not None}
    else:
        for key, column in final.items(True, True):
            names = as_tuple(key)
            if names == ("row",):
                continue
            if names[0] != NEXT or len(names) < 2:
                raise ValueError(
                    f"final has an entry {key!r}, expected only 'row' and ('next', <entry of the batch>)"
                )
            present[plain_key(names[1:])] = column  # ("next", "pos") follows "pos"

    return Final(final.get("row", None), present)


def check_final(final: Final, columns: Mapping[NestedKey, Tensor], rows: int) -> Tensor:
    """Check that ``final`` fits a batch of ``rows`` rows, and return its row numbers.

    Args:
        final: what :func:`read_final` returned.
        columns: columns ``[rows, *F]`` of the batch by key, the observations at least.
        rows: number of rows of the batch.

    Raises:
        ValueError: no ``"row"``, rows out of order or range, or entries of another shape or dtype than the batch's.

    >>> check_final(Final(torch.tensor([1]), {"pos": torch.ones(1)}), {"pos": torch.zeros(2)}, 2)
    tensor([1])
    """
    row = final.row
    if row is None or row.dtype is not torch.int64 or row.ndim != 1:
        if row is None:
            received = "nothing"
        else:
            received = f"{row.dtype} {tuple(row.shape)}"
        raise ValueError(
            f'final needs an int64 entry "row" of shape [K], got {received}: pass collector.final'
        )

    # Strictly ascending rows do not repeat, and the first and last bound all others.
    if len(row) and (int(row[0]) < 0 or int(row[-1]) >= rows or bool((row[1:] <= row[:-1]).any())):
        raise ValueError(
            f'final["row"] must ascend within the {rows} rows of the batch, got {row.tolist()[:8]}: '
            "pass the final that came with this batch, or none with a batch that was changed"
        )

    for key, value in final.next.items():
        column = columns.get(key)
        if column is None:
            raise ValueError(
                f"final[{next_key(key)!r}] must belong to an entry of the batch, which has no {key!r}"
            )
        if value.shape[1:] != column.shape[1:] or value.dtype != column.dtype:
            raise ValueError(
                f"final[{next_key(key)!r}] is {value.dtype} {tuple(value.shape[1:])} per row, "
                f"batch[{key!r}] is {column.dtype} {tuple(column.shape[1:])}"
            )

    return row


def next_entry(batch: TensorDictBase, key: NestedKey, final: TensorDictBase | None = None) -> Tensor:
    """Return the next values of an observation's entry ``key``, ``[*B, *F]``.

    Where they are not known (hidden by the env, or NaN), the row's own value takes their place; in padding they are 0.

    Args:
        batch: rows ``[*B]``, with ``("next", key)``, or a compact batch ``[N]``.
        key: of the entry.
        final: the next observations that no row of a compact batch holds. Default: none.

    Raises:
        KeyError: the batch lacks the entry, or its next values are neither in it nor in ``final``.
        ValueError: ``final`` does not belong to this batch.

    >>> from tensordict import TensorDict
    >>> final = TensorDict({"row": torch.tensor([1, 2]), "next": {"pos": torch.tensor([3.0, 8.0])}}, [2])
    >>> next_entry(TensorDict({"pos": torch.tensor([1.0, 2.0, 7.0])}, [3]), "pos", final)
    tensor([2., 3., 8.])
    """
    own = require(batch, key)
    after: Tensor | None = batch.get(next_key(key), None)
    if after is None and final is not None:
        given = read_final(final, [key])
        if key in given.next:
            after = next_values(own, check_final(given, {key: own}, len(own)), given.next[key])
    if after is None:
        after = require(batch, next_key(key))  # the error says what writes the entry

    def of_rows(flag: Tensor) -> Tensor:
        return flag.reshape(*flag.shape, *[1] * (own.ndim - flag.ndim))

    lost = after.isnan()
    if batch.get(NEXT_KNOWN, None) is not None:
        lost = lost | of_rows(~marker(batch, NEXT_KNOWN))
    after = torch.where(lost, own, after)
    if batch.get(MASK, None) is not None:
        after = after.masked_fill(of_rows(~marker(batch, MASK)), 0)
    return after


def next_values(column: Tensor, row: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """Return the next values of a compact batch's column: those of the next rows, and ``last`` after the rows ``row``.

    Args:
        column: observations ``[N, *F]``.
        row: int64 ``[K]``, the rows that ``last`` follows, as `check_final` returns them. Default: none.
        last: ``[K, *F]``.

    Returns:
        ``[N, *F]``, a copy. At run ends without an entry of ``last`` the value belongs to another run.

    >>> next_values(torch.tensor([1, 2, 7]), torch.tensor([1, 2]), torch.tensor([3, 8]))
    tensor([2, 3, 8])
    """
    following = column.roll(-1, 0)
    if row is not None and last is not None:
        following[row] = last
    return following

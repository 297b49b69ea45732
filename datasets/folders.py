"""Folders of segments that appear when they are whole: how rows are written into them."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers.columns.base import Columns
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.continuity import find_pairs, state_pairs
from flatroll.buffers.storages.disk.forms import Form
from flatroll.buffers.storages.disk.log import Layout
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.disk import Folder, Ragged, column_name
from flatroll.disk.listing import Listing
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, next_key

_ROWS_LOOKED_AT = 1024  # to find out which next observations are those of the row after


class Written(NamedTuple):
    """What `write_folder` wrote: the number of the row after the last one, and how rows are kept."""

    end: int
    layout: Layout


def write_folder(
    pieces: Iterable[Columns],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    kinds: Mapping[NestedKey, type[Form]] | None = None,
    layout: Layout | None = None,
    first: int = 0,
) -> Written:
    """Write columns ``[N, ...]`` by key, each piece as a segment; the arguments and errors of `convert`.

    Args:
        kinds: forms of entries that are not kept as they are.
        layout: how rows are kept, if another folder says so already.
        first: number of the first row.
    """
    target = Path(path).resolve()
    _check_place(target, overwrite)
    beside = target.parent / f".{target.name}.part"
    target.parent.mkdir(parents=True, exist_ok=True)
    with Folder(beside, write=True, overwrite=True) as folder:
        for rows in pieces:
            some = {key: values[:_ROWS_LOOKED_AT] for key, values in rows.items()}
            layout = layout or _layout_of(some, kinds or {})
            folder.append(_encode(rows, layout), first=folder.end if folder.segments else first)
        if layout is None or not folder.segments:
            raise ValueError(f"there are no rows to convert into {target}")
        _check_place(target, overwrite)  # another process may have made it meanwhile
        publish(folder, layout, target, facts)
    return Written(folder.end, layout)


def _check_place(target: Path, overwrite: bool) -> None:
    """Raise FileExistsError if there is something that must not, or cannot, be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: give overwrite=True, or choose another path")
    if not target.is_dir() or Listing.of(target).is_empty:
        raise FileExistsError(f"{target} is no folder of rows, so it is not replaced: choose another path")


def publish(folder: Folder, layout: Layout, target: Path, facts: Mapping[str, Any] | None) -> None:
    """Publish the rows of a folder as its only version, and give it the name ``target``; one that has it goes."""
    folder.publish(layout.to_json(), extra=dict(facts or {}))
    if target.exists():
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)  # a crash right here leaves no data set: it is converted again
        folder.path.rename(target)
        shutil.rmtree(old)
    else:
        folder.path.rename(target)


def _layout_of(rows: Columns, kinds: Mapping[NestedKey, type[Form]]) -> Layout:
    """How to keep rows such as these, the first ones of a set."""
    pairs: list[NestedKey] = []
    if state_pairs(rows) and any(key in rows for key in (IS_INIT, DONE, TRAJ_IDS)):
        pairs = find_pairs(rows, rows, None, _boundary_keys(rows))
        if (
            len(_lasts(rows, NextPool(pairs))) > _count(rows) // 2
        ):  # n-step rows, or trajectories of one row each
            pairs = []
    twice = {next_key(key) for key in pairs}
    forms = {
        key: kinds.get(key, Form)(values.dtype, values.shape[1:])
        for key, values in rows.items()
        if key not in twice
    }
    return Layout(forms, pairs, [])


def _encode(rows: Columns, layout: Layout) -> dict[str, Tensor | Ragged]:
    """Return what a file of the folder holds of these rows."""
    columns: dict[str, Tensor | Ragged] = {
        column_name(key): form.encode(rows[key]) for key, form in layout.forms.items()
    }
    if layout.pairs:
        # The last row of each fragment, and so of the file, has its next observation beside it.
        pool = NextPool(layout.pairs)
        lasts = _lasts(rows, pool)
        lengths = torch.zeros(_count(rows), dtype=torch.int64)
        lengths[torch.from_numpy(lasts)] = 1
        for key, values in pool.tails(rows, None, lasts).items():
            columns[column_name(next_key(key))] = Ragged(values, lengths)
    return columns


def _lasts(rows: Columns, pool: NextPool) -> Array:
    return Fragments.read(rows, _boundary_keys(rows), pool.cuts(rows, None)).lasts


def _boundary_keys(rows: Columns) -> BoundaryKeys:
    return BoundaryKeys.probe(TensorDict(dict(rows), [_count(rows)]))


def _count(rows: Columns) -> int:
    return len(next(iter(rows.values())))

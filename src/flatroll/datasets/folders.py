"""Folders of segments that appear when they are whole: how rows are written into them."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers.columns.column import Columns
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.continuity import find_pairs, state_pairs
from flatroll.buffers.storages.disk.forms import Form
from flatroll.buffers.storages.disk.layout import Layout
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.datasets.pieces import Piece
from flatroll.disk import Folder, Ragged, column_name
from flatroll.disk.folder import Listing
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, next_key

_ROWS_LOOKED_AT = 1024  # to find out which next observations are those of the row after


class Written(NamedTuple):
    """What `write_folder` wrote: the number of the row after the last one, and how rows are kept."""

    end: int
    layout: Layout


def write_folder(
    pieces: Iterable[Piece],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    kinds: Mapping[NestedKey, type[Form]] | None = None,
    layout: Layout | None = None,
    first: int = 0,
) -> Written:
    """Write rows, each piece as a segment; the arguments and errors of `convert`.

    Args:
        kinds: forms of entries that are not kept as they are.
        layout: how rows are kept, if another folder says so already.
        first: number of the first row.
    """
    target = Path(path).resolve()
    _check_place(target, overwrite)
    beside = target.parent / f".{target.name}.part"
    target.parent.mkdir(parents=True, exist_ok=True)
    # A piece is a file, whatever its size: merging would write it again. Names are synced once, with the manifest.
    with Folder(beside, write=True, overwrite=True, segment_bytes=1, log=False) as folder:
        for piece in pieces:
            layout = layout or _layout_of(piece, kinds or {})
            folder.append(_encode(piece, layout), first=folder.end if folder.segments else first)
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


def _layout_of(piece: Piece, kinds: Mapping[NestedKey, type[Form]]) -> Layout:
    """How to keep rows such as these, the first ones of a set."""
    rows, pairs = piece.columns, list(piece.tails)
    if not pairs:
        rows = {key: values[:_ROWS_LOOKED_AT] for key, values in rows.items()}
        piece, pairs = Piece(rows), state_pairs(rows)
    if not any(key in rows for key in (IS_INIT, DONE, TRAJ_IDS)):
        pairs = []
    if pairs and not piece.tails:
        pairs = find_pairs(rows, rows, None, _boundary_keys(rows))
    if pairs and len(_lasts(piece, pairs)) > _count(rows) // 2:
        pairs = []  # n-step rows, or trajectories of one row each
    rows = rows if pairs else piece.whole().columns
    twice = {next_key(key) for key in pairs}
    forms = {
        key: kinds.get(key, Form)(values.dtype, values.shape[1:])
        for key, values in rows.items()
        if key not in twice
    }
    return Layout(forms, pairs, [])


def _encode(piece: Piece, layout: Layout) -> dict[str, Tensor | Ragged]:
    """Return what a file of the folder holds of these rows."""
    if set(piece.tails) != set(layout.pairs):
        piece = piece.whole()
    rows = piece.columns
    columns: dict[str, Tensor | Ragged] = {
        column_name(key): form.encode(rows[key]) for key, form in layout.forms.items()
    }
    if layout.pairs:
        # The last row of each fragment, and so of the file, has its next observation beside it.
        lasts = _lasts(piece, layout.pairs)
        lengths = torch.zeros(_count(rows), dtype=torch.int64)
        lengths[torch.from_numpy(lasts)] = 1
        if piece.tails:
            tails = piece.following(torch.from_numpy(lasts))
        else:
            tails = NextPool(layout.pairs).tails(rows, None, lasts)
        for key, values in tails.items():
            columns[column_name(next_key(key))] = Ragged(values, lengths)
    return columns


def _lasts(piece: Piece, pairs: list[NestedKey]) -> Array:
    """Numbers of the rows whose next observation is not that of the row after."""
    cuts = piece.cuts() if piece.tails else NextPool(pairs).cuts(piece.columns, None)
    return Fragments.read(piece.columns, _boundary_keys(piece.columns), cuts).lasts


def _boundary_keys(rows: Columns) -> BoundaryKeys:
    return BoundaryKeys.probe(TensorDict(dict(rows), [_count(rows)]))


def _count(rows: Columns) -> int:
    return len(next(iter(rows.values())))

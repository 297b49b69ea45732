"""`convert`: rows of any source into a folder of segments, which appears when it is whole."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import Columns
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.continuity import find_pairs, state_pairs
from flatroll.buffers.storages.disk.forms import Form, FrameForm, ZstdForm
from flatroll.buffers.storages.disk.log import Layout
from flatroll.buffers.storages.item_kinds import leaves
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.buffers.storages.tensors import Encodings
from flatroll.disk import Folder, Ragged, column_name
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, next_key

SEGMENT_BYTES = 32 << 20


def convert(
    batches: Iterable[TensorDictBase],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    frame_stack: Mapping[NestedKey, int] | None = None,
    codec: Mapping[NestedKey, str] | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> int:
    """Write flat batches into a folder of segments that a `BaseDatasetExperienceReplay` opens; return how many rows.

    The folder has another name while it is written (``.<name>.part`` beside it), so under ``path`` stands all of it
    or nothing; what a killed call left behind is begun anew by the next one. Memory holds one segment at a time. Next
    observations that are those of the row after are not written twice. `flatroll.buffers.DiskStorage` reads the folder.

    Args:
        batches: flat batches ``[N]`` of the same entries: trajectories end to end, an episode each, or any pieces of
            them, in order. Ids of trajectories must be those of the whole set.
        path: of the folder.
        facts: anything for JSON that ``flatroll inspect`` is to show.
        overwrite: put the folder in the place of one that is there. Default False.
        frame_stack: frames per stack by key, ``{"observation": 4}``: single frames are written, each once.
        codec: compression by key, ``{"pixels": "zstd"}``: lossless. Needs the extra ``zstd``.
        segment_bytes: bytes of rows that make a file. Default 32 MiB.

    Raises:
        FileExistsError: there is such a folder.
        BlockingIOError: another process converts into it.
        ValueError: no rows, or batches whose entries, shapes or dtypes differ.
        TypeError: an entry is no tensor.

    >>> import tempfile
    >>> from flatroll.datasets import BaseDatasetExperienceReplay
    >>> batch = TensorDict({"action": torch.arange(3), "next": {"done": torch.tensor([False, False, True])}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     convert([batch, batch], f"{folder}/set"), len(BaseDatasetExperienceReplay(f"{folder}/set"))
    (6, 6)
    """
    pieces = _pieces(batches, segment_bytes)
    return write_folder(
        pieces, path, facts=facts, overwrite=overwrite, frame_stack=frame_stack, codec=codec
    ).end


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
    frame_stack: Mapping[NestedKey, int] | None = None,
    codec: Mapping[NestedKey, str] | None = None,
    layout: Layout | None = None,
    first: int = 0,
) -> Written:
    """Write columns ``[N, ...]`` by key, each piece as a segment; the arguments and errors of `convert`.

    Args:
        layout: how rows are kept, if another folder says so already.
        first: number of the first row.
    """
    target = Path(path).absolute()
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give overwrite=True, or choose another path")
    beside = target.parent / f".{target.name}.part"
    target.parent.mkdir(parents=True, exist_ok=True)
    with Folder(beside, write=True, overwrite=True) as folder:
        for rows in pieces:
            layout = layout or _layout_of(rows, Encodings(frame_stack, codec))
            folder.append(_encode(rows, layout), first=folder.end if folder.segments else first)
        if layout is None or not folder.segments:
            raise ValueError(f"there are no rows to convert into {target}")
        publish(folder, layout, target, facts)
    return Written(folder.end, layout)


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


def _layout_of(rows: Columns, options: Encodings) -> Layout:
    """How to keep rows such as these, the first ones of a set."""
    options.row_bytes(
        {key: (values.dtype, values.shape[1:]) for key, values in rows.items()}
    )  # checks the options
    pairs: list[NestedKey] = []
    if state_pairs(rows) and any(key in rows for key in (IS_INIT, DONE, TRAJ_IDS)):
        pairs = find_pairs(rows, rows, None, _boundary_keys(rows))
        if (
            len(_lasts(rows, NextPool(pairs))) > _count(rows) // 2
        ):  # n-step rows, or trajectories of one row each
            pairs = []
    twice = {next_key(key) for key in pairs}
    forms: dict[NestedKey, Form] = {}
    for key, values in rows.items():
        if key not in twice:
            kind = FrameForm if key in options.frame_stack else ZstdForm if key in options.codec else Form
            forms[key] = kind(values.dtype, values.shape[1:])
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


def _pieces(batches: Iterable[TensorDictBase], piece_bytes: int) -> Iterator[Columns]:
    """Join and cut batches to pieces of ``piece_bytes`` (the last one: less), columns by key."""
    gathered: dict[NestedKey, list[Tensor]] = {}
    rows = row_bytes = 0
    for number, batch in enumerate(batches):
        if batch.batch_dims != 1:
            raise ValueError(f"batch {number} must be flat, [N], got {list(batch.batch_size)}")
        columns = leaves(batch)
        if not gathered:
            gathered = {key: [] for key in columns}
        if columns.keys() != gathered.keys():
            differing = sorted(map(str, columns.keys() ^ gathered.keys()))
            raise ValueError(
                f"batch {number} must have the entries of those before it: {differing} are not in both"
            )
        for key, value in columns.items():
            column = gathered[key]
            if column and (column[0].dtype, column[0].shape[1:]) != (value.dtype, value.shape[1:]):
                raise ValueError(
                    f"batch {number}: {key!r} is {value.dtype} {list(value.shape[1:])} a row, before it was "
                    f"{column[0].dtype} {list(column[0].shape[1:])}"
                )
            column.append(value)
        rows += len(batch)
        row_bytes = row_bytes or sum(value.shape[1:].numel() * value.itemsize for value in columns.values())
        fit = max(1, piece_bytes // max(1, row_bytes))
        if rows >= fit:
            joined = {key: torch.cat(column) for key, column in gathered.items()}
            for first in range(0, rows - rows % fit, fit):
                yield {key: column[first : first + fit] for key, column in joined.items()}
            gathered = {key: [column[rows - rows % fit :].clone()] for key, column in joined.items()}
            rows %= fit
    if rows:
        yield {key: torch.cat(column) for key, column in gathered.items()}

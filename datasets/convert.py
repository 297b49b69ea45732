"""`convert`: rows of any source into a folder of segments, which appears when it is whole."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.disk import Folder, column_name
from flatroll.disk.columns import byte_count

#: What a folder's version says of its rows, as `flatroll.buffers.DiskStorage` reads it.
_KIND = "flatroll.DiskStorage"
SEGMENT_BYTES = 32 << 20


def convert(
    batches: Iterable[TensorDictBase],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> int:
    """Write flat batches into a folder of segments that a `BaseDatasetExperienceReplay` opens; return how many rows.

    The folder has another name while it is written (``.<name>.part`` beside it), so under ``path`` stands all of it
    or nothing; what a killed call left behind is begun anew by the next one. Memory holds one segment at a time.

    Args:
        batches: flat batches ``[N]`` of the same entries: trajectories end to end, an episode each, or any pieces of
            them, in order. Ids of trajectories must be those of the whole set.
        path: of the folder.
        facts: anything for JSON that ``flatroll inspect`` is to show.
        overwrite: put the folder in the place of one that is there. Default False.
        segment_bytes: bytes of rows that make a file. Default 32 MiB.

    Raises:
        FileExistsError: there is such a folder.
        BlockingIOError: another process converts into it.
        ValueError: no rows, or batches whose entries, shapes or dtypes differ.
        TypeError: an entry is no tensor.

    >>> import tempfile
    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"action": torch.arange(3), "next": {"done": torch.tensor([False, False, True])}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     convert([batch, batch], f"{folder}/set"), len(BaseDatasetExperienceReplay(f"{folder}/set"))
    (6, 6)
    """
    target = Path(path).absolute()
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give overwrite=True, or choose another path")
    beside = target.parent / f".{target.name}.part"
    target.parent.mkdir(parents=True, exist_ok=True)
    with Folder(beside, write=True, overwrite=True, segment_bytes=segment_bytes) as folder:
        count = 0
        for columns in _segments(batches, segment_bytes):
            folder.append(columns, first=count)
            count = folder.end
        if not count:
            raise ValueError(f"there are no rows to convert into {target}")
        entries = [
            [name, column.dtype, list(column.shape), "plain"] for name, column in folder.columns.items()
        ]
        layout = {"kind": _KIND, "entries": entries, "pairs": [], "seams": []}
        folder.publish(layout, extra=dict(facts or {}))
        take_name(beside, target)
    return count


def take_name(beside: Path, target: Path) -> None:
    """Give a whole folder the name ``target``; a folder that has it goes."""
    if target.exists():
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)  # a crash after this leaves the new one beside, whole: it is converted again
        beside.rename(target)
        shutil.rmtree(old)
    else:
        beside.rename(target)


def _segments(batches: Iterable[TensorDictBase], segment_bytes: int) -> Iterable[dict[str, Tensor]]:
    """Join and cut batches to pieces of about ``segment_bytes``, columns by name."""
    gathered: dict[str, list[Tensor]] = {}
    size = 0
    for number, batch in enumerate(batches):
        if batch.batch_dims != 1:
            raise ValueError(f"batch {number} must be flat, [N], got {list(batch.batch_size)}")
        columns = {column_name(key): value for key, value in batch.items(True, True)}
        if wrong := [name for name, value in columns.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"batch {number}: {wrong[0]!r} must be a tensor, got {type(columns[wrong[0]]).__name__}")
        if gathered and columns.keys() != gathered.keys():
            differing = sorted(columns.keys() ^ gathered.keys())
            raise ValueError(f"batch {number} must have the entries of those before it: {differing} are not in both")
        for name, value in columns.items():
            column = gathered.setdefault(name, [])
            if column and (column[0].dtype, column[0].shape[1:]) != (value.dtype, value.shape[1:]):
                raise ValueError(
                    f"batch {number}: {name!r} is {value.dtype} {list(value.shape[1:])} a row, those before it are "
                    f"{column[0].dtype} {list(column[0].shape[1:])}"
                )
            column.append(value)
        size += byte_count(columns)
        while size >= segment_bytes:
            joined = {name: torch.cat(column) for name, column in gathered.items()}
            rows = len(next(iter(joined.values())))
            fit = max(1, rows * segment_bytes // size)
            yield {name: column[:fit] for name, column in joined.items()}
            gathered = {name: [column[fit:]] for name, column in joined.items()}
            size = byte_count({name: column[0] for name, column in gathered.items()})
    joined = {name: torch.cat(column) for name, column in gathered.items()}
    if joined and len(next(iter(joined.values()))):
        yield joined

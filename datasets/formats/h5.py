"""HDF5 files with a dataset for each column, rows end to end."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from flatroll.datasets.formats.sources import CHUNK_BYTES, Source, first_rows
from flatroll.layout.checks import whole_number
from flatroll.layout.export import from_numpy, optional_package, to_numpy

FIRST_ROWS = "_first_rows"
_DEEPEST = 64  # folders inside folders
_SMALLEST_SHARE = 1100  # bytes that one stored byte may stand for: DEFLATE packs at most 1032 into one


def write_h5(source: Source, path: Path, **h5_kwargs: Any) -> None:
    """Write an HDF5 file: a dataset ``[N, ...]`` for each entry, nested entries in groups, and ``_first_rows``.

    Args:
        source: the rows.
        path: of the file to be made.
        **h5_kwargs: for `h5py.Group.create_dataset`, such as ``compression="gzip"``.
    """
    h5py = optional_package("h5py", "h5", "export")
    starts = first_rows(source)
    with h5py.File(path, "w") as file:
        row = 0
        for chunk in source.chunks():
            for name, array in to_numpy(chunk, separator="/").items():
                if not row:
                    shape = (source.rows, *array.shape[1:])
                    kept = h5_kwargs if array.size else {}  # HDF5 has no chunks of nothing
                    file.create_dataset(name, shape, array.dtype, **kept)
                file[name][row : row + len(array)] = array
            row += len(chunk)
        if starts is not None:
            file.create_dataset(FIRST_ROWS, data=starts.numpy(), **h5_kwargs)


def read_h5(
    path: str | Path, *, chunk_rows: int | None = None, max_bytes: int | None = None
) -> Iterator[TensorDict]:
    """Yield the rows of an HDF5 file as flat batches, chunk by chunk.

    Args:
        path: of the file; all its datasets have one row for each row of the batch.
        chunk_rows: rows to be read at a time. Default: as many as take 32 MiB.
        max_bytes: what all columns may take in memory. Default: no bound but that of `h5_columns`.

    Raises:
        ImportError: h5py is missing; the text names the extra.
        ValueError, TypeError: as `h5_columns`; columns of different length.
    """
    h5py = optional_package("h5py", "h5", "import_h5")
    with h5py.File(path, "r") as file:
        columns = h5_columns(file)
        columns.pop(FIRST_ROWS, None)
        if not columns:
            raise ValueError(f"{path} has no columns")
        lengths = {name: column.shape[0] for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns must have one row for each row of the batch, got lengths {lengths}")
        rows, size = next(iter(lengths.values())), sum(column.nbytes for column in columns.values())
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"the columns of {path} take {size} bytes, more than max_bytes={max_bytes}")
        if chunk_rows is None:
            chunk_rows = max(1, CHUNK_BYTES * rows // max(1, size))
        for first in range(0, max(rows, 1), whole_number("chunk_rows", chunk_rows)):
            cut = slice(first, min(first + chunk_rows, rows))
            yield from_numpy({name: column[cut] for name, column in columns.items()}, separator="/")


def h5_columns(file: Any, *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the datasets of an open HDF5 file by their path, after checking that they are what they claim to be.

    A file from elsewhere may name other files, or claim more rows than it holds; nothing is read or allocated here.

    Args:
        file: `h5py.File`, opened for reading.
        leave_out: names at the root that are not looked at. Default: none.

    Raises:
        ValueError: soft or external links, one dataset under two names, data in other files, groups deeper than 64, a
            dataset without rows, or one that claims over 1100 times the bytes that are stored for it.
        TypeError: a dataset that is not of numbers or bools.
    """
    h5py = optional_package("h5py", "h5", "import_h5")
    columns: dict[str, Any] = {}
    seen: set[int] = set()
    stored = 0

    def walk(group: Any, prefix: str, depth: int) -> None:
        nonlocal stored
        if depth > _DEEPEST:
            raise ValueError(f"{prefix} lies in more than {_DEEPEST} groups")
        for name in group:
            place = prefix + name
            if place in leave_out:
                continue
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(
                    f"{place} is a link, which may lead to another file: copy the data into this one"
                )
            value = group[name]
            address = h5py.h5o.get_info(value.id).addr
            if address in seen:
                raise ValueError(f"{place} is another name of data that stands elsewhere in the file")
            seen.add(address)
            if isinstance(value, h5py.Group):
                walk(value, f"{place}/", depth + 1)
            elif isinstance(value, h5py.Dataset):
                stored += _checked(place, value)
                columns[place] = value

    walk(file, "", 0)
    if stored > (size := os.path.getsize(file.filename)):
        raise ValueError(f"the datasets claim {stored} stored bytes, the file has {size}: it is damaged")
    return columns


def _checked(place: str, dataset: Any) -> int:
    """Check a dataset by its header alone; return how many bytes of the file it takes."""
    if dataset.external is not None or dataset.is_virtual:
        raise ValueError(f"{place} lies in other files: copy the data into this one")
    if dataset.shape is None or not dataset.shape:
        raise ValueError(f"{place} must have one row for each row of the batch, got a single value")
    if dataset.dtype.kind not in "biufc":
        raise TypeError(f"{place} must be of numbers or bools, got {dataset.dtype}")
    stored = int(dataset.id.get_storage_size())
    most = stored * (_SMALLEST_SHARE if dataset.chunks else 1)
    if dataset.nbytes > most:
        raise ValueError(
            f"{place} claims {dataset.nbytes} bytes, the file holds {stored} for it: not all rows were written, or "
            "the file is damaged"
        )
    return stored

"""HDF5 files with a dataset for each column, rows end to end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.datasets.formats.episodes import damage_in
from flatroll.datasets.formats.sources import CHUNK_BYTES, Source, first_rows, select_markers
from flatroll.disk.files import SteadyFile
from flatroll.layout.checks import check_whole_number, optional_package
from flatroll.layout.export import from_numpy, to_numpy
from flatroll.layout.hdf5 import h5_columns
from flatroll.layout.keys import as_tuple

FIRST_ROWS = "_first_rows"


def write_h5(source: Source, path: Path, **h5_kwargs: Any) -> None:
    """Write an HDF5 file: a dataset ``[N, ...]`` for each entry, nested entries in groups, and ``_first_rows``.

    Args:
        source: the rows.
        path: of the file to be made.
        **h5_kwargs: for `h5py.Group.create_dataset`, such as ``compression="gzip"``.

    Raises:
        ValueError: an entry is named ``_first_rows``, or has "/" in its name.
    """
    h5py = optional_package("h5py", "h5", "export")
    first = source.read(torch.arange(1))
    if first.get(FIRST_ROWS, None) is not None:
        raise ValueError(
            f"entry {FIRST_ROWS!r} has the name that the file uses for first rows: rename the entry first"
        )

    for key in first.keys(True, True):
        if any("/" in name for name in as_tuple(key)):
            raise ValueError(
                f"entry {key!r} has '/' in its name, which separates groups in HDF5 files: rename it first"
            )

    markers = []
    with SteadyFile(path) as raw, h5py.File(raw, "w") as file:
        row = 0
        for chunk in source.chunks():
            markers.append(select_markers(chunk))
            for name, array in to_numpy(chunk, separator="/").items():
                if not row:
                    shape = (source.rows, *array.shape[1:])
                    # HDF5 cannot chunk an empty dataset
                    if array.size:
                        kept = h5_kwargs
                    else:
                        kept = {}
                    file.create_dataset(name, shape, array.dtype, **kept)
                file[name][row : row + len(array)] = array
            row += len(chunk)
            raw.check()

        starts = first_rows(markers)
        if starts is not None:
            file.create_dataset(FIRST_ROWS, data=starts.numpy(), **h5_kwargs)
        file.close()
        raw.check()


def read_h5(
    path: str | Path, *, chunk_rows: int | None = None, max_bytes: int | None = None
) -> Iterator[TensorDict]:
    """Yield the rows of an HDF5 file as flat batches, chunk by chunk.

    Args:
        path: of the file; all its datasets have one row for each row of the batch.
        chunk_rows: rows to read at a time. Default: 32 MiB.
        max_bytes: limit for all columns in memory. Default: only that of `h5_columns`.

    Raises:
        ImportError: h5py is missing; the message names the extra.
        ValueError, TypeError: as `h5_columns`; columns of different length.
    """
    h5py = optional_package("h5py", "h5", "import_h5")
    with damage_in(path), h5py.File(path, "r") as file:
        columns = h5_columns(file)
        columns.pop(FIRST_ROWS, None)
        if not columns:
            raise ValueError(f"{path} has no columns")
        lengths = {name: column.shape[0] for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns must have one row for each row of the batch, got lengths {lengths}")
        rows = next(iter(lengths.values()))

        size = sum(column.nbytes for column in columns.values())
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"the columns of {path} take {size} bytes, more than max_bytes={max_bytes}")
        if chunk_rows is None:
            chunk_rows = max(1, CHUNK_BYTES * rows // max(1, size))

        for first in range(0, max(rows, 1), check_whole_number("chunk_rows", chunk_rows)):
            cut = slice(first, min(first + chunk_rows, rows))
            yield from_numpy({name: column[cut] for name, column in columns.items()}, separator="/")

"""Parquet and Arrow files, and Parquet files that pandas reads as the data frames of `flatroll.export.to_pandas`."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from flatroll.datasets.formats.episodes import damage_in
from flatroll.datasets.formats.sources import Source
from flatroll.layout.checks import optional_package
from flatroll.layout.export import from_arrow, from_pandas, to_arrow, to_pandas

MAX_BYTES = 4 << 30  # default limit of what readers of files load into memory at a time
_ATTRS = b"PANDAS_ATTRS"  # where pandas keeps `frame.attrs` in a Parquet file


def write_parquet(source: Source, path: Path, *, compression: str = "zstd", separator: str = ".") -> None:
    """Write a Parquet file, one row group for each chunk.

    Args:
        source: the rows.
        path: of the file to be made.
        compression: as `pyarrow.parquet.ParquetWriter` takes it. Default ``"zstd"``.
        separator: what joins the names of a nested key; needed where a name has a dot. Default ``"."``.
    """
    parquet = optional_package("pyarrow.parquet", "parquet", "export")
    _write_tables(
        (to_arrow(chunk, separator=separator) for chunk in source.chunks()),
        lambda schema: parquet.ParquetWriter(path, schema, compression=compression),
    )


def write_arrow(source: Source, path: Path, *, separator: str = ".") -> None:
    """Write an Arrow IPC file (also known as Feather), one record batch for each chunk."""
    ipc = optional_package("pyarrow.ipc", "arrow", "export")
    _write_tables(
        (to_arrow(chunk, separator=separator) for chunk in source.chunks()),
        lambda schema: ipc.new_file(str(path), schema),
    )


def write_pandas(source: Source, path: Path, *, split: int = 16, separator: str = ".") -> None:
    """Write a Parquet file that `pandas.read_parquet` reads as the frame that `to_pandas` makes.

    Args:
        source: the rows.
        path: of the file to be made.
        split: as `to_pandas` has it. Default 16.
        separator: as `to_pandas` has it. Default ``"."``.
    """
    optional_package("pandas", "pandas", "export")
    pyarrow = optional_package("pyarrow", "parquet", "export")
    parquet = optional_package("pyarrow.parquet", "parquet", "export")

    def as_table(frame: Any) -> Any:
        record = frame.attrs["flatroll"]
        if wide := [name for name, (dtype, _) in record.items() if dtype.startswith("complex")]:
            raise TypeError(
                f"entry {wide[0]!r} is complex, which Parquet does not support: apply torch.view_as_real first"
            )

        # Parquet's lists have one dimension. from_pandas=False keeps NaN as a value; Table.from_pandas would
        # turn it into null.
        arrays = []
        for _, column in frame.items():
            if column.dtype == object:
                cells: Any = [cell.reshape(-1) for cell in column]
            else:
                cells = column.to_numpy()
            arrays.append(pyarrow.array(cells, from_pandas=False))

        about = pyarrow.Schema.from_pandas(frame.iloc[:0], preserve_index=False).metadata
        table = pyarrow.Table.from_arrays(arrays, names=list(frame.columns))
        return table.replace_schema_metadata({**about, _ATTRS: json.dumps(frame.attrs)})

    _write_tables(
        (as_table(to_pandas(chunk, separator=separator, split=split)) for chunk in source.chunks()),
        lambda schema: parquet.ParquetWriter(path, schema, compression="zstd"),
    )


def _write_tables(tables: Iterator[Any], open_writer: Any) -> None:
    first = next(tables)
    with open_writer(first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def read_parquet(
    path: str | Path, *, max_bytes: int = MAX_BYTES, separator: str = "."
) -> Iterator[TensorDict]:
    """Yield the rows of a Parquet file as flat batches, one for each row group.

    Args:
        path: of the file; its columns as `from_arrow` takes them.
        max_bytes: limit for a row group, counting at least 8 bytes per number, since few bytes of a file can expand to
            very many rows. Default 4 GiB.
        separator: what joins the names of a nested key in the file. Default ``"."``.

    Raises:
        ImportError: pyarrow is missing; the message names the extra.
        ValueError, TypeError: as `from_arrow`; a damaged file, more than ``max_bytes``.
    """
    with damage_in(path):
        for table in row_groups(Path(path), max_bytes, needed_by="import_parquet"):
            yield from_arrow(table, separator=separator)


def row_groups(
    file: Path, max_bytes: int, columns: Sequence[str] | None = None, *, needed_by: str = "import_lerobot"
) -> Iterator[Any]:
    """Yield the tables of a Parquet file; ValueError for a row group that claims more than ``max_bytes``."""
    parquet = optional_package("pyarrow.parquet", "parquet", needed_by)
    with damage_in(file):
        opened = parquet.ParquetFile(file)
    with opened:
        for number in range(opened.num_row_groups):
            with damage_in(file):
                group = opened.metadata.row_group(number)
                chunks = [group.column(place) for place in range(group.num_columns)]
                claimed = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
                if claimed > max_bytes:
                    raise ValueError(
                        f"row group {number} takes {claimed} bytes, more than max_bytes={max_bytes}"
                    )
                table = opened.read_row_group(number, columns=columns)
            yield table


def read_arrow(path: str | Path, *, separator: str = ".") -> Iterator[TensorDict]:
    """Yield the rows of an Arrow IPC file as flat batches, one for each record batch; errors as `from_arrow`.

    There is no ``max_bytes``, because the library reports the size of a compressed record batch only after loading it.
    `export` does not compress.
    """
    pyarrow = optional_package("pyarrow", "arrow", "import_arrow")
    ipc = optional_package("pyarrow.ipc", "arrow", "import_arrow")
    with damage_in(path), pyarrow.memory_map(str(path)) as memory, ipc.open_file(memory) as file:
        for number in range(file.num_record_batches):
            table = pyarrow.Table.from_batches([file.get_batch(number)], schema=file.schema)
            yield from_arrow(table, separator=separator)  # a copy, because mapped memory is read-only


def read_pandas(
    path: str | Path, *, max_bytes: int = MAX_BYTES, separator: str = "."
) -> Iterator[TensorDict]:
    """Yield the rows of a Parquet file of data frames as flat batches, one for each row group.

    Args:
        path: of the file.
        max_bytes: as `read_parquet` has it. Default 4 GiB.
        separator: as `read_parquet` has it. Default ``"."``.

    Raises:
        ImportError: pandas or pyarrow is missing; the message names the extra.
        ValueError, TypeError: as `from_pandas`; a damaged file, more than ``max_bytes``.
    """
    optional_package("pandas", "pandas", "import_pandas")
    parquet = optional_package("pyarrow.parquet", "parquet", "import_pandas")
    with damage_in(path):
        about = parquet.read_schema(path).metadata or {}
        attrs = _checked_attrs(about.get(_ATTRS, b"{}"))
        for table in row_groups(Path(path), max_bytes, needed_by="import_pandas"):
            frame = table.to_pandas()
            frame.attrs = attrs
            for name, (dtype, shape) in attrs.get("flatroll", {}).items():
                if name in frame.columns and frame[name].dtype == object:
                    frame[name] = [np.asarray(cells, dtype).reshape(shape) for cells in frame[name]]
            yield from_pandas(frame, separator=separator)


def _checked_attrs(text: bytes) -> dict[str, Any]:
    """What a file notes of its frame; ValueError if it is not what `to_pandas` does."""
    try:
        attrs = json.loads(text)
        for dtype, shape in attrs.get("flatroll", {}).values():
            if re.fullmatch("bool|u?int(8|16|32|64)|float(16|32|64)", dtype) is None:
                raise ValueError(dtype)
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(shape)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the file does not record the dtypes and shapes of its columns: {error}") from None
    return dict(attrs)

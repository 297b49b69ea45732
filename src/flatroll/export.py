"""Convert batches, buffers and replay logs to and from NumPy, pandas, Arrow, Parquet, HDF5, Minari and LeRobot.

The module can be called: after ``from flatroll import export``, ``export(buffer, "rows.parquet")`` is `export.export`.

>>> import torch
>>> from tensordict import TensorDict
>>> from flatroll.export import to_numpy
>>> list(to_numpy(TensorDict({"next": {"done": torch.zeros(3, 1, dtype=torch.bool)}}, [3])))
['next.done']
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.datasets.formats.h5 import read_h5, write_h5
from flatroll.datasets.formats.lerobot import read_lerobot, write_lerobot
from flatroll.datasets.formats.minari import read_minari, write_minari
from flatroll.datasets.formats.sources import open_source
from flatroll.datasets.formats.tables import (
    MAX_BYTES,
    read_arrow,
    read_pandas,
    read_parquet,
    write_arrow,
    write_pandas,
    write_parquet,
)
from flatroll.datasets.progress import progress_bar
from flatroll.disk.beside import write_beside
from flatroll.layout.checks import check_choice, check_flags, check_path, check_type, check_whole_number
from flatroll.layout.export import from_arrow, from_numpy, from_pandas, to_arrow, to_numpy, to_pandas
from flatroll.layout.keys import is_entry

__all__ = [
    "export",
    "from_arrow",
    "from_numpy",
    "from_pandas",
    "import_arrow",
    "import_h5",
    "import_lerobot",
    "import_minari",
    "import_pandas",
    "import_parquet",
    "read_arrow",
    "read_h5",
    "read_lerobot",
    "read_minari",
    "read_pandas",
    "read_parquet",
    "to_arrow",
    "to_numpy",
    "to_pandas",
]


_WRITERS: dict[str, Callable[..., None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "pandas": write_pandas,
    "minari": write_minari,
    "lerobot": write_lerobot,
    "h5": write_h5,
}
#: File suffix -> possible formats, the default first.
_SUFFIXES = {
    ".parquet": ("parquet", "pandas"),
    ".arrow": ("arrow",),
    ".feather": ("arrow",),
    ".h5": ("h5",),
    ".hdf5": ("h5",),
}


def export(
    source: Any,
    path: str | Path,
    format: str | None = None,
    *,
    chunk_rows: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> None:
    """Write the rows of a batch, buffer or replay log to a file or folder that other tools read.

    Rows are read and written in chunks, so memory use is bounded whatever the buffer's size; those of a log are made
    once, while they are written, and the two formats of trajectories hold the rows since the first unfinished
    trajectory began. The file is written
    under a temporary name and renamed at the end, so ``path`` is never a partial file. `import_parquet` and the other
    importers return the rows bit for bit; ``"minari"`` and ``"lerobot"`` store whole trajectories, so rows come back
    grouped by trajectory.

    Args:
        source: flat batch ``[N]``, a `flatroll.buffers.ReplayBuffer`, whose rows are written oldest first, or an open
            `flatroll.datasets.ReplayLog`.
        path: the file to create (a folder for ``"minari"`` and ``"lerobot"``).
        format: ``"parquet"``, ``"arrow"`` (an IPC file), ``"pandas"`` (Parquet that `pandas.read_parquet` reads as the
            frame of `to_pandas`), ``"minari"``, ``"lerobot"`` (version 3) or ``"h5"``. Default: from the suffix
            (``.parquet``, ``.arrow``, ``.feather``, ``.h5``, ``.hdf5``); ``"parquet"`` without one.
        chunk_rows: rows held in memory at a time. Default: 32 MiB of rows.
        progress: show a progress bar. Default: only if stderr is a terminal.
        **options: format options: `separator`, which joins the names of a nested key, for entries with a dot in their
            name (parquet, arrow, pandas; pass it to the importer, too); `compression` (parquet); `split` (pandas);
            `dataset_id`, `data_format`, `observation_space`, `action_space`, more metadata (minari); `fps`, `task`,
            `robot_type`, `images` (lerobot); arguments of `h5py.Group.create_dataset`, such as
            ``compression="gzip"`` (h5).

    Raises:
        ImportError: the format's library is missing; the message names the extra.
        FileExistsError: ``path`` exists.
        FileNotFoundError, PermissionError: the parent folder does not exist or is not writable.
        ReplayMismatchError: the env of a log makes other rows than those that were collected.
        TypeError: ``source`` is neither a batch nor a buffer nor a log, or the format does not support an entry's type.
        ValueError: the format or suffix is unknown, the two disagree, there are no rows, or the format cannot hold
            them (n-step data in episodes, for example).

    >>> import tempfile, torch
    >>> rows = TensorDict({"action": torch.arange(3), "next": {"reward": torch.ones(3, 1)}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(rows, f"{folder}/rows.parquet")
    ...     print(import_parquet(f"{folder}/rows.parquet")["action"])
    tensor([0, 1, 2])
    """
    path = check_path("path", path)

    if progress is not None:
        check_flags(progress=progress)
    write = _WRITERS[_check_format(path, format)]
    rows = open_source(source, chunk_rows)
    with progress_bar(rows.rows, progress, "exporting") as bar, write_beside(path) as beside:
        write(rows._replace(advance=bar.update), beside, **options)


def _check_format(path: Path, format: str | None) -> str:
    """Return the given format or the one of the path's suffix; ValueError if they disagree."""
    if format is not None:
        check_choice("format", format, _WRITERS)

    known = _SUFFIXES.get(path.suffix.lower())
    if known is not None and format is not None and format not in known:
        raise ValueError(
            f"path {path.name!r} has the suffix of {known[0]!r}, but format={format!r} was passed: leave one "
            "of them out"
        )

    if known is None and format is None and path.suffix:
        raise ValueError(
            f"path must end with {', '.join(_SUFFIXES)}, got {path.name!r}; "
            f"or pass format={', '.join(_WRITERS)}"
        )

    return format or (known or ("parquet",))[0]


def import_parquet(path: str | Path, *, max_bytes: int = MAX_BYTES, separator: str = ".") -> TensorDictBase:
    """Read a Parquet file as a flat batch ``[N]`` of at most ``max_bytes`` (4 GiB).

    `read_parquet` reads it in chunks.
    """
    path = check_path("path", path)
    return _concatenate(read_parquet(path, max_bytes=max_bytes, separator=separator), path, max_bytes)


def import_arrow(path: str | Path, *, max_bytes: int = MAX_BYTES, separator: str = ".") -> TensorDictBase:
    """Read an Arrow IPC file as a flat batch ``[N]`` of at most ``max_bytes`` (4 GiB).

    `read_arrow` reads it in chunks and documents compressed files.
    """
    path = check_path("path", path)
    return _concatenate(read_arrow(path, separator=separator), path, max_bytes)


def import_pandas(path: str | Path, *, max_bytes: int = MAX_BYTES, separator: str = ".") -> TensorDictBase:
    """Read a Parquet file that pandas wrote as a flat batch ``[N]`` of at most ``max_bytes`` (4 GiB).

    `read_pandas` reads it in chunks.
    """
    path = check_path("path", path)
    return _concatenate(read_pandas(path, max_bytes=max_bytes, separator=separator), path, max_bytes)


def import_h5(path: str | Path, *, max_bytes: int | None = None) -> TensorDictBase:
    """Read an HDF5 file with one dataset per column as a flat batch ``[N]``. See `read_h5`."""
    path = check_path("path", path)
    if max_bytes is not None:
        check_whole_number("max_bytes", max_bytes)
    return _concatenate(read_h5(path, max_bytes=max_bytes), path)


def import_minari(
    source: Any,
    *,
    infos: bool | Collection[str] = True,
    rename: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    texts: bool = False,
) -> TensorDictBase:
    """Read all episodes of a Minari data set as one flat batch ``[N]``. See `read_minari`."""
    if isinstance(infos, bool) or not isinstance(infos, Collection):
        check_flags(infos=infos)
    check_flags(texts=texts)
    if rename is not None:
        check_type("rename", rename, Mapping, "a dict of names or None")
    episodes = read_minari(source, infos=infos, rename=rename, leave_out=leave_out, texts=texts)
    return _concatenate(episodes, source)


def import_lerobot(path: str | Path) -> TensorDictBase:
    """Read all episodes of a LeRobot v3 folder as one flat batch ``[N]``. See `read_lerobot`."""
    path = check_path("path", path)
    return _concatenate(read_lerobot(path), path)


def _concatenate(parts: Iterator[TensorDict], path: Any, max_bytes: int | None = None) -> TensorDictBase:
    if max_bytes is not None:
        check_whole_number("max_bytes", max_bytes)
    found: list[TensorDict] = []
    size = 0

    try:
        for part in parts:
            _check_alike(found, part)
            found.append(part)
            size += part.bytes()
            if max_bytes is not None and size > max_bytes:
                raise ValueError(
                    f"the rows take more than max_bytes={max_bytes}: pass a larger max_bytes, or read it in pieces"
                )
    except (OSError, ValueError, TypeError, KeyError) as error:
        error.add_note(f"while {path} was read")
        raise

    if not found:
        raise ValueError(f"{path} has no rows")

    joined = TensorDict.cat(found) if len(found) > 1 else found[0]
    return cast(TensorDictBase, joined)


def _check_alike(parts: list[TensorDict], part: TensorDict) -> None:
    """Raise ValueError if a part has other entries, shapes or dtypes than the first one."""
    if not parts:
        return

    first = _row_form(parts[0])
    other = _row_form(part)
    if differing := [key for key in {**first, **other} if first.get(key) != other.get(key)]:
        key = differing[0]
        rows = sum(map(len, parts))
        raise ValueError(
            f"entry {key!r} is {other.get(key, 'missing')} from row {rows} on, before it was "
            f"{first.get(key, 'missing')}: read the parts one by one"
        )


def _row_form(rows: TensorDict) -> dict[Any, Any]:
    """Return the dtype and shape of a row by key; of what is not a tensor, its type."""
    form: dict[Any, Any] = {}
    for key in rows.keys(True, True, is_leaf=is_entry):
        column = rows.get(key)
        if isinstance(column, Tensor):
            form[key] = (column.dtype, list(column.shape[1:]))
        else:
            form[key] = type(column)
    return form


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> None:
        export(*arguments, **options)


sys.modules[__name__].__class__ = _Callable

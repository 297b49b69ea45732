"""A checkpointer that writes one HDF5 file."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpointers.rows import FlatStorageCheckpointer
from flatroll.buffers.checkpointers.saving import RowWriter, SavedFolder
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.storages.storage import Storage
from flatroll.disk import DamagedFileError, LoadedVersion, Version, files
from flatroll.disk.checkpoint import SaveOptions
from flatroll.disk.segments import Column, Ragged
from flatroll.disk.state_tree import from_text, to_text
from flatroll.layout.checks import optional_package
from flatroll.layout.hdf5 import h5_columns
from flatroll.layout.keys import NestedKey

T = TypeVar("T")
_FORMAT = 1
_LINE = "h5"
_LENGTHS = "#lengths"
_CHUNK_BYTES = 2**20
_WORDS = {1: torch.uint8, 2: torch.int16}  # for dtypes that NumPy lacks


class H5StorageCheckpointer(FlatStorageCheckpointer):
    """Writes one HDF5 file, ``path/checkpoint.h5``, with one dataset per column and the buffer's tables.

    Every save writes all rows to a new file, which then replaces the old one. Each chunk has a checksum. Requires the
    extra ``h5``.

    Args:
        checkpoint_file: name of the file in the folder.
        done_keys, reward_keys: see `FlatStorageCheckpointer`.
        h5_kwargs: arguments of h5py's ``create_dataset`` for all columns, such as ``{"compression": "gzip"}``.

    Raises:
        ImportError: h5py is not installed.

    >>> H5StorageCheckpointer(h5_kwargs={"compression": "gzip"})
    H5StorageCheckpointer()
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Iterable[NestedKey] | None = None,
        reward_keys: Iterable[NestedKey] | None = None,
        h5_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(done_keys, reward_keys)
        _h5py()
        if Path(checkpoint_file).name != checkpoint_file:
            raise ValueError(
                f"checkpoint_file must be the name of a file, without a folder, got {checkpoint_file!r}"
            )

        self.checkpoint_file = checkpoint_file
        self.h5_kwargs = dict(h5_kwargs or {})

    @override
    def open(
        self, saved: SavedFolder, options: SaveOptions, ring: Ring, segment_rows: int | None = None
    ) -> RowWriter:
        return H5Writer(saved.path / self.checkpoint_file, self.h5_kwargs, options.sync)

    @override
    def versions(self, path: Path) -> list[int]:
        if (path / self.checkpoint_file).is_file():
            return [1]
        return []

    @override
    def load_with(
        self,
        storage: Storage,
        path: Path,
        use: Callable[[LoadedVersion], T],
        number: int | None,
        strict: bool,
    ) -> tuple[T, None]:
        file = path / self.checkpoint_file
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: H5StorageCheckpointer reads only its own files")
        if number not in (None, 1):
            raise FileNotFoundError(f"{file} holds one version, number 1, not {number}")

        h5py = _h5py()
        try:
            with h5py.File(file, "r") as h5:
                return use(_read(h5)), None
        except DamagedFileError as error:
            raise DamagedFileError(f"{file}: {error}") from None
        except PermissionError:
            raise
        # Errors that h5py raises for damaged or non-HDF5 files.
        except (OSError, KeyError, RuntimeError) as error:
            raise DamagedFileError(f"{file} cannot be read: {error}") from None
        except ValueError as error:
            error.add_note(f"while {file} was read")
            raise


class H5Writer:
    """Writes a file of rows and a state, with the interface of `Folder`; the file appears with ``publish``.

    Attributes:
        end: number of the next row.
        segments: always empty, because no segment can be kept.
    """

    segments: tuple[()] = ()

    def __init__(self, path: Path, options: Mapping[str, Any], sync: bool) -> None:
        self._path = path
        self._options = options
        self._sync = sync

        files.make_folder(path.parent, synced=sync)
        self._remove_stale()
        self._beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{files.TEMPORARY}")
        self._file = files.SteadyFile(self._beside)
        self._h5 = _h5py().File(self._file, "w")
        self._rows = self._h5.create_group("rows")

        self._first: int | None = None
        self.end = 0

    def close(self) -> None:
        """Remove the file if it was not published."""
        self._h5.close()
        self._file.close()
        with suppress(OSError):
            files.remove(self._beside)

    def _remove_stale(self) -> None:
        """Remove files of processes that died while saving: files without a lock."""
        for name in files.names(self._path.parent):
            if name.startswith(f"{self._path.name}.") and name.endswith(files.TEMPORARY):
                with suppress(OSError):
                    files.unlock(files.lock(self._path.with_name(name)))
                    files.remove(self._path.with_name(name))

    def drop_before(self, row: int) -> None:
        """Skip rows before this one that are not in the file yet."""
        if row > self.end and self._first is not None:  # a gap makes earlier rows useless
            self._h5.pop("rows")
            self._rows = self._h5.create_group("rows")
            self._first = None
        self.end = max(self.end, row)

    def append(self, columns: Mapping[str, Column]) -> None:
        """Append rows."""
        first = next(iter(columns.values()))
        counted = first.lengths if isinstance(first, Ragged) else first
        count = len(counted)
        for name, column in columns.items():
            if isinstance(column, Ragged):
                self._extend(name, column.values)
                self._extend(name + _LENGTHS, column.lengths)
            else:
                self._extend(name, column)

        if self._first is None:
            self._first = self.end
        self.end += count
        self._file.check()

    def _extend(self, name: str, values: Tensor) -> None:
        stored = _to_numpy(values)
        if name not in self._rows:
            size = max(1, min(len(stored), _CHUNK_BYTES // max(1, stored[:1].nbytes or stored.itemsize)))
            chunks = (size, *(max(1, n) for n in stored.shape[1:]))
            options = {"fletcher32": True, **self._options}
            data = self._rows.create_dataset(
                name, stored.shape, stored.dtype, maxshape=(None, *stored.shape[1:]), chunks=chunks, **options
            )
            data.attrs["dtype"] = _read_dtype(values)
            data[...] = stored
            return

        data = self._rows[name]
        before = len(data)
        data.resize(before + len(stored), axis=0)
        data[before:] = stored

    def replace(self, columns: Mapping[str, Column], first: int) -> NoReturn:
        """Raise RuntimeError: there are no segments."""
        raise RuntimeError(f"the rows of {self._path} cannot be rewritten")

    def publish(
        self, state: Any, tensors: Mapping[str, Tensor] | None = None, *, head: int | None, extra: Any
    ) -> Version:
        """Write the state and rename the file."""
        self._h5.attrs["format"] = _FORMAT
        first = self.end if self._first is None else self._first
        if head is None:
            head = first
        self._h5.attrs["rows"] = (first, self.end, head)
        text = np.frombuffer(to_text(state).encode(), np.uint8)
        self._h5.create_dataset("json", data=text, chunks=(max(1, len(text)),), fletcher32=True)

        group = self._h5.create_group("state")
        for name, values in (tensors or {}).items():
            stored = _to_numpy(values)
            data = group.create_dataset(name, data=stored)
            data.attrs["dtype"] = _read_dtype(values)

        self._h5.close()
        self._file.check()
        if self._sync:
            self._file.sync()
        self._file.close()

        files.rename(self._beside, self._path)
        if self._sync:
            files.sync_folder(self._path.parent)
        return Version(1, _LINE)


class _H5Rows:
    """The rows of a file, as a segment.

    It begins at row ``head``; earlier rows were overwritten while the file was written.
    """

    def __init__(self, datasets: Mapping[str, Any], first: int, head: int, end: int) -> None:
        self._datasets = datasets
        self._skip = head - first
        self.first = head
        self.end = end
        self.rows = end - head

    def read(self, targets: Mapping[str, Tensor]) -> dict[str, Column]:
        """Read and check all columns in new memory; ``targets`` are not used."""
        tensors = {name: _read_dataset(name, data) for name, data in self._datasets.items()}
        columns: dict[str, Column] = {}
        for name, values in tensors.items():
            if name.endswith(_LENGTHS):
                continue
            lengths = tensors.get(name + _LENGTHS)
            counted = values if lengths is None else lengths
            if not counted.ndim or len(counted) != self._skip + self.rows:
                raise DamagedFileError(f"{name!r} does not have {self._skip + self.rows} rows")
            if lengths is None:
                columns[name] = values[self._skip :]
                continue

            fits = lengths.ndim == 1 and lengths.dtype is torch.int64 and not bool((lengths < 0).any())
            if not fits or bool((lengths > len(values)).any()) or int(lengths.sum()) != len(values):
                raise DamagedFileError(f"the lengths of {name!r} do not add up to its {len(values)} values")
            columns[name] = Ragged(values[int(lengths[: self._skip].sum()) :], lengths[self._skip :])
        return columns


def _read(h5: Any) -> LoadedVersion:
    """Return the version in a file; DamagedFileError if there is none."""
    form = _attribute(h5, "format")
    if str(form) not in (str(_FORMAT), "None"):
        raise ValueError(
            f"the file has format {form}, this version reads {_FORMAT}: install a later flatroll"
        )

    try:
        first, end, head = map(int, _attribute(h5, "rows"))
        datasets = h5_columns(h5, single=True)
        rows = {
            name.removeprefix("rows/"): data for name, data in datasets.items() if name.startswith("rows/")
        }
        state = {
            name.removeprefix("state/"): data for name, data in datasets.items() if name.startswith("state/")
        }
        value = from_text(_read_dataset("json", datasets["json"]).numpy().tobytes())
        tensors = {name: _read_dataset(name, data) for name, data in state.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"it holds no buffer ({error})") from None

    if not 0 <= first <= end or not first <= head <= end:
        raise DamagedFileError(
            f"its row numbers do not fit together: rows {first} ... {end - 1}, valid from row {head} on"
        )

    segments: Any = (_H5Rows(rows, first, head, end),) if end > head else ()
    return LoadedVersion(Version(1, _LINE), value, tensors, head, end, {}, segments, None)


def _read_dataset(name: str, data: Any) -> Tensor:
    """Return the values of a checked dataset."""
    values = torch.from_numpy(np.ascontiguousarray(data[...]))
    dtype: Any = values.dtype

    noted = _attribute(data, "dtype")
    if isinstance(noted, bytes):
        dtype = getattr(torch, noted.decode("ascii", "replace"), None)
    elif dtype is torch.int16:
        raise DamagedFileError(
            f"{name!r} was written by an earlier version and may be int16 or bfloat16: load and save it with that "
            "version again"
        )

    if not isinstance(dtype, torch.dtype) or dtype.itemsize != values.element_size():
        raise DamagedFileError(f"{name!r} has an unknown dtype")

    if values.dtype is dtype:
        return values.reshape(data.shape)
    return values.reshape(data.shape).view(dtype)


def _attribute(owner: Any, name: str) -> Any:
    """Return numbers or bytes of fixed length; None for strings: a damaged HDF5 string heap makes h5py loop."""
    attributes = owner.attrs
    plain = name in attributes and attributes.get_id(name).dtype.kind in "iuS"
    if plain:
        return attributes[name]
    return None


def _read_dtype(values: Tensor) -> Any:
    """Return the dtype name stored as an attribute."""
    return np.bytes_(str(values.dtype).removeprefix("torch."))


def _to_numpy(values: Tensor) -> Any:
    plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        return plain.numpy()
    except TypeError:  # dtypes that NumPy lacks, such as bfloat16
        return plain.view(_WORDS[plain.element_size()]).numpy()


def _h5py() -> Any:
    """Import h5py; the ImportError names the extra."""
    return optional_package("h5py", "h5", "H5StorageCheckpointer")

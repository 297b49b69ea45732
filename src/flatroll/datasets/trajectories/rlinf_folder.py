"""Reads folders of trajectories that RLinf has written: one file each, and an index.

Source: https://github.com/RLinf/RLinf, rlinf/data/storage/replay/buffer.py.
"""

import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatroll.datasets.formats.episodes import UNREADABLE
from flatroll.datasets.trajectories.rows import MOST_NUMBERS, is_dense
from flatroll.disk import DamagedFileError

METADATA = "metadata.json"
INDEX = "trajectory_index.json"
_MOST = 64 << 20  # maximum size of the index in bytes


class RlinfFolder:
    """A folder with ``metadata.json``, ``trajectory_index.json`` and ``trajectory_<number>_<weights>.pt`` files.

    Args:
        path: of the folder.
        pickled: allow ``.pkl`` files, which can run arbitrary code of their author. This argument alone decides,
            never the folder.

    Raises:
        DamagedFileError: the index is invalid.

    Attributes:
        numbers: of the trajectories, in order.
        rows: how many rows each has, as the index says.
    """

    def __init__(self, path: Path, pickled: bool) -> None:
        self.path = path
        self._ending = ".pkl" if pickled else ".pt"

        index = self._json(INDEX)
        metadata = self._json(METADATA)

        try:
            entries = {int(number): entry for number, entry in index["trajectory_index"].items()}
            self.numbers = list(index["trajectory_id_list"])
            self.rows = [entries[number]["num_samples"] for number in self.numbers]
            self._weights = [str(entries[number].get("model_weights_id") or "") for number in self.numbers]
            counter = metadata.get("trajectory_counter") or 0
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path}: the index of trajectories cannot be read ({error!r})") from None

        numbers = [*self.numbers, *self.rows, counter]
        if not all(type(one) is int and 0 <= one < MOST_NUMBERS for one in numbers):
            raise DamagedFileError(f"{path}: the index of trajectories has invalid numbers")
        if len(set(self.numbers)) < len(self.numbers) or min(self.rows, default=1) < 1:
            raise DamagedFileError(f"{path}: the index names a trajectory twice, or one without rows")

        self.counter = max([counter, *(number + 1 for number in self.numbers)])

        names = {child.name for child in path.iterdir() if child.is_file() and not child.is_symlink()}
        self._names = [
            f"trajectory_{number}_{weights}{self._ending}"
            for number, weights in zip(self.numbers, self._weights, strict=True)
        ]
        for name in self._names:
            if name not in names:
                raise _missing_error(path, name, names)

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Whether a folder has the two index files of RLinf's format."""
        return (path / INDEX).is_file() and (path / METADATA).is_file()

    def read(self, first: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the fields of the trajectories at positions ``first`` to ``stop - 1``.

        Raises:
            DamagedFileError: a file cannot be read, or holds something else than tensors and plain values.
        """
        for position in range(first, stop):
            file = self.path / self._names[position]

            try:
                if self._ending == ".pt":
                    _check_archive(file)
                    fields = torch.load(file, map_location="cpu", weights_only=True)
                else:
                    import pickle

                    with file.open("rb") as opened:
                        fields = pickle.load(opened)
                if not isinstance(fields, dict):
                    raise ValueError(f"it holds a {type(fields).__name__}, expected a dict of fields")
                fields, left_out = _tensors(fields)
                size = sum(_sizes(fields))
                if self._ending == ".pt" and size > file.stat().st_size:
                    raise ValueError(f"its tensors claim {size:,} bytes, the file has fewer")
            except (*UNREADABLE, ImportError) as error:
                raise DamagedFileError(f"{file}: no trajectory can be read from it ({error})") from None

            if left_out:
                warnings.warn(
                    f"{file}: {', '.join(left_out)} are not tensors [T, B, ...] and are left out, as RLinf does",
                    RuntimeWarning,
                    stacklevel=2,
                )
            yield {**fields, "model_weights_id": self._weights[position]}

    def _json(self, name: str) -> Any:
        file = self.path / name
        if file.stat().st_size > _MOST:
            raise DamagedFileError(f"{file} has more than {_MOST:,} bytes")
        try:
            return json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{file}: {error}") from None


def _missing_error(path: Path, name: str, present: set[str]) -> FileNotFoundError:
    """Return the error for a file that the index names and the folder lacks, but for its other form, perhaps."""
    if name.endswith(".pkl"):
        form = "pt"
        how = "is read by default"
    else:
        form = "pkl"
        how = "takes allow_pickle=True, since it may run code"

    other = Path(name).with_suffix(f".{form}").name
    instead = ""
    if other in present:
        instead = f'; there is {other!r}, whose trajectory_format="{form}" {how}'
    return FileNotFoundError(f"{path} has no file {name!r}, which its index names{instead}")


def _check_archive(file: Path) -> None:
    """Raise ValueError if a file of ``torch.save`` is damaged, or would take more memory than it has bytes."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        if size > file.stat().st_size or any(entry.compress_type for entry in entries):
            raise ValueError("it is compressed, or its parts overlap: torch.save writes no such files")
        if wrong := archive.testzip():  # torch does not verify checksums
            raise ValueError(f"the checksum of its part {wrong!r} is wrong")


def _tensors(fields: Mapping[Any, Any], above: set[int] | None = None) -> tuple[dict[Any, Any], list[str]]:
    """The fields that RLinf draws, and the names of the others: texts, lists, nested tensors without ``[T, B]``.

    The dicts that were seen are ``above``, None for a whole trajectory.
    """
    seen = set[int]() if above is None else above
    kept: dict[Any, Any] = {}
    left_out: list[str] = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if id(value) in seen:  # it may contain itself
                raise ValueError(f"{name!r} occurs twice")
            seen.add(id(value))
            kept[name], inside = _tensors(value, seen)
            left_out += [f"{name}/{one}" for one in inside]
        elif isinstance(value, Tensor) and (value.device.type != "cpu" or not is_dense(value)):
            raise ValueError(f"{name!r} is not a dense tensor in memory")
        elif above is None or (isinstance(value, Tensor) and value.ndim >= 2):
            kept[name] = value
        elif value is not None:
            left_out.append(str(name))
    return kept, left_out


def _sizes(fields: Mapping[Any, Any]) -> Iterator[int]:
    """Bytes of all tensors, each as if it had its own memory."""
    for value in fields.values():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif isinstance(value, Tensor):
            yield value.numel() * value.element_size()

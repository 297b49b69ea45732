"""Reads folders of trajectories that RLinf has written: one file each, and an index.

Source: https://github.com/RLinf/RLinf, rlinf/data/storage/replay/buffer.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from flatroll.disk import DamagedFileError

METADATA, INDEX = "metadata.json", "trajectory_index.json"
_MOST = 64 << 20  # bytes of the index


class RlinfFolder:
    """A folder with ``metadata.json``, ``trajectory_index.json`` and ``trajectory_<number>_<weights>.pt`` files.

    Args:
        path: of the folder.
        pickled: read ``.pkl`` files, which may run code of whoever wrote them. Which files are read is decided here,
            and never by the folder.

    Raises:
        DamagedFileError: the index is none.

    Attributes:
        numbers: of the trajectories, in order.
        rows: how many rows each has, as the index says.
    """

    def __init__(self, path: Path, pickled: bool) -> None:
        self.path, self._ending = path, ".pkl" if pickled else ".pt"
        index, metadata = self._json(INDEX), self._json(METADATA)
        try:
            entries = {int(number): entry for number, entry in index["trajectory_index"].items()}
            self.numbers = [int(number) for number in index["trajectory_id_list"]]
            self.rows = [int(entries[number]["num_samples"]) for number in self.numbers]
            self._weights = [str(entries[number].get("model_weights_id") or "") for number in self.numbers]
            self.counter = max([int(metadata.get("trajectory_counter") or 0), *(n + 1 for n in self.numbers)])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path}: the index of trajectories cannot be read ({error!r})") from None
        if min(self.rows, default=0) < 0 or len(set(self.numbers)) < len(self.numbers):
            raise DamagedFileError(
                f"{path}: the index of trajectories names one twice, or one of less than 0 rows"
            )
        names = {child.name for child in path.iterdir() if child.is_file() and not child.is_symlink()}
        self._names = [
            f"trajectory_{number}_{weights}{self._ending}"
            for number, weights in zip(self.numbers, self._weights, strict=True)
        ]
        missing = next((name for name in self._names if name not in names), None)
        if missing is not None:
            other = Path(missing).with_suffix(".pt" if pickled else ".pkl").name
            instead = ""
            if other in names:
                how = "is read by default" if pickled else "takes allow_pickle=True, since it may run code"
                instead = f'; there is {other!r}, whose trajectory_format="{other[-3:].strip(".")}" {how}'
            raise FileNotFoundError(f"{path} has no file {missing!r}, which its index names{instead}")

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Whether a folder has such an index."""
        return (path / INDEX).is_file() and (path / METADATA).is_file()

    def read(self, first: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the fields of the trajectories from the ``first`` on, before the one at ``stop``.

        Raises:
            DamagedFileError: a file cannot be read, or holds something else than tensors and plain values.
        """
        for position in range(first, stop):
            file = self.path / self._names[position]
            try:
                if self._ending == ".pt":
                    fields = torch.load(file, map_location="cpu", weights_only=True)
                else:
                    import pickle

                    with file.open("rb") as opened:
                        fields = pickle.load(opened)
            except (RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as error:
                raise DamagedFileError(f"{file}: no trajectory can be read from it ({error})") from None
            if not isinstance(fields, dict):
                raise DamagedFileError(
                    f"{file}: it holds a {type(fields).__name__}, expected a dict of fields"
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

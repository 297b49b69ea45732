"""Conversions to one entry per run: nested tensors, and a folder for each run as in an HDF5 file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.keys import NestedKey, is_entry
from flatroll.layout.ted.flat import LENGTHS, Flat2TED, TED2Flat
from flatroll.layout.trajectories import nested_values

_RUN = "traj_"


class TED2Nested(TED2Flat):
    """Convert rows to nested tensors with an entry for each run: `TED2Flat`, seen run by run.

    The result has batch size ``[R]``. An entry whose next value is the root value of the row behind has one value more
    than its run has rows. The nested tensors (jagged layout) share the memory of the flat form; with ``path`` that is
    a folder of memory-mapped files, which `Nested2TED` and `Flat2TED` read alike.

    Args:
        done_key, shift_key, is_full_key, done_keys, reward_keys: as for `TED2Flat`.

    >>> rows = {"observation": torch.arange(3), "next": {"observation": torch.tensor([1, 9, 3])}}
    >>> rows["next"]["done"] = torch.tensor([False, True, False])
    >>> nested = TED2Nested()(TensorDict(rows, [3]))
    >>> [run.tolist() for run in nested["observation"].unbind()]
    [[0, 1, 9], [2, 3]]
    >>> Nested2TED()(nested)["next", "observation"]
    tensor([1, 9, 3])
    """

    def __call__(self, data: TensorDictBase, path: str | Path | None = None) -> TensorDict:
        """Convert rows ``[N]`` or ``[T, *B]``; arguments and errors as for `TED2Flat`."""
        flat = super().__call__(data, path)
        lengths = flat.get(LENGTHS)
        rows = int(lengths.sum())
        offsets = {extra: _offsets(lengths + extra) for extra in (0, 1)}
        nested = TensorDict({}, [len(lengths)])
        for key in flat.keys(True, True, is_leaf=is_entry):
            column = flat.get(key) if key in flat.keys(True, True) else None
            if not isinstance(column, Tensor):
                nested.set_non_tensor(key, flat.get_non_tensor(key))
            elif key == LENGTHS:
                nested.set(key, column)
            else:
                nested.set(key, torch.nested.nested_tensor_from_jagged(column, offsets[len(column) > rows]))
        return nested


class Nested2TED(Flat2TED):
    """Convert what `TED2Nested` returned back to rows, bit for bit.

    Args:
        done_key, shift_key, is_full_key, done_keys, reward_keys: as for `Flat2TED`.
    """

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return rows ``[N]`` or ``[T, *B]``; arguments and errors as for `Flat2TED`."""
        flat = TensorDict({}, [])
        for key, value in _entries(data):
            if isinstance(value, Tensor):
                flat.set(key, nested_values(value) if value.is_nested else value)
            else:
                flat.set_non_tensor(key, value)
        return super().__call__(flat, out)


class H5Split(TED2Flat):
    """Convert what `TED2Nested` returned to a folder for each run, ``traj_0``, ``traj_1``, ..., as views.

    Args:
        done_key, shift_key, is_full_key, done_keys, reward_keys: as for `TED2Flat`; none of them has an effect.

    >>> rows = {"action": torch.arange(3), "next": {"done": torch.tensor([False, True, False])}}
    >>> split = H5Split()(TED2Nested()(TensorDict(rows, [3])))
    >>> split["traj_0", "action"], split["traj_1", "action"]
    (tensor([0, 1]), tensor([2]))
    >>> Nested2TED()(H5Combine()(split))["action"]
    tensor([0, 1, 2])
    """

    def __call__(self, data: TensorDictBase, path: str | Path | None = None) -> TensorDict:
        """Split nested tensors ``[R]``; the result has batch size ``[]``, and names that sort in order of runs."""
        runs = data.batch_size[0]
        width = len(str(max(runs - 1, 0)))
        split = TensorDict({f"{_RUN}{number:0{width}}": TensorDict({}, []) for number in range(runs)}, [])
        folders = [split.get(f"{_RUN}{number:0{width}}") for number in range(runs)]
        for key, value in _entries(data):
            if not isinstance(value, Tensor):
                split.set_non_tensor(key, value)
                continue
            for folder, part in zip(folders, value.unbind(), strict=True):
                folder.set(key, part)
        return split


class H5Combine:
    """Combine the folders of `H5Split`, in memory or read from a file, into nested tensors as of `TED2Nested`."""

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDict:
        """Return nested tensors ``[R]``, copied.

        Args:
            data: folders ``traj_<number>``, and entries about the ring beside them.
            out: ignored.

        Raises:
            ValueError: there is no folder, or two of them hold different entries.
        """
        runs = (name for name in map(str, set(data.keys())) if name.startswith(_RUN))
        names = sorted(runs, key=lambda name: int(name.removeprefix(_RUN)))
        folders = [data.get(name) for name in names]
        if not folders:
            raise ValueError(
                f"data must have folders {_RUN}0, {_RUN}1, ..., got {sorted(map(str, data.keys()))}"
            )
        keys = list(folders[0].keys(True, True))
        for name, folder in zip(names, folders, strict=True):
            if set(folder.keys(True, True)) != set(keys):
                raise ValueError(f"{name} holds other entries than {names[0]}")
        combined = TensorDict({}, [len(folders)])
        for key, value in _entries(data.exclude(*names)):
            combined.set_non_tensor(key, value)
        for key in keys:
            parts = [folder.get(key) for folder in folders]
            if parts[0].ndim == 0:
                combined.set(key, torch.stack(parts))
                continue
            offsets = _offsets(torch.tensor([len(part) for part in parts]))
            combined.set(key, torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets))
        return combined


def _offsets(lengths: Tensor) -> Tensor:
    """Where runs of these lengths begin, and where the last one ends, int64 ``[R + 1]``."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _entries(data: TensorDictBase) -> Iterator[tuple[NestedKey, Any]]:
    """Entries by key: tensors, and the plain values of entries that are none."""
    tensors = set(data.keys(True, True))
    for key in data.keys(True, True, is_leaf=is_entry):
        value = data.get(key) if key in tensors else None
        yield key, value if isinstance(value, Tensor) else data.get_non_tensor(key)

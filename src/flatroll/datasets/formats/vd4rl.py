"""V-D4RL: `read_vd4rl` for its episodes of pixels, in ``.npz`` or HDF5 files, and `VD4RLExperienceReplay`."""

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.buffers import Compose, Resize, ToTensorImage
from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions
from flatroll.datasets.formats.episodes import damage_in, files_in, make_episode
from flatroll.datasets.formats.npy import read_whole
from flatroll.layout.checks import check_whole_number, optional_package
from flatroll.layout.export import Array
from flatroll.layout.hdf5 import h5_columns
from flatroll.layout.keys import NestedKey

_PIXELS = ("image", "observation", "pixels")
_MARKS = ("is_first", "is_last", "step_type")
# of step_type
_FIRST = 0
_LAST = 2
_OWN = ("reward", "is_terminal", *_MARKS, *_PIXELS)


def read_vd4rl(paths: str | Path | Iterable[str | Path], *, max_bytes: int = 1 << 30) -> Iterator[TensorDict]:
    """Yield the episodes of V-D4RL files as flat batches ``[T]``.

    Row t of a file has the observation of step t (``image`` or ``observation``, uint8 ``[H, W, C]`` or ``[C, H, W]``),
    and the action and reward that led to it, as Dreamer writes them; ``is_first`` and ``is_last``, or ``step_type`` (0
    first, 1 in between, 2 last), mark the episodes; ``is_terminal``, or else a ``discount`` of 0, marks the
    last step of terminated ones. T + 1 rows of a file therefore give T rows. Images are ``"pixels"``; any other entry
    is a state, ``("state", name)``.

    Args:
        paths: files, or a folder of ``.npz``, ``.h5`` and ``.hdf5`` files.
        max_bytes: what the arrays of an ``.npz`` file may take. Default 1 GiB.

    Raises:
        FileNotFoundError: the folder has no such files.
        ImportError: h5py is missing; the message names the extra.
        KeyError: no images, or no actions.
        ValueError, TypeError: a damaged file, pickled objects, more than ``max_bytes``; an HDF5 file that does not say
            where episodes are; as `h5_columns`.

    Source: Lu et al., Challenges and Opportunities in Offline Reinforcement Learning from Visual Observations (2022).
    """
    number = 0
    check_whole_number("max_bytes", max_bytes)
    for path in files_in(paths, (".npz", ".h5", ".hdf5")):
        with damage_in(path):
            read = _npz if path.suffix == ".npz" else _hdf5
            for steps in read(path, max_bytes):
                if len(steps["action"]) > 1:
                    yield _episode(steps, number)
                    number += 1


def _npz(path: Path, max_bytes: int) -> Iterator[dict[str, Array]]:
    steps: dict[str, Array] = {}
    left = max_bytes
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                name = member.filename.removesuffix(".npy")
                steps[name] = read_whole(stream, f"{path}: {name}", min(left, member.file_size))
            left -= steps[name].nbytes
    yield from _cut(steps, path)


def _hdf5(path: Path, max_bytes: int) -> Iterator[dict[str, Array]]:
    h5py = optional_package("h5py", "h5", "VD4RLExperienceReplay")
    with h5py.File(path, "r") as file:
        columns = h5_columns(file)
        if not any(mark in columns for mark in _MARKS):
            raise ValueError(
                f"{path} has none of {', '.join(_MARKS)}, which say where its episodes are: add one, or write an .npz "
                "file for each episode"
            )
        yield from _cut(columns, path)


def _cut(steps: dict[str, Any], path: Path) -> Iterator[dict[str, Array]]:
    """The episodes of columns ``[N, ...]``."""
    pixels = next((name for name in _PIXELS if name in steps), None)
    if pixels is None or "action" not in steps:
        missing = "action" if pixels else "image"
        raise KeyError(f"{path} has no {missing!r}; it has {sorted(steps)}")

    lengths = {name: column.shape[0] if column.shape else -1 for name, column in steps.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path} must have one row for each step, got lengths {lengths}")

    length = lengths["action"]
    shape = list(steps[pixels].shape)
    if len(shape) != 4 or 0 in shape[1:]:
        raise ValueError(f"{path}: {pixels!r} must be images [N, H, W, C] or [N, C, H, W], got {shape}")

    bounds = np.flatnonzero(_starts(steps, length))
    for first, end in pairwise(bounds):
        yield {"pixels" if name == pixels else name: column[first:end] for name, column in steps.items()}


def _starts(steps: dict[str, Any], length: int) -> Array:
    """Whether an episode begins at each step, and True after the last; bool ``[N + 1]``."""
    starts = np.zeros(length + 1, bool)
    starts[[0, -1]] = True
    if "is_first" in steps:
        starts[:-1] |= steps["is_first"][:].reshape(-1).astype(bool)
    if "is_last" in steps:
        starts[1:] |= steps["is_last"][:].reshape(-1).astype(bool)
    if "step_type" in steps:
        kinds = steps["step_type"][:].reshape(-1)
        starts[:-1] |= kinds == _FIRST
        starts[1:] |= kinds == _LAST

    # A terminal step is the last one of its episode, too, whatever the other marks say.
    starts[1:] |= _terminal(steps, length) & ~starts[:-1]
    return starts


def _terminal(steps: dict[str, Any], length: int) -> Array:
    """Whether each step is terminal; bool ``[N]``."""
    if "is_terminal" in steps:
        marks = steps["is_terminal"][:].astype(bool)
    elif "discount" in steps:
        marks = steps["discount"][:] == 0
    else:
        marks = np.zeros(length, bool)
    return np.asarray(marks.all(tuple(range(1, marks.ndim))))


def _episode(steps: dict[str, Array], number: int) -> TensorDict:
    length = len(steps["action"]) - 1
    terminated = _terminal(steps, length + 1)[1:]
    truncated = np.zeros(length, bool)
    truncated[-1] = not terminated[-1]

    # In row t, the action that led to observation t.
    others: dict[NestedKey, Array] = {"action": steps["action"][1:]}
    states: dict[NestedKey, Array] = {"pixels": steps["pixels"]}

    for name, column in steps.items():
        if name == "discount":
            others[name] = column[1:]
        elif name not in (*_OWN, "action", "pixels"):
            states["state", *name.split("/")] = column

    reward = steps["reward"][1:] if "reward" in steps else None
    return make_episode(number, states, others, reward, terminated, truncated)


class VD4RLExperienceReplay(BaseDatasetExperienceReplay):
    """A V-D4RL data set: episodes of pixels in ``.npz`` or HDF5 files (`read_vd4rl`).

    Args:
        dataset_id: its name, such as ``"main/walker_walk/random/64px"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the files or their folder.
        totensor: samples have float pixels in [0, 1], channels first. Default True.
        image_size: height and width to which samples are resized. Default None.

    Raises:
        ImportError: h5py is missing, and the files are HDF5: ``pip install "flatroll[h5]"``.
    """

    kind = "vd4rl"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        images: list[Any] = ["pixels", ("next", "pixels")]
        given = options.get("transform")
        transforms: list[Any] = [] if given is None else [given]
        if totensor:
            transforms.append(ToTensorImage(in_keys=images, shape_tolerant=True))
        if image_size is not None:
            height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
            transforms.append(Resize(height, width, in_keys=images))

        options["transform"] = Compose(*transforms) if transforms else None
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return iter(read_vd4rl(source))

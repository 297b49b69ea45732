"""RoboSet: `read_roboset` for its HDF5 files of trials, and `RobosetExperienceReplay`."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.datasets import ids
from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay
from flatroll.datasets.formats.episodes import damage_in, files_in, make_episode
from flatroll.layout.checks import optional_package
from flatroll.layout.export import Array
from flatroll.layout.hdf5 import h5_columns
from flatroll.layout.keys import NestedKey, plain_key

_STATES = ("observations", "env_infos")


def read_roboset(paths: str | Path | Iterable[str | Path]) -> Iterator[TensorDict]:
    """Yield the trials of RoboSet's HDF5 files as flat batches ``[T]``.

    A file has a group ``Trial<k>`` for each episode, with ``observations``, ``actions``, ``done`` and more,
    ``[T, ...]`` each; groups such as ``env_infos`` are entries ``("info", …)``. The observation after a trial's last
    step is in no file: ``("collector", "next_known")`` is False there, and likewise after a step that is done earlier,
    which ends an episode. A trial that is not done at its end is truncated. Trials without ``rewards`` give rows
    without ``("next", "reward")``.

    Args:
        paths: a file, several, or a folder of ``.h5`` and ``.hdf5`` files. Entry ``"seed"`` is a file's number.

    Raises:
        ImportError: h5py is missing; the message names the extra.
        FileNotFoundError: the folder has no such files.
        KeyError: a trial lacks actions or observations.
        ValueError, TypeError: as `h5_columns`; columns of different length.

    Source: Kumar et al., RoboHive: A Unified Framework for Robot Learning (2023).
    """
    h5py = optional_package("h5py", "h5", "RobosetExperienceReplay")
    number = 0
    for seed, path in enumerate(files_in(paths, (".h5", ".hdf5"))):
        with damage_in(path), h5py.File(path, "r") as file:
            trials: dict[str, dict[str, Any]] = {}
            for place, column in h5_columns(file).items():
                trial, _, name = place.partition("/")
                trials.setdefault(trial, {})[name] = column
            for trial in sorted(trials, key=lambda trial: (len(trial), trial)):
                for episode in _trial(trials[trial], number, seed, f"{path}: {trial}"):
                    yield episode
                    number += 1


def _trial(columns: Mapping[str, Any], number: int, seed: int, place: str) -> Iterator[TensorDict]:
    """The episodes of a trial, one unless a step before its last is done."""
    groups = {column.partition("/")[0] for column in columns}
    for name, found in (("observations", groups), ("actions", columns)):
        if name not in found:
            raise KeyError(f"{place} has no {name!r}; it has {sorted(columns)}")

    length = columns["actions"].shape[0]
    if wrong := {name: column.shape[0] for name, column in columns.items() if column.shape[0] != length}:
        raise ValueError(f"{place} has {length} actions, but other columns have other lengths: {wrong}")

    # Checked before reading, since sizes in a file may be false.
    for name in ("rewards", "done", "terminated", "truncated"):
        if name in columns and columns[name].size != length:
            raise ValueError(f"{place}: {name!r} must be one number per row, got {list(columns[name].shape)}")

    arrays = {name: column[:] for name, column in columns.items()}
    names = {"observations": "observation", "env_infos": "info", "actions": "action"}
    states = dict[NestedKey, Array]()
    others = dict[NestedKey, Array]()
    for name, array in arrays.items():
        first, *rest = name.split("/")
        if first not in ("rewards", "done", "terminated", "truncated"):
            target = states if first in _STATES else others
            target[plain_key((names.get(first, first), *rest))] = array

    over = arrays.get("done", arrays.get("terminated", np.zeros(length, bool))).reshape(-1).astype(bool)
    cut = arrays.get("truncated", np.zeros(length, bool)).reshape(-1).astype(bool)
    cut[-1:] |= ~over[-1:]
    others["seed"] = np.full(length, seed)
    rewards = arrays.get("rewards")

    ends = np.flatnonzero(over | cut) + 1
    for count, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        rows = slice(start, end)
        paid = None if rewards is None else rewards[rows]
        yield make_episode(
            number + count,
            {key: values[rows] for key, values in states.items()},
            {key: values[rows] for key, values in others.items()},
            paid,
            (over & ~cut)[rows],
            cut[rows],
        )


class RobosetExperienceReplay(BaseDatasetExperienceReplay):
    """A RoboSet data set: HDF5 files of trials (`read_roboset`).

    Args:
        dataset_id: its name, such as ``"FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"``, one of `available_datasets`; with
            ``fetch`` any.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the files or their folder.

    Raises:
        ImportError: h5py is missing: ``pip install "flatroll[h5]"``.
        ValueError: no such set; the text has names like it.
    """

    kind = "roboset"
    #: Names of all sets.
    available_datasets = ids.ROBOSET

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_roboset(source)

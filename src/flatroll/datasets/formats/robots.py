"""Robot data: RoboSet's HDF5 trials, and episodes of steps as RLDS (and so Open X-Embodiment) has them."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from flatroll.datasets.formats.steps import episode_of
from flatroll.layout.export import Array, optional_package
from flatroll.layout.hdf5 import h5_columns

_STATES = ("observations", "env_infos")
_OF_A_STEP = ("is_first", "is_last", "is_terminal", "observation", "reward")


def read_roboset(paths: str | Path | Iterable[str | Path]) -> Iterator[TensorDict]:
    """Yield the trials of RoboSet's HDF5 files as flat batches ``[T]``.

    A file has a group ``Trial<k>`` for each episode, with ``observations``, ``actions``, ``rewards``, ``done`` and
    more, ``[T, ...]`` each; groups such as ``env_infos`` are entries ``("info", …)``. The observation after a
    trial's last step is in no file: ``("collector", "next_known")`` is False there. A trial that is not done at its
    end is truncated.

    Args:
        paths: a file, several, or a folder of ``.h5`` and ``.hdf5`` files. Entry ``"seed"`` is a file's number.

    Raises:
        ImportError: h5py is missing; the text names the extra.
        FileNotFoundError: the folder has no such files.
        KeyError: a trial lacks actions, rewards or observations.
        ValueError, TypeError: as `h5_columns`; columns of different length.

    Source: Kumar et al., RoboHive: A Unified Framework for Robot Learning (2023).
    """
    h5py = optional_package("h5py", "h5", "RobosetExperienceReplay")
    number = 0
    for seed, path in enumerate(files_in(paths, (".h5", ".hdf5"))):
        with h5py.File(path, "r") as file:
            trials: dict[str, dict[str, Any]] = {}
            for place, column in h5_columns(file).items():
                trial, _, name = place.partition("/")
                trials.setdefault(trial, {})[name] = column
            for trial in sorted(trials, key=lambda trial: (len(trial), trial)):
                episode = _trial(trials[trial], number, seed, f"{path}: {trial}")
                if len(episode):
                    yield episode
                    number += 1


def _trial(columns: Mapping[str, Any], number: int, seed: int, place: str) -> TensorDict:
    groups = {column.partition("/")[0] for column in columns}
    for name, found in (("observations", groups), ("actions", columns), ("rewards", columns)):
        if name not in found:
            raise KeyError(f"{place} has no {name!r}; it has {sorted(columns)}")
    length = columns["actions"].shape[0]
    if wrong := {name: column.shape[0] for name, column in columns.items() if column.shape[0] != length}:
        raise ValueError(f"{place} has {length} actions, and of others {wrong}")
    for name in ("rewards", "done", "terminated", "truncated"):  # so no rows are only claimed, either
        if name in columns and columns[name].size != length:
            raise ValueError(f"{place}: {name!r} must be one number a row, got {list(columns[name].shape)}")
    arrays = {name: column[:] for name, column in columns.items()}
    names = {"observations": "observation", "env_infos": "info", "actions": "action"}
    states, others = dict[str, Array](), dict[str, Array]()
    for name, array in arrays.items():
        first, *rest = name.split("/")
        if first not in ("rewards", "done", "terminated", "truncated"):
            target = states if first in _STATES else others
            target[".".join([names.get(first, first), *rest])] = array
    over = arrays.get("done", arrays.get("terminated", np.zeros(length, bool))).reshape(-1).astype(bool)
    cut = arrays.get("truncated", np.zeros(length, bool)).reshape(-1).astype(bool)
    cut[-1:] |= ~over[-1:]
    others["seed"] = np.full(length, seed)
    return episode_of(number, states, others, arrays["rewards"], over & ~cut, cut)


def files_in(paths: str | Path | Iterable[str | Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return files given one by one, or those of a folder with these suffixes, in order; no links."""
    if not isinstance(paths, str | Path):
        return [Path(path) for path in paths]
    path = Path(paths)
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
    if not found:
        raise FileNotFoundError(f"{path} has no files that end with {' or '.join(suffixes)}")
    if links := [file for file in found if file.is_symlink()]:
        raise ValueError(f"{links[0]} is a link, which may lead out of the folder: copy the file")
    return found


def read_rlds(episodes: Iterable[Any]) -> Iterator[TensorDict]:
    """Yield episodes of steps, as RLDS has them, as flat batches ``[T]``.

    Step t of an episode is ``{"observation", "action", "reward", "is_first", "is_last", "is_terminal", …}``: the reward
    is that of its action, and the last step has an observation only, its action and reward say nothing. So T + 1
    steps make T rows. Texts are left out. Steps without rewards make rows without ``("next", "reward")``.

    Some sets, demonstrations of Open X-Embodiment among them, have the reward of the goal at the last step, against
    that definition. It belongs to no action and is left out, with a warning if the episode has no other: give the
    steps their rewards one earlier.

    Args:
        episodes: each an iterable of steps, or a mapping with ``"steps"``; values are numbers, arrays, or dicts.

    Raises:
        ValueError: an episode without rows, steps that differ in their entries, or one that goes on after its last.
        KeyError: a step without observation.

    Source: Ramos et al., RLDS: an Ecosystem to Generate, Share and Use Datasets in Reinforcement Learning (2021).

    >>> steps = [{"observation": 1.0, "reward": 0.5}, {"observation": 2.0, "is_last": True, "is_terminal": True}]
    >>> (rows,) = read_rlds([steps])
    >>> rows["next", "observation"].tolist(), rows["next", "reward"].tolist(), rows["next", "terminated"].tolist()
    ([2.0], [[0.5]], [[True]])
    """
    for number, episode in enumerate(episodes):
        steps = list(episode["steps"] if isinstance(episode, Mapping) else episode)
        if len(steps) < 2:
            raise ValueError(f"episode {number} has {len(steps)} steps: a row needs two")
        if early := [t for t, step in enumerate(steps[:-1]) if bool(step.get("is_last", False))]:
            raise ValueError(f"episode {number} goes on after step {early[0]}, its last one")
        if any("observation" not in step for step in steps):
            raise KeyError(f"episode {number} has a step without 'observation'")
        states = _columns(steps, "observation", number)
        others: dict[str, Array] = {}
        for name in steps[0]:
            if name not in _OF_A_STEP:
                others |= _columns(steps[:-1], name, number)
        terminated = np.zeros(len(steps) - 1, bool)
        terminated[-1] = bool(steps[-1].get("is_terminal", False))
        truncated = np.zeros(len(steps) - 1, bool)
        truncated[-1] = not terminated[-1]
        yield episode_of(number, states, others, _rewards(steps, number), terminated, truncated)


def _rewards(steps: list[Any], number: int) -> Array | None:
    """The rewards of all steps but the last; None if these have none."""
    found = [step["reward"] for step in steps[:-1] if "reward" in step]
    if len(found) not in (0, len(steps) - 1):
        raise ValueError(f"episode {number} has {len(found)} rewards of {len(steps) - 1} actions")
    rewards = np.asarray(found, np.float32)
    if not rewards.any() and np.any(steps[-1].get("reward", 0)):
        warnings.warn(
            "an episode has a reward at its last step alone, which RLDS gives to no action, so that it is left out: "
            "give the steps their rewards one earlier",
            UserWarning,
            stacklevel=3,
        )
    return rewards if found else None


def _columns(steps: list[Any], name: str, number: int) -> dict[str, Array]:
    """The values of an entry, step after step, by dotted name."""
    found: dict[str, list[Any]] = {}
    for step in steps:
        for place, value in _leaves(step.get(name), name):
            found.setdefault(place, []).append(value)
    columns = {}
    for place, values in found.items():
        if isinstance(values[0], str | bytes):
            continue
        arrays = [np.asarray(value) for value in values]
        if len(arrays) != len(steps) or len({(array.shape, array.dtype) for array in arrays}) > 1:
            raise ValueError(f"episode {number}: {place!r} is not of one shape and dtype in all its steps")
        if arrays[0].dtype.kind in "biufc":
            columns[place] = np.stack(arrays)
    return columns


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}")
    else:
        yield name, value

"""D4RL: `read_d4rl` for its HDF5 files, with steps end to end, and `D4RLExperienceReplay`."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.datasets import ids
from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions
from flatroll.datasets.formats.episodes import count_on, damage_in, files_in, make_episode
from flatroll.layout.checks import check_flags, check_path, optional_package
from flatroll.layout.export import Array
from flatroll.layout.hdf5 import h5_columns
from flatroll.layout.keys import NestedKey, plain_key

_NAMES: dict[str, NestedKey] = {"actions": "action", "next_observations": ("next", "observation")}
_OWN = ("observations", "rewards", "terminals", "timeouts")
_ROWS_AT_ONCE = 65_536


def read_d4rl(source: str | Path | Mapping[str, Any], *, drop_unknown: bool = False) -> Iterator[TensorDict]:
    """Yield the episodes of a D4RL-like HDF5 file as flat batches ``[T]``.

    The file has ``observations`` ``[N, ...]`` and ``actions``, and may have ``rewards`` ``[N]``, ``terminals`` ``[N]``,
    ``timeouts`` ``[N]``, ``next_observations`` and others, such as ``infos/qpos``, which keep their names. An episode
    ends with a terminal or a timeout; one that neither ends is cut by the end of the file. Without ``timeouts`` it is
    also cut, with no flag set, where its ``next_observations`` are not the observations of the row after. Without
    ``next_observations`` the one that comes after an episode's last row is in no file: it is given as that row's own,
    and ``("collector", "next_known")`` is False there.

    Args:
        source: path of the file; or its arrays by name, as D4RL's ``env.get_dataset()`` returns them. What belongs to
            ``metadata`` is not read.
        drop_unknown: leave out the last rows whose next observation is unknown, as ``d4rl.qlearning_dataset`` does, but
            for terminal ones, whose next value is 0 anyway. Default False.

    Raises:
        ImportError: h5py is missing; the message names the extra.
        KeyError: there are no observations or actions.
        ValueError, TypeError: as `h5_columns`; datasets of different length.

    Warns:
        UserWarning: there are neither ``terminals``, ``timeouts`` nor ``next_observations``, so nothing says where
            episodes end: all rows are one trajectory.

    Source: Fu et al., D4RL: Datasets for Deep Data-Driven Reinforcement Learning (2020).

    >>> steps = {"observations": np.arange(3.0), "actions": np.zeros(3), "rewards": np.ones(3)}
    >>> [len(episode) for episode in read_d4rl({**steps, "terminals": np.array([False, True, False])})]
    [2, 1]
    """
    check_flags(drop_unknown=drop_unknown)
    if isinstance(source, Mapping):
        arrays = {
            name: np.asarray(values) for name, values in source.items() if name.split("/")[0] != "metadata"
        }
        yield from _episodes(arrays, "the data set", drop_unknown)
        return

    h5py = optional_package("h5py", "h5", "read_d4rl")
    with damage_in(check_path("source", source)), h5py.File(source, "r") as file:
        yield from _episodes(h5_columns(file, leave_out=("metadata",)), str(source), drop_unknown)


def _episodes(columns: Mapping[str, Any], place: str, drop_unknown: bool) -> Iterator[TensorDict]:
    for name in ("observations", "actions"):
        if name not in columns:
            raise KeyError(f"{place} has no dataset {name!r}; it has {sorted(columns)}")

    lengths = {name: (*column.shape, 0)[0] for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"datasets must have one row for each step, got lengths {lengths}")

    rows_there = lengths["observations"]
    terminal = _flags(columns, "terminals", rows_there)
    timeout = _flags(columns, "timeouts", rows_there)
    over = terminal | timeout

    if "timeouts" not in columns and "next_observations" in columns:
        over[:-1] |= ~_continues(columns["observations"], columns["next_observations"])
    elif not {"terminals", "timeouts"} & columns.keys():
        warnings.warn(
            f"{place} has no terminals, timeouts or next_observations, so nothing says where its episodes end: its "
            f"{rows_there} rows are read as one trajectory",
            UserWarning,
            stacklevel=3,
        )

    over[-1:] = True
    first = 0
    for number, last in enumerate(np.flatnonzero(over)):
        rows = slice(first, last + 1)
        others = {
            _NAMES.get(name, plain_key(tuple(name.split("/")))): column[rows]
            for name, column in columns.items()
            if name not in _OWN
        }

        states = {"observation": columns["observations"][rows]}
        reward = columns["rewards"][rows] if "rewards" in columns else None
        episode = make_episode(number, states, others, reward, terminal[rows], timeout[rows])
        first = int(last) + 1
        if drop_unknown and "next_observations" not in columns and not terminal[last]:
            episode = episode[:-1]
        if len(episode):
            yield episode


def _flags(columns: Mapping[str, Any], name: str, rows: int) -> Array:
    """Flags ``[rows]``; all False if there are none."""
    if name not in columns:
        return np.zeros(rows, bool)
    flags: Array = columns[name][:].reshape(-1).astype(bool)
    return flags


def _continues(seen: Any, following: Any) -> Array:
    """Whether the next observation of each row but the last is the observation of the row after; bool ``[N - 1]``."""
    rows = seen.shape[0]
    if seen.shape != following.shape:
        raise ValueError(
            f"next_observations must have the shape of observations, {list(seen.shape)}, got {list(following.shape)}"
        )

    same = np.ones(max(rows - 1, 0), bool)
    for first in range(0, rows - 1, _ROWS_AT_ONCE):
        end = min(first + _ROWS_AT_ONCE, rows - 1)
        later = following[first:end]
        root = seen[first + 1 : end + 1].astype(later.dtype)  # as precise as the file's next observations
        equal = (root == later) | ((root != root) & (later != later))  # NaN equals NaN
        same[first:end] = equal.reshape(end - first, -1).all(1)
    return same


class D4RLExperienceReplay(BaseDatasetExperienceReplay):
    """A D4RL data set, or any HDF5 file in its format (`read_d4rl`).

    Where the file has no ``next_observations``, that of an episode's last step is in no file: its row has its own
    observation there, and ``("collector", "next_known")`` is False.

    Args:
        dataset_id: its name, such as ``"maze2d-umaze-v1"``, one of `available_datasets`; with ``fetch`` any.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the HDF5 file.
        from_env: take the arrays that ``env.get_dataset()`` returns, where ``fetch`` gives the env (or the arrays by
            name). Without ``fetch`` the env is ``gym.make(dataset_id)`` after ``import d4rl``: D4RL's own library,
            which needs the Gym and MuJoCo of 2021 and a Python of that time. Default False.
        use_truncated_as_done: set ``("next", "done")`` at timeouts. If False, it is True only at terminals, and
            ``is_init`` marks where episodes begin. Default True.
        direct_download: None or True, for compatibility; ``d4rl.qlearning_dataset`` is not called, since its result
            does not mark where episodes were cut.
        terminate_on_end: leave out last rows whose next observation is unknown, except for terminal ones, as
            `d4rl.qlearning_dataset` does. Default False (None).

    Raises:
        ImportError: h5py is missing: ``pip install "flatroll[h5]"``; with ``from_env``, gym or d4rl.
        ValueError: no such set; the text has names like it.
    """

    kind = "d4rl"
    #: Names of all sets.
    available_datasets = ids.D4RL

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        if direct_download is False and not from_env:
            raise ValueError(
                "direct_download=False would use d4rl.qlearning_dataset, whose rows do not say where episodes "
                "were cut: pass from_env=True, or leave it out"
            )
        if direct_download and from_env:
            raise ValueError("from_env=True takes the rows from the env: leave out direct_download")

        self._from_env = from_env
        self._truncated_is_done = use_truncated_as_done
        self._drop_unknown = bool(terminate_on_end)
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _facts(self) -> dict[str, Any]:
        ends = {"use_truncated_as_done": self._truncated_is_done, "terminate_on_end": self._drop_unknown}
        return super()._facts() | {"options": ends}

    @override
    def _fetch(self, folder: Path) -> Any:
        if not self._from_env:
            return super()._fetch(folder)
        self._check_known()
        try:
            import_module("d4rl")  # registers the envs with gym
            gym = import_module("gym")
        except ImportError as error:
            raise ImportError(
                f"from_env=True needs gym and D4RL's own library, which only old versions of Python can install "
                f"({error}): leave it out and pass the HDF5 file with fetch=, or pass the env with fetch="
            ) from error
        return gym.make(self.dataset_id)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        files = (read_d4rl(rows, drop_unknown=self._drop_unknown) for rows in self._sources(source))
        for episode in count_on(files):
            if not self._truncated_is_done:
                episode["next", "done"] = episode["next", "terminated"].clone()
            yield episode

    def _sources(self, source: Any) -> Iterable[Any]:
        """What `read_d4rl` reads, one after the other."""
        if not self._from_env:
            return files_in(source, (".hdf5", ".h5"))
        if isinstance(source, Mapping):
            return [source]
        env = source
        if not hasattr(env, "get_dataset"):
            env = getattr(source, "unwrapped", source)
        if not hasattr(env, "get_dataset"):
            raise TypeError(
                "from_env=True needs a D4RL env with get_dataset(), or the arrays that it returns, got "
                f"{type(source).__name__}"
            )
        return [env.get_dataset()]

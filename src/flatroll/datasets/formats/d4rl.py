"""HDF5 files as D4RL has them: steps end to end, ``terminals`` and ``timeouts`` beside them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from flatroll.layout.export import Array, from_numpy, optional_package
from flatroll.layout.hdf5 import h5_columns

_NAMES = {"observations": "observation", "actions": "action"}
_OWN = ("rewards", "terminals", "timeouts", "next_observations")


def read_d4rl(source: str | Path | Mapping[str, Any], *, drop_unknown: bool = False) -> Iterator[TensorDict]:
    """Yield the episodes of a D4RL-like HDF5 file as flat batches ``[T]``.

    The file has ``observations`` ``[N, ...]``, ``actions``, ``rewards`` ``[N]`` and ``terminals`` ``[N]``, and may have
    ``timeouts`` ``[N]``, ``next_observations`` and others, such as ``infos/qpos``, which keep their names. An episode
    ends with a terminal or a timeout; one that neither ends is cut by the end of the file. Without
    ``next_observations`` the one that comes after an episode's last row is in no file: it is given as that row's own,
    and ``("collector", "next_known")`` is False there.

    Args:
        source: path of the file; or its arrays by name, as D4RL's ``env.get_dataset()`` returns them. What belongs to
            ``metadata`` is not read.
        drop_unknown: leave out the last rows whose next observation is unknown, as ``d4rl.qlearning_dataset`` does, but
            for terminal ones, whose next value is 0 anyway. Default False.

    Raises:
        ImportError: h5py is missing; the text names the extra.
        KeyError: a dataset is missing.
        ValueError, TypeError: as `h5_columns`; datasets of different length.

    Source: Fu et al., D4RL: Datasets for Deep Data-Driven Reinforcement Learning (2020).

    >>> steps = {"observations": np.arange(3.0), "actions": np.zeros(3), "rewards": np.ones(3)}
    >>> [len(episode) for episode in read_d4rl({**steps, "terminals": np.array([False, True, False])})]
    [2, 1]
    """
    if isinstance(source, Mapping):
        arrays = {
            name: np.asarray(values) for name, values in source.items() if name.split("/")[0] != "metadata"
        }
        yield from _episodes(arrays, "the data set", drop_unknown)
        return
    h5py = optional_package("h5py", "h5", "read_d4rl")
    with h5py.File(source, "r") as file:
        yield from _episodes(h5_columns(file, leave_out=("metadata",)), str(source), drop_unknown)


def _episodes(columns: Mapping[str, Any], place: str, drop_unknown: bool) -> Iterator[TensorDict]:
    for name in ("observations", "actions", "rewards", "terminals"):
        if name not in columns:
            raise KeyError(f"{place} has no dataset {name!r}; it has {sorted(columns)}")
    lengths = {name: (*column.shape, 0)[0] for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"datasets must have one row for each step, got lengths {lengths}")
    terminal = columns["terminals"][:].reshape(-1).astype(bool)
    timeout = columns["timeouts"][:].reshape(-1).astype(bool) if "timeouts" in columns else terminal & False
    over = terminal | timeout
    over[-1:] = True
    first = 0
    for number, last in enumerate(np.flatnonzero(over)):
        rows = {name: column[first : last + 1] for name, column in columns.items()}
        rows |= {"terminals": terminal[first : last + 1], "timeouts": timeout[first : last + 1]}
        episode = _episode(rows, number)
        first = int(last) + 1
        if drop_unknown and "next_observations" not in columns and not terminal[last]:
            episode = episode[:-1]
        if len(episode):
            yield episode


def _episode(rows: dict[str, Array], number: int) -> TensorDict:
    length, seen = len(rows["rewards"]), rows["observations"]
    is_init = np.zeros((length, 1), bool)
    is_init[0] = True
    terminated, truncated = (rows[name].reshape(-1, 1) for name in ("terminals", "timeouts"))
    columns: dict[str, Any] = {
        **{_NAMES.get(name, name.replace("/", ".")): row for name, row in rows.items() if name not in _OWN},
        "is_init": is_init,
        "collector.traj_ids": np.full(length, number),
        "next.observation": rows.get("next_observations"),
        "next.reward": rows["rewards"].reshape(-1, 1).astype(np.float32, copy=False),
        "next.terminated": terminated,
        "next.truncated": truncated,
        "next.done": terminated | truncated,
    }
    if "next_observations" not in rows:
        columns["next.observation"] = np.concatenate([seen[1:], seen[-1:]])
        columns["collector.next_known"] = np.arange(length) < length - 1
    return from_numpy(columns)

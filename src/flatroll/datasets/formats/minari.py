"""Minari data sets, written and read by Minari's own library (its formats hdf5, arrow and parquet)."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.datasets.formats.sources import Source, episodes_of
from flatroll.layout.export import Array, from_numpy, optional_package, to_numpy
from flatroll.layout.keys import ACTION, NEXT, OBSERVATION, as_tuple, observation_keys
from flatroll.layout.ted import is_shift

_RECORD = "flatroll"  # entry of the metadata: where each column went
_SINGLE = {"next.reward": "rewards", "next.terminated": "terminations", "next.truncated": "truncations"}


def write_minari(
    source: Source,
    path: Path,
    *,
    dataset_id: str = "flatroll/rows-v0",
    data_format: str = "hdf5",
    observation_space: gym.Space[Any] | None = None,
    action_space: gym.Space[Any] | None = None,
    **metadata: Any,
) -> None:
    """Write a folder that `minari.MinariDataset` opens, one trajectory at a time.

    An episode has T + 1 observations, T actions, rewards, terminations and truncations. All other columns stand in its
    ``infos``, by dotted name, their last row twice, since Minari's infos are T + 1 long. Images are stored as they
    are, not as JPEG.

    Args:
        source: the rows.
        path: of the folder to be made.
        dataset_id: the name in the metadata, ``[namespace/]name-v<number>``.
        data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``. Default ``"hdf5"``.
        observation_space, action_space: default: boxes over all values of the entries' dtypes.
        **metadata: more of it, such as ``author={"…"}`` and ``description="…"``.

    Raises:
        ValueError: next observations are missing, or are not the observations of the next row (n-step data); a name has
            "/" in it, which would be a group of Minari's files.
    """
    minari = optional_package("minari", "minari", "export")
    storage_of = optional_package("minari.dataset.minari_storage", "minari", "export").MinariStorage
    buffer_of = optional_package("minari.data_collector", "minari", "export").EpisodeBuffer
    trajectories = episodes_of(source)
    first = next(trajectories)
    observations, actions = _observations(first), _actions(first)
    if grouped := [name for name in to_numpy(first) if "/" in name]:
        raise ValueError(
            f"entry {grouped[0]!r} has '/' in its name: rename it, it would be a group of Minari's files"
        )
    path.mkdir()
    storage = storage_of.new(
        path,
        observation_space=observation_space or _space_of(observations),
        action_space=action_space or _space_of(actions),
        data_format=data_format,
        jpeg_encoding=False,
    )
    record = [[name, array.dtype.name, list(array.shape[1:])] for name, array in to_numpy(first).items()]
    storage.update_metadata(
        {"dataset_id": dataset_id, "minari_version": minari.__version__, **metadata, _RECORD: record}
    )

    def episodes() -> Iterator[Any]:
        for number, rows in enumerate(chain([first], trajectories)):
            columns = to_numpy(rows)
            kept = {f"{NEXT}.{name}" for name in _observation_names(rows)} | {
                *_observation_names(rows),
                *_SINGLE,
            }
            infos = {  # of two dimensions at least: Minari's arrow files cannot be read else
                name: np.concatenate([array, array[-1:]]).reshape(len(array) + 1, *(array.shape[1:] or (1,)))
                for name, array in columns.items()
                if name not in kept and name.partition(".")[0] != ACTION
            }
            single = {place: _one_a_row(columns, name) for name, place in _SINGLE.items()}
            yield buffer_of(
                id=number, observations=_observations(rows), actions=_actions(rows), infos=infos, **single
            )

    storage.update_episodes(episodes())


def _observation_names(rows: TensorDictBase) -> list[str]:
    return [".".join(as_tuple(key)) for key in observation_keys(rows)]


def _one_a_row(columns: Mapping[str, Array], name: str) -> Array:
    if name not in columns:
        raise ValueError(f"a Minari episode needs {name}: it is not in the batch")
    if columns[name].size != len(columns[name]):
        raise ValueError(f"{name} must be one number a row, got {list(columns[name].shape[1:])}")
    return columns[name].reshape(-1)


def _observations(rows: TensorDictBase) -> Any:
    """T + 1 observations: an array, or a dict of them."""
    columns = to_numpy(rows)
    ends = torch.zeros(len(rows), dtype=torch.bool)
    ends[-1] = True
    whole: dict[str, Array] = {}
    for name in _observation_names(rows):
        following = columns.get(f"{NEXT}.{name}")
        if following is None:
            raise ValueError(
                f"next.{name} is not in the batch: put a compact batch into a buffer with compact_obs=True, with its "
                "final=, and export that"
            )
        if not is_shift(torch.from_numpy(columns[name]), torch.from_numpy(following), ends):
            raise ValueError(
                f"next.{name} is not {name} of the next row (n-step data?), which episodes cannot hold: use "
                'format="parquet" or "h5"'
            )
        whole[name] = np.concatenate([columns[name], following[-1:]])
    if not whole:
        raise ValueError("an episode needs observations: the batch has none")
    return whole[OBSERVATION] if list(whole) == [OBSERVATION] else _nested(whole)


def _actions(rows: TensorDictBase) -> Any:
    columns = {name: array for name, array in to_numpy(rows).items() if name.partition(".")[0] == ACTION}
    if not columns:
        raise ValueError("a Minari episode needs actions: the batch has none")
    return columns[ACTION] if ACTION in columns else _nested(columns)[ACTION]


def _nested(columns: Mapping[str, Array]) -> dict[str, Any]:
    """Folders of columns, by dotted name."""
    tree: dict[str, Any] = {}
    for name, array in columns.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = array
    return tree


def _space_of(columns: Any) -> gym.Space[Any]:
    """The space of all values that the dtypes can hold."""
    if isinstance(columns, dict):
        return gym.spaces.Dict({name: _space_of(column) for name, column in columns.items()})
    shape, dtype = columns.shape[1:], columns.dtype
    kind: Any = dtype.type
    if dtype.kind == "f":
        return gym.spaces.Box(-np.inf, np.inf, shape, kind)
    if dtype.kind == "b":
        return gym.spaces.Box(0, 1, shape, kind)
    limits = np.iinfo(kind)
    return gym.spaces.Box(limits.min, limits.max, shape, kind)


def read_minari(source: Any, *, infos: bool = True) -> Iterator[TensorDict]:
    """Yield the episodes of a Minari data set as flat batches ``[T]``.

    Of a data set that `write_minari` did not write: Dict observations stand at the root by name, parts of Tuples by
    number; rewards (cast to float32), flags and ``is_init`` are ``[T, 1]``; ``("collector", "traj_ids")`` is the
    episode's number. Infos of numbers are ``("info", name)`` and ``("next", "info", name)``, those that are missing at
    the reset (T values, not T + 1) the latter only. Infos of text, and those that are not one a step, are left out.

    Args:
        source: a `minari.MinariDataset`, or the path of a data set's ``data`` folder.
        infos: False leaves all infos out, as where episodes differ in them. Default True.

    Raises:
        ImportError: Minari is missing; the text names the extra.
        TypeError: observations or actions of text.
        ValueError: episodes differ in their infos.
    """
    return map(from_numpy, read_minari_columns(open_minari(source), infos=infos))


def open_minari(source: Any) -> Any:
    """Return a `minari.MinariDataset` as it is, or that of a ``data`` folder."""
    if not isinstance(source, str | Path):
        return source
    return optional_package("minari", "minari", "import_minari").MinariDataset(Path(source).absolute())


def read_minari_columns(data: Any, *, infos: bool = True) -> Iterator[dict[str, Array]]:
    """Yield the columns of each episode of a `minari.MinariDataset` by dotted name; see `read_minari`."""
    record = data.storage.metadata.get(_RECORD)
    if record is not None:
        yield from (_recorded(episode, record) for episode in data.iterate_episodes())
        return
    before: set[tuple[Any, ...]] | None = None  # the infos of the first episode
    for episode in data.iterate_episodes():
        columns = _columns_of(episode, infos)
        kinds = {
            (name, array.dtype.name, array.shape[1:])
            for name, array in columns.items()
            if name.removeprefix(f"{NEXT}.").startswith("info.")
        }
        if differing := sorted({kind[0] for kind in kinds ^ (kinds if before is None else before)}):
            raise ValueError(
                f"episode {episode.id} has other infos than those before it, or of other shapes or dtypes: "
                f"{differing}; infos=False leaves all of them out"
            )
        before = kinds
        yield columns


def _recorded(episode: Any, record: list[Any]) -> dict[str, Array]:
    """The columns of an episode by dotted name, as they were written."""
    length, columns = len(episode), dict[str, Array]()
    leaves = dict(_leaves(episode.observations, OBSERVATION if not _is_folder(episode.observations) else ""))
    leaves |= dict(_leaves(episode.actions, ACTION))
    for name, dtype, shape in record:
        later = name.removeprefix(f"{NEXT}.")
        if name in _SINGLE:
            array = getattr(episode, _SINGLE[name])
        elif name in leaves:
            array = leaves[name][:length]
        elif later != name and later in leaves:
            array = leaves[later][1:]
        else:
            array = np.asarray(episode.infos[name])[:length]
        columns[name] = np.asarray(array).reshape(length, *shape).astype(dtype, copy=False)
    return columns


def _columns_of(episode: Any, infos: bool) -> dict[str, Array]:
    length = len(episode)
    leaves = dict(_leaves(episode.observations, OBSERVATION if not _is_folder(episode.observations) else ""))
    terminated, truncated = (
        np.asarray(flags, bool).reshape(length, 1) for flags in (episode.terminations, episode.truncations)
    )
    is_init = np.zeros((length, 1), bool)
    is_init[:1] = True
    later = dict[str, Array]()  # entries under "next" alone
    for name, values in _leaves(episode.infos or {}, "info") if infos else ():
        array = np.asarray(values)
        if array.dtype.kind in "biufc" and array.shape[:1] == (length + 1,):
            leaves[name] = array
        elif array.dtype.kind in "biufc" and array.shape[:1] == (length,):
            later[f"{NEXT}.{name}"] = array
    return {
        **{name: np.asarray(array)[:length] for name, array in leaves.items()},
        **{name: np.asarray(array) for name, array in _leaves(episode.actions, ACTION)},
        "is_init": is_init,
        "collector.traj_ids": np.full(length, int(episode.id)),
        **{f"{NEXT}.{name}": np.asarray(array)[1:] for name, array in leaves.items()},
        "next.reward": np.asarray(episode.rewards, np.float32).reshape(length, 1),
        "next.terminated": terminated,
        "next.truncated": truncated,
        "next.done": terminated | truncated,
        **later,
    }


def _is_folder(values: Any) -> bool:
    return isinstance(values, dict | tuple)


def _leaves(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Arrays of a Dict or Tuple by dotted name."""
    if not _is_folder(values):
        yield name, values
        return
    parts = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in parts:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))

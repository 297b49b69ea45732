"""Minari data sets, written and read by its own library (hdf5, arrow and parquet); and `MinariExperienceReplay`."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import gymnasium as gym
import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions
from flatroll.datasets.formats.episodes import episode_columns, named_leaves
from flatroll.datasets.formats.sources import Source, check_follows, episodes_of
from flatroll.disk import Folder
from flatroll.layout.checks import file_path, shown
from flatroll.layout.export import Array, from_numpy, optional_package, to_numpy
from flatroll.layout.keys import ACTION, NEXT, OBSERVATION, RESERVED, as_tuple, observation_keys

if TYPE_CHECKING:
    from minari import EpisodeData, MinariDataset

_FOLDERS = (dict, tuple)  # the containers of Dict and Tuple spaces
_RECORD = "flatroll"  # metadata entry that maps columns to their places
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

    An episode has T + 1 observations, T actions, rewards, terminations and truncations. All other columns are in its
    ``infos``, by dotted name, with the last row repeated, since Minari's infos have length T + 1. Images are stored
    raw, not as JPEG.

    Args:
        source: the rows.
        path: of the folder to be made.
        dataset_id: the name in the metadata, ``[namespace/]name-v<number>``.
        data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``. Default ``"hdf5"``.
        observation_space, action_space: of the env, ``env.single_observation_space`` of a vector env. Default: those
            that the buffer knows of its collector (``Collector(replay_buffer=)``, `ReplayBuffer.note_spec`).
        **metadata: more of it, such as ``author={"…"}`` and ``description="…"``.

    Raises:
        ValueError: a space is unknown, since a dtype says neither limits nor whether a number is one of a few; next
            observations are missing, or are not the observations of the next row (n-step data); a name has "/" in it,
            which would be a group of Minari's files.
    """
    minari = optional_package("minari", "minari", "export")
    storage_of = optional_package("minari.dataset.minari_storage", "minari", "export").MinariStorage
    buffer_of = optional_package("minari.data_collector", "minari", "export").EpisodeBuffer
    trajectories = episodes_of(source)
    first = next(trajectories)
    observations, actions = _observations(first), _actions(first)
    if grouped := [name for name in to_numpy(first) if "/" in name]:
        raise ValueError(
            f"entry {grouped[0]!r} has '/' in its name, which separates groups in Minari's files: rename it"
        )
    if observation_space is None:
        root = () if isinstance(observations, dict) else (OBSERVATION,)
        observation_space = _space_of(observations, root, source, "observation_space")
    if action_space is None:
        action_space = _space_of(actions, (ACTION,), source, "action_space")
    path.mkdir()
    storage = storage_of.new(
        path,
        observation_space=observation_space,
        action_space=action_space,
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
            infos = {  # at least two dimensions, or Minari's arrow files cannot be read
                name: np.concatenate([array, array[-1:]]).reshape(len(array) + 1, *(array.shape[1:] or (1,)))
                for name, array in columns.items()
                if name not in kept and name.partition(".")[0] != ACTION
            }
            single: dict[str, Array] = {}
            for name, place in _SINGLE.items():
                if name not in columns:
                    raise ValueError(f"a Minari episode needs {name}, which the batch lacks")
                if columns[name].size != len(columns[name]):
                    raise ValueError(
                        f"{name} must be one number per row, got {list(columns[name].shape[1:])}"
                    )
                single[place] = columns[name].reshape(-1)
            yield buffer_of(
                id=number, observations=_observations(rows), actions=_actions(rows), infos=infos, **single
            )

    storage.update_episodes(episodes())


def _observation_names(rows: TensorDictBase) -> list[str]:
    return [".".join(as_tuple(key)) for key in observation_keys(rows)]


def _observations(rows: TensorDictBase) -> Any:
    """T + 1 observations: an array, or a dict of them."""
    columns = to_numpy(rows)
    whole: dict[str, Array] = {}
    for name in _observation_names(rows):
        following = columns.get(f"{NEXT}.{name}")
        if following is None:
            raise ValueError(
                f"next.{name} is not in the batch: extend a buffer that has compact_obs=True with the compact "
                "batch and its final=, and export the buffer"
            )
        check_follows(name, columns[name], following)
        whole[name] = np.concatenate([columns[name], following[-1:]])
    if not whole:
        raise ValueError("an episode needs observations: the batch has none")
    return whole[OBSERVATION] if list(whole) == [OBSERVATION] else _nest(whole)


def _actions(rows: TensorDictBase) -> Any:
    columns = {name: array for name, array in to_numpy(rows).items() if name.partition(".")[0] == ACTION}
    if not columns:
        raise ValueError("a Minari episode needs actions: the batch has none")
    return columns[ACTION] if ACTION in columns else _nest(columns)[ACTION]


def _nest(columns: Mapping[str, Array]) -> dict[str, Any]:
    """Folders of columns, by dotted name."""
    tree: dict[str, Any] = {}
    for name, array in columns.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = array
    return tree


def _space_of(columns: Any, key: tuple[str, ...], source: Source, argument: str) -> gym.Space[Any]:
    """The space of columns under ``key``, as the source knows it; ValueError that asks for the ``argument`` if not."""
    if isinstance(columns, dict):
        parts = {name: _space_of(column, (*key, name), source, argument) for name, column in columns.items()}
        return gym.spaces.Dict(parts)
    space: gym.Space[Any] | None = source.space_of(key)
    if space is None or (space.dtype, space.shape) != (columns.dtype, columns.shape[1:]):
        raise ValueError(
            f"{argument} must be given: flatroll does not know the space of {'.'.join(key)!r}, {columns.dtype} "
            f"{list(columns.shape[1:])}. Pass {argument}=env.single_{argument}, or first call "
            "buffer.note_spec(collector.spec)"
        )
    return space


def read_minari(
    source: "str | Path | MinariDataset", *, infos: bool = True, rename: Mapping[str, str] | None = None
) -> Iterator[TensorDict]:
    """Yield the episodes of a Minari data set as flat batches ``[T]``.

    In a data set that `write_minari` did not write, Dict observations are root entries by name, parts of Tuples by
    number; rewards, flags and ``is_init`` are ``[T, 1]``; ``("collector", "traj_ids")`` is the episode's number.
    Numeric infos are ``("info", name)`` and ``("next", "info", name)``, or only the latter if they are missing at the
    reset (T values, not T + 1). Infos of text, and those without one value per step, are left out.

    Args:
        source: a `minari.MinariDataset`, or the path of a data set's ``data`` folder.
        infos: False leaves all infos out, as where episodes differ in them. Default True.
        rename: new names of entries of the observations, ``{"action": "last_action"}``: those that have the name of one
            of our columns need one. Default: none.

    Raises:
        ImportError: Minari is missing; the message names the extra.
        TypeError: observations or actions of text.
        ValueError: episodes differ in their infos; an entry of the observations has the name of a column
            (`flatroll.layout.RESERVED`), or ``rename`` names none.
    """
    return map(from_numpy, read_minari_columns(open_minari(source), infos=infos, rename=rename))


def open_minari(source: "str | Path | MinariDataset") -> "MinariDataset":
    """Return a `minari.MinariDataset` unchanged, or open the one in a ``data`` folder."""
    if not isinstance(source, str | Path):
        if not hasattr(getattr(source, "storage", None), "metadata"):
            raise TypeError(f"source must be a MinariDataset or the path of its folder, got {shown(source)}")
        return source
    if not file_path("source", source).is_dir():
        raise FileNotFoundError(f"source must be a Minari data folder, there is none at {source}")
    return optional_package("minari", "minari", "import_minari").MinariDataset(Path(source).absolute())


def read_minari_columns(
    data: "MinariDataset", *, infos: bool = True, rename: Mapping[str, str] | None = None
) -> Iterator[dict[str, Array]]:
    """Yield the columns of each episode of a `minari.MinariDataset` by dotted name; see `read_minari`."""
    record = data.storage.metadata.get(_RECORD)
    if record is not None:
        if rename:
            raise ValueError(
                "rename is only for data sets from other sources: this one was written by export, which keeps "
                "the names of columns"
            )
        yield from (_restore_episode(episode, record) for episode in data.iterate_episodes())
        return
    before: set[tuple[Any, ...]] | None = None  # the infos of the first episode
    for episode in data.iterate_episodes():
        columns = _columns_of(episode, infos, rename or {})
        kinds = {
            (name, array.dtype.name, array.shape[1:])
            for name, array in columns.items()
            if name.removeprefix(f"{NEXT}.").startswith("info.")
        }
        if differing := sorted({kind[0] for kind in kinds ^ (kinds if before is None else before)}):
            raise ValueError(
                f"the infos of episode {episode.id} differ from those of earlier episodes in entries, shapes or "
                f"dtypes: {differing}; pass infos=False to omit all infos"
            )
        before = kinds
        yield columns


def _restore_episode(episode: "EpisodeData", record: list[Any]) -> dict[str, Array]:
    """The columns of an episode by dotted name, as they were written."""
    length, columns = len(episode), dict[str, Array]()
    leaves = _observation_leaves(episode)
    leaves |= dict(named_leaves(episode.actions, ACTION, _FOLDERS))
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


def _columns_of(episode: "EpisodeData", infos: bool, rename: Mapping[str, str]) -> dict[str, Array]:
    length = len(episode)
    seen = _observation_leaves(episode)
    roots = {name.partition(".")[0]: name for name in seen}
    if unknown := sorted(rename.keys() - roots.keys()):
        raise ValueError(f"rename names {unknown[0]!r}, which is not one of the observations {sorted(roots)}")
    taken = RESERVED | ({"info"} if infos else set())
    new = [rename.get(root, root) for root in roots]
    for root, name in zip(roots, new, strict=True):
        if name.partition(".")[0] in taken or new.count(name) > 1:
            raise ValueError(
                f"the observation's entry {root!r} cannot become the column {name!r}, because that name is "
                f"taken: pass rename={{{root!r}: 'observed_{root}'}}"
            )
    leaves = {}
    for name, array in seen.items():
        root, dot, rest = name.partition(".")
        leaves[f"{rename.get(root, root)}{dot}{rest}"] = array
    others = {name: np.asarray(array) for name, array in named_leaves(episode.actions, ACTION, _FOLDERS)}
    for name, values in named_leaves(episode.infos or {}, "info", _FOLDERS) if infos else ():
        array = np.asarray(values)
        if array.dtype.kind in "biufc" and array.shape[:1] == (length + 1,):
            leaves[name] = array
        elif array.dtype.kind in "biufc" and array.shape[:1] == (length,):
            others[f"{NEXT}.{name}"] = array
    states = {name: np.asarray(array) for name, array in leaves.items()}
    flags = episode.terminations, episode.truncations
    return episode_columns(int(episode.id), states, others, episode.rewards, *flags)


def _observation_leaves(episode: "EpisodeData") -> dict[str, Array]:
    """Observations ``[T + 1, ...]`` by dotted name: under ``"observation"``, unless they are of a Dict or Tuple."""
    several = isinstance(episode.observations, _FOLDERS)
    return dict(named_leaves(episode.observations, "" if several else OBSERVATION, _FOLDERS))


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A Minari data set in any of its formats (hdf5, arrow, parquet), read by Minari's own library.

    Observations of a Dict space are root entries by name, of another space ``"observation"``; parts of a Tuple have
    their number as name. ``("collector", "traj_ids")`` is the episode's number in the set. Numeric infos with one value
    per step are ``("info", name)`` and ``("next", "info", name)``; others are left out (`read_minari`).
    Minari stores images as JPEG by default (``jpeg_encoding=False`` disables it): decoded JPEGs are returned.

    Args:
        dataset_id: as Minari has it, ``"[namespace/]name-v<number>"``. To read a set from your own folder, pass
            ``fetch=lambda name, folder: "PATH/data"`` and any name.
        batch_size, options: see `BaseDatasetExperienceReplay`.
        load_from_local_minari: take the set from the folder in which Minari keeps those that were made or fetched here,
            and never fetch it. Default False: fetch it, unless it is there.
        infos: False leaves infos out, as is needed where episodes differ in them. Default True.
        rename: new names of entries of the observations, see `read_minari`. Default: none.

    Attributes:
        metadata: what Minari knows of the set, in words and numbers.

    Raises:
        ImportError: Minari is missing: ``pip install "flatroll[minari]"``.
        FileNotFoundError: Minari does not have the set here, and was not to fetch it.
        ValueError: Minari has no set of that name.
    """

    kind = "minari"

    def __init__(
        self,
        dataset_id: str | Path,
        batch_size: int | None = None,
        *,
        load_from_local_minari: bool = False,
        infos: bool = True,
        rename: Mapping[str, str] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        self._local, self._infos, self._rename = load_from_local_minari, infos, dict(rename or {})
        self.metadata: dict[str, Any] | None = None
        super().__init__(dataset_id, batch_size, **options)
        if self.metadata is None:  # the data set was converted by an earlier object
            facts = Folder(self.data_path).load().extra
            self.metadata = facts.get("metadata", {}) if isinstance(facts, dict) else {}

    @override
    def _fetch(self, folder: Path) -> Any:
        minari = optional_package("minari", "minari", type(self).__name__)
        if self._local and self.dataset_id not in minari.list_local_datasets():
            raise FileNotFoundError(
                f"Minari has no local set {self.dataset_id!r} (local sets: "
                f"{sorted(minari.list_local_datasets()) or 'none'}): set MINARI_DATASETS_PATH to its folder, or "
                "leave out load_from_local_minari=True to download it"
            )
        try:
            return minari.load_dataset(self.dataset_id, download=not self._local)
        except (KeyError, FileNotFoundError) as error:
            raise ValueError(f"Minari has no set {self.dataset_id!r}: {error}") from None

    @override
    def _convert(self, source: Any) -> Iterator[dict[str, Array]]:
        data = open_minari(source)
        # json.dumps stores spaces and other objects as text.
        self.metadata = json.loads(json.dumps(data.storage.metadata, default=str))
        return read_minari_columns(data, infos=self._infos, rename=self._rename)

    @override
    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"metadata": self.metadata, "options": {"rename": self._rename}}

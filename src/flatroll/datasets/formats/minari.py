"""Minari data sets, written and read by its own library (hdf5, arrow and parquet); and `MinariExperienceReplay`."""

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tensordict import NonTensorStack, TensorDict
from typing_extensions import override

from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions
from flatroll.datasets.formats.episodes import episode_columns, named_leaves
from flatroll.datasets.formats.sources import Source, check_follows, read_episodes
from flatroll.disk import Folder
from flatroll.layout.checks import as_text, check_path, optional_package
from flatroll.layout.export import Array, from_columns, to_columns
from flatroll.layout.keys import (
    ACTION,
    NEXT,
    NEXT_KNOWN,
    OBSERVATION,
    RESERVED,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
    observation_keys,
    plain_key,
)
from flatroll.layout.spaces import find_part, observation_leaves, space_leaves

if TYPE_CHECKING:
    from minari import EpisodeData, MinariDataset

_Key: TypeAlias = tuple[str, ...]
_Leaves: TypeAlias = list[tuple[NestedKey, tuple[Any, ...]]]  # keys in a batch, and paths in a space

_FOLDERS = (dict, tuple)  # the containers of Dict and Tuple spaces
_HELD = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
)  # besides Text, which is no column
_RECORD = "flatroll"  # metadata entry that maps columns to their places
_SINGLE: dict[_Key, str] = {REWARD: "rewards", TERMINATED: "terminations", TRUNCATED: "truncations"}


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

    An episode has T + 1 observations, T actions, rewards, terminations and truncations, in the dicts and tuples of
    their spaces. All other columns (log-probabilities of an action's parts, too) are in its ``infos``, by dotted name,
    with the last row repeated, since Minari's infos have length T + 1. Images are stored raw, not as JPEG.

    Args:
        source: the rows.
        path: of the folder to be made.
        dataset_id: the name in the metadata, ``[namespace/]name-v<number>``.
        data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``. Default ``"hdf5"``.
        observation_space, action_space: of the env, ``env.single_observation_space`` of a vector env. Default: those
            that the buffer knows of its collector (``Collector(replay_buffer=)``, `ReplayBuffer.note_spec`), except
            Tuples, which columns do not show.
        **metadata: more of it, such as ``author={"…"}`` and ``description="…"``.

    Raises:
        ValueError: a space is unknown, since a dtype says neither limits nor whether a number is one of a few; it does
            not match the columns, or Minari has no place for it (Sequence, Graph, OneOf); next observations are
            missing, or are not the observations of the next row (n-step data); a column has no numbers; a name has "/"
            in it, which would be a group of Minari's files.
    """
    minari = optional_package("minari", "minari", "export")
    storage_of = optional_package("minari.dataset.minari_storage", "minari", "export").MinariStorage
    buffer_of = optional_package("minari.data_collector", "minari", "export").EpisodeBuffer

    trajectories = read_episodes(source)
    first = next(trajectories)
    columns = dict(to_columns(first))
    _check_columns(columns)

    if observation_space is None:
        seen = [as_tuple(key) for key in observation_keys(first)]
        observation_space = _known_space(seen, (), columns, source, "observation_space")
    if action_space is None:
        acted = [key for key in columns if key[0] == ACTION and not _is_log_prob(key, columns)]
        action_space = _known_space(acted, (), columns, source, "action_space")

    observed = observation_leaves(observation_space)
    acted_on = space_leaves(action_space, (ACTION,))
    _check_leaves("observation_space", observation_space, observed, columns, data_format)
    _check_leaves("action_space", action_space, acted_on, columns, data_format)

    kept = {*_SINGLE, *(as_tuple(key) for key, _ in [*observed, *acted_on])}
    kept |= {next_key(key) for key, _ in observed}
    names = _info_names([key for key in columns if key not in kept])

    path.mkdir()
    storage = storage_of.new(
        path,
        observation_space=observation_space,
        action_space=action_space,
        data_format=data_format,
        jpeg_encoding=False,
    )
    record = [[list(key), array.dtype.name, list(array.shape[1:])] for key, array in columns.items()]
    storage.update_metadata(
        {"dataset_id": dataset_id, "minari_version": minari.__version__, **metadata, _RECORD: record}
    )

    def episodes() -> Iterator[Any]:
        for number, rows in enumerate(chain([first], trajectories)):
            found = dict(to_columns(rows))
            whole = {as_tuple(key): _with_last(found, as_tuple(key)) for key, _ in observed}
            single = {place: found[key].reshape(-1) for key, place in _SINGLE.items()}
            yield buffer_of(
                id=number,
                observations=_arrange(observation_space, observed, whole),
                actions=_arrange(action_space, acted_on, found),
                infos={name: _as_info(found[key]) for key, name in names.items()},
                **single,
            )

    storage.update_episodes(episodes())


def _check_columns(columns: Mapping[_Key, Array]) -> None:
    """Raise ValueError for columns that Minari's files have no place for, or that an episode lacks."""
    for key, array in columns.items():
        if any("/" in name for name in key):
            raise ValueError(
                f"entry {plain_key(key)!r} has '/' in its name, which separates groups in Minari's files: rename it"
            )
        if not np.prod(array.shape[1:]):
            raise ValueError(
                f"entry {plain_key(key)!r} has rows without numbers, which Minari's files cannot hold: leave it out"
            )

    if not any(key[0] == ACTION for key in columns):
        raise ValueError("a Minari episode needs actions: the batch has none")
    for key in _SINGLE:
        name = ".".join(key)
        if key not in columns:
            raise ValueError(f"a Minari episode needs {name}, which the batch lacks")
        if columns[key].size != len(columns[key]):
            raise ValueError(f"{name} must be one number per row, got {list(columns[key].shape[1:])}")


def _is_log_prob(key: _Key, columns: Mapping[_Key, Array]) -> bool:
    """Whether a column is the log-probability of a part of the action, which an actor writes beside it."""
    part = key[-1].removesuffix("_log_prob")
    return part != key[-1] and (*key[:-1], part) in columns


def _known_space(
    keys: list[_Key], prefix: _Key, columns: Mapping[_Key, Array], source: Source, argument: str
) -> gym.Space[Any]:
    """The space of the entries that begin with ``prefix``, as the source knows it; ValueError that asks for it if not.

    An entry ``"observation"`` or ``"action"`` alone is the space itself, not a Dict with one part.
    """
    if not keys:
        raise ValueError("an episode needs observations: the batch has none")
    root = ACTION if argument == "action_space" else OBSERVATION

    if not prefix and {key[0] for key in keys} == {root}:
        return _known_space(keys, (root,), columns, source, argument)

    if keys == [prefix]:
        column = columns[prefix]
        space = source.space_of(plain_key(prefix))
        if space is not None and (space.dtype, space.shape) == (column.dtype, column.shape[1:]):
            return cast(gym.Space[Any], space)
        raise ValueError(
            f"{argument} must be given: flatroll does not know the space of {'.'.join(prefix)!r}, {column.dtype} "
            f"{list(column.shape[1:])}. Pass {argument}=env.single_{argument}, or first call "
            "buffer.note_spec(collector.spec)"
        )

    names = list(dict.fromkeys(key[len(prefix)] for key in keys))
    if sorted(names) == sorted(map(str, range(len(names)))):
        raise ValueError(
            f"{argument} must be given: the parts of {'.'.join(prefix) or root!r} are {names}, which may be of a Tuple "
            f"or of a Dict. Pass {argument}=env.single_{argument}"
        )

    parts = {}
    for name in names:
        inner = [key for key in keys if key[: len(prefix) + 1] == (*prefix, name)]
        parts[name] = _known_space(inner, (*prefix, name), columns, source, argument)
    return spaces.Dict(parts)


def _check_leaves(
    argument: str, space: gym.Space[Any], leaves: _Leaves, columns: Mapping[_Key, Array], data_format: str
) -> None:
    """Raise ValueError unless the columns are what the space says."""
    for key, path in leaves:
        part = find_part(space, path)
        column = columns.get(as_tuple(key))
        if not isinstance(part, _HELD):
            raise ValueError(f"{argument}: {key!r} is {part}, which Minari's files cannot hold as a column")
        if column is None:
            raise ValueError(
                f"{argument} has the entry {key!r}, which the batch lacks: pass the space of the env that "
                f"collected the rows; the batch has {sorted(map('.'.join, columns))}"
            )
        if column.shape[1:] != part.shape:
            raise ValueError(
                f"{argument}: {key!r} has the shape {list(column.shape[1:])} in the batch, but {part} in the space"
            )
        # Arrow's files hold the dtype of the space.
        if data_format != "hdf5" and not np.can_cast(column.dtype, part.dtype, "safe"):
            raise ValueError(
                f"{argument}: {key!r} is {column.dtype} in the batch, which {part} cannot hold: cast it, or pass "
                'data_format="hdf5"'
            )


def _info_names(keys: list[_Key]) -> dict[_Key, str]:
    """The name among the infos of each column that is there."""
    names = {key: ".".join(key) for key in keys}
    if len(set(names.values())) < len(names):
        twice = sorted(name for name in names.values() if list(names.values()).count(name) > 1)
        raise ValueError(f"two entries would both be the info {twice[0]!r}: rename one of them")
    return names


def _as_info(array: Array) -> Array:
    """T + 1 values; at least two dimensions, or Minari's arrow files cannot be read."""
    return np.concatenate([array, array[-1:]]).reshape(len(array) + 1, *(array.shape[1:] or (1,)))


def _with_last(columns: Mapping[_Key, Array], key: _Key) -> Array:
    """T + 1 observations of an entry."""
    name = ".".join(key)
    following = columns.get(next_key(key))
    if following is None:
        raise ValueError(
            f"next.{name} is not in the batch: extend a buffer that has compact_obs=True with the compact "
            "batch and its final=, and export the buffer"
        )
    check_follows(name, columns[key], following)
    return np.concatenate([columns[key], following[-1:]])


def _arrange(space: gym.Space[Any], leaves: _Leaves, columns: Mapping[_Key, Array]) -> Any:
    """The columns in the dicts and tuples of a space, which Minari stores in its own form."""
    by_path = {path: columns[as_tuple(key)] for key, path in leaves}

    def build(part: gym.Space[Any], path: tuple[Any, ...]) -> Any:
        if isinstance(part, spaces.Dict):
            return {name: build(child, (*path, name)) for name, child in part.spaces.items()}
        if isinstance(part, spaces.Tuple):
            return tuple(build(child, (*path, place)) for place, child in enumerate(part.spaces))
        return by_path[path]

    return build(space, ())


def read_minari(
    source: "str | Path | MinariDataset",
    *,
    infos: bool | Collection[str] = True,
    rename: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    texts: bool = False,
) -> Iterator[TensorDict]:
    """Yield the episodes of a Minari data set as flat batches ``[T]``.

    In a data set that `write_minari` did not write, Dict observations are root entries by name, others
    ``"observation"``; parts of Tuples are entries by number, ``("observation", "0")``, as in collected batches.
    Rewards, flags and ``is_init`` are ``[T, 1]``; ``("collector", "traj_ids")`` is the episode's number.
    Numeric infos are ``("info", name)`` and ``("next", "info", name)``, or only the latter if they are missing at the
    reset (T values, not T + 1). Infos of text, and those without one value per step, are left out.

    If an episode has T observations for T steps, the one after its last step is in no file: that row has its own
    observation there, and ``("collector", "next_known")``, a column that the whole set then has, is False.

    Args:
        source: a `minari.MinariDataset`, or the path of a data set's ``data`` folder.
        infos: names of the infos to keep, ``["qpos"]``, dotted where they are nested, where episodes differ in the
            others; a name stands for all in its group. False leaves all out. Default True: all.
        rename: new names of entries of the observations, ``{"action": "last_action"}``: those that have the name of one
            of our columns need one. Default: none.
        leave_out: names of entries of the observations to leave out, ``["mission"]``. Default: texts, with a warning.
        texts: keep texts, as columns of strings (`tensordict.NonTensorStack`), which a `ListStorage` takes row by row.
            Default False.

    Raises:
        ImportError: Minari is missing; the message names the extra.
        TypeError: actions of text, without ``texts``.
        ValueError: episodes differ in their infos, or lack one that ``infos`` names; an entry of the observations has
            the name of a column (`flatroll.layout.RESERVED`); ``rename`` or ``leave_out`` names none; an episode has
            other numbers of observations or actions than steps.
    """
    data = open_minari(source)
    for columns in read_minari_columns(data, infos=infos, rename=rename, leave_out=leave_out, texts=texts):
        words = {key: column for key, column in columns.items() if column.dtype.kind in "UO"}
        batch = from_columns({key: column for key, column in columns.items() if key not in words})
        for key, column in words.items():
            batch.set(key, NonTensorStack(*column.tolist()))  # pyright: ignore[reportAbstractUsage]
        yield batch


def open_minari(source: "str | Path | MinariDataset") -> "MinariDataset":
    """Return a `minari.MinariDataset` unchanged, or open the one in a ``data`` folder."""
    if not isinstance(source, str | Path):
        if not hasattr(getattr(source, "storage", None), "metadata"):
            raise TypeError(
                f"source must be a MinariDataset or the path of its folder, got {as_text(source)}"
            )
        return source
    if not check_path("source", source).is_dir():
        raise FileNotFoundError(f"source must be a Minari data folder, there is none at {source}")
    return optional_package("minari", "minari", "import_minari").MinariDataset(Path(source).absolute())


def read_minari_columns(
    data: "MinariDataset",
    *,
    infos: bool | Collection[str] = True,
    rename: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    texts: bool = False,
) -> Iterator[dict[_Key, Array]]:
    """Yield the columns of each episode of a `minari.MinariDataset` by key; see `read_minari`."""
    record = data.storage.metadata.get(_RECORD)
    if record is not None:
        if rename or leave_out:
            argument = "rename" if rename else "leave_out"
            raise ValueError(
                f"{argument} is only for data sets from other sources: this one was "
                "written by export, which keeps the names of columns"
            )
        yield from (_restore_episode(episode, record, data) for episode in data.iterate_episodes())
        return

    reader = _Reader(infos, rename or {}, leave_out, texts, _some_are_cut(data))
    sizes = _read_sizes(data)
    before: set[tuple[Any, ...]] | None = None  # the infos of the first episode
    for episode in data.iterate_episodes():
        if (steps := sizes.get(int(episode.id), len(episode))) != len(episode):
            raise ValueError(
                f"episode {episode.id} has {steps} steps, but Minari's library reads {len(episode)} of its "
                f"{data.storage.FORMAT} file, as where there are not {steps + 1} observations: read it from hdf5"
            )
        columns = reader.read_columns(episode)

        kinds = {
            (".".join(key), array.dtype.name, array.shape[1:])
            for key, array in columns.items()
            if key[0] == "info" or key[:2] == (NEXT, "info")
        }
        if before is None:
            before = kinds
        if differing := sorted({kind[0] for kind in kinds ^ before}):
            raise ValueError(
                f"the infos of episode {episode.id} differ from those of earlier episodes in entries, shapes or "
                f"dtypes: {differing}; pass infos=[...] with the names of those to keep, or infos=False to omit all"
            )
        yield columns


def _read_sizes(data: "MinariDataset") -> dict[int, int]:
    """How many steps each episode of arrow and parquet files was written with, where they say it.

    Minari's reader drops the last value of actions and rewards there, which is a real one if there was no further
    observation.
    """
    if data.storage.FORMAT == "hdf5":
        return {}
    places = [int(number) for number in data.episode_indices]
    try:
        noted = list(data.storage.get_episode_metadata(places))
    except FileNotFoundError:  # written before Minari kept it
        return {}
    return {
        place: int(one["total_steps"])
        for place, one in zip(places, noted, strict=True)
        if "total_steps" in one
    }


def _some_are_cut(data: "MinariDataset") -> bool:
    """Whether an episode of an HDF5 file has no observation after its last step, by the shapes in the file."""
    file = Path(data.storage.data_path, "main_data.hdf5")
    if data.storage.FORMAT != "hdf5" or not file.is_file():
        return False
    h5py = optional_package("h5py", "h5", "import_minari")

    def count_steps(place: Any) -> int:
        while isinstance(place, h5py.Group):
            if not len(place):
                return -1
            place = next(iter(place.values()))
        if place.shape:
            return int(place.shape[0])
        return -1

    with h5py.File(file, "r") as opened:
        for number in data.episode_indices:
            episode = opened.get(f"episode_{number}")
            if episode is None or not {"observations", "rewards"} <= set(episode):
                continue  # the library says what is wrong with it
            if count_steps(episode["observations"]) == count_steps(episode["rewards"]):
                return True
    return False


def _restore_episode(episode: "EpisodeData", record: list[Any], data: "MinariDataset") -> dict[_Key, Array]:
    """The columns of an episode by key, as they were written."""
    length = len(episode)
    columns = dict[_Key, Array]()
    leaves = dict(_observation_leaves(episode)) | dict(named_leaves(episode.actions, (ACTION,), _FOLDERS))
    for name, dtype, shape in record:
        # Older folders have dotted names.
        key = tuple(name.split(".")) if isinstance(name, str) else tuple(name)
        if key in _SINGLE:
            array = getattr(episode, _SINGLE[key])
        elif key in leaves:
            array = leaves[key][:length]
        elif key[0] == NEXT and key[1:] in leaves:
            array = leaves[key[1:]][1:]
        else:
            array = np.asarray(episode.infos[".".join(key)])[:length]
        columns[key] = np.asarray(array).reshape(length, *shape).astype(dtype, copy=False)
    return columns


class _Reader:
    """Turns episodes of another maker's set into columns, by the arguments of `read_minari`."""

    def __init__(
        self,
        infos: bool | Collection[str],
        rename: Mapping[str, str],
        leave_out: Collection[str],
        texts: bool,
        some_are_cut: bool,
    ) -> None:
        if isinstance(leave_out, str):
            raise TypeError(f"leave_out must be a list of names, got {leave_out!r}: pass [{leave_out!r}]")
        if isinstance(infos, str):
            raise TypeError(f"infos must be True, False or a list of names, got {infos!r}: pass [{infos!r}]")

        self._infos = infos
        self._rename = rename
        self._leave_out = leave_out
        self._texts = texts
        self._some_are_cut = some_are_cut
        self._warned = False

    def read_columns(self, episode: "EpisodeData") -> dict[_Key, Array]:
        length = len(episode)
        seen = self._observations(episode)
        states = {plain_key(key): array for key, array in seen.items()}
        others: dict[NestedKey, Array] = {}

        for key, array in named_leaves(episode.actions, (ACTION,), _FOLDERS):
            others[plain_key(key)] = self._words(key, array)
            if len(array) != length:
                raise ValueError(
                    f"episode {episode.id} has {len(array)} values of {'.'.join(key)} for {length} steps"
                )

        for key, values in self._chosen_infos(episode).items():
            array = np.asarray(values)
            if array.dtype.kind in "biufc" and array.shape[:1] == (length + 1,):
                states[plain_key(key)] = array
            elif array.dtype.kind in "biufc" and array.shape[:1] == (length,):
                others[next_key(key)] = array

        columns = episode_columns(
            int(episode.id), states, others, episode.rewards, episode.terminations, episode.truncations
        )
        if self._some_are_cut:
            columns.setdefault(as_tuple(NEXT_KNOWN), np.ones(length, bool))
        return columns

    def _chosen_infos(self, episode: "EpisodeData") -> dict[_Key, Any]:
        """The infos that are asked for, numeric or not, by key."""
        if not self._infos:
            return {}

        found = dict(named_leaves(episode.infos or {}, ("info",), _FOLDERS))
        if self._infos is True:
            return found

        kept: dict[_Key, Any] = {}
        for name in self._infos:
            place = ("info", *name.split("."))
            inside = {key: values for key, values in found.items() if key[: len(place)] == place}
            if not inside:
                names = sorted(".".join(key[1:]) for key in found)
                raise ValueError(f"infos names {name!r}, which episode {episode.id} lacks: it has {names}")
            kept |= inside
        return kept

    def _observations(self, episode: "EpisodeData") -> dict[_Key, Array]:
        """The observations that are asked for, by their new keys."""
        found = _observation_leaves(episode)
        roots = {key[0]: key for key in found}

        for argument, names in (("rename", self._rename), ("leave_out", self._leave_out)):
            if unknown := sorted(set(names) - roots.keys()):
                raise ValueError(
                    f"{argument} names {unknown[0]!r}, which is not one of the observations {sorted(roots)}"
                )

        found = {key: values for key, values in found.items() if key[0] not in self._leave_out}
        words = [key for key, values in found.items() if np.asarray(values).dtype.kind in "USO"]
        if words and not self._texts:
            self._warn(words)
            found = {key: values for key, values in found.items() if key not in words}
        if not found:
            raise ValueError(
                f"episode {episode.id} has no observations but texts: pass texts=True to keep them"
            )
        self._check_names(list(dict.fromkeys(key[0] for key in found)))

        length = len(episode)
        if wrong := [key for key, values in found.items() if len(values) not in (length, length + 1)]:
            raise ValueError(
                f"episode {episode.id} has {len(found[wrong[0]])} observations {'.'.join(wrong[0])!r} for {length} "
                f"steps, expected {length + 1}"
            )
        return {
            (self._rename.get(key[0], key[0]), *key[1:]): self._words(key, values)
            for key, values in found.items()
        }

    def _words(self, key: _Key, values: Any) -> Array:
        array = np.asarray(values)
        if array.dtype.kind not in "USO":
            return array
        if not self._texts:
            raise TypeError(f"{'.'.join(key)} is of texts: pass texts=True to keep them")

        words = np.empty(len(array), object)
        words[:] = [value.decode() if isinstance(value, bytes) else value for value in values]
        return words

    def _warn(self, words: list[_Key]) -> None:
        if not self._warned:
            names = [".".join(key) for key in words]
            warnings.warn(
                f"the observations {names} are texts, which are left out: pass "
                f"leave_out={sorted({key[0] for key in words})} to leave them out without this warning, or texts=True "
                "to keep them",
                UserWarning,
                stacklevel=2,
            )
        self._warned = True

    def _check_names(self, roots: list[str]) -> None:
        """Raise ValueError if an entry of the observations cannot have its name."""
        taken = set(RESERVED)
        if self._infos:
            taken.add("info")
        new = [self._rename.get(root, root) for root in roots]
        for root, name in zip(roots, new, strict=True):
            if name.partition(".")[0] in taken or new.count(name) > 1:
                raise ValueError(
                    f"the observation's entry {root!r} cannot become the column {name!r}, because that name is "
                    f"taken: pass rename={{{root!r}: 'observed_{root}'}}"
                )


def _observation_leaves(episode: "EpisodeData") -> dict[_Key, Any]:
    """Observations ``[T + 1, ...]`` by key: under ``"observation"``, unless they are of a Dict."""
    root = () if isinstance(episode.observations, dict) else (OBSERVATION,)
    return dict(named_leaves(episode.observations, root, _FOLDERS))


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A Minari data set in any of its formats (hdf5, arrow, parquet), read by Minari's own library.

    Observations of a Dict space are root entries by name, of another space ``"observation"``; parts of a Tuple have
    their number as name, ``("observation", "0")``. ``("collector", "traj_ids")`` is the episode's number in the set.
    Numeric infos with one value per step are ``("info", name)`` and ``("next", "info", name)``; others are left out
    (`read_minari`).
    Minari stores images as JPEG by default (``jpeg_encoding=False`` disables it): decoded JPEGs are returned.

    Args:
        dataset_id: as Minari has it, ``"[namespace/]name-v<number>"``. To read a set from your own folder, pass
            ``fetch=lambda name, folder: "PATH/data"`` and any name.
        batch_size, options: see `BaseDatasetExperienceReplay`.
        load_from_local_minari: take the set from the folder in which Minari keeps those that were made or fetched here,
            and never fetch it. Default False: fetch it, unless it is there.
        infos: names of the infos to keep, False for none, see `read_minari`. Default True: all.
        rename: new names of entries of the observations, see `read_minari`. Default: none.
        leave_out: names of entries of the observations to leave out, ``["mission"]``. Default: texts, with a warning.

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
        infos: bool | Collection[str] = True,
        rename: Mapping[str, str] | None = None,
        leave_out: Collection[str] = (),
        **options: Unpack[DatasetOptions],
    ) -> None:
        self._local = load_from_local_minari
        self._infos = infos
        self._rename = dict(rename or {})
        self._leave_out = leave_out
        self.metadata: dict[str, Any] | None = None
        super().__init__(dataset_id, batch_size, **options)

        if self.metadata is None:  # the data set was converted by an earlier object
            facts = Folder(self.data_path).load().extra
            self.metadata = {}
            if isinstance(facts, dict):
                self.metadata = facts.get("metadata", {})

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
    def _convert(self, source: Any) -> Iterator[dict[_Key, Array]]:
        data = open_minari(source)
        # json.dumps stores spaces and other objects as text.
        self.metadata = json.loads(json.dumps(data.storage.metadata, default=str))
        return read_minari_columns(data, infos=self._infos, rename=self._rename, leave_out=self._leave_out)

    @override
    def _facts(self) -> dict[str, Any]:
        options: dict[str, Any] = {"rename": self._rename}
        if self._leave_out:
            options["leave_out"] = sorted(self._leave_out)
        if self._infos is not True:
            options["infos"] = sorted(self._infos) if self._infos else False
        return super()._facts() | {"metadata": self.metadata, "options": options}

"""LeRobot v3 folders, written and read with pyarrow alone, images as PNG cells; and `LeRobotExperienceReplay`.

meta/info.json, meta/stats.json, meta/tasks.parquet
meta/episodes/chunk-000/file-000.parquet   a row for each episode: its length, its task, the place of its frames
data/chunk-000/file-000.parquet            a row for each step
meta/flatroll.json, meta/flatroll_last.parquet   what LeRobot has no place for: keys, shapes, last observations
"""

import io
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay
from flatroll.datasets.formats.episodes import damage_in, naming
from flatroll.datasets.formats.sources import Source, check_follows, read_episodes
from flatroll.datasets.formats.tables import MAX_BYTES, row_groups
from flatroll.layout import checks
from flatroll.layout.checks import optional_package
from flatroll.layout.export import Array, from_arrow, from_columns, from_numpy, to_arrow, to_columns, to_numpy
from flatroll.layout.keys import NEXT, OBSERVATION, as_tuple, next_key, observation_keys

_FILE_BYTES = 100 << 20
_FILES_IN_CHUNK = 1000
_FINALS_AT_ONCE = 256
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
RECORD = "meta/flatroll.json"
LAST = "meta/flatroll_last.parquet"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
COUNTED = ("timestamp", "frame_index", "episode_index", "index")
OWN = (*COUNTED, "task_index")
_MOST_JSON = 64 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_NO_SEPARATOR = "\0"  # names of last observations are one string each
_NUMBERS = "bool|u?int(8|16|32|64)|float(16|32|64)"  # dtypes of columns


class RunningStats:
    """Statistics of rows ``[n, *F]``: for each number of a row, or for each channel of images ``[n, H, W, C]``.

    Values are counted in float64; of images, divided by 255. Means and sums of squares of pieces are joined as in
    Chan, Golub, LeVeque (1979), which loses no digits where the mean is large.

    >>> stats = RunningStats()
    >>> stats.add(np.array([1.0, 3.0])), stats.add(np.array([5.0]))
    (None, None)
    >>> stats.summary()["mean"], stats.summary()["max"], stats.summary()["count"]
    ([3.0], [5.0], [3])
    """

    def __init__(self, images: bool = False) -> None:
        self._images = images
        self._rows = 0
        self._values = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0  # sum of squared differences from the mean
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def add(self, rows: Array) -> None:
        """Update with these rows."""
        values = rows.astype(np.float64).reshape(len(rows), -1)
        if self._images:
            values = rows.reshape(-1, rows.shape[-1]) / 255.0

        # Infinite values, or squares that overflow, come from the data: do not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = values.mean(0)
            total = self._values + len(values)
            apart = mean - self._mean
            self._squares += ((values - mean) ** 2).sum(0) + apart**2 * (self._values * len(values) / total)
            self._mean = self._mean + apart * (len(values) / total)

        self._low = np.minimum(self._low, values.min(0))
        self._high = np.maximum(self._high, values.max(0))
        self._rows += len(rows)
        self._values = total

    def summary(self) -> dict[str, list[Any]]:
        """Return min, max, mean, std and count, as LeRobot's ``stats.json`` has them."""
        spread = np.sqrt(self._squares / max(self._values, 1))
        numbers = {"min": self._low, "max": self._high, "mean": self._mean, "std": spread}
        if self._images:
            numbers = {name: value[:, None, None] for name, value in numbers.items()}
        shaped = {name: value.tolist() for name, value in numbers.items()}
        return {**shaped, "count": [self._rows]}


def write_lerobot(
    source: Source,
    path: Path,
    *,
    fps: float = 30.0,
    task: str = "",
    robot_type: str | None = None,
    images: Mapping[str, str] | None = None,
) -> None:
    """Write a LeRobot v3 folder, one trajectory at a time.

    ``observation`` is ``observation.state`` (``observation.image`` if it is one), other observations
    ``observation.<name>``; other entries have their dotted names. Images are stored as lossless PNG; video is not
    written. The next observation of an episode's last row, for which LeRobot has no place, is stored in an extra file.

    Args:
        source: the rows.
        path: of the folder to be made.
        fps: steps per second, which timestamps are made of. Default 30.
        task: description of the robot's task. Default ``""``.
        robot_type: goes into ``meta/info.json``. Default None.
        images: which observations are images, and how they lie: ``{"pixels": "CHW"}`` or ``"HWC"``, of 1, 3 or 4
            channels. Default: uint8 observations with three dimensions, one of which, the first or the last, is 1 or 3.
            Stacks of four frames, and shapes that fit both ways, are numbers unless they are named here.

    Raises:
        ValueError: ``fps`` is not above 0; next observations are not the observations of the next row (n-step data);
            names clash; ``images`` names an entry that is none.
        TypeError: an entry of complex numbers or of no numbers.
    """
    pyarrow = optional_package("pyarrow", "parquet", "export")
    parquet = optional_package("pyarrow.parquet", "parquet", "export")
    checks.check_number("fps", fps, above=0, below=math.inf)
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (path / folder).mkdir(parents=True)

    trajectories = read_episodes(source)
    first = next(trajectories)
    fields = _fields(first, images)
    stored = [field for field in fields if not field["next"]]
    stats = {field["column"]: RunningStats(field["image"] is not None) for field in stored}

    episodes: list[dict[str, Any]] = []
    frames = 0
    file_number = 0
    data: Any = None
    last: Any = None
    finals: list[Any] = []

    try:
        for number, rows in enumerate(chain([first], trajectories)):
            table = _table(pyarrow, rows, fields, number, frames, fps, stats)
            chunk_index, file_index = divmod(file_number, _FILES_IN_CHUNK)
            place: dict[str, int] = {"chunk_index": chunk_index, "file_index": file_index}
            target = path / DATA.format(**place)

            if data is None:
                target.parent.mkdir(exist_ok=True)
                data = parquet.ParquetWriter(target, table.schema)
            data.write_table(table)

            last_row = {
                ".".join(as_tuple(key)): rows.get(next_key(key))[-1:] for key in observation_keys(rows)
            }
            finals.append(to_arrow(TensorDict(last_row, [1]), separator=_NO_SEPARATOR))
            if len(finals) == _FINALS_AT_ONCE:
                last = _write_finals(pyarrow, parquet, finals, path, last)

            episodes.append(_episode_row(number, frames, len(rows), task, place))
            frames += len(rows)

            if target.stat().st_size > _FILE_BYTES:
                data.close()
                data = None
                file_number = file_number + 1
        if finals:
            last = _write_finals(pyarrow, parquet, finals, path, last)
    finally:
        for writer in (data, last):
            if writer is not None:
                writer.close()

    parquet.write_table(pyarrow.Table.from_pylist(episodes), path / _EPISODES)
    parquet.write_table(_tasks(pyarrow, task), path / "meta/tasks.parquet")
    _write_json(path / "meta/stats.json", {name: stat.summary() for name, stat in stats.items()})
    _write_json(path / RECORD, fields)
    _write_json(path / "meta/info.json", _info(fields, len(episodes), frames, fps, robot_type))


def _write_finals(
    pyarrow: ModuleType, parquet: ModuleType, finals: list[Any], path: Path, writer: Any
) -> Any:
    """Write the last observations that were gathered as one row group, and forget them; return the writer."""
    table = pyarrow.concat_tables(finals)
    writer = writer or parquet.ParquetWriter(path / LAST, table.schema)
    writer.write_table(table)
    finals.clear()
    return writer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2))


def _fields(rows: TensorDictBase, images: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """For each entry of the batch: its key, dtype, shape, column, and how it is stored."""
    observed = {as_tuple(key) for key in observation_keys(rows)}
    named = dict(images or {})
    if unknown := sorted(named.keys() - set(map(".".join, observed))):
        raise ValueError(
            f"images names {unknown[0]!r}, the observations are {sorted(map('.'.join, observed))}"
        )
    fields: list[dict[str, Any]] = []

    for key, array in to_columns(rows):
        name = ".".join(key)
        shape = list(array.shape[1:])
        if array.dtype.kind == "c" or not np.prod(shape):
            raise TypeError(
                f"entry {name!r} is {array.dtype} {shape}, which LeRobot does not support: leave it out"
            )

        root = key if key in observed else key[1:]
        image = None
        if root in observed:
            image = _image_axes(".".join(root), array, named.get(".".join(root)))

        column = name
        if key == (OBSERVATION,):
            what = "state" if image is None else "image"
            column = f"{OBSERVATION}.{what}"
        elif key in observed and key[0] != OBSERVATION:
            column = f"{OBSERVATION}.{name}"

        later = key[0] == NEXT and key[1:] in observed
        fields.append(
            {
                "key": list(key),
                "dtype": array.dtype.name,
                "shape": shape,
                "column": column,
                "image": image,
                "next": later,
            }
        )

    _check_columns(fields, observed)
    return fields


def _check_columns(fields: list[dict[str, Any]], observed: set[tuple[str, ...]]) -> None:
    """Raise ValueError if two entries would have one column, or an observation has no next one."""
    stored = [field["column"] for field in fields if not field["next"]]
    if clash := sorted({name for name in stored if stored.count(name) > 1 or name in OWN}):
        raise ValueError(f"columns {clash} would have the same names as others: rename the entries first")

    present = {_feature_key(field) for field in fields}
    missing = sorted(".".join(key) for key in observed if next_key(key) not in present)
    if missing:
        raise ValueError(
            f"next observations of {missing} are not in the batch: extend a buffer that has compact_obs=True "
            "with the compact batch and its final=, and export the buffer"
        )


def _image_axes(name: str, array: Array, given: str | None) -> str | None:
    """How the images of an entry ``[N, ...]`` lie, ``"HWC"`` or ``"CHW"``; None if it is of numbers."""
    shape = array.shape[1:]
    pictures = array.dtype == np.uint8 and len(shape) == 3
    if given is not None:
        checks.check_choice(f"images[{name!r}]", given, ("HWC", "CHW"))
        channels = 0
        if pictures:
            place = -1 if given == "HWC" else 0
            channels = shape[place]
        if channels not in MODES:
            raise ValueError(
                f"images[{name!r}] is {given!r}, which needs uint8 of 1, 3 or 4 channels, got {array.dtype} "
                f"{list(shape)}"
            )
        return given

    # Four channels may be a stack of frames as well.
    fits = [axes for axes, place in (("HWC", -1), ("CHW", 0)) if pictures and shape[place] in (1, 3)]
    if len(fits) == 1:
        return fits[0]
    return None


def _table(
    pyarrow: ModuleType,
    rows: TensorDictBase,
    fields: list[dict[str, Any]],
    number: int,
    frames: int,
    fps: float,
    stats: dict[str, RunningStats],
) -> Any:
    """The frames of one episode."""
    columns = dict(to_columns(rows))
    arrays: dict[str, Any] = {}

    for field in fields:
        array = columns[_feature_key(field)]
        if field["next"]:
            check_follows(".".join(_feature_root(field)), columns[_feature_root(field)], array)
            continue

        if field["image"] is not None:
            if field["image"] != "HWC":
                array = array.transpose(0, 2, 3, 1)
            cells = [{"bytes": _png(image), "path": None} for image in array]
            kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
            arrays[field["column"]] = pyarrow.array(cells, kind)
        else:
            arrays[field["column"]] = _lists(pyarrow, array)
        stats[field["column"]].add(array)

    steps = np.arange(len(rows))
    arrays["timestamp"] = pyarrow.array((steps / fps).astype(np.float32))
    arrays["frame_index"] = pyarrow.array(steps)
    arrays["episode_index"] = pyarrow.array(np.full(len(rows), number))
    arrays["index"] = pyarrow.array(steps + frames)
    arrays["task_index"] = pyarrow.array(np.zeros(len(rows), np.int64))
    return pyarrow.table(arrays)


def _lists(pyarrow: ModuleType, array: Array) -> Any:
    """Convert numbers to a plain array, vectors to lists of fixed size, more dimensions to lists of lists."""
    if array.size == len(array):
        return pyarrow.array(array.reshape(-1))
    values = pyarrow.array(array.reshape(-1))
    if array.ndim == 2:
        return pyarrow.FixedSizeListArray.from_arrays(values, array.shape[1])

    for axis in range(array.ndim - 1, 0, -1):
        # Make lists along this axis: each begins where the one before it ends.
        count = int(np.prod(array.shape[:axis]))
        size = array.shape[axis]
        values = pyarrow.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, values)
    return values


def _png(image: Array) -> bytes:
    pillow = optional_package("PIL.Image", "minari", "export of images")
    file = io.BytesIO()
    if image.shape[-1] == 1:
        image = image[..., 0]
    pillow.fromarray(image).save(file, format="PNG")
    return file.getvalue()


def _episode_row(number: int, first: int, length: int, task: str, place: dict[str, int]) -> dict[str, Any]:
    return {
        "episode_index": number,
        "tasks": [task],
        "length": length,
        "data/chunk_index": place["chunk_index"],
        "data/file_index": place["file_index"],
        "dataset_from_index": first,
        "dataset_to_index": first + length,
        "meta/episodes/chunk_index": 0,
        "meta/episodes/file_index": 0,
    }


def _tasks(pyarrow: ModuleType, task: str) -> Any:
    """The table of tasks, which LeRobot reads by pandas, indexed by the task's text."""
    index = "__index_level_0__"
    table = pyarrow.table({"task_index": pyarrow.array([0]), index: pyarrow.array([task])})
    column = {"field_name": "task_index", "name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    text = {"field_name": index, "name": None, "pandas_type": "unicode", "numpy_type": "object"}
    about = {
        "index_columns": [index],
        "column_indexes": [
            {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
        ],
        "columns": [{**column, "metadata": None}, {**text, "metadata": None}],
    }
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _info(
    fields: list[dict[str, Any]], episodes: int, frames: int, fps: float, robot_type: str | None
) -> dict[str, Any]:
    features: dict[str, Any] = {}
    for field in fields:
        if field["next"]:
            continue

        shape = field["shape"] or [1]
        dtype = field["dtype"]
        names = None
        if field["image"] is not None:
            if field["image"] != "HWC":
                shape = [*shape[1:], shape[0]]
            dtype = "image"
            names = ["height", "width", "channels"]
        features[field["column"]] = {"dtype": dtype, "shape": shape, "names": names}

    for name in OWN:
        dtype = "float32" if name == "timestamp" else "int64"
        features[name] = {"dtype": dtype, "shape": [1], "names": None}

    return {
        "codebase_version": "v3.0",
        "robot_type": robot_type,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": 1,
        "chunks_size": _FILES_IN_CHUNK,
        "data_files_size_in_mb": _FILE_BYTES >> 20,
        "video_files_size_in_mb": 500,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA,
        "video_path": None,
        "features": features,
    }


def read_lerobot(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Iterator[TensorDict]:
    """Yield the episodes of a LeRobot v3 folder as flat batches ``[T]``.

    In a folder that `write_lerobot` did not write, columns get keys from their dotted names (``observation.state``
    becomes ``("observation", "state")``) and the shapes in ``meta/info.json``; texts and LeRobot's counters are left
    out, except ``task_index``. The next observation of an episode's last row, which is in no file, is the row's own
    observation, with ``("collector", "next_known")`` False. ``next.done`` means termination unless ``next.truncated``
    is set, and an episode without it at its end is truncated; flags and rewards are ``[T, 1]``; integer rewards become
    float32.

    Args:
        path: of the folder.
        max_bytes: limit for a row group of its files, and for the frames of an episode. Default 4 GiB.

    Raises:
        ImportError: pyarrow is missing, or Pillow if there are images; the message names the extra.
        FileNotFoundError: a required file is missing.
        ValueError: the version is not supported, there are videos, more than ``max_bytes``, frames that are missing or
            not in order, or a picture that bytes of its shape do not hold exactly (16 bits, transparency, colours).

    Warns:
        UserWarning: ``meta/episodes`` names other files than those with the frames, which decide.
    """
    root = Path(path).absolute()
    with naming(root):
        yield from _episodes(root, max_bytes)


def _episodes(root: Path, max_bytes: int) -> Iterator[TensorDict]:
    info = _read_json(root / "meta/info.json")
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if not str(version).startswith("v3"):
        raise ValueError(f"{root} is LeRobot {version}, not v3: convert it with LeRobot first")

    features = _check_features(info.get("features"), root / "meta/info.json")
    if videos := sorted(name for name, about in features.items() if about["dtype"] == "video"):
        raise ValueError(f"{root} has videos {videos}, which need a decoder: read it with LeRobot")

    ours = (root / RECORD).is_file()
    if ours:
        fields = _check_fields(_read_json(root / RECORD), root / RECORD)
        last = TensorDict.cat(
            [from_arrow(part, separator=_NO_SEPARATOR) for part in row_groups(root / LAST, max_bytes)]
        )
    else:
        fields = None
        last = None

    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"{root} has no meta/episodes/chunk-000/file-000.parquet")

    row_bytes = _row_bytes(fields or features.values())
    for number, table in _frames(root, files, row_bytes, max_bytes):
        if fields is None:
            yield _read_foreign(table, features, number)
        else:
            yield _restore_episode(table, fields, last, number)


def _row_bytes(columns: Iterable[dict[str, Any]]) -> int:
    """Return how many bytes a frame takes at least in memory, by the description of its columns."""
    total = 8
    for about in columns:
        # Images are stored in files whose size is bounded; DEFLATE expands them at most 1032 times.
        if not about.get("image") and about["dtype"] != "image":
            # Dtypes that NumPy does not have count one byte per number.
            known = re.fullmatch(_NUMBERS, about["dtype"])
            size = np.dtype(about["dtype"]).itemsize if known else 1
            total += int(prod(about["shape"])) * size
    return total


def _read_json(path: Path) -> Any:
    with damage_in(path):
        if (size := path.stat().st_size) > _MOST_JSON:
            raise ValueError(f"{size} bytes, more than {_MOST_JSON}: this is not a description of columns")
        return json.loads(path.read_text())


def _check_features(features: object, path: Path) -> dict[str, Any]:
    """Return the columns' description in ``meta/info.json`` after checking its form."""
    if not isinstance(features, dict):
        raise ValueError(f"{path} does not list its columns ('features')")
    for name, about in features.items():
        shape = about.get("shape") if isinstance(about, dict) else None
        if (
            not isinstance(shape, list | tuple)
            or not isinstance(about.get("dtype"), str)
            or not _is_shape(shape)
        ):
            raise ValueError(f"{path}: feature {name!r} needs a dtype and a shape, got {str(about)[:200]}")

        if about["dtype"] == "image":
            names = about.get("names") or [""]
            if isinstance(names, list) and str(names[0]).startswith("channel"):  # [C, H, W], of older folders
                shape = [*shape[1:], *shape[:1]]
                features = {**features, name: {**about, "shape": shape}}
            if len(shape) != 3 or shape[2] not in MODES:
                raise ValueError(
                    f"{path}: images {name!r} must be [H, W, C] of 1, 3 or 4 channels, got {shape}"
                )
    return dict(features)


def _check_fields(fields: Any, path: Path) -> list[dict[str, Any]]:
    """Return `write_lerobot`'s description of the entries after checking its form, since it is untrusted."""
    described = fields if isinstance(fields, list) else [None]
    for field in described:
        if not _is_field(field):
            raise ValueError(f"{path} was not written by export(): {str(field)[:200]}")

    roots = {_feature_key(field) for field in fields if not field["next"]}
    if alone := [
        _feature_key(field) for field in fields if field["next"] and _feature_root(field) not in roots
    ]:
        raise ValueError(f"{path} was not written by export(): {'.'.join(alone[0])!r} has no root entry")
    return list(fields)


def _is_field(field: Any) -> bool:
    """Whether a value of JSON describes an entry as `write_lerobot` does."""
    return bool(
        isinstance(field, dict)
        and all(isinstance(field.get(name), str) for name in ("column", "dtype"))
        and _is_key(field.get("key"))
        and re.fullmatch(_NUMBERS, field["dtype"])
        and isinstance(field.get("shape"), list)
        and _is_shape(field["shape"])
        and field.get("image", "") in (None, "HWC", "CHW")
        and (field["image"] is None or len(field["shape"]) == 3)
        and isinstance(field.get("next"), bool)
    )


def _is_key(key: object) -> bool:
    """Whether a value of JSON is the key of an entry: a list of names, or a dotted name, as older folders have it."""
    return isinstance(key, str) or (
        isinstance(key, list) and bool(key) and all(isinstance(name, str) for name in key)
    )


def _feature_key(field: dict[str, Any]) -> tuple[str, ...]:
    key = field["key"]
    if isinstance(key, str):
        return tuple(key.split("."))
    return tuple(key)


def _feature_root(field: dict[str, Any]) -> tuple[str, ...]:
    key = _feature_key(field)
    if key[0] == NEXT and len(key) > 1:
        return key[1:]
    return key


def _is_shape(shape: Iterable[object]) -> bool:
    return all(type(size) is int and 0 <= size < 1 << 31 for size in shape)


def _frames(root: Path, files: list[Path], row_bytes: int, max_bytes: int) -> Iterator[tuple[int, Any]]:
    """The number and the frames of each episode, as the frames themselves say; a warning where ``meta`` differs."""
    pyarrow = optional_package("pyarrow", "parquet", "import_lerobot")
    noted = _noted_episodes(root, files, row_bytes, max_bytes)
    found: dict[int, tuple[int, Path]] = {}
    waiting: Any = None
    began = Path()  # the file with the first frame of the episode that waits

    def take(table: Any) -> tuple[int, Any]:
        number = table["episode_index"][0].as_py()
        if number in found:
            raise ValueError(f"{began} has frames of episode {number}, but those before it are elsewhere")
        _check_in_order(table, number, began)
        if number in noted and noted[number][0] != len(table):
            raise ValueError(
                f"{began} has {len(table)} frames of episode {number}, meta/episodes says {noted[number][0]}"
            )
        found[number] = (len(table), began)
        return number, table

    for file in _data_files(root):
        for group in row_groups(file, max_bytes):
            numbers = _episode_numbers(group, file)
            edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(group)]
            for first, end in pairwise(edges):
                if first == end:
                    continue

                part = group.slice(first, end - first)
                if waiting is not None and waiting["episode_index"][0].as_py() == int(numbers[first]):
                    waiting = pyarrow.concat_tables([waiting, part])
                else:
                    if waiting is not None:
                        yield take(waiting)
                    waiting = part
                    began = file

                if len(waiting) * row_bytes > max_bytes:
                    raise ValueError(
                        f"{file}: episode {numbers[first]} takes more than max_bytes={max_bytes}"
                    )

    if waiting is not None:
        yield take(waiting)
    _warn_of_differences(root, noted, found)


def _data_files(root: Path) -> list[Path]:
    """The files of frames in order."""

    def place(file: Path) -> tuple[Any, ...]:
        return tuple(int(number) for number in re.findall("[0-9]+", str(file.relative_to(root)))), str(file)

    files = sorted((root / "data").rglob("*.parquet"), key=place)
    if not files:
        raise FileNotFoundError(f"{root} has no data/chunk-000/file-000.parquet")
    return files


def _noted_episodes(
    root: Path, files: list[Path], row_bytes: int, max_bytes: int
) -> dict[int, tuple[int, Path]]:
    """How many frames each episode has, and in which file, as ``meta/episodes`` says."""
    names = ("episode_index", "length", "data/chunk_index", "data/file_index")
    noted: dict[int, tuple[int, Path]] = {}
    for path in files:
        for group in row_groups(path, max_bytes, names):
            for row in group.to_pylist():
                number, length, chunk, place = (row.get(name) for name in names)
                valid = all(isinstance(value, int) and value >= 0 for value in (number, length, chunk, place))
                if not valid or not length:
                    raise ValueError(f"{root}/meta/episodes: an episode needs {', '.join(names)}, got {row}")
                if length * row_bytes > max_bytes:
                    raise ValueError(
                        f"{root}: episode {number} claims {length * row_bytes} bytes, more than max_bytes={max_bytes}"
                    )
                noted[number] = (length, root / DATA.format(chunk_index=chunk, file_index=place))
    return noted


def _episode_numbers(group: Any, file: Path) -> Array:
    """The number of each frame's episode, int64 ``[N]``."""
    if "episode_index" not in group.column_names:
        raise ValueError(f"{file} has no column 'episode_index', it has {group.column_names}")
    column = group["episode_index"]
    numbers: Array = column.to_numpy()

    if column.null_count or numbers.dtype.kind not in "iu":
        raise ValueError(f"{file} has frames whose 'episode_index' is no number")
    return numbers


def _check_in_order(table: Any, number: int, file: Path) -> None:
    """Raise ValueError unless the frames of an episode follow one another, by their own counters."""
    for name in ("frame_index", "index"):
        if name in table.column_names:
            steps = np.diff(table[name].to_numpy())
            if (wrong := np.flatnonzero(steps != 1)).size:
                at = int(wrong[0])
                values = table[name].slice(at, 2).to_pylist()
                raise ValueError(
                    f"{file}: the frames of episode {number} are not in order: {name} {values[0]} comes before "
                    f"{values[1]}"
                )


def _warn_of_differences(
    root: Path, noted: dict[int, tuple[int, Path]], found: dict[int, tuple[int, Path]]
) -> None:
    """Say where ``meta/episodes`` differs from the frames that were read; ValueError if it has episodes without any."""
    if lost := sorted(noted.keys() - found.keys()):
        raise ValueError(
            f"{root} has no frames of episode {lost[0]}, meta/episodes says {noted[lost[0]][0]}: its files are "
            "incomplete"
        )

    differing = [number for number in sorted(found) if noted.get(number) != found[number]]
    if not differing:
        return
    number = differing[0]
    if number in noted:
        says = f"names {noted[number][1].relative_to(root)}"
    else:
        says = "does not name it"
    warnings.warn(
        f"{root}: meta/episodes differs from the frames, which are read as they are, in {len(differing)} episodes: "
        f"episode {number} is in {found[number][1].relative_to(root)}, meta/episodes {says}",
        UserWarning,
        stacklevel=2,
    )


def _decode(column: Any, about: dict[str, Any], length: int, name: str) -> Array:
    """One column as an array ``[T, *shape]``."""
    if about["dtype"] == "image":
        pillow = optional_package("PIL.Image", "minari", "import_lerobot of images")
        height, width, channels = about["shape"]
        images = []
        for cell in column.to_pylist():
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if not isinstance(content, bytes):
                raise ValueError(f"{name} has an image stored outside the file: let LeRobot embed images")
            try:
                picture = pillow.open(io.BytesIO(content), formats=["PNG", "JPEG"])
                if picture.size != (width, height):  # known before decoding
                    raise ValueError(f"{name}: an image is {picture.size}, the folder says {(width, height)}")
                picture = _exactly(picture, MODES[channels], content, name)
            except (OSError, SyntaxError) as error:
                raise ValueError(f"{name} has an image that cannot be read: {error}") from None
            images.append(np.asarray(picture).reshape(height, width, channels))
        return np.stack(images)

    values = column.combine_chunks()
    while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        values = values.flatten()
    array: Array = values.to_numpy(zero_copy_only=False)
    if values.null_count or array.dtype.kind not in "biuf" or array.size != length * prod(about["shape"]):
        raise ValueError(
            f"{name} must have {about['shape']} {about['dtype']} in each of {length} rows, got {column.type}, "
            f"{len(values)} values, {values.null_count} of them missing"
        )
    return array.reshape(length, *about["shape"])


def _exactly(picture: Any, mode: str, content: bytes, name: str) -> Any:
    """The picture in the mode that the folder says; ValueError if that would lose something."""
    # Pillow halves the bits of colours with 16, and its mode does not show it; PNG notes the bits at this place.
    deep = content.startswith(_PNG) and len(content) > 24 and content[24] == 16
    if deep or picture.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        bits = "16-bit " * deep
        raise ValueError(
            f"{name} has a {bits}picture of mode {picture.mode!r}, which bytes of {mode!r} cannot hold: convert it, or "
            "store it as numbers"
        )

    whole = picture
    if picture.mode in ("P", "PA") or "transparency" in picture.info:
        whole = picture.convert("RGBA")
    elif picture.mode == "1":
        whole = picture.convert("L")
    made = whole.convert(mode)
    if made.convert(whole.mode).tobytes() != whole.tobytes():
        if mode == "L" and whole.mode != "LA":
            lost = "colours"
        else:
            lost = "transparency"
        raise ValueError(
            f"{name} has a picture of mode {picture.mode!r} that would lose its {lost} as {mode!r}, which the folder "
            "says: correct its shape in meta/info.json, or the picture"
        )
    return made


def _column(table: Any, field: dict[str, Any]) -> Any:
    if field["column"] not in table.column_names:
        raise ValueError(f"the frames have no column {field['column']!r}; they have {table.column_names}")
    return table[field["column"]]


def _restore_episode(table: Any, fields: list[dict[str, Any]], last: Any, number: int) -> TensorDict:
    """Return an episode as it was passed to `write_lerobot`."""
    columns: dict[tuple[str, ...], Array] = {}
    finals = to_numpy(last[number : number + 1], separator=_NO_SEPARATOR)
    # Next values are computed from the others.
    for field in sorted(fields, key=lambda field: bool(field["next"])):
        key = _feature_key(field)
        name = ".".join(key)
        if field["next"]:
            root = ".".join(_feature_root(field))
            now = columns[_feature_root(field)]
            final = finals.get(root)
            if final is None or final.shape != (1, *now.shape[1:]):
                raise ValueError(f"{LAST} does not match: it lacks the last {root} of episode {number}")
            columns[key] = np.concatenate([now[1:], final])
            continue

        shape = field["shape"]
        if field["image"] is not None:
            seen = shape if field["image"] == "HWC" else [*shape[1:], shape[0]]
            about = {"dtype": "image", "shape": seen}
            array = _decode(_column(table, field), about, len(table), name)
            if field["image"] != "HWC":
                array = array.transpose(0, 3, 1, 2)
        else:
            array = _decode(_column(table, field), field, len(table), name)
            array = array.astype(field["dtype"], copy=False)
        columns[key] = np.ascontiguousarray(array)
    return from_columns(columns)


def _read_foreign(table: Any, features: dict[str, Any], number: int) -> TensorDict:
    """An episode of a folder by LeRobot."""
    length = len(table)
    columns = dict[str, Array]()
    for name, about in features.items():
        if name in COUNTED or name not in table.column_names or about["dtype"] == "string":
            continue

        array = _decode(table[name], about, length, name)
        floating = name != f"{NEXT}.reward" or about["dtype"].startswith("float")  # rewards must be floating
        dtype = about["dtype"] if floating else "float32"
        # A wider dtype of the file is kept, since it may hold more than the folder says.
        if re.fullmatch(_NUMBERS, dtype) and (not floating or np.can_cast(array.dtype, dtype, "safe")):
            array = array.astype(dtype, copy=False)
        columns[name] = array
        if name.startswith(f"{OBSERVATION}."):
            columns[f"{NEXT}.{name}"] = np.concatenate([array[1:], array[-1:]])

    is_init = np.zeros((length, 1), bool)
    # Frames before the first one may be missing.
    is_init[0] = "frame_index" not in table.column_names or table["frame_index"][0].as_py() == 0
    known = np.ones(length, bool)
    known[-1] = False

    def read_flags(name: str) -> Array | None:
        column = columns.get(f"{NEXT}.{name}")
        if column is None:
            return None
        return column.reshape(length, 1).astype(bool)

    done = read_flags("done")
    over = read_flags("terminated")
    cut = read_flags("truncated")
    if done is None:
        done = np.zeros((length, 1), bool)
    if cut is None:
        cut = np.zeros((length, 1), bool)
    if over is None:
        over = done & ~cut
    cut[-1] |= ~over[-1]

    columns[f"{NEXT}.done"] = done | over | cut
    columns[f"{NEXT}.terminated"] = over
    columns[f"{NEXT}.truncated"] = cut
    columns["is_init"] = is_init
    columns["collector.next_known"] = known
    columns["collector.traj_ids"] = np.full(length, number)
    return from_numpy(columns)


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """A LeRobot v3 folder without videos (`read_lerobot`).

    Args:
        dataset_id: its name, such as ``"lerobot/pusht_image"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the folder.

    Raises:
        ImportError: pyarrow is missing, or Pillow where there are images: ``pip install "flatroll[parquet,minari]"``.
    """

    kind = "lerobot"

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_lerobot(source)

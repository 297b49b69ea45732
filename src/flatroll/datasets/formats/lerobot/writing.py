"""Writes LeRobot v3 folders, one trajectory at a time."""

import io
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.datasets.formats.lerobot.running_stats import RunningStats
from flatroll.datasets.formats.sources import Source, episodes_of
from flatroll.layout.export import Array, optional_package, to_arrow, to_numpy
from flatroll.layout.keys import NEXT, OBSERVATION, as_tuple, observation_keys
from flatroll.layout.ted import is_shift

_FILE_BYTES, _FILES_IN_CHUNK, _FINALS_AT_ONCE = 100 << 20, 1000, 256
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
RECORD, LAST = "meta/flatroll.json", "meta/flatroll_last.parquet"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
COUNTED = ("timestamp", "frame_index", "episode_index", "index")
OWN = (*COUNTED, "task_index")


def write_lerobot(
    source: Source, path: Path, *, fps: float = 30.0, task: str = "", robot_type: str | None = None
) -> None:
    """Write a LeRobot v3 folder, one trajectory at a time.

    ``observation`` is ``observation.state`` (``observation.image`` if it is one), other observations
    ``observation.<name>``; other entries have their dotted names. uint8 entries ``[H, W, C]`` and ``[C, H, W]`` of 1, 3
    or 4 channels are images, stored as PNG, which loses nothing; video is not written. The next observation of an
    episode's last row, which LeRobot does not keep, stands in a file beside.

    Args:
        source: the rows.
        path: of the folder to be made.
        fps: steps per second, which timestamps are made of. Default 30.
        task: what the robot was told. Default ``""``.
        robot_type: goes into ``meta/info.json``. Default None.

    Raises:
        ValueError: ``fps`` is not above 0; next observations are not the observations of the next row (n-step data);
            names clash.
        TypeError: an entry of complex numbers or of no numbers.
    """
    pyarrow = optional_package("pyarrow", "parquet", "export")
    parquet = optional_package("pyarrow.parquet", "parquet", "export")
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be a number above 0, got {fps!r}")
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (path / folder).mkdir(parents=True)
    trajectories = episodes_of(source)
    first = next(trajectories)
    fields = _fields(first)
    stored = [field for field in fields if not field["next"]]
    stats = {field["column"]: RunningStats(field["image"] is not None) for field in stored}
    episodes: list[dict[str, Any]] = []
    frames = file_number = 0
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
            finals.append(to_arrow(_last_observations(rows)))
            if len(finals) == _FINALS_AT_ONCE:
                last = _write_finals(pyarrow, parquet, finals, path, last)
            episodes.append(_episode_row(number, frames, len(rows), task, place))
            frames += len(rows)
            if target.stat().st_size > _FILE_BYTES:
                data.close()
                data, file_number = None, file_number + 1
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


def _write_finals(pyarrow: Any, parquet: Any, finals: list[Any], path: Path, writer: Any) -> Any:
    """Write the last observations that were gathered as one row group, and forget them; return the writer."""
    table = pyarrow.concat_tables(finals)
    writer = writer or parquet.ParquetWriter(path / LAST, table.schema)
    writer.write_table(table)
    finals.clear()
    return writer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))


def _fields(rows: TensorDictBase) -> list[dict[str, Any]]:
    """For each entry of the batch: its key, dtype, shape, column, and how it is stored."""
    observed = {as_tuple(key) for key in observation_keys(rows)}
    fields: list[dict[str, Any]] = []
    for name, array in to_numpy(rows).items():
        key, shape = tuple(name.split(".")), list(array.shape[1:])
        if array.dtype.kind == "c" or not np.prod(shape):
            raise TypeError(
                f"entry {name!r} is {array.dtype} {shape}, which LeRobot does not have: leave it out"
            )
        image = _image_kind(array) if key in observed or key[1:] in observed else None
        column = name
        if key == (OBSERVATION,):
            column = f"{OBSERVATION}.{'state' if image is None else 'image'}"
        elif key in observed:
            column = name if key[0] == OBSERVATION else f"{OBSERVATION}.{name}"
        later = key[0] == NEXT and key[1:] in observed
        fields.append(
            {
                "key": name,
                "dtype": array.dtype.name,
                "shape": shape,
                "column": column,
                "image": image,
                "next": later,
            }
        )
    stored = [field["column"] for field in fields if not field["next"]]
    if clash := sorted({name for name in stored if stored.count(name) > 1 or name in OWN}):
        raise ValueError(f"columns {clash} would have the names of others: rename the entries first")
    present = {field["key"] for field in fields}
    missing = sorted(name for name in map(".".join, observed) if f"{NEXT}.{name}" not in present)
    if missing:
        raise ValueError(
            f"next observations of {missing} are not in the batch: put a compact batch into a buffer with "
            "compact_obs=True, with its final=, and export that"
        )
    return fields


def _image_kind(array: Array) -> str | None:
    """``"HWC"`` or ``"CHW"`` for images, else None."""
    if array.dtype != np.uint8 or array.ndim != 4:
        return None
    return "HWC" if array.shape[-1] in MODES else "CHW" if array.shape[1] in MODES else None


def _table(
    pyarrow: Any,
    rows: TensorDictBase,
    fields: list[dict[str, Any]],
    number: int,
    frames: int,
    fps: float,
    stats: dict[str, RunningStats],
) -> Any:
    """The frames of one episode."""
    columns, arrays = to_numpy(rows), dict[str, Any]()
    ends = torch.zeros(len(rows), dtype=torch.bool)
    ends[-1] = True
    for field in fields:
        array = columns[field["key"]]
        if field["next"]:
            root = columns[field["key"].removeprefix(f"{NEXT}.")]
            if not is_shift(torch.from_numpy(root), torch.from_numpy(array), ends):
                raise ValueError(
                    f"{field['key']} is not the observation of the next row (n-step data?), which episodes cannot "
                    'hold: use format="parquet" or "h5"'
                )
            continue
        if field["image"] is not None:
            array = array if field["image"] == "HWC" else array.transpose(0, 2, 3, 1)
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


def _lists(pyarrow: Any, array: Array) -> Any:
    """Numbers as they are, vectors as lists of fixed size, more dimensions as lists of lists."""
    if array.size == len(array):
        return pyarrow.array(array.reshape(-1))
    values = pyarrow.array(array.reshape(-1))
    if array.ndim == 2:
        return pyarrow.FixedSizeListArray.from_arrays(values, array.shape[1])
    for axis in range(array.ndim - 1, 0, -1):
        # Lists along this axis: each begins where the one before it ends.
        count, size = int(np.prod(array.shape[:axis])), array.shape[axis]
        values = pyarrow.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, values)
    return values


def _png(image: Array) -> bytes:
    pillow = optional_package("PIL.Image", "minari", "export of images")
    file = io.BytesIO()
    pillow.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, format="PNG")
    return file.getvalue()


def _last_observations(rows: TensorDictBase) -> TensorDict:
    last = TensorDict({}, [1])
    for key in observation_keys(rows):
        last.set(key, rows.get((NEXT, *as_tuple(key)))[-1:])
    return last


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


def _tasks(pyarrow: Any, task: str) -> Any:
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
        shape, names = field["shape"] or [1], None
        if field["image"] is not None:
            shape = shape if field["image"] == "HWC" else [*shape[1:], shape[0]]
            names = ["height", "width", "channels"]
        dtype = "image" if field["image"] is not None else field["dtype"]
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

"""Reads LeRobot v3 folders, of LeRobot's making and of ours; nothing is taken that a file only claims."""

import io
import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from flatroll.datasets.formats.lerobot.writing import COUNTED, DATA, LAST, MODES, RECORD
from flatroll.datasets.formats.tables import MAX_BYTES, row_groups
from flatroll.layout.export import Array, from_arrow, from_numpy, optional_package, to_numpy
from flatroll.layout.keys import NEXT, OBSERVATION

_MOST_JSON = 64 << 20  # bytes
_NUMBERS = "bool|u?int(8|16|32|64)|float(16|32|64)"  # dtypes of columns


def read_lerobot(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Iterator[TensorDict]:
    """Yield the episodes of a LeRobot v3 folder as flat batches ``[T]``.

    Of a folder that `write_lerobot` did not write: columns stand under their dotted names (``observation.state`` as
    ``("observation", "state")``), of the shapes that ``meta/info.json`` says, but for texts and what LeRobot counts;
    ``task_index`` stays. The next observation of an episode's last row, which is in no file, is its own one, with
    ``("collector", "next_known")`` False. A ``next.done`` is a termination where no ``next.truncated`` says otherwise,
    and an episode that has none at its end is truncated; flags and rewards, float32, are ``[T, 1]``.

    Args:
        path: of the folder.
        max_bytes: what a row group of its files, and the frames of an episode, may take. Default 4 GiB.

    Raises:
        ImportError: pyarrow is missing, or Pillow where there are images; the text names the extra.
        FileNotFoundError: a file that the folder should have is missing.
        ValueError: another version, videos, more than ``max_bytes``, or files that do not fit each other.
    """
    root = Path(path)
    info = _read_json(root / "meta/info.json")
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if not str(version).startswith("v3"):
        raise ValueError(f"{root} is LeRobot {version}, not v3: convert it by LeRobot first")
    features = _checked_features(info.get("features"), root / "meta/info.json")
    if videos := sorted(name for name, about in features.items() if about["dtype"] == "video"):
        raise ValueError(f"{root} has videos {videos}, which need a decoder: LeRobot reads them")
    ours = (root / RECORD).is_file()
    fields = _checked_fields(_read_json(root / RECORD), root / RECORD) if ours else None
    last = TensorDict.cat([from_arrow(part) for part in row_groups(root / LAST, max_bytes)]) if ours else None
    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"{root} has no meta/episodes/chunk-000/file-000.parquet")
    # Of images, their files are bounded; what is in them can be 1032 times as much, as DEFLATE has it.
    columns = [
        about for about in fields or features.values() if not about.get("image") and about["dtype"] != "image"
    ]
    row_bytes = 8 + sum(map(_bytes_of, columns))
    for number, table in _frames(root, files, row_bytes, max_bytes):
        yield _foreign(table, features, number) if fields is None else _recorded(table, fields, last, number)


def _read_json(path: Path) -> Any:
    if path.stat().st_size > _MOST_JSON:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, more than {_MOST_JSON}: it describes no columns"
        )
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _checked_features(features: Any, path: Path) -> dict[str, Any]:
    """What ``meta/info.json`` says of the columns, after a look at its form."""
    if not isinstance(features, dict):
        raise ValueError(f"{path} does not say which columns there are ('features')")
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
            axis = str(names[0] if isinstance(names, list) else "")
            if axis.startswith("channel"):  # [C, H, W], of older folders
                shape = [*shape[1:], *shape[:1]]
                features = {**features, name: {**about, "shape": shape}}
            if len(shape) != 3 or shape[2] not in MODES:
                raise ValueError(
                    f"{path}: images {name!r} must be [H, W, C] of 1, 3 or 4 channels, got {shape}"
                )
    return dict(features)


def _checked_fields(fields: Any, path: Path) -> list[dict[str, Any]]:
    """What `write_lerobot` noted of the entries, after a look at its form: somebody else may have written it."""
    for field in fields if isinstance(fields, list) else [None]:
        if not (
            isinstance(field, dict)
            and all(isinstance(field.get(name), str) for name in ("key", "column", "dtype"))
            and re.fullmatch(_NUMBERS, field["dtype"])
            and isinstance(field.get("shape"), list)
            and _is_shape(field["shape"])
            and field.get("image", "") in (None, "HWC", "CHW")
            and (field["image"] is None or len(field["shape"]) == 3)
            and isinstance(field.get("next"), bool)
        ):
            raise ValueError(f"{path} is none that export() writes: {str(field)[:200]}")
    roots = {field["key"] for field in fields if not field["next"]}
    if alone := [field["key"] for field in fields if field["next"] and _root_of(field) not in roots]:
        raise ValueError(f"{path} is none that export() writes: {alone[0]!r} has no root entry")
    return list(fields)


def _root_of(field: dict[str, Any]) -> str:
    return str(field["key"]).removeprefix(f"{NEXT}.")


def _is_shape(shape: Any) -> bool:
    return all(type(size) is int and 0 <= size < 1 << 31 for size in shape)


def _bytes_of(about: dict[str, Any]) -> int:
    """Bytes of a row's value; of dtypes that NumPy does not have a byte a number."""
    known = re.fullmatch(_NUMBERS, about["dtype"])
    return int(prod(about["shape"])) * (np.dtype(about["dtype"]).itemsize if known else 1)


def _frames(root: Path, files: list[Path], row_bytes: int, max_bytes: int) -> Iterator[tuple[int, Any]]:
    """The number and the frames of each episode. A row group may hold several, and an episode several of them."""
    pyarrow = optional_package("pyarrow", "parquet", "import_lerobot")
    opened, groups, waiting = Path(), iter(()), None
    names = ("episode_index", "length", "data/chunk_index", "data/file_index")
    rows = (
        row for path in files for group in row_groups(path, max_bytes, names) for row in group.to_pylist()
    )
    for row in rows:
        number, length, chunk, place = (row.get(name) for name in names)
        if (
            not all(isinstance(value, int) and value >= 0 for value in (number, length, chunk, place))
            or not length
        ):
            raise ValueError(f"{root}/meta/episodes: an episode needs {', '.join(names)}, got {row}")
        if length * row_bytes > max_bytes:
            raise ValueError(
                f"{root}: episode {number} claims {length * row_bytes} bytes, more than max_bytes={max_bytes}"
            )
        file = root / DATA.format(chunk_index=chunk, file_index=place)
        if file != opened:
            opened, waiting = file, None
            groups = row_groups(file, max_bytes)
        while waiting is None or len(waiting) < length:
            group = next(groups, None)
            if group is None:
                raise ValueError(f"{file} ends before the {length} frames of episode {number}")
            waiting = group if waiting is None else pyarrow.concat_tables([waiting, group])
        table, waiting = waiting.slice(0, length), waiting.slice(length)
        if "episode_index" not in table.column_names or table["episode_index"].unique().to_pylist() != [
            number
        ]:
            raise ValueError(f"{file} should go on with {length} frames of episode {number}, and does not")
        yield number, table


def _decoded(column: Any, about: dict[str, Any], length: int, name: str) -> Array:
    """One column as an array ``[T, *shape]``."""
    if about["dtype"] == "image":
        pillow = optional_package("PIL.Image", "minari", "import_lerobot of images")
        height, width, channels = about["shape"]
        images = []
        for cell in column.to_pylist():
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if not isinstance(content, bytes):
                raise ValueError(
                    f"{name} has an image that is not in the file itself: have LeRobot embed images"
                )
            try:
                picture = pillow.open(io.BytesIO(content), formats=["PNG", "JPEG"])
                if picture.size != (width, height):  # known before anything is decoded
                    raise ValueError(f"{name}: an image is {picture.size}, the folder says {(width, height)}")
                picture = picture.convert(MODES[channels])
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


def _column(table: Any, field: dict[str, Any]) -> Any:
    if field["column"] not in table.column_names:
        raise ValueError(f"the frames have no column {field['column']!r}, but {table.column_names}")
    return table[field["column"]]


def _recorded(table: Any, fields: list[dict[str, Any]], last: Any, number: int) -> TensorDict:
    """An episode as `write_lerobot` got it."""
    columns: dict[str, Array] = {}
    finals = to_numpy(last[number : number + 1])
    for field in sorted(fields, key=lambda field: bool(field["next"])):  # next values are made of the others
        if field["next"]:
            now, final = columns[_root_of(field)], finals.get(_root_of(field))
            if final is None or final.shape != (1, *now.shape[1:]):
                raise ValueError(f"{LAST} does not fit: it has no last {_root_of(field)} of episode {number}")
            columns[field["key"]] = np.concatenate([now[1:], final])
            continue
        shape = field["shape"]
        if field["image"] is not None:
            seen = shape if field["image"] == "HWC" else [*shape[1:], shape[0]]
            array = _decoded(
                _column(table, field), {"dtype": "image", "shape": seen}, len(table), field["key"]
            )
            array = array if field["image"] == "HWC" else array.transpose(0, 3, 1, 2)
        else:
            array = _decoded(_column(table, field), field, len(table), field["key"])
            array = array.astype(field["dtype"], copy=False)
        columns[field["key"]] = np.ascontiguousarray(array)
    return from_numpy(columns)


def _foreign(table: Any, features: dict[str, Any], number: int) -> TensorDict:
    """An episode of a folder by LeRobot."""
    length, columns = len(table), dict[str, Array]()
    for name, about in features.items():
        if name in COUNTED or name not in table.column_names or about["dtype"] == "string":
            continue
        array = _decoded(table[name], about, length, name)
        dtype = "float32" if name == f"{NEXT}.reward" else about["dtype"]
        columns[name] = array.astype(dtype, copy=False) if re.fullmatch(_NUMBERS, dtype) else array
        if name.startswith(f"{OBSERVATION}."):
            array = columns[name]
            columns[f"{NEXT}.{name}"] = np.concatenate([array[1:], array[-1:]])
    is_init, never, known = np.zeros((length, 1), bool), np.zeros((length, 1), bool), np.ones(length, bool)
    is_init[0], known[-1] = True, False
    done, terminated, truncated = (
        columns[place].reshape(length, 1).astype(bool) if (place := f"{NEXT}.{name}") in columns else None
        for name in ("done", "terminated", "truncated")
    )
    cut = never.copy() if truncated is None else truncated
    over = (never if done is None else done & ~cut) if terminated is None else terminated
    cut[-1] |= ~over[-1]
    columns |= {f"{NEXT}.done": (never if done is None else done) | over | cut}
    columns |= {f"{NEXT}.terminated": over, f"{NEXT}.truncated": cut}
    columns["is_init"], columns["collector.next_known"] = is_init, known
    columns["collector.traj_ids"] = np.full(length, number)
    return from_numpy(columns)

"""Helpers for readers of other tools' files: listing files, errors that name them, building episodes."""

import lzma
import stat
import struct
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
from tensordict import TensorDict

from flatroll.layout.checks import check_iterable, check_path
from flatroll.layout.export import Array, from_columns
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    NEXT_KNOWN,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)

#: Errors that a damaged or malicious file may raise.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    UnpicklingError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_LONGEST = 400  # characters of an error message: a damaged file may have a name of a million


@contextmanager
def damage_in(file: str | Path) -> Iterator[None]:
    """Return a context for reading a plain file: errors as in `naming`, and ValueError for a pipe, device or folder."""
    with naming(file):
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(Path(file).stat().st_mode):
            raise ValueError("it is not a regular file")
        yield


@contextmanager
def naming(place: str | Path) -> Iterator[None]:
    """Return a context in which errors name the file or folder and are short.

    Raises:
        FileNotFoundError, PermissionError, ImportError: as they were raised.
        KeyError, TypeError, pickle.UnpicklingError: as they were raised, with the name.
        ValueError: all that a library raises for what it cannot read.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, ImportError):
        raise
    except UNREADABLE as error:
        first = error.args[0] if isinstance(error, KeyError) and error.args else error
        text = str(first)
        known = isinstance(error, KeyError | TypeError | ValueError | UnpicklingError)
        if known and str(place) in text and len(text) <= _LONGEST:
            raise
        kinds = [kind for kind in (KeyError, TypeError, UnpicklingError) if isinstance(error, kind)]
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        text = f"{place} cannot be read, or is damaged: {short or type(error).__name__}"
        raise (*kinds, ValueError)[0](text) from None


def make_episode(*parts: Any) -> TensorDict:
    """Return an episode of T steps as a flat batch ``[T]`` with all markers; see `episode_columns`.

    >>> batch = make_episode(0, {"observation": np.arange(3)}, {}, np.ones(2), np.array([0, 1]), np.zeros(2))
    >>> batch["next", "observation"], batch["next", "done"].squeeze(-1)
    (tensor([1, 2]), tensor([False,  True]))
    """
    return from_columns(episode_columns(*parts))


def episode_columns(
    number: int,
    states: Mapping[NestedKey, Array],
    others: Mapping[NestedKey, Array],
    reward: Array | None,
    terminated: Array,
    truncated: Array,
) -> dict[tuple[str, ...], Array]:
    """Return the columns ``[T, ...]`` of an episode of T steps, with all markers, by key.

    Args:
        number: number of the episode in the set, its trajectory id.
        states: by key, ``[T + 1, ...]``; or ``[T, ...]`` if no file has the last next state: it is then the last
            state again, and ``("collector", "next_known")`` is False there.
        others: further columns ``[T, ...]`` by key; a next state among them is used unchanged.
        reward: ``[T]``; floating dtypes are kept, others become float32. None if there is none.
        terminated, truncated: ``[T]``.
    """
    length = len(terminated)
    over = np.asarray(terminated).reshape(length, 1).astype(bool)
    cut = np.asarray(truncated).reshape(length, 1).astype(bool)

    columns = {as_tuple(key): values for key, values in others.items()}
    given = set(columns)

    for key, values in states.items():
        columns[as_tuple(key)] = values[:length]
        if next_key(key) in given:
            continue
        columns[next_key(key)] = values[1:]
        if len(values) == length:
            columns[next_key(key)] = np.concatenate([values[1:], values[-1:]])
            columns[as_tuple(NEXT_KNOWN)] = np.arange(length) < length - 1

    is_init = np.zeros((length, 1), bool)
    is_init[:1] = True
    columns[as_tuple(IS_INIT)] = is_init
    columns[as_tuple(TRAJ_IDS)] = np.full(length, number)
    if reward is not None:
        paid = np.asarray(reward)
        if paid.dtype.kind != "f":
            paid = paid.astype(np.float32)
        columns[REWARD] = paid.reshape(length, 1)

    columns[TERMINATED] = over
    columns[TRUNCATED] = cut
    columns[DONE] = over | cut
    return columns


def count_on(files: Iterable[Iterable[TensorDict]]) -> Iterator[TensorDict]:
    """Yield the episodes of several files; the trajectory ids of each continue after those of the file before."""
    episodes = 0
    for file in files:
        first = episodes
        for episode in file:
            episode[TRAJ_IDS] = episode[TRAJ_IDS] + first
            episodes = int(episode[TRAJ_IDS][-1]) + 1
            yield episode


def named_leaves(
    value: Any, key: tuple[str, ...], folders: tuple[type, ...] = (Mapping,)
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of nested mappings (or tuples) by key, which begins with ``key``; tuple items by index."""
    if not isinstance(value, folders):
        yield key, value
        return
    parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)  # type: ignore[arg-type]
    for name, part in parts:
        yield from named_leaves(part, (*key, str(name)), folders)


def files_in(paths: str | Path | Iterable[str | Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return files given one by one, or those of a folder with these suffixes, in order; no links."""
    if not isinstance(paths, str | Path):
        several = check_iterable("paths", paths, "a path, or an iterable of paths")
        return [check_path("paths", path).absolute() for path in several]

    path = Path(paths).absolute()
    if not path.is_dir():
        return [path]

    found = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
    if not found:
        raise FileNotFoundError(f"{path} has no files that end with {' or '.join(suffixes)}")
    if links := [file for file in found if file.is_symlink()]:
        raise ValueError(f"{links[0]} is a link, which may lead out of the folder: copy the file")
    return found

"""Checks the structure of untrusted HDF5 files before reading them."""

import os
from collections.abc import Collection
from typing import Any

from flatroll.layout.checks import optional_package

_DEEPEST = 64  # maximum depth of groups
# Limits of the decompressed size, to refuse decompression bombs: this many times the stored size (DEFLATE
# reaches at most 1032), or this many bytes if that is more.
_SMALLEST_SHARE = 1100
_LEAST = 2**20


def h5_columns(file: Any, *, leave_out: Collection[str] = (), single: bool = False) -> dict[str, Any]:
    """Return the datasets of an open HDF5 file by path, after checking them.

    An untrusted file may refer to other files, or claim more rows than it holds; nothing is read or allocated here.

    Args:
        file: `h5py.File`, opened for reading.
        leave_out: names at the root to ignore. Default: none.
        single: whether datasets may be single values, without rows. Default False.

    Raises:
        ValueError: soft or external links, one dataset under two names, data in other files, groups deeper than 64, a
            dataset without rows, or one that claims over 1100 times the bytes that are stored for it.
        TypeError: a dataset that is not of numbers or bools.
    """
    h5py = optional_package("h5py", "h5", "h5_columns")
    columns: dict[str, Any] = {}
    seen: set[int] = set()
    stored = 0

    def walk(group: Any, prefix: str, depth: int) -> None:
        nonlocal stored
        if depth > _DEEPEST:
            raise ValueError(f"{prefix} is nested in more than {_DEEPEST} groups")

        for name in group:
            if not isinstance(name, str):
                raise ValueError(f"{prefix}{name!r} is not a valid name")

            place = prefix + name
            if place in leave_out:
                continue

            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(
                    f"{place} is a link, which may lead to another file: copy the data into this one"
                )

            value = group[name]
            address = h5py.h5o.get_info(value.id).addr
            if address in seen:
                raise ValueError(f"{place} is another name for data elsewhere in the file")
            seen.add(address)

            if isinstance(value, h5py.Group):
                walk(value, f"{place}/", depth + 1)
            elif isinstance(value, h5py.Dataset):
                stored += _check_dataset(place, value, single)
                columns[place] = value

    try:
        walk(file, "", 0)
    except (KeyError, RuntimeError) as error:  # errors of h5py for unreadable objects
        raise ValueError(f"{file.filename} is damaged ({error})") from None

    size = os.path.getsize(file.filename)
    if stored > size:
        raise ValueError(f"the datasets claim {stored} stored bytes, the file has {size}: it is damaged")

    return columns


def _check_dataset(place: str, dataset: Any, single: bool) -> int:
    """Check a dataset by its header; return its size in the file in bytes."""
    if dataset.external is not None or dataset.is_virtual:
        raise ValueError(f"{place} is stored in other files: copy the data into this one")
    if dataset.shape is None or not (dataset.shape or single):
        raise ValueError(f"{place} must have one row for each row of the batch, got a single value")
    if dataset.dtype.kind not in "biufc":
        raise TypeError(f"{place} must hold numbers or bools, got {dataset.dtype}")

    stored = int(dataset.id.get_storage_size())
    # Other libraries' filters compress small chunks more; unwritten chunks take no space.
    if dataset.chunks and stored:
        most = max(stored * _SMALLEST_SHARE, _LEAST)
    else:
        most = stored

    if dataset.nbytes > most:
        raise ValueError(
            f"{place} claims {dataset.nbytes} bytes, the file holds {stored} for it: not all rows were written, or "
            "the file is damaged"
        )

    return stored

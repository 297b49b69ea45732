"""Checks for free memory or disk space before a storage is allocated."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can allocate on ``device``, within ``ulimit`` and control groups."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [int(psutil.virtual_memory().available), *_group_limits()]
    with suppress(ImportError):  # only POSIX systems have it
        import resource

        used = psutil.Process().memory_info()
        for limit, taken in (
            (resource.RLIMIT_AS, used.vms),
            (resource.RLIMIT_DATA, getattr(used, "data", 0)),
        ):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                free.append(soft - int(taken))
    return max(0, min(free))


def check_memory(
    rows: int, row_bytes: int, device: torch.device, ways: Sequence[str] = ("LazyMemmapStorage",)
) -> None:
    """Raise MemoryError, suggesting ``ways`` out, if ``rows`` rows of ``row_bytes`` bytes do not fit on ``device``."""
    if device.type not in ("cpu", "cuda"):  # other devices do not report free memory
        return
    free = free_memory(device)
    if rows * row_bytes > free:
        available = f"{shown_size(free)} of memory are free on {device}"
        raise MemoryError(refusal(rows, row_bytes, available, ways))


def check_disk(rows: int, row_bytes: int, folder: Path, ways: Sequence[str] = (), spare: int = 0) -> None:
    """Raise OSError if ``rows`` rows do not fit on the disk of ``folder``, after ``spare`` bytes are freed."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free + spare
    if rows * row_bytes > free:
        raise OSError(refusal(rows, row_bytes, f"{shown_size(free)} are free on the disk of {folder}", ways))


def refusal(rows: int, row_bytes: int, available: str, ways: Sequence[str]) -> str:
    """Return the error message for too little space: bytes needed, bytes available, and what to change.

    >>> refusal(1000, 2048, "1 MiB are free", ["compact_obs=True"])  # doctest: +NORMALIZE_WHITESPACE
    'the storage needs 1.953 MiB (1000 rows of 2048 bytes), 1 MiB are free: use a smaller max_size or compact_obs=True'
    """
    *most, last = ["a smaller max_size", *ways]
    instead = f"{', '.join(most)} or {last}" if most else last
    needed = f"{shown_size(rows * row_bytes)} ({rows} rows of {row_bytes} bytes)"
    return f"the storage needs {needed}, {available}: use {instead}"


def shown_size(count: int) -> str:
    """Format a number of bytes with a readable unit, such as "1.5 GiB".

    >>> shown_size(1000), shown_size(3 << 29)
    ('1000 bytes', '1.5 GiB')
    """
    size = float(count)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size = size / 1024
        unit = larger
    return f"{size:.4g} {unit}"


def _group_limits(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes left in the Linux control groups of this process, where they are limited; cached files count as free."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return

    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroup version 2
            top = root
            limit = "memory.max"
            usage = "memory.current"
            cached = "inactive_file"
        elif "memory" in controllers.split(","):
            top = root / "memory"
            limit = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue

        folder = top / path.lstrip("/")
        # The group and all its ancestors, because each may have a limit; "max" or a missing file means no limit.
        for group in (folder, *folder.parents):
            if group != top and top not in group.parents:
                continue
            with suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                used = int((group / usage).read_text())
                statistics = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())

                # The file cache counts as free, because it is released on demand.
                yield most - used + int(statistics.get(cached, 0))

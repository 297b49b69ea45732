"""Whether what a storage asks for is there, asked before it is taken."""

import shutil
from pathlib import Path

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on ``device``: available memory of the host, or free memory of the accelerator."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def check_memory(rows: int, row_bytes: int, device: torch.device) -> None:
    """MemoryError if ``rows`` rows of ``row_bytes`` bytes cannot be held on ``device``.

    Devices other than the host and CUDA are not asked.
    """
    if device.type in ("cpu", "cuda"):
        free = free_memory(device)
        _check(rows, row_bytes, free, f"{_size(free)} of memory are free on {device}", "LazyMemmapStorage, ")


def check_disk(rows: int, row_bytes: int, folder: Path) -> None:
    """OSError if ``rows`` rows of ``row_bytes`` bytes do not fit on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    try:
        _check(
            rows, row_bytes, free, f"{_size(free)} are free on the disk of {folder}", "another scratch_dir, "
        )
    except MemoryError as error:
        raise OSError(str(error)) from None


def _check(rows: int, row_bytes: int, free: int, there: str, instead: str) -> None:
    if rows * row_bytes > free:
        raise MemoryError(
            f"the storage needs {_size(rows * row_bytes)} ({rows} rows of {row_bytes} bytes), {there}: use a smaller "
            f"max_size, {instead}compact_obs=True, or frame_stack and codec for images"
        )


def _size(count: int) -> str:
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"

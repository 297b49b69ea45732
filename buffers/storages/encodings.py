"""Which columns of a storage are kept in a smaller form, and how (`frame_stack`, `codec`)."""

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from flatroll.buffers.columns.base import Column
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey, as_tuple, next_key

CODECS = ("zstd",)


def checked_encodings(
    frame_stack: Mapping[NestedKey, int] | None, codec: Mapping[NestedKey, str] | None
) -> tuple[dict[NestedKey, int], dict[NestedKey, str]]:
    """Both by plain key, for the entry at the root and the one under ``"next"``.

    Raises:
        ValueError: an unknown codec, or a frame stack of less than 2 frames.
        ImportError: the codec's package is not installed.
    """
    stacks = {_plain(key): frames for key, frames in (frame_stack or {}).items()}
    codecs = {_plain(key): name for key, name in (codec or {}).items()}
    for key, frames in stacks.items():
        whole_number(f"frame_stack of {key!r}", frames, 2)
    for key, name in codecs.items():
        if name not in CODECS:
            raise ValueError(f"codec of {key!r} must be one of {CODECS}, got {name!r}")
    if codecs:
        _compressed(0, (1,), torch.uint8, torch.device("cpu"))
    # A storage that is not compact keeps next observations in columns of their own.
    return (
        stacks | {next_key(key): frames for key, frames in stacks.items()},
        codecs | {next_key(key): name for key, name in codecs.items()},
    )


def encoded_bytes(
    like: Mapping[NestedKey, tuple[torch.dtype, torch.Size]],
    frame_stack: Mapping[NestedKey, int],
    codec: Mapping[NestedKey, str],
) -> dict[NestedKey, int]:
    """Bytes per row by key, as far as they are known beforehand: compressed rows count as nothing.

    Raises:
        ValueError: ``frame_stack`` or ``codec`` names an entry that is not there, or one that is no stack.
    """
    for name, asked in (("frame_stack", frame_stack), ("codec", codec)):
        _check_there(name, asked, like)
    sizes = {}
    for key, (dtype, shape) in like.items():
        size = math.prod(shape) * dtype.itemsize
        if key in frame_stack:
            from flatroll.buffers.columns.frame_stack import check_stack

            check_stack(frame_stack[key], shape, key)
            size = size // frame_stack[key] + 4 * frame_stack[key]
        sizes[key] = 0 if key in codec else size
    return sizes


def encoded(
    rows: int,
    dtype: torch.dtype,
    shape: torch.Size,
    device: torch.device,
    frames: int | None,
    codec: str | None,
) -> Column | None:
    """A column for stacks of ``frames`` and rows compressed by ``codec``; None for a plain one."""
    if frames is not None:
        from flatroll.buffers.columns.frame_stack import FrameColumn

        make = None if codec is None else partial(_compressed, device=device)
        return FrameColumn(rows, frames, shape, dtype, device, make)
    return None if codec is None else _compressed(rows, shape, dtype, device)


def _compressed(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Column:
    from flatroll.buffers.columns.zstd import ZstdColumn

    return ZstdColumn(rows, shape, dtype, device)


def _plain(key: NestedKey) -> NestedKey:
    names = as_tuple(key)
    return names[0] if len(names) == 1 else names


def _check_there(name: str, asked: Iterable[NestedKey], there: Iterable[NestedKey]) -> None:
    present = set(there)
    for key in asked:
        if as_tuple(key)[0] != "next" and key not in present:
            raise ValueError(
                f"{name} names {key!r}, which the batch does not have: it has {sorted(map(repr, present))}"
            )

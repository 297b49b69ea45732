"""Marks at both ends of the slices of a sample."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatroll.buffers.columns.base import Columns
from flatroll.buffers.index.ring import Draw
from flatroll.layout.keys import MASK, NestedKey


def mark_slices(
    columns: Columns, draw: Draw, init_key: NestedKey | None, end_keys: Sequence[NestedKey]
) -> None:
    """Mark the first and the last row of each slice of ``draw`` in ``columns``; entries that are missing are put in.

    Args:
        columns: of the sample, contiguous or not; stored values are kept at other rows.
        draw: with ``firsts`` and ``lasts``; rows that its mask leaves out begin nothing.
        init_key: set at first rows; None leaves it.
        end_keys: done (set at last rows), terminated, and truncated (set at last rows that are not terminated);
            or nothing.
    """
    if draw.firsts is None or draw.lasts is None:
        return
    rows = len(draw.slots)
    device = next(iter(columns.values())).device
    flags: list[Tensor | None] = [None] * 4
    if init_key is not None:
        flags[0] = _flag(columns, init_key, (rows, 1), device)
    if end_keys:
        done_key, terminated_key, truncated_key = end_keys
        shape = next((columns[key].shape for key in end_keys if key in columns), (rows, 1))
        done = _flag(columns, done_key, shape, device)
        truncated = _flag(columns, truncated_key, shape, device)
        if terminated_key not in columns:
            columns[terminated_key] = done & ~truncated
        flags[1:] = done, _flag(columns, terminated_key, shape, device), truncated
    _mark(flags, draw.firsts, draw.lasts)
    if draw.mask is not None:
        columns[MASK] = draw.mask.to(device)
        if flags[0] is not None:
            flags[0].view(rows).logical_and_(columns[MASK])  # a repeated first row begins nothing


def _mark(flags: Sequence[Tensor | None], firsts: Tensor, lasts: Tensor) -> None:
    """Of ``flags``, (init, done, terminated, truncated), set init at ``firsts``, done at ``lasts``, and truncated
    there where not terminated."""
    if any(flag is not None and not flag.is_cpu for flag in flags):
        _mark_on_device(flags, firsts, lasts)
        return
    from flatroll.kernels.rows.run_marks import mark  # numba; a fifth of the time of the torch form

    mark(*(0 if c is None else c.data_ptr() for c in (*flags, firsts, lasts)), len(firsts))


def _mark_on_device(flags: Sequence[Tensor | None], firsts: Tensor, lasts: Tensor) -> None:
    """The same in torch, for any device."""
    init, done, terminated, truncated = (None if flag is None else flag.view(-1) for flag in flags)
    if init is not None:
        init.index_fill_(0, firsts.to(init.device), True)
    if done is not None and terminated is not None and truncated is not None:
        ends = lasts.to(done.device)
        done.index_fill_(0, ends, True)
        # of two bools, a <= b is "not a, or b"
        final, cut = terminated.index_select(0, ends), truncated.index_select(0, ends)
        truncated.index_copy_(0, ends, final.le(cut))


def _flag(columns: Columns, key: NestedKey, shape: Sequence[int], device: torch.device) -> Tensor:
    """The bool column ``key``, contiguous; if there is none, one of zeros is put in."""
    column = columns.get(key)
    if column is None:
        column = columns[key] = torch.zeros(shape, dtype=torch.bool, device=device)
    elif not column.is_contiguous():
        column = columns[key] = column.contiguous()
    return column

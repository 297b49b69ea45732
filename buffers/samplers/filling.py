"""Fills samples of slices: draws on until there are enough rows, and cuts the last slice to fit."""

from collections.abc import Callable

import torch
from torch import Tensor

from flatroll.buffers.index.ring import Draw, Follow


def fill(first: Draw, rows: int, more: Callable[[int], Draw]) -> Draw:
    """Draw on until there are ``rows`` rows, and cut the last slice to fit.

    The slices are the first ones of a longer draw: which of them are kept depends on nothing that comes after.

    Args:
        first: the slices drawn so far, at least one.
        rows: how many rows there shall be.
        more: draws so many further slices, each of at least one row.
    """
    parts, slices, drawn = [first], len(bounds(first)[0]), len(first.slots)
    while drawn < rows:
        # So many slices hold the missing rows at the mean length so far; an eighth more, since that is an estimate.
        part = more(-(-9 * (rows - drawn) * slices // (8 * drawn)))
        parts.append(part)
        slices, drawn = slices + len(bounds(part)[0]), drawn + len(part.slots)
    return cut(_join(parts), rows)


def cut(draw: Draw, rows: int) -> Draw:
    """Keep the first ``rows`` rows of ``draw``, which has slices, at least so many rows and no padding."""
    (firsts, lasts), follow = bounds(draw), draw.follow
    kept = int(torch.searchsorted(firsts, rows))  # slices that begin before row number ``rows``
    if follow is not None:
        follow = Follow(follow.slots[:rows], follow.patch[:, follow.patch[0] < rows])
    return Draw(
        draw.slots[:rows],
        firsts[:kept],
        lasts[:kept].clamp(max=rows - 1),
        follow,
        version=draw.version,
        info={key: entry[:rows] for key, entry in draw.info.items()},
    )


def _join(parts: list[Draw]) -> Draw:
    """Lay draws with slices end to end."""
    at, firsts, lasts, follows = 0, [], [], []
    for part in parts:
        # ``at`` is the position of the part's first row
        firsts.append(bounds(part)[0] + at)
        lasts.append(bounds(part)[1] + at)
        if part.follow is not None:
            part.follow.patch[0] += at
            follows.append(part.follow)
        at += len(part.slots)
    follow = None
    if follows:
        slots, patches = [each.slots for each in follows], [each.patch for each in follows]
        follow = Follow(torch.cat(slots), torch.cat(patches, 1))
    return Draw(
        torch.cat([part.slots for part in parts]),
        torch.cat(firsts),
        torch.cat(lasts),
        follow,
        version=parts[0].version,
        info={key: torch.cat([part.info[key] for part in parts]) for key in parts[0].info},
    )


def bounds(draw: Draw) -> tuple[Tensor, Tensor]:
    """Return where the slices of ``draw`` begin and end, int64 ``[S]`` each; it must have slices."""
    assert draw.firsts is not None and draw.lasts is not None
    return draw.firsts, draw.lasts

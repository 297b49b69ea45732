"""Draws rows again that another thread overwrote while they were read, and puts them into the sample.

**Why the rows of a sample keep their distribution.** A draw of an `independent` sampler is a sequence of independent,
identically distributed rows (or slices). Each of them is returned if it is still stored after it was read, whatever
became of the others, and is otherwise drawn again from the state at that time. So each has the distribution of a draw
from some state of the buffer, given that it is stored when its read ends: all rows that it could be, and that were not
overwritten, have the same chances relative to each other as in that draw. This is what drawing the whole sample again
gives as well, but there the chance that nothing was overwritten falls with the size of the sample.

A sample that fills its rows with slices of different lengths is a prefix of an endless sequence of slices, its last one
cut. The rows of lost slices are replaced by such a prefix of as many rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatroll.buffers.columns.column import put_rows, take_rows
from flatroll.buffers.index.ring import Draw
from flatroll.layout.transfers import upload


class Lost(NamedTuple):
    """The part of a draw that has to be drawn again.

    Attributes:
        draw: the draw.
        units: int64 ``[U]``, the lost rows, or with slices the lost slices (a slice is lost with any of its rows).
        rows: int64 ``[M]``, the positions of their rows in the draw, padding included.
    """

    draw: Draw
    units: Tensor
    rows: Tensor

    @classmethod
    def of(cls, draw: Draw, overwritten: Tensor) -> "Lost":
        """Return the part of ``draw`` to which the rows ``overwritten`` (bool ``[N]``) belong."""
        rows = overwritten.nonzero().squeeze(1)
        if draw.firsts is None:
            return cls(draw, rows, rows)

        # The slice of a row is the last one that begins at it or before it.
        lost = torch.zeros(len(draw.firsts), dtype=torch.bool)
        lost[torch.searchsorted(draw.firsts, rows, right=True) - 1] = True
        units = lost.nonzero().squeeze(1)
        return cls(draw, units, _rows_of(draw, units))


def _lengths(draw: Draw) -> Tensor:
    """Return the rows of each slice, padding included: it extends to the next slice."""
    assert draw.firsts is not None
    return torch.cat([draw.firsts, torch.tensor([len(draw.slots)])]).diff()


def _rows_of(draw: Draw, units: Tensor) -> Tensor:
    """Return the positions of the rows of these slices."""
    assert draw.firsts is not None
    lengths = _lengths(draw)[units]
    ends = lengths.cumsum(0)
    # Counting from 0 over all of them, less the rows before each slice, plus its first position.
    shift = (draw.firsts[units] - (ends - lengths)).repeat_interleave(lengths)
    return torch.arange(len(shift)) + shift


def put_part(lost: Lost, values: Any, part: Draw, read: Any) -> tuple[Draw, Any]:
    """Put ``part`` and what was ``read`` of it in the place of what was lost; return the whole draw and its values.

    Rows that take the place of as many lost ones, slice by slice, are written into ``values``, columns by key or a
    list of items. Slices of other lengths follow the rows that are left.
    """
    draw = lost.draw
    if len(lost.rows) == len(draw.slots):
        return part, read

    if draw.firsts is None or torch.equal(_lengths(draw)[lost.units], _lengths(part)):
        _put_values(values, lost.rows, read)
        return _put_draw(lost, part), values

    kept = torch.ones(len(draw.slots), dtype=torch.bool)
    kept[lost.rows] = False
    rows = kept.nonzero().squeeze(1)
    return _join_draws(lost, rows, part), _join_values(values, rows, read)


def _put_draw(lost: Lost, part: Draw) -> Draw:
    """Return the draw with the lost rows replaced."""
    draw = lost.draw
    slots = draw.slots.index_copy(0, lost.rows, part.slots)
    info = {key: entry.index_copy(0, lost.rows, part.info[key]) for key, entry in draw.info.items()}

    lasts = None
    if draw.firsts is not None and part.firsts is not None:
        assert draw.lasts is not None and part.lasts is not None
        # Padded slices are equally long, but need not end at the same row.
        lasts = draw.lasts.index_copy(0, lost.units, draw.firsts[lost.units] + part.lasts - part.firsts)

    mask = None
    if draw.mask is not None and part.mask is not None:
        mask = draw.mask.index_copy(0, lost.rows, part.mask)

    return Draw(slots, draw.firsts, lasts, mask=mask, version=part.version, info=info)


def _put_values(values: Any, rows: Tensor, read: Any) -> None:
    """Write what was ``read`` over these rows of ``values``."""
    if isinstance(values, list):
        for row, item in zip(rows.tolist(), read, strict=True):
            values[row] = item
        return

    for key, column in values.items():
        if not column.is_contiguous():  # as of an expanded value of an own column
            column = column.contiguous()
            values[key] = column
        put_rows(column, upload(rows, column.device), read[key])


def _join_draws(lost: Lost, rows: Tensor, part: Draw) -> Draw:
    """Return the ``rows`` that are left, and after them the part."""
    draw = lost.draw
    assert draw.firsts is not None and draw.lasts is not None
    assert part.firsts is not None and part.lasts is not None

    lengths = _lengths(draw)
    left = torch.ones(len(lengths), dtype=torch.bool)
    left[lost.units] = False
    lengths = lengths[left]
    firsts = lengths.cumsum(0) - lengths
    lasts = firsts + (draw.lasts - draw.firsts)[left]

    mask = None
    if draw.mask is not None and part.mask is not None:
        mask = torch.cat([draw.mask[rows], part.mask])

    return Draw(
        torch.cat([draw.slots[rows], part.slots]),
        torch.cat([firsts, part.firsts + len(rows)]),
        torch.cat([lasts, part.lasts + len(rows)]),
        mask=mask,
        version=part.version,
        info={key: torch.cat([entry[rows], part.info[key]]) for key, entry in draw.info.items()},
    )


def _join_values(values: Any, rows: Tensor, read: Any) -> Any:
    """Return the ``rows`` of ``values``, and after them what was ``read``."""
    if isinstance(values, list):
        return [values[row] for row in rows.tolist()] + list(read)
    return {
        key: torch.cat([take_rows(column, upload(rows, column.device)), read[key]])
        for key, column in values.items()
    }

"""The run index and the pieces a packed batch is cut into."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatroll.modules.backends import packing

lengths_of_runs = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def starts_of(lengths):
    starts = torch.zeros(sum(lengths), dtype=torch.bool)
    starts[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return starts


@given(lengths_of_runs)
def test_index_is_the_order_of_pack_sequence(lengths):
    index = packing.run_index(starts_of(lengths))
    rows = torch.arange(sum(lengths))
    expected = nn.utils.rnn.pack_sequence(rows.split(lengths), enforce_sorted=False)
    assert index.batch_sizes.equal(expected.batch_sizes)
    if index.order is None:
        assert len(set(lengths)) == 1
        return
    assert rows[index.order][index.place].equal(rows)
    runs = rows.split(lengths)
    assert set(index.first.tolist()) == {int(run[0]) for run in runs}
    lengths_ranked = index.last - index.first + 1
    assert lengths_ranked.tolist() == sorted(lengths, reverse=True)
    assert rows[index.order][: len(lengths)].equal(index.first)


@given(lengths_of_runs)
def test_pieces_cover_each_row_once(lengths):
    sizes = packing.run_index(starts_of(lengths)).batch_sizes
    cut = packing.pieces(sizes)
    assert sum(piece.steps for piece in cut) == max(lengths)
    assert sum(piece.rows for piece in cut) == sum(lengths)
    for piece, part in zip(cut, sizes.split([piece.steps for piece in cut]), strict=True):
        assert (piece.width, piece.rows) == (part[0], part.sum())
        assert not piece.dense or (part == part[0]).all()


def test_one_long_run_among_many_one_row_runs_needs_no_padding():
    """A padded form would make a million rows of these 2,047."""
    sizes = packing.run_index(starts_of([1024] + [1] * 1023)).batch_sizes
    assert packing.pieces(sizes) == [
        packing.PackedSteps(steps=1, rows=1024, width=1024, dense=False),
        packing.PackedSteps(steps=1023, rows=1023, width=1, dense=True),
    ]


def test_packed_calls_are_of_bounded_size():
    lengths = [1 + i % 40 for i in range(400)]
    cut = packing.pieces(packing.run_index(starts_of(lengths)).batch_sizes)
    assert all(piece.rows < packing.PACKED_ROWS + len(lengths) for piece in cut)
    assert len(cut) < sum(lengths) / packing.PACKED_ROWS + 1


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match=r"batch must have at least one row, got batch size \[0\]"):
        packing.run_index(torch.zeros(0, dtype=torch.bool))

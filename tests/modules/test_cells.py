"""Cells: the stock cells with resets."""

import pytest
import torch
from torch import nn

from flatroll.modules import GRUCell, LSTMCell


@pytest.mark.parametrize(("kind", "stock"), [(GRUCell, nn.GRUCell), (LSTMCell, nn.LSTMCell)])
def test_resets(kind, stock):
    ours, theirs = kind(3, 4), stock(3, 4)
    ours.load_state_dict(theirs.state_dict())
    rows, state = torch.randn(5, 3), torch.randn(5, 4)
    is_init = torch.tensor([True, False, False, True, False])
    before = state.masked_fill(is_init[:, None], 0)
    lstm = stock is nn.LSTMCell
    expected = theirs(rows, (before, before) if lstm else before)
    for shaped in (is_init, is_init[:, None]):
        torch.testing.assert_close(ours(rows, (state, state) if lstm else state, shaped), expected)
    torch.testing.assert_close(ours(rows), theirs(rows))


def test_bad_resets():
    cell, state = GRUCell(3, 4), torch.zeros(5, 4)
    with pytest.raises(TypeError, match=r"is_init must be bool, got torch.int64"):
        cell(torch.zeros(5, 3), state, torch.ones(5).long())
    with pytest.raises(ValueError, match=r"is_init must have shape \(5,\) or \(5, 1\), got \(4,\)"):
        cell(torch.zeros(5, 3), state, torch.ones(4).bool())

"""GRU and LSTM cells with resets, for hand-written training loops."""

import torch
from torch import Tensor, nn


def _reset(state: Tensor, is_init: Tensor | None) -> Tensor:
    """``state [B, H]`` with zeros where ``is_init`` (bool ``[B]`` or ``[B, 1]``) is True."""
    if is_init is None:
        return state
    if is_init.dtype is not torch.bool:
        raise TypeError(f"is_init must be bool, got {is_init.dtype}: cast it with .bool()")
    if is_init.shape == state.shape[:-1]:
        is_init = is_init.unsqueeze(-1)
    if is_init.shape != (*state.shape[:-1], 1):
        shape = tuple(state.shape[:-1])
        raise ValueError(f"is_init must have shape {shape} or {(*shape, 1)}, got {tuple(is_init.shape)}")
    return state.masked_fill(is_init, 0)


class GRUCell(nn.GRUCell):
    """A :class:`torch.nn.GRUCell` that resets the state to zeros in the rows where ``is_init`` is True.

    It is made as the stock cell is. Called with rows ``[B, input_size]``, state ``[B, hidden_size]`` (default zeros)
    and ``is_init``, bool ``[B]`` or ``[B, 1]`` (default: nowhere), it gives the next state ``[B, hidden_size]``.

    Raises:
        TypeError: ``is_init`` is not bool.
        ValueError: ``is_init`` has another shape than the rows.

    >>> cell = GRUCell(3, 8)
    >>> cell(torch.zeros(2, 3), torch.ones(2, 8), torch.tensor([True, False])).shape
    torch.Size([2, 8])
    """

    def forward(self, input: Tensor, hx: Tensor | None = None, is_init: Tensor | None = None) -> Tensor:
        """Rows ``[B, input_size]`` and state ``[B, hidden_size]`` to the next state."""
        return super().forward(input, None if hx is None else _reset(hx, is_init))


class LSTMCell(nn.LSTMCell):
    """A :class:`torch.nn.LSTMCell` that resets the states to zeros in the rows where ``is_init`` is True.

    Called as :class:`GRUCell`, with the pair of hidden state and cell for the state; errors are the same.

    >>> cell = LSTMCell(3, 8)
    >>> h, c = cell(torch.zeros(2, 3), (torch.ones(2, 8), torch.ones(2, 8)), torch.tensor([True, False]))
    >>> h.shape, c.shape
    (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, is_init: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows ``[B, input_size]`` and states ``[B, hidden_size]``, default zeros, to the next states."""
        return super().forward(
            input, None if hx is None else (_reset(hx[0], is_init), _reset(hx[1], is_init))
        )

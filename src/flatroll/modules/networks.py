"""Python-based GRU and LSTM networks, and cells with resets for hand-written training loops."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatroll.layout.checks import (
    check_device,
    check_flags,
    check_floating_dtype,
    check_number,
    check_whole_number,
)
from flatroll.modules.backends.packing import States
from flatroll.modules.backends.scan import OPERATORS, run_layers


def check_sizes(
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
    bias: bool = True,
    dropout: float = 0.0,
    bidirectional: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these can build a recurrent network."""
    check_whole_number("input_size", input_size)
    check_whole_number("hidden_size", hidden_size)
    check_whole_number("num_layers", num_layers)
    check_flags(bias=bias, bidirectional=bidirectional)
    check_number("dropout", dropout, least=0, most=1)
    if device is not None:
        check_device("device", device)
    if dtype is not None:
        check_floating_dtype("dtype", dtype)


class _OfOperators(nn.RNNBase):
    """A network whose layers are the operators of the backend ``"scan"``."""

    kind: ClassVar[str]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flags(bidirectional=bidirectional, batch_first=batch_first)
        if bidirectional or not batch_first:
            raise ValueError(
                f"{self.kind} runs forward in time over [B, T, input_size], got bidirectional={bidirectional}, "
                f"batch_first={batch_first}: use torch.nn.{self.kind}"
            )

        check_sizes(input_size, hidden_size, num_layers, bias, dropout, device=device, dtype=dtype)
        sizes = (input_size, hidden_size, num_layers, bool(bias))
        super().__init__(self.kind, *sizes, batch_first=True, dropout=dropout, device=device, dtype=dtype)

    def _run(self, rows: Tensor, first: States | None) -> tuple[Tensor, States]:
        """Map rows ``[B, T, input_size]`` and first states (default zeros) to outputs and final states."""
        shaped = isinstance(rows, Tensor) and rows.ndim == 3 and rows.shape[2] == self.input_size
        if not shaped or not rows.shape[1]:
            shown: object = type(rows).__name__
            if isinstance(rows, Tensor):
                shown = tuple(rows.shape)
            raise ValueError(f"input must have shape [B, T, {self.input_size}], T at least 1, got {shown}")

        batch, steps = rows.shape[:2]
        shape = (self.num_layers, batch, self.hidden_size)
        if first is not None:
            states = first
        elif self.kind == "LSTM":
            states = (rows.new_zeros(shape),) * 2
        else:
            states = (rows.new_zeros(shape),)

        for state in states:
            if state.shape != shape:
                raise ValueError(f"a state must have shape {shape}, got {tuple(state.shape)}")

        # packed order of runs of equal length is time-major: [T, B, in], with B rows per step
        by_step = rows.transpose(0, 1).reshape(batch * steps, self.input_size)
        out, after = run_layers(OPERATORS, self, by_step, states, torch.full((steps,), batch))

        # the last step's rows are the final states
        finals = tuple(torch.stack([layer[len(layer) - batch :] for layer in state]) for state in after)
        return out.view(steps, batch, self.hidden_size).transpose(0, 1), finals


class GRU(_OfOperators):
    """A GRU like :class:`torch.nn.GRU` that ``torch.compile`` compiles to one graph.

    The names and shapes of its weights are those of the stock network, so that state dicts load both ways, and its
    results are the same except for rounding. It is differentiable once.

    Args:
        input_size, hidden_size, num_layers, bias, dropout, device, dtype: as in the stock network.
        batch_first: must be True, the default.
        bidirectional: must be False.

    Raises:
        ValueError: ``batch_first=False`` or ``bidirectional=True``; called: rows or a state of another shape.

    >>> gru = GRU(3, 8)
    >>> out, state = gru(torch.zeros(2, 5, 3))
    >>> out.shape, state.shape
    (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
    """

    kind = "GRU"

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map rows ``[B, T, input_size]`` and state ``[num_layers, B, H]`` (or zeros) to outputs and final state."""
        first = None if hx is None else (hx,)
        out, (final,) = self._run(input, first)
        return out, final


class LSTM(_OfOperators):
    """An LSTM like :class:`torch.nn.LSTM` that ``torch.compile`` compiles to one graph; see :class:`GRU`.

    >>> lstm = LSTM(3, 8, num_layers=2)
    >>> out, (h, c) = lstm(torch.zeros(2, 5, 3))
    >>> out.shape, c.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 2, 8]))
    """

    kind = "LSTM"

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map rows ``[B, T, input_size]`` and states ``[num_layers, B, H]`` (or zeros) to outputs and final states."""
        out, (h, c) = self._run(input, hx)
        return out, (h, c)


#: By the mode of ``nn.RNNBase``: the stock network, and the one made of operators.
NETWORKS: dict[str, tuple[type[nn.GRU] | type[nn.LSTM], type[GRU] | type[LSTM]]] = {
    "GRU": (nn.GRU, GRU),
    "LSTM": (nn.LSTM, LSTM),
}


def share_weights(kind: type[Any], net: nn.RNNBase) -> nn.RNNBase:
    """Create a network of this class that shares its parameters with ``net``."""
    sizes = (net.input_size, net.hidden_size, net.num_layers, net.bias)
    options = {"dropout": net.dropout, "bidirectional": net.bidirectional}
    # "meta": allocates no memory.
    sharing: nn.RNNBase = kind(*sizes, batch_first=True, device="meta", **options)
    for name, weight in net.named_parameters():
        setattr(sharing, name, weight)
    sharing.train(net.training)
    sharing.flatten_parameters()
    return sharing


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

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(input_size, hidden_size, bias=bias, device=device, dtype=dtype)
        super().__init__(input_size, hidden_size, bias, device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None, is_init: Tensor | None = None) -> Tensor:
        """Map rows ``[B, input_size]`` and state ``[B, hidden_size]`` to the next state."""
        if hx is not None:
            hx = _reset(hx, is_init)
        return super().forward(input, hx)


class LSTMCell(nn.LSTMCell):
    """A :class:`torch.nn.LSTMCell` that resets the states to zeros in the rows where ``is_init`` is True.

    Called as :class:`GRUCell`, with the pair of hidden state and cell for the state; errors are the same.

    >>> cell = LSTMCell(3, 8)
    >>> h, c = cell(torch.zeros(2, 3), (torch.ones(2, 8), torch.ones(2, 8)), torch.tensor([True, False]))
    >>> h.shape, c.shape
    (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(input_size, hidden_size, bias=bias, device=device, dtype=dtype)
        super().__init__(input_size, hidden_size, bias, device, dtype)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, is_init: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map rows ``[B, input_size]`` and states ``[B, hidden_size]`` (or zeros) to the next states."""
        if hx is not None:
            hx = (_reset(hx[0], is_init), _reset(hx[1], is_init))
        return super().forward(input, hx)

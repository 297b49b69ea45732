"""GRU and LSTM made of the operators in scan.py, with the weights and arguments of the stock networks."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatroll.modules.backends.packing import States
from flatroll.modules.backends.recurrent_scan import layers


class _Scanned(nn.RNNBase):
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
        if bidirectional or not batch_first:
            raise ValueError(
                f"{self.kind} runs forward in time over [B, T, input_size], got bidirectional={bidirectional}, "
                f"batch_first={batch_first}: use torch.nn.{self.kind}"
            )
        super().__init__(
            self.kind,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first=True,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )

    def _run(self, rows: Tensor, given: States | None) -> tuple[Tensor, States]:
        """Outputs and final states; zeros where none are given."""
        if (
            not isinstance(rows, Tensor)
            or rows.ndim != 3
            or not rows.shape[1]
            or rows.shape[2] != self.input_size
        ):
            shown = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"input must have shape [B, T, {self.input_size}], T at least 1, got {shown}")
        batch, steps = rows.shape[:2]
        shape = (self.num_layers, batch, self.hidden_size)
        states = (rows.new_zeros(shape),) * (2 if self.kind == "LSTM" else 1) if given is None else given
        for state in states:
            if state.shape != shape:
                raise ValueError(f"a state must have shape {shape}, got {tuple(state.shape)}")
        by_step = rows.transpose(0, 1).reshape(batch * steps, self.input_size)
        out, after = layers(self, by_step, states, torch.full((steps,), batch))
        finals = tuple(torch.stack([layer[len(layer) - batch :] for layer in state]) for state in after)
        return out.view(steps, batch, self.hidden_size).transpose(0, 1), finals


class GRU(_Scanned):
    """A GRU as :class:`torch.nn.GRU`, which ``torch.compile`` takes into one graph.

    The names and shapes of its weights are those of the stock network, so that state dicts load both ways, and its
    results are the same but for rounding. It is differentiable once.

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
        """Rows ``[B, T, input_size]`` and state ``[num_layers, B, H]``, default zeros, to outputs and final state."""
        out, (final,) = self._run(input, None if hx is None else (hx,))
        return out, final


class LSTM(_Scanned):
    """An LSTM as :class:`torch.nn.LSTM`, which ``torch.compile`` takes into one graph; else as :class:`GRU`.

    >>> lstm = LSTM(3, 8, num_layers=2)
    >>> out, (h, c) = lstm(torch.zeros(2, 5, 3))
    >>> out.shape, c.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 2, 8]))
    """

    kind = "LSTM"

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Rows ``[B, T, input_size]`` and states ``[num_layers, B, H]``, default zeros, to outputs and final states."""
        out, (h, c) = self._run(input, hx)
        return out, (h, c)


#: By the mode of ``nn.RNNBase``: the stock network, and the one made of operators.
NETWORKS: dict[str, tuple[type[nn.GRU] | type[nn.LSTM], type[GRU] | type[LSTM]]] = {
    "GRU": (nn.GRU, GRU),
    "LSTM": (nn.LSTM, LSTM),
}


def with_weights_of(kind: type[Any], net: nn.RNNBase) -> nn.RNNBase:
    """A network of this kind that shares the weights of ``net``: the same parameters, not copies."""
    made: nn.RNNBase = kind(
        net.input_size,
        net.hidden_size,
        net.num_layers,
        net.bias,
        batch_first=True,
        dropout=net.dropout,
        bidirectional=net.bidirectional,
        device="meta",
    )
    for name, weight in net.named_parameters():
        setattr(made, name, weight)
    made.train(net.training)
    made.flatten_parameters()
    return made

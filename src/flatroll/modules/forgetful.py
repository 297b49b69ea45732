"""FFMModule: fast and forgetful memory."""

import math
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from flatroll.layout.checks import check_choice, check_whole_number
from flatroll.modules.linear import LinearRecurrence
from flatroll.modules.networks import check_sizes
from flatroll.modules.stateful import StatefulOptions

#: Bounds of the decay rates at the start.
_RATES = (1e-6, 0.5)


class FFMModule(LinearRecurrence):
    """Fast and forgetful memory (FFM): each of m traces of the input fades at its rate and is seen at c frequencies.

    ```text
    x = (W1 r[t] + b1) * sigmoid(W2 r[t] + b2)                  r[t] the input, x of size m
    S[t] = exp(-|a| + i w) * S[t - 1] + x 1^T                   S complex, [m, c]; a of size m, w of size c
    o = sigmoid(W4 r[t] + b4)
    y[t] = layer_norm(W3 [Re S[t], Im S[t]] + b3) * o + (W5 r[t] + b5) * (1 - o)
    ```

    At the start the rates ``a`` are spread evenly between 1e-6 and 0.5 (in the authors' code between 0.0045 and 0.67),
    and the periods ``2 pi / w`` between 1 step and ``max_period`` steps. The state is much smaller than that of the
    other memories and independent of ``hidden_size``: ``[*B, num_layers, 2 * memory_size * context_size]``, real and
    imaginary parts by turns. Everything else is as for :class:`MinGRUModule`.

    Args:
        input_size, hidden_size, num_layers, dropout: as for :class:`MinGRUModule`.
        memory_size: m, the number of traces; default 32.
        context_size: c, the number of frequencies; default 4.
        max_period: in steps, at least 1; default 1,024. Take the length of episodes.
        in_key, in_keys, out_key, out_keys, done_key, traj_key, default_recurrent_mode, state: see :class:`GRUModule`.
        device, dtype: of the weights; float32 or float64.

    Raises:
        ValueError: as for :class:`MinGRUModule`, another dtype.

    Reference: Morad et al. 2023, Reinforcement learning with fast and forgetful memory,
    https://arxiv.org/abs/2310.04128.

    >>> unit = FFMModule(3, 8, in_key="observation", out_key="features")
    >>> unit.make_tensordict_primer().defaults["recurrent_state"].shape
    torch.Size([1, 256])
    """

    state_meaning: ClassVar[str] = "num_layers x 2 memory_size context_size"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        memory_size: int = 32,
        context_size: int = 4,
        max_period: int = 1024,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_sizes(input_size, hidden_size, num_layers, device=device, dtype=dtype)
        check_choice("dtype", dtype, (None, torch.float32, torch.float64))  # of the parts of complex numbers
        self.memory_size = check_whole_number("memory_size", memory_size)
        self.context_size = check_whole_number("context_size", context_size)
        check_whole_number("max_period", max_period)
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            dropout,
            layer_shape=(memory_size, context_size),
            complex_numbers=True,
            **options,
        )

        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._parts = [memory_size, memory_size, hidden_size, hidden_size]
        seen = 2 * memory_size * context_size
        self.inputs = nn.ModuleList(nn.Linear(size, sum(self._parts), **place) for size in sizes)
        self.outputs = nn.ModuleList(nn.Linear(seen, hidden_size, **place) for _ in sizes)

        rates = torch.linspace(*_RATES, memory_size, **place)
        periods = torch.linspace(1.0, float(max_period), context_size, **place)
        self.rates = nn.Parameter(rates.repeat(num_layers, 1))
        self.frequencies = nn.Parameter((math.tau / periods).repeat(num_layers, 1))

    @property
    @override
    def weight(self) -> Tensor:
        return self.rates

    @override
    def enter(self, layer: int, rows: Tensor) -> Tensor:
        return cast(Tensor, self.inputs[layer](rows))

    @override
    def terms(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, gate, _, _ = torch.split(rows, self._parts, -1)
        kept = (-self.rates[layer].abs()).exp().unsqueeze(1)
        angles = self.frequencies[layer].expand(self.memory_size, -1)
        factor = torch.polar(kept.expand_as(angles).unsqueeze(0), angles.unsqueeze(0))

        # autocast may have made it half precision, which complex numbers do not have
        written = (x * gate.sigmoid()).to(self.weight.dtype).unsqueeze(2)
        return factor, written.to(factor.dtype)

    @override
    def output(self, layer: int, rows: Tensor, states: Tensor) -> Tensor:
        _, _, gate, skip = torch.split(rows, self._parts, -1)
        seen = self.outputs[layer](self._column(states))
        return torch.lerp(skip, F.layer_norm(seen, (self.hidden_size,)).to(skip.dtype), gate.sigmoid())

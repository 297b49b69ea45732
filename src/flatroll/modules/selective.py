"""S6Module: a selective state space."""

import math
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from flatroll.kernels.recurrence import selective_recurrence
from flatroll.layout.checks import check_whole_number
from flatroll.modules.linear import LinearRecurrence
from flatroll.modules.networks import check_sizes
from flatroll.modules.stateful import StatefulOptions

#: Bounds of the step sizes at the start.
_STEPS = (0.001, 0.1)


class S6Module(LinearRecurrence):
    """A selective state space (S6, the recurrence of Mamba): the input decides how much is kept and how much is read.

    For each of H features, with n numbers of state each:

    ```text
    x, z, s, B, C = W r[t]                    r[t] the input; x, z, s of size H, B and C of size n
    d = softplus(s + b)                       the step size
    h[t] = exp(-d A) * h[t - 1] + d u B       u = silu(x); A above 0, [H, n]
    y[t] = W_out ((h[t] C + D u) * silu(z)) + b_out
    ```

    At the start A is 1, 2, ..., n for each feature, and the step sizes are spread between 0.001 and 0.1. The input of
    each layer but the first is divided by its root mean square, as in Mamba's blocks: otherwise a second layer would
    begin with outputs near 0. Mamba's convolution of the last inputs is left out, as a second layer takes its part;
    ``s`` has a matrix of its own instead of one of low rank, and blocks add nothing to their input. The state is
    ``[*B, num_layers, state_size * hidden_size]``. Everything else is as for :class:`MinGRUModule`.

    Args:
        input_size, hidden_size, num_layers, dropout: as for :class:`MinGRUModule`.
        state_size: n; default 4. Memory and time are proportional to it.
        in_key, in_keys, out_key, out_keys, done_key, traj_key, default_recurrent_mode, state: see :class:`GRUModule`.
        device, dtype: of the weights.

    Raises:
        ValueError: as for :class:`MinGRUModule`.

    Reference: Gu and Dao 2023, Mamba: linear-time sequence modeling with selective state spaces,
    https://arxiv.org/abs/2312.00752.

    >>> unit = S6Module(3, 8, in_key="observation", out_key="features")
    >>> unit.make_tensordict_primer().defaults["recurrent_state"].shape
    torch.Size([1, 32])
    """

    state_meaning: ClassVar[str] = "num_layers x state_size hidden_size"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        state_size: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_sizes(input_size, hidden_size, num_layers, device=device, dtype=dtype)
        self.state_size = check_whole_number("state_size", state_size)
        layer_shape = (state_size, hidden_size)
        super().__init__(input_size, hidden_size, num_layers, dropout, layer_shape=layer_shape, **options)

        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._parts = [hidden_size, hidden_size, hidden_size, state_size, state_size]
        width = sum(self._parts)
        self.inputs = nn.ModuleList(nn.Linear(size, width, bias=False, **place) for size in sizes)
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, hidden_size, **place) for _ in sizes)

        # softplus of the bias is spread evenly in its logarithm
        least, most = map(math.log, _STEPS)
        steps = torch.empty(num_layers, hidden_size, **place).uniform_(least, most).exp()
        self.step_bias = nn.Parameter(steps.expm1().log())
        rates = torch.arange(1, state_size + 1, **place).view(1, -1, 1)
        self.log_rates = nn.Parameter(rates.log().repeat(num_layers, 1, hidden_size))
        self.skips = nn.Parameter(torch.ones(num_layers, hidden_size, **place))

    @property
    @override
    def weight(self) -> Tensor:
        return self.log_rates

    @override
    def enter(self, layer: int, rows: Tensor) -> Tensor:
        if layer:  # an output is a product of three factors below 1: after a few layers nothing would be left
            rows = F.rms_norm(rows, rows.shape[-1:], eps=1e-5)
        return cast(Tensor, self.inputs[layer](rows))

    @override
    def terms(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        step, u, write, _ = self._read(layer, rows)
        factor = (-step.unsqueeze(1) * self.log_rates[layer].exp()).exp()
        return factor, (step * u).unsqueeze(1) * write.unsqueeze(2)

    @override
    def output(self, layer: int, rows: Tensor, states: Tensor) -> Tensor:
        _, u, _, read = self._read(layer, rows)
        seen = torch.bmm(read.unsqueeze(1).to(states.dtype), states).squeeze(1)
        return self._leave(layer, rows, seen, u)

    @override
    def run_layer(self, layer: int, rows: Tensor, first: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        step, u, write, read = self._read(layer, rows)
        rates = self.log_rates[layer].exp()
        seen, states = selective_recurrence(step, step * u, write, read, rates, first, starts)
        return self._leave(layer, rows, seen, u), states

    def _read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step sizes and numbers to write ``[N, H]``, and how to write and to read them ``[N, n]``."""
        x, _, step, write, read = torch.split(rows, self._parts, -1)
        return F.softplus(step + self.step_bias[layer]), F.silu(x), write, read

    def _leave(self, layer: int, rows: Tensor, seen: Tensor, u: Tensor) -> Tensor:
        gate = torch.split(rows, self._parts, -1)[1]
        return cast(Tensor, self.outputs[layer]((seen + self.skips[layer] * u) * F.silu(gate)))

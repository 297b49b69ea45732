"""DeltaNetModule: gated DeltaNet, a matrix memory written by the delta rule."""

from typing import Any, ClassVar, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from flatroll.layout.checks import check_number, check_whole_number
from flatroll.modules.backends.delta_rule import HeadRows, delta_rule, queries_keys_values
from flatroll.modules.backends.packing import States
from flatroll.modules.networks import check_sizes
from flatroll.modules.stateful import StatefulModule, StatefulOptions


class DeltaNetModule(StatefulModule):
    """Gated DeltaNet: a matrix that answers keys with values, corrected by the delta rule and faded by a gate.

    For each head, with q, k and v of size d, all linear in the input but for these functions:

    ```text
    q, k = normalised silu(W_q r[t]), silu(W_k r[t])        r[t] the input; of length 1
    v = silu(W_v r[t])
    e = sigmoid(w_e r[t])                                   how much is written
    a = exp(-exp(A) softplus(w_a r[t] + c))                 how much is kept
    S[t] = a S[t - 1] (I - e k k^T) + e v k^T
    y[t] = W_out (rms_norm(S[t] q) * silu(W_g r[t])) + b_out
    ```

    The recurrence is linear, but its transition is a matrix. So runs are computed row by row on the CPU, by a loop
    whose matrices stay in the cache (differentiable once), and elsewhere by chunks of up to 64 rows: each chunk by
    products of matrices, chunk after chunk. The convolutions of the paper are left out, and queries are not scaled by
    ``d ** -0.5``, which the norm would cancel but for its epsilon. The state is ``[*B, num_layers,
    hidden_size ** 2 / num_heads]``, which is much for a row: collect with ``state_stride``, or train with
    ``state="zero"``. In recurrent mode the next states are exact on the last row of each run and zeros elsewhere,
    as of :class:`LSTMModule`. Everything else is as for :class:`MinGRUModule`, except that ``torch.compile`` breaks
    the graph of recurrent mode, where the number of chunks depends on the runs.

    Args:
        input_size, hidden_size, num_layers, dropout: as for :class:`MinGRUModule`.
        num_heads: must divide ``hidden_size``; default 4.
        in_key, in_keys, out_key, out_keys, done_key, traj_key, default_recurrent_mode, state: see :class:`GRUModule`.
        device, dtype: of the weights.

    Raises:
        ValueError: as for :class:`MinGRUModule`, or ``num_heads`` does not divide ``hidden_size``.

    Reference: Yang, Kautz and Hatamizadeh 2024, Gated delta networks: improving Mamba2 with delta rule,
    https://arxiv.org/abs/2412.06464; chunks as in Yang et al. 2024, https://arxiv.org/abs/2406.06484.

    >>> net = DeltaNetModule(3, 8, in_key="observation", out_key="features")
    >>> net.make_tensordict_primer().defaults["recurrent_state"].shape
    torch.Size([1, 16])
    """

    state_meaning: ClassVar[str] = "num_layers x hidden_size ** 2 / num_heads"
    autocast_in_part = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        num_heads: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_sizes(input_size, hidden_size, num_layers, device=device, dtype=dtype)
        check_number("dropout", dropout, least=0, below=1)
        check_whole_number("num_heads", num_heads)
        if hidden_size % num_heads:
            raise ValueError(
                f"num_heads must divide hidden_size, got num_heads={num_heads} and hidden_size={hidden_size}"
            )
        head = hidden_size // num_heads
        super().__init__((num_layers, hidden_size * head), **options)

        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.dropout = dropout
        self._matrices = (num_heads, head, head)

        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._parts = [3 * hidden_size, hidden_size, num_heads, num_heads]
        self.inputs = nn.ModuleList(nn.Linear(size, sum(self._parts), bias=False, **place) for size in sizes)
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, hidden_size, **place) for _ in sizes)
        self.norms = nn.Parameter(torch.ones(num_layers, head, **place))

        # as the step sizes and rates of a state space: softplus of the bias between 0.001 and 0.1
        steps = torch.empty(num_layers, num_heads, **place).uniform_(-6.9, -2.3).exp()
        self.step_bias = nn.Parameter(steps.expm1().log())
        self.log_rates = nn.Parameter(torch.empty(num_layers, num_heads, **place).uniform_(1.0, 16.0).log())

    @property
    @override
    def weight(self) -> Tensor:
        return self.log_rates

    @override
    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        after: list[Tensor] = []
        for layer in range(self.num_layers):
            row = self._enter(layer, rows)
            query, key, value = queries_keys_values(row.vectors.transpose(0, 1))
            memory = states[0][:, layer].reshape(-1, *self._matrices)

            memory = memory * row.decay.exp()[..., None, None]
            known = torch.matmul(key.unsqueeze(-2), memory).squeeze(-2)
            new = row.write.unsqueeze(-1) * (value - known)
            memory = memory + key.unsqueeze(-1) * new.unsqueeze(-2)
            seen = torch.matmul(query.unsqueeze(-2), memory).squeeze(-2)

            after.append(memory.flatten(1))
            rows = self._leave(layer, seen, row.gate)
        return rows, (torch.stack(after, 1),)

    @override
    def over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        starts = starts.cpu()
        last = starts.new_empty(0, dtype=torch.int64)
        finals: list[Tensor] = []
        for layer in range(self.num_layers):
            row = self._enter(layer, rows)
            memories = stored[0][:, layer].reshape(-1, *self._matrices)
            seen, last, final = delta_rule(row, memories, starts)
            finals.append(final.flatten(1))
            rows = self._leave(layer, seen, row.gate)

        final = torch.stack(finals, 1)
        after = _zeros((len(rows), *self._state_shape), final).index_copy_(0, last, final)
        return rows, (after,)

    def _enter(self, layer: int, rows: Tensor) -> HeadRows:
        vectors, gate, step, write = self.inputs[layer](rows).split(self._parts, -1)
        decay = -self.log_rates[layer].exp() * F.softplus(step + self.step_bias[layer])
        return HeadRows(
            vectors.reshape(rows.shape[0], 3, self.num_heads, self._matrices[1]), decay, write.sigmoid(), gate
        )

    def _leave(self, layer: int, seen: Tensor, gate: Tensor) -> Tensor:
        """The layer's output ``[N, H]`` of what its heads have read, ``[N, heads, d]``."""
        scaled = F.rms_norm(seen, seen.shape[-1:], self.norms[layer], eps=1e-5)
        out = cast(Tensor, self.outputs[layer](scaled.flatten(1) * F.silu(gate)))
        return F.dropout(out, self.dropout, self.training and layer + 1 < self.num_layers)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of this dtype and device; on the CPU the system makes those that nobody reads only in name."""
    known = {torch.float32: np.float32, torch.float64: np.float64}.get(like.dtype)
    if known is None or like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(shape, known))

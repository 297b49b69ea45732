"""The network of `TransformerModule`: blocks of attention and MLP, called with any way to attend."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from flatroll.kernels.scan import is_tracing
from flatroll.modules.backends.attention import Attention

#: The wavelengths of rotary positions grow to this number.
_BASE = 10_000.0
#: At the start a gate keeps most of what passes it by.
_GATE_BIAS = 2.0


class TransformerNetwork(nn.Module):
    """Blocks of causal attention and MLP on rows, with norms in front of both.

    Args:
        input_size, embed_size, num_layers, num_heads, context, position, gate, mlp_ratio, dropout, device, dtype: see
            `TransformerModule`, which checks them.
    """

    def __init__(
        self,
        input_size: int,
        embed_size: int,
        num_layers: int,
        num_heads: int,
        *,
        context: int | None,
        position: str | None,
        gate: str | None,
        mlp_ratio: float,
        dropout: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_size = embed_size // num_heads
        self.rotary = position == "rotary"

        self.embed = nn.Linear(input_size, embed_size, **place)
        hidden = max(1, round(mlp_ratio * embed_size))
        self.blocks = nn.ModuleList(
            _Block(embed_size, hidden, gate is not None, dropout, place) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_size, **place)

        # one number for each distance between two rows, [layers, heads, context]
        self.distances: nn.Parameter | None = None
        if position == "learned":
            assert context is not None
            self.distances = nn.Parameter(torch.zeros(num_layers, num_heads, context, **place))

    def forward(
        self, rows: Tensor, positions: Tensor, attention: Attention, without_gradient: Tensor | None = None
    ) -> Tensor:
        """Compute the outputs of N rows.

        Args:
            rows: ``[N, input_size]``.
            positions: int64 ``[N]``, of each row in its run.
            attention: how rows see one another.
            without_gradient: bool ``[N]``, rows that others see without passing a gradient to them. Default: None.

        Returns:
            ``[N, embed_size]``.
        """
        turns = None
        if self.rotary:
            turns = _turns(positions, self.head_size)

        hidden: Tensor = self.embed(rows)
        for layer, one in enumerate(self.blocks):
            block = cast(_Block, one)
            projected = block.project(hidden)
            if without_gradient is not None:
                projected = torch.where(without_gradient[:, None], projected.detach(), projected)
            query, key, value = projected.view(rows.shape[0], 3, self.num_heads, self.head_size).unbind(1)
            if turns is not None:
                query = _turned(query, turns)
                key = _turned(key, turns)

            bias = None
            if self.distances is not None:
                bias = self.distances[layer]
            hidden = block(hidden, attention.attend(layer, query, key, value, bias))

        out: Tensor = self.norm(hidden)
        if without_gradient is not None:
            out = torch.where(without_gradient[:, None], out.detach(), out)
        return out


class _Block(nn.Module):
    """One layer: what attention gathers and then an MLP are added, or let in by gates."""

    def __init__(self, size: int, hidden: int, gated: bool, dropout: float, place: dict[str, Any]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size, **place)
        self.projection = nn.Linear(size, 3 * size, bias=False, **place)
        self.attention_out = nn.Linear(size, size, **place)
        self.mlp_norm = nn.LayerNorm(size, **place)
        self.mlp = nn.Sequential(
            nn.Linear(size, hidden, **place), nn.GELU(), nn.Linear(hidden, size, **place)
        )
        self.dropout = nn.Dropout(dropout)
        self.attention_gate = _Gate(size, place) if gated else None
        self.mlp_gate = _Gate(size, place) if gated else None

    def project(self, hidden: Tensor) -> Tensor:
        """Return query, key and value of each row, ``[N, 3 * size]``."""
        projected: Tensor = self.projection(self.attention_norm(hidden))
        return projected

    def forward(self, hidden: Tensor, gathered: Tensor) -> Tensor:
        """Return the layer's output, given what attention gathered; ``[N, size]`` each."""
        hidden = _merged(self.attention_gate, hidden, self.dropout(self.attention_out(gathered)))
        return _merged(self.mlp_gate, hidden, self.dropout(self.mlp(self.mlp_norm(hidden))))


class _Gate(nn.Module):
    """The gate of GTrXL: a GRU cell whose state is the stream that passes by.

    ```text
    r = sigmoid(W_r y + U_r x)    z = sigmoid(W_z y + U_z x - b)    h = tanh(W_h y + U_h (r x))
    out = (1 - z) x + z h
    ```
    """

    def __init__(self, size: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.of_new = nn.Linear(size, 3 * size, bias=False, **place)
        self.of_stream = nn.Linear(size, 2 * size, bias=False, **place)
        self.of_reset = nn.Linear(size, size, bias=False, **place)
        self.bias = nn.Parameter(torch.full((size,), _GATE_BIAS, **place))

    def forward(self, stream: Tensor, new: Tensor) -> Tensor:
        """Let ``new`` into the stream; ``[N, size]`` each."""
        reset_new, update_new, candidate_new = self.of_new(new).chunk(3, -1)
        reset_stream, update_stream = self.of_stream(stream).chunk(2, -1)

        reset = (reset_new + reset_stream).sigmoid()
        update = (update_new + update_stream - self.bias).sigmoid()
        candidate = (candidate_new + self.of_reset(reset * stream)).tanh()
        return torch.lerp(stream, candidate, update)


def _merged(gate: _Gate | None, stream: Tensor, new: Tensor) -> Tensor:
    """Add a branch's output to the stream, or let it in by its gate."""
    if gate is None:
        return stream + new
    merged: Tensor = gate(stream, nn.functional.relu(new))
    return merged


def _turns(positions: Tensor, size: int) -> Tensor:
    """Return cosine and sine of each position's angles, float64 ``[N, 1, size / 2, 2]``.

    In float32 the angle of one of a million steps would be off by several degrees.
    """
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64) / size
    angles = positions[:, None, None] * torch.exp(exponents * -math.log(_BASE))
    return torch.stack([angles.cos(), angles.sin()], -1)


def _turned(rows: Tensor, turns: Tensor) -> Tensor:
    """Turn each two features of queries or keys ``[N, heads, size]`` by an angle of their position."""
    pairs = rows.view(*rows.shape[:-1], -1, 2)
    turns = turns.to(rows.dtype)
    if rows.dtype in (torch.float32, torch.float64) and not is_tracing():
        # as complex numbers, in one operation
        product = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
        return torch.view_as_real(product).flatten(-2)

    left, right = pairs.unbind(-1)
    cosine, sine = turns.unbind(-1)
    turned = torch.stack([left * cosine - right * sine, right * cosine + left * sine], -1)
    return turned.flatten(-2)

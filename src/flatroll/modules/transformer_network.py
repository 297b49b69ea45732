"""The network of `TransformerModule`: blocks of attention and MLP, called with any way to attend."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from flatroll.kernels.scan import is_tracing
from flatroll.layout.transfers import upload
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
        # No buffer, since a cast of the weights would round it; on the host, so that pickles need no device.
        self._angles = _angles_of_a_row(self.head_size)
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
            turns = self._turns(positions).to(rows.dtype)

        hidden: Tensor = self.embed(rows)
        for layer, one in enumerate(self.blocks):
            block = cast(_Block, one)
            projected = block.project(hidden)
            if without_gradient is not None:
                projected = torch.where(without_gradient[:, None], projected.detach(), projected)
            if turns is not None:
                projected = _turned(projected, turns)
            heads = projected.view(rows.shape[0], 3, self.num_heads, self.head_size)

            bias = None
            if self.distances is not None:
                bias = self.distances[layer]
            hidden = block(hidden, attention.attend(layer, heads, bias))

        out: Tensor = self.norm(hidden)
        if without_gradient is not None:
            out = torch.where(without_gradient[:, None], out.detach(), out)
        return out

    def _turns(self, positions: Tensor) -> Tensor:
        """Return cosine and sine of each position's angles, float64 ``[N, 1, 1, size / 2, 2]``.

        In float32 the angle of one of a million steps would be off by several degrees.
        """
        angles = positions[:, None, None, None] * upload(self._angles, positions.device)
        # The cosine as a sine: onnxruntime 1.28 has no cosine of float64.
        return torch.stack([angles + math.pi / 2, angles], -1).sin()


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
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
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


def _angles_of_a_row(size: int) -> Tensor:
    """Return by how much each pair of a head's features turns from a row to the next, float64 ``[size / 2]``."""
    exponents = torch.arange(0, size, 2, device="cpu", dtype=torch.float64) / size
    return torch.exp(exponents * -math.log(_BASE))


def _turned(projected: Tensor, turns: Tensor) -> Tensor:
    """Turn each two features of queries and keys by an angle of their position; may write into ``[N, 3 * size]``."""
    turns = turns.to(projected.dtype)
    if projected.dtype in (torch.float32, torch.float64) and not is_tracing():
        return cast(Tensor, _Turn.apply(projected, turns))  # type: ignore[no-untyped-call]  # torch leaves it so

    pairs = _pairs(projected, turns)
    left, right = pairs[:, :2].unbind(-1)
    cosine, sine = turns.unbind(-1)
    turned = torch.stack([left * cosine - right * sine, right * cosine + left * sine], -1)
    return torch.cat([turned, pairs[:, 2:]], 1).flatten(1)


def _pairs(projected: Tensor, turns: Tensor) -> Tensor:
    """View queries, keys and values as pairs of features, ``[N, 3, heads, size / 2, 2]``."""
    return projected.view(projected.shape[0], 3, -1, *turns.shape[-2:])


class _Turn(torch.autograd.Function):
    """Turns queries and keys in place, as complex numbers; the gradient is turned back, so no row is kept for it."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, turns: Tensor) -> Tensor:
        """Turn ``projected [N, 3 * size]`` by ``turns [N, 1, 1, head size / 2, 2]``."""
        ctx.save_for_backward(turns)
        ctx.mark_dirty(projected)
        pairs = torch.view_as_complex(_pairs(projected, turns)[:, :2])
        pairs.mul_(torch.view_as_complex(turns))
        return projected

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Turn the gradient back."""
        (turns,) = ctx.saved_tensors
        back = turns * turns.new_tensor([1, -1])
        return _Turn.apply(grads[0].clone(), back), None  # type: ignore[no-untyped-call]  # torch leaves it so

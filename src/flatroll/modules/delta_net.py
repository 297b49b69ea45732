"""DeltaNetModule: gated DeltaNet, a matrix memory written by the delta rule."""

from typing import Any, ClassVar, NamedTuple, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from flatroll.layout.checks import check_number, check_whole_number
from flatroll.layout.transfers import upload
from flatroll.modules.backends.packing import RunIndex, States, run_index
from flatroll.modules.networks import check_sizes
from flatroll.modules.stateful import StatefulModule, StatefulOptions

#: Rows of a chunk, among which each batch chooses.
_CHUNK_ROWS = (2, 4, 8, 16, 32, 64)


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

    The recurrence is linear, but its transition is a matrix, so that runs are computed by chunks of up to 64 rows: each
    chunk by products of matrices, chunk after chunk. The convolutions of the paper are left out. The state is
    ``[*B, num_layers, hidden_size ** 2 / num_heads]``, which is much for a row: collect with ``state_stride``, or train
    with ``state="zero"``. In recurrent mode the next states are exact on the last row of each run and zeros elsewhere,
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
            query, key, value = _queries_keys_values(row.vectors.transpose(0, 1))
            memory = states[0][:, layer].unflatten(-1, self._matrices)

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
        # the one wait for a device: the number of chunks decides shapes
        index = run_index(starts.cpu())
        chunks = _Chunks.of(index, rows.device)
        begins = upload(index.first, rows.device)
        ends = upload(index.last, rows.device)

        finals: list[Tensor] = []
        for layer in range(self.num_layers):
            row = self._enter(layer, rows)
            first = stored[0][:, layer].index_select(0, begins)
            seen, final = delta_rule(row, first.unflatten(-1, self._matrices), chunks)
            finals.append(final.flatten(1))
            rows = self._leave(layer, seen, row.gate)

        final = torch.stack(finals, 1)
        after = _zeros((len(rows), *self._state_shape), final).index_copy_(0, ends, final)
        return rows, (after,)

    def _enter(self, layer: int, rows: Tensor) -> "HeadRows":
        vectors, gate, step, write = self.inputs[layer](rows).split(self._parts, -1)
        decay = -self.log_rates[layer].exp() * F.softplus(step + self.step_bias[layer])
        return HeadRows(vectors.unflatten(-1, (3, self.num_heads, -1)), decay, write.sigmoid(), gate)

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


class HeadRows(NamedTuple):
    """What each row brings to the memories of its heads.

    Attributes:
        vectors: query, key and value before their functions, ``[N, 3, heads, d]``.
        decay: logarithm of how much is kept, ``[N, heads]``.
        write: how much is written, ``[N, heads]``.
        gate: of the output, ``[N, H]``.
    """

    vectors: Tensor
    decay: Tensor
    write: Tensor
    gate: Tensor


def _queries_keys_values(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three of ``[3, *B, d]``, each ``[*B, d]``: queries and keys have length 1, short ones less.

    Those of a row of zeros are zeros, with a gradient that is finite.
    """
    passed = F.silu(vectors)
    turned = passed[:2]
    scale = (turned.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    query, key = (turned * scale).unbind(0)
    return query, key, passed[2]


class _Chunks(NamedTuple):
    """Runs cut into chunks of C rows, the last one of a run filled up with rows that do nothing.

    The chunks lie step by step: first the first chunk of every run, longest run first, then the second ones.

    Attributes:
        rows: C.
        widths: number of runs that have a chunk at each step.
        place: int64 ``[N]``, the row of each row of the batch in the table of all chunks.
    """

    rows: int
    widths: list[int]
    place: Tensor

    @classmethod
    def of(cls, index: RunIndex, device: torch.device) -> "_Chunks":
        """Cut the runs of an index on the host into chunks of the length that costs least."""
        first = index.first
        lengths = index.last - first + 1
        rows = min(_CHUNK_ROWS, key=lambda count: _cost(lengths, count))

        counts = (lengths + rows - 1) // rows
        widths = len(counts) - counts.bincount().cumsum(0)[:-1]
        before = widths.cumsum(0) - widths  # number of chunks of earlier steps

        # for the rows of all runs, in the order of their ranks: the step within the run, and the place in the table
        total = int(lengths.sum())
        step = torch.arange(total) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        rank = torch.arange(len(lengths)).repeat_interleave(lengths)
        in_table = (before[step // rows] + rank) * rows + step % rows
        place = torch.empty_like(in_table).scatter_(0, first[rank] + step, in_table)
        return cls(rows, widths.tolist(), upload(place, device))

    def table(self, column: Tensor) -> Tensor:
        """Lay out rows ``[N, K]`` as ``[chunks, C, K]``, with zeros where there is no row."""
        empty = column.new_zeros(sum(self.widths) * self.rows, column.shape[1])
        return empty.index_copy_(0, self.place, column).unflatten(0, (-1, self.rows))

    def flat(self, table: Tensor) -> Tensor:
        """The reverse: rows ``[N, K]`` of ``[chunks, C, K]``."""
        return table.flatten(0, 1).index_select(0, self.place)


def _cost(lengths: Tensor, rows: int) -> float:
    """What chunks of so many rows cost, in rows of the table: measured on the CPU with heads of 16 and 32 numbers.

    The products within a chunk grow with its square; a chunk costs a memory, and a step over chunks its calls.
    """
    counts = (lengths + rows - 1) // rows
    return int(counts.sum()) * (rows + rows**3 / 2048 + 8) + int(counts[0]) * 10


def delta_rule(rows: HeadRows, first: Tensor, chunks: _Chunks) -> tuple[Tensor, Tensor]:
    """Compute what each row reads, and the memory after each run, by the chunked form of the gated delta rule.

    Within a chunk that begins with the memory S, and with g the product of the ``a`` up to a row, each row writes
    ``u = e (v - g S k - sum of earlier g / g_j (k_j k) u_j)``: a triangular system for all rows of the chunk at once,
    solved for S = 0 and for the factor of S before S is known.

    Args:
        rows: of the batch.
        first: memories at the beginning of runs, longest run first, ``[R, heads, d, d]`` (key, value).
        chunks: of the same runs.

    Returns:
        what is read, ``[N, heads, d]``, and memories after the last rows of runs, as ``first``.
    """
    heads, size = rows.vectors.shape[2:]
    # [P, heads, C, ...] of P chunks; one copy turns the vectors
    vectors = chunks.table(rows.vectors.flatten(1)).unflatten(-1, (3, heads, size))
    query, key, value = _queries_keys_values(vectors.permute(2, 0, 3, 1, 4).contiguous())
    decay, write = chunks.table(torch.cat([rows.decay, rows.write], 1)).chunk(2, -1)
    write = write.transpose(1, 2).unsqueeze(-1)

    # fade[i, j] is the product of the factors behind row j up to row i, 0 for later rows; masked before exp, which
    # would overflow there
    summed = decay.transpose(1, 2).cumsum(-1)
    later = torch.ones(chunks.rows, chunks.rows, dtype=torch.bool, device=decay.device).triu(1)
    fade = (summed.unsqueeze(-1) - summed.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    entry = summed.exp().unsqueeze(-1)  # from the beginning of the chunk up to each row
    leaving = fade[..., -1:, :].transpose(-1, -2)  # from each row to the end of the chunk

    system = write * fade * (key @ key.transpose(-1, -2))
    sides = torch.cat([write * value, write * entry * key], -1)
    own, of_memory = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).chunk(
        2, -1
    )
    written_key = (leaving * key).transpose(-1, -2)

    # chunk after chunk; runs that have ended come last, because they are the shortest
    memory = first.to(own.dtype)
    begins: list[Tensor] = []
    ended: list[Tensor] = []
    steps = [torch.split(x, chunks.widths) for x in (own, of_memory, written_key, entry[..., -1:, :])]
    for width, own_now, of_memory_now, key_now, kept in zip(chunks.widths, *steps, strict=True):
        if width < len(memory):
            ended.append(memory[width:])
            memory = memory[:width]
        begins.append(memory)
        memory = kept * memory + key_now @ (own_now - of_memory_now @ memory)
    ended.append(memory)

    before = torch.cat(begins)
    new = own - of_memory @ before
    seen = (entry * query) @ before + (fade * (query @ key.transpose(-1, -2))) @ new
    read = chunks.flat(seen.transpose(1, 2).flatten(2)).unflatten(-1, (heads, -1))
    return read, torch.cat(ended[::-1])

"""The gated delta rule over the runs of a flat batch: by a loop on the CPU, elsewhere by chunks of rows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flatroll.kernels.delta import BLOCK, forward_loop, gradient_loop
from flatroll.kernels.scan import is_tracing, machine_code
from flatroll.layout.transfers import upload
from flatroll.modules.backends.packing import RunIndex, run_index

#: Rows of a chunk, among which each batch chooses.
_CHUNK_ROWS = (2, 4, 8, 16, 32, 64)


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


def queries_keys_values(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three of ``[3, *B, d]``, each ``[*B, d]``: queries and keys have length 1, short ones less.

    Those of a row of zeros are zeros, with a gradient that is finite.
    """
    passed = F.silu(vectors)
    turned = passed[:2]
    scale = (turned.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    query, key = (turned * scale).unbind(0)
    return query, key, passed[2]


def delta_rule(rows: HeadRows, stored: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what each row reads, and the memory after each run.

    Args:
        rows: of the batch.
        stored: memories ``[N, heads, d, d]`` (key, value), read at first rows.
        starts: bool ``[N]`` on the CPU, True at the first row of each run, row 0 among them.

    Returns:
        what is read, ``[N, heads, d]``; the last rows of runs, int64 ``[R]``, and the memories after them,
        ``[R, heads, d, d]``.
    """
    if _loops(rows, stored):
        first = starts.nonzero().squeeze(1)
        query, key, value = queries_keys_values(rows.vectors.transpose(0, 1).contiguous())
        read, final = _Loop.apply(  # type: ignore[no-untyped-call]
            query, key, value, rows.decay.exp(), rows.write, stored.index_select(0, first), starts
        )
        last = torch.cat([first[1:] - 1, first.new_tensor([len(starts) - 1])])
        return read, last, final

    # the one wait for a device: the number of chunks decides shapes
    index = run_index(starts)
    device = rows.vectors.device
    chunks = _Chunks.of(index, device)
    first = stored.index_select(0, upload(index.first, device))
    read, final = _by_chunks(rows, first, chunks)
    return read, upload(index.last, device), final


def _loops(rows: HeadRows, stored: Tensor) -> bool:
    """Whether the loop can read the values."""
    columns = (rows.vectors, rows.decay, rows.write, stored)
    if is_tracing() or any(type(x) is not Tensor or not x.is_cpu for x in columns):
        return False
    return stored.dtype in (torch.float32, torch.float64) and all(x.dtype is stored.dtype for x in columns)


class _Loop(torch.autograd.Function):
    """The rule by a loop over rows, and its gradients by another."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        fade: Tensor,
        write: Tensor,
        first: Tensor,
        starts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = len(query)
        columns = tuple(x.detach().contiguous() for x in (query, key, value, fade, write))
        first = first.contiguous()
        kept = first.new_empty(-(-rows // BLOCK), *first.shape[1:])
        off = torch.empty_like(columns[2])
        read = torch.empty_like(columns[2])
        final = torch.empty_like(first)
        machine_code(forward_loop, sums_in_any_order=True)(
            tuple(x.numpy() for x in columns),
            first.detach().numpy(),
            starts.numpy(),
            *(x.numpy() for x in (kept, off, read, final)),
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*columns, first, starts, kept, off)
        return read, final

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gated delta rule is differentiable once on the CPU: leave out create_graph=True, or compute on "
                "another device"
            )
        of_read, of_final = grad_outputs
        *columns, first, starts, kept, off = ctx.saved_tensors
        if of_read is None:
            of_read = torch.zeros_like(off)
        if of_final is None:
            of_final = torch.zeros_like(first)

        results = [torch.empty_like(x) for x in columns]
        of_first = torch.empty_like(first)
        machine_code(gradient_loop, sums_in_any_order=True)(
            tuple(x.numpy() for x in columns),
            first.numpy(),
            starts.numpy(),
            (kept.numpy(), off.numpy()),
            of_read.contiguous().numpy(),
            of_final.contiguous().numpy(),
            tuple(x.numpy() for x in results),
            of_first.numpy(),
        )
        return *results, of_first, None


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
        return empty.index_copy_(0, self.place, column).view(-1, self.rows, column.shape[1])

    def flat(self, table: Tensor) -> Tensor:
        """The reverse: rows ``[N, K]`` of ``[chunks, C, K]``."""
        return table.flatten(0, 1).index_select(0, self.place)


def _cost(lengths: Tensor, rows: int) -> float:
    """What chunks of so many rows cost, in rows of the table: measured on the CPU with heads of 16 and 32 numbers.

    The products within a chunk grow with its square; a chunk costs a memory, and a step over chunks its calls.
    """
    counts = (lengths + rows - 1) // rows
    return int(counts.sum()) * (rows + rows**3 / 2048 + 8) + int(counts[0]) * 10


def _by_chunks(rows: HeadRows, first: Tensor, chunks: _Chunks) -> tuple[Tensor, Tensor]:
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
    vectors = chunks.table(rows.vectors.flatten(1)).view(-1, chunks.rows, 3, heads, size)
    query, key, value = queries_keys_values(vectors.permute(2, 0, 3, 1, 4).contiguous())
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
    read = chunks.flat(seen.transpose(1, 2).flatten(2)).view(-1, heads, size)
    return read, torch.cat(ended[::-1])

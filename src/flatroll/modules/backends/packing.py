"""Runs ``nn.GRU`` and ``nn.LSTM`` over the runs of a flat batch as a packed sequence, without padding.

Runs are sorted by length, longest first, and their rows laid out step by step: first the first row of every
run, then the second row of every run that has one, and so on. That is the order of
:class:`torch.nn.utils.rnn.PackedSequence`, so there is no padding and no loop over runs or rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from flatroll.layout.transfers import upload

#: The states of a network: one tensor of a GRU (hidden), two of an LSTM (hidden, cell).
States: TypeAlias = tuple[Tensor, ...]
#: Maps a network, rows ``[N, input_size]``, initial states ``[num_layers, R, H]`` in rank order and the runs
#: to outputs ``[N, H]`` and final states.
Backend: TypeAlias = Callable[[nn.RNNBase, Tensor, States, "RunIndex"], tuple[Tensor, States]]

#: A stretch of at least this many steps without a run end is one dense call, which is fastest on the CPU.
DENSE_STEPS = 8
#: The rest is split into packed calls of about this many rows: on the CPU the backward pass of each step touches
#: every row of its call, so one call over N rows costs N x steps.
PACKED_ROWS = 512


@dataclass(frozen=True)
class RunIndex:
    """Maps the rows of a flat batch to packed order; runs are ranked by length, longest first.

    Attributes:
        batch_sizes: int64 ``[T_max]`` on the CPU: the number of runs that have a row at each step.
        first: int64 ``[R]``, the first row of each run, in rank order.
        last: int64 ``[R]``, its last row.
        order: int64 ``[N]``, the row at each packed position, or None where all runs have one length:
            the batch is then ``[R, T]`` without reordering.
        place: int64 ``[N]``, the packed position of each row (the inverse of ``order``), or None.
    """

    batch_sizes: Tensor
    first: Tensor
    last: Tensor
    order: Tensor | None
    place: Tensor | None


def run_index(starts: Tensor, device: torch.device | None = None) -> RunIndex:
    """Build the :class:`RunIndex` of a flat batch from the first rows of its runs.

    The number of runs and the step sizes decide shapes, and ``PackedSequence`` wants its ``batch_sizes`` on
    the CPU, so ``starts`` is copied there once: N bools, the one host sync of a recurrent pass.

    Args:
        starts: bool ``[N]``, True on the first row of every run, row 0 among them.
        device: of the index. Default: that of ``starts``.

    Raises:
        ValueError: there is no row.

    >>> index = run_index(torch.tensor([True, False, True, False, False]))
    >>> index.batch_sizes.tolist(), index.first.tolist(), index.last.tolist()
    ([2, 2, 1], [2, 0], [4, 1])
    >>> index.order.tolist(), index.place.tolist()
    ([2, 0, 3, 1, 4], [1, 3, 0, 2, 4])
    """
    rows = starts.numel()
    if rows == 0:
        raise ValueError("batch must have at least one row, got batch size [0]")

    if device is None:
        device = starts.device
    starts = starts.cpu()
    first = starts.nonzero().squeeze(1)
    # lengths of the runs, and the number of runs longer than t for each step t
    lengths = first.diff(append=first.new_tensor([rows]))
    sorted_lengths, by_rank = lengths.sort(descending=True, stable=True)
    batch_sizes = first.numel() - lengths.bincount().cumsum(0)[:-1]
    first_ranked = first[by_rank]

    order = None
    place = None
    if sorted_lengths[0] != sorted_lengths[-1]:
        # step t begins at the total size of the steps before it; within a step, rows are in rank order of their runs
        rank = torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(first.numel()))
        run = starts.cumsum(0) - 1
        row = torch.arange(rows)
        place = (batch_sizes.cumsum(0) - batch_sizes)[row - first[run]] + rank[run]
        order = torch.empty_like(place).scatter_(0, place, row)
        order = upload(order, device)
        place = upload(place, device)

    last = first_ranked + sorted_lengths - 1
    return RunIndex(batch_sizes, upload(first_ranked, device), upload(last, device), order, place)


def call(net: nn.RNNBase, rows: Tensor | PackedSequence, states: States) -> tuple[Tensor, States]:
    """Call ``nn.GRU`` or ``nn.LSTM`` on rows or a packed sequence; states are tuples for both."""
    states = tuple(state.contiguous() for state in states)
    if net.mode == "LSTM":
        out, final = net(rows, states)
    else:
        out, last = net(rows, states[0])
        final = (last,)
    data: Tensor = out.data if isinstance(out, PackedSequence) else out
    return data, final


def dense(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Run the network on runs of equal length T as one ``[R, T]`` batch; the same numbers as ``nn.GRU``."""
    out, finals = call(net, rows.view(index.first.numel(), -1, rows.shape[-1]), states)
    return out.reshape(rows.shape[0], -1), finals


class PackedSteps(NamedTuple):
    """Some consecutive steps of a packed batch that go to the network in one call."""

    steps: int
    rows: int
    width: int  # number of runs at the first of these steps
    dense: bool  # whether all steps have the same runs


def pieces(batch_sizes: Tensor) -> list[PackedSteps]:
    """Split a packed batch into dense stretches and packed calls of limited size.

    At most one entry is visited per distinct run length, of which N rows have fewer than sqrt(2 N).

    >>> pieces(torch.tensor([3, 2] + [1] * 10))
    [PackedSteps(steps=2, rows=5, width=3, dense=False), PackedSteps(steps=10, rows=10, width=1, dense=True)]
    """
    cut: list[PackedSteps] = []
    steps = 0
    rows = 0
    width = 0

    sizes, counts = batch_sizes.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]  # torch leaves it so
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        stretch = count >= DENSE_STEPS
        if steps and (stretch or rows >= PACKED_ROWS):
            cut.append(PackedSteps(steps, rows, width, dense=False))
            steps = 0
            rows = 0
        if stretch:
            cut.append(PackedSteps(count, size * count, size, dense=True))
            continue

        if not steps:
            width = size  # the width of a piece is that of its first step
        steps = steps + count
        rows = rows + size * count

    if steps:
        cut.append(PackedSteps(steps, rows, width, dense=False))
    return cut


def packed(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Run a batch-first network over flat rows without padding.

    On the CPU the packed batch goes through in :func:`pieces`, each starting from the final states of the previous
    one; on other devices, and for a bidirectional network, it is one call.

    Args:
        net: ``nn.GRU`` or ``nn.LSTM`` with ``batch_first=True``.
        rows: ``[N, input_size]`` in the batch's order.
        states: initial states, each ``[num_layers, R, size]`` in rank order.
        index: the runs.

    Returns:
        outputs ``[N, hidden_size]`` in the batch's order, and final states like ``states``.
    """
    if index.order is None or index.place is None:
        return dense(net, rows, states, index)

    rows = rows.index_select(0, index.order)
    if net.bidirectional or rows.device.type != "cpu":
        out, finals = call(net, PackedSequence(rows, index.batch_sizes), states)
    else:
        out, finals = _run_in_pieces(net, rows, states, index.batch_sizes)

    return out.index_select(0, index.place), finals


def _run_in_pieces(net: nn.RNNBase, rows: Tensor, states: States, sizes: Tensor) -> tuple[Tensor, States]:
    cut = pieces(sizes)
    outs: list[Tensor] = []
    ended: list[States] = []  # final states of the runs that ended before each piece, shortest runs first
    by_piece = zip(
        cut, torch.split(rows, [p.rows for p in cut]), torch.split(sizes, [p.steps for p in cut]), strict=True
    )

    for piece, part, part_sizes in by_piece:
        # runs that ended before this piece are last in rank order: set their final states aside
        if piece.width < states[0].shape[1]:
            ended.append(tuple(state[:, piece.width :] for state in states))
            states = tuple(state[:, : piece.width] for state in states)

        if piece.dense:
            steps_first = part.view(piece.steps, piece.width, -1)
            out, states = call(net, steps_first.transpose(0, 1), states)
            outs.append(out.transpose(0, 1).reshape(piece.rows, -1))
        else:
            out, states = call(net, PackedSequence(part, part_sizes), states)
            outs.append(out)

    finals = tuple(torch.cat(kind, dim=1) for kind in zip(states, *reversed(ended), strict=True))
    return torch.cat(outs), finals


def padded(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Baseline: pad all runs to the longest, run the network, and remove the padding.

    Arguments and results as for :func:`packed`.
    """
    if index.order is None or index.place is None:
        return dense(net, rows, states, index)

    flat = PackedSequence(rows.index_select(0, index.order), index.batch_sizes)
    table, lengths = pad_packed_sequence(flat, batch_first=True)
    sequence = pack_padded_sequence(table, lengths, batch_first=True)
    states = tuple(state.contiguous() for state in states)
    if net.mode == "LSTM":
        out, finals = net(sequence, states)
    else:
        out, last = net(sequence, states[0])
        finals = (last,)

    table, _ = pad_packed_sequence(out, batch_first=True)
    out_rows = pack_padded_sequence(table, lengths, batch_first=True).data
    return out_rows.index_select(0, index.place), finals

"""Burn-in inside a module: the first rows of each run update the state without gradient."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flatroll.layout.boundaries import steps_into_run
from flatroll.modules.backends.packing import States

#: Rows ``[N, in]``, states ``[N, *state]`` that are read at first rows, bool ``[N]`` that marks them; to outputs and
#: states after each row, exact at the last rows of runs.
OverRuns: TypeAlias = Callable[[Tensor, States, Tensor], tuple[Tensor, States]]


def run_with_burn_in(
    over_runs: OverRuns, rows: Tensor, stored: States, starts: Tensor, burn_in: int
) -> tuple[Tensor, States]:
    """Call ``over_runs(rows, stored, starts)`` with no gradient for the first ``burn_in`` rows of each run.

    The rest of a run starts from the state that these rows leave: the same numbers, and gradients that end there.

    Args:
        over_runs: outputs and states of whole runs.
        rows: ``[N, in]``.
        stored: states ``[N, *state]``, read at first rows.
        starts: bool ``[N]``, True at first rows.
        burn_in: rows of each run, 0 for none.
    """
    if not burn_in or not torch.is_grad_enabled():
        return over_runs(rows, stored, starts)
    # head: the rows to burn in; entry: the first row after them, which takes over the state
    step = steps_into_run(starts)
    head, entry = step < burn_in, step == burn_in
    if torch.compiler.is_compiling():
        return _of_fixed_shape(over_runs, rows, stored, starts | entry, head, entry)
    # numbers of the rows of both parts, each of which is a flat batch of shorter runs
    first, rest = (flag.nonzero().squeeze(1) for flag in (head, ~head))
    with torch.no_grad():
        part = tuple(state.index_select(0, first) for state in stored)
        head_out, head_after = over_runs(rows.index_select(0, first), part, starts.index_select(0, first))
    if not len(rest):
        return head_out, head_after
    # where the entry rows stand in the rest, and where the rows before them stand in the head
    entered = entry.index_select(0, rest)
    at = entered.nonzero().squeeze(1)
    before = torch.searchsorted(first, rest.index_select(0, at) - 1)
    left = [after.index_select(0, before) for after in head_after]
    part = tuple(
        state.index_select(0, rest).index_copy(0, at, after.to(state.dtype).view(-1, *state.shape[1:]))
        for state, after in zip(stored, left, strict=True)
    )
    out, after = over_runs(rows.index_select(0, rest), part, entered)

    def merged(of_head: Tensor, of_rest: Tensor) -> Tensor:
        both = of_rest.new_empty(len(rows), *of_rest.shape[1:])
        return both.index_copy_(0, first, of_head.to(both.dtype)).index_copy_(0, rest, of_rest)

    return merged(head_out, out), tuple(map(merged, head_after, after))


def _of_fixed_shape(
    over_runs: OverRuns, rows: Tensor, stored: States, starts: Tensor, head: Tensor, entry: Tensor
) -> tuple[Tensor, States]:
    """The same by two passes over all rows: no shape depends on where runs begin."""
    with torch.no_grad():
        _, warm = over_runs(rows, stored, starts)
    # an entry row starts from the state after the row before it
    entered = tuple(
        torch.where(entry[:, None, None], after.roll(1, 0).to(state.dtype).view_as(state), state.detach())
        for state, after in zip(stored, warm, strict=True)
    )
    out, after = over_runs(rows, entered, starts)

    def cut(column: Tensor) -> Tensor:
        return torch.where(head.view(-1, *[1] * (column.ndim - 1)), column.detach(), column)

    return cut(out), tuple(map(cut, after))

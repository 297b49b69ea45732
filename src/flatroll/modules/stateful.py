"""Base class of the recurrent modules, whose states are small enough to be stored in each row."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, TypeAlias, Unpack, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.layout.boundaries import steps_into_run
from flatroll.layout.checks import check_choice
from flatroll.layout.column_actor import Columns
from flatroll.layout.keys import HAS_STATE, MASK, NestedKey, marker, next_key
from flatroll.layout.transfers import upload
from flatroll.modules.backends.packing import States
from flatroll.modules.memory import MemoryModule, MemoryOptions
from flatroll.modules.mode import burn_in_rows
from flatroll.modules.primer import TensorDictPrimer


class StatefulOptions(MemoryOptions, total=False):
    """Keyword arguments of every stateful module; :class:`flatroll.modules.GRUModule` documents them."""

    state: str


class StatefulModule(MemoryModule):
    """A tensordict module with a recurrent state, carried from each row of a run to the next.

    A subclass defines its default state keys, sets ``input_size`` and implements one step (:meth:`step`) and whole
    runs (:meth:`over_runs`). Each state is in the tensordict as ``[*B, *state_shape]``.

    Args:
        state_shape: layers and features of one row's state.
        others: see :class:`flatroll.modules.GRUModule`.
    """

    state_keys: ClassVar[tuple[str, ...]] = ("recurrent_state",)
    #: What the two sizes of a state are, for errors.
    state_meaning: ClassVar[str] = "num_layers x hidden_size"
    #: Whether autocast on the CPU would cover only a part of the network. If so, it is turned off for the network.
    autocast_in_part: ClassVar[bool] = False
    #: Whether outputs depend on rows that come later in their run.
    bidirectional: bool = False

    def __init__(
        self,
        state_shape: tuple[int, int],
        *,
        state: str = "stored",
        **options: Unpack[MemoryOptions],
    ) -> None:
        check_choice("state", state, ("stored", "zero"))
        super().__init__(**options)
        self.state = state
        self._state_shape = state_shape

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """Compute one step: rows ``[B, input_size]``, states ``[B, *state_shape]`` to outputs and states."""
        raise NotImplementedError

    def over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        """Compute outputs and states after each of N rows; ``starts`` (bool ``[N]``) marks run starts.

        ``stored`` are states ``[N, *state_shape]``; those of first rows are what their runs start from.
        """
        raise NotImplementedError

    def in_weight_precision(
        self, compute: Callable[..., tuple[Tensor, States]], rows: Tensor, states: States, *more: Tensor
    ) -> tuple[Tensor, States]:
        """Call ``compute(rows, states, *more)``, with autocast off if it would affect only a part of it."""
        if not self.autocast_in_part or rows.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return compute(rows, states, *more)

        dtype = self.weight.dtype
        with torch.autocast("cpu", enabled=False):
            return compute(rows.to(dtype), tuple(state.to(dtype) for state in states), *more)

    @override
    def on_columns(self, columns: Columns) -> None:
        """Do what :meth:`forward` does in sequential mode, with columns ``[E, ...]`` by key."""
        is_init = columns[self._init_key].reshape(-1, 1, 1)
        before = []
        for key in self._state_in:
            columns[key] = columns[key].masked_fill(is_init, 0)
            before.append(columns[key])

        out, after = self.in_weight_precision(self.step, columns[self._input_key], tuple(before))
        columns[self._output_key] = out
        for key, state in zip(self._state_out, after, strict=True):
            columns[key] = state

    @override
    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the initial states of episodes: zeros ``[num_layers, hidden_size]`` for each state key.

        Raises:
            RuntimeError: an out key is not ``("next", in_key)``, so the state cannot be carried.
        """
        self._check_carried()
        zeros = self.weight.detach().new_zeros(self._state_shape)
        return TensorDictPrimer(dict.fromkeys(self._state_in, zeros))

    @override
    def _forward_steps(self, batch: TensorDictBase) -> tuple[Tensor, Columns]:
        """Return outputs and states after each row; every row is one step, from zeros at is_init. No host sync."""
        is_init = marker(batch, self._init_key)
        rows = self._input_rows(batch)
        before = [self._state_before(batch, key, is_init) for key in self._state_in]
        states = tuple(state.reshape(-1, *self._state_shape) for state in before)
        out, after = self.in_weight_precision(self.step, rows, states)
        return out, self._states_after(batch, after)

    def _states_after(self, batch: TensorDictBase, after: States) -> Columns:
        """Return the states ``[N, ...]`` after each row in the batch's shape, by key."""
        shape = (*batch.batch_size, *self._state_shape)
        return {key: state.reshape(shape) for key, state in zip(self._state_out, after, strict=True)}

    def _state_before(self, batch: TensorDictBase, key: NestedKey, is_init: Tensor) -> Tensor:
        """Return the state before each row; it replaces the stored one, so that a batch holds the state used."""
        stored = batch.get(key, None)
        if stored is not None:
            self._check_state(batch, key, stored)
            state: Tensor = stored.masked_fill(is_init[..., None, None], 0)
        # without a state every row must be a first row; checked only where it needs no host sync
        elif is_init.device.type == "cpu" and not bool(is_init.all()):
            raise KeyError(
                f"batch has no entry {key!r}, and some rows are not is_init rows: carry {next_key(key)!r} of "
                f"each step to the root of the next one (Collector does it), or begin with "
                f"batch.update(module.make_tensordict_primer().expand(batch.batch_size))"
            )
        else:
            state = self.weight.new_zeros(*batch.batch_size, *self._state_shape)

        batch.set(key, state)
        return state

    def _refuse_thinned_states(self, batch: TensorDictBase, starts: Tensor) -> None:
        """Check that runs begin at rows with stored states; skipped where it would sync with the host."""
        has_state = batch.get(HAS_STATE, None)
        if has_state is None or self.state == "zero":
            return
        if torch.compiler.is_compiling() or has_state.device.type != "cpu":
            return

        lost = starts.cpu() & ~marker(batch, HAS_STATE)
        if batch.get(MASK, None) is not None:
            lost &= marker(batch, MASK)  # padding starts its own runs

        if bool(lost.any()):
            raise ValueError(
                f"{int(lost.sum())} of the runs begin at rows that do not store their state ({HAS_STATE!r} is False "
                "there): draw slices with SliceSampler, which begins them at rows that do, collect with "
                f"state_stride=1, or start every run from zeros with {type(self).__name__}(..., state='zero')"
            )

    @override
    def _forward_runs(self, batch: TensorDictBase) -> tuple[Tensor, Columns]:
        """Outputs and states; the rows are runs of consecutive steps, each from the state stored at its first row."""
        starts = self._run_starts(batch)
        rows = self._input_rows(batch)
        self._refuse_thinned_states(batch, starts)
        self._check_order(batch, starts)

        stored = tuple(
            self._stored_state(batch, key).reshape(-1, *self._state_shape) for key in self._state_in
        )

        burn_in = burn_in_rows()
        if burn_in and self.bidirectional:
            raise ValueError(
                "a bidirectional network reads later rows, so no row can serve only as burn-in: "
                f"burn_in={burn_in} needs a unidirectional network"
            )

        over_runs = partial(self.in_weight_precision, self.over_runs)
        out, after = run_with_burn_in(over_runs, rows, stored, starts.flatten(), burn_in)
        return out, self._states_after(batch, after)

    def _stored_state(self, batch: TensorDictBase, key: NestedKey) -> Tensor:
        if self.state == "zero":
            return self.weight.new_zeros(()).expand(*batch.batch_size, *self._state_shape)

        stored = batch.get(key, None)
        if stored is None:
            raise KeyError(
                f"batch has no entry {key!r}, the state each run starts from: collect with this module's "
                f"primer (Collector calls make_tensordict_primer() automatically), or start every run from zeros "
                f"with {type(self).__name__}(..., state='zero')"
            )
        self._check_state(batch, key, stored)
        return cast(Tensor, stored)

    def _check_state(self, batch: TensorDictBase, key: NestedKey, state: Tensor) -> None:
        """Refuse a state that is not ``[*B, *state_shape]`` in the dtype of the weights."""
        first, second = self._state_shape
        self._check(batch, key, state, self._state_shape, f"{self.state_meaning} = {first} x {second}")


#: Maps rows ``[N, in]``, states ``[N, *state]`` (read at first rows) and a bool ``[N]`` that marks first
#: rows, on the rows' device or on the CPU, to outputs and the states after each row, which are exact at the last rows
#: of runs.
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

    compiling = torch.compiler.is_compiling()
    if not compiling:
        starts = starts.cpu()  # the one wait: the sizes of both parts are needed

    # head: the rows to burn in; entry: the first row after them, which takes over the state
    step = steps_into_run(starts)
    head = step < burn_in
    entry = step == burn_in
    if compiling:
        return _run_fixed_shapes(over_runs, rows, stored, starts | entry, head, entry)

    # indices of the rows of both parts; each part is a flat batch of shorter runs
    first, rest = (flag.nonzero().squeeze(1) for flag in (head, ~head))
    starts_of_head = starts.index_select(0, first)

    # positions of the entry rows in the rest, and of the rows before them in the head
    entered = entry.index_select(0, rest)
    at = entered.nonzero().squeeze(1)
    before = torch.searchsorted(first, rest.index_select(0, at) - 1)

    first, rest, at, before = (upload(index, rows.device) for index in (first, rest, at, before))
    with torch.no_grad():
        part = tuple(state.index_select(0, first) for state in stored)
        head_out, head_after = over_runs(rows.index_select(0, first), part, starts_of_head)

    if not len(rest):
        return head_out, head_after

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


def _run_fixed_shapes(
    over_runs: OverRuns, rows: Tensor, stored: States, starts: Tensor, head: Tensor, entry: Tensor
) -> tuple[Tensor, States]:
    """The same by two passes over all rows: no shape depends on where runs begin."""
    with torch.no_grad():
        _, warm = over_runs(rows, stored, starts)

    # the first row after burn-in starts from the state after the previous row
    entered = tuple(
        torch.where(entry[:, None, None], after.roll(1, 0).to(state.dtype).view_as(state), state.detach())
        for state, after in zip(stored, warm, strict=True)
    )
    out, after = over_runs(rows, entered, starts)

    def cut(column: Tensor) -> Tensor:
        return torch.where(head.view(-1, *[1] * (column.ndim - 1)), column.detach(), column)

    return cut(out), tuple(map(cut, after))

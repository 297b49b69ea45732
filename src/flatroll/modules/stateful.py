"""Base class of the recurrent modules: keys, states and checks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeAlias, TypedDict, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from flatroll.kernels.scan import is_tracing
from flatroll.layout.boundaries import run_starts, steps_into_run
from flatroll.layout.checks import check_choice, check_key_names, check_keys
from flatroll.layout.column_actor import Columns
from flatroll.layout.following import check_runs_in_order
from flatroll.layout.keys import (
    DONE,
    HAS_STATE,
    IS_INIT,
    MASK,
    OBSERVATION,
    TRAJ_IDS,
    NestedKey,
    as_tuple,
    marker,
    next_key,
    plain_key,
    require,
)
from flatroll.layout.transfers import upload
from flatroll.modules.backends.packing import States
from flatroll.modules.mode import Mode, burn_in_rows, check_mode, recurrent_mode
from flatroll.modules.primer import TensorDictPrimer

# The order of rows is checked in the first calls and in every 16th one after them.
_FIRST_CALLS = 4
_EVERY = 16
_WAY_OUT = (
    "Call the module on the batch as it was collected or on slices (SliceSampler), before you shuffle, index or filter "
    "rows, or set is_init where a run begins"
)


class StatefulOptions(TypedDict, total=False):
    """Keyword arguments of every stateful module; :class:`flatroll.modules.GRUModule` documents them."""

    in_key: NestedKey | None
    in_keys: Sequence[NestedKey] | None
    out_key: NestedKey | None
    out_keys: Sequence[NestedKey] | None
    default_recurrent_mode: Mode
    state: str
    done_key: NestedKey
    traj_key: NestedKey


def _key_list(
    name: str, key: NestedKey | None, keys: Sequence[NestedKey] | None, states: Sequence[NestedKey]
) -> list[NestedKey]:
    """``keys``, or ``key`` followed by the default state keys."""
    if (key is None) == (keys is None):
        raise ValueError(f"exactly one of {name} and {name}s must be given, got {key!r} and {keys!r}")
    if isinstance(keys, str):
        raise TypeError(f"{name}s must be a list of keys, got the string {keys!r}: pass {name}={keys!r}")
    check_keys(optional=True, **{name: key})

    if key is None:
        keys = check_key_names(f"{name}s", keys)
    else:
        keys = (key, *states)
    chosen = [plain_key(k) for k in keys]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{name}s must be different keys, got {chosen}: one entry cannot hold two things")
    return chosen


class StatefulModule(TensorDictModuleBase):
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
    input_size: int
    #: Whether outputs depend on rows that come later in their run.
    bidirectional: bool = False
    _calls: int = 0  # of runs, whose order is checked now and then

    def __init__(
        self,
        state_shape: tuple[int, int],
        *,
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        default_recurrent_mode: Mode = None,
        state: str = "stored",
        done_key: NestedKey = DONE,
        traj_key: NestedKey = TRAJ_IDS,
        **unknown: object,
    ) -> None:
        super().__init__()
        for name in unknown:  # the error names the caller's class
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        check_choice("state", state, ("stored", "zero"))
        check_keys(done_key=done_key, traj_key=traj_key)

        states = self.state_keys
        read = _key_list("in_key", in_key, in_keys, states)
        written = _key_list("out_key", out_key, out_keys, [next_key(key) for key in states])
        if len(read) == 1 + len(states):
            read.append(IS_INIT)
        if len(read) != 2 + len(states):
            raise ValueError(f"in_keys must be [input, {', '.join(states)}] or these and is_init, got {read}")
        if len(written) != 1 + len(states):
            raise ValueError(f"out_keys must be [output, next {', next '.join(states)}], got {written}")

        # tensordict annotates its keys as tuples of length one
        self.in_keys = read  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = written  # pyright: ignore[reportAttributeAccessIssue]
        self._input_key, *self._state_in, self._init_key = read
        self._output_key, *self._state_out = written

        self._done_key = done_key
        self._traj_key = traj_key

        self.default_recurrent_mode = bool(check_mode("default_recurrent_mode", default_recurrent_mode))
        self.state = state
        self._state_shape = state_shape

    @property
    def weight(self) -> Tensor:
        """A weight of the module, which determines dtype and device."""
        raise NotImplementedError

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

    @property
    def recurrent_mode(self) -> bool:
        """The mode of the next call: that of ``set_recurrent_mode``, else the module's default."""
        mode = recurrent_mode()
        if mode is None:
            return self.default_recurrent_mode
        return mode

    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Read input and states from the tensordict; write the output and the states after each row.

        Raises:
            KeyError: an input, a state or (sequential) the is_init marker is missing; recurrent: there is no
                boundary marker at all.
            TypeError: is_init is not bool, or an input has another dtype than the weights.
            ValueError: an input or a state has another shape than the network's sizes ask for; recurrent: a run begins
                at a row that has not kept its state, or there is no row.
        """
        if self.recurrent_mode:
            compute = self._forward_runs
        else:
            compute = self._forward_steps
        out, after = compute(tensordict)

        tensordict.set(self._output_key, out.reshape(*tensordict.batch_size, out.shape[-1]))
        for key, state in zip(self._state_out, after, strict=True):
            tensordict.set(key, state.reshape(*tensordict.batch_size, *self._state_shape))
        return tensordict

    def takes_columns(self) -> bool:
        """Return whether the next call makes single steps: see `flatroll.layout.column_actor`."""
        return not self.recurrent_mode

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

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the initial states of episodes: zeros ``[num_layers, hidden_size]`` for each state key.

        Raises:
            RuntimeError: an out key is not ``("next", in_key)``, so the state cannot be carried.
        """
        for key, out in zip(self._state_in, self._state_out, strict=True):
            if as_tuple(out) != next_key(key):
                raise RuntimeError(
                    "a state must be written under ('next', <its in_key>) to be carried to the next step: "
                    f"in_key {key!r} needs out_key {next_key(key)!r}, got {out!r}"
                )

        zeros = self.weight.detach().new_zeros(self._state_shape)
        return TensorDictPrimer(dict.fromkeys(self._state_in, zeros))

    def _forward_steps(self, batch: TensorDictBase) -> tuple[Tensor, States]:
        """Return outputs and states after each row; every row is one step, from zeros at is_init. No host sync."""
        is_init = marker(batch, self._init_key)
        rows = self._input_rows(batch)
        before = [self._state_before(batch, key, is_init) for key in self._state_in]
        states = tuple(state.reshape(-1, *self._state_shape) for state in before)
        return self.in_weight_precision(self.step, rows, states)

    def _state_before(self, batch: TensorDictBase, key: NestedKey, is_init: Tensor) -> Tensor:
        """Return the state before each row; it replaces the stored one, so that a batch holds the state used."""
        stored = batch.get(key, None)
        if stored is not None:
            self._check(batch, key, stored, self._state_shape)
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

    def _forward_runs(self, batch: TensorDictBase) -> tuple[Tensor, States]:
        """Outputs and states; the rows are runs of consecutive steps, each from the state stored at its first row."""
        starts = run_starts(
            batch, is_init_key=self._init_key, done_key=self._done_key, traj_key=self._traj_key
        )
        if not starts.numel():
            raise ValueError(f"batch must have at least one row, got batch size {list(batch.batch_size)}")

        rows = self._input_rows(batch)
        self._refuse_thinned_states(batch, starts)
        if starts.is_cpu and not is_tracing():  # on a device the values are not ready yet
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
        return run_with_burn_in(over_runs, rows, stored, starts.flatten(), burn_in)

    def _check_order(self, batch: TensorDictBase, starts: Tensor) -> None:
        """Check that rows of runs on the host follow one another, in the first calls and in every 16th."""
        self._calls += 1
        if self._calls > _FIRST_CALLS and self._calls % _EVERY:
            return

        entry = batch.get(OBSERVATION, None)
        observed: list[NestedKey] = [OBSERVATION]
        if isinstance(entry, TensorDictBase):
            observed = [(OBSERVATION, *as_tuple(key)) for key in entry.keys(True, True)]
        elif entry is None:
            observed = [self._input_key]
        check_runs_in_order(batch, starts, observed, _WAY_OUT)

    def _input_rows(self, batch: TensorDictBase) -> Tensor:
        """The input as ``[N, input_size]``."""
        value = require(batch, self._input_key)
        self._check(batch, self._input_key, value, (self.input_size,))
        return value.reshape(-1, self.input_size)

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
        self._check(batch, key, stored, self._state_shape)
        return cast(Tensor, stored)

    def _check(self, batch: TensorDictBase, key: NestedKey, value: Tensor, tail: tuple[int, ...]) -> None:
        """Refuse a column that is not ``[*B, *tail]`` in the dtype of the weights."""
        expected = (*batch.batch_size, *tail)
        if value.shape != expected:
            meaning = self.state_meaning + " = {} x {}"
            if len(tail) == 1:
                meaning = "input_size={}"
            shown = f"{expected} ({meaning.format(*tail)})"
            raise ValueError(f"batch[{key!r}] must have shape {shown}, got {tuple(value.shape)}")

        if value.device != self.weight.device:
            raise ValueError(
                f"batch[{key!r}] is on {value.device}, the weights are on {self.weight.device}: move one of them with "
                ".to(...)"
            )

        dtype = self.weight.dtype
        if value.dtype != dtype and not torch.is_autocast_enabled(value.device.type):
            or_module = ""
            if value.is_floating_point():
                or_module = f", or the module (module.to({value.dtype}))"
            raise TypeError(
                f"batch[{key!r}] must be {dtype} like the weights, got {value.dtype}: cast it{or_module}"
            )


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

"""Base class of modules that remember earlier rows of a run: keys, modes and checks."""

from collections.abc import Sequence
from typing import ClassVar, TypedDict

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from flatroll.kernels.scan import is_tracing
from flatroll.layout.boundaries import run_starts
from flatroll.layout.checks import check_key_names, check_keys
from flatroll.layout.column_actor import Columns
from flatroll.layout.following import check_runs_in_order
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    OBSERVATION,
    TRAJ_IDS,
    NestedKey,
    as_tuple,
    next_key,
    plain_key,
    require,
)
from flatroll.modules.mode import Mode, check_mode, recurrent_mode
from flatroll.modules.primer import TensorDictPrimer

# The order of rows is checked in the first calls and in every 16th one after them.
_FIRST_CALLS = 4
_EVERY = 16
_WAY_OUT = (
    "Call the module on the batch as it was collected or on slices (SliceSampler), before you shuffle, index or filter "
    "rows, or set is_init where a run begins"
)


class MemoryOptions(TypedDict, total=False):
    """Keyword arguments of every module with memory; :class:`flatroll.modules.GRUModule` documents them."""

    in_key: NestedKey | None
    in_keys: Sequence[NestedKey] | None
    out_key: NestedKey | None
    out_keys: Sequence[NestedKey] | None
    default_recurrent_mode: Mode
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


class MemoryModule(TensorDictModuleBase):
    """A tensordict module whose outputs depend on earlier rows of a run.

    In sequential mode each row is a step, and what it remembers is carried from ``("next", key)`` to ``key``; in
    recurrent mode the rows are whole runs. A subclass defines its default state keys, sets ``input_size`` and
    implements :meth:`on_columns`, :meth:`make_tensordict_primer` and the two modes.

    Args: see :class:`flatroll.modules.GRUModule`.
    """

    state_keys: ClassVar[tuple[str, ...]]
    input_size: int
    _calls: int = 0  # of runs, whose order is checked now and then

    def __init__(
        self,
        *,
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        default_recurrent_mode: Mode = None,
        done_key: NestedKey = DONE,
        traj_key: NestedKey = TRAJ_IDS,
        **unknown: object,
    ) -> None:
        super().__init__()
        for name in unknown:  # the error names the caller's class
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
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

    @property
    def weight(self) -> Tensor:
        """A weight of the module, which determines dtype and device."""
        raise NotImplementedError

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
            out, after = self._forward_runs(tensordict)
        else:
            out, after = self._forward_steps(tensordict)

        tensordict.set(self._output_key, out.reshape(*tensordict.batch_size, out.shape[-1]))
        for key, state in after.items():
            tensordict.set(key, state)
        return tensordict

    def takes_columns(self) -> bool:
        """Return whether the next call makes single steps: see `flatroll.layout.column_actor`."""
        return not self.recurrent_mode

    def on_columns(self, columns: Columns) -> None:
        """Do what :meth:`forward` does in sequential mode, with columns ``[E, ...]`` by key."""
        raise NotImplementedError

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return what episodes start from, the value of one row for each state key.

        Raises:
            RuntimeError: an out key is not ``("next", in_key)``, so the state cannot be carried.
        """
        raise NotImplementedError

    def _forward_steps(self, batch: TensorDictBase) -> tuple[Tensor, Columns]:
        """Return outputs, and what is carried after each row by key; every row is one step. No host sync."""
        raise NotImplementedError

    def _forward_runs(self, batch: TensorDictBase) -> tuple[Tensor, Columns]:
        """Return outputs, and what is carried after each row by key; the rows are runs of consecutive steps."""
        raise NotImplementedError

    def _check_carried(self) -> None:
        """Raise RuntimeError if a state is not written where the next step reads it."""
        for key, out in zip(self._state_in, self._state_out, strict=True):
            if as_tuple(out) != next_key(key):
                raise RuntimeError(
                    "a state must be written under ('next', <its in_key>) to be carried to the next step: "
                    f"in_key {key!r} needs out_key {next_key(key)!r}, got {out!r}"
                )

    def _run_starts(self, batch: TensorDictBase) -> Tensor:
        """Return the first rows of runs, bool of the batch's shape; ValueError if there is no row."""
        starts = run_starts(
            batch, is_init_key=self._init_key, done_key=self._done_key, traj_key=self._traj_key
        )
        if not starts.numel():
            raise ValueError(f"batch must have at least one row, got batch size {list(batch.batch_size)}")
        return starts

    def _check_order(self, batch: TensorDictBase, starts: Tensor) -> None:
        """Check that rows of runs follow one another, in the first calls and in every 16th, unless it would sync."""
        if not starts.is_cpu or is_tracing():  # on a device the values are not ready yet
            return
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
        self._check(batch, self._input_key, value, (self.input_size,), f"input_size={self.input_size}")
        return value.reshape(-1, self.input_size)

    def _check(
        self, batch: TensorDictBase, key: NestedKey, value: Tensor, tail: tuple[int, ...], meaning: str
    ) -> None:
        """Refuse a column that is not ``[*B, *tail]`` in the dtype of the weights."""
        expected = (*batch.batch_size, *tail)
        if value.shape != expected:
            raise ValueError(
                f"batch[{key!r}] must have shape {expected} ({meaning}), got {tuple(value.shape)}"
            )

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

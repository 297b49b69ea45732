"""What recurrent tensordict modules share: keys, states, one step in a rollout, whole runs in training."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from flatroll.layout import run_starts
from flatroll.layout.keys import IS_INIT, NestedKey, as_tuple, marker, next_key, require
from flatroll.modules.backends import BACKENDS, check_backend
from flatroll.modules.mode import recurrent_mode
from flatroll.modules.networks import NETWORKS, with_weights_of
from flatroll.modules.packing import States, run_index
from flatroll.modules.primer import TensorDictPrimer
from flatroll.modules.scan import whole


class Sizes(NamedTuple):
    """The constructor arguments of a new stock network."""

    input_size: int | None
    hidden_size: int | None
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    device: torch.device | str | None


class Keys(NamedTuple):
    """Where a module reads and writes; exactly one of each of the first two pairs is given."""

    in_key: NestedKey | None
    in_keys: Sequence[NestedKey] | None
    out_key: NestedKey | None
    out_keys: Sequence[NestedKey] | None
    done_key: NestedKey
    traj_key: NestedKey


class How(NamedTuple):
    """How a module computes."""

    backend: str
    default_recurrent_mode: bool | None
    state: str
    python_based: bool


def _network(mode: str, given: nn.RNNBase | None, sizes: Sizes, python_based: bool) -> nn.RNNBase:
    """The network to wrap: the one given, or a new one of these sizes."""
    name, (stock, scanned) = mode.lower(), NETWORKS[mode]
    shown = f"got input_size={sizes.input_size}, hidden_size={sizes.hidden_size}"
    if not (sizes.batch_first if given is None else getattr(given, "batch_first", True)):
        raise ValueError(f"batch_first must be True, got False: build {name} with batch_first=True")
    if given is None:
        if sizes.input_size is None or sizes.hidden_size is None:
            raise ValueError(f"input_size and hidden_size, or an existing {name}=, must be given, {shown}")
        return (scanned if python_based else stock)(**sizes._asdict())
    if not isinstance(given, (stock, scanned)):
        raise TypeError(f"{name} must be a torch.nn.{mode}, got {type(given).__name__}")
    if sizes.input_size is not None or sizes.hidden_size is not None:
        raise ValueError(f"{name} comes with its sizes, leave out input_size and hidden_size: {shown}")
    if given.proj_size:
        raise ValueError(f"{name} must not project its output, got proj_size={given.proj_size}")
    if python_based and not isinstance(given, scanned):
        return with_weights_of(scanned, given)
    return given


def _key_list(
    name: str, key: NestedKey | None, keys: Sequence[NestedKey] | None, states: Sequence[NestedKey]
) -> list[NestedKey]:
    """``keys``, or ``key`` followed by the default state keys."""
    if (key is None) == (keys is None):
        raise ValueError(f"exactly one of {name} and {name}s must be given, got {key!r} and {keys!r}")
    chosen = [as_tuple(k) for k in ((keys or ()) if key is None else (key, *states))]
    return [names[0] if len(names) == 1 else names for names in chosen]


class RecurrentModule(TensorDictModuleBase):
    """A recurrent network over the rows of a tensordict; base of :class:`GRUModule` and :class:`LSTMModule`.

    A subclass names its default state keys and says how one layer makes one step (:meth:`cell`). Each state
    stands in the tensordict as ``[*B, num_layers, hidden_size]`` (twice the layers if bidirectional).

    Args:
        mode: ``"GRU"`` or ``"LSTM"``.
        given: an existing network of that kind, or None.
        sizes: of a new one.
        keys, how: see :class:`GRUModule`.
    """

    state_keys: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        mode: str,
        given: nn.RNNBase | None,
        sizes: Sizes,
        keys: Keys,
        how: How,
    ) -> None:
        super().__init__()
        if how.state not in ("stored", "zero"):
            raise ValueError(f"state must be 'stored' or 'zero', got {how.state!r}")
        net = _network(mode, given, sizes, how.python_based)
        states = self.state_keys
        in_keys = _key_list("in_key", keys.in_key, keys.in_keys, states)
        out_keys = _key_list("out_key", keys.out_key, keys.out_keys, [next_key(key) for key in states])
        if len(in_keys) == 1 + len(states):
            in_keys.append(IS_INIT)
        if len(in_keys) != 2 + len(states):
            raise ValueError(
                f"in_keys must be [input, {', '.join(states)}] or that and is_init, got {in_keys}"
            )
        if len(out_keys) != 1 + len(states):
            raise ValueError(f"out_keys must be [output, next {', next '.join(states)}], got {out_keys}")
        check_backend(how.backend, net)
        # tensordict annotates its keys as tuples of length one
        self.in_keys = in_keys  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = out_keys  # pyright: ignore[reportAttributeAccessIssue]
        self._input_key, *self._state_in, self._init_key = in_keys
        self._output_key, *self._state_out = out_keys
        self._done_key, self._traj_key = keys.done_key, keys.traj_key
        self.recurrent_backend = how.backend
        self.default_recurrent_mode = bool(how.default_recurrent_mode)
        self.state = how.state
        self._state_shape = (net.num_layers * (2 if net.bidirectional else 1), net.hidden_size)
        setattr(self, mode.lower(), net)

    @property
    def _scans(self) -> bool:
        return self.recurrent_backend in ("auto", "scan") and not self.net.bidirectional

    @property
    def net(self) -> nn.RNNBase:
        """The wrapped stock network; its weights load and save as they would without the wrapper."""
        raise NotImplementedError

    def cell(self, rows: Tensor, states: States, weights: Sequence[Tensor]) -> States:
        """One step of one layer: rows ``[B, in]``, states ``[B, hidden]`` to new states, output first."""
        raise NotImplementedError

    @property
    def recurrent_mode(self) -> bool:
        """The mode a call would run in now: the one set by ``set_recurrent_mode``, else this module's own."""
        mode = recurrent_mode()
        return self.default_recurrent_mode if mode is None else mode

    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Read the input and the states, write the output and the states after each row.

        Raises:
            KeyError: an input, a state or (sequential) the is_init marker is missing; recurrent: there is no
                boundary marker at all.
            TypeError: is_init is not bool, or an input has another dtype than the weights.
            ValueError: an input or a state has another shape than the network's sizes ask for.
        """
        return self._runs(tensordict) if self.recurrent_mode else self._step(tensordict)

    def make_python_based(self) -> Self:
        """Compute by flatroll's own operators, which ``torch.compile`` takes into one graph; the weights stay.

        Raises:
            ValueError: the network is bidirectional, or ``recurrent_backend`` is one of the stock network.
        """
        return self._based(NETWORKS[self.net.mode][1])

    def make_cudnn_based(self) -> Self:
        """Compute by the stock network (cuDNN on CUDA, oneDNN or ATen on the CPU); the weights stay."""
        return self._based(NETWORKS[self.net.mode][0])

    def _based(self, kind: type[nn.RNNBase]) -> Self:
        net = with_weights_of(kind, self.net)
        check_backend(self.recurrent_backend, net)
        setattr(self, net.mode.lower(), net)
        return self

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The state every episode starts from: zeros ``[num_layers, hidden_size]`` under each state key.

        Raises:
            RuntimeError: an out key is not ``("next", in_key)``, so that no one could carry the state.
        """
        for key, out in zip(self._state_in, self._state_out, strict=True):
            if as_tuple(out) != next_key(key):
                raise RuntimeError(
                    f"a state must be written under ('next', <its in_key>) to be carried to the next step: "
                    f"in_key {key!r} wants out_key {next_key(key)!r}, got {out!r}"
                )
        zeros = self._weight.detach().new_zeros(self._state_shape)
        return TensorDictPrimer(dict.fromkeys(self._state_in, zeros))

    @property
    def _weight(self) -> Tensor:
        return cast(Tensor, self.net.weight_ih_l0)

    def _step(self, batch: TensorDictBase) -> TensorDictBase:
        """Every row is one step of its own, from zeros where is_init says so. No host sync."""
        net = self.net
        if net.bidirectional:
            raise RuntimeError(
                "a bidirectional network cannot make single steps, it reads rows that come later: "
                "use it under set_recurrent_mode('recurrent')"
            )
        is_init = marker(batch, self._init_key)
        rows = self._rows(batch)
        before = [self._state_before(batch, key, is_init) for key in self._state_in]
        flat = [state.reshape(-1, *self._state_shape) for state in before]
        after: list[States] = []
        for layer, weights in enumerate(net.all_weights):
            if layer and net.dropout:
                rows = nn.functional.dropout(rows, net.dropout, net.training)
            after.append(self.cell(rows, tuple(state[:, layer] for state in flat), weights))
            rows = after[-1][0]
        batch.set(self._output_key, rows.reshape(*batch.batch_size, -1))
        for key, layers in zip(self._state_out, zip(*after, strict=True), strict=True):
            # stacked, hence in memory of its own: an in-place activation on the output leaves the state alone
            batch.set(key, torch.stack(layers, 1).reshape(*batch.batch_size, *self._state_shape))
        return batch

    def _state_before(self, batch: TensorDictBase, key: NestedKey, is_init: Tensor) -> Tensor:
        """The state each row starts from; it replaces the stored one, so that a batch holds what was used."""
        stored = batch.get(key, None)
        if stored is None:
            self._refuse_lost_state(batch, key, is_init)
            state = self._weight.new_zeros(*batch.batch_size, *self._state_shape)
        else:
            state = self._checked_state(batch, key, stored).masked_fill(is_init[..., None, None], 0)
        batch.set(key, state)
        return state

    def _refuse_lost_state(self, batch: TensorDictBase, key: NestedKey, is_init: Tensor) -> None:
        """Without a state every row must be a first row; looked at only where looking is no host sync."""
        if is_init.device.type == "cpu" and not bool(is_init.all()):
            raise KeyError(
                f"batch has no entry {key!r}, and some rows are not is_init rows: carry {next_key(key)!r} of "
                f"each step to the root of the next one (Collector does it), or begin with "
                f"batch.update(module.make_tensordict_primer().expand(batch.batch_size))"
            )

    def _runs(self, batch: TensorDictBase) -> TensorDictBase:
        """The rows are runs of consecutive steps, each from the state stored at its first row."""
        starts = run_starts(
            batch, is_init_key=self._init_key, done_key=self._done_key, traj_key=self._traj_key
        )
        rows = self._rows(batch)
        stored = tuple(
            self._stored_state(batch, key).reshape(-1, *self._state_shape) for key in self._state_in
        )
        out, after = self._over_runs(rows, stored, starts.flatten())
        batch.set(self._output_key, out.reshape(*batch.batch_size, -1))
        for key, states in zip(self._state_out, after, strict=True):
            batch.set(key, states.reshape(*batch.batch_size, *self._state_shape))
        return batch

    def _over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        """Outputs ``[N, hidden]``, and states after each row, ``[N, num_layers, hidden]``."""
        if torch.compiler.is_compiling() and self._scans:
            out, after = whole(self.net, rows, stored, starts)
            if self.output_is_state:
                return out, (out.clone(),)
            last = torch.cat([starts[1:], torch.ones_like(starts[:1])])[:, None, None]
            return out, tuple(torch.where(last, state, 0) for state in after)
        index = run_index(starts)
        first = tuple(state.index_select(0, index.first).transpose(0, 1) for state in stored)
        out, finals = BACKENDS[self.recurrent_backend](self.net, rows, first, index)
        if self.output_is_state:
            # copied, so that an in-place activation on the output leaves the state alone
            return out, (out.clone(),)
        return out, tuple(
            final.new_zeros(len(rows), *self._state_shape).index_copy(0, index.last, final.transpose(0, 1))
            for final in finals
        )

    @property
    def output_is_state(self) -> bool:
        """Whether the output of each row is all of the state after it."""
        return False

    def _rows(self, batch: TensorDictBase) -> Tensor:
        """The input as ``[N, input_size]``."""
        key, size = self._input_key, self.net.input_size
        value = require(batch, key)
        self._check(batch, key, value, (size,), "input_size={}")
        return value.reshape(-1, size)

    def _stored_state(self, batch: TensorDictBase, key: NestedKey) -> Tensor:
        if self.state == "zero":
            return self._weight.new_zeros(()).expand(*batch.batch_size, *self._state_shape)
        stored = batch.get(key, None)
        if stored is None:
            raise KeyError(
                f"batch has no entry {key!r}, the state each run starts from: collect with this module's "
                f"primer (Collector wires make_tensordict_primer() by itself), or start every run from zeros "
                f"with {type(self).__name__}(..., state='zero')"
            )
        return self._checked_state(batch, key, stored)

    def _checked_state(self, batch: TensorDictBase, key: NestedKey, state: Tensor) -> Tensor:
        self._check(batch, key, state, self._state_shape, "num_layers x hidden_size = {} x {}")
        return state

    def _check(
        self, batch: TensorDictBase, key: NestedKey, value: Tensor, tail: tuple[int, ...], meaning: str
    ) -> None:
        expected = (*batch.batch_size, *tail)
        if value.shape != expected:
            shown = f"{expected} ({meaning.format(*tail)})"
            raise ValueError(f"batch[{key!r}] must have shape {shown}, got {tuple(value.shape)}")
        dtype = self._weight.dtype
        if value.dtype != dtype and not torch.is_autocast_enabled(value.device.type):
            raise TypeError(
                f"batch[{key!r}] must be {dtype} like the weights, got {value.dtype}: cast it, or the module "
                f"(module.to({value.dtype}))"
            )

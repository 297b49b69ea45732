"""The base of GRUModule and LSTMModule: a network, stepped in rollouts and run over packed rows in training."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from flatroll.modules.backends.choice import BACKENDS, by_row, check_backend
from flatroll.modules.backends.dense import dense_gru, few_long_runs
from flatroll.modules.backends.packing import States, run_index
from flatroll.modules.mode import Mode
from flatroll.modules.networks import NETWORKS, with_weights_of
from flatroll.modules.stateful import Keys, StatefulModule


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


class How(NamedTuple):
    """How a module computes."""

    backend: str
    default_recurrent_mode: Mode
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


class RecurrentModule(StatefulModule):
    """A recurrent network over the rows of a tensordict; base of :class:`GRUModule` and :class:`LSTMModule`.

    A subclass names its default state keys and says how one layer makes one step (:meth:`cell`). Each state
    stands in the tensordict as ``[*B, num_layers, hidden_size]`` (twice the layers if bidirectional).

    Args:
        mode: ``"GRU"`` or ``"LSTM"``.
        given: an existing network of that kind, or None.
        sizes: of a new one.
        keys, how: see :class:`GRUModule`.
    """

    def __init__(
        self,
        mode: str,
        given: nn.RNNBase | None,
        sizes: Sizes,
        keys: Keys,
        how: How,
    ) -> None:
        net = _network(mode, given, sizes, how.python_based)
        check_backend(how.backend, net)
        shape = (net.num_layers * (2 if net.bidirectional else 1), net.hidden_size)
        super().__init__(keys, shape, how.default_recurrent_mode, how.state)
        self.input_size = net.input_size
        self.recurrent_backend = how.backend
        setattr(self, mode.lower(), net)

    @property
    def both_ways(self) -> bool:
        return self.net.bidirectional

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

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.net.weight_ih_l0)

    def computed(
        self, how: Callable[..., tuple[Tensor, States]], rows: Tensor, states: States, *more: Tensor
    ) -> tuple[Tensor, States]:
        """In the weights' precision on the CPU: autocast would reach some calls of the network only."""
        if rows.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return how(rows, states, *more)
        dtype = self.weight.dtype
        with torch.autocast("cpu", enabled=False):
            return how(rows.to(dtype), tuple(state.to(dtype) for state in states), *more)

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        net = self.net
        if net.bidirectional:
            raise RuntimeError(
                "a bidirectional network cannot make single steps, it reads rows that come later: "
                "use it under set_recurrent_mode('recurrent')"
            )
        after: list[States] = []
        for layer, weights in enumerate(net.all_weights):
            if layer and net.dropout:
                rows = nn.functional.dropout(rows, net.dropout, net.training)
            after.append(self.cell(rows, tuple(state[:, layer] for state in states), weights))
            rows = after[-1][0]
        hidden, *cells = zip(*after, strict=True)
        # stacked, hence in memory of its own: an in-place activation on the output leaves the state alone
        stacked = torch.stack(hidden, 1)
        return rows, (stacked, *(x[0].unsqueeze(1) if len(x) == 1 else torch.stack(x, 1) for x in cells))

    def over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        run_rows = by_row(self.recurrent_backend, self.net)
        if run_rows is not None:
            out, after = run_rows(self.net, rows, stored, starts)
            if self.output_is_state:
                return out, (out.clone(),)
            last = torch.cat([starts[1:], torch.ones_like(starts[:1])])[:, None, None]
            return out, tuple(torch.where(last, state, 0) for state in after)
        index = run_index(starts)
        first = tuple(state.index_select(0, index.first).transpose(0, 1) for state in stored)
        by_hand = self._scans and few_long_runs(self.net, rows, first, index)
        run = dense_gru if by_hand else BACKENDS[self.recurrent_backend]
        out, finals = run(self.net, rows, first, index)
        if self.output_is_state:
            # copied, so that an in-place activation on the output leaves the state alone
            return out, (out.clone(),)
        return out, tuple(
            final.new_zeros(len(rows), *self._state_shape).index_copy_(0, index.last, final.transpose(0, 1))
            for final in finals
        )

    @property
    def output_is_state(self) -> bool:
        """Whether the output of each row is all of the state after it."""
        return False

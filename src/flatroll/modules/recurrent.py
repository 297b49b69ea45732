"""GRUModule and LSTMModule: single steps in rollouts, whole runs of a flat batch in training."""

from typing import ClassVar, NamedTuple, Self, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from flatroll.layout.checks import check_choice, check_flags
from flatroll.layout.transfers import upload
from flatroll.modules.backends.choice import BACKENDS, by_row, check_backend
from flatroll.modules.backends.dense import dense_gru, few_long_runs
from flatroll.modules.backends.packing import States, call, run_index
from flatroll.modules.networks import GRU, LSTM, NETWORKS, check_sizes, share_weights
from flatroll.modules.stateful import StatefulModule, StatefulOptions

#: From this many rows on, a step of the stock LSTM is faster on the CPU than a step of LSTMCell.
STOCK_ROWS = 256


class NetworkSizes(NamedTuple):
    """Constructor arguments of ``nn.GRU`` and ``nn.LSTM``; :class:`GRUModule` documents them."""

    input_size: int | None
    hidden_size: int | None
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    device: torch.device | str | None


class RecurrentOptions(StatefulOptions, total=False):
    """Keyword arguments of GRUModule and LSTMModule; :class:`GRUModule` documents them."""

    recurrent_backend: str
    recurrent_recompute: str
    python_based: bool


def _wrapped_network(
    mode: str, network: nn.RNNBase | None, sizes: NetworkSizes, python_based: bool
) -> nn.RNNBase:
    """The network to wrap: the existing one, or a new one of these sizes."""
    check_flags(batch_first=sizes.batch_first, python_based=python_based)
    name = mode.lower()
    stock, of_operators = NETWORKS[mode]
    shown = f"got input_size={sizes.input_size}, hidden_size={sizes.hidden_size}"
    batch_first = sizes.batch_first
    way_out = ""
    if network is not None:
        batch_first = getattr(network, "batch_first", True)
        way_out = f", or set {name}.batch_first = True, which leaves its weights as they are"
    if not batch_first:
        raise ValueError(f"batch_first must be True, got False: build {name} with batch_first=True{way_out}")

    if network is None:
        if sizes.input_size is None or sizes.hidden_size is None:
            raise ValueError(f"input_size and hidden_size, or an existing {name}=, must be given, {shown}")
        options = sizes._asdict()
        check_sizes(**{name: x for name, x in options.items() if name != "batch_first"})
        kind = of_operators if python_based else stock
        return kind(**options)

    if not isinstance(network, (stock, of_operators)):
        raise TypeError(f"{name} must be a torch.nn.{mode}, got {type(network).__name__}")
    if sizes.input_size is not None or sizes.hidden_size is not None:
        raise ValueError(f"{name} already has its sizes, leave out input_size and hidden_size: {shown}")
    if network.proj_size:
        raise ValueError(f"{name} must not project its output, got proj_size={network.proj_size}")

    if python_based and not isinstance(network, of_operators):
        return share_weights(of_operators, network)
    return network


class RecurrentModule(StatefulModule):
    """Base of :class:`GRUModule` and :class:`LSTMModule`: runs a recurrent network on a tensordict's rows.

    A subclass defines its kind of network and default state keys. Each state is in the tensordict as ``[*B,
    num_layers, hidden_size]`` (twice the layers if bidirectional).

    Args:
        network: an existing network of that kind, or None.
        sizes: of a new one.
        others: see :class:`GRUModule`.
    """

    autocast_in_part = True

    #: ``"GRU"`` or ``"LSTM"``; in lower case the attribute that holds the network.
    kind: ClassVar[str]

    def __init__(
        self,
        network: nn.RNNBase | None,
        sizes: NetworkSizes,
        *,
        recurrent_backend: str = "auto",
        recurrent_recompute: str = "none",
        python_based: bool = False,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_choice("recurrent_recompute", recurrent_recompute, ("none", "full"))
        net = _wrapped_network(self.kind, network, sizes, python_based)
        check_backend(recurrent_backend, net)
        layers = net.num_layers
        if net.bidirectional:
            layers *= 2
        super().__init__((layers, net.hidden_size), **options)

        self.input_size = net.input_size
        self.bidirectional = net.bidirectional
        self.recurrent_backend = recurrent_backend
        self.recurrent_recompute = recurrent_recompute

        # whether the output of each row is the full state after it
        self._output_is_state = self.kind == "GRU" and layers == 1
        setattr(self, self.kind.lower(), net)

    @property
    def net(self) -> nn.RNNBase:
        """The wrapped ``nn.GRU`` or ``nn.LSTM``; its state dict is the same as without the wrapper."""
        return cast(nn.RNNBase, getattr(self, self.kind.lower()))

    def make_python_based(self) -> Self:
        """Switch to flatroll's own operators, which ``torch.compile`` can compile; keeps the weights.

        Raises:
            ValueError: the network is bidirectional, or ``recurrent_backend`` is one of the stock network.
        """
        return self._switch_network(NETWORKS[self.net.mode][1])

    def make_cudnn_based(self) -> Self:
        """Switch to ``nn.GRU`` or ``nn.LSTM`` (cuDNN on CUDA); keeps the weights."""
        return self._switch_network(NETWORKS[self.net.mode][0])

    def _switch_network(self, kind: type[nn.RNNBase]) -> Self:
        net = share_weights(kind, self.net)
        check_backend(self.recurrent_backend, net)
        setattr(self, net.mode.lower(), net)
        return self

    @property
    @override
    def weight(self) -> Tensor:
        return cast(Tensor, self.net.weight_ih_l0)

    @override
    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        net = self.net
        if net.bidirectional:
            raise RuntimeError(
                "a bidirectional network cannot make single steps, because it reads later rows: use it under "
                "set_recurrent_mode('recurrent')"
            )

        after: list[States] = []
        for layer, weights in enumerate(net.all_weights):
            if layer and net.dropout:
                rows = nn.functional.dropout(rows, net.dropout, net.training)
            before = tuple(state[:, layer] for state in states)
            if self.kind == "GRU":
                after.append((torch.gru_cell(rows, before[0], *weights),))
            else:
                after.append(torch.lstm_cell(rows, before, *weights))
            rows = after[-1][0]

        hidden, *cells = zip(*after, strict=True)
        # stacking copies: an in-place activation on the output must not change the state
        stacked = [torch.stack(hidden, 1)]
        for cell in cells:
            if len(cell) == 1:
                stacked.append(cell[0].unsqueeze(1))
            else:
                stacked.append(torch.stack(cell, 1))
        return rows, tuple(stacked)

    @override
    def over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        if self.recurrent_recompute == "none" or not torch.is_grad_enabled():
            return self._over_runs(rows, stored, starts)

        # saves only the inputs and reruns the recurrence in the backward pass, with the same dropout
        result: tuple[Tensor, States] = checkpoint(self._over_runs, rows, stored, starts, use_reentrant=False)
        return result

    def _over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        compute_rows = by_row(self.recurrent_backend, self.net)
        if compute_rows is not None:
            starts = upload(starts, rows.device)
            out, after = compute_rows(self.net, rows, stored, starts)
            if self._output_is_state:
                return out, (out.clone(),)

            # a row is the last of its run if the next row is a start
            last = torch.cat([starts[1:], torch.ones_like(starts[:1])])[:, None, None]
            return out, tuple(torch.where(last, state, 0) for state in after)

        index = run_index(starts, rows.device)
        # the states of first rows, from [N, layers, H] to [layers, runs, H] in rank order
        first = tuple(state.index_select(0, index.first).transpose(0, 1) for state in stored)
        one_way_scan = self.recurrent_backend in ("auto", "scan") and not self.bidirectional
        few_and_long = one_way_scan and few_long_runs(self.net, rows, first, index)
        backend = dense_gru if few_and_long else BACKENDS[self.recurrent_backend]

        out, finals = backend(self.net, rows, first, index)
        if self._output_is_state:
            # clone, so that an in-place activation on the output does not change the state
            return out, (out.clone(),)
        return out, tuple(
            final.new_zeros(len(rows), *self._state_shape).index_copy_(0, index.last, final.transpose(0, 1))
            for final in finals
        )


class GRUModule(RecurrentModule):
    """A GRU on tensordict rows: single steps in rollouts, whole runs in training, with equal results.

    :class:`set_recurrent_mode`, or else ``default_recurrent_mode``, selects one of two modes.

    * sequential: each of the rows ``[*B]`` is one step. The state is zeroed where ``is_init`` is True and written
      back to its in_key, so that a stored batch has the state before each step. A missing state is zeros if all rows
      are is_init rows.
    * recurrent: the rows ``[N]`` (or ``[*B, T]``, time last) are runs of consecutive steps, which begin at the rows of
      :func:`flatroll.layout.run_starts`. Each run starts from the state stored at its first row, which the rollout
      used there: the recorded outputs are recomputed without padding. ``is_init`` zeroes nothing here, because
      samplers also set it where a slice begins within an episode; rows that begin an episode must store zeros.
      With ``set_recurrent_mode(True, burn_in=k)`` the first ``k`` rows of each run get no gradient.

    The states after each row are written under ``("next", state)``. In recurrent mode they are exact on the last row
    of each run; on the other rows exact for one layer and one direction, else zeros (the stock network does
    not return them).

    Args:
        input_size: features per row.
        hidden_size: features of the output and of each layer's state.
        num_layers: default 1.
        bias: default True.
        batch_first: must be True.
        dropout: between layers, in training mode; default 0.
        bidirectional: both directions within each run, in recurrent mode only; default False.
        in_key: input key; the state key is then ``"recurrent_state"``.
        in_keys: ``[input, state]`` or ``[input, state, is_init]``; exactly one of in_key and in_keys.
        out_key: output key; the state is then written to ``("next", "recurrent_state")``.
        out_keys: ``[output, ("next", state)]``; exactly one of out_key and out_keys.
        device: of a new network.
        gru: an existing ``nn.GRU(..., batch_first=True)``, or :class:`flatroll.modules.GRU`, instead of the sizes; it
            is ``.gru`` afterwards.
        recurrent_backend: how runs are computed, all with the same result: ``"packed"`` (the stock network on a packed
            sequence), ``"scan"`` (flatroll's operators on the same order, one direction, differentiable once),
            ``"triton"`` (one kernel per layer on CUDA, one direction, differentiable once, extra ``triton``), ``"pad"``
            (padded to the longest run, a baseline), ``"auto"`` (the fastest measured, hence never ``"triton"``, which
            nobody has timed yet); default ``"auto"``. Runs of one length go to the stock network as
            ``[runs, length]``, bit for bit, except under ``"triton"``.
        recurrent_recompute: ``"none"``, or ``"full"``: keep no activations of runs for the backward pass, which
            computes them once more (activation checkpointing); default ``"none"``.
        default_recurrent_mode: the mode where none is set, as :class:`set_recurrent_mode` takes it; default sequential.
        python_based: build ``.gru`` as :class:`flatroll.modules.GRU`, which ``torch.compile`` takes into one graph;
            default False, the stock network. :meth:`make_python_based` changes it later.
        state: what runs start from in recurrent mode: ``"stored"``, the state at their first row, or ``"zero"``, zeros,
            where no state need be in the batch; default ``"stored"``. Sequential mode carries states in either case.
        done_key: default ``("next", "done")``, a marker of run ends, used if it is there.
        traj_key: default ``("collector", "traj_ids")``, likewise.

    Shapes: input ``[*B, input_size]``, state ``[*B, num_layers, hidden_size]``, is_init bool ``[*B]`` or
    ``[*B, 1]``, output ``[*B, hidden_size]``; float dtype of the weights,
    under autocast too on the CPU.

    Raises:
        TypeError: an unknown argument.
        ValueError: contradicting sizes or keys, ``batch_first=False``, an unknown backend, recompute or state, or a
            backend that cannot run the network; when called, ``"triton"`` with tensors that are not on CUDA, or
            ``burn_in`` of a bidirectional network.
        ImportError: ``"triton"`` where that is not installed.

    Reference: Cho et al. 2014, https://arxiv.org/abs/1406.1078; the recurrence is that of ``torch.nn.GRU``.

    >>> from tensordict import TensorDict
    >>> from flatroll.modules import set_recurrent_mode
    >>> gru = GRUModule(3, 8, in_key="observation", out_key="features")
    >>> is_init = torch.ones(2, 1, dtype=torch.bool)
    >>> step = TensorDict({"observation": torch.zeros(2, 3), "is_init": is_init}, [2])
    >>> gru(step)["next", "recurrent_state"].shape
    torch.Size([2, 1, 8])
    >>> is_init = torch.tensor([True, False, False, True, False])
    >>> batch = TensorDict({"observation": torch.zeros(5, 3), "is_init": is_init}, [5])
    >>> batch = batch.update(gru.make_tensordict_primer().expand(5))
    >>> with set_recurrent_mode("recurrent"):
    ...     gru(batch)["features"].shape
    torch.Size([5, 8])
    """

    kind = "GRU"
    state_keys: ClassVar[tuple[str, ...]] = ("recurrent_state",)
    gru: nn.GRU | GRU

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        device: torch.device | str | None = None,
        gru: nn.GRU | GRU | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        sizes = NetworkSizes(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device
        )
        super().__init__(gru, sizes, **options)


class LSTMModule(RecurrentModule):
    """An LSTM on tensordict rows: single steps in rollouts, whole runs in training, with equal results.

    It is used as :class:`GRUModule` is, with two states, hidden and cell. In recurrent mode the next states are exact
    on the last row of each run and zeros elsewhere.

    Args:
        in_keys: ``[input, hidden, cell]`` or that and the is_init key; with ``in_key`` the states are
            ``"recurrent_state_h"`` and ``"recurrent_state_c"``.
        out_keys: ``[output, ("next", hidden), ("next", cell)]``.
        lstm: an existing ``nn.LSTM(..., batch_first=True)``, or :class:`flatroll.modules.LSTM`; it is ``.lstm``
            afterwards.

    All other arguments, shapes and errors are those of :class:`GRUModule`.

    Reference: Hochreiter and Schmidhuber 1997, Long short-term memory; the recurrence is that of ``torch.nn.LSTM``.

    >>> from tensordict import TensorDict
    >>> lstm = LSTMModule(3, 8, in_key="observation", out_key="features", default_recurrent_mode=True)
    >>> is_init = torch.tensor([True, False, True])
    >>> batch = TensorDict({"observation": torch.zeros(3, 3), "is_init": is_init}, [3])
    >>> batch = lstm(batch.update(lstm.make_tensordict_primer().expand(3)))
    >>> batch["features"].shape, batch["next", "recurrent_state_c"].shape
    (torch.Size([3, 8]), torch.Size([3, 1, 8]))
    """

    kind = "LSTM"
    state_keys: ClassVar[tuple[str, ...]] = ("recurrent_state_h", "recurrent_state_c")
    lstm: nn.LSTM | LSTM

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        device: torch.device | str | None = None,
        lstm: nn.LSTM | LSTM | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        sizes = NetworkSizes(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device
        )
        super().__init__(lstm, sizes, **options)

    @override
    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        # len() of traced rows would fix their number in an exported graph
        traced = torch.compiler.is_compiling()
        wide = not traced and len(rows) >= STOCK_ROWS and rows.device.type == "cpu"
        if not wide or self.lstm.bidirectional or not isinstance(self.lstm, nn.LSTM):
            return super().step(rows, states)

        out, after = call(self.lstm, rows.unsqueeze(1), tuple(state.transpose(0, 1) for state in states))
        # clone, so that an in-place activation on the output does not change the state
        return out.squeeze(1).clone(), tuple(state.transpose(0, 1) for state in after)

"""GRU over flat marked batches."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatroll.layout.keys import DONE, TRAJ_IDS, NestedKey
from flatroll.modules.backends.packing import States
from flatroll.modules.mode import Mode
from flatroll.modules.networks import GRU
from flatroll.modules.recurrent import How, RecurrentModule, Sizes
from flatroll.modules.stateful import Keys


class GRUModule(RecurrentModule):
    """A GRU that steps in rollouts and runs over flat batches in training, exact in both.

    Which of the two, :class:`set_recurrent_mode` says, else ``default_recurrent_mode``:

    * sequential: each of the rows ``[*B]`` is one step. The state is zeroed where ``is_init`` is True, and
      the state so used is written back to its in_key, so that a stored batch holds what the step started
      from. A missing state is zeros if all rows are is_init rows.
    * recurrent: the rows ``[N]`` (or ``[*B, T]``, time last) are runs of consecutive steps, cut where
      :func:`flatroll.layout.run_starts` says. Each run starts from the state stored at its first row, which
      is the state the rollout used there: what was recorded is recomputed row by row, without padding.
      ``set_recurrent_mode(True, burn_in=k)``: the first ``k`` rows of each run get no gradient.

    The states after each row go under ``("next", state)``. In recurrent mode they are exact on the last row
    of each run; on the other rows exact for one layer and one direction, else zeros (the stock network does
    not hand them out).

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
        recurrent_backend: how runs are computed, all with one result: ``"packed"`` (the stock network on a packed
            sequence), ``"scan"`` (flatroll's operators on the same order, one direction, differentiable once),
            ``"triton"`` (one kernel a layer on CUDA, one direction, differentiable once, extra ``triton``), ``"pad"``
            (the classical form, a baseline), ``"auto"`` (the fastest measured, hence never ``"triton"``, which nobody
            has timed yet); default ``"auto"``. Runs of one length go to the stock network as ``[runs, length]``, bit
            for bit, except under ``"triton"``; few of them have their gradient written out under ``"auto"`` and
            ``"scan"``.
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
        ValueError: contradicting sizes or keys, ``batch_first=False``, an unknown backend or state, or a backend that
            cannot run the network; when called, ``"triton"`` with tensors that are not on CUDA, or ``burn_in`` of a
            bidirectional network.
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
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        gru: nn.GRU | GRU | None = None,
        recurrent_backend: str = "auto",
        default_recurrent_mode: Mode = None,
        python_based: bool = False,
        state: str = "stored",
        done_key: NestedKey = DONE,
        traj_key: NestedKey = TRAJ_IDS,
    ) -> None:
        sizes = Sizes(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device)
        keys = Keys(in_key, in_keys, out_key, out_keys, done_key, traj_key)
        how = How(recurrent_backend, default_recurrent_mode, state, python_based)
        super().__init__("GRU", gru, sizes, keys, how)

    @property
    def net(self) -> nn.RNNBase:
        return self.gru

    def cell(self, rows: Tensor, states: States, weights: Sequence[Tensor]) -> States:
        return (torch.gru_cell(rows, states[0], *weights),)

    @property
    def output_is_state(self) -> bool:
        return self._state_shape[0] == 1

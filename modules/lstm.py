"""LSTM over flat marked batches."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatroll.layout.keys import DONE, TRAJ_IDS, NestedKey
from flatroll.modules.backends.packing import States, call
from flatroll.modules.mode import Mode
from flatroll.modules.networks import LSTM
from flatroll.modules.recurrent import How, RecurrentModule, Sizes
from flatroll.modules.stateful import Keys

#: From so many rows on, a step of the stock network is faster on the CPU than that of a cell.
STOCK_ROWS = 256


class LSTMModule(RecurrentModule):
    """An LSTM that steps in rollouts and runs over flat batches in training, exact in both.

    Everything is as for :class:`GRUModule`, with two states, hidden and cell. ``in_keys`` are
    ``[input, hidden, cell]`` or that and the is_init key, ``out_keys`` are
    ``[output, ("next", hidden), ("next", cell)]``; the default state keys are ``"recurrent_state_h"`` and
    ``"recurrent_state_c"``, and the network is ``.lstm``. In recurrent mode the next states are exact on the
    last row of each run and zeros elsewhere.

    Reference: Hochreiter and Schmidhuber 1997; the recurrence is that of ``torch.nn.LSTM``.

    >>> from tensordict import TensorDict
    >>> lstm = LSTMModule(3, 8, in_key="observation", out_key="features", default_recurrent_mode=True)
    >>> is_init = torch.tensor([True, False, True])
    >>> batch = TensorDict({"observation": torch.zeros(3, 3), "is_init": is_init}, [3])
    >>> batch = lstm(batch.update(lstm.make_tensordict_primer().expand(3)))
    >>> batch["features"].shape, batch["next", "recurrent_state_c"].shape
    (torch.Size([3, 8]), torch.Size([3, 1, 8]))
    """

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
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        lstm: nn.LSTM | LSTM | None = None,
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
        super().__init__("LSTM", lstm, sizes, keys, how)

    @property
    def net(self) -> nn.RNNBase:
        return self.lstm

    def cell(self, rows: Tensor, states: States, weights: Sequence[Tensor]) -> States:
        return torch.lstm_cell(rows, states, *weights)

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        wide = len(rows) >= STOCK_ROWS and rows.device.type == "cpu" and not torch.compiler.is_compiling()
        if not wide or self.lstm.bidirectional or not isinstance(self.lstm, nn.LSTM):
            return super().step(rows, states)
        out, after = call(self.lstm, rows.unsqueeze(1), tuple(state.transpose(0, 1) for state in states))
        # copied, so that an in-place activation on the output leaves the state alone
        return out.squeeze(1).clone(), tuple(state.transpose(0, 1) for state in after)

"""Linear recurrent modules (minGRU, linear recurrent unit), whose rows are computed in one pass."""

import math
from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from flatroll.kernels.recurrence import linear_recurrence
from flatroll.layout.checks import check_number
from flatroll.layout.transfers import upload
from flatroll.modules.backends.packing import States
from flatroll.modules.networks import check_sizes
from flatroll.modules.stateful import StatefulModule, StatefulOptions


class LinearRecurrence(StatefulModule):
    """Base of recurrences ``h[t] = a[t] * h[t - 1] + b[t]`` whose ``a`` and ``b`` do not depend on ``h``.

    Args:
        input_size, hidden_size, num_layers, dropout: see :class:`MinGRUModule`.
        layer_shape: shape ``S`` of a layer's ``h``. Default ``(hidden_size,)``.
        complex_numbers: whether ``h`` is complex. A column has its real and imaginary parts by turns.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
        *,
        layer_shape: tuple[int, ...] | None = None,
        complex_numbers: bool = False,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_number("dropout", dropout, least=0, below=1)
        if layer_shape is None:
            layer_shape = (hidden_size,)
        self._column_shape = layer_shape
        if complex_numbers:
            self._column_shape = (*layer_shape, 2)
        super().__init__((num_layers, math.prod(self._column_shape)), **options)

        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.dropout = dropout
        self._complex = complex_numbers

    def enter(self, layer: int, rows: Tensor) -> Tensor:
        """Return what :meth:`terms` and :meth:`output` read, ``[N, K]``. Default: the layer's input."""
        return rows

    def terms(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's factors ``a`` (``[N, *S]`` or ``[1, *S]``), and summands ``b`` that broadcast to these."""
        raise NotImplementedError

    def output(self, layer: int, rows: Tensor, states: Tensor) -> Tensor:
        """Return a layer's output ``[N, H]``, the next layer's input, as a new tensor; ``states`` are ``[N, *S]``."""
        raise NotImplementedError

    def run_layer(self, layer: int, rows: Tensor, first: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's output ``[N, H]`` and states ``[N, *S]`` over whole runs, of what :meth:`enter` returns."""
        a, b = self.terms(layer, rows)
        now = linear_recurrence(a, b.expand_as(first), first, starts)
        return self.output(layer, rows, now), now

    @override
    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        after: list[Tensor] = []
        for layer in range(self.num_layers):
            rows = self.enter(layer, rows)
            a, b = self.terms(layer, rows)
            now = a * self._numbers(states[0][:, layer]) + b
            after.append(self._column(now))
            rows = self._drop_out(layer, self.output(layer, rows, now))
        return rows, (_stacked(after),)

    @override
    def over_runs(self, rows: Tensor, stored: States, starts: Tensor) -> tuple[Tensor, States]:
        starts = upload(starts, rows.device)

        after: list[Tensor] = []
        for layer in range(self.num_layers):
            rows = self.enter(layer, rows)
            out, now = self.run_layer(layer, rows, self._numbers(stored[0][:, layer]), starts)
            after.append(self._column(now))
            rows = self._drop_out(layer, out)
        return rows, (_stacked(after),)

    def _numbers(self, column: Tensor) -> Tensor:
        """A layer's states ``[N, *S]`` of a column ``[N, F]``."""
        shaped = column.reshape(-1, *self._column_shape)
        if self._complex:
            return torch.view_as_complex(shaped.contiguous())
        return shaped

    def _column(self, states: Tensor) -> Tensor:
        """The reverse of :meth:`_numbers`."""
        if self._complex:
            states = torch.view_as_real(states)
        return states.flatten(1)

    def _drop_out(self, layer: int, out: Tensor) -> Tensor:
        """The next layer's input of a layer's output."""
        return nn.functional.dropout(out, self.dropout, self.training and layer + 1 < self.num_layers)


def check_fractions(name: str, bounds: Any) -> None:
    """Raise ValueError, naming the argument, unless these are two floats between 0 and 1, the smaller one first."""
    pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(isinstance(x, float) for x in bounds)
    if not (pair and 0 < bounds[0] <= bounds[1] < 1):
        raise ValueError(f"{name} must be two floats between 0 and 1 in ascending order, got {bounds!r}")


def _stacked(layers: list[Tensor]) -> Tensor:
    """Columns ``[N, F]`` of all layers as ``[N, num_layers, F]``; outputs do not share their memory."""
    if len(layers) == 1:
        return layers[0].unsqueeze(1)
    return torch.stack(layers, 1)


class MinGRUModule(LinearRecurrence):
    """A GRU whose gates do not depend on the state (minGRU), so all rows are computed in parallel.

    ```text
    z[t] = sigmoid(W_z x[t] + b_z)
    h[t] = (1 - z[t]) * h[t - 1] + z[t] * (W_h x[t] + b_h)
    ```

    It steps in rollouts and runs over flat batches in training as :class:`GRUModule` does, with the same keys, modes
    and boundaries, and its next states are exact on every row. A layer sees the past of its input only through the
    layers below: two or more are the rule.

    Args:
        input_size: features per row.
        hidden_size: features of the output and of each layer's state.
        num_layers: default 1.
        bias: default True.
        dropout: between layers, in training mode; default 0.
        in_key, in_keys, out_key, out_keys, done_key, traj_key, default_recurrent_mode, state: see :class:`GRUModule`.
        device, dtype: of the weights.

    Raises:
        ValueError: a size below 1, a dropout outside of [0, 1), contradicting keys.

    Reference: Feng et al. 2024, Were RNNs all we needed?, https://arxiv.org/abs/2410.01201.

    >>> from tensordict import TensorDict
    >>> gru = MinGRUModule(3, 8, num_layers=2, in_key="observation", out_key="features", default_recurrent_mode=True)
    >>> is_init = torch.tensor([True, False, True])
    >>> batch = TensorDict({"observation": torch.zeros(3, 3), "is_init": is_init}, [3])
    >>> batch = gru(batch.update(gru.make_tensordict_primer().expand(3)))
    >>> batch["features"].shape, batch["next", "recurrent_state"].shape
    (torch.Size([3, 8]), torch.Size([3, 2, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_sizes(input_size, hidden_size, num_layers, bias, device=device, dtype=dtype)
        super().__init__(input_size, hidden_size, num_layers, dropout, **options)

        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        self.gates = nn.ModuleList(
            nn.Linear(size, 2 * hidden_size, bias=bias, device=device, dtype=dtype) for size in sizes
        )

    @property
    @override
    def weight(self) -> Tensor:
        return cast(Tensor, self.gates[0].weight)

    @override
    def terms(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        gate, new = self.gates[layer](rows).chunk(2, -1)
        update = gate.sigmoid()
        return 1 - update, update * new

    @override
    def output(self, layer: int, rows: Tensor, states: Tensor) -> Tensor:
        # clone the last layer's states, so that an in-place activation on the output does not change them
        if layer + 1 == self.num_layers:
            return states.clone()
        return states


class LinearRecurrentModule(LinearRecurrence):
    """A linear recurrent unit: each feature of the state decays at its own learned rate.

    ```text
    h[t] = a * h[t - 1] + sqrt(1 - a^2) * (B x[t])     a = exp(-exp(nu)), one number in (0, 1) per feature
    y[t] = C h[t] + D x[t] + d
    ```

    With :func:`torch.nn.functional.gelu` between layers. The rates are drawn so that ``a`` is uniform between
    ``decay[0]`` and ``decay[1]``. Everything else is as for :class:`MinGRUModule`.

    Args:
        input_size, hidden_size, num_layers, dropout: as for :class:`MinGRUModule`.
        decay: bounds of ``a`` at the start, within (0, 1); default (0.9, 0.999), memories of 10 to 1,000 steps.
        in_key, in_keys, out_key, out_keys, done_key, traj_key, default_recurrent_mode, state: see :class:`GRUModule`.
        device, dtype: of the weights.

    Raises:
        ValueError: as for :class:`MinGRUModule`, or bounds outside of (0, 1).

    Reference: Orvieto et al. 2023, Resurrecting recurrent neural networks for long sequences,
    https://arxiv.org/abs/2303.06349; here with real rates.

    >>> unit = LinearRecurrentModule(3, 8, in_key="observation", out_key="features")
    >>> unit.make_tensordict_primer().defaults["recurrent_state"].shape
    torch.Size([1, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        decay: tuple[float, float] = (0.9, 0.999),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_sizes(input_size, hidden_size, num_layers, device=device, dtype=dtype)
        super().__init__(input_size, hidden_size, num_layers, dropout, **options)

        check_fractions("decay", decay)

        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.inputs = nn.ModuleList(nn.Linear(size, hidden_size, bias=False, **place) for size in sizes)
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, hidden_size, **place) for _ in sizes)
        self.skips = nn.ModuleList(nn.Linear(size, hidden_size, bias=False, **place) for size in sizes)
        rates = torch.empty(num_layers, hidden_size, **place).uniform_(*decay)
        self.log_rates = nn.Parameter(rates.log().neg().log())

    @property
    @override
    def weight(self) -> Tensor:
        return self.log_rates

    @override
    def terms(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        rate = -self.log_rates[layer : layer + 1].exp()
        return rate.exp(), (-torch.expm1(2 * rate)).sqrt() * self.inputs[layer](rows)

    @override
    def output(self, layer: int, rows: Tensor, states: Tensor) -> Tensor:
        out: Tensor = self.outputs[layer](states) + self.skips[layer](rows)
        if layer + 1 == self.num_layers:
            return out
        return nn.functional.gelu(out)

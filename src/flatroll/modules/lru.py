"""LRUModule: a linear recurrent unit of complex numbers."""

import math
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from flatroll.layout.checks import check_choice, check_number
from flatroll.modules.linear import LinearRecurrence, check_fractions
from flatroll.modules.networks import check_sizes
from flatroll.modules.stateful import StatefulOptions


class LRUModule(LinearRecurrence):
    """A linear recurrent unit (LRU): each feature of the state decays at a rate and turns by an angle of its own.

    ```text
    h[t] = l * h[t - 1] + g * (B x[t])        l = exp(-exp(nu) + i exp(theta)), of modulus below 1
    y[t] = Re(C h[t]) + D x[t] + d
    ```

    ``h``, ``l``, ``B`` and ``C`` are complex. ``nu``, ``theta`` and the scale ``g`` are learned; at the start the ``l``
    lie uniformly in a ring of the complex plane and ``g`` is ``sqrt(1 - |l|^2)``, so that the state keeps the scale of
    its input. With :func:`torch.nn.functional.gelu` between layers. A state is stored as its real and imaginary parts
    by turns, ``[*B, num_layers, 2 * hidden_size]``. Everything else is as for :class:`MinGRUModule`;
    :class:`LinearRecurrentModule` has real rates and half the state.

    Args:
        input_size, hidden_size, num_layers, dropout: as for :class:`MinGRUModule`.
        ring: bounds of ``|l|`` at the start, within (0, 1); default (0.9, 0.999), memories of 10 to 1,000 steps.
        max_phase: the largest angle at the start, in radians per step, above 0 and at most 2 pi (the default). A small
            one, such as 0.3, suits long memories.
        in_key, in_keys, out_key, out_keys, done_key, traj_key, default_recurrent_mode, state: see :class:`GRUModule`.
        device, dtype: of the weights; float32 or float64.

    Raises:
        ValueError: as for :class:`MinGRUModule`, another dtype, or a ring or an angle out of bounds.

    Reference: Orvieto et al. 2023, Resurrecting recurrent neural networks for long sequences,
    https://arxiv.org/abs/2303.06349.

    >>> unit = LRUModule(3, 8, in_key="observation", out_key="features")
    >>> unit.make_tensordict_primer().defaults["recurrent_state"].shape
    torch.Size([1, 16])
    """

    state_meaning: ClassVar[str] = "num_layers x 2 hidden_size"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        ring: tuple[float, float] = (0.9, 0.999),
        max_phase: float = math.tau,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StatefulOptions],
    ) -> None:
        check_sizes(input_size, hidden_size, num_layers, device=device, dtype=dtype)
        check_choice("dtype", dtype, (None, torch.float32, torch.float64))  # of the parts of complex numbers
        check_fractions("ring", ring)
        check_number("max_phase", max_phase, above=0, most=math.tau)
        super().__init__(input_size, hidden_size, num_layers, dropout, complex_numbers=True, **options)

        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        # A complex product by real weights: both parts of B x, and Re(C h) of both parts of h.
        self.inputs = nn.ModuleList(nn.Linear(size, 2 * hidden_size, bias=False, **place) for size in sizes)
        self.outputs = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size, **place) for _ in sizes)
        self.skips = nn.ModuleList(nn.Linear(size, hidden_size, bias=False, **place) for size in sizes)
        for size, into, out in zip(sizes, self.inputs, self.outputs, strict=True):
            nn.init.normal_(into.weight, std=(2 * size) ** -0.5)  # type: ignore[arg-type]
            nn.init.normal_(out.weight, std=hidden_size**-0.5)  # type: ignore[arg-type]

        # Uniform in the area of the ring: the squares of the moduli are uniform.
        squares = torch.empty(num_layers, hidden_size, **place).uniform_(ring[0] ** 2, ring[1] ** 2)
        angles = torch.empty(num_layers, hidden_size, **place).uniform_(0.0, max_phase)
        least = torch.finfo(angles.dtype).tiny
        self.log_rates = nn.Parameter((-0.5 * squares.log()).log())
        self.log_angles = nn.Parameter(angles.clamp(min=least).log())
        self.log_scales = nn.Parameter(0.5 * torch.log1p(-squares))

    @property
    @override
    def weight(self) -> Tensor:
        return self.log_rates

    @override
    def terms(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(layer, layer + 1)
        factor = torch.polar((-self.log_rates[here].exp()).exp(), self.log_angles[here].exp())
        # autocast may have made it half precision, which complex numbers do not have
        mapped = cast(Tensor, self.inputs[layer](rows)).to(self.weight.dtype)
        return factor, self.log_scales[here].exp() * self._numbers(mapped)

    @override
    def output(self, layer: int, rows: Tensor, states: Tensor) -> Tensor:
        out: Tensor = self.outputs[layer](self._column(states)) + self.skips[layer](rows)
        if layer + 1 == self.num_layers:
            return out
        return nn.functional.gelu(out)

"""`Bounded` and `Unbounded`: specs of numbers with and without bounds."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import as_numbers, check_choice, check_device
from flatroll.specs.arithmetic import Limits, as_double, draw_between, is_whole, to_ordered, whole_range
from flatroll.specs.shapes import Shape, grid, shorten
from flatroll.specs.tensor_spec import Device, DType, Numbers, Ranged, TensorSpec, as_dtype


@dataclass(frozen=True)
class Interval:
    """The domain of a numeric spec: bounds, tensors of its shape (expanded views)."""

    low: Tensor
    high: Tensor


class NumberSpec(TensorSpec):
    """Base of numeric specs; the class depends on the domain, real or integer."""

    _by_domain: ClassVar[dict[str, type]]  # the class for each domain
    _own_domain: ClassVar[str | None] = None
    _default_dtype: torch.dtype | None = None

    def __init_subclass__(cls) -> None:
        if cls._own_domain is not None:
            cls._by_domain[cls._own_domain] = cls

    def _set_up(self, shape: Shape, device: Device, dtype: torch.dtype, domain: str | None) -> None:
        """Initialise and set the class of the domain: the given one, the class's own, or the dtype's."""
        if domain is None or (isinstance(domain, str) and not domain):
            domain = self._own_domain or _usual_domain(dtype)
        TensorSpec.__init__(self, shape, None, device, dtype, check_choice("domain", domain, self._by_domain))

        if self._own_domain is None:
            self.__class__ = self._by_domain[domain]

    def _dtype_or_default(self, dtype: DType) -> torch.dtype:
        if dtype is None:
            return self._default_dtype or torch.get_default_dtype()
        return as_dtype(dtype)

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        new = self._copy_with(dtype=dtype, domain=_usual_domain(dtype))
        new.__class__ = self._by_domain[new.domain]
        return new


class Bounded(NumberSpec, Ranged):
    """Numbers between two bounds, inclusive.

    The class of the result is `BoundedContinuous` or `BoundedDiscrete`, as ``domain`` says, or else the dtype.

    Args:
        low, high: numbers, arrays or tensors that broadcast to the shape. Floats may be infinite on either side.
        shape: shape of the tensors. Default: that of the bounds, one of which then has dims.
        device: default that of the bounds if they are tensors, else the CPU.
        dtype: default torch's default dtype.
        domain: ``"continuous"`` or ``"discrete"``.

    Raises:
        ValueError: low is above high, a bound is NaN or does not fit the dtype, or no shape follows.

    >>> spec = Bounded(low=-1, high=1, shape=(3,))
    >>> spec
    BoundedContinuous(shape=(3,), low=-1.0, high=1.0, dtype=torch.float32)
    >>> spec.is_in(torch.tensor([0.0, 1.0, -1.0])), spec.project(torch.tensor([0.0, 2.0, float("nan")])).tolist()
    (True, [0.0, 1.0, 0.0])
    >>> spec.expand(1000, 3).rand().shape
    torch.Size([1000, 3])
    """

    _by_domain: ClassVar[dict[str, type]] = {}
    _whole = False
    _range_text = "[{}, {}]"

    def __init__(
        self,
        low: Numbers | None = None,
        high: Numbers | None = None,
        shape: Shape = None,
        device: Device = None,
        dtype: DType = None,
        domain: str | None = None,
    ) -> None:
        dtype = self._dtype_or_default(dtype)
        if device is not None:
            device = check_device("device", device)
        else:
            tensors = (bound for bound in (low, high) if isinstance(bound, Tensor) and not bound.is_meta)
            device = next((bound.device for bound in tensors), None)

        bounds = {"low": _bound("low", low, dtype, device), "high": _bound("high", high, dtype, device)}
        if shape is None:
            if not any(bound.ndim for bound in bounds.values()):
                raise ValueError(
                    f"the shape must be given, or follow from low or high, which have no dims: got low={low!r}, "
                    f"high={high!r}. Pass shape=() for one number"
                )
            shape = np.broadcast_shapes(*(tuple(bound.shape) for bound in bounds.values()))
        self._set_up(shape, device, dtype, domain)

        for name, bound in bounds.items():
            try:
                full = bound.expand(self._frame.shape)
            except RuntimeError as error:
                raise ValueError(
                    f"{name} must broadcast to shape {tuple(self.shape)}, got {tuple(bound.shape)}"
                ) from error
            self._parameters[name] = shorten(full).clone()  # a copy: the caller may write to the original

        least = self.low
        most = self.high
        wrong = to_ordered(least) > to_ordered(most)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            where = f" at {list(at)}" if at else ""
            raise ValueError(
                f"low must not be above high, got {least[at].item()} and {most[at].item()}{where}"
            )

    @property
    def low(self) -> Tensor:
        """The lower bounds, of the spec's shape (a dim of any length has size 1)."""
        return self._full("low")

    @property
    def high(self) -> Tensor:
        """The upper bounds, of the spec's shape (a dim of any length has size 1)."""
        return self._full("high")

    def open_where(self, below: Tensor, above: Tensor) -> Self:
        """Return the spec with marks, for `rand`, where integer bounds are only the limits of their dtype.

        Args:
            below, above: bool, of the spec's shape, True where there is no lower or no upper bound.
        """
        opened = {"open_below": below, "open_above": above}
        opened = {name: shorten(flags.to(self.device)).clone() for name, flags in opened.items()}
        return self._copy_with(_parameters={**self._parameters, **opened})

    @property
    def open_ends(self) -> tuple[bool, bool]:
        """Return whether whole numbers have no lower bound anywhere, and whether no upper bound."""
        below, above = (self._parameters.get(f"open_{side}") for side in ("below", "above"))
        return below is not None and bool(below.all()), above is not None and bool(above.all())

    @property
    @override
    def space(self) -> Interval:
        return Interval(self.low, self.high)

    @override
    def _limits(self) -> tuple[Tensor, Tensor]:
        return self._parameters["low"], self._parameters["high"]

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw values ``[*shape, *self.shape]`` as Gymnasium's Box does.

        Uniform between two bounds (integers include both), exponential from one bound, normal without bounds.
        """
        assert self.dtype is not None
        limits = self._cache.get("draws")
        if limits is None:
            low, high = (as_double(bound) for bound in self._limits())
            if "open_below" in self._parameters:  # only integer dtypes, which cannot represent infinity
                low = low.masked_fill(self._parameters["open_below"], -torch.inf)
                high = high.masked_fill(self._parameters["open_above"], torch.inf)
            limits = Limits.of(low, high)
            self._cache["draws"] = limits

        drawn = draw_between(limits, self._full_shape(shape), is_whole(self.dtype), generator)
        return drawn.to(self.dtype)

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        new = super()._with_dtype(dtype)
        low, high = self._limits()
        new._parameters = {"low": _bound("low", low, dtype, None), "high": _bound("high", high, dtype, None)}
        return new

    def _counts(self) -> list[int]:
        """Return the number of values per entry; NotImplementedError if it is infinite."""
        if self.dtype is None or not is_whole(self.dtype) or -1 in self.shape:
            raise NotImplementedError(f"the values of {self!r} cannot be listed: there are infinitely many")

        ends = zip(self.low.reshape(-1).tolist(), self.high.reshape(-1).tolist(), strict=True)
        return [int(high) - int(low) + 1 for low, high in ends]

    @override
    def cardinality(self) -> int | float:
        try:
            return math.prod(self._counts())
        except NotImplementedError:
            return float("inf")

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        steps = grid([torch.arange(count, device=self.device) for count in self._counts()])
        return (steps.reshape(-1, *self.shape) + self.low.long()).to(self.dtype)

    @override
    def _repr_parts(self) -> list[str]:
        parts = []
        for name, bound in zip(("low", "high"), self._limits(), strict=True):
            numbers = bound.reshape(-1).tolist()
            least = min(numbers, default="[]")
            most = max(numbers, default="[]")
            if least == most:
                parts.append(f"{name}={least}")
            else:
                parts.append(f"{name}={least}..{most}")
        return parts


class BoundedContinuous(Bounded):
    """Real numbers between two bounds, see `Bounded`."""

    _own_domain = "continuous"


class BoundedDiscrete(Bounded):
    """Whole numbers between two bounds, see `Bounded`."""

    _own_domain = "discrete"


class Unbounded(NumberSpec):
    """All numbers of the dtype, except NaN.

    The class of the result is `UnboundedContinuous` or `UnboundedDiscrete`, as ``domain`` says, or else the dtype.

    Args:
        shape: shape of the tensors. A dim of -1 takes any length.
        device: default the CPU.
        dtype: default torch's default dtype.
        domain: ``"continuous"`` or ``"discrete"``.

    >>> Unbounded((2, 3), dtype=torch.int64).is_in(torch.full((7, 2, 3), -5)), Unbounded((-1,)).rand().shape
    (True, torch.Size([1]))
    """

    _by_domain: ClassVar[dict[str, type]] = {}

    def __init__(
        self, shape: Shape = (1,), device: Device = None, dtype: DType = None, domain: str | None = None
    ) -> None:
        self._set_up(shape, device, self._dtype_or_default(dtype), domain)

    @property
    @override
    def space(self) -> Interval:
        assert self.dtype is not None
        if self.dtype is torch.bool:
            ends = (0, 1)
        else:
            info: Any = torch.iinfo if is_whole(self.dtype) else torch.finfo
            ends = (info(self.dtype).min, info(self.dtype).max)
        low, high = (torch.tensor(end, dtype=self.dtype, device=self.device) for end in ends)

        sizes = self._full_shape(())
        return Interval(low.expand(sizes), high.expand(sizes))

    @property
    def open_ends(self) -> tuple[bool, bool]:
        """Return whether the lower and the upper end are open: both for a signed dtype, neither for an unsigned one."""
        assert self.dtype is not None
        return self.dtype.is_signed, self.dtype.is_signed

    @override
    def all_allowed(self, value: Tensor) -> bool:
        # False for NaN, which does not equal itself.
        return is_whole(value.dtype) or torch.equal(value, value)

    @override
    def allowed(self, value: Tensor) -> Tensor:
        return value == value  # False only for NaN

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw values ``[*shape, *self.shape]``: normal, or uniform where the dtype has at most 16 bits.

        Whole numbers are rounded down; those of 32 and 64 bits without a sign are exponential.
        """
        assert self.dtype is not None
        sizes = self._full_shape(shape)
        if not is_whole(self.dtype):
            return torch.randn(sizes, generator=generator, device=self.device, dtype=self.dtype)

        least, most = map(float, whole_range(self.dtype))
        if most > 2**16:
            least = 0.0 if least == 0 else -torch.inf
            most = torch.inf
        ends = (torch.tensor(end, device=self.device, dtype=torch.float64) for end in (least, most))
        return draw_between(Limits.of(*ends), sizes, True, generator).to(self.dtype)

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        return torch.zeros(self._full_shape(shape), dtype=self.dtype, device=self.device)

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        return torch.ones(self._full_shape(shape), dtype=self.dtype, device=self.device)

    @override
    def closest(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        value = value.to(self.device)
        if not is_whole(value.dtype):
            value = value.nan_to_num(0.0, torch.inf, -torch.inf)
        if not is_whole(self.dtype):
            return value.to(self.dtype)

        space = self.space
        whole = BoundedDiscrete(space.low, space.high, dtype=self.dtype, shape=self._full_shape(()))
        return whole.closest(value)


class UnboundedContinuous(Unbounded):
    """Any real numbers, see `Unbounded`."""

    _own_domain = "continuous"


class UnboundedDiscrete(Unbounded):
    """Any whole numbers, see `Unbounded`.

    Args:
        shape, device, domain: as `Unbounded`.
        dtype: default int64.
    """

    _own_domain = "discrete"
    _default_dtype = torch.int64


def _usual_domain(dtype: torch.dtype) -> str:
    """The domain of a dtype's numbers."""
    if is_whole(dtype):
        return "discrete"
    return "continuous"


def _bound(name: str, value: Numbers | None, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A bound as a tensor of the dtype, which must be able to hold it."""
    if value is None:
        raise ValueError(f"{name} must be given: a number, an array or a tensor")
    if dtype.is_complex:
        raise ValueError(f"dtype must be a real dtype, got {dtype}")

    # Floats as float64: torch would round them to float32, and 1e39 to inf. Only uint64 holds the largest ints.
    wide = None
    if isinstance(value, float):
        wide = torch.float64
    elif isinstance(value, int) and value >= 2**63:
        wide = torch.uint64
    given = as_numbers(name, value, device, wide)
    if given.is_floating_point() and bool(given.isnan().any()):
        raise ValueError(f"{name} must not be NaN, got {value!r}")

    bound = given.to(dtype)
    # Floats may be rounded, but must stay finite; whole numbers must not change.
    changed = is_whole(dtype) and not torch.equal(bound.to(given.dtype), given)
    if dtype is torch.uint64 and given.dtype is not torch.uint64:
        changed = changed or bool((given < 0).any())
    if changed or bool((bound.isinf() & ~given.isinf()).any()):
        raise ValueError(f"{dtype} cannot hold {name}={value!r}: choose another dtype or bound")
    return bound

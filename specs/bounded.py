"""`Bounded` and `Unbounded`: tensors of numbers between bounds, or of any numbers."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.specs.draws import Limits, draw_between
from flatroll.specs.leaf import Device, TensorSpec, checked_dtype, is_whole
from flatroll.specs.shapes import Shape, shortened

_NOT_COMPARED = {torch.uint16, torch.uint32, torch.uint64}  # torch has no clamp and no order for these


@dataclass(frozen=True)
class Interval:
    """The domain of a spec of numbers: bounds, tensors of its shape (views of less memory)."""

    low: Tensor
    high: Tensor


class Bounded(TensorSpec):
    """Numbers between two bounds, both included.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an object of the class that the dtype, or ``domain``, asks for."""
        if cls is Bounded:
            return object.__new__(_by_domain(kwargs, args[4:5], BoundedContinuous, BoundedDiscrete))
        return object.__new__(cls)

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: Shape = None,
        device: Device = None,
        dtype: Any = None,
        domain: str | None = None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else checked_dtype(dtype)
        if device is None:
            device = next((bound.device for bound in (low, high) if isinstance(bound, Tensor)), None)
        bounds = [
            _bound(name, value, dtype, None if device is None else torch.device(device))
            for name, value in (("low", low), ("high", high))
        ]
        if shape is None:
            if not any(bound.ndim for bound in bounds):
                raise ValueError(
                    f"the shape must be given, or follow from low or high, which have no dims: got low={low!r}, "
                    f"high={high!r}. Give shape=() for one number"
                )
            shape = np.broadcast_shapes(*(tuple(bound.shape) for bound in bounds))
        super().__init__(shape, None, device, dtype, _domain(domain, dtype))
        try:
            self._parameters = {
                name: shortened(bound.expand(self._frame.shape))
                for name, bound in zip(("low", "high"), bounds, strict=True)
            }
        except RuntimeError as error:
            raise ValueError(
                f"low and high must broadcast to shape {tuple(self.shape)}, got {tuple(bounds[0].shape)} and "
                f"{tuple(bounds[1].shape)}"
            ) from error
        low, high = (_comparable(bound) for bound in self._bounds())
        wrong = low > high
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"low must not be above high, got {low.expand(wrong.shape)[tuple(at)].item()} and "
                f"{high.expand(wrong.shape)[tuple(at)].item()}{f' at {at}' if at else ''}"
            )

    @property
    def low(self) -> Tensor:
        """The lower bounds, of the spec's shape (a dim of any length has size 1)."""
        return self._full("low")

    @property
    def high(self) -> Tensor:
        """The upper bounds, of the spec's shape (a dim of any length has size 1)."""
        return self._full("high")

    def set_open(self, bounded_below: Tensor, bounded_above: Tensor) -> None:
        """Say which bounds of whole numbers are only the ends of their dtype, which matters to `rand`.

        Args:
            bounded_below, bounded_above: bool, of the spec's shape, as those of `gymnasium.spaces.Box`.
        """
        given = {"bounded_below": bounded_below, "bounded_above": bounded_above}
        self._parameters.update({name: shortened(known.to(self.device)) for name, known in given.items()})
        self._cache.clear()

    @property
    @override
    def space(self) -> Interval:
        return Interval(self.low, self.high)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        return self._parameters["low"], self._parameters["high"]

    @override
    def is_in(self, value: Any) -> bool:
        if self._misfit(value) is not None:
            return False
        if self.dtype in _NOT_COMPARED or self.dtype is torch.bool:
            return bool(self._allowed(value).all())
        low, high = self._bounds()
        return torch.equal(value.clamp(low, high), value)  # NaN is equal to nothing

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        low, high = self._bounds()
        value, low, high = _comparable(value), _comparable(low), _comparable(high)
        return (value >= low) & (value <= high)

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        at = index[len(index) - self.ndim :]
        if -1 in self.shape:
            return f"[{self.low.min().item()}, {self.high.max().item()}]"
        at = tuple(0 if size == 1 else i for i, size in zip(at, self.shape, strict=True))
        return f"[{self.low[at].item()}, {self.high[at].item()}]"

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw values ``[*shape, *self.shape]`` as Gymnasium's Box does.

        Uniform between two bounds (whole numbers with both ends), exponential from one, normal where there is none.
        """
        assert self.dtype is not None
        limits = self._cache.get("limits")
        if limits is None:
            low, high = (bound.double() for bound in self._bounds())
            if "bounded_below" in self._parameters:  # whole numbers, which cannot be infinite
                low = low.masked_fill(~self._parameters["bounded_below"], -torch.inf)
                high = high.masked_fill(~self._parameters["bounded_above"], torch.inf)
            limits = self._cache["limits"] = Limits.of(low, high)
        drawn = draw_between(limits, self._full_shape(shape), is_whole(self.dtype), generator)
        # The widest bounds of int64 are rounded up in float64, beyond what int64 holds.
        return self._inside(drawn.to(self.dtype)) if self.dtype is torch.int64 else drawn.to(self.dtype)

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        return self._nearest(0, shape)

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        return self._nearest(1, shape)

    def _nearest(self, number: int, shape: Shape) -> Tensor:
        return self._inside(torch.full(self._full_shape(shape), number, dtype=self.dtype, device=self.device))

    def _inside(self, value: Tensor) -> Tensor:
        low, high = self._bounds()
        if self.dtype in _NOT_COMPARED or self.dtype is torch.bool:
            assert self.dtype is not None
            number, least, most = (_comparable(part) for part in (value, low, high))
            return number.clamp(least, most).to(self.dtype)
        return value.clamp(low, high)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        low, high = self._bounds()
        numbers = value.to(self.device)
        if numbers.is_floating_point():
            numbers = numbers.double().nan_to_num(0.0, torch.inf, -torch.inf)
            numbers = numbers.round() if is_whole(self.dtype) else numbers
            numbers = numbers.clamp(low.double(), high.double())  # first, for what the dtype cannot hold
        else:
            numbers = _comparable(numbers).clamp(_whole_limits(low), _whole_limits(high))
        return self._inside(numbers.to(self.dtype))

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        bounds = {name: _bound(name, self._parameters[name], dtype, None) for name in ("low", "high")}
        domain = _domain(None, dtype)
        new = self._changed(dtype=dtype, domain=domain, _parameters=bounds)
        new.__class__ = type(self) if domain == self.domain else _sibling(self, domain)
        return new

    @override
    def cardinality(self) -> int | float:
        if self.dtype is None or not is_whole(self.dtype) or -1 in self.shape:
            return float("inf")
        counts = (self.high.long() - self.low.long() + 1).reshape(-1).tolist()
        total = 1
        for count in counts:
            total *= count
        return total

    @override
    def enumerate(self, use_mask: bool = False) -> Tensor:
        if self.dtype is None or not is_whole(self.dtype) or -1 in self.shape:
            raise NotImplementedError(f"the values of {self!r} cannot be listed: they have no end")
        low, high = self.low.reshape(-1).tolist(), self.high.reshape(-1).tolist()
        ranges = [torch.arange(a, b + 1, device=self.device) for a, b in zip(low, high, strict=True)]
        return grid(ranges).to(self.dtype).reshape(-1, *self.shape)

    @override
    def _repr_parts(self) -> list[str]:
        low, high = self._bounds()
        return [f"{name}={_extent(bound)}" for name, bound in (("low", low), ("high", high))]


class BoundedContinuous(Bounded):
    """Real numbers between two bounds, see `Bounded`."""

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: Shape = None,
        device: Device = None,
        dtype: Any = None,
        domain: str = "continuous",
    ) -> None:
        super().__init__(low, high, shape, device, dtype, domain)


class BoundedDiscrete(Bounded):
    """Whole numbers between two bounds, see `Bounded`."""

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: Shape = None,
        device: Device = None,
        dtype: Any = None,
        domain: str = "discrete",
    ) -> None:
        super().__init__(low, high, shape, device, dtype, domain)


class Unbounded(TensorSpec):
    """Any numbers that the dtype holds; NaN is none.

    The class of the result is `UnboundedContinuous` or `UnboundedDiscrete`, as ``domain`` says, or else the dtype.

    Args:
        shape: shape of the tensors. A dim of -1 takes any length.
        device: default the CPU.
        dtype: default torch's default dtype.
        domain: ``"continuous"`` or ``"discrete"``.

    >>> Unbounded((2, 3), dtype=torch.int64).is_in(torch.full((7, 2, 3), -5)), Unbounded((-1,)).rand().shape
    (True, torch.Size([1]))
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an object of the class that the dtype, or ``domain``, asks for."""
        if cls is Unbounded:
            return object.__new__(_by_domain(kwargs, args[2:3], UnboundedContinuous, UnboundedDiscrete))
        return object.__new__(cls)

    def __init__(
        self, shape: Shape = (1,), device: Device = None, dtype: Any = None, domain: str | None = None
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else checked_dtype(dtype)
        super().__init__(shape, None, device, dtype, _domain(domain, dtype))

    @property
    @override
    def space(self) -> Interval:
        assert self.dtype is not None
        ends = torch.tensor(_ends(self.dtype), dtype=self.dtype, device=self.device)
        low, high = (end.expand(self._full_shape(())) for end in ends)
        return Interval(low, high)

    @override
    def is_in(self, value: Any) -> bool:
        return self._misfit(value) is None and torch.equal(value, value)  # NaN is equal to nothing

    @override
    def _allowed(self, value: Tensor) -> Tensor:
        return value == value  # all but NaN

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw values ``[*shape, *self.shape]``: normal, or uniform where the dtype has at most 16 bits.

        Whole numbers are rounded down.
        """
        assert self.dtype is not None
        sizes = self._full_shape(shape)
        if self.dtype.is_complex or self.dtype.is_floating_point:
            return torch.randn(sizes, generator=generator, device=self.device, dtype=self.dtype)
        least, most = _ends(self.dtype)
        if self.dtype is not torch.bool and torch.iinfo(self.dtype).bits >= 32:
            least, most = 0 if least == 0 else -torch.inf, torch.inf
        ends = (torch.tensor(end, device=self.device, dtype=torch.float64) for end in (least, most))
        limits = Limits.of(*ends)
        return draw_between(limits, sizes, True, generator).to(self.dtype)

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        return torch.zeros(self._full_shape(shape), dtype=self.dtype, device=self.device)

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        return torch.ones(self._full_shape(shape), dtype=self.dtype, device=self.device)

    @override
    def _projected(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        if value.is_floating_point():
            value = value.nan_to_num(0.0, torch.inf, -torch.inf)
            if is_whole(self.dtype):
                value = value.double().round().clamp(*_ends(self.dtype))
        return value.to(device=self.device, dtype=self.dtype)

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        domain = _domain(None, dtype)
        new = self._changed(dtype=dtype, domain=domain)
        new.__class__ = type(self) if domain == self.domain else _sibling(self, domain)
        return new


class UnboundedContinuous(Unbounded):
    """Any real numbers, see `Unbounded`."""


class UnboundedDiscrete(Unbounded):
    """Any whole numbers, see `Unbounded`.

    Args:
        shape, device, domain: as `Unbounded`.
        dtype: default int64.
    """

    def __init__(
        self,
        shape: Shape = (1,),
        device: Device = None,
        dtype: Any = torch.int64,
        domain: str | None = None,
    ) -> None:
        super().__init__(shape, device, dtype, domain)


def grid(ranges: list[Tensor]) -> Tensor:
    """All combinations of the entries of ranges ``[count, len(ranges)]``, the last one changing fastest."""
    if not ranges:
        return torch.zeros(1, 0, dtype=torch.int64)
    parts = torch.meshgrid(*ranges, indexing="ij")
    return torch.stack([part.reshape(-1) for part in parts], -1)


def _by_domain(kwargs: dict[str, Any], dtype: tuple[Any, ...], continuous: type, discrete: type) -> type:
    """The class that the arguments of a constructor ask for; ``dtype`` is the positional one, if given."""
    given = kwargs.get("dtype", dtype[0] if dtype else None)
    kind = torch.get_default_dtype() if given is None else checked_dtype(given)
    return continuous if _domain(kwargs.get("domain"), kind) == "continuous" else discrete


def _sibling(spec: TensorSpec, domain: str) -> Any:
    pairs = {
        "continuous": {BoundedDiscrete: BoundedContinuous, UnboundedDiscrete: UnboundedContinuous},
        "discrete": {BoundedContinuous: BoundedDiscrete, UnboundedContinuous: UnboundedDiscrete},
    }
    return pairs[domain].get(type(spec), type(spec))


def _domain(domain: str | None, dtype: torch.dtype) -> str:
    if domain is None:
        return "discrete" if is_whole(dtype) else "continuous"
    if domain not in ("continuous", "discrete"):
        raise ValueError(f"domain must be 'continuous' or 'discrete', got {domain!r}")
    return domain


def _bound(name: str, value: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A bound as a tensor of the dtype, which must be able to hold it."""
    if value is None:
        raise ValueError(f"{name} must be given: a number, an array or a tensor")
    wide = torch.float64 if isinstance(value, float) else None  # or torch rounds it to float32, 1e39 to inf
    given = torch.as_tensor(value, device=device, dtype=wide)
    if given.is_floating_point() and bool(given.isnan().any()):
        raise ValueError(f"{name} must not be NaN, got {value!r}")
    bound = given.to(dtype)
    same = torch.equal(bound.to(given.dtype), given)
    # Floats are rounded; whole numbers must be themselves, and what is finite must stay so.
    if (is_whole(dtype) and not same) or bool((bound.isinf() & ~given.isinf()).any()):
        raise ValueError(f"{dtype} cannot hold {name}={value!r}: choose another dtype or bound")
    return bound


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest number of a dtype."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def _comparable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that torch can order."""
    if tensor.dtype is torch.uint64:
        return tensor.double()
    return tensor.long() if tensor.dtype in _NOT_COMPARED or tensor.dtype is torch.bool else tensor


def _whole_limits(bound: Tensor) -> Tensor:
    """Bounds for whole numbers, in int64 as far as it reaches."""
    if not bound.is_floating_point():
        return _comparable(bound)
    least, most = _ends(torch.int64)
    return bound.double().clamp(least, most / 2).long()


def _extent(bound: Tensor) -> str:
    """One number, or the least and the largest of a tensor of bounds."""
    if bound.numel() == 0:
        return "[]"
    numbers = _comparable(bound)
    least, most = numbers.min().item(), numbers.max().item()
    return f"{least}" if least == most else f"{least}..{most}"

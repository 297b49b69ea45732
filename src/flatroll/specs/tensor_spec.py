"""`TensorSpec`, the base of all specs: a shape, a dtype, a device, and shape operations that copy nothing."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import as_numbers, as_text, check_device, check_flags
from flatroll.layout.keys import NestedKey
from flatroll.specs.arithmetic import as_double, from_ordered, is_whole, to_ordered
from flatroll.specs.shapes import (
    ANY_LENGTH,
    Gather,
    Operation,
    Shape,
    as_shape,
    dims_used,
    expanded_scalar,
    shorten,
    with_any,
)

Device: TypeAlias = torch.device | str | int | None
DType: TypeAlias = torch.dtype | DTypeLike | None
#: Numbers or flags as arguments: one, a list or array of them, or a tensor.
Numbers: TypeAlias = ArrayLike | Tensor
_FIXED = {"shape", "dtype", "device"}  # set only once; shape operations and `to` return another spec
#: torch function -> what it does to specs; filled by `implements`.
TORCH_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


class OutsideSpecError(AssertionError, ValueError):
    """A value is not in the domain of a spec."""


def implements(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an implementation of a torch function, such as ``torch.stack``, for specs."""

    def register(own: Callable[..., Any]) -> Callable[..., Any]:
        TORCH_FUNCTIONS[function] = own
        return own

    return register


def as_dtype(dtype: DType) -> torch.dtype:
    """Convert a torch dtype, a name or a NumPy dtype to a torch dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype

    named = None
    if isinstance(dtype, str):
        named = getattr(torch, dtype, None)
    if isinstance(named, torch.dtype):
        return named
    try:
        return torch.from_numpy(np.zeros(0, dtype)).dtype
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"dtype must be a torch dtype, such as torch.float32, got {as_text(dtype)}"
        ) from error


class TensorSpec(ABC):
    """Describes a set of tensors: their shape, dtype, device and values.

    A spec's shape has the dims of a batch first, then those of one value. It takes the shape operations of tensors
    (`expand`, `reshape`, `flatten`, `unflatten`, `squeeze`, `unsqueeze`, indexing, `unbind`, ``torch.stack``), which
    return views of its parameters: nothing is copied. The last dims of some classes, such as the categories of
    `OneHot`, belong to one value and cannot be indexed or reshaped.

    Args:
        shape: shape of the tensors. A dim of -1 takes any length.
        space: what subclasses show as `space`.
        device: device of the tensors that are drawn; None is the CPU.
        dtype: dtype of the tensors.
        domain: ``"continuous"``, ``"discrete"`` or empty.
    """

    shape: torch.Size
    device: torch.device | None
    dtype: torch.dtype | None
    domain: str
    value_dims: int = 0  # how many of the last dims belong to one value
    _default_device: torch.device | None = torch.device("cpu")
    _frame: Tensor  # one number in memory, expanded to the batch dims; operations on it give the new shape
    _parameters: dict[str, Tensor]  # each broadcasts to [*batch dims, ...]; see `shorten`
    _kept: int = 0  # how many of a parameter's last dims belong to one value
    _cache: dict[str, Any]  # computed from the parameters when first needed

    def __init__(
        self,
        shape: Shape,
        space: Any = None,
        device: Device = None,
        dtype: DType = torch.float32,
        domain: str = "",
    ) -> None:
        self.shape = as_shape(shape)
        self._space = space
        if device is None:
            self.device = self._default_device
        else:
            self.device = check_device("device", device)
        self.dtype = None if dtype is None else as_dtype(dtype)
        self.domain = domain

        self._frame = expanded_scalar(self.shape[: len(self.shape) - self.value_dims])
        self._parameters = {}
        self._cache = {}

    @property
    def space(self) -> Any:
        """The domain of the values: an object with ``low`` and ``high``, or with ``n``."""
        return self._space

    # --- shape ----------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def batch_ndim(self) -> int:
        """Number of batch dims."""
        return self._frame.ndim

    def _copy_with(self, **attributes: Any) -> Self:
        new = object.__new__(type(self))
        state = vars(new)
        state.update(vars(self))
        # A copy: masks are replaced in it.
        state["_cache"] = {}
        state["_parameters"] = self._parameters.copy()
        state.update(attributes)
        return new

    def _map_shape(self, operation: Operation, dims: int) -> tuple[torch.Size, Tensor]:
        """The shape, and the frame, after an operation on the first ``dims`` dims."""
        frame = self._frame
        if isinstance(operation, Gather):  # first dims only: the frame stays one number
            sizes = operation(frame.as_strided(frame.shape[:dims], (0,) * dims)).shape + frame.shape[dims:]
            frame = frame.as_strided(sizes, (0,) * len(sizes))
        else:
            frame = operation(frame)

        shape = frame.shape
        if -1 in self.shape or ANY_LENGTH in shape:
            shape = with_any(shape)
        if self.value_dims:
            shape = shape + self.shape[self.ndim - self.value_dims :]
        return shape, frame

    def map_dims(self, operation: Operation, dims: int) -> Self:
        """The spec after an operation on its first ``dims`` dims, which leaves those after them alone."""
        shape, frame = self._map_shape(operation, dims)
        behind = self._frame.ndim - dims
        parameters: dict[str, Tensor] = {}

        for name, parameter in self._parameters.items():
            own = parameter.ndim - self._kept
            if own > behind:  # otherwise it is the same along all of these dims, before and after
                full = parameter.expand((*self._frame.shape, *parameter.shape[own:]))
                parameter = shorten(operation(full), self._kept)
            parameters[name] = parameter

        return self._copy_with(_frame=frame, shape=shape, _parameters=parameters)

    def _full(self, name: str) -> Tensor:
        """A parameter with all dims of the spec; those of any length have size 1."""
        parameter = self._parameters[name]
        sizes = [1 if size == ANY_LENGTH else size for size in self._frame.shape]
        return parameter.expand((*sizes, *parameter.shape[parameter.ndim - self._kept :]))

    def _outer(self, what: str, *dims: int) -> list[int]:
        """Dims counted from the front, all of them in front of a value's own dims."""
        outer = self.ndim - self.value_dims
        counted = [dim + self.ndim if dim < 0 else dim for dim in dims]
        if any(not 0 <= dim < outer for dim in counted):
            own = ""
            if self.value_dims:
                own = f", and its last {self.value_dims} belong to one value"
            raise IndexError(
                f"{what} is not possible: {type(self).__name__} has shape {tuple(self.shape)}{own}"
            )
        return counted

    def _split(self, shape: torch.Size, what: str) -> torch.Size:
        """The batch part of a new shape, whose last dims must stay those of one value."""
        cut = len(shape) - self.value_dims
        own = self.shape[self.ndim - self.value_dims :]
        if cut < 0 or any(new not in (-1, old) for new, old in zip(shape[cut:], own, strict=True)):
            raise ValueError(
                f"{what} to {tuple(shape)} is not possible: the last dims of {type(self).__name__} with shape "
                f"{tuple(self.shape)} belong to one value and stay {tuple(own)}"
            )

        return shape[:cut]

    def expand(self, *shape: Shape) -> Self:
        """Repeat along new leading dims, or along dims of size 1. Nothing is copied."""
        outer = self._split(as_shape(*shape), "expand")
        dims = self._frame.ndim
        new = len(outer) - dims  # -1 means any length in a new dim, and the current size in an existing one
        outer = torch.Size([ANY_LENGTH if size == -1 and d < new else size for d, size in enumerate(outer)])
        try:
            return self.map_dims(lambda tensor: tensor.expand((*outer, *tensor.shape[dims:])), dims)
        except RuntimeError as error:
            raise ValueError(
                f"expand to {tuple(as_shape(*shape))} is not possible for {type(self).__name__} with shape "
                f"{tuple(self.shape)}: its dims must be the last ones, or have size 1"
            ) from error

    def reshape(self, *shape: Shape) -> Self:
        """Reshape the batch dims, keeping the number of elements."""
        outer = self._split(as_shape(*shape), "reshape")
        dims = self._frame.ndim
        try:
            sizes = self._frame.reshape(outer).shape
            return self.map_dims(lambda tensor: tensor.reshape((*sizes, *tensor.shape[dims:])), dims)
        except RuntimeError as error:
            raise ValueError(
                f"reshape to {tuple(as_shape(*shape))} is not possible for {type(self).__name__} with shape "
                f"{tuple(self.shape)}"
            ) from error

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge several dims into one; ``end_dim=-1`` is the last one before a value's own dims."""
        if end_dim < 0:
            end_dim -= self.value_dims
        start, end = self._outer("flatten", start_dim, end_dim)

        return self.map_dims(lambda tensor: tensor.flatten(start, end), self._frame.ndim)

    def unflatten(self, dim: int, sizes: Shape) -> Self:
        """Split one dim into several."""
        (dim,) = self._outer("unflatten", dim)
        parts = as_shape(sizes)
        return self.map_dims(lambda tensor: tensor.unflatten(dim, parts), self._frame.ndim)

    def squeeze(self, dim: int | None = None) -> Self:
        """Drop a dim, or all dims, of size 1 before a value's own dims."""
        if dim is None:
            drop = tuple(range(self._frame.ndim))
        else:
            drop = tuple(self._outer("squeeze", dim))

        full: list[Any] = [slice(None)] * self._frame.ndim
        for d in drop:
            if self._frame.shape[d] == 1:
                full[d] = 0
        index = tuple(full)
        return self.map_dims(lambda tensor: tensor[index], self._frame.ndim)

    def unsqueeze(self, dim: int) -> Self:
        """Insert a dim of size 1."""
        at = dim + self.ndim + 1 if dim < 0 else dim
        if not 0 <= at <= self._frame.ndim:
            self._outer("unsqueeze", at)
            raise IndexError(f"unsqueeze({dim}) is not possible for a spec of {self.ndim} dims")

        return self.map_dims(lambda tensor: tensor.unsqueeze(at), at)

    def __getitem__(self, index: Any) -> Any:
        """Index the batch dims like those of a tensor."""
        full = self._full_index(index)
        dims = sum(map(dims_used, full))
        if any(isinstance(item, Tensor) for item in full):
            return self.map_dims(Gather(full), dims)
        return self.map_dims(lambda tensor: tensor[full], dims)

    def _full_index(self, index: Any) -> tuple[Any, ...]:
        """The index as a tuple without ``...``, so that dims behind the batch's do not shift it."""
        items = list(index) if isinstance(index, tuple) else [index]
        for place, item in enumerate(items):
            if isinstance(item, list | tuple | range | np.ndarray):
                items[place] = torch.as_tensor(item)

        free = self._frame.ndim - sum(map(dims_used, items))
        places = [place for place, item in enumerate(items) if item is Ellipsis]
        if free < 0 or len(places) > 1:
            self._outer(f"the index {index}", self.ndim)
        for place in places:
            items[place : place + 1] = [slice(None)] * free

        for item, used in zip(items, accumulate(map(dims_used, items), initial=0), strict=False):
            # A slice of a dim of any length has an unknown length.
            if isinstance(item, slice) and item != slice(None) and used in self._open_dims():
                raise IndexError(
                    f"the index {index} takes a part of a dim of any length (-1), dim {used} of {tuple(self.shape)}: "
                    "take all of it (:) or one position of it"
                )

        return tuple(items)

    def _open_dims(self) -> set[int]:
        """The dims of any length."""
        return {dim for dim, size in enumerate(self._frame.shape) if size == ANY_LENGTH}

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """One spec for each index along a dim."""
        (dim,) = self._outer("unbind", dim)
        if dim in self._open_dims():
            raise ValueError(f"unbind needs a dim of known length, got dim {dim} of {tuple(self.shape)}")
        return tuple(self[(*(slice(None),) * dim, i)] for i in range(self._frame.shape[dim]))

    def __len__(self) -> int:
        """Size of the first dim."""
        if not self.shape:
            raise TypeError(f"a {type(self).__name__} without dims has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    # --- device, dtype, copies ----------------------------------------------------------------------------------

    def to(self, dest: torch.dtype | Device) -> Self:
        """Return the spec with another dtype or device; None changes nothing."""
        if dest is None:
            return self
        if isinstance(dest, torch.dtype):
            if dest == self.dtype:
                return self
            return self._with_dtype(dest)
        device = torch.device(dest)
        if device == self.device:
            return self
        return self._with_device(device)

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return self._copy_with(dtype=dtype)

    def _with_device(self, device: torch.device) -> Self:
        moved = {name: parameter.to(device) for name, parameter in self._parameters.items()}
        return self._copy_with(device=device, _parameters=moved)

    def cpu(self) -> Self:
        """The spec on the CPU."""
        return self.to("cpu")

    def cuda(self, device: Device = None) -> Self:
        """The spec on a GPU."""
        if device is None:
            device = "cuda"
        return self.to(device)

    def clone(self) -> Self:
        """Return a copy with its own mask; parameters are shared."""
        return self._copy_with()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"{name} of a {type(self).__name__} cannot be set: create another spec with expand, reshape or to"
            )
        object.__setattr__(self, name, value)

    # --- values -------------------------------------------------------------------------------------------------

    @abstractmethod
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw random values ``[*shape, *self.shape]``."""

    @abstractmethod
    def zero(self, shape: Shape = ()) -> Any:
        """Values ``[*shape, *self.shape]`` of zero, or of what is closest to it in the domain."""

    @abstractmethod
    def one(self, shape: Shape = ()) -> Any:
        """Values ``[*shape, *self.shape]`` of one, or of what is closest to it in the domain."""

    def sample(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw random values, as `rand`."""
        return self.rand(shape, generator=generator)

    def zeros(self, shape: Shape = ()) -> Any:
        """Values closest to zero, as `zero`."""
        return self.zero(shape)

    def ones(self, shape: Shape = ()) -> Any:
        """Values closest to one, as `one`."""
        return self.one(shape)

    def _full_shape(self, shape: Shape) -> torch.Size:
        """``[*shape, *self.shape]``, with 1 for dims of any length."""
        front = () if shape is None else as_shape(shape)
        own = [1 if size == -1 else size for size in self.shape]
        return torch.Size([*front, *own])

    def allowed(self, value: Tensor) -> Tensor:
        """Which entries of a value of the right shape, dtype and device are in the domain: bool, one for each."""
        raise NotImplementedError(f"the values of a {type(self).__name__} are not single tensors")

    def all_allowed(self, value: Tensor) -> bool:
        """Whether all entries of a value of the right shape, dtype and device are in the domain."""
        return bool(self.allowed(value).all())

    def _misfit(self, value: object) -> str | None:
        """Describe what is wrong with the type, dtype or shape of a value, or return None."""
        if not isinstance(value, Tensor):
            return f"a tensor was expected, got {type(value).__name__}"
        if value.is_meta:
            return "a tensor with values was expected, got one on the device meta"
        if value.layout is not torch.strided:
            return f"a dense tensor was expected, got one with the layout {value.layout}"
        if value.dtype is not self.dtype:
            return f"dtype {self.dtype} was expected, got {value.dtype}"
        if not self._fits(value.shape):
            return f"shape {tuple(self.shape)} was expected, after any batch dims, got {tuple(value.shape)}"
        return None

    def _fits(self, shape: torch.Size) -> bool:
        """Whether a shape ends with that of the spec, whose dims of size -1 take any length."""
        last = shape
        if self.ndim <= len(shape):
            last = shape[len(shape) - self.ndim :]

        return last == self.shape or (
            len(last) == self.ndim
            and all(mine in (-1, size) for mine, size in zip(self.shape, last, strict=True))
        )

    def is_in(self, value: object) -> bool:
        """Return whether a value has this dtype and shape (after any batch dims) and is in the domain. Never raises.

        The value may be on any device.
        """
        return (
            isinstance(value, Tensor)
            and self._misfit(value) is None
            and self.to(value.device).all_allowed(value)
        )

    def __contains__(self, item: object) -> bool:
        return self.is_in(item)

    def contains(self, item: object) -> bool:
        """Whether a value is in the domain, as `is_in`."""
        return self.is_in(item)

    def assert_is_in(self, value: object) -> None:
        """Raise an error that names the first row that does not fit, what was expected and what came.

        Raises:
            OutsideSpecError: an AssertionError and a ValueError.
        """
        problem = self.problem(value)
        if problem is not None:
            raise OutsideSpecError(f"value is not in the spec: {problem}")

    def problem(self, value: object) -> str | None:
        """Say what is wrong with a value, or return None if it is in the domain."""
        text = self._misfit(value)
        if text is not None:
            return text
        assert isinstance(value, Tensor)
        allowed = self.to(value.device).allowed(value)
        if bool(allowed.all()):
            return None

        first = tuple((~allowed).nonzero()[0].tolist())
        where = ""
        if first:
            place = first[0] if len(first) == 1 else first
            where = f"at index {place} "
        return f"{where}a value of {self._domain_text(first)} was expected, got {_short(value[first])}"

    def _domain_text(self, index: tuple[int, ...]) -> str:
        """The domain of the entry at an index of a value, in words."""
        return repr(self)

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Raise a TypeError if a value has another dtype."""
        if getattr(value, "dtype", None) is not self.dtype:
            named = "" if key is None else f" of {key!r}"
            raise TypeError(
                f"the dtype{named} must be {self.dtype}, got {getattr(value, 'dtype', type(value))}"
            )

    def project(self, value: Any) -> Any:
        """Return a value inside the spec unchanged, else the closest one inside, never NaN."""
        if self.is_in(value):
            return value

        dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        if not dense or not self._fits(value.shape):
            raise ValueError(
                f"value must be a tensor of shape {tuple(self.shape)}, after any batch dims, got {as_text(value)}"
            )
        return self.closest(value)

    def closest(self, value: Tensor) -> Tensor:
        """Return the closest values in the domain, in the spec's dtype."""
        raise NotImplementedError(f"the values of a {type(self).__name__} are not single tensors")

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Make a tensor in the domain from an array, list, number or tensor; dims of size 1 may be left out.

        Args:
            value: what the env or a user gives.
            ignore_device: leave it where it is.

        Raises:
            OutsideSpecError: the value is outside, or would change in this dtype.
            ValueError: it has another shape.
        """
        check_flags(ignore_device=ignore_device)
        if not isinstance(value, Tensor):
            # As float64, because torch rounds lists to float32; as a copy, because torch supports no negative
            # strides.
            try:
                value = np.ascontiguousarray(value).reshape(np.shape(value))
            except (TypeError, ValueError, RuntimeError) as error:  # for example a ragged list
                raise TypeError(f"value must be an array or a tensor, got {as_text(value)}") from error

        given = as_numbers("value", value)
        if not ignore_device:
            given = given.to(self.device)
        tensor = self._fit_shape(self._cast(given))
        self.assert_is_in(tensor)
        return tensor

    def _cast(self, given: Tensor) -> Tensor:
        """The same numbers in this dtype."""
        assert self.dtype is not None
        if given.dtype is self.dtype:
            return given
        tensor = given.to(self.dtype)
        if is_whole(self.dtype):
            changed = not torch.equal(tensor.to(given.dtype), given)
        else:  # floats may be rounded, but must stay finite
            changed = bool((tensor.isinf() & ~given.isinf()).any())
        if changed:
            raise OutsideSpecError(f"{_short(given)} cannot be written as {self.dtype} without changing it")
        return tensor

    def _fit_shape(self, tensor: Tensor) -> Tensor:
        if self._fits(tensor.shape) and tensor.ndim == self.ndim:
            return tensor

        if [size for size in tensor.shape if size != 1] != [size for size in self.shape if size != 1]:
            raise ValueError(
                f"a value of shape {tuple(self.shape)} was expected, got {tuple(tensor.shape)}: expand the spec for a "
                "batch"
            )
        return tensor.reshape(self.shape)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """The array of a value, the inverse of `encode`; ``safe=True`` checks the value first."""
        if safe:
            self.assert_is_in(value)
        return value.detach().cpu().numpy()

    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        """Pick from the last dim of a tensor by category; only specs of categories can.

        Args:
            index: values of this spec.
            tensor_to_index: ``[..., n]``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no categories to pick by")

    def cardinality(self) -> int | float:
        """Number of values, ignoring batch dims; ``inf`` if unlimited."""
        return float("inf")

    def enumerate(self, use_mask: bool = False) -> Any:
        """All values ``[cardinality, *shape]``; each is repeated over the batch dims.

        Args:
            use_mask: leave out what the mask forbids.
        """
        raise NotImplementedError(f"the values of {type(self).__name__} cannot be listed")

    # --- the rest -----------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or not isinstance(other, TensorSpec):
            return False
        mine = self._parameters
        its = other._parameters

        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and self.device == other.device
            and self.domain == other.domain
            and self._settings() == other._settings()
            and mine.keys() == its.keys()
            and all(_equal(mine[name], its[name]) for name in mine)
        )

    def _settings(self) -> tuple[Any, ...]:
        """What makes two specs of one class and shape different, besides the tensors in ``_parameters``."""
        return ()

    __hash__ = None  # type: ignore[assignment]  # compared by value, and its mask can change

    def __repr__(self) -> str:
        parts = [f"shape={tuple(self.shape)}", *self._repr_parts(), f"dtype={self.dtype}"]
        if self.device is not None and self.device.type != "cpu":
            parts.append(f"device={self.device}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_parts(self) -> list[str]:
        return []

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = TORCH_FUNCTIONS.get(func)
        if own is None:
            return NotImplemented
        return own(*args, **(kwargs or {}))


class Ranged(TensorSpec):
    """Base class of specs whose entries are between two numbers, both included."""

    _whole = True  # whether only whole numbers are allowed, even with a floating dtype
    _range_text = "{} to {}"

    @abstractmethod
    def _limits(self) -> tuple[Tensor, Tensor]:
        """The least and the largest value: tensors of this dtype that broadcast to the shape."""

    def _get_limits(self) -> tuple[Tensor, Tensor]:
        limits: tuple[Tensor, Tensor] | None = self._cache.get("limits")
        if limits is None:
            low, high = self._limits()
            limits = (to_ordered(low), to_ordered(high))
            self._cache["limits"] = limits
        return limits

    @override
    def all_allowed(self, value: Tensor) -> bool:
        low, high = self._get_limits()
        numbers = to_ordered(value)
        if not torch.equal(numbers.clamp(low, high), numbers):  # NaN is not equal to itself
            return False
        return not (self._whole and numbers.is_floating_point()) or torch.equal(numbers.round(), numbers)

    @override
    def allowed(self, value: Tensor) -> Tensor:
        low, high = self._get_limits()
        numbers = to_ordered(value)
        inside = (numbers >= low) & (numbers <= high)
        if self._whole and numbers.is_floating_point():
            return inside & (numbers == numbers.round())
        return inside

    @override
    def closest(self, value: Tensor) -> Tensor:
        assert self.dtype is not None
        value = value.to(self.device)
        whole = is_whole(value.dtype) and is_whole(self.dtype)

        if whole and torch.uint64 not in (value.dtype, self.dtype):
            low, high = (limit.long() for limit in self._limits())
            numbers = value.long().clamp(low, high)
        else:
            low, high = (as_double(limit) for limit in self._limits())
            numbers = value.double().nan_to_num(0.0, torch.inf, -torch.inf)
            if self._whole or is_whole(self.dtype):
                numbers = numbers.round()
            numbers = numbers.clamp(low, high)  # in float64, for numbers that the dtype cannot hold

        return from_ordered(to_ordered(numbers.to(self.dtype)).clamp(*self._get_limits()), self.dtype)

    @override
    def zero(self, shape: Shape = ()) -> Tensor:
        return self.closest(torch.zeros(self._full_shape(shape), dtype=torch.int64, device=self.device))

    @override
    def one(self, shape: Shape = ()) -> Tensor:
        return self.closest(torch.ones(self._full_shape(shape), dtype=torch.int64, device=self.device))

    @override
    def _domain_text(self, index: tuple[int, ...]) -> str:
        sizes = self._full_shape(())
        own = index[len(index) - self.ndim :]
        at = tuple(0 if size == 1 else i for i, size in zip(own, sizes, strict=True))
        return self._range_text.format(*(limit.expand(sizes)[at].item() for limit in self._limits()))


for _name in ("squeeze", "unsqueeze", "reshape", "flatten", "unflatten", "unbind"):
    implements(getattr(torch, _name))(
        functools.partial(
            lambda spec, *rest, name, **options: getattr(spec, name)(*rest, **options), name=_name
        )
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or bool((one == other).all())


def _short(value: Tensor) -> str:
    """A few numbers of a value, for an error."""
    numbers = value.detach().reshape(-1)[:8].tolist()
    if value.numel() == 1:
        return str(numbers[0])
    more = ", ..." if value.numel() > 8 else ""
    return f"[{', '.join(map(str, numbers))}{more}]"

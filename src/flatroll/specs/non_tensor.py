"""`NonTensor`: data other than tensors, such as text."""

from collections.abc import Callable
from typing import Any, Self

import torch
from gymnasium import spaces
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, lazy_stack
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import check_flags, check_whole_number
from flatroll.specs.shapes import Shape
from flatroll.specs.tensor_spec import Device, TensorSpec


class NonTensor(TensorSpec):
    """Values that are not tensors: text, graphs, sequences of any length.

    Args:
        shape: batch dims, default ``(1,)``.
        device: of the tensordicts that hold it, default None.
        dtype: not used, None.
        example_data: what `zero`, `one` and, without a space, `rand` give.
        batched: whether each element of the batch has its own data. Default False: one value for all.
        feature_dims: how many of the last dims one element covers, instead of ``batched``.
        space: the Gymnasium space of the data, which then are drawn from it and checked by it.

    >>> spec = NonTensor(shape=(), space=spaces.Text(4))
    >>> spec.is_in("abcd"), spec.is_in("abcde")
    (True, False)
    >>> NonTensor(shape=(3,), example_data="hi", batched=True).zero().tolist()
    ['hi', 'hi', 'hi']
    """

    _default_device = None

    def __init__(
        self,
        shape: Shape = (1,),
        device: Device = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        batched: bool | None = None,
        feature_dims: int | None = None,
        *,
        space: "spaces.Space[Any] | None" = None,
    ) -> None:
        super().__init__(shape, space, device, dtype, "")
        self.example_data = example_data
        if batched is not None and feature_dims is not None:
            raise ValueError("batched and feature_dims mean the same: pass one of them")
        if batched is not None:
            check_flags(batched=batched)
        if feature_dims is not None:
            check_whole_number("feature_dims", feature_dims, 0)

        self.batched = bool(batched)
        self._feature_dims = feature_dims

    @property
    def feature_dims(self) -> int:
        """Number of trailing dims that one element covers: 0 if batched, else all or the given number."""
        if self.batched:
            return 0
        if self._feature_dims is None:
            return self.ndim
        return min(self._feature_dims, self.ndim)

    @override
    def is_in(self, value: object) -> bool:
        return self.problem(value) is None

    @override
    def problem(self, value: Any) -> str | None:
        wrapped = isinstance(value, NonTensorData | NonTensorStack)
        if isinstance(value, Tensor) or (isinstance(value, TensorDictBase) and not wrapped):
            return f"data that are no tensor were expected, got {type(value).__name__}"
        if wrapped and not self._fits(value.batch_size):
            return (
                f"shape {tuple(self.shape)} was expected, after any batch dims, got {tuple(value.batch_size)}"
            )

        if self._space is None or (wrapped and 0 in value.batch_size):
            return None
        items = _data(value) if wrapped else [value]
        for item in items:
            if not self._space.contains(item):
                return f"a value of {self._space} was expected, got {item!r}"
        return None

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw from the space, or repeat the example; one draw for each element of the batch that has its own."""
        if self._space is None:
            return self._fill(shape, lambda: self.example_data)

        device = generator.device if generator else None
        seed = torch.randint(2**31, (), generator=generator, device=device)
        self._space.seed(int(seed))
        return self._fill(shape, self._space.sample)

    @override
    def zero(self, shape: Shape = ()) -> Any:
        """Return the example, or else a fixed sample of the space, for every element."""
        example = self.example_data
        if example is None and self._space is not None:
            self._space.seed(0)

            example = self._space.sample()
        return self._fill(shape, lambda: example)

    @override
    def one(self, shape: Shape = ()) -> Any:
        """The same as `zero`."""
        return self.zero(shape)

    def _fill(self, shape: Shape, make: Callable[[], Any]) -> Any:
        sizes = self._full_shape(shape)
        cut = len(sizes) - self.feature_dims

        def stacked(depth: int) -> Any:
            if 0 in sizes:  # no element to stack
                return NonTensorData(self.example_data, batch_size=sizes, device=self.device)
            if depth == cut:
                return NonTensorData(make(), batch_size=sizes[cut:], device=self.device)
            return lazy_stack([stacked(depth + 1) for _ in range(sizes[depth])])

        return stacked(0)

    @override
    def project(self, value: Any) -> Any:
        """Return any valid value: there is no closest one.

        Raises:
            OutsideSpecError: it is not.
        """
        self.assert_is_in(value)
        return value

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        if isinstance(value, NonTensorData | NonTensorStack):
            self.assert_is_in(value)
            return value
        if self._space is not None and not self._space.contains(value):
            self.assert_is_in(value)
        return self._fill((), lambda: value)

    @override
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        if safe:
            self.assert_is_in(value)
        if isinstance(value, NonTensorData):
            return value.data
        return value

    @override
    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return self

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.example_data, self.batched, self._feature_dims, self._space

    @override
    def _repr_parts(self) -> list[str]:
        if self._space is not None:
            return [f"space={self._space}"]
        return [f"example_data={self.example_data!r}"]


def _data(value: Any) -> list[Any]:
    """Return the data of each element; lists and tuples are kept."""
    if isinstance(value, NonTensorData):
        return [value.data]
    return [item for part in value.tensordicts for item in _data(part)]

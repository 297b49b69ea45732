"""Specs: the tensors in an env, a batch or a buffer, as Gymnasium spaces for tensors."""

from typing import TYPE_CHECKING, Any

from flatroll.layout.old_names import old_names
from flatroll.specs.bounded import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from flatroll.specs.composite import Composite
from flatroll.specs.discrete import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from flatroll.specs.non_tensor import NonTensor
from flatroll.specs.spaces import as_space, as_spec, make_composite_from_td
from flatroll.specs.stacked import (
    Stacked,
    StackedComposite,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    stack,
)
from flatroll.specs.tensor_spec import OutsideSpecError, TensorSpec

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "OutsideSpecError",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "as_space",
    "as_spec",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
    "make_composite_from_td",
    "stack",
]


#: Names of older scripts.
OLD_NAMES: dict[str, Any] = {
    "BinaryDiscreteTensorSpec": Binary,
    "BoundedTensorSpec": Bounded,
    "CompositeSpec": Composite,
    "DiscreteTensorSpec": Categorical,
    "LazyStackedCompositeSpec": StackedComposite,
    "LazyStackedTensorSpec": Stacked,
    "MultiDiscreteTensorSpec": MultiCategorical,
    "MultiOneHotDiscreteTensorSpec": MultiOneHot,
    "NonTensorSpec": NonTensor,
    "OneHotDiscreteTensorSpec": OneHot,
    "OutsideSpec": OutsideSpecError,
    "UnboundedContinuousTensorSpec": UnboundedContinuous,
    "UnboundedDiscreteTensorSpec": UnboundedDiscrete,
}


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, OLD_NAMES)

"""Specs: the tensors in an env, a batch or a buffer, as Gymnasium spaces for tensors."""

import warnings
from typing import Any

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
from flatroll.specs.tensor_spec import OutsideSpec, TensorSpec

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
    "OutsideSpec",
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


#: Aliases for older scripts.
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
    "UnboundedContinuousTensorSpec": UnboundedContinuous,
    "UnboundedDiscreteTensorSpec": UnboundedDiscrete,
}


def __getattr__(name: str) -> Any:
    if name not in OLD_NAMES:
        raise AttributeError(f"module 'flatroll.specs' has no attribute {name!r}")
    new = OLD_NAMES[name]
    warnings.warn(f"{name} is now called {new.__name__}", DeprecationWarning, stacklevel=2)
    return new

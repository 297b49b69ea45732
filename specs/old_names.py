"""The names that specs had in older scripts."""

import warnings
from typing import Any

from flatroll.specs.binary import Binary
from flatroll.specs.bounded import Bounded, UnboundedContinuous, UnboundedDiscrete
from flatroll.specs.composite import Composite
from flatroll.specs.discrete import Categorical, OneHot
from flatroll.specs.multi import MultiCategorical, MultiOneHot
from flatroll.specs.non_tensor import NonTensor
from flatroll.specs.stacked import Stacked, StackedComposite

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


def find_old_name(name: str) -> Any:
    """The class that an old name stands for, with a DeprecationWarning that says its new one.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in OLD_NAMES:
        raise AttributeError(f"module 'flatroll.specs' has no attribute {name!r}")
    new = OLD_NAMES[name]
    warnings.warn(f"{name} is now called {new.__name__}", DeprecationWarning, stacklevel=3)
    return new

"""Old public names, which still work for one version."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, names: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that returns the objects of old names with a DeprecationWarning.

    Args:
        module: name of the module, for the errors of unknown names.
        names: what old names stand for.

    >>> __getattr__ = old_names("shapes", {"Quadrat": int})
    >>> __getattr__("Square")
    Traceback (most recent call last):
    ...
    AttributeError: module 'shapes' has no attribute 'Square'
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(f"{module}.{name} is now called {new.__name__}", DeprecationWarning, stacklevel=2)
        return new

    return find

"""Named ranges in the traces of torch's profilers."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

P = ParamSpec("P")
T = TypeVar("T")

#: Return whether a profiler of torch is active in this thread; a call of C, some 30 ns.
is_profiling: Callable[[], bool] = _profiler_enabled


def call_in_range(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``, whose time a trace shows as ``"flatroll." + name``.

    Ask :func:`is_profiling` first, so that nothing else is done without a profiler.

    >>> with torch.profiler.profile() as profiler:
    ...     call_in_range("sum", torch.sum, torch.ones(3))
    tensor(3.)
    >>> [event.name for event in profiler.events() if event.name.startswith("flatroll")]
    ['flatroll.sum']
    """
    with torch.profiler.record_function(f"flatroll.{name}"):
        return function(*args, **kwargs)

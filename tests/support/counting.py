"""Count what a call does: torch operations, Python functions, and calls of a patched function."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts torch operations, and refuses those that would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.made: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        self.count[name] += 1
        out = func(*args, **(kwargs or {}))
        view = isinstance(out, torch.Tensor) and any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
            for a in args
        )
        if isinstance(out, torch.Tensor) and not view:
            self.made[tuple(out.shape), out.dtype] += 1
        return out


def python_calls(function: Callable[[], Any]) -> int:
    """Return how many Python functions a call enters."""
    return count_calls(function, "call")


def count_calls(function: Callable[[], Any], *kinds: str) -> int:
    """Return how many functions a call enters, of Python ("call") or of C ("c_call").

    Meanwhile nothing is collected: finalizers of garbage that other tests left are functions, too.
    """
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in kinds

    before = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return calls


def noting(notes: list[Any], note: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with a note about its arguments at each call."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(note(*args))
        return function(*args, **kwargs)

    return noted

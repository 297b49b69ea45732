"""Counts the bytes of live tensors, to find a computation's peak memory."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts the bytes of tensors that torch operations make in the block, until they are freed.

    Attributes:
        live: bytes of those that are there now.
        peak: the most that ``live`` has been.

    >>> with LiveBytes() as counted:
    ...     a = torch.zeros(1000)
    ...     b = a + 1
    ...     del a
    >>> counted.live, counted.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.live: int = 0
        self.peak: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self._known:
                self._enter(tensor.untyped_storage())
        return out

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak bytes of live tensors during a call, beyond those that existed before."""
    counted = LiveBytes()
    with counted:
        call()
    return counted.peak

"""Counts torch operations that are not views, new memory, and bytes written."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts the operations in its block; on a device each is a kernel launch.

    Views are not counted. An operation on a list of tensors counts as one for each of them.

    Attributes:
        names: how often each operation was called.
        allocations: how many results have new memory.
        written: bytes of all results.

    >>> import torch
    >>> with CountOperations() as counted:
    ...     _ = torch.zeros(2, 3)[0].add_(1)
    >>> counted.operations, counted.allocations, counted.written
    (2, 1, 36)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.names: Counter[str] = Counter()
        self.allocations = self.written = 0

    @property
    def operations(self) -> int:
        """How many there were."""
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        # What writes into a list of tensors returns nothing.
        results = [x for x in tree_leaves(args[0] if out is None else out) if isinstance(x, Tensor)]
        fresh = [x for x in results if x.untyped_storage()._cdata not in given]
        if fresh or func._schema.is_mutable:  # else it has returned what it was given
            self.names[func.overloadpacket.__name__] += len(results)
            self.allocations += len(fresh)
            self.written += sum(x.numel() * x.element_size() for x in results)
        return out

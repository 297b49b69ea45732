"""The memory of tensors: distinguishes views of it from tensors with their own memory."""

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple, Self

from torch import Tensor


class Spans(NamedTuple):
    """Disjoint ranges of memory in ascending order, with gaps between them; addresses in bytes.

    Attributes:
        low, high: address of the first byte of all, and of the byte after the last.
        starts, stops: those of each range.

    >>> import torch
    >>> x, y = torch.zeros(4, 3), torch.zeros(5)
    >>> spans = Spans.of([x, y[::2]])
    >>> [spans.hold(part.data_ptr()) for part in (x, x[3, 2:], y[4:], x.clone())]
    [True, True, True, False]
    """

    low: int = 0
    high: int = 0
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Self:
        """Return the memory of dense tensors, including gaps between the values of a tensor."""
        spans: list[tuple[int, int]] = []
        for tensor in tensors:
            if not tensor.numel():
                continue
            # from the first value to the last one, whose place is the sum over the dimensions
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * step for size, step in sizes)
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size()))

        joined: list[tuple[int, int]] = []

        for start, stop in sorted(spans):
            if joined and start <= joined[-1][1]:
                start = joined[-1][0]
                stop = max(stop, joined.pop()[1])
            joined.append((start, stop))

        if not joined:
            return cls()

        starts, stops = zip(*joined, strict=True)
        return cls(starts[0], stops[-1], starts, stops)

    def hold(self, address: int) -> bool:
        """Return whether the byte at ``address`` belongs to one of the ranges."""
        return self.low <= address < self.high and address < self.stops[bisect(self.starts, address) - 1]

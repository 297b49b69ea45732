"""Splitting a network's input so that its activations stay small."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from flatroll.layout.checks import whole_number


@dataclass(frozen=True)
class Chunks:
    """How many rows go through a network at a time: all, ``size`` of them, or a ``number``-th part.

    Attributes:
        size: rows of a chunk along ``dim``.
        number: number of chunks.
        dim: the batch dim that is split.

    Raises:
        ValueError: both are given, or one is no integer of at least 1.

    >>> list(Chunks(size=4).spans(10))
    [(0, 4), (4, 8), (8, 10)]
    """

    size: int | None = None
    number: int | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        if self.size is not None and self.number is not None:
            raise ValueError(
                "give value_chunk_size (rows per chunk) or num_chunks (number of chunks), not both: "
                f"got {self.size} and {self.number}"
            )
        for name, n in (("value_chunk_size", self.size), ("num_chunks", self.number)):
            if n is not None:
                whole_number(name, n)

    @property
    def whole(self) -> bool:
        """Whether everything goes through at once."""
        return self.size is None and self.number in (None, 1)

    def along(self, batch_dims: int, turned: int | None = None) -> int:
        """The dim to split of a batch with so many dims.

        Args:
            batch_dims: of the batch.
            turned: the dim that has changed places with the last one since ``dim`` was chosen, if any.

        Raises:
            ValueError: there is no such dim.
        """
        if not -batch_dims <= self.dim < batch_dims:
            raise ValueError(f"value_chunk_dim must name one of {batch_dims} batch dims, got {self.dim}")
        dim, last = self.dim % batch_dims, batch_dims - 1
        return dim if turned is None else {turned: last, last: turned}.get(dim, dim)

    def spans(
        self, rows: int, stops: Tensor | None = None, *, each: int = 1, first: int = 0
    ) -> Iterator[tuple[int, int]]:
        """First and past-the-last row of each chunk.

        Args:
            rows: past-the-last row of all.
            stops: past-the-last rows of the runs, ascending int64: then a chunk holds whole runs, as many as
                fit, and one run alone where it is longer than a chunk. Default: runs may be cut.
            each: rows that count as one for ``size``, where several batch dims have become one.
            first: first row of all.
        """
        size = (self.size or 0) * each or -(-(rows - first) // (self.number or 1)) or 1
        if stops is None or size >= rows - first:
            yield from (
                (start, min(start + size, rows)) for start in range(first, max(rows, first + 1), size)
            )
            return
        bounds, start, at = stops.tolist(), first, 0
        while start < rows:
            while at + 1 < len(bounds) and bounds[at + 1] <= start + size:
                at += 1
            yield start, bounds[at]
            start, at = bounds[at], at + 1

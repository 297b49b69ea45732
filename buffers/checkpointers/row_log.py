"""The rows of one buffer in one folder: which of them are there, and how the others come to it."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatroll.buffers.checkpointers.links import checkpointer_of
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.top_k_ring import RankedRing
from flatroll.disk import Version
from flatroll.disk.checkpoint import SaveOptions

_LEAST_BYTES, _MOST_BYTES = 2**22, 2**25  # of a segment
_PARTS = 64  # segments of a full ring, at least: the oldest one holds rows that are gone already
_ROW_BYTES = 1000  # of a row whose size is not known
_MOST_EDITS = 1000  # that are remembered one by one

#: Turns a buffer's state into that of a version: JSON and tensors.
Tree = Callable[[dict[str, Any]], tuple[Any, dict[str, Tensor]]]


class RowLog:
    """What a buffer has in a folder, so that the next save writes the new rows only.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version: Version | None = None  # saved or loaded last
        self._ring: Callable[[], Ring | None] = lambda: None  # what counted its rows
        self._edited: list[tuple[int, int]] = []  # numbers of the first and last row of each edit since
        self._saving = False

    def note(self, version: Version, ring: Ring, edits: int = 0) -> None:
        """Remember that ``version`` has the rows that ``ring`` counts, after the first ``edits`` of the edits."""
        self.version, self._ring = version, weakref.ref(ring)
        del self._edited[:edits]

    def edited(self, numbers: Tensor) -> None:
        """Note that rows with these numbers were overwritten in place; the caller holds the lock of writers."""
        if not len(numbers):
            return
        low, high = map(int, torch.aminmax(numbers))
        self._edited.append((low, high))
        if len(self._edited) > _MOST_EDITS and not self._saving:  # a save counts on their order
            self._edited = [(min(low for low, _ in self._edited), max(high for _, high in self._edited))]

    def save(self, buffer: Any, tree: Tree, options: SaveOptions) -> Version:
        """Publish a version with the buffer's rows and the ``tree`` of its other state.

        Writers and readers of the buffer go on while rows are copied; they wait while those that came meanwhile, at
        most a segment, those that were edited, and the tables are copied in memory, and no longer.
        """
        checkpointer = checkpointer_of(buffer.storage)
        checkpointer.check_path(buffer.storage, self.path)
        ranked = isinstance(buffer.ring, RankedRing)
        # Nobody writes until all is copied: rows written out of order, or the first rows, which bring another ring.
        hold = ranked or not buffer.started
        ahead = buffer.made_ahead() if hold else None
        with ExitStack() as stack:
            self._saving = True
            stack.callback(setattr, self, "_saving", False)
            if hold:
                stack.enter_context(buffer.write_lock)
            ring = buffer.ring
            given = {"segment_rows": segment_rows(buffer), "segment_bytes": _MOST_BYTES, **options._asdict()}
            anew = ranked or self._ring() is not ring
            folder = stack.enter_context(
                checkpointer.open_to_save(buffer.storage, self.path, self.version, anew, given)
            )
            self._copy_ahead(buffer, ring, folder, checkpointer)
            if ahead is None:
                ahead = buffer.made_ahead()
            with nullcontext() if hold else buffer.write_lock:
                if ring is not buffer.ring:
                    raise RuntimeError(
                        "the buffer was emptied or loaded while it was saved: nothing was saved"
                    )
                stack.enter_context(buffer.storage.held())
                edits, head, end = len(self._edited), *_range_of(ring, buffer)
                folder.drop_before(head)
                touched = [
                    segment
                    for segment in folder.segments
                    if any(low < segment.end and segment.first <= high for low, high in self._edited)
                ]
                parts = [(segment.first, segment.end) for segment in touched] + [(folder.end, end)] * (
                    folder.end < end
                )
                dumped = [
                    (first, checkpointer.dump_rows(buffer.storage, _slots(ring, first, stop), self.path))
                    for first, stop in parts
                ]
                with buffer.lock:  # of readers, too: a draw changes the sampler
                    state = buffer.tables(ahead)
            for first, part in dumped:
                if first < folder.end:
                    folder.replace(part, first)
                else:
                    folder.append(part)
            value, tensors = tree(state)
            facts = {"kind": "buffer", "buffer": repr(buffer), "rows": end - head}
            version: Version = folder.publish(value, tensors, head=head, extra=facts)
            self.note(version, ring, edits)
            return version

    def _copy_ahead(self, buffer: Any, ring: Ring, folder: Any, checkpointer: Any) -> None:
        """Append rows to ``folder`` without a lock, until less than a segment is left."""
        count = segment_rows(buffer)
        for _ in range(4 * _PARTS):  # writers may be faster; then the rest is copied while they wait
            with buffer.lock:
                head, end = _range_of(ring, buffer)
            folder.drop_before(head)
            first = folder.end
            if end - first <= count:
                return
            # Rows that a writer overwrites meanwhile are below the head of the version, and not read again.
            slots = _slots(ring, first, first + count)
            folder.append(checkpointer.dump_rows(buffer.storage, slots, self.path))


def segment_rows(buffer: Any) -> int:
    """How many rows a segment of the buffer's has."""
    size: int = buffer.storage.bytes_per_row or _ROW_BYTES
    capacity: int = buffer.ring.capacity
    return max(1, min(max(-(-capacity // _PARTS), _LEAST_BYTES // size), _MOST_BYTES // size))


def _range_of(ring: Ring, buffer: Any) -> tuple[int, int]:
    """Numbers of the first row to save and of the row after the last; rows in any order are numbered by slot."""
    if isinstance(ring, RankedRing):
        return 0, ring.used if buffer.started else 0
    return ring.head, ring.written


def _slots(ring: Ring, first: int, end: int) -> Tensor:
    """The slots of the rows ``first ... end - 1``."""
    return torch.arange(first, end) % ring.capacity

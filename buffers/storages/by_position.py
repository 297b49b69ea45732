"""Reads and writes the rows of a storage by position, with or without a replay buffer."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.storages.base import Storage
from flatroll.buffers.storages.item_kinds import map_rows, one_row


class ByPosition(Storage):
    """The part of a storage that users see: ``get`` and ``set``. A storage without a buffer counts its own rows."""

    @override
    def get(self, index: Any) -> Any:
        owner = self._owner
        if owner is not None:
            return owner._rows_at(index, [])
        slots = slots_at(index, Ring(1) if self._alone is None else self._alone, self.lanes)
        values = self.read_rows(slots.reshape(-1))
        if isinstance(values, list):
            return values if slots.ndim else values[0]
        if slots.ndim:
            return self.build(values, slots.shape)
        return map_rows(self.build(values, torch.Size([1])), lambda leaf: leaf[0])

    @override
    def set(self, index: Any, data: Any) -> None:
        owner, index = self._owner, list(index) if isinstance(index, range) else index
        if owner is not None:
            owner._put_at(index, data)
        else:
            self._set_alone(index, data)
        for entity in (reference() for reference in self._attached):
            mark = getattr(entity, "mark_update", None)
            if mark is not None:
                mark(index)

    def _set_alone(self, index: Any, data: Any) -> None:
        """Write rows of a storage without a buffer."""
        if self.ndim > 1 or self.compact_obs:
            raise RuntimeError("a storage with ndim > 1 or compact_obs=True is written by a ReplayBuffer")
        ring = self._alone or Ring(self.max_size)
        slots = torch.arange(self.max_size)[index] if isinstance(index, slice) else torch.as_tensor(index)
        if slots.dtype is torch.bool:
            slots = slots.nonzero().squeeze(1)
        rows = self.prepare(data if slots.ndim else self.batch_of_one(data), None, None)
        slots = slots.reshape(-1)
        if len(slots) != rows.count:
            raise ValueError(f"index has {len(slots)} positions, data {rows.count} rows")
        new = torch.from_numpy(np.unique(slots[slots >= len(ring)].numpy()))  # in order
        expected = torch.arange(len(ring), len(ring) + len(new))
        if bool((slots < 0).any()) or not torch.equal(new, expected) or len(ring) + len(new) > self.max_size:
            raise IndexError(
                f"positions {slots.tolist()} are not all among the {len(ring)} stored rows and those right after "
                f"them, of {self.max_size}"
            )
        self.put(slots, rows)
        ring.publish(len(new))
        self._alone = ring

    @override
    def batch_of_one(self, item: Any) -> Any:
        return one_row(item)


def slots_at(index: Any, ring: Ring, lanes: torch.Size) -> Tensor:
    """Return the slots that ``index`` selects from the used slots, viewed as ``[steps, *lanes]``.

    IndexError if there is no such position, TypeError if ``index`` is no position.
    """
    if any(isinstance(part, str) for part in (index if isinstance(index, tuple) else [index])):
        raise TypeError(
            f"rows are written by position, got {index!r}: buffer[:] = TensorDict({{{index!r}: ...}}, ...) "
            "writes one entry of all rows"
        )
    used = ring.used
    if isinstance(index, Tensor) and index.dtype is torch.int64 and index.is_cpu and not lanes:
        low, high = torch.aminmax(index) if index.numel() else (0, 0)  # without making a list of all slots
        if -used <= low and high < used:
            return index if low >= 0 else torch.where(index < 0, index + used, index)
    slots = torch.arange(used).view(-1, *lanes)
    if isinstance(index, slice) and index.step is not None and index.step < 0:
        return slots[list(range(len(slots))[index])]  # torch has no steps back
    try:
        return slots[index]
    except IndexError:
        if isinstance(index, float):
            raise TypeError(f"rows are indexed by integers, slices and masks, got {index!r}") from None
        raise IndexError(f"index {index!r} is out of range: {len(ring)} rows are stored") from None

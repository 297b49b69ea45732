"""A storage that keeps items of any kind in a list."""

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from flatroll.buffers.columns.column import After, Columns
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Draw, Follow, Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.storages.item_kinds import apart, stacked
from flatroll.buffers.storages.records import Rows
from flatroll.buffers.storages.storage import Storage, other_capacity_error
from flatroll.disk.state_tree import from_plain, to_plain
from flatroll.layout.keys import NestedKey


class ListStorage(Storage):
    """Stores any Python objects in a list. It is by far the slowest storage: for tensors use `LazyTensorStorage`.

    A sample is a list of items, or their stack if all are tensors, tensordicts or trees of tensors of equal structure
    and shape.

    Args:
        max_size: number of items, default 1000.
        compilable: see `Storage`.

    >>> from flatroll.buffers import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=ListStorage(10))
    >>> buffer.add("a string!"), buffer.extend([30, None]), buffer[:]
    (0, tensor([1, 2]), ['a string!', 30, None])
    """

    keeps_items = True

    def __init__(self, max_size: int | None = None, *, compilable: bool = False) -> None:
        if max_size is None:
            max_size = 1000
        super().__init__(max_size, compilable=compilable)
        self._items: list[Any] = []

    @override
    def prepare(
        self, batch: object, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        if keys is not None:
            raise TypeError(
                "ListStorage does not track trajectories: use LazyTensorStorage with a slice sampler"
            )
        if final is not None:
            raise ValueError("ListStorage takes no final, which comes with a compact tensordict batch")

        most = None if whole else self.max_size
        items, left_out = apart(batch, most)
        if left_out:
            self.warn_left_out(left_out)
        return Rows(len(items), items=items)

    @override
    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        fit = min(rows.count, self.max_size - slot)  # the rest wraps around to slot 0
        self._items.extend([None] * (slot + fit - len(self._items)))
        self._items[slot : slot + fit] = rows.items[:fit]
        self._items[: rows.count - fit] = rows.items[fit:]

    @override
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        numbers = slots.tolist()
        chosen = range(rows.count) if at is None else at.tolist()
        self._items.extend([None] * (max(numbers, default=-1) + 1 - len(self._items)))

        for slot, i in zip(numbers, chosen, strict=True):
            item = rows.items[i]
            if at is not None:
                # Items of a batch are views of one copy: a few chosen ones would keep all of its memory.
                item = _own_memory(item)
            self._items[slot] = item

    @override
    def write_drawn(self, draw: Draw, data: object, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        several = isinstance(data, list | Tensor | TensorDictBase)  # a stack is split into its items
        items = [data]
        if shape and several:
            items, _ = apart(data)

        if (shape and not several) or len(items) != len(draw.slots):
            raise ValueError(
                f"data must be a list of {len(draw.slots)} items, one for each slot, got {data!r:.80}"
            )

        self.put(draw.slots, Rows(len(items), items=items))

    @override
    def read_rows(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        keys: frozenset[NestedKey] | None = None,
    ) -> list[Any]:
        return [self._items[slot] for slot in slots.tolist()]

    @override
    def batch_of_one(self, item: object) -> list[Any]:
        return [item]

    def build(self, values: Columns | list[Any], shape: torch.Size) -> Any:
        """Return the items stacked if they can be, else as a list."""
        assert isinstance(values, list)
        return stacked(values)

    @override
    def state_dict(self, rows: int, pool_rows: int = 0) -> dict[str, Any]:
        return {"items": to_plain(self._items[:rows])}

    @override
    def tables(self, pool_rows: int) -> dict[str, Any]:
        return {}

    @override
    def check_tables(self, state: dict[str, Any], ring: Ring) -> None:
        if "like" in state:
            raise ValueError("the state is of a storage of tensors, this is a ListStorage")
        if ring.capacity != self.max_size:
            raise other_capacity_error(ring.capacity, self.max_size)

    @override
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        items = from_plain(state["items"])
        if not isinstance(items, list) or len(items) != ring.used:
            raise damaged(f"its ring counts {ring.used} items, but the list holds another number")

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._items = list(from_plain(state["items"]))


def _own_memory(item: Any) -> Any:
    """Return an item with copies of its tensors."""
    if isinstance(item, TensorDictBase):
        return item.clone()
    return pytree.tree_map_only(Tensor, Tensor.clone, item)


class LazyStackStorage(ListStorage):
    """A `ListStorage` whose samples are lazy stacks: tensordicts that differ in shape stay as they are.

    Args:
        max_size: number of items, default 1000.
        compilable: see `Storage`.
        stack_dim: dimension of a sample that counts the items, default 0.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
    >>> rows = buffer.extend([TensorDict({"x": torch.zeros(n)}) for n in (2, 3)])
    >>> type(buffer.sample()).__name__
    'LazyStackedTensorDict'
    """

    def __init__(self, max_size: int | None = None, *, compilable: bool = False, stack_dim: int = 0) -> None:
        super().__init__(max_size, compilable=compilable)
        self.stack_dim = stack_dim

    def build(self, values: Columns | list[Any], shape: torch.Size) -> Any:
        """Return tensordicts as a lazy stack, other items as `ListStorage` does."""
        if isinstance(values, list) and values and all(isinstance(item, TensorDictBase) for item in values):
            return LazyStackedTensorDict.lazy_stack(values, self.stack_dim)
        return super().build(values, shape)

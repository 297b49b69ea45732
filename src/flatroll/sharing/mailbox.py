"""The mailbox of a worker: `Outbox` writes windows of rows into slots of shared memory, `Inbox` takes them out; `pack`
makes tensors for a window of any value."""

import io
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

if TYPE_CHECKING:
    import torch
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from flatroll.sharing.block import Block, Key, Table, dtype_name, row_count
from flatroll.sharing.channel import Channel, Closed

if TYPE_CHECKING:
    import torch

# kinds of messages
BLOCK = "mailbox: block"
WINDOW = "mailbox: window"
FREE = "mailbox: free"


class Outbox:
    """The end that writes. A window is one or more tables, each with its own number of rows.

    The memory is allocated for the first window, and again, larger, for a window that does not fit. Rows are copied
    once, into their slot; a message of a few bytes announces them. If no slot is free, `put` waits until the reader
    releases one.

    Attributes:
        place: block and slot of the last window.

    Args:
        channel: the writer's end of a channel to the reader.
        slots: maximum number of windows that are written and not yet released. Default 2.

    >>> import torch
    >>> here, there = Channel.pair()
    >>> inbox, outbox = Inbox(here), Outbox(there)
    >>> outbox.put({"reward": torch.ones(3, 1)}, note="of env 0")
    >>> with inbox.take() as window:
    ...     print(window.tables[0]["reward"].shape, window.note)
    torch.Size([3, 1]) of env 0
    """

    def __init__(self, channel: Channel, slots: int = 2) -> None:
        if not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots!r}")
        self._channel = channel
        self._slots = slots
        self._block: Block | None = None

        self._tensors: list[list[dict[Key, torch.Tensor]]] = []  # of each slot, of each table
        self._number = -1  # of the block
        self.place = -1, -1
        self._free: list[int] = []  # its free slots
        self._under_way = 0  # windows not returned yet, also of older blocks

    def put(self, *tables: "Mapping[Key, torch.Tensor]", note: Any = None) -> None:
        """Write a window; wait for a free slot if there is none.

        Args:
            tables: tensors ``[N, *S]`` by key, N the same within a table. Without any key: no rows.
            note: a small value to send with the window.

        Raises:
            Closed: the reader has exited.
            ValueError: the columns of a table have different numbers of rows.
        """
        rows = [row_count(table) if table else 0 for table in tables]
        while (freed := self._channel.pop(FREE)) or self._under_way == self._slots:
            place = freed[1] if freed else self._channel.receive(FREE)
            self.take_back(*place)
        if not self._fits(tables, rows):
            self._lay_out(tables, rows)

        slot = self._free.pop()
        for table, count, places in zip(tables, rows, self._tensors[slot], strict=True):
            for key, values in table.items():
                places[key][:count].copy_(values)
        self._under_way += 1

        self._channel.send(WINDOW, (self._number, slot, rows, note))
        self.place = self._number, slot

    def take_back(self, number: int, slot: int) -> None:
        """Reuse a released slot, given by a message of kind `FREE`, or by `place` if the last window was read."""
        self._under_way -= 1
        if number == self._number:
            self._free.append(slot)

    def _fits(self, tables: "tuple[Mapping[Key, torch.Tensor], ...]", rows: list[int]) -> bool:
        if self._block is None or len(tables) != len(self._block.tables):
            return False
        for table, count, shared in zip(tables, rows, self._block.tables, strict=True):
            if not table:
                continue
            if count > shared.rows or table.keys() != shared.columns.keys():
                return False
            for key, values in table.items():
                column = shared.columns[key]
                if column.dtype != dtype_name(values) or column.shape != values.shape[1:]:
                    return False
        return True

    def _lay_out(self, tables: "tuple[Mapping[Key, torch.Tensor], ...]", rows: list[int]) -> None:
        """Create a block for this window, with 50 % more rows if the previous one was too small."""
        known = () if self._block is None else self._block.tables
        laid_out = []
        for place, (table, count) in enumerate(zip(tables, rows, strict=True)):
            before = known[place] if place < len(known) else Table(0, {})
            if not table:
                laid_out.append(before)
                continue
            room = count
            if 0 < before.rows < count:
                room += count // 2
            laid_out.append(Table.like(table, max(before.rows, room)))

        self._block = Block(laid_out, self._slots)
        tensors = []
        for slot in range(self._slots):
            tensors.append([self._block.tensors(slot, place) for place in range(len(tables))])
        self._tensors = tensors
        self._number += 1
        self._free = list(range(self._slots))
        self._channel.send(BLOCK, (self._number, self._block))


class ReceivedWindow:
    """A window from `Outbox.put`: ``tables``, a list of tensors ``[N, *S]`` by key, and ``note``.

    The tensors are views of the writer's memory. They are valid until `release` or the end of a ``with`` block;
    afterwards the writer overwrites them. `copy` returns tensors to keep.
    """

    #: Whether the tensors own their memory, after `keep`.
    owned = False

    def __init__(
        self, inbox: "Inbox", tables: "list[dict[Key, torch.Tensor]]", note: Any, place: Any
    ) -> None:
        self.tables = tables
        self.note = note
        self._inbox = inbox
        self._place = place

    def copy(self) -> "list[dict[Key, torch.Tensor]]":
        """Return copies of the tables."""
        return [{key: values.clone() for key, values in table.items()} for table in self.tables]

    def keep(self) -> None:
        """Copy the tables and release the slot."""
        tables = self.copy()
        self.release()
        self.tables = tables
        self.owned = True

    def release(self) -> None:
        """Release the slot; a second call does nothing, nor is it an error if the writer is gone."""
        if self._place is not None:
            self._inbox.give_back(self._place)
            self._place = None
            self.tables = []

    def __enter__(self) -> "ReceivedWindow":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Inbox:
    """The end that reads: takes windows in the order in which they were written.

    Args:
        channel: the reader's end of a channel to the writer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = -1
        self._tensors = list[list[dict[Key, "torch.Tensor"]]]()
        self._room: list[int] = []  # rows of each table
        # For each slot and table, the number of rows of its last window, and views of them.
        self._views: list[list[tuple[int, dict[Key, torch.Tensor]]]] = []

    def take(self, timeout: float | None = None) -> ReceivedWindow:
        """Wait for the next window, ``timeout`` seconds at most. See `Channel.receive` for the errors."""
        while True:
            window = self.open(*self._channel.receive(BLOCK, WINDOW, timeout=timeout))
            if window is not None:
                return window

    def open(self, kind: str, content: Any) -> ReceivedWindow | None:
        """Parse a message of kind `BLOCK` (returns None) or `WINDOW`.

        Raises:
            ValueError: the message does not fit to the memory.
        """
        if kind == BLOCK:
            self._number, block = content
            tensors = []
            for slot in range(block.slots):
                tensors.append([block.tensors(slot, place) for place in range(len(block.tables))])
            self._tensors = tensors
            self._room = [table.rows for table in block.tables]
            self._views = [list(zip(self._room, tables, strict=True)) for tables in self._tensors]
            return None

        number, slot, rows, note = content
        if number != self._number or not 0 <= slot < len(self._tensors):
            raise ValueError(
                f"slot {slot} of block {number} was announced, but the memory is block {self._number} with "
                f"{len(self._tensors)} slots"
            )

        views = self._views[slot]
        for place, (count, room) in enumerate(zip(rows, self._room, strict=True)):
            if not 0 <= count <= room:
                raise ValueError(f"{count} rows were announced, more than the slot has room for")
            if count != views[place][0]:
                table = self._tensors[slot][place]
                views[place] = count, {key: values[:count] for key, values in table.items()}

        return ReceivedWindow(self, [dict(table) for _, table in views], note, (number, slot))

    def give_back(self, place: tuple[int, int]) -> None:
        """Tell the writer that a slot is free."""
        with suppress(Closed):  # it is gone: the next read raises
            self._channel.send(FREE, place)


def pack(value: Any) -> "tuple[bytes, list[torch.Tensor]]":
    """Return a pickle of ``value`` without the bytes of its tensors and arrays, and these as tensors ``[N, *S]``.

    Dense tensors, on any device, and arrays of numbers are taken out; anything else stays in the pickle.

    >>> import torch
    >>> rest, tensors = pack({"a": torch.ones(2), "b": "text"})
    >>> tensors, unpack(rest, tensors)
    ([tensor([1., 1.])], {'a': tensor([1., 1.]), 'b': 'text'})
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def unpack(rest: bytes, tensors: "list[torch.Tensor]") -> Any:
    """Restore the tensors; the value refers to these tensors, or to arrays that view them."""
    return _Unpacker(io.BytesIO(rest), tensors).load()


class _Packer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        import torch  # not at the top: a process that only starts others does not need torch

        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._torch = torch

    def persistent_id(self, obj: Any) -> tuple[int, str] | None:
        torch = self._torch
        if isinstance(obj, torch.Tensor):
            if obj.layout is not torch.strided or obj.is_meta or obj.is_quantized or obj.is_nested:
                return None
            kind = "tensor" if obj.ndim else "number"
            values = obj.detach()
            if not obj.ndim:
                values = values.reshape(1)
            self.tensors.append(values)
        elif type(obj) is np.ndarray and obj.dtype.kind in "biufc" and hasattr(torch, obj.dtype.name):
            kind = "array" if obj.ndim else "array of one"
            self.tensors.append(torch.from_numpy(np.array(obj, obj.dtype.newbyteorder("="), ndmin=1)))
        else:
            return None
        return len(self.tensors) - 1, kind

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self._torch.device):  # of a tensordict: its tensors arrive in host memory
            return self._torch.device, ("cpu",)
        return super().reducer_override(obj)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: "list[torch.Tensor]") -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: tuple[int, str]) -> Any:
        place, kind = pid
        tensor = self._tensors[place]
        if kind == "tensor":
            return tensor
        if kind == "number":
            return tensor[0]
        if kind == "array":
            return tensor.numpy()
        return tensor.numpy().reshape(())

"""Sends values with tensors over a channel: large ones through a slot of shared memory, small ones in the message."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatroll.sharing.block import Key, dtype_name
from flatroll.sharing.channel import Channel
from flatroll.sharing.mailbox import BLOCK, FREE, WINDOW, Inbox, Outbox, Window
from flatroll.sharing.parcel import pack, unpack

LETTER = "buffer: letter"  # kind of the messages that hold all bytes themselves
_SMALL = 1 << 16  # bytes that still go into a message: a socket takes them without a reader


class Post:
    """One end of a channel to or from the owner of a buffer. Each end sends one value and then waits for one."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._outbox, self._inbox = Outbox(channel, slots=1), Inbox(channel)

    def send(self, value: Any) -> None:
        """Send a value: anything that cloudpickle takes; nothing is sent of one that it does not.

        Raises:
            Closed: the other end is gone.
            ValueError: the other end still holds the slot of the value before.
        """
        rest, tensors = pack(value)
        if len(rest) + sum(map(_nbytes, tensors)) <= _SMALL:
            self.channel.send(LETTER, (rest, [(dtype_name(t), tuple(t.shape), _bytes(t)) for t in tensors]))
            return
        while freed := self.channel.pop(FREE):
            self._outbox.take_back(*freed[1])
        if self._outbox.full:
            raise ValueError("the slot of the value before was not given back")
        # Columns of one length make a table: the rows of a batch, and those of its ``final``.
        tables: dict[int, dict[Key, Tensor]] = {}
        for place, tensor in enumerate(tensors):
            tables.setdefault(len(tensor), {})[str(place)] = tensor
        if len(rest) > _SMALL:  # the pickle itself, of very many items
            packed = {"rest": torch.frombuffer(bytearray(rest), dtype=torch.uint8)}
            self._outbox.put(*tables.values(), packed, note=None)
        else:
            self._outbox.put(*tables.values(), *[{}] * (2 - len(tables)), note=rest)

    def open(self, kind: str, content: Any, keep: bool) -> tuple[Any, Callable[[], None]] | None:
        """Return the value that a message brings and what is to be called when it is no longer used; None if it brings
        none.

        Args:
            kind: of the message.
            content: of the message.
            keep: give tensors of their own memory, which stay when the slot is given back.

        Raises:
            ValueError: the message is none of a post, or does not fit to the memory.
        """
        if kind == LETTER:
            rest, parts = content
            return unpack(rest, [_tensor(*part) for part in parts]), _nothing
        if kind == FREE:
            self._outbox.take_back(*content)
            return None
        if kind not in (BLOCK, WINDOW):
            raise ValueError(f"a message of kind {kind!r} came, which no end of a post sends")
        window = self._inbox.open(kind, content)
        return None if window is None else (_unpacked(window, keep), window.release)

    def receive(self) -> Any:
        """Wait for a value, whose tensors own their memory; `Closed` if none will come."""
        while True:
            opened = self.open(*self.channel.receive(LETTER, BLOCK, WINDOW), keep=True)
            if opened is not None:
                value, release = opened
                release()
                return value


def _nothing() -> None:
    return


def _unpacked(window: Window, keep: bool) -> Any:
    """The value in a window; the window is given back if it holds none."""
    try:
        columns = {key: column for table in window.tables for key, column in table.items()}
        rest = columns.pop("rest").numpy().tobytes() if window.note is None else window.note
        tensors = [columns[str(place)] for place in range(len(columns))]
        return unpack(rest, [tensor.clone() for tensor in tensors] if keep else tensors)
    except BaseException:
        window.release()
        raise


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:  # frombuffer refuses to look at nothing
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape)

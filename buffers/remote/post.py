"""Sends values with tensors over a channel: large ones through a slot of shared memory, small ones in the message."""

from typing import Any

import torch
from torch import Tensor

from flatroll.sharing.block import Key, dtype_name
from flatroll.sharing.channel import Channel
from flatroll.sharing.mailbox import BLOCK, WINDOW, Inbox, Outbox
from flatroll.sharing.parcel import pack, unpack

LETTER = "buffer: letter"  # kind of the messages that hold all bytes themselves
_SMALL = 1 << 16  # bytes that still go into a message: a socket takes them without a reader


class Post:
    """One end of a channel to or from the owner of a buffer.

    Each end sends one value and then waits for one. So a value that comes says, too, that the one sent before was read
    and that its slot may be written again: no message has to.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._in_slot = False  # the value sent last
        self._outbox, self._inbox = Outbox(channel, slots=1), Inbox(channel)

    def send(self, value: Any) -> None:
        """Send a value: anything that cloudpickle takes; nothing is sent of one that it does not.

        Raises:
            Closed: the other end is gone.
        """
        rest, tensors = pack(value)
        if len(rest) + sum(map(_nbytes, tensors)) <= _SMALL:
            self.channel.send(LETTER, (rest, [(dtype_name(t), tuple(t.shape), _bytes(t)) for t in tensors]))
            return
        self._take_back()  # where no answer came to an answer that could not be read
        # Columns of one length make a table: the rows of a batch, and those of its ``final``.
        tables: dict[int, dict[Key, Tensor]] = {}
        for place, tensor in enumerate(tensors):
            tables.setdefault(len(tensor), {})[str(place)] = tensor
        if len(rest) > _SMALL:  # the pickle itself, of very many items
            packed: dict[Key, Tensor] = {"rest": torch.frombuffer(bytearray(rest), dtype=torch.uint8)}
            self._outbox.put(*tables.values(), packed, note=None)
        else:
            self._outbox.put(*tables.values(), *[{}] * (2 - len(tables)), note=rest)
        self._in_slot = True

    def _take_back(self) -> None:
        if self._in_slot:
            self._outbox.take_back(*self._outbox.place)
            self._in_slot = False

    def open(self, kind: str, content: Any, keep: bool) -> tuple[Any] | None:
        """Return the value that a message brings, in a tuple; None if it brings none.

        Args:
            kind: of the message.
            content: of the message.
            keep: give tensors of their own memory; the others hold the value until the next `send`.

        Raises:
            ValueError: the message is none of a post, or does not fit to the memory.
        """
        if kind == LETTER:
            rest, parts = content
            tensors = [_tensor(*part) for part in parts]
        elif kind in (BLOCK, WINDOW):
            window = self._inbox.open(kind, content)
            if window is None:
                return None
            columns = {key: column for table in window.tables for key, column in table.items()}
            rest = columns.pop("rest").numpy().tobytes() if window.note is None else window.note
            tensors = [columns[str(place)] for place in range(len(columns))]
            if keep:
                tensors = [tensor.clone() for tensor in tensors]
        else:
            raise ValueError(f"a message of kind {kind!r} came, which no end of a post sends")
        self._take_back()
        return (unpack(rest, tensors),)

    def receive(self) -> Any:
        """Wait for a value, whose tensors own their memory; `Closed` if none will come."""
        while True:
            kind, content = self.channel.receive(LETTER, BLOCK, WINDOW)
            opened = self.open(kind, content, keep=True)
            if opened is not None:
                return opened[0]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:  # frombuffer refuses to look at nothing
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape)

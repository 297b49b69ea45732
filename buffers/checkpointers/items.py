"""Items, such as those of a `ListStorage`, as bytes in one column of a file: JSON and tensors, without pickle."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from flatroll.buffers.index.saved_tables import damaged
from flatroll.disk import Ragged
from flatroll.disk.segments import Column as FileColumn
from flatroll.disk.state_tree import Packer, from_text, to_text, unpack


def dump_items(items: Sequence[Any]) -> dict[str, FileColumn]:
    """Return items as a column of a file, the inverse of `read_items`; TypeError for an unsupported value.

    >>> read_items(dump_items(["a", {"b": 1.5}, (2, b"c")]))
    ['a', {'b': 1.5}, (2, b'c')]
    """
    pieces = [to_bytes(item, f"item {i}") for i, item in enumerate(items)]
    memory = bytearray(b"".join(pieces))
    values = torch.zeros(0, dtype=torch.uint8)
    if memory:
        values = torch.frombuffer(memory, dtype=torch.uint8)

    lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
    return {"items": Ragged(values, lengths)}


def read_items(columns: Mapping[str, FileColumn], first: int = 0) -> list[Any]:
    """Return the items of a file from the number ``first`` on; ValueError if there are none."""
    column = columns.get("items")
    if (
        not isinstance(column, Ragged)
        or columns.keys() != {"items"}
        or column.values.dtype is not torch.uint8
    ):
        raise damaged("a part has no items")

    memory = column.values.numpy().tobytes()
    sizes = column.lengths.tolist()
    items = []
    begin = sum(sizes[:first])
    for size in sizes[first:]:
        items.append(from_bytes(memory[begin : begin + size]))
        begin += size
    return items


def to_bytes(item: object, name: str) -> bytes:
    """Encode an item: the length of its JSON in 8 bytes, the JSON, and its tensors as a safetensors file."""
    try:
        packer = Packer()
        value = packer.value(item, "state", 0)
    except TypeError as error:
        raise TypeError(
            f"{name}: {error}. ListStorage keeps any object in memory, but cannot save this one to disk"
        ) from None

    text = to_text(value).encode()
    return len(text).to_bytes(8, "little") + text + save(packer.tensors)


def from_bytes(memory: bytes) -> Any:
    """Invert `to_bytes`; ValueError if ``memory`` is damaged."""
    size = int.from_bytes(memory[:8], "little")
    if size > len(memory) - 8:
        raise damaged("an item is cut short")
    try:
        tensors = load(memory[8 + size :])
    except SafetensorError as error:
        raise damaged(f"the tensors of an item cannot be read ({error})") from None
    return unpack(from_text(memory[8 : 8 + size]), tensors)

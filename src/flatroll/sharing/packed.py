"""Batches as dicts of NumPy arrays, the form in which they go through Ray's object store."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

Key = str | tuple[str, ...]


@dataclass(frozen=True)
class Packed:
    """A tensordict as arrays.

    Attributes:
        shape: its batch size.
        columns: an array for each entry, by key.
        dtypes: the torch dtype of columns of which NumPy has none; their arrays hold the bits as int16.
    """

    shape: tuple[int, ...]
    columns: dict[Key, np.ndarray[Any, Any]]
    dtypes: dict[Key, torch.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(array.nbytes for array in self.columns.values())


def pack(value: Any) -> Any:
    """Return tensordicts, also those in tuples, as `Packed`, and anything else as it is.

    Arrays look at the memory of tensors on the CPU.

    Raises:
        TypeError: an entry is no tensor.

    >>> packed = pack(TensorDict({"reward": torch.ones(2)}, [2]))
    >>> packed.columns, unpack(packed)["reward"]
    ({'reward': array([1., 1.], dtype=float32)}, tensor([1., 1.]))
    """
    if isinstance(value, tuple):
        return tuple(map(pack, value))
    if not isinstance(value, TensorDictBase):
        return value
    columns, dtypes = {}, {}
    for key, entry in value.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(entry, Tensor):
            raise TypeError(
                f"entry {key!r} is of type {type(entry).__name__}: only tensors go through Ray's object store, "
                "leave it out or make a tensor of it"
            )
        column = entry.detach().cpu()
        if column.dtype is torch.bfloat16:
            dtypes[key], column = column.dtype, column.view(torch.int16)
        columns[key] = column.numpy()
    return Packed(tuple(value.batch_size), columns, dtypes)


def unpack(value: Any) -> Any:
    """Return what `pack` was given, in memory of its own: nothing looks at the object store any more."""
    if isinstance(value, tuple):
        return tuple(map(unpack, value))
    if not isinstance(value, Packed):
        return value
    batch = TensorDict({}, value.shape)
    for key, array in value.columns.items():
        column = torch.from_numpy(np.array(array))
        batch.set(key, column.view(value.dtypes[key]) if key in value.dtypes else column)
    return batch

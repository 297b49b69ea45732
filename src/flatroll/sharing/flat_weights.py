"""The state dict of a policy as one array of bytes, for stores that take a value once for many readers."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.sharing.block import Column, dtype_name


def weight_layout(state: Mapping[str, Tensor]) -> dict[str, Column]:
    """Data type and shape of each weight, by name.

    Raises:
        TypeError: an entry is no tensor.

    >>> weight_layout(torch.nn.Linear(2, 1).state_dict())["weight"]
    Column(dtype='float32', shape=(1, 2))
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weight {name!r} is of type {type(value).__name__}: only tensors can be sent")
    return {name: Column(dtype_name(value), tuple(value.shape)) for name, value in state.items()}


def flatten_weights(state: Mapping[str, Tensor], layout: Mapping[str, Column]) -> np.ndarray[Any, Any]:
    """Return the bytes of all weights one behind the other, uint8 ``[bytes]``.

    Raises:
        ValueError: names, data types or shapes are not those of ``layout``.
    """
    came = weight_layout(state)
    if came != dict(layout):
        names = [name for name in {**layout, **came} if layout.get(name) != came.get(name)]
        changes = ", ".join(f"{name!r} was {layout.get(name)}, got {came.get(name)}" for name in names[:3])
        raise ValueError(
            f"the policy's weights have changed their names or shapes ({changes}): its actors cannot take them, make "
            "a new collector"
        )
    parts = [state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for name in layout]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def unflatten_weights(flat: np.ndarray[Any, Any], layout: Mapping[str, Column]) -> dict[str, Tensor]:
    """Return the weights in memory of their own; the reverse of `flatten_weights`.

    >>> state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    >>> layout = weight_layout(state)
    >>> unflatten_weights(flatten_weights(state, layout), layout)
    {'a': tensor([1., 2.]), 'b': tensor(3)}
    """
    state, start = {}, 0
    for name, column in layout.items():
        dtype: torch.dtype = getattr(torch, column.dtype)
        end = start + prod(column.shape) * dtype.itemsize
        # The copy begins at an address that suits every data type; the place in the array may not.
        state[name] = torch.from_numpy(flat[start:end].copy()).view(dtype).view(column.shape)
        start = end
    return state

"""Storages of several dimensions: flattens steps of parallel lanes (envs), time first, and maps positions.

With L lanes, step t of lane l is in slot ``t * L + l``: all lanes of a step side by side, then the next step.
"""

import math
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.storages.item_kinds import as_tensor, map_rows
from flatroll.layout.checks import as_numbers, as_text

Index: TypeAlias = Tensor | int | tuple[Tensor, ...]  # row positions, or coordinates with one entry each


def time_first(data: object, ndim: int, dim: int) -> tuple[Any, torch.Size]:
    """Flatten the first ``ndim`` dimensions of ``data``, ``dim`` (time) first; also return the lanes (other sizes).

    >>> time_first(torch.tensor([[1, 2, 3], [4, 5, 6]]), ndim=2, dim=1)
    (tensor([1, 4, 2, 5, 3, 6]), torch.Size([2]))
    """
    sizes: set[torch.Size] = set()

    def flat(leaf: object) -> Any:
        values = as_tensor(leaf)
        dims = values.batch_dims if isinstance(values, TensorDictBase) else values.ndim
        if dims < ndim:
            raise ValueError(
                f"the storage has ndim={ndim}: extend it with batches of {ndim} batch dimensions, "
                f"got {list(values.shape)}; leave ndim out for a collector's flat batches, where ids tell envs apart"
            )

        sizes.add(values.shape[:ndim])
        other_dims = [d for d in range(values.ndim) if d != dim]
        values = values.permute(dim, *other_dims)
        return values.reshape(math.prod(values.shape[:ndim]), *values.shape[ndim:])

    data = map_rows(data, flat)
    if len(sizes) != 1:
        raise ValueError(f"all leaves must have the same first {ndim} sizes, got {sorted(map(list, sizes))}")

    size = sizes.pop()
    return data, torch.Size([*size[:dim], *size[dim + 1 :]])


def positions(slots: Tensor, lanes: torch.Size) -> Tensor:
    """Convert ``slots`` (int64 ``[N]``) to positions ``[N, ndim]``; unchanged if there is one dimension.

    >>> positions(torch.tensor([0, 5]), torch.Size([2]))
    tensor([[0, 0],
            [2, 1]])
    """
    if not lanes:
        return slots

    # Like the digits of a number: the last dimension first; the remainder is the step.
    places: list[Tensor] = []
    for size in reversed(lanes):
        places.insert(0, slots.remainder(size))
        slots = slots.div(size, rounding_mode="floor")
    return torch.stack([slots, *places], -1)


def find_slots(places: Index, lanes: torch.Size) -> Tensor:
    """Slots of positions, the inverse of `positions`; -1 where a position is negative.

    A tuple holds the coordinates apart, one entry per dimension. IndexError if there is no such lane.

    >>> find_slots(torch.tensor([[0, 0], [2, 1]]), torch.Size([2]))
    tensor([0, 5])
    """
    if isinstance(places, tuple) and places:
        places = torch.stack([as_numbers("index", part) for part in places], -1)
    else:
        places = as_numbers("index", places)
    if not lanes or places.ndim == 0 or places.shape[-1] != len(lanes) + 1:
        return places  # already slots

    slots = places[..., 0]
    for i, size in enumerate(lanes):
        if bool((places[..., i + 1] >= size).any()):
            raise IndexError(
                f"index has {int(places[..., i + 1].max())} in dimension {i + 1}, which has {size} lanes"
            )
        slots = slots * size + places[..., i + 1]

    return torch.where((places < 0).any(-1), -1, slots)


def slots_at(index: Any, ring: Ring, lanes: torch.Size) -> Tensor:
    """Return the slots that ``index`` selects from the used slots, viewed as ``[steps, *lanes]``.

    IndexError if there is no such position, TypeError if ``index`` is not a position.
    """
    # Slots are computed on the host, wherever the index is.
    if isinstance(index, Tensor):
        index = index.cpu()
    elif isinstance(index, tuple):
        index = tuple(part.cpu() if isinstance(part, Tensor) else part for part in index)

    parts = index if isinstance(index, tuple) else [index]
    if any(isinstance(part, str) for part in parts):
        raise TypeError(
            f"rows are written by position, got {index!r}: buffer[:] = TensorDict({{{index!r}: ...}}, ...) "
            "writes one entry of all rows"
        )

    used = ring.used
    width = lanes.numel()
    # Compute integers and slices; apply masks and rarer kinds of indices to a list of all slots.
    if isinstance(index, slice):
        chosen = range(used // width)[index]
        steps = torch.arange(len(chosen)) * chosen.step + chosen.start
        if lanes:
            return (steps.unsqueeze(1) * width + torch.arange(width)).view(-1, *lanes)
        return steps

    places = index
    if type(index) is int or (isinstance(index, list) and all(type(part) is int for part in index)):
        places = torch.tensor(index, dtype=torch.int64)

    if isinstance(places, Tensor) and places.dtype in (torch.int64, torch.int32) and not lanes:
        places = places.to(torch.int64)
        if bool(((places >= -used) & (places < used)).all()):
            return torch.where(places < 0, places + used, places)

    slots = torch.arange(used).view(-1, *lanes)
    if isinstance(index, tuple):
        _refuse_missing_lanes(index, lanes)
    try:
        return slots[index]
    except IndexError:
        if isinstance(index, float):
            raise TypeError(f"rows are indexed by integers, slices and masks, got {index!r}") from None
        raise IndexError(f"index {index!r} is out of range: {len(ring)} rows are stored") from None
    except (TypeError, RuntimeError, ValueError) as error:
        raise TypeError(
            f"index must be an integer, a slice, a mask or integers, got {as_text(index)}"
        ) from error


def _refuse_missing_lanes(index: tuple[Any, ...], lanes: torch.Size) -> None:
    """Raise IndexError if a slice in ``index`` selects none of the lanes of its dimension."""
    dims = len(lanes) + 1
    for place, part in enumerate(index):
        if ... not in index[:place]:
            at = place
        else:  # after "...", parts are counted from the end
            at = dims + place - len(index)

        if isinstance(part, slice) and 0 < at < dims and not range(lanes[at - 1])[part]:
            raise IndexError(f"index {index!r} selects no lane: dimension {at} has {lanes[at - 1]} lanes")


def in_shape(data: Any, slots: Tensor, rows: int, lanes: torch.Size) -> Any:
    """Return a batch ``[rows]`` in the shape of the ``slots`` that were asked for; one item for a single slot.

    Of a slice, rows that are not stored were left out; its first dimension is time.
    """
    if slots.ndim == 0:
        return map_rows(data, lambda leaf: leaf[0])

    shape = slots.shape if rows == slots.numel() else torch.Size([-1, *lanes])
    if len(shape) == 1:
        return data
    return map_rows(data, lambda leaf: leaf.unflatten(0, shape))

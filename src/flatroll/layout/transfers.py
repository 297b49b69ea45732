"""Copies between devices that the program does not wait for, or waits for once."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import NestedKey
from flatroll.layout.tensordict_seam import nest

CPU = torch.device("cpu")


def upload(tensor: Tensor, device: torch.device, *, held: bool = False) -> Tensor:
    """Return a tensor on ``device``, itself if it is there; on the way to a device the copy is not waited for.

    Args:
        tensor: may change as soon as this returns: the driver copies pageable memory first, and a copy of pinned
            memory, which the device reads later, is waited for.
        device: uses the result in order, as all work on one stream of a GPU is done.
        held: whether the caller keeps the tensor as it is until it has waited for the device. Default False.

    >>> upload(torch.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    if tensor.device == device:
        return tensor
    if device.type in ("cpu", "mps"):  # Metal reads pageable memory later, too
        return tensor.to(device)
    return tensor.to(device, non_blocking=held or not tensor.is_pinned())


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU, and wait for each device once.

    The copies of a device end in the order in which they began, so only the last one is waited for.

    >>> download([torch.arange(2), torch.zeros(1)])
    [tensor([0, 1]), tensor([0.])]
    """
    # A copy of nothing does not wait.
    last = {tensor.device: number for number, tensor in enumerate(tensors) if tensor.numel()}
    return [
        tensor.to(CPU, non_blocking=last.get(tensor.device) != number)
        for number, tensor in enumerate(tensors)
    ]


def move(tensors: Sequence[Tensor], device: torch.device, *, held: bool = False) -> list[Tensor]:
    """Return tensors on a device: not waited for on the way to it, waited for once on the way to the CPU.

    Args:
        tensors: may lie on several devices.
        device: where they go.
        held: see `upload`.

    >>> move([torch.arange(2)], torch.device("cpu"))
    [tensor([0, 1])]
    """
    if device.type == "cpu":
        return download(tensors)
    return [upload(tensor, device, held=held) for tensor in tensors]


def move_batch(batch: TensorDict, device: torch.device, *, wait: bool = True) -> TensorDict:
    """Return a batch on a device: not waited for on the way to it, waited for once on the way to the CPU.

    Args:
        batch: stays as it is.
        device: where its entries go.
        wait: whether entries are ready when they arrive on the CPU. Default True.

    >>> move_batch(TensorDict({"x": torch.zeros(2)}, [2]), torch.device("cpu")).device
    device(type='cpu')
    """
    columns: dict[NestedKey, Tensor] = dict(batch.items(True, True))
    tensors = list(columns.values())
    if wait or device.type != "cpu":
        tensors = move(tensors, device)
    else:
        tensors = [tensor.to(device, non_blocking=True) for tensor in tensors]
    return nest(dict(zip(columns, tensors, strict=True)), *batch.batch_size, device=device)

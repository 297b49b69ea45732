"""Takes tensors and arrays out of a pickle, so that their bytes can go another way: `pack` and `unpack`."""

import io
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

if TYPE_CHECKING:
    import torch


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
    """Put the tensors in again; the value holds these tensors themselves, or arrays that look at them."""
    return _Unpacker(io.BytesIO(rest), tensors).load()


class _Packer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        import torch  # here: a process that only starts others does without

        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._torch = torch

    def persistent_id(self, obj: Any) -> tuple[int, str] | None:
        torch = self._torch
        if isinstance(obj, torch.Tensor):
            if obj.layout is not torch.strided or obj.is_meta or obj.is_quantized or obj.is_nested:
                return None
            kind = "tensor" if obj.ndim else "number"
            self.tensors.append(obj.detach() if obj.ndim else obj.detach().reshape(1))
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
        return tensor.numpy() if kind == "array" else tensor.numpy().reshape(())

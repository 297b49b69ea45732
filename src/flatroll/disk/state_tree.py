"""Splits a tree of Python values into JSON and plain tensors, and back, without pickle."""

import base64
import json
import math
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.checks import optional_package
from flatroll.layout.ted import NestedRuns
from flatroll.layout.trajectories import nested_values

_DEEPEST = 64  # maximum nesting depth, in writing and reading
_MOST_ITEMS = 2**24  # maximum number of values in a tree read; its JSON text has a separate limit
_WORTH = 1024  # minimum number of bytes to try compression on
_TRIAL = 2**16  # bytes compressed first, to see whether the rest is worth it
_MOST_BITS = 13_000  # maximum size of an integer: Python parses at most 4300 digits
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.float64}

Array = NDArray[Any]


class DamagedState(ValueError):
    """Saved data are damaged."""


def damaged(what: str) -> DamagedState:
    """Return the error for damaged data with the impossible content ``what``."""
    return DamagedState(f"the state is damaged: {what[:400]}. Nothing was loaded; use another copy of it")


def pack(tree: Any, *, compress: bool = True, host: bool = True) -> tuple[Any, dict[str, Tensor]]:
    """Split ``tree`` into a value for `json` and plain tensors; `unpack` is the inverse.

    A tree holds dicts (of any scalar keys, and tuples of them), lists, tuples, None, bools, integers, floats (kept bit
    by bit, NaN and infinities included), strings, bytes, NumPy arrays and scalars (structured ones, too; no objects),
    dense tensors of any dtype, tensordicts, `torch.Size`, `torch.dtype` and `torch.device`: what the ``state_dict`` of
    modules, optimizers, collectors and buffers give.

    Args:
        tree: the values.
        compress: store arrays and tensors that shrink by a tenth or more compressed: with zstd at level 1, without
            the extra ``zstd`` with zlib. Default True.
        host: copy tensors to the CPU. Default True; if False, they stay on their devices, uncompressed.

    Returns:
        the JSON value, and the tensors that it names: contiguous, without shared memory.

    Raises:
        TypeError: a value is of another kind; the message has its path.
        ValueError: there are more than 64 levels of nesting, for example in a tree that contains itself.

    >>> text, tensors = pack({("next", "reward"): [1, 0.5, torch.zeros(2)], 3: None})
    >>> unpack(text, tensors)
    {('next', 'reward'): [1, 0.5, tensor([0., 0.])], 3: None}
    >>> pack({"a": [object()]})
    Traceback (most recent call last):
    ...
    TypeError: state['a'][0] is a object, which cannot be saved: a state holds numbers, strings, tensors, arrays, and \
dicts, lists and tuples of them
    """
    packer = Packer(compress=compress and host, host=host)
    return packer.value(tree, "state", 0), packer.tensors


def unpack(value: Any, tensors: Mapping[str, Tensor], *, max_bytes: int = 2**34) -> Any:
    """Invert `pack`, given untrusted JSON ``value`` and ``tensors``.

    Args:
        value: what `json.loads` gave.
        tensors: the tensors by name.
        max_bytes: most bytes that compressed parts may take together when decompressed, default 16 GiB.

    Raises:
        ValueError: they are damaged, or not of `pack`.
        ImportError: a part is compressed with zstd, and zstandard is not installed.
    """
    return _Unpacker(tensors, max_bytes).value(value, 0)


def to_plain(tree: Any) -> Any:
    """Return a tree as plain values and tensors, which torch loads without unpickling; `from_plain` is the inverse.

    Values that `pack` does not support, such as custom objects, are kept unchanged.

    >>> to_plain([np.zeros(1)])
    (['list', [['array', '0.raw', '<f8', [1]]]], {'0.raw': tensor([0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)})
    >>> from_plain(to_plain([np.zeros(1)]))
    [array([0.])]
    """
    try:
        return pack(tree, host=False)
    except (TypeError, ValueError):
        return tree


def from_plain(value: Any) -> Any:
    """Invert `to_plain`; ValueError if ``value`` is damaged."""
    if type(value) is not tuple or len(value) != 2:
        return value

    if not isinstance(value[1], dict) or not all(isinstance(part, Tensor) for part in value[1].values()):
        raise damaged("a part of it has no tensors")
    return unpack(*value)


def to_text(value: Any) -> str:
    """Return the JSON text of the result of `pack`."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def from_text(text: str | bytes) -> Any:
    """Parse an untrusted JSON text; ValueError if it is invalid, nested too deep, or contains floats."""

    def refuse(number: str) -> Any:
        raise ValueError(f"the number {number[:20]!r} is not an integer")

    try:
        return json.loads(text, parse_constant=refuse, parse_float=refuse)
    except (ValueError, RecursionError) as error:
        raise damaged(f"its JSON cannot be read ({error})") from None


class Packer:
    """Packs values one by one into a dict; unsupported values raise when they are added.

    >>> packer = Packer()
    >>> packer.add("step", 3), packer.add("weight", torch.ones(1))
    (None, None)
    >>> unpack(packer.tree, packer.tensors)
    {'step': 3, 'weight': tensor([1.])}

    Args:
        compress, host: see `pack`.

    Attributes:
        tensors: of all values, by name.
        tree: the JSON value of a dict of what was added.
    """

    def __init__(self, *, compress: bool = True, host: bool = True) -> None:
        self.tensors: dict[str, Tensor] = {}
        # Tensors and their names: shared tensors are stored once.
        self._names: dict[tuple[Any, ...], tuple[str, Tensor]] = {}

        self._pairs: list[Any] = []
        self.tree: Any = ["dict", self._pairs]

        self._compress = compress
        self._host = host
        self._codec = "zstd"
        try:
            import zstandard

            self._shrink: Callable[[bytes], bytes] = zstandard.ZstdCompressor(level=1).compress
        except ImportError:
            self._codec = "zlib"
            self._shrink = partial(zlib.compress, level=1)

    def add(self, name: str, value: Any) -> None:
        """Pack a value under a name; the errors are those of `pack`."""
        self._pairs.append([name, self.value(value, f"state[{name!r}]", 1)])

    def value(self, value: Any, path: str, depth: int) -> Any:
        """Return the JSON form: null, bools, integers and strings as such, anything else as [kind, ...]."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value

        if kind is int:
            if value.bit_length() > _MOST_BITS:
                raise TypeError(f"{path} is an integer of more than {_MOST_BITS} bits")
            return value
        if kind is float:
            return ["float", value.hex()]
        if depth > _DEEPEST:
            raise ValueError(f"{path[:200]}... nests more than {_DEEPEST} levels deep, or contains itself")

        if kind in (list, tuple):
            return [kind.__name__, [self.value(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]]
        if kind in (dict, OrderedDict):
            pairs = []
            for key, item in value.items():
                if not _is_key(key):
                    raise TypeError(f"{path} has the key {key!r}: keys are scalars, or tuples of them")
                at = f"{path}[{key!r}]"
                pairs.append([self.value(key, at, depth + 1), self.value(item, at, depth + 1)])
            if kind is dict:
                return ["dict", pairs]
            # nn.Module.state_dict stores the versions of its modules here.
            metadata = getattr(value, "_metadata", None)
            return ["ordered", pairs, self.value(metadata, path, depth + 1)]

        if isinstance(value, (TensorDictBase, NonTensorData)):
            return self._tensordict(value, path, depth)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.Size):
            return ["size", list(value)]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if kind is bytes:
            return ["bytes", base64.b64encode(value).decode()]

        if isinstance(value, (np.ndarray, np.generic)) and kind is not np.void:
            return self._array(value, path)
        raise _no_data_error(value, path)

    def _array(self, value: Any, path: str) -> Any:
        """Return the tree's entry for a NumPy array or scalar."""
        if value.dtype.hasobject:
            raise TypeError(f"{path} is an array of Python objects, which cannot be saved")

        descr = np.lib.format.dtype_to_descr(value.dtype)
        if isinstance(value, np.generic):
            return ["number", descr, value.tobytes().hex()]

        memory = np.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), np.uint8)
        return ["array", self._store(torch.from_numpy(memory), False), descr, list(value.shape)]

    def _tensordict(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, NonTensorData):
            data = self.value(value.data, path, depth + 1)
            return ["non_tensor", list(value.batch_size), data]
        if isinstance(value, LazyStackedTensorDict):
            parts = [self.value(td, f"{path}[{i}]", depth + 1) for i, td in enumerate(value.tensordicts)]
            return ["lazy_stack", value.stack_dim, parts]

        if type(value) not in (TensorDict, NestedRuns) and not value.is_memmap():
            raise _no_data_error(value, path)

        pairs = [
            [name, self.value(value.get(name), f"{path}[{name!r}]", depth + 1)]
            for name in value.keys()  # noqa: SIM118
        ]

        if self._host or value.device is None:
            device = []
        else:
            device = [str(value.device)]
        return ["tensordict", list(value.batch_size), pairs, *device]

    def _tensor(self, value: Tensor, path: str) -> Any:
        """Return the tree's entry for a tensor, and pack its values unless they were packed before."""
        if value.layout is torch.jagged:
            offsets: Tensor = value.offsets()  # type: ignore[attr-defined]
            return ["jagged", self._tensor(nested_values(value), path), self._tensor(offsets, path)]
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise TypeError(
                f"{path} is a {value.layout} tensor on {value.device}: a state can hold only dense tensors"
            )

        plain = value.detach()
        given = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride(), plain.is_conj(), plain.is_neg())
        form = [str(plain.dtype).removeprefix("torch."), list(plain.shape)]

        if given in self._names and plain.numel():
            return ["tensor", self._names[given][0], *form]

        flat = plain.cpu() if self._host else plain
        flat = flat.resolve_conj().resolve_neg().contiguous().reshape(-1)
        flat = flat.as_strided((plain.numel(),), (1,))
        # Words that every version of safetensors supports, in place of the dtype.
        words = flat.view(_WORDS[plain.element_size()])
        name = self._store(words, flat.data_ptr() == plain.data_ptr())
        self._names[given] = name, plain  # keeps the tensor alive, so that its address is not reused
        return ["tensor", name, *form]

    def _store(self, words: Tensor, shared: bool) -> str:
        """Store a one-dimensional tensor under a new name that includes the compression."""
        number = len(self.tensors)

        if self._compress and words.nbytes >= _WORTH:
            memory = words.view(torch.uint8).numpy()
            trial = memory[:_TRIAL].tobytes()
            if len(self._shrink(trial)) < 0.9 * len(trial):
                packed = self._shrink(memory.tobytes())
                if len(packed) < 0.9 * len(memory):
                    name = f"{number}.{self._codec}"
                    self.tensors[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                    return name

        name = f"{number}.raw"
        self.tensors[name] = words.clone() if shared else words
        return name


@dataclass(slots=True)
class _Unpacker:
    """Rebuilds values, checking their descriptions first.

    Args:
        tensors: by name.
        left: bytes that compressed tensors may still take when they are decompressed.
        items: number of values found so far.
    """

    tensors: Mapping[str, Tensor]
    left: int
    items: int = 0

    def value(self, value: Any, depth: int) -> Any:
        """Return the value of a JSON form; ValueError if it is damaged."""
        self.items += 1
        if self.items > _MOST_ITEMS:
            raise damaged(f"its tree has more than {_MOST_ITEMS} values")
        if value is None or type(value) in (bool, int, str):
            return value

        if depth > _DEEPEST + 1:
            raise damaged(f"its tree nests more than {_DEEPEST} levels deep")
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise damaged(f"its tree has {str(value)[:40]!r} where a value is expected")

        try:
            return self._make(value, depth + 1)
        except DamagedState:
            raise
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
            raise damaged(f"its tree has an invalid {value[0][:40]} ({error})") from None

    def _make(self, value: list[Any], depth: int) -> Any:
        """The value of ``[kind, ...]``; parts of it are ``depth`` deep."""
        match value:
            case ["float", str(text)]:
                return float.fromhex(text)
            case ["list", list(parts)]:
                return [self.value(part, depth) for part in parts]
            case ["tuple", list(parts)]:
                return tuple([self.value(part, depth) for part in parts])
            case ["dict", list(pairs)]:
                return self._dict(pairs, depth, {})
            case ["ordered", list(pairs), metadata]:
                ordered: Any = self._dict(pairs, depth, OrderedDict())
                if metadata is not None:
                    ordered._metadata = self.value(metadata, depth)
                return ordered
            case ["tensor", name, dtype, shape]:
                return self._tensor(name, _dtype(dtype), _shape(shape))
            case ["array", name, descr, shape]:
                array_dtype = _numpy_dtype(descr)
                size = _shape(shape)
                memory = self._memory(name, math.prod(size) * array_dtype.itemsize)
                return memory.view(array_dtype).reshape(size)
            case ["number", descr, str(text)]:
                return _number(_numpy_dtype(descr), bytes.fromhex(text))
            case ["jagged", values, offsets]:
                rows = self.value(values, depth)
                return _jagged(rows, self.value(offsets, depth))
            case ["size", shape]:
                return _shape(shape)
            case ["dtype", name]:
                return _dtype(name)
            case ["device", str(name)]:
                return torch.device(name)
            case ["bytes", str(text)]:
                return base64.b64decode(text, validate=True)
            case ["tensordict", shape, list(pairs), *device]:
                return _tensordict(self._dict(pairs, depth, {}), shape, device)
            case ["lazy_stack", int(dim), list(parts)]:
                stacked = [self.value(part, depth) for part in parts]
                if not stacked or not all(isinstance(td, TensorDictBase) for td in stacked):
                    raise damaged("its tree has an empty stack of tensordicts")
                return LazyStackedTensorDict.lazy_stack(stacked, dim)
            case ["non_tensor", shape, data]:
                return NonTensorData(self.value(data, depth), batch_size=_shape(shape))
        raise ValueError(f"unknown kind, or unexpected {str(value[1:])[:40]!r}")

    def _tensor(self, name: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Return a copy of the tensor ``name``."""
        stored = self.tensors.get(name)
        if stored is not None and stored.device.type != "cpu":
            return stored.clone().view(dtype).view(shape)

        memory = self._memory(name, math.prod(shape) * dtype.itemsize)
        if len(memory):
            return torch.from_numpy(memory).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype)

    def _dict(self, pairs: list[Any], depth: int, made: Any) -> Any:
        """Fill ``made`` with the unpacked pairs and return it; a key may come only once."""
        for key, item in pairs:
            name = self.value(key, depth)
            if not _is_key(name) or name in made:
                raise damaged(f"its tree has a dict with the key {name!r}, or with this key twice")
            made[name] = self.value(item, depth)
        return made

    def _memory(self, name: Any, size: int) -> Array:
        """Return a copy of the ``size`` bytes of the tensor ``name``, uint8."""
        stored = self.tensors.get(name) if isinstance(name, str) else None

        if stored is None or stored.ndim != 1 or not stored.is_contiguous():
            raise damaged(f"its tree refers to the tensor {str(name)[:40]!r}, which is missing")
        memory: Array = stored.view(torch.uint8).numpy() if stored.numel() else np.zeros(0, np.uint8)

        codec = name.rpartition(".")[2]
        if codec == "raw":
            if len(memory) != size:
                raise damaged(f"its tensor {name!r} has {len(memory)} bytes, expected {size}")
            return memory.copy()

        self.left -= size
        if self.left < 0:
            raise damaged("its compressed tensors are larger than max_bytes when they are decompressed")
        return _decompress(codec, memory.tobytes(), size)


def _number(dtype: np.dtype[Any], number: bytes) -> Any:
    """Return the NumPy scalar of these bytes; raise a flatroll error if there are more or fewer than it has."""
    if len(number) != dtype.itemsize:
        raise damaged(f"its tree has a number of {len(number)} bytes, expected {dtype.itemsize}")
    return np.frombuffer(number, dtype)[0]


def _jagged(rows: Any, bounds: Any) -> Tensor:
    """Return the nested tensor with these rows; raise a flatroll error if the bounds do not fit them."""
    if not isinstance(rows, Tensor) or not isinstance(bounds, Tensor) or bounds.dtype is not torch.int64:
        raise damaged("its tree has an empty nested tensor")
    if bounds.ndim != 1 or bounds[0] != 0 or bounds[-1] != len(rows) or bool((bounds.diff() < 0).any()):
        raise damaged(f"its tree has a nested tensor of {len(rows)} rows whose bounds do not match")
    return torch.nested.nested_tensor_from_jagged(rows, bounds)


def _tensordict(entries: dict[Any, Any], shape: Any, device: list[Any]) -> TensorDict:
    """Return the tensordict of these entries; raise a flatroll error if it cannot hold one of them."""
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, (Tensor, TensorDictBase, NonTensorData)):
            raise damaged(f"its tree has a tensordict whose {name!r} is a {type(entry).__name__}")

    return TensorDict(entries, _shape(shape), device=next(iter(device), None))


def _is_key(key: Any) -> bool:
    """Return whether a state may have this key: a number, a string, bytes, None, or a tuple of them."""
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, str, bytes)


def _no_data_error(value: Any, path: str) -> TypeError:
    return TypeError(
        f"{path} is a {type(value).__name__}, which cannot be saved: a state holds numbers, strings, tensors, arrays, "
        "and dicts, lists and tuples of them"
    )


def _shape(sizes: Any) -> torch.Size:
    """Return the shape that the tree names; raise a flatroll error if it is damaged."""
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise damaged(f"its tree has the shape {str(sizes)[:40]}")
    if len(sizes) > _DEEPEST or math.prod(size for size in sizes if size) >= 2**62:
        raise damaged("its tree has a shape of more values than memory can hold")
    return torch.Size(sizes)


def _dtype(name: Any) -> torch.dtype:
    """Return the dtype that the tree names; raise a flatroll error if there is none."""
    dtype = None
    if isinstance(name, str) and re.fullmatch(r"\w{1,30}", name):
        dtype = getattr(torch, name, None)

    if not isinstance(dtype, torch.dtype) or dtype.itemsize not in _WORDS or "q" in str(name):
        raise damaged(f"its tree has the unknown dtype {str(name)[:40]!r}")
    return dtype


def _numpy_dtype(descr: Any) -> np.dtype[Any]:
    """Return the dtype that `numpy.lib.format` describes by ``descr``; only plain numbers and text are allowed."""

    def fields(part: Any, depth: int = 0) -> Any:
        """Convert JSON's lists to tuples."""
        if isinstance(part, str) and depth <= _DEEPEST:
            return part
        if not isinstance(part, list) or depth > _DEEPEST:
            raise damaged(f"its tree has an array of the invalid dtype {str(descr)[:40]}")

        made = []
        for name, kind, *shape in part:
            made.append((name, fields(kind, depth + 1), *(tuple(_shape(sizes)) for sizes in shape)))
        return made

    try:
        dtype = np.lib.format.descr_to_dtype(fields(descr))
    except (ValueError, TypeError, SyntaxError) as error:
        raise damaged(f"its tree has an array of an unknown dtype ({error})") from None

    if dtype.hasobject or not 0 < dtype.itemsize <= 2**20:
        raise damaged(f"its tree has an array of {dtype}, which is not supported")
    return dtype


def _decompress(codec: str, packed: bytes, size: int) -> Array:
    """Decompress ``packed`` to exactly ``size`` bytes; never allocates more."""
    data = b""

    if codec == "zlib":
        try:
            data = zlib.decompressobj().decompress(packed, size + 1)
        except zlib.error as error:
            raise damaged(f"a compressed tensor cannot be read ({error})") from None
    elif codec == "zstd":
        zstandard = optional_package("zstandard", "zstd", "this state, which is compressed with zstd,")
        reader = zstandard.ZstdDecompressor().stream_reader(packed)
        pieces = list[bytes]()
        total = 0
        try:
            # In pieces, so that a damaged size does not cause a huge allocation.
            while total <= size and (piece := reader.read(2**20)):
                pieces.append(piece)
                total += len(piece)
        except zstandard.ZstdError as error:
            raise damaged(f"a compressed tensor cannot be read ({error})") from None
        data = b"".join(pieces)
    else:
        raise damaged(f"a tensor is compressed with the unknown codec {codec[:20]!r}")

    if len(data) != size:
        raise damaged(f"a compressed tensor does not have the expected {size} bytes")
    return np.frombuffer(bytearray(data), np.uint8)

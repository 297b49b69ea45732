"""Any state goes through JSON and plain tensors and comes back equal; nothing that is read is trusted."""

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch import nn

from flatroll.disk.state_tree import from_text, pack, to_text, unpack
from flatroll.kernels.rows.records import STATE

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn),
]


def through(tree: Any, **options: Any) -> Any:
    """Through the bytes of a file and back."""
    value, tensors = pack(tree, **options)
    return unpack(from_text(to_text(value)), load(save(tensors)))


def equal(left: Any, right: Any) -> bool:
    """Equal values of equal types, bit by bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        views = (side.resolve_conj().contiguous().reshape(-1).clone() for side in (left, right))
        return bool(not left.numel() or torch.equal(*(view.view(torch.uint8) for view in views)))
    if isinstance(left, (np.ndarray, np.generic)):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, LazyStackedTensorDict):
        return left.stack_dim == right.stack_dim and equal(left.tensordicts, right.tensordicts)
    if isinstance(left, TensorDict):
        return left.batch_size == right.batch_size and equal(dict(left.items()), dict(right.items()))
    if isinstance(left, NonTensorData):
        return left.batch_size == right.batch_size and equal(left.data, right.data)
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if type(left) in (list, tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, float):
        return left.hex() == right.hex()
    return bool(left == right)


def everything() -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    counters = np.zeros(1, STATE)
    counters["written"] = 2**62
    return {
        "scalars": [None, True, False, 0, -1, 2**63, 10**300, "", "é\ud800\0", b"", b"\xff\0"],
        "floats": [0.0, -0.0, 1 / 3, 5e-324, float("inf"), -float("inf"), float("nan"), 1e308],
        (1, "a", None): ((), (1, (2,)), [], {}),
        None: {True: 1, 2: 2, 2.5: 3, b"k": 4, ("next", "reward"): 5},
        "torch": [
            torch.float32,
            torch.Size([2, 0]),
            torch.Size([]),
            torch.device("cpu"),
            generator.get_state(),
        ],
        "tensors": [(torch.rand(3, 4) * 99).to(dtype) for dtype in DTYPES],
        "shapes": [torch.tensor(3.5), torch.zeros(0, 3), torch.zeros(2, 0, dtype=torch.int16), torch.ones(1)],
        "strides": [torch.rand(4, 6).t()[1:, ::2], torch.zeros(1).expand(3, 2)],
        "conjugate": torch.ones(2, dtype=torch.cfloat).conj(),
        "large": [torch.zeros(5000), torch.arange(5000), torch.rand(5000)],
        "arrays": [
            counters,
            np.arange(6, dtype=">i4").reshape(2, 3).T,
            np.zeros((0, 2)),
            np.array(1.5, "f2"),
        ],
        "records": np.zeros((2, 3), np.dtype([("a", "i4", (2,)), ("b", [("c", "f8"), ("d", "S3")])])),
        "numbers": [np.float64(np.nan), np.int8(-3), np.bool_(True), np.str_("no"), np.datetime64(5, "s")],
        "rows": TensorDict(
            {"a": torch.arange(3), "b": {"c": torch.zeros(3, 2)}, "d": TensorDict({}, [3])}, [3]
        ),
        "lazy": LazyStackedTensorDict.lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (2, 3)]),
        "text": TensorDict({"words": NonTensorData("some", batch_size=[2])}, [2]),
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(3).bit_generator.state,
        "legacy": np.random.RandomState(3).get_state(),
    }


@pytest.mark.parametrize("compress", [False, True])
def test_every_kind_of_value_comes_back_bit_by_bit(compress: bool) -> None:
    tree = everything()
    again = through(tree, compress=compress)
    for key in tree:
        assert equal(tree[key], again[key]), key
    assert equal(through(again), again)
    for at in (again["tensors"][0], again["arrays"][0]):
        at[0] = at[1 if len(at) > 1 else 0]  # memory of its own, to be written to


def test_without_the_extra_zlib_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    value, tensors = pack({"a": torch.zeros(5000)})
    assert list(tensors) == ["0.zlib"] and equal(unpack(value, tensors), {"a": torch.zeros(5000)})
    with pytest.raises(ImportError, match=r'pip install "flatroll\[zstd\]"'):
        unpack(["tensor", "0.zstd", "uint8", [4]], {"0.zstd": torch.zeros(4, dtype=torch.uint8)})


def test_modules_and_optimizers() -> None:
    torch.manual_seed(0)

    def made() -> tuple[Any, torch.optim.Optimizer]:
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GRU(4, 2))
        return module, torch.optim.AdamW(module[:2].parameters(), lr=0.01, betas=(0.8, 0.9))

    module, optimizer = made()
    for _ in range(2):
        module[:2](torch.rand(5, 3)).sum().backward()
        optimizer.step()
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    again = through(state)
    assert equal(again, state) and isinstance(again["module"], OrderedDict)
    assert again["module"]._metadata == module.state_dict()._metadata
    other, other_optimizer = made()
    other.load_state_dict(again["module"])
    other_optimizer.load_state_dict(again["optimizer"])
    assert equal(other.state_dict(), module.state_dict())
    assert equal(other_optimizer.state_dict(), optimizer.state_dict())


def test_a_tensor_that_stands_twice_is_stored_once() -> None:
    weight = torch.rand(100)
    _, tensors = pack({"a": weight, "b": nn.Parameter(weight), "c": weight[:50]})
    assert sorted(map(len, tensors.values())) == [50, 100]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 2


class Number(int):
    """Looks like data."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), r"state\['a'\]\[1\] is a object, which cannot be saved"),
        ({1, 2}, "is a set"),
        (Number(3), "is a Number"),
        (print, "is a builtin_function_or_method"),
        (np.array([None]), "is an array of Python objects"),
        (torch.eye(2).to_sparse(), "is a torch.sparse_coo tensor"),
        (torch.zeros(2, device="meta"), "tensor on meta"),
        ({frozenset(): 1}, "has the key frozenset"),
        (10**5000, "more than 13000 bits"),
        (TensorDict({"x": NonTensorData(object())}), "is a object"),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
def test_anything_else_is_refused_by_its_path(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        pack({"a": [0, value]})


def test_a_tree_that_contains_itself() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ValueError, match="nests more than 64 levels"):
        pack(tree)


CRAFTED: list[tuple[Any, str]] = [
    (["nothing", 1], "unknown kind"),
    ([], "where a value is expected"),
    ({"a": 1}, "where a value is expected"),
    (["tensor", "9.raw", "uint8", [4]], "is missing"),
    (["tensor", "../0.raw", "uint8", [4]], "is missing"),
    (["tensor", "0.raw", "uint8", [5]], "has 4 bytes, expected 5"),
    (["tensor", "0.raw", "uint8", [2**47, 2**47]], "more values than memory"),
    (["tensor", "0.raw", "uint8", [-1]], "has the shape"),
    (["tensor", "0.raw", "uint8", "4"], "has the shape"),
    (["tensor", "0.raw", "qint8", [4]], "unknown dtype"),
    (["tensor", "0.raw", "load", [4]], "unknown dtype"),
    (["tensor", "0.raw"], "an invalid"),
    (["tensor", "1.zstd", "uint8", [4]], "cannot be read"),
    (["tensor", "2.zlib", "uint8", [4]], "cannot be read"),
    (["tensor", "3.bz2", "uint8", [4]], "with the unknown codec"),
    (["tensor", "1.zstd", "uint8", [2**45]], "larger than max_bytes"),
    (["array", "0.raw", "|O", [1]], "array of"),
    (["array", "0.raw", [["a"]], [1]], "an invalid|array of"),
    (["array", "0.raw", "i4", [2]], "expected 8"),
    (["array", "0.raw", "V0", [4]], "array of"),
    (["number", "i4", "00"], "a number of 1 bytes"),
    (["float", 1], "an invalid float"),
    (["size", [-1]], "has the shape"),
    (["device", "nowhere"], "an invalid"),
    (["bytes", "é"], "an invalid bytes"),
    (["dict", [[["list", []], 1]]], "with the key"),
    (["dict", [["a", 1], ["a", 2]]], "with this key twice"),
    (["dict", [["a"]]], "an invalid dict"),
    (["tensordict", [2], [["a", 1]]], "whose 'a' is a int"),
    (["tensordict", [3], [["a", ["tensor", "0.raw", "uint8", [4]]]]], "an invalid"),
    (["lazy_stack", 0, [1]], "an empty stack of tensordicts"),
    (0.5, "where a value is expected"),
]


@pytest.mark.parametrize(("value", "text"), CRAFTED)
def test_what_is_crafted_is_refused(value: Any, text: str) -> None:
    four = torch.zeros(4, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = dict.fromkeys(("0.raw", "1.zstd", "2.zlib", "3.bz2"), four)
    with pytest.raises(ValueError, match=text):
        unpack(value, tensors)


def test_compressed_bombs_take_no_more_than_they_should() -> None:
    import zlib

    import zstandard

    zeros = bytes(2**24)
    for name, packed in (("0.zstd", zstandard.compress(zeros)), ("0.zlib", zlib.compress(zeros))):
        tensors = {name: torch.frombuffer(bytearray(packed), dtype=torch.uint8)}
        with pytest.raises(ValueError, match="does not have the expected 4 bytes"):
            unpack(["tensor", name, "uint8", [4]], tensors)
        with pytest.raises(ValueError, match=f"does not have the expected {2**30} bytes"):
            unpack(["tensor", name, "uint8", [2**30]], tensors)


@pytest.mark.parametrize("text", ["[" * 100_000, "1.5", "NaN", "{", "9" * 5000, b"\xff"])
def test_json_from_elsewhere(text: Any) -> None:
    with pytest.raises(ValueError, match="its JSON cannot be read"):
        from_text(text)
    deep: Any = 1
    for _ in range(100):
        deep = ["list", [deep]]
    with pytest.raises(ValueError, match="nests more than"):
        unpack(deep, {})


def test_random_changes_are_errors_or_data() -> None:
    """Whatever is changed in the text, the answer is a tree or a ValueError."""
    draw = random.Random(0)
    value, tensors = pack(
        {key: item for key, item in everything().items() if key not in ("python", "legacy")}
    )
    text = to_text(value)
    for _ in range(300):
        at, change = draw.randrange(len(text)), draw.choice('[]",0123456789-eabtuifV|<>')
        crafted = text[:at] + change + text[at + draw.randrange(2) :]
        try:
            unpack(from_text(crafted), tensors, max_bytes=2**24)
        except ValueError:
            continue

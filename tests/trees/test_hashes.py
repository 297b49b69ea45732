"""Hash modules, and `HashToInt` against a dict."""

import io
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.trees import BinaryToDecimal, HashToInt, QueryModule, RandomProjectionHash, SipHash


def saved_and_loaded(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Through a file, as checkpoints go."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


def test_hash_to_int_against_a_dict() -> None:
    positions, known = HashToInt(), {}
    for seed in range(20):
        keys = torch.randint(-(2**62), 2**62, (500,), generator=torch.Generator().manual_seed(seed % 7))
        assert positions(keys, extend=True).tolist() == [
            known.setdefault(k, len(known)) for k in keys.tolist()
        ]
    assert positions(torch.tensor([5, 6])).tolist() == [len(known)] * 2 == [len(positions)] * 2


def test_hash_to_int_is_saved_and_cleared() -> None:
    positions, other = HashToInt(), HashToInt()
    assert positions(torch.tensor([4])).tolist() == [0]  # unknown: the count
    positions(torch.tensor([70, 90]), extend=True)
    saved_and_loaded(positions, other)
    assert other(torch.tensor([90, 70, 1])).tolist() == [1, 0, 2]
    with pytest.raises(TypeError, match=r"'key' must be torch.int64 \(\) per row"):
        other(torch.tensor([1.0]), extend=True)
    other.clear()
    assert len(other) == 0 and other(torch.tensor([1.0]), extend=True).tolist() == [0]
    saved_and_loaded(HashToInt(), positions)
    assert len(positions) == 0


def test_bytes_of_rows() -> None:
    hashes = SipHash(as_tensor=False)(torch.tensor([[1.0, 0.0], [1.0, -0.0], [2.0, 0.0]]))
    assert hashes[0] == hashes[1] != hashes[2]


def test_random_projection() -> None:
    torch.manual_seed(0)
    module = RandomProjectionHash(n_components=8, dtype_cast=torch.float32)
    rows = torch.randn(200, 3, 7)
    hashes = module(rows)
    assert len(hashes.unique()) == 200
    assert torch.cat([module(row.unsqueeze(0)) for row in rows]).equal(hashes)  # whatever the batch size
    assert module.transform.shape == (21, 8)
    ones = RandomProjectionHash(init_method=torch.nn.init.ones_)
    assert ones(torch.tensor([[1.0, 2.0], [2.0, 1.0]])).unique().numel() == 1
    with pytest.raises(ValueError, match="at least one row"):
        RandomProjectionHash()(torch.empty(0, 3))
    with pytest.raises(TypeError, match="dtype_cast"):
        RandomProjectionHash(dtype_cast=torch.int32)


def test_a_projection_is_saved() -> None:
    module, other = RandomProjectionHash(), RandomProjectionHash()
    rows = torch.randn(10, 40)
    hashes = module(rows)
    saved_and_loaded(module, other)
    assert other(rows).equal(hashes)


def test_bits_of_whole_rows_are_read() -> None:
    read = BinaryToDecimal(4, "cpu", torch.int64)
    numbers = torch.arange(256)
    bits = (numbers[:, None] >> torch.arange(7, -1, -1)) & 1
    assert read(bits).equal(numbers)
    assert read(bits.reshape(4, 64, 8)).equal(numbers.reshape(4, 64))
    converted = BinaryToDecimal(4, "cpu", torch.int32, convert_to_binary=True)
    assert converted(torch.tensor([[0.0, -3.0, 10.0, 0.5]])).tolist() == [3]


@pytest.mark.parametrize(
    ("bits", "dtype", "rows", "message"),
    [
        (40, torch.int32, None, "num_bits must be at most 31 for torch.int32, got 40"),
        (8, torch.float32, None, "dtype must be an integer dtype"),
        (4, torch.int32, torch.zeros(1, 6), "multiple of num_bits=4 bits, got 6"),
        (4, torch.int32, torch.zeros(1, 0), "multiple of num_bits=4 bits, got 0"),
        (4, torch.int8, torch.zeros(1, 8), "the last dim of features must be at most 7"),
        (1, torch.int64, torch.tensor([[2]]), "must be 0 or 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    bits: int, dtype: torch.dtype, rows: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        module = BinaryToDecimal(bits, "cpu", dtype)
        module(rows)


def test_hashes_of_several_numbers_and_those_that_are_no_tensors() -> None:
    rows = TensorDict({"x": torch.tensor([[1, 2, 1], [2, 2, 3]])}, [2, 3])
    query = QueryModule(["x"], hash_module=lambda x: torch.stack([x, -x], -1))
    written = query(rows)
    assert written["_index"].tolist() == [[0, 1, 0], [1, 1, 2]] and written["_hash"].shape == (2, 3, 2)
    with pytest.raises(TypeError, match=r"must return a tensor for 'x', got list: .*as_tensor=True"):
        QueryModule(["x"], hash_module=SipHash(as_tensor=False))(rows)


def test_keys_of_queries_may_be_nested_in_any_way() -> None:
    rows = TensorDict({"x": torch.tensor([1, 1, 2]), "other": {"y": torch.tensor([3, 3, 3])}}, [3])
    query: Any = QueryModule(in_keys=[("x",), (("other",), "y")], index_key=("some", ("_index",)))  # type: ignore[arg-type, list-item]
    assert query.in_keys == ["x", ("other", "y")] and query.index_key == ("some", "_index")
    assert query(rows)["some", "_index"].tolist() == [0, 0, 1]

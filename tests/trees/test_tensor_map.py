"""`QueryModule` and `TensorDictMap`, against a dict."""

import io

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyMemmapStorage, LazyTensorStorage, ListStorage
from flatroll.trees import HashToInt, QueryModule, SipHash, TensorDictMap, TensorMap

STORAGES = [None, lambda: LazyTensorStorage(500), lambda: ListStorage(500), lambda: LazyMemmapStorage(500)]


def keys(*rows: int) -> TensorDict:
    column = torch.tensor(rows, dtype=torch.int64)
    return TensorDict({"x": column, "y": column.float().unsqueeze(-1) / 2}, [len(rows)])


def values(*rows: float) -> TensorDict:
    column = torch.tensor(rows, dtype=torch.float32)
    return TensorDict({"v": column, "deep": {"w": -column}}, [len(rows)])


def make_map(**options: object) -> TensorDictMap:
    return TensorDictMap(query_module=QueryModule(["x", "y"]), **options)


@pytest.mark.parametrize("storage", STORAGES, ids=["grows", "tensors", "list", "memmap"])
@pytest.mark.parametrize("summing", [False, True])
def test_a_map_is_a_dict(storage, summing: bool) -> None:
    def add(new: TensorDict, old: TensorDict | None = None) -> TensorDict:
        return new if old is None else new + old

    mapped = make_map(storage=storage and storage(), write_fn=add if summing else None)
    assert isinstance(mapped, TensorMap)
    known: dict[int, float] = {}
    generator = torch.Generator().manual_seed(3)
    for size in (1, 7, 64, 0, 200):
        rows = torch.randint(100, (size,), generator=generator).tolist()
        numbers = torch.randint(50, (size,), generator=generator).float().tolist()
        mapped[keys(*rows)] = values(*numbers)
        for row, number in zip(rows, numbers, strict=True):
            known[row] = number + known.get(row, 0.0) if summing else number
        assert len(mapped) == len(known)
    assert mapped.contains(keys(*range(200))).tolist() == [row in known for row in range(200)]
    assert mapped[keys(*known)]["v"].tolist() == list(known.values())
    assert mapped[keys(*known)]["deep", "w"].tolist() == [-value for value in known.values()]
    assert set(mapped.out_keys) == {"v", ("deep", "w")}


def test_single_rows_and_more_batch_dims() -> None:
    mapped = make_map()
    mapped[keys(4)[0]] = values(0.4)[0]
    assert mapped[keys(4)[0]]["v"].item() == pytest.approx(0.4) and mapped[keys(4)[0]].batch_size == ()
    mapped[keys(*range(6)).reshape(2, 3)] = values(*range(6)).reshape(2, 3)
    assert mapped[keys(5, 4, 3, 2, 1, 0).reshape(3, 2)]["v"].tolist() == [[5, 4], [3, 2], [1, 0]]
    assert mapped.contains(keys(5, 40).reshape(2, 1)).tolist() == [[True], [False]]
    assert keys(4)[0] in mapped and keys(4, 77) not in mapped


def test_unknown_keys() -> None:
    mapped = make_map()
    with pytest.raises(KeyError, match="2 of 2 keys are not in the map, the first in row 0"):
        mapped[keys(8, 9)]
    assert mapped.get(keys(1), default=values(7.0)[0])["v"].tolist() == [7.0]
    mapped[keys(1)] = values(0.1)
    with pytest.raises(
        KeyError, match=r"1 of 2 keys are not in the map, the first in row 1: \{'x': \[9\], 'y': \[4.5\]\}"
    ):
        mapped(keys(1, 9))
    assert mapped.get(keys(9, 1), default=-1.0)["v"].tolist() == pytest.approx([-1.0, 0.1])
    assert mapped.get(keys(9, 1), default=values(3.0, 4.0))["v"].tolist() == pytest.approx([3.0, 0.1])
    assert len(mapped) == 1


def test_a_query_leaves_keys_as_they_are() -> None:
    mapped, asked = make_map(), keys(1, 2)
    mapped[keys(1, 2)] = values(1.0, 2.0)
    mapped[asked], mapped.contains(asked)
    assert set(asked.keys()) == {"x", "y"}
    mapped[asked.lock_()] = values(1.0, 2.0)


@pytest.mark.parametrize("storage", STORAGES, ids=["grows", "tensors", "list", "memmap"])
def test_a_failed_write_changes_nothing(storage) -> None:
    def fails(new: TensorDict, old: TensorDict | None = None) -> TensorDict:
        if old is None and bool((new["v"] > 90).any()):
            raise ArithmeticError
        return new

    mapped = make_map(storage=storage and storage(), write_fn=fails, max_size=4)
    mapped[keys(1, 2)] = values(1.0, 2.0)
    with pytest.raises(ArithmeticError):
        mapped[keys(1, 3)] = values(8.0, 99.0)
    with pytest.raises(RuntimeError, match="3 new keys do not fit: the map has 2 of at most 4"):
        mapped[keys(1, 3, 4, 5)] = values(8.0, 8.0, 8.0, 8.0)
    with pytest.raises(KeyError, match="deep"):
        mapped[keys(1, 3)] = values(8.0, 8.0).exclude("deep")
    with pytest.raises(ValueError, match="one batch size"):
        mapped[keys(1, 3)] = values(8.0)
    with pytest.raises(TypeError, match=r"'x' must be torch.int64"):
        mapped[keys(1, 3).float()] = values(8.0, 8.0)
    assert len(mapped) == 2 and mapped.contains(keys(1, 2, 3, 4)).tolist() == [True, True, False, False]
    mapped[keys(3, 4)] = values(3.0, 4.0)
    assert mapped[keys(1, 2, 3, 4)]["v"].tolist() == [1, 2, 3, 4]


def test_values_of_another_kind_are_refused() -> None:
    mapped = make_map()
    mapped[keys(1)] = values(1.0)
    with pytest.raises(TypeError, match=r"'v' must be torch.float32 \(\) per row"):
        mapped[keys(1, 2)] = values(1.0, 2.0).double()
    assert len(mapped) == 1 and not mapped.contains(keys(2)).any()


def test_a_broken_write_fn_is_named() -> None:
    mapped = make_map(write_fn=lambda *parts: parts[0].exclude("v"))
    with pytest.raises(KeyError, match=r"write_fn must return the entry .*v"):
        mapped[keys(1)] = values(1.0)
    assert len(mapped) == 0


def test_clear_and_save() -> None:
    mapped, other = make_map(), make_map()
    mapped[keys(1, 2)] = values(1.0, 2.0)
    file = io.BytesIO()
    torch.save(mapped.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other[keys(2, 1)]["v"].tolist() == [2.0, 1.0]
    other[keys(3)] = values(3.0)
    for emptied in (other, make_map(storage=LazyTensorStorage(9))):
        emptied[keys(1, 2)] = values(1.0, 2.0)
        emptied.clear()
        assert len(emptied) == 0 and not emptied.contains(keys(1)).any()
        emptied[keys(7)] = values(7.0)
        assert len(emptied) == 1 and emptied[keys(7)]["v"].tolist() == [7.0]


def test_a_map_has_room_for_one_key_at_least() -> None:
    with pytest.raises(ValueError, match="max_size"):
        make_map(max_size=0)


def test_from_a_pair() -> None:
    mapped = TensorDictMap.from_tensordict_pair(
        keys(1), values(1.0), ["x"], out_keys=["v"], storage_constructor=lambda: LazyTensorStorage(2)
    )
    mapped[keys(1, 2)] = values(1.0, 2.0)
    assert set(mapped[keys(1)].keys()) == {"v"} and mapped.max_size == 2
    with pytest.raises(RuntimeError, match="do not fit"):
        mapped[keys(3)] = values(1.0)
    with pytest.raises(KeyError, match="'z'"):
        TensorDictMap.from_tensordict_pair(keys(1), values(1.0), ["z"])
    used = LazyTensorStorage(2)
    used.set(range(1), values(1.0))
    with pytest.raises(ValueError, match=r"empty flatroll.buffers.Storage"):
        make_map(storage=used)


def test_query_options() -> None:
    query = QueryModule(["x", "y"], "i", "h", clone=True)
    rows = keys(3, 3, 4)
    written = query(rows)
    assert written["i"].tolist() == [0, 0, 1] and "i" not in rows and len(query) == 2
    assert query(keys(4, 9), extend=False)["i"].tolist() == [1, 2]  # unknown: the count
    assert "h" not in query(rows, write_hash=False)
    assert "i" in query(rows, clone=False) and "i" in rows
    assert written["h"].equal(QueryModule(["x", "y"])(keys(3, 3, 4))["_hash"])
    with pytest.raises(ValueError, match="in_keys"):
        QueryModule([])
    with pytest.raises(ValueError, match="one module for each of the 2 in_keys, got 1"):
        QueryModule(["x", "y"], hash_module=[SipHash()])
    with pytest.raises(KeyError, match="'y'"):
        query(rows.exclude("y"))


@pytest.mark.parametrize("own_numbers", [False, True])
@pytest.mark.parametrize("aggregator", [None, SipHash()])
def test_hash_modules(own_numbers: bool, aggregator) -> None:
    def tens(column: torch.Tensor) -> torch.Tensor:
        return (column.reshape(len(column)) // 10).long()

    query = QueryModule(
        ["x", "y"],
        hash_module=[tens, SipHash()],
        hash_to_int=HashToInt() if own_numbers else None,
        aggregator=aggregator,
    )
    rows = TensorDict({"x": torch.tensor([1, 2, 11, 1]), "y": torch.tensor([0.0, -0.0, 0.0, 1.0])}, [4])
    assert query(rows)["_index"].tolist() == [0, 0, 1, 2] and len(query) == 3
    mapped = TensorDictMap(query_module=QueryModule("x", hash_module=tens))
    mapped[keys(1, 12)] = values(1.0, 2.0)
    assert mapped[keys(9, 19)]["v"].tolist() == [1.0, 2.0]

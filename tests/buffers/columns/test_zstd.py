"""Compressed rows come back bit by bit, and cost what zstd makes of them."""

import builtins
import copy
import gc
import pickle
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatroll.buffers.columns import zstd as codec
from flatroll.buffers.columns.column import differ
from flatroll.buffers.columns.zstd import ZstdColumn


def images(rows: int, size: int = 40, seed: int = 0) -> Tensor:
    """A background that all have in common, with a square that moves."""
    generator = torch.Generator().manual_seed(seed)
    background = torch.randint(0, 256, (size, size), dtype=torch.uint8, generator=generator)
    stack = background.repeat(rows, 1, 1)
    for i in range(rows):
        stack[i, i % (size - 4) : i % (size - 4) + 4, 3:7] = i % 251
    return stack


def column_of(values: Tensor, rows: int | None = None, **options: Any) -> ZstdColumn:
    return ZstdColumn(len(values) if rows is None else rows, values.shape[1:], values.dtype, **options)


def everything(column: ZstdColumn) -> Tensor:
    return column.take(torch.arange(len(column._rows)))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.bool,
        torch.int16,
        torch.int64,
        torch.uint16,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 40, 40)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (30 * size,), dtype=torch.uint8)
    values = data.view(dtype).view(30, *shape)
    column = column_of(values)
    column.write(0, values[:20])
    column.put(torch.tensor([25, 29, 20]), values[[25, 29, 20]])
    column.put(torch.tensor([3, 0]), values[[0, 3]])
    slots, stored = torch.tensor([*range(21), 25, 29]), torch.tensor([3, 1, 2, 0, *range(4, 21), 25, 29])
    back = column.take(slots)
    assert back.dtype is dtype and back.shape == (23, *shape)
    assert not differ(back, data.view(30, size)[stored].view(-1).view(dtype).view(back.shape)).any()


@pytest.mark.parametrize("level", [1, 3, 9])
def test_rows_like_the_first_take_next_to_no_space(level: int) -> None:
    values = images(200)
    column = column_of(values, level=level)
    column.write(0, values)
    assert torch.equal(everything(column), values)
    assert column.row_bytes < 200 < values[0].numel()


def test_the_bytes_are_those_of_the_rows_that_stand() -> None:
    values = images(50)
    column = column_of(values)
    assert column.nbytes == 8 * 50 and column.row_bytes == 0
    column.write(0, values)
    kept = sum(map(sys.getsizeof, column._rows))
    assert column.nbytes == 8 * 50 + kept
    assert column.row_bytes == column.nbytes // 50
    column.write(10, values[:30])
    column.put(torch.tensor([1, 49]), torch.zeros_like(values[:2]))
    assert column.nbytes == 8 * 50 + sum(map(sys.getsizeof, column._rows))


def test_rows_never_written_are_zeros() -> None:
    values = images(5)
    column = column_of(values, 9)
    assert not everything(column).any()
    column.write(2, values)
    assert not everything(column)[[0, 1, 7, 8]].any()
    assert torch.equal(everything(column)[2:7], values)


def test_zeros_are_no_dictionary() -> None:
    values = images(40)
    column = column_of(values, 50)
    column.write(40, torch.zeros_like(values[:10]))
    column.write(0, values)
    assert column.row_bytes < 200
    assert torch.equal(everything(column)[:40], values)
    assert not everything(column)[40:].any()


def test_rows_asked_for_twice_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = images(30)
    column = column_of(values)
    column.write(0, values)
    decoded: list[int] = []
    decode = codec._Codec.decode
    monkeypatch.setattr(
        codec._Codec, "decode", lambda self, rows, size: decoded.append(len(rows)) or decode(self, rows, size)
    )
    slots = torch.arange(30).repeat_interleave(4)[torch.randperm(120)]
    assert torch.equal(column.take(slots), values[slots])
    assert decoded == [30]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_give_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_THREAD_BYTES", 1600)
    values = images(101)
    column = column_of(values, threads=threads)
    alone = column_of(values, threads=1)
    column.write(0, values)
    alone.write(0, values)
    assert list(column._rows) == list(alone._rows)
    order = torch.randperm(101)
    assert torch.equal(column.take(order), values[order])


def test_readers_in_many_threads_while_rows_are_written() -> None:
    values = images(60)
    column = column_of(values)
    column.write(0, values)
    wrong: list[int] = []

    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(60):
            slots = torch.from_numpy(generator.integers(0, 30, 20))
            if not torch.equal(column.take(slots), values[slots]):
                wrong.append(seed)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    for _ in range(30):
        column.write(30, values[:30])
    for reader in readers:
        reader.join()
    assert not wrong


def test_a_side_column_shares_the_dictionary() -> None:
    values = images(20)
    column = column_of(values)
    side = column.pool()
    assert side.nbytes == 0 and side.take(torch.zeros(0, dtype=torch.int64)).shape == (0, 40, 40)
    column.write(0, values)
    side.grow(4)
    side.put(torch.tensor([3, 1]), values[:2])
    side.grow(6)
    assert torch.equal(side.take(torch.tensor([3, 1])), values[:2])
    assert not side.take(torch.tensor([0, 5])).any()
    assert side.row_bytes < 200


@pytest.mark.parametrize(
    "by", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_by_itself(by: Any) -> None:
    values = images(20)
    column = column_of(values, 30)
    column.write(0, values)
    other = by(column)
    column.write(0, values.flip(0))
    other.write(20, values[:10])
    assert torch.equal(everything(other), torch.cat([values, values[:10]]))
    assert other.nbytes == 8 * 30 + sum(map(sys.getsizeof, other._rows))


@pytest.mark.parametrize("used", ["no", "same", "other"])
def test_a_state_restores_the_rows(used: str) -> None:
    values, others = images(20), images(25, seed=1)
    column, restored = column_of(values, 25), column_of(values, 12)
    column.write(0, values)
    if used != "no":
        restored.write(0, (values if used == "same" else others)[:12])
    state = column.state_dict(22)
    assert sum(tensor.numel() for tensor in state.values()) < 0.3 * values.numel()
    restored.load_state_dict(state)
    assert torch.equal(restored.take(torch.arange(20)), values)
    assert not restored.take(torch.tensor([20, 21])).any()
    restored.write(3, values[:5])
    assert torch.equal(restored.take(torch.arange(3, 8)), values[:5])
    side = restored.pool()
    side.load_state_dict(column.pool().state_dict(0))
    assert side.nbytes == 0


def test_the_extra_is_named_where_zstandard_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r'pip install "flatroll\[zstd\]"'):
        ZstdColumn(3, (2,), torch.uint8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": 0}, "level must be an integer from 1 to 22, got 0"),
        ({"level": 23}, "got 23"),
        ({"level": True}, "got True"),
        ({"threads": 0}, "threads must be an integer of at least 1, got 0"),
        ({"threads": 1.5}, "got 1.5"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ZstdColumn(3, (2,), torch.uint8, **options)


def claiming(size: int, blocks: int) -> bytes:
    """A zstd frame that says to hold so many bytes, and has a few blocks of none."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + bytes(3) * blocks + b"\x01\x00\x00"


@pytest.mark.parametrize("shape", [(2**33,), (2**40, 3)])
def test_a_state_that_claims_a_huge_shape_costs_nothing(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is made for it before its rows are checked; nothing of that shape is compressed or decoded."""
    monkeypatch.setattr(codec, "bytes", lambda size: pytest.fail(f"{size} bytes"), raising=False)
    column = ZstdColumn(0, shape, torch.uint8)
    frame, dictionary = claiming(column.value_bytes, 20), torch.zeros(0, dtype=torch.uint8)
    rows, sizes = torch.frombuffer(bytearray(frame * 3), dtype=torch.uint8), torch.full((3,), len(frame))
    refusal = rf"a compressed frame of {len(frame)} bytes claims {column.value_bytes}"
    with pytest.raises(ValueError, match=refusal):
        column.check_state_dict({"rows": rows, "sizes": sizes, "dictionary": dictionary})
    dumped = {"rows": (rows, sizes), "dictionary": (dictionary, torch.zeros(3, dtype=torch.int64))}
    with pytest.raises(ValueError, match=refusal):
        column.restore([(torch.arange(3), dumped)], 3)


def test_zeros_take_few_bytes_and_are_read() -> None:
    """As many as a frame can hold for each of its bytes."""
    column = ZstdColumn(2, (2**24,), torch.uint8)
    column.write(0, torch.zeros(1, 2**24, dtype=torch.uint8))
    state, again = column.state_dict(2), ZstdColumn(0, (2**24,), torch.uint8)
    assert again.check_state_dict(state) == 2
    again.load_state_dict(state)
    assert not again.take(torch.tensor([0])).any()


def allocated(make: Any) -> tuple[Any, int]:
    """Return what ``make()`` returned, and the bytes that Python's and NumPy's allocators gave for it."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("noise", [False, True], ids=["like the first", "of random numbers"])
def test_the_allocator_gives_no_more_than_is_stated(
    threads: int, noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zstandard returns objects that keep the memory reserved for the worst case, several times a row's size."""
    monkeypatch.setattr(codec, "_THREAD_BYTES", 7056)
    values = torch.randint(0, 256, (200, 84, 84), dtype=torch.uint8) if noise else images(200, 84)
    column_of(values, threads=threads).write(0, values[:3])  # what is made once

    def fill() -> ZstdColumn:
        column = column_of(values, threads=threads)
        column.write(0, values[:150])
        column.put(torch.arange(100, 200), values[100:])
        return column

    column, taken = allocated(fill)
    # Beside the rows there is the dictionary of up to 16 KiB, twice.
    assert column.nbytes <= taken <= 1.02 * column.nbytes + 3 * 2**14
    state = column.state_dict(200)

    def load() -> ZstdColumn:
        loaded = column_of(values, threads=threads)
        loaded.load_state_dict(state)
        return loaded

    loaded, taken = allocated(load)
    assert loaded.nbytes == column.nbytes <= taken <= 1.02 * column.nbytes + 3 * 2**14


def test_a_blank_row_takes_few_bytes() -> None:
    """Its object is made by the first column that grows, for values of 1 MB here."""
    column, taken = allocated(lambda: ZstdColumn(10, (2**20,), torch.uint8))
    assert taken < 2**14 and len(column._blank) < 200

"""Anonymous memory, the columns in it, and the mailbox over it; within one process."""

import gc
import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatroll.sharing import Block, Channel, Closed, Inbox, Memory, Outbox, Table


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    """How many maps of shared memory this process has; others, such as those of the heap, come and go."""
    return Path("/proc/self/maps").read_text().count("/memfd:flatroll")


def has_a_name(memory: Memory) -> bool:
    """Whether a file in /dev/shm is this memory; other programs make and remove theirs meanwhile."""
    mine = os.fstat(memory.fileno())
    found = False
    for entry in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            found |= os.path.samestat(entry.lstat(), mine)
    return found


def through_channel(content: Any) -> Any:
    here, there = Channel.pair()
    here.send("content", content)
    return there.receive("content")


def mailbox(slots: int = 2) -> tuple[Inbox, Outbox]:
    here, there = Channel.pair()
    return Inbox(here), Outbox(there, slots)


def rows(count: int, value: float = 0.0) -> dict[Any, torch.Tensor]:
    return {"obs": torch.full((count, 3), value), ("next", "done"): torch.zeros(count, 1, dtype=torch.bool)}


def test_memory_has_no_name_and_goes_with_its_last_user() -> None:
    gc.collect()  # what earlier tests left
    files, maps = open_files(), mappings()
    memory = Memory(1 << 20)
    view = torch.frombuffer(memory.map, dtype=torch.uint8)
    again = through_channel(memory)
    assert not has_a_name(memory)
    assert mappings() == maps + 2
    view[7] = 9
    assert again.map[7] == 9
    del memory, again
    assert view[7] == 9
    del view
    assert mappings() == maps and open_files() == files


def test_without_memfd_memory_is_an_unlinked_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = Memory(100)
    assert not list(tmp_path.iterdir())
    again = through_channel(memory)
    memory.map[0] = 1
    assert again.map[0] == 1 and again.size == 100
    with pytest.raises(OSError, match=r"bytes of shared memory were requested, [\d,]+ are free in"):
        Memory(1 << 60)


def test_too_much_memory_is_refused_at_once() -> None:
    with pytest.raises(
        MemoryError, match=r"1,152,921,504,606,846,976 bytes .* were requested, [\d,]+ are free"
    ):
        Memory(1 << 60)
    with pytest.raises(ValueError, match="size must be at least 1 byte, got 0"):
        Memory(0)


@pytest.mark.parametrize(
    "made", [Memory(1), Block([]), Channel.pair()[0]], ids=lambda made: type(made).__name__
)
def test_a_plain_pickle_says_what_to_do(made: object) -> None:
    with pytest.raises(TypeError, match="send it through a"):
        pickle.dumps(made)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 5)])
def test_columns_of_a_block_are_apart(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table = Table.like({"a": torch.ones(7, *shape, dtype=dtype), ("b", "c"): torch.ones(7, dtype=torch.bool)})
    block = Block([table, table], slots=3)
    places = [(slot, place) for slot in range(3) for place in range(2)]
    for number, (slot, place) in enumerate(places):
        block.tensors(slot, place)["a"].fill_(number)
        block.tensors(slot, place)[("b", "c")].fill_(number % 2)
    again = through_channel(block)
    for number, (slot, place) in enumerate(places):
        tensors, arrays = again.tensors(slot, place), again.arrays(slot, place)
        expected = torch.full((7, *shape), number, dtype=dtype)
        assert torch.equal(tensors["a"], expected)
        assert torch.equal(tensors[("b", "c")], torch.full((7,), bool(number % 2)))
        bits = expected.view(torch.uint16) if dtype == torch.bfloat16 else expected
        assert np.array_equal(arrays["a"], bits.numpy())


def test_a_block_refuses_what_does_not_fit() -> None:
    table = Table.like(rows(100))
    with pytest.raises(ValueError, match="2 slots of 1344 bytes do not fit into 2000 bytes of memory"):
        Block([table], 2, Memory(2000))
    with pytest.raises(IndexError, match="slot 2 is out of range: there are 2 slots"):
        Block([table], 2).tensors(2)
    with pytest.raises(
        ValueError, match=r"columns must have the same number of rows, got \{'a': 3, 'b': 2\}"
    ):
        Table.like({"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(ValueError, match="column 'names' has data type <U1, which cannot be shared"):
        Table.like({"names": np.array(["a"])})


def test_windows_come_in_order_whatever_their_size() -> None:
    inbox, outbox = mailbox()
    sizes = [4, 9, 2, 10, 40, 1, 0, 3]
    for number, size in enumerate(sizes):
        final = rows(number % 3, -number) if number % 4 else {}
        outbox.put(rows(size, number), final, note=number)
        with inbox.take() as window:
            table, last = window.tables
            assert window.note == number
            assert torch.equal(table["obs"], torch.full((size, 3), float(number)))
            assert len(last.get("obs", ())) == (number % 3 if number % 4 else 0)


def test_other_columns_get_other_memory_while_older_windows_are_read() -> None:
    inbox, outbox = mailbox(slots=3)
    outbox.put(rows(5, 1.0))
    first = inbox.take()
    outbox.put({"other": torch.arange(5)})
    outbox.put({"other": torch.arange(5, 10)})
    assert [inbox.take().tables[0]["other"][0] for _ in range(2)] == [0, 5]
    assert torch.equal(first.tables[0]["obs"], torch.ones(5, 3))


def test_a_slot_of_older_memory_frees_none_of_the_newer() -> None:
    inbox, outbox = mailbox()
    windows = []
    for place, rows in enumerate((2, 4)):
        outbox.put({"a": torch.full((rows,), place)})
        windows.append(inbox.take())
    windows[0].release()  # of the block before, in the slot that the second window has in the new one
    outbox.put({"a": torch.full((4,), 2)})
    assert windows[1].tables[0]["a"].tolist() == [1] * 4
    assert inbox.take().tables[0]["a"].tolist() == [2] * 4


def test_a_writer_waits_until_a_slot_is_given_back() -> None:
    here, there = Channel.pair()
    inbox, outbox = Inbox(here), Outbox(there, slots=2)
    outbox.put(rows(3, 1.0))
    outbox.put(rows(3, 2.0))
    first, second = inbox.take(), inbox.take()
    kept = first.copy()[0]
    second.release()
    second.release()  # once is enough
    outbox.put(rows(30, 3.0))  # larger memory, but no more windows under way
    assert torch.equal(kept["obs"], torch.ones(3, 3)) and torch.equal(first.tables[0]["obs"], kept["obs"])
    here.close()
    with pytest.raises(Closed):
        outbox.put(rows(3))


def test_what_the_writer_announces_is_checked() -> None:
    inbox, outbox = mailbox()
    outbox.put(rows(3))
    inbox.take()
    with pytest.raises(
        ValueError, match="slot 2 of block 0 was announced, but the memory is block 0 with 2 slots"
    ):
        inbox.open("mailbox: window", (0, 2, [3], None))
    with pytest.raises(ValueError, match="4 rows were announced, more than the slot has room for"):
        inbox.open("mailbox: window", (0, 1, [4], None))
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        mailbox(slots=0)


def test_a_thousand_windows_open_no_file_and_map_no_memory() -> None:
    inbox, outbox = mailbox()
    kept = []
    for number in range(1000):
        outbox.put(rows(4, number))
        with inbox.take() as window:
            kept.append(window.copy())
        if number == 10:
            files, maps = open_files(), mappings()
    assert (
        open_files() <= files and mappings() <= maps
    )  # what earlier tests left to the garbage collector may go
    assert [int(tables[0]["obs"][0, 0]) for tables in kept] == list(range(1000))

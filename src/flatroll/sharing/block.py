"""`Memory` shared by processes, and `Block`: columns in it, in equal slots, as described by a `Table`."""

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import psutil

if TYPE_CHECKING:
    import torch


class Memory:
    """Anonymous memory shared by processes through a file descriptor.

    It cannot leak or collide: the system frees it when the last process that has it open or mapped ends, even if
    killed. On Linux it is a ``memfd``, elsewhere a temporary file that is unlinked at once.

    A forked process inherits it. Send it to other processes in a message of a `Channel`.

    Args:
        size: number of bytes, all 0 at first.

    Raises:
        MemoryError, OSError: there is not enough memory.

    >>> memory = Memory(16)
    >>> memory.map[3:5] = b"ab"
    >>> Memory.from_descriptor(os.dup(memory.fileno())).map[3:5]
    b'ab'
    """

    #: The mapped bytes, valid as long as an array or tensor refers to them.
    map: mmap.mmap

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or not 1 <= size < 2**63:
            raise ValueError(f"size must be at least 1 byte, got {size!r}")

        descriptor = _anonymous_file(size)
        try:
            os.ftruncate(descriptor, size)
            self._open(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "Memory":
        """Map another process's memory; the result takes ownership of the descriptor."""
        memory = cls.__new__(cls)
        memory._open(descriptor)
        return memory

    def _open(self, descriptor: int) -> None:
        # The size of the file, so that a message from another process cannot exceed it.
        self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.map)

    def fileno(self) -> int:
        """The file descriptor, open as long as this object lives."""
        return self._descriptor

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __reduce__(self) -> NoReturn:
        raise TypeError("shared memory cannot be pickled: send it through a Channel")


def _anonymous_file(size: int) -> int:
    """Return the descriptor of an empty anonymous file; raise if ``size`` bytes do not fit."""
    if sys.platform == "linux":
        free = int(psutil.virtual_memory().available)
        if size > free:
            raise MemoryError(f"{size:,} bytes of shared memory were requested, {free:,} are free")
        return os.memfd_create("flatroll")  # only a label in /proc

    with tempfile.TemporaryFile(prefix="flatroll") as file:
        disk = os.fstatvfs(file.fileno())
        free = disk.f_bavail * disk.f_frsize
        if size > free:  # writing to a sparse file could raise SIGBUS
            folder = tempfile.gettempdir()
            raise OSError(f"{size:,} bytes of shared memory were requested, {free:,} are free in {folder}")
        return os.dup(file.fileno())


Key = str | tuple[str, ...]

_ALIGNMENT = 64  # bytes of a cache line, so that no two columns share one


@dataclass(frozen=True)
class BlockColumn:
    """Data type, as torch and NumPy both name it ("float32"), and shape ``[*S]`` of a row of a column."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """Columns with a common number of rows: ``[rows, *S]`` each, one after the other.

    Args:
        rows: number of rows that there is room for.
        columns: each key's `BlockColumn`.
    """

    rows: int
    columns: Mapping[Key, BlockColumn]

    @staticmethod
    def like(columns: Mapping[Key, Any], rows: int | None = None) -> "Table":
        """The table that holds tensors or arrays ``[N, *S]``.

        Args:
            columns: tensors or NumPy arrays by key.
            rows: number of rows to make room for. Default: N.

        Raises:
            ValueError: the columns have different numbers of rows, or a data type that no memory is laid out for.

        >>> Table.like({"reward": np.zeros((3, 1), np.float32)}).columns
        {'reward': BlockColumn(dtype='float32', shape=(1,))}
        """
        count = row_count(columns)

        made = {}
        for key, values in columns.items():
            name = dtype_name(values)
            try:
                _numpy_dtype(name)
            except TypeError:
                raise ValueError(f"column {key!r} has data type {name}, which cannot be shared") from None
            made[key] = BlockColumn(name, tuple(values.shape[1:]))
        if rows is None:
            rows = count
        return Table(rows, made)


def dtype_name(values: Any) -> str:
    """Return the name of the dtype of a tensor or array, such as "float32"."""
    return str(values.dtype).removeprefix("torch.")


def row_count(columns: Mapping[Key, Any]) -> int:
    """Return the common number of rows N of columns ``[N, *S]``; ValueError if they differ or there are none."""
    counts: dict[Key, int | None] = {}
    for key, values in columns.items():
        counts[key] = len(values) if values.ndim else None
    if len(set(counts.values())) != 1 or None in counts.values():
        raise ValueError(f"columns must have the same number of rows, got {counts}")
    (count, *_) = counts.values()
    assert count is not None
    return count


@cache
def _numpy_dtype(name: str) -> "np.dtype[Any]":
    """Return NumPy's dtype of this name; bfloat16 is viewed as 16-bit integers."""
    dtype = np.dtype("uint16" if name == "bfloat16" else name)
    if dtype.kind not in "biufc":  # bool, integers, floats, complex numbers
        raise TypeError
    return dtype


class Block:
    """Shared memory of ``slots`` equal parts with the same tables.

    It goes to other processes as an argument of `Nursery.start` or in any message of a `Channel`.

    Args:
        tables: the tables of a slot.
        slots: number of slots. Default 1.
        memory: the memory to lay them out in. Default: new memory, all 0.

    Raises:
        ValueError: ``memory`` is too small.

    >>> block = Block([Table.like({"reward": np.zeros((3, 1), np.float32)})], slots=2)
    >>> block.arrays(slot=1)["reward"][:] = 5
    >>> block.tensors(slot=1)["reward"].squeeze(-1)
    tensor([5., 5., 5.])
    """

    def __init__(
        self, tables: "list[Table] | tuple[Table, ...]", slots: int = 1, memory: Memory | None = None
    ) -> None:
        if not isinstance(tables, (list, tuple)) or not all(isinstance(table, Table) for table in tables):
            raise TypeError(f"tables must be a list of Table, got {type(tables).__name__}")
        if not isinstance(slots, int):
            raise TypeError(f"slots must be an integer, got {slots!r}")
        self.tables = tuple(tables)
        self.slots = slots
        if slots < 1 or any(table.rows < 0 for table in self.tables):
            raise ValueError(f"slots must be at least 1 and rows at least 0, got {slots} and {self.tables}")

        self._offsets: list[dict[Key, int]] = []  # of each table: offsets of its columns in a slot
        end = 0
        for table in self.tables:
            offsets = {}
            for key, column in table.columns.items():
                offsets[key] = end
                end += table.rows * prod(column.shape) * _numpy_dtype(column.dtype).itemsize
                end = -(-end // _ALIGNMENT) * _ALIGNMENT  # rounded up
            self._offsets.append(offsets)

        self._slot_bytes = end
        if memory is None:
            memory = Memory(max(1, end * slots))
        self.memory = memory
        if self.memory.size < end * slots:
            raise ValueError(
                f"{slots} slots of {end} bytes do not fit into {self.memory.size} bytes of memory"
            )

    def arrays(self, slot: int = 0, table: int = 0) -> "dict[Key, np.ndarray[Any, Any]]":
        """Return a table's columns as NumPy views ``[rows, *S]``."""
        made = {}
        for key, column, start in self._places(slot, table):
            count = self._size(table, column)
            values = np.frombuffer(self.memory.map, _numpy_dtype(column.dtype), count, start)
            made[key] = values.reshape(self.tables[table].rows, *column.shape)
        return made

    def tensors(self, slot: int = 0, table: int = 0) -> "dict[Key, torch.Tensor]":
        """Return a table's columns as tensor views ``[rows, *S]``."""
        import torch  # not at the top: a process that only starts others does not need torch

        made = {}
        for key, column, start in self._places(slot, table):
            shape = (self.tables[table].rows, *column.shape)
            dtype = getattr(torch, column.dtype)
            count = self._size(table, column)
            if count:
                values = torch.frombuffer(self.memory.map, dtype=dtype, count=count, offset=start)
                made[key] = values.view(shape)
            else:  # frombuffer refuses empty memory
                made[key] = torch.empty(shape, dtype=dtype)
        return made

    def _size(self, table: int, column: BlockColumn) -> int:
        return self.tables[table].rows * prod(column.shape)

    def _places(self, slot: int, table: int) -> list[tuple[Key, BlockColumn, int]]:
        """Key, column and first byte of each column of a table."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} is out of range: there are {self.slots} slots")

        start = slot * self._slot_bytes
        columns = self.tables[table].columns
        offsets = self._offsets[table]
        return [(key, column, start + offsets[key]) for key, column in columns.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (self.tables, self.slots, self.memory)

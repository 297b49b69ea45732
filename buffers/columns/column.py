"""The base class of storage columns (one entry of all stored rows), and the plain tensor column."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.saved_tables import damaged
from flatroll.layout.delta import signed
from flatroll.layout.keys import NestedKey

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns

Columns = dict[NestedKey, Tensor]  # of a batch or a sample: tensors [N, ...] by key
#: Rows of a column in the form of a file: tensors ``[N, ...]`` by name, or (values of all rows, lengths ``[N]``).
Dumped: TypeAlias = Mapping[str, Tensor | tuple[Tensor, Tensor]]

_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # torch indexes these only in their `signed` view
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class After(NamedTuple):
    """Tells a column which new rows continue stored rows: row ``rows[j]`` follows the one in ``slots[j]``.

    A hint, which a column may ignore. Both int64 ``[K]``; ``slots`` are slots of the storage, for side columns
    (`Column.pool`) too.
    """

    rows: Tensor
    slots: Tensor


class Part(NamedTuple):
    """Rows that `Column.dump` gave, as they came back from a file: each tensor has N rows, and lengths add up.

    Attributes:
        slots: int64 ``[N]``, where each row belongs; -1 for rows that are no longer stored, which come first.
        dumped: the tensors by name.
    """

    slots: Tensor
    dumped: "Dumped"


class Column(ABC):
    """Stores one entry (say, the rewards) of all rows of a storage; subclasses choose the encoding.

    A subclass sets ``dtype`` and ``shape`` and implements :meth:`write`, :meth:`put`, :meth:`take`, :meth:`pool`,
    :meth:`grow` and :attr:`nbytes`. `ColumnStorage.make_column` puts it into a storage. Rows are written by one thread
    at a time and read by any number; what was read of a row that was being overwritten is thrown away.

    Attributes:
        dtype: of the values as they come and go.
        shape: of one row's value.
        row_bytes: what ``stats()`` shows as a row's bytes; override it if a row takes fewer than `value_bytes`.

    >>> class HalfColumn(Column):
    ...     '''Keeps float32 values in two bytes each.'''
    ...     def __init__(self, rows, shape):
    ...         self.dtype, self.shape = torch.float32, shape
    ...         self.data = torch.zeros(rows, *shape, dtype=torch.float16)
    ...     def write(self, slot, values, after=None):  # values [N, *shape]
    ...         self.data[slot : slot + len(values)] = values
    ...     def put(self, slots, values, after=None):  # slots [N], values [N, *shape]
    ...         self.data[slots] = values.half()
    ...     def take(self, slots):  # slots [N] -> [N, *shape]
    ...         return self.data[slots].float()
    ...     def pool(self):
    ...         return HalfColumn(0, self.shape)
    ...     def grow(self, rows):
    ...         more = self.data.new_zeros(max(0, rows - len(self.data)), *self.shape)
    ...         self.data = torch.cat([self.data, more])
    ...     @property
    ...     def nbytes(self):
    ...         return 2 * self.data.numel()
    >>> column = HalfColumn(10, torch.Size([3]))
    >>> column.write(4, torch.ones(2, 3))
    >>> column.take(torch.tensor([5])), column.nbytes
    (tensor([[1., 1., 1.]]), 60)
    """

    dtype: torch.dtype
    shape: torch.Size

    @abstractmethod
    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        """Write ``values`` ``[N, *shape]`` to the N slots from ``slot`` on; they must not wrap around."""

    @abstractmethod
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        """Write ``values`` ``[N, *shape]`` to ``slots`` (int64 ``[N]``, without duplicates)."""

    @abstractmethod
    def take(self, slots: Tensor) -> Tensor:
        """Return copies ``[N, *shape]`` of the rows in ``slots`` (int64 ``[N]``), on the column's device."""

    @abstractmethod
    def pool(self) -> "Column":
        """Return a new, empty column of this kind, for next observations stored apart (``compact_obs``)."""

    @abstractmethod
    def grow(self, rows: int) -> None:
        """Enlarge the column to at least ``rows`` rows and keep its values: a pool grows, and so may a loaded state."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory, or of disk, that the column takes."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one row's value when decoded, as :meth:`take` returns it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes that one stored row takes; an estimate where rows differ in size."""
        return self.value_bytes

    @property
    def saved_as(self) -> str:
        """What a saved state calls this kind of column: columns of that name can load it."""
        return type(self).__name__

    def dump(self, slots: Tensor) -> "Dumped":
        """Return the rows in ``slots`` (int64 ``[N]``) as tensors to write to a file, for :meth:`restore`.

        Each is a tensor ``[N, ...]``, or, where rows have any number of values, a pair: the values of all rows end to
        end, and how many each row has, int64 ``[N]``. Override both methods if rows take less space so than decoded.
        """
        return {"values": self.take(slots)}

    def check_dump(self, dumped: "Dumped") -> Tensor:
        """Return the values ``[N, *shape]`` of rows that :meth:`dump`, not overridden, gave; ValueError if there are
        none."""
        check_dumped(dumped, {"values": False})
        values = dumped["values"]
        check_values("values", values, self.dtype, self.shape)
        assert isinstance(values, Tensor)
        return values

    def restore(self, parts: Sequence["Part"], rows: int) -> dict[str, Any]:
        """Return the :meth:`state_dict` of ``rows`` slots that ``parts`` make; ValueError if they cannot.

        The column is not changed: :meth:`check_state_dict` and :meth:`load_state_dict` are called with the result.
        """
        for part in parts:
            self.check_dump(part.dumped)
        return {"values": scattered(parts, "values", rows, self.dtype, self.shape)}

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the values of the first ``rows`` slots for :meth:`load_state_dict`."""
        return {"values": self.take(torch.arange(rows))}

    def check_state_dict(self, state: dict[str, Any]) -> int | None:
        """Return how many rows ``state`` holds, and change nothing; ValueError if it cannot be loaded.

        Override it along with :meth:`load_state_dict`. A column that overrides only that one is not asked (None).
        """
        if type(self).load_state_dict is not Column.load_state_dict:
            return None
        return check_values("values", state["values"], self.dtype, self.shape)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values from a checked :meth:`state_dict`; the column grows if it is too short."""
        values: Tensor = state["values"].detach()
        self.grow(len(values))
        if len(values):
            self.write(0, values)


def check_values(name: str, values: object, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return N if a state's ``values`` are a plain tensor ``[N, *shape]`` of ``dtype``, else raise ValueError.

    >>> check_values("values", torch.zeros(3, 2), torch.float32, (2,))
    3
    """
    expected = f"a dense tensor of {dtype} {['N', *shape]}"
    if not isinstance(values, Tensor):
        raise damaged(f"its {name} are {type(values).__name__}, expected {expected}")
    dense = values.layout is torch.strided and values.device.type != "meta"
    if not dense or values.dtype is not dtype or not values.ndim or values.shape[1:] != shape:
        raise damaged(f"its {name} are {values.dtype} {list(values.shape)}, expected {expected}")
    return len(values)


def check_dumped(dumped: Dumped, expected: Mapping[str, bool]) -> None:
    """Raise ValueError unless a part has the tensors that are ``expected``: names, and which are ragged (pairs)."""
    if {name: isinstance(values, tuple) for name, values in dumped.items()} != dict(expected):
        raise damaged(f"a part has the tensors {sorted(dumped)}, expected {sorted(expected)}")


def scattered(
    parts: Sequence[Part], name: str, rows: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Lay the tensors ``name`` of ``parts`` (checked, ``[N, *shape]``) into their slots: ``[rows, *shape]``; slots of
    no part are zeros.

    >>> part = Part(torch.tensor([-1, 2, 0]), {"values": torch.tensor([7, 8, 9])})
    >>> scattered([part], "values", 3, torch.int64, ())
    tensor([9, 0, 8])
    """
    values = torch.zeros((rows, *shape), dtype=dtype)
    for slots, dumped in parts:
        given = dumped[name]
        scatter(values, slots, given[0] if isinstance(given, tuple) else given)
    return values


def scatter(values: Tensor, slots: Tensor, given: Tensor) -> None:
    """Write the rows ``given`` ``[N, *shape]`` of a part to their ``slots`` of ``values``; -1, which come first, to
    none.

    >>> values = torch.zeros(3)
    >>> scatter(values, torch.tensor([-1, 1, 2]), torch.tensor([7.0, 8.0, 9.0])), values
    (None, tensor([0., 8., 9.]))
    """
    gone = int((slots < 0).sum()) if len(slots) and int(slots[0]) < 0 else 0
    at, new = slots[gone:], given[gone:]
    if not len(at):
        return
    first = int(at[0])
    if int(at[-1]) - first == len(at) - 1:  # slots follow each other: up to the end of the ring, they do
        values[first : first + len(at)] = new
    else:
        put_rows(values, at, new)


def differ(left: Tensor, right: Tensor) -> Tensor:
    """Compare two tensors row by row, bit by bit (a NaN equals itself): True where rows differ, bool ``[N]``.

    >>> differ(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([-0.0, torch.nan, 1.0]))
    tensor([ True, False, False])
    """
    left, right = left.resolve_neg(), right.resolve_neg()
    if left.is_complex():
        left, right = (torch.view_as_real(side.resolve_conj()) for side in (left, right))
    # Compared as integers of the same width: floats would call 0.0 and -0.0 equal and NaN unequal to itself.
    word = _WORDS[left.element_size()]
    different = left.view(word).ne(right.view(word))
    return different if different.ndim == 1 else different.flatten(1).any(1)


def take_rows(column: Tensor, slots: Tensor) -> Tensor:
    """Copies ``[N, *shape]`` of the rows ``slots`` (int64 ``[N]``) of ``column`` ``[rows, *shape]``."""
    plain = signed(column) if column.dtype in _UNSIGNED else column
    if plain.ndim == 2 and plain.shape[1] == 1:  # torch reads a flat column in half the time
        rows = plain.view(-1).index_select(0, slots).unsqueeze_(-1)
    else:
        rows = plain.index_select(0, slots)
    return rows if plain is column else rows.view(column.dtype)


def put_rows(column: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write ``values`` ``[N, *shape]`` over the rows ``slots`` (int64 ``[N]``) of ``column`` ``[rows, *shape]``."""
    if column.dtype in _UNSIGNED:
        column, values = signed(column), signed(values)
    if values.requires_grad:  # else the column would become part of the graph
        values = values.detach()
    column.index_copy_(0, slots, values)


def host_memory(rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a new tensor ``[rows, *shape]`` from a cache line on, of NumPy, which asks for large pages where they pay.

    >>> host_memory(3, torch.float32, (2,)).shape
    torch.Size([3, 2])
    """
    size = rows * math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(rows, *shape)


class TensorColumn(Column):
    """A column stored as one plain tensor ``[rows, *shape]``: the given one, which is not copied.

    >>> column = TensorColumn(torch.zeros(4, 2))
    >>> column.write(1, torch.ones(2, 2))
    >>> column.take(torch.tensor([0, 2]))
    tensor([[0., 0.],
            [1., 1.]])
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype, self.shape = data.dtype, data.shape[1:]

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        # len() of a tensor takes five times as long
        self.data[slot : slot + values.shape[0]] = values.detach() if values.requires_grad else values

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        device = self.data.device
        put_rows(self.data, slots.to(device), values.to(device))

    @override
    def take(self, slots: Tensor) -> Tensor:
        return take_rows(self.data, slots.to(self.data.device))

    @override
    def pool(self) -> "TensorColumn":
        """Return a new, empty column in memory, even if this one is in a file."""
        return TensorColumn(torch.empty((0, *self.shape), dtype=self.dtype, device=self.data.device))

    @override
    def grow(self, rows: int) -> None:
        if rows <= len(self.data):
            return
        # The old tensor stays whole for who reads it on another thread.
        larger = self.data.new_empty((rows, *self.shape))
        larger[: len(self.data)] = self.data
        self.data = larger

    @property
    @override
    def row_bytes(self) -> int:
        return math.prod(self.data.shape[1:]) * self.data.element_size()

    @property
    @override
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def plain_columns(columns: Mapping[NestedKey, Column]) -> "HostColumns[NestedKey]":
    """Return those of ``columns`` that are plain tensors in host memory, whose rows are copied as bytes.

    >>> columns = plain_columns({"x": TensorColumn(torch.arange(4)), "y": TensorColumn(torch.zeros(2, 4).T)})
    >>> columns.take(torch.tensor([3, 0]))
    {'x': tensor([3, 0])}
    """
    from flatroll.kernels.rows.gather import HostColumns  # numba

    return HostColumns(
        {
            key: column.data
            for key, column in columns.items()
            if isinstance(column, TensorColumn)
            and (type(column).take, type(column).write) == (TensorColumn.take, TensorColumn.write)
            and column.data.is_cpu
            and column.data.numel()
            and column.data.is_contiguous()
        }
    )

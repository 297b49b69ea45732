"""The base class of storage columns, which store one entry of all rows, and the plain tensor column."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.saved_tables import damaged
from flatroll.kernels.rows.host_memory import HUGE_FROM, host_memory
from flatroll.layout.delta import signed
from flatroll.layout.keys import NestedKey
from flatroll.layout.transfers import upload

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns

Columns = dict[NestedKey, Tensor]  # a batch or sample: tensors [N, ...] by key
#: The dtype and the shape of one row's value, by key.
RowForm: TypeAlias = Mapping[NestedKey, tuple[torch.dtype, torch.Size]]
#: Rows of a column in file form: tensors ``[N, ...]`` by name, or (values of all rows, lengths ``[N]``).
Dumped: TypeAlias = Mapping[str, Tensor | tuple[Tensor, Tensor]]

_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # torch can index these only through `signed` views
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONG_ROW = 512  # bytes of a row from which on `differ` compares eight at a time


class After(NamedTuple):
    """Tells a column which new rows continue stored rows: row ``rows[j]`` follows the one in ``slots[j]``.

    A hint, which a column may ignore. Both int64 ``[K]``; ``slots`` are slots of the storage, for side columns
    (`Column.pool`) too.
    """

    rows: Tensor
    slots: Tensor


class Part(NamedTuple):
    """Rows from `Column.dump`, loaded from a file: each tensor has N rows, and lengths add up.

    Attributes:
        slots: int64 ``[N]``, slot of each row; -1 for rows that are no longer stored, which come first.
        dumped: the tensors by name.
    """

    slots: Tensor
    dumped: "Dumped"


class Column(ABC):
    """Stores one entry, such as the rewards, of all rows of a storage; subclasses define the encoding.

    A subclass sets ``dtype`` and ``shape`` and implements :meth:`write`, :meth:`put`, :meth:`take`, :meth:`pool`,
    :meth:`grow` and :attr:`nbytes`. `ColumnStorage.make_column` puts it into a storage. One thread writes at a time
    and any number read; readers discard a row that was overwritten during the read.

    Attributes:
        dtype: dtype of the values.
        shape: shape of one row's value.
        row_bytes: a row's bytes in ``stats()``; override it if a row takes fewer than `value_bytes`.
        looks_up_on_host: whether :meth:`take` needs slots on the CPU also in a storage on a device. Default False:
            it gets them on the storage's device.

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
    looks_up_on_host: bool = False

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
        """Return a new, empty column of this kind, for separately stored next observations (``compact_obs``)."""

    @abstractmethod
    def grow(self, rows: int) -> None:
        """Enlarge the column to at least ``rows`` rows, keeping its values (for pools and loaded states)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory or disk that the column uses."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one row's value when decoded, as :meth:`take` returns it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes per stored row; an estimate if rows differ in size."""
        return self.value_bytes

    @property
    def saved_as(self) -> str:
        """Name of this kind of column in saved states; columns with that name can load it."""
        return type(self).__name__

    def dump(self, slots: Tensor) -> "Dumped":
        """Return the rows in ``slots`` (int64 ``[N]``) as tensors to write to a file, for :meth:`restore`.

        Each is a tensor ``[N, ...]``, or for rows of variable length a pair: the concatenated values, and their
        number per row, int64 ``[N]``. Override both methods if this takes less space than decoded rows.
        """
        return {"values": self.take(slots)}

    def check_dump(self, dumped: "Dumped") -> Tensor:
        """Return the values ``[N, *shape]`` of the default :meth:`dump`; ValueError if there are none."""
        check_dumped(dumped, {"values": False})
        values = dumped["values"]
        check_values("values", values, self.dtype, self.shape)
        assert isinstance(values, Tensor)
        return values

    def restore(self, parts: Sequence["Part"], rows: int) -> dict[str, Any]:
        """Return the :meth:`state_dict` of ``rows`` slots made from ``parts``; ValueError if they do not fit.

        The column is not changed: :meth:`check_state_dict` and :meth:`load_state_dict` are called with the result.
        """
        for part in parts:
            self.check_dump(part.dumped)
        return {"values": scattered(parts, "values", rows, self.dtype, self.shape)}

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the values of the first ``rows`` slots for :meth:`load_state_dict`."""
        return {"values": self.take(torch.arange(rows))}

    def check_state_dict(self, state: dict[str, Any]) -> int | None:
        """Return the number of rows in ``state`` without changing anything; ValueError if it cannot be loaded.

        Override it together with :meth:`load_state_dict`; if only that one is overridden, it returns None.
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
    """Raise ValueError unless a part has the ``expected`` tensors: their names, and whether they are ragged pairs."""
    if {name: isinstance(values, tuple) for name, values in dumped.items()} != dict(expected):
        raise damaged(f"a part has the tensors {sorted(dumped)}, expected {sorted(expected)}")


def scattered(
    parts: Sequence[Part], name: str, rows: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Scatter the checked tensors ``name`` ``[N, *shape]`` of ``parts`` into zeros ``[rows, *shape]``.

    >>> part = Part(torch.tensor([-1, 2, 0]), {"values": torch.tensor([7, 8, 9])})
    >>> scattered([part], "values", 3, torch.int64, ())
    tensor([9, 0, 8])
    """
    values = torch.zeros((rows, *shape), dtype=dtype)
    for slots, dumped in parts:
        given = dumped[name]
        if isinstance(given, tuple):
            given = given[0]
        scatter(values, slots, given)
    return values


def scatter(values: Tensor, slots: Tensor, given: Tensor) -> None:
    """Write a part's rows ``given`` ``[N, *shape]`` to their ``slots`` of ``values``; leading -1 are skipped.

    >>> values = torch.zeros(3)
    >>> scatter(values, torch.tensor([-1, 1, 2]), torch.tensor([7.0, 8.0, 9.0])), values
    (None, tensor([0., 8., 9.]))
    """
    gone = 0
    if len(slots) and int(slots[0]) < 0:
        gone = int((slots < 0).sum())
    at = slots[gone:]
    new = given[gone:]
    if not len(at):
        return

    first = int(at[0])
    if int(at[-1]) - first == len(at) - 1:  # consecutive slots that do not wrap around
        values[first : first + len(at)] = new
    else:
        put_rows(values, at, new)


def differ(left: Tensor, right: Tensor, dims: int = 1) -> Tensor:
    """Compare two tensors row by row, bit for bit (NaN equals itself): True where rows differ, bool ``[N]``.

    Rows ``[*shape]`` may stand in several dims, ``[E, N, *shape]`` with ``dims=2``, which gives bool ``[E, N]``.

    >>> differ(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([-0.0, torch.nan, 1.0]))
    tensor([ True, False, False])
    """
    left = left.resolve_neg()
    right = right.resolve_neg()
    if left.is_complex():
        left = torch.view_as_real(left.resolve_conj())
        right = torch.view_as_real(right.resolve_conj())

    # Compared as integers of the same width, because as floats 0.0 equals -0.0 and NaN differs from itself.
    word = _WORDS[left.element_size()]
    left = left.view(word)
    right = right.view(word)
    if left.ndim == dims:
        return left.ne(right)

    wide = _octets(left, dims)
    other = None
    if wide is not None:
        other = _octets(right, dims)
    if wide is None or other is None:
        return left.ne(right).flatten(dims).any(dims)

    different = wide.ne(other).contiguous()
    if different.shape[-1] % 8 == 0:
        different = different.view(torch.int64)  # eight flags at a time
    return different.any(dims)


def _octets(rows: Tensor, dims: int) -> Tensor | None:
    """View rows of integers as int64 ``[..., n]``, eight bytes at a time: images compare five times as fast.

    None if a row is short, where the views would cost more than they save, or is not made of whole aligned words.
    """
    size = rows.element_size()
    width = math.prod(rows.shape[dims:]) * size
    if width < _LONG_ROW or width % 8 or not rows.numel() or rows.data_ptr() % 8:
        return None

    steps = [stride * size for stride in rows.stride()[:dims]]
    if any(step % 8 for step in steps) or rows.storage_offset() * size % 8:
        return None
    if not rows[(0,) * dims].is_contiguous():
        return None
    return rows.flatten(dims).view(torch.int64)


def take_rows(column: Tensor, slots: Tensor, huge: bool = False) -> Tensor:
    """Return copies ``[N, *shape]`` of the rows ``slots`` (int64 ``[N]``) of ``column`` ``[rows, *shape]``.

    With ``huge``, the copies of a column in host memory are in huge pages.
    """
    plain = column
    if column.dtype in _UNSIGNED:
        plain = signed(column)
    flat = plain.ndim == 2 and plain.shape[1] == 1  # torch reads a flat column twice as fast
    source = plain
    if flat:
        source = plain.view(-1)

    if huge and column.is_cpu:
        out = host_memory(len(slots), source.dtype, tuple(source.shape[1:]))
        rows = torch.index_select(source, 0, slots, out=out)
    else:
        rows = source.index_select(0, slots)

    if flat:
        rows = rows.unsqueeze_(-1)
    if plain is column:
        return rows
    return rows.view(column.dtype)


def put_rows(column: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write ``values`` ``[N, *shape]`` over the rows ``slots`` (int64 ``[N]``) of ``column`` ``[rows, *shape]``."""
    if column.dtype in _UNSIGNED:
        column = signed(column)
        values = signed(values)
    if values.requires_grad:  # keep the column out of the autograd graph
        values = values.detach()
    column.index_copy_(0, slots, values)


class TensorColumn(Column):
    """A column stored as a plain tensor ``[rows, *shape]``, which is not copied.

    >>> column = TensorColumn(torch.zeros(4, 2))
    >>> column.write(1, torch.ones(2, 2))
    >>> column.take(torch.tensor([0, 2]))
    tensor([[0., 0.],
            [1., 1.]])
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype = data.dtype
        self.shape = data.shape[1:]
        # Computed once: a column is read several times per sample.
        self._few = HUGE_FROM // max(self.row_bytes, 1)

    @override
    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        if values.requires_grad:
            values = values.detach()
        # len() of a tensor would take five times as long
        self.data[slot : slot + values.shape[0]] = values

    @override
    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        device = self.data.device
        put_rows(self.data, upload(slots, device), upload(values, device))

    @override
    def take(self, slots: Tensor) -> Tensor:
        return take_rows(self.data, upload(slots, self.data.device), slots.numel() > self._few)

    @override
    def pool(self) -> "TensorColumn":
        """Return a new, empty column in memory, even if this one is in a file."""
        return TensorColumn(torch.empty((0, *self.shape), dtype=self.dtype, device=self.data.device))

    @override
    def grow(self, rows: int) -> None:
        if rows <= len(self.data):
            return

        # The old tensor stays valid for readers on other threads.
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


def plain_columns(
    columns: Mapping[NestedKey, Column], next_keys: Mapping[NestedKey, NestedKey] | None = None
) -> "HostColumns[NestedKey]":
    """Return the ``columns`` that are plain tensors in host memory; their rows can be copied as bytes.

    If all are, ``next_keys`` are passed on to `HostColumns`.

    >>> columns = plain_columns({"x": TensorColumn(torch.arange(4)), "y": TensorColumn(torch.zeros(2, 4).T)})
    >>> columns.take(torch.tensor([3, 0]))
    {'x': tensor([3, 0])}
    """
    from flatroll.kernels.rows.gather import HostColumns  # numba

    plain = {
        key: column.data
        for key, column in columns.items()
        if isinstance(column, TensorColumn)
        and (type(column).take, type(column).write) == (TensorColumn.take, TensorColumn.write)
        and column.data.is_cpu
        and column.data.numel()
        and column.data.is_contiguous()
    }
    if len(plain) != len(columns):
        next_keys = None
    return HostColumns(plain, next_keys)

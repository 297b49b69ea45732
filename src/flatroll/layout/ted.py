"""Conversions between flat batches and TorchRL's episode format (TED), and compact batches."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_key_names, check_keys, check_path, check_type
from flatroll.layout.delta import signed
from flatroll.layout.keys import (
    IS_INIT,
    MASK,
    NEXT,
    TRAJ_IDS,
    NestedKey,
    as_tuple,
    is_entry,
    next_key,
    plain_key,
)
from flatroll.layout.trajectories import nested_values
from flatroll.layout.transfers import upload

_ROWS_AT_ONCE = 8192  # compared in one step: bounds the memory that a comparison takes


def root_places(ends: Tensor) -> Tensor:
    """Return the position of each row's root entry in a compact column; its next entry is one position later.

    Args:
        ends: bool ``[N]``, the last row of each run.

    Returns:
        int64 ``[N]``.

    >>> root_places(torch.tensor([False, True, False, True]))
    tensor([0, 1, 3, 4])
    """
    # Row i comes after i root entries and the last entries of the runs that ended before it.
    return torch.arange(len(ends), device=ends.device) + ends.cumsum(0) - ends.long()


def is_shift(root: Tensor, following: Tensor, ends: Tensor) -> bool:
    """Whether each row's next entry equals, bit by bit, the root entry of the next row in its run.

    Args:
        root: ``[N, *F]``.
        following: next entries, ``[N, *F]``.
        ends: bool ``[N]``, the last row of each run, whose next entry no row holds.

    >>> is_shift(torch.tensor([1, 2, 5]), torch.tensor([2, 3, 6]), torch.tensor([False, True, True]))
    True
    >>> is_shift(torch.tensor([1, 2, 5]), torch.tensor([3, 3, 6]), torch.tensor([False, True, True]))
    False
    """
    if root.shape != following.shape or root.dtype != following.dtype:
        return False

    for first in range(0, len(root) - 1, _ROWS_AT_ONCE):
        stop = min(first + _ROWS_AT_ONCE, len(root) - 1)
        differs = _bits(root[first + 1 : stop + 1]) != _bits(following[first:stop])
        if bool((differs.any(1) & ~ends[first:stop].to(differs.device)).any()):
            return False
    return True


def rows_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two columns ``[N, *F]`` are the same, bit by bit.

    >>> rows_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(rows: Tensor) -> Tensor:
    """Rows ``[n, *F]`` as their bytes, uint8 ``[n, bytes per row]``: NaN equals itself and -0.0 is not 0.0."""
    if rows.numel() == 0:
        return rows.new_zeros((len(rows), 0), dtype=torch.uint8)
    return rows.resolve_conj().resolve_neg().contiguous().reshape(len(rows), -1).view(torch.uint8)


def fill_compact(column: Tensor, root: Tensor, following: Tensor, ends: Tensor) -> None:
    """Write root entries ``[N, *F]`` and the next entries of last rows into a compact column ``[N + R, *F]``."""

    places = root_places(ends)
    signed(column).index_copy_(0, places, signed(root))
    signed(column).index_copy_(0, places[ends] + 1, signed(following)[ends])


def expand_compact(column: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return root and next entries, both ``[N, *F]``, of a compact column ``[N + R, *F]``.

    >>> root, following = expand_compact(torch.tensor([1, 2, 3, 5, 6]), torch.tensor([False, True, True]))
    >>> root, following
    (tensor([1, 2, 5]), tensor([2, 3, 6]))
    """
    places = root_places(ends)
    # In unwritten memory the last row may have no entry after it; readers leave that row out.
    behind = (places + 1).clamp(max=len(column) - 1)
    whole = signed(column)
    return whole[places].view(column.dtype), whole[behind].view(column.dtype)


DONE_KEYS: tuple[NestedKey, ...] = ("done", "truncated", "terminated")
REWARD_KEYS: tuple[NestedKey, ...] = ("reward",)
LENGTHS = "_lengths"
COLUMNS = "_columns"
SHAPE = "_storage_shape"
ROOT = "_root"

Names = tuple[str, ...]


class Conversion:
    """The arguments of a conversion. See `TED2Flat`.

    Args:
        done_key: where runs end; markers of the batch beside it count too (`flatroll.layout.run_ends`).
        shift_key: the name under which the ring's shift is kept. Default ``"shift"``.
        is_full_key: the name under which it is kept whether the ring is full. Default ``"is_full"``.
        done_keys: flags under ``"next"`` that are root entries of the flat form.
        reward_keys: rewards under ``"next"`` that are root entries of the flat form.
    """

    def __init__(
        self,
        done_key: NestedKey = ("next", "done"),
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Iterable[NestedKey] = DONE_KEYS,
        reward_keys: Iterable[NestedKey] = REWARD_KEYS,
    ) -> None:

        check_keys(done_key=done_key)

        self.done_key = done_key
        self.shift_key = check_type("shift_key", shift_key, str, "a string")
        self.is_full_key = check_type("is_full_key", is_full_key, str, "a string")

        self.done_keys = set(map(plain_key, check_key_names("done_keys", done_keys)))
        self.reward_keys = set(map(plain_key, check_key_names("reward_keys", reward_keys)))


class TED2Flat(Conversion):
    """Convert rows with next observations to the flat form, which holds each observation once.

    The flat form is a tensordict of batch size ``[]`` whose columns are in time order, lane after lane:

    * an entry whose next value is the root value of the next row: ``key``, ``[N + R]``, with one more value at the end
      of each of the R runs;
    * an entry for which this is not the case (n-step data): ``key`` and ``("next", key)``, both ``[N]``;
    * rewards and flags of ``"next"``: at the root, ``[N]``; flags of the root itself: under ``"_root"``;
    * all others unchanged, ``[N]``; the length of each run, int64 ``[R]``, as ``"_lengths"``.

    `Flat2TED` restores the rows bit for bit. For a ring buffer's rows, first set ``shift``, the slot of the next row,
    and ``is_full``: the ring is then unrolled, and unless it is full only the rows before ``shift`` count. If they are
    None, rows are in time order.

    Args:
        done_key: see `flatroll.layout.run_ends`. Runs also end before a row with ``is_init`` and where trajectory ids
            change. Default ``("next", "done")``.
        shift_key, is_full_key: names under which the ring's state is stored. Default ``"shift"`` and ``"is_full"``.
        done_keys: flags under ``"next"``. Default ``("done", "truncated", "terminated")``.
        reward_keys: rewards under ``"next"``. Default ``("reward",)``.

    Source: the storage hooks of torchrl 0.14; the names and places of entries are theirs.

    >>> rows = {"observation": torch.arange(3), "next": {"observation": torch.tensor([1, 9, 3])}}
    >>> rows["next"]["done"] = torch.tensor([False, True, False])
    >>> flat = TED2Flat()(TensorDict(rows, [3]))
    >>> flat["observation"], flat["_lengths"]
    (tensor([0, 1, 9, 2, 3]), tensor([2, 1]))
    >>> Flat2TED()(flat)["next", "observation"]
    tensor([1, 9, 3])
    """

    shift: int | None = None
    is_full: bool | None = None

    def __call__(self, data: TensorDictBase, path: str | Path | None = None) -> TensorDict:
        """Convert rows ``[N]``, or ``[T, *B]`` of several lanes with time first, as a storage holds them.

        Args:
            data: the rows; with ``is_full=False`` the storage's whole memory will do.
            path: folder of memory-mapped files that the flat form is written to, column by column. Default: memory.

        Raises:
            KeyError: no marker says where runs end.
            TypeError: an entry is not a dense tensor.
            ValueError: an entry has a name that the flat form uses itself, ``shift`` is out of range, or a flag has
                more values than one per row.
        """
        check_type("data", data, TensorDictBase, "a tensordict of rows")
        data, in_time_order = self._in_time_order(data)
        ends = self._run_ends(data, in_time_order)
        stops = ends.nonzero().squeeze(-1)

        # which entries are kept once, with one value more for each run, and which move from "next" to the root
        named = self.done_keys | self.reward_keys
        entries = {as_tuple(key): data.get(key) for key in data.keys(True, True, is_leaf=is_entry)}
        shifted = []
        for key, root in entries.items():
            if plain_key(key) in named or (NEXT, *key) not in entries:
                continue
            if is_shift(in_time_order(root), in_time_order(entries[NEXT, *key]), ends):
                shifted.append(key)
        moved = [key[1:] for key in entries if key[0] == NEXT and plain_key(key[1:]) in named]

        flat = TensorDict({}, [])
        shape = data.batch_size
        is_full = self.is_full is not False
        shift = (self.shift or 0) if is_full else shape[0]
        flat.set_non_tensor(self.shift_key, shift)
        flat.set_non_tensor(self.is_full_key, is_full)
        flat.set_non_tensor(SHAPE, tuple(shape))
        flat.set_non_tensor(COLUMNS, json.dumps({"shifted": shifted, "next": moved}))
        if path is not None:
            flat.memmap_(str(check_path("path", path)))

        lengths = stops.diff(prepend=stops.new_tensor([-1]))
        _column(flat, (LENGTHS,), lengths[:0], len(stops)).copy_(lengths)
        for key, column in entries.items():
            if key[0] == NEXT and key[1:] in shifted:
                continue
            rows = in_time_order(column)
            if key in shifted:
                made = _column(flat, key, rows, len(rows) + len(stops))
                fill_compact(made, rows, in_time_order(entries[NEXT, *key]), ends)
            else:
                _column(flat, self._place(key), rows, len(rows)).copy_(rows)
        return flat

    def _run_ends(self, data: TensorDictBase, in_time_order: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the last rows of runs, bool ``[N]``, lane after lane in time order."""
        shape = data.batch_size
        lanes_first = torch.Size([shape[1:].numel(), shape[0]])

        def by_lane(column: Tensor) -> Tensor:
            return in_time_order(column).reshape(*lanes_first, *column.shape[len(shape) :])

        markers = data.select(IS_INIT, self.done_key, TRAJ_IDS, MASK, strict=False)
        return run_ends(markers.apply(by_lane, batch_size=lanes_first), done_key=self.done_key).reshape(-1)

    def _in_time_order(self, data: TensorDictBase) -> tuple[Any, Callable[[Tensor], Tensor]]:
        """Return the rows that count, and what lays a column of them ``[T, *B, *F]`` end to end, oldest row first."""
        if data.batch_dims < 1:
            raise ValueError("data must have batch size [N] or [T, *B], got []")
        own = {LENGTHS, COLUMNS, SHAPE, ROOT, self.shift_key, self.is_full_key}
        clash = sorted(own & set(data.keys()))
        if clash:
            raise ValueError(
                f"data has entries {clash}, whose names the flat form uses itself: rename them first"
            )

        for key in data.keys(True, True, is_leaf=is_entry):
            column = data.get(key)
            if not isinstance(column, Tensor) or column.is_nested:
                raise TypeError(f"data[{key!r}] is not a dense tensor: leave it out with .exclude({key!r})")

        slots = data.batch_size[0]
        shift = self.shift
        if shift is not None and not 0 <= shift <= slots:
            raise ValueError(f"shift must be a slot from 0 to {slots} (the rows of data), got {shift}")
        if self.is_full is False and shift is not None:
            kept: Any = data[:shift]
            data = kept

        dims = data.batch_dims
        roll = shift if shift and self.is_full else 0

        def in_time_order(column: Tensor) -> Tensor:
            if roll:
                column = column.roll(-roll, 0)
            # [T, *B, *F] -> [T, L, *F] -> [L, T, *F] -> [L * T, *F]; one lane is only a view
            if dims > 1:
                return column.flatten(1, dims - 1).transpose(0, 1).flatten(0, 1)
            return column

        return data, in_time_order

    def _place(self, key: Names) -> Names:
        """Return the key of an entry ``[N]`` in the flat form."""
        named = self.done_keys | self.reward_keys
        if key[0] == NEXT and plain_key(key[1:]) in named:
            return key[1:]
        if plain_key(key) in named:
            return (ROOT, *key)
        return key


def _column(flat: TensorDict, key: Names, like: Tensor, rows: int) -> Tensor:
    """A new column of the flat form, ``[rows, *F]``, in memory or in its folder."""
    shape = torch.Size([rows, *like.shape[1:]])
    if flat.is_memmap():
        return cast(Tensor, flat.make_memmap(key, shape=shape, dtype=like.dtype))

    flat.set(key, torch.empty(shape, dtype=like.dtype, device=like.device))
    return cast(Tensor, flat.get(key))


class Flat2TED(Conversion):
    """Convert the flat form back to rows with next observations: the inverse of `TED2Flat`, bit for bit.

    Reads the flat form of torchrl 0.14 too, whose runs end at done alone and whose root flags are lost (False).

    Args:
        done_key: where runs end in a flat form without ``"_lengths"``. Default ``"done"``.
        shift_key, is_full_key, done_keys, reward_keys: as for `TED2Flat`.
    """

    def __init__(
        self,
        done_key: NestedKey = "done",
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Iterable[NestedKey] = DONE_KEYS,
        reward_keys: Iterable[NestedKey] = REWARD_KEYS,
    ) -> None:
        super().__init__(done_key, shift_key, is_full_key, done_keys, reward_keys)

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return rows ``[N]`` or ``[T, *B]``, each in the slot of the ring that it came from.

        Args:
            data: the result of `TED2Flat`, or the same loaded from its folder.
            out: memory of at least T rows, the first T of which are written. Default: new memory.

        Raises:
            KeyError: an entry of the flat form is missing, or ``out`` lacks an entry.
            ValueError: the entries do not fit each other, or ``out``.
        """
        shape, shift, is_full = _ring_state(data, self.shift_key, self.is_full_key)
        slots = shape[0]
        lanes = shape[1:].numel()
        rows = shape.numel()

        own = {SHAPE, COLUMNS, LENGTHS, self.shift_key, self.is_full_key}
        names = set(data.keys())
        entries = {as_tuple(key): data.get(key) for key in data.keys(True, True) if key not in own}
        ends = self._ends(data, slots, lanes, shift, is_full)
        shifted, moved = self._kinds(data, entries, rows)

        if not is_full:
            shape = torch.Size([min(shift, slots), *shape[1:]])
        target = TensorDict({}, shape) if out is None else _memory(out, shape)

        def put(key: Names, column: Tensor) -> None:
            if len(column) != rows:
                raise ValueError(f"entry {key!r} has {len(column)} rows, the others have {rows}")

            # [L * T, *F] -> [L, T, *F] -> [T, L, *F], without the unwritten slots
            in_slots = column.reshape(lanes, slots, *column.shape[1:]).transpose(0, 1)[: shape[0]]
            in_slots = in_slots.reshape(*shape, *column.shape[1:])
            if is_full and shift:
                in_slots = in_slots.roll(shift, 0)

            if out is None:
                target.set(key, in_slots)
                return

            memory = target.get(key, None)
            if memory is None:
                raise KeyError(f"out has no entry {plain_key(key)!r}, which the flat form has")
            if memory.shape != in_slots.shape or memory.dtype != in_slots.dtype:
                raise ValueError(
                    f"out[{plain_key(key)!r}] is {memory.dtype} {list(memory.shape)}, the flat form "
                    f"holds {in_slots.dtype} {list(in_slots.shape)}"
                )
            memory.copy_(in_slots)

        stored = rows + int(ends.sum())  # a shifted entry has one more for each run
        for key, column in entries.items():
            if key in shifted:
                if len(column) != stored:
                    raise ValueError(
                        f"entry {key!r} has {len(column)} rows; {rows} rows in {int(ends.sum())} runs take "
                        f"{stored}"
                    )
                root, following = expand_compact(column, ends)
                put(key, root)
                put(next_key(key), following)
            elif key in moved:
                put(next_key(key), column)
                if COLUMNS not in names and plain_key(key) in self.done_keys:
                    put(key, torch.zeros_like(column))  # torchrl's form does not keep the root's flags
            else:
                place = key[1:] if key[0] == ROOT else key
                put(place, column)

        if out is None:
            return target
        return out

    def _ends(self, data: TensorDictBase, slots: int, lanes: int, shift: int, is_full: bool) -> Tensor:
        """The last rows of runs, bool ``[N]``, lane after lane in time order."""
        lengths = data.get(LENGTHS, None)
        if lengths is not None:
            if int(lengths.sum()) != slots * lanes or bool((lengths < 1).any()):
                raise ValueError(f"lengths of runs must be positive and sum to {slots * lanes} rows")
            ends = torch.zeros(slots * lanes, dtype=torch.bool, device=lengths.device)
            ends[lengths.cumsum(0) - 1] = True
            return ends

        done: Tensor = data.get(self.done_key)
        ends = done.reshape(lanes, slots).clone()
        newest = slots if is_full else shift
        ends[:, newest - 1] = True
        return ends.reshape(-1)

    def _kinds(
        self, data: TensorDictBase, entries: dict[Names, Tensor], rows: int
    ) -> tuple[set[Names], set[Names]]:
        """Return the keys of compact columns, and of columns under ``"next"`` in rows."""
        columns = data.get_non_tensor(COLUMNS, None)
        if columns is not None:
            kinds = json.loads(str(columns))
            found = tuple({tuple(map(str, key)) for key in kinds[kind]} for kind in ("shifted", "next"))
            missing = sorted((found[0] | found[1]) - set(entries))
            if missing:
                raise KeyError(f"the flat form lacks its entries {missing}")
            return found[0], found[1]

        named = self.done_keys | self.reward_keys
        shifted = {key for key, column in entries.items() if len(column) != rows}
        moved = {key for key in entries if plain_key(key) in named}
        return shifted, moved


def _ring_state(data: TensorDictBase, shift_key: str, is_full_key: str) -> tuple[torch.Size, int, bool]:
    """Shape of the rows, shift and fullness, as the flat form keeps them."""

    def kept(name: str) -> Any:
        value = data.get_non_tensor(name, None)
        if value is None:
            raise KeyError(f"the flat form has no entry {name!r}: is it one that TED2Flat returned?")
        return value

    shape = kept(SHAPE)
    if isinstance(shape, int):
        shape = [shape]
    sizes = torch.Size([int(size) for size in shape])
    shift = kept(shift_key)
    is_full = bool(kept(is_full_key))

    if not 0 <= int(shift) <= sizes[0]:
        raise ValueError(f"shift must be a slot from 0 to {sizes[0]}, got {shift}")
    return sizes, int(shift), is_full


def _memory(out: TensorDictBase, shape: torch.Size) -> TensorDictBase:
    """The first rows of ``out``, to be written."""
    if out.batch_size[0] < shape[0] or out.batch_size[1:] != shape[1:]:
        raise ValueError(f"out must have batch size {list(shape)} or more rows, got {list(out.batch_size)}")
    if out.batch_size == shape:
        return out
    return out[: shape[0]]


_RUN = "traj_"


class NestedRuns(TensorDict):
    """Nested tensors with one entry per run, ``[R]``; their state consists of plain tensors and values, the flat form.

    ``torch.load`` reads such a state with its default ``weights_only=True``, which takes nested tensors up to
    torch 2.14 only.

    >>> rows = {"action": torch.arange(3), "next": {"done": torch.tensor([False, True, False])}}
    >>> state = TED2Nested()(TensorDict(rows, [3])).state_dict()
    >>> state["action"], state["_lengths"]
    (tensor([0, 1, 2]), tensor([2, 1]))
    >>> Nested2TED()(TensorDict(state, []))["action"]
    tensor([0, 1, 2])
    """

    @classmethod
    def of(cls, flat: TensorDictBase) -> "NestedRuns":
        """Return the nested form of what `TED2Flat` returned; it shares its memory."""
        lengths = flat.get(LENGTHS)
        rows = int(lengths.sum())
        offsets = {extra: _offsets(lengths + extra) for extra in (0, 1)}

        nested = cls({}, [len(lengths)])
        for key, column in _entries(flat):
            if not isinstance(column, Tensor):
                nested.set_non_tensor(key, column)
            elif not column.ndim:  # a number of a state, which TensorDict converts
                nested.set_non_tensor(key, column.item())
            elif key == LENGTHS:
                nested.set(key, column)
            else:
                nested.set(key, torch.nested.nested_tensor_from_jagged(column, offsets[len(column) > rows]))
        return nested

    def flat(self) -> TensorDict:
        """Return the flat form, which shares the memory of the nested tensors."""
        flat = TensorDict({}, [])
        for key, value in _entries(self):
            if isinstance(value, Tensor):
                if value.is_nested:
                    value = nested_values(value)
                flat.set(key, value)
            else:
                flat.set_non_tensor(key, value)
        return flat

    @override
    def state_dict(self, *args: Any, **options: Any) -> OrderedDict[str, Any]:
        """Return the entries of the flat form, nested as they are; the arguments of ``TensorDict`` have no effect."""
        return OrderedDict(self.flat().to_dict())

    @override
    def load_state_dict(self, state_dict: OrderedDict[str, Any], *args: Any, **options: Any) -> "NestedRuns":
        """Replace the entries by those of a state; the other arguments of ``TensorDict`` have no effect."""
        loaded = NestedRuns.of(TensorDict(dict(state_dict), []))
        for key in list(self.keys()):
            self.pop(key)
        self.batch_size = loaded.batch_size  # type: ignore[has-type]  # tensordict's own
        self.update(loaded)
        return self


class TED2Nested(TED2Flat):
    """Convert rows to nested tensors with one entry per run, the nested form of `TED2Flat`.

    The result has batch size ``[R]``. An entry whose next value is the root value of the next row has one value more
    than its run has rows. The nested tensors (jagged layout) share the memory of the flat form; with ``path`` that is
    a folder of memory-mapped files, which both `Nested2TED` and `Flat2TED` read. To save the result with
    ``torch.save``, save its ``state_dict()``, which has the entries of the flat form, plain tensors: ``torch.load``
    reads it by default, and ``Nested2TED()(TensorDict(state, []))`` takes it.

    Args:
        done_key, shift_key, is_full_key, done_keys, reward_keys: as for `TED2Flat`.

    >>> rows = {"observation": torch.arange(3), "next": {"observation": torch.tensor([1, 9, 3])}}
    >>> rows["next"]["done"] = torch.tensor([False, True, False])
    >>> nested = TED2Nested()(TensorDict(rows, [3]))
    >>> [run.tolist() for run in nested["observation"].unbind()]
    [[0, 1, 9], [2, 3]]
    >>> Nested2TED()(nested)["next", "observation"]
    tensor([1, 9, 3])
    """

    def __call__(self, data: TensorDictBase, path: str | Path | None = None) -> TensorDict:
        """Convert rows ``[N]`` or ``[T, *B]``; arguments and errors as for `TED2Flat`."""
        return NestedRuns.of(super().__call__(data, path))


class Nested2TED(Flat2TED):
    """Convert what `TED2Nested` returned back to rows, bit for bit.

    Args:
        done_key, shift_key, is_full_key, done_keys, reward_keys: as for `Flat2TED`.
    """

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return rows ``[N]`` or ``[T, *B]``; arguments and errors as for `Flat2TED`."""
        flat = TensorDict({}, [])
        for key, value in _entries(data):
            if isinstance(value, Tensor):
                if value.is_nested:
                    value = nested_values(value)
                flat.set(key, value)
            else:
                flat.set_non_tensor(key, value)
        return super().__call__(flat, out)


class H5Split(TED2Flat):
    """Convert what `TED2Nested` returned to a folder for each run, ``traj_0``, ``traj_1``, ..., as views.

    Args:
        done_key, shift_key, is_full_key, done_keys, reward_keys: as for `TED2Flat`; none of them has an effect.

    >>> rows = {"action": torch.arange(3), "next": {"done": torch.tensor([False, True, False])}}
    >>> split = H5Split()(TED2Nested()(TensorDict(rows, [3])))
    >>> split["traj_0", "action"], split["traj_1", "action"]
    (tensor([0, 1]), tensor([2]))
    >>> Nested2TED()(H5Combine()(split))["action"]
    tensor([0, 1, 2])
    """

    def __call__(self, data: TensorDictBase, path: str | Path | None = None) -> TensorDict:
        """Split nested tensors ``[R]``; the result has batch size ``[]``, and names that sort in order of runs."""
        runs = data.batch_size[0]
        width = len(str(max(runs - 1, 0)))
        split = TensorDict({f"{_RUN}{number:0{width}}": TensorDict({}, []) for number in range(runs)}, [])
        folders = [split.get(f"{_RUN}{number:0{width}}") for number in range(runs)]

        for key, value in _entries(data):
            if not isinstance(value, Tensor):
                split.set_non_tensor(key, value)
                continue
            for folder, part in zip(folders, value.unbind(), strict=True):
                folder.set(key, part)
        return split


class H5Combine:
    """Combine the folders of `H5Split`, in memory or read from a file, into the nested tensors of `TED2Nested`."""

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDict:
        """Return nested tensors ``[R]``, copied.

        Args:
            data: folders ``traj_<number>``, and entries about the ring beside them.
            out: ignored.

        Raises:
            ValueError: there is no folder, or two of them hold different entries.
        """
        runs = (name for name in map(str, set(data.keys())) if name.startswith(_RUN))
        names = sorted(runs, key=lambda name: int(name.removeprefix(_RUN)))
        folders = [data.get(name) for name in names]

        if not folders:
            raise ValueError(
                f"data must have folders {_RUN}0, {_RUN}1, ..., got {sorted(map(str, data.keys()))}"
            )
        keys = list(folders[0].keys(True, True))
        for name, folder in zip(names, folders, strict=True):
            if set(folder.keys(True, True)) != set(keys):
                raise ValueError(f"{name} holds other entries than {names[0]}")

        combined = NestedRuns({}, [len(folders)])
        for key, value in _entries(data.exclude(*names)):
            combined.set_non_tensor(key, value)

        for key in keys:
            parts = [folder.get(key) for folder in folders]
            if parts[0].ndim == 0:
                combined.set(key, torch.stack(parts))
                continue
            lengths = torch.tensor([len(part) for part in parts])
            offsets = upload(_offsets(lengths), parts[0].device)
            combined.set(key, torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets))
        return combined


def _offsets(lengths: Tensor) -> Tensor:
    """Where runs of these lengths begin, and where the last one ends, int64 ``[R + 1]``."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _entries(data: TensorDictBase) -> Iterator[tuple[NestedKey, Any]]:
    """Iterate over entries with keys: tensors, and the values of non-tensor entries."""
    tensors = set(data.keys(True, True))
    for key in data.keys(True, True, is_leaf=is_entry):
        value = data.get(key) if key in tensors else None
        if not isinstance(value, Tensor):
            value = data.get_non_tensor(key)
        yield key, value

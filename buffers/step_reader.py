"""Reads the rows of a step writer by position, whether they are stored or wait to be stored."""

import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers.columns.column import Columns, put_rows, take_rows
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Array, Draw, Ring
from flatroll.buffers.step_copies import StepCopies
from flatroll.buffers.step_goals import StepTables, choose_places
from flatroll.buffers.step_rows import StagedColumn, StepPositions
from flatroll.buffers.storages.item_kinds import leaves, nest
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.transforms.transform import (
    Transform,
    TransformLike,
    apply,
    chooser_of,
    looks_ahead,
    read_others,
)
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, plain_key

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns


class Overwritten(IndexError):
    """Rows were overwritten by another writer before they were read."""


class Buffer(Protocol):
    """What a step writer uses of a `ReplayBuffer`."""

    storage: Storage
    writer: Any
    batch_size: int | None
    generator: torch.Generator | None
    ring: Ring
    markers: BoundaryKeys | None
    lock: threading.Lock
    write_lock: Any
    transforms: list[TransformLike]
    step_writers: Any

    def extend(self, data: Any) -> Tensor: ...


class StepReader:
    """The part of a `StepWriter` that reads. A row's place is the number step * E + env."""

    buffer: Buffer
    num_envs: int
    window: int
    steps: int
    _filled: int
    _lock: threading.Lock
    _staged: dict[NestedKey, StagedColumn]
    _given: dict[NestedKey, StagedColumn]
    _copies: dict[tuple[NestedKey, ...] | None, StepCopies]
    _tails: dict[tuple[NestedKey, ...] | None, "HostColumns[NestedKey]"]
    _positions: StepPositions

    def _store(self) -> None:
        """Store the waiting rows."""
        raise NotImplementedError

    def _mark(self, stop: int) -> None:
        """Fill in the markers of the first ``stop`` waiting steps."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of rows that can be read by position, stored or waiting."""
        with self._lock:
            return (self.steps - self._oldest()) * self.num_envs

    @property
    def oldest(self) -> int:
        """Number of the oldest step that can be read; all from there to ``steps - 1`` can."""
        with self._lock:
            return self._oldest()

    def _oldest(self) -> int:
        first = self._positions.oldest() if self._positions.ring is self.buffer.ring else None
        return self.steps - self._filled if first is None else first

    def read(self, steps: Any, envs: Any) -> TensorDict:
        """Return rows by position, stored or waiting, as ``buffer[...]`` would: transformed, not marked.

        n-step transforms look ahead into the waiting rows. A transform whose ``inv`` changes what is stored has the
        waiting rows stored first.

        Args:
            steps: numbers of steps, from :attr:`oldest` to ``steps - 1``: integers, an array or a tensor.
            envs: numbers of envs, from 0 to E - 1; the two are broadcast and give N rows.

        Raises:
            IndexError: no such step or env, or it was overwritten.
        """
        with self._lock:
            return self._rows(self._places(steps, envs))

    def read_columns(self, steps: Any, envs: Any, keys: Iterable[NestedKey] | None = None) -> Columns:
        """Return what :meth:`read` does as a plain dict of tensors by key, which takes less time.

        Args:
            steps, envs: as in :meth:`read`.
            keys: entries to read, default all; fewer take less time (with transforms all are read all the same).

        Raises:
            KeyError: there is no such entry.

        >>> import numpy as np
        >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        >>> writer = ReplayBuffer(storage=LazyTensorStorage(64)).writer_for(num_envs=2)
        >>> writer.write({"action": np.array([3, 4]), ("next", "done"): np.array([False, True])})
        >>> writer.read_columns(0, [1, 0], ["action", ("next", "done")])
        {'action': tensor([4, 3]), ('next', 'done'): tensor([[ True],
                [False]])}
        """
        names = None if keys is None else tuple(keys)
        if names is not None and names not in self._copies:
            names = tuple(map(plain_key, names))
        with self._lock:
            places = self._places(steps, envs)
            changed = self.buffer.transforms
            columns = leaves(self._rows(places)) if changed else self._take(places, names)
        if names is None:
            return columns
        if missing := [name for name in names if name not in columns]:
            raise KeyError(f"there is no entry {missing[0]!r} to read")
        return {name: columns[name] for name in names}

    def _places(self, steps: Any, envs: Any) -> Tensor:
        """The places step * E + env of rows that are there, int64 ``[N]``."""
        from flatroll.kernels.slices.steps import number_places  # numba

        step, env = steps, envs
        if not (is_plain(step) and is_plain(env) and step.shape == env.shape):
            step, env = (
                part if isinstance(part, np.ndarray) else torch.as_tensor(part).numpy(force=True)
                for part in (steps, envs)
            )
            if any(part.size and part.dtype.kind not in "iu" for part in (step, env)):
                raise TypeError(f"steps and envs are integers, got {step.dtype} and {env.dtype}")
            if step.shape != env.shape:
                step, env = np.broadcast_arrays(step, env)
            step, env = (np.ascontiguousarray(part, np.int64).reshape(-1) for part in (step, env))
        places: Array = np.empty(len(step), np.int64)
        oldest = self._oldest()
        if not number_places(step, env, self.num_envs, oldest, self.steps, places):
            first, last = int(step.min()), int(step.max())
            if first < oldest or last >= self.steps:
                raise IndexError(
                    f"steps {first} to {last} are asked for, {oldest} to {self.steps - 1} are there"
                )
            raise IndexError(f"envs are 0 to {self.num_envs - 1}, got {env.tolist()}")
        return torch.from_numpy(places)

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw rows of this writer uniformly, with replacement, the waiting ones among them; else as :meth:`read`.

        Args:
            batch_size: rows, default that of the buffer, whose generator draws them.

        Raises:
            RuntimeError: no step was written.
            ValueError: no batch size.
        """
        size = whole_number("batch_size", self.buffer.batch_size if batch_size is None else batch_size)
        with self._lock:
            while True:
                first, stop = self._oldest() * self.num_envs, self.steps * self.num_envs
                if first == stop:
                    raise RuntimeError("there is nothing to sample: write a step first")
                with self.buffer.lock:
                    places = torch.randint(first, stop, (size,), generator=self.buffer.generator)
                try:
                    return self._rows(places)
                except Overwritten:  # by another writer: of what is left, draw again
                    continue

    def _rows(self, places: Tensor) -> TensorDict:
        """The rows at these places, step * E + env, int64 ``[N]``, transformed."""
        transforms = self.buffer.transforms
        if self._filled and any(map(changes_stored, transforms)):
            self._store()
        values = self._take(places)
        n = max(map(looks_ahead, transforms), default=0)
        ahead = None
        if n and len(places):
            ahead = places[:, None] + torch.arange(n) * self.num_envs
            ahead.masked_fill_(ahead >= self.steps * self.num_envs, -1)
            marks = self._take(torch.where(ahead < 0, places[:, None], ahead).view(-1), (TRAJ_IDS, IS_INIT))
            ids, init = (marks[key].cpu().view(-1, n) for key in (TRAJ_IDS, IS_INIT))
            init[:, 0] = False  # a row that begins a trajectory may be the first of the n
            ahead[((ids != ids[:, :1]) | init | (ahead < 0)).cummax(1).values] = -1
        chosen = self._choose(places)
        read = None if chosen is None else partial(self._take_goals, values[TRAJ_IDS][chosen[0]])
        values = read_others(transforms, values, ahead, chosen, self._take, read)
        data: Any = nest(values, places.shape)
        for transform in transforms:
            data = apply(transform, data, partial(row_ends, places, self.num_envs))
        result: TensorDict = data
        return result

    def _choose(self, places: Tensor) -> Tensor | None:
        """What a transform chooses that reads other rows of the trajectories: int64 ``[2, M]``, which of the places,
        and the places of the rows; None without such a transform."""
        buffer = self.buffer
        chooser = chooser_of(buffer.transforms)
        if chooser is None:
            return None
        self._mark(self._filled)
        choose = partial(chooser.choose, generator=buffer.generator)
        kinds: dict[NestedKey, Any] = {IS_INIT: np.bool_, TRAJ_IDS: np.int64, DONE: np.bool_}
        marks: list[Array] = [
            self._staged[key].rows if self._filled else np.zeros((1, 1), kind) for key, kind in kinds.items()
        ]
        with buffer.lock:
            positions, ring = self._positions, buffer.ring
            oldest = positions.oldest() if positions.ring is ring else None
            begin = -1 if oldest is None else oldest
            tables = StepTables(*positions.windows, begin, self.steps - self._filled, self._filled, *marks)
            chosen = choose_places(places, self.num_envs, choose, tables, ring)
        if chosen is None:
            raise Overwritten("another writer has overwritten rows that goals are asked for")
        return chosen

    def _take_goals(self, ids: Tensor, places: Tensor, keys: Iterable[NestedKey]) -> Columns:
        """Copies of entries of the rows at these places, which have to be of the trajectories ``ids``."""
        rows = self._take(places, [*keys, TRAJ_IDS])
        if not torch.equal(rows.pop(TRAJ_IDS), ids):
            raise ValueError(
                f"an env came back to a {TRAJ_IDS!r} that it had left, so that its goals cannot be found by step: say "
                f"so with {IS_INIT!r} in the step in which it does, or give each episode an id of its own"
            )
        return rows

    def _take(self, places: Tensor, keys: Iterable[NestedKey] | None = None) -> Columns:
        """Copies of the entries ``keys`` (default: all) of the rows at these places; other threads may write to the
        buffer meanwhile."""
        buffer, storage, places = self.buffer, self.buffer.storage, places.cpu()
        names = None if keys is None else tuple(keys)
        stored = self.steps - self._filled
        copies = self._copies.get(names)
        if copies is None or not copies.still(storage):
            staged = {key: column.flat for key, column in self._staged.items()}
            copies = self._copies[names] = StepCopies(storage, staged, self._given, names)
        if copies.marks:
            self._mark(self._filled)
        if len(places) <= copies.rows:
            with buffer.lock:
                where = self._positions.stands(buffer.ring, stored, self.window)
                copied = copies.read(places, self.num_envs, where, buffer.ring)
            if copied is None:
                raise Overwritten("another writer has overwritten rows that are asked for")
            return copied
        asked = None if names is None else frozenset(names)
        while True:
            with buffer.lock:
                ring = buffer.ring
                version = ring.version  # first: other processes may write meanwhile
                found = self._positions.find(places, ring, stored, self.window)
                if found is None:
                    raise Overwritten("another writer has overwritten rows that are asked for")
                slots, (at, rows) = found
                if len(at) == len(places):
                    return self._waiting(rows, names)
                follow = ring.follow(slots) if storage.needs_follow(asked) else None
            columns: Columns = storage.read_rows(slots, follow, keys=asked)
            with buffer.lock:
                if ring is buffer.ring and ring.unchanged_since(Draw(slots, follow=follow, version=version)):
                    break
        if len(at):  # these were read as some stored row: replace them
            if storage.copies_bytes:
                self._tail(names).copy_into(columns, at, rows)
            else:
                for key, values in self._waiting(rows, names).items():
                    put_rows(columns[key], torch.from_numpy(at).to(values.device), values)
        return columns

    def _waiting(self, rows: Array, names: tuple[NestedKey, ...] | None) -> Columns:
        """Copies of waiting rows, env * L + step of each, on the storage's device."""
        tail, at = self._tail(names), torch.from_numpy(rows)
        columns = tail.take(at) or {key: take_rows(column, at) for key, column in tail.columns.items()}
        device = getattr(self.buffer.storage, "device", "cpu")
        return {key: values.to(device) for key, values in columns.items()}

    def _tail(self, names: tuple[NestedKey, ...] | None) -> "HostColumns[NestedKey]":
        """The waiting rows' entries of these names (default: all), ``[E * L, ...]``."""
        if names not in self._tails:
            from flatroll.kernels.rows.gather import HostColumns  # numba

            staged = self._staged
            keys = staged if names is None else [name for name in names if name in staged]
            self._tails[names] = HostColumns({key: staged[key].flat for key in keys})
        return self._tails[names]


def changes_stored(transform: TransformLike) -> bool:
    """Return whether ``transform`` has an ``inv`` that may change what is stored."""
    if not isinstance(transform, Transform):
        return hasattr(transform, "inv")
    return bool(transform.in_keys_inv) or type(transform).inv is not Transform.inv


def is_plain(numbers: Any) -> bool:
    """Return whether ``numbers`` are an int64 array ``[N]``, one next to the other."""
    return (
        type(numbers) is np.ndarray
        and numbers.dtype == np.int64
        and numbers.ndim == 1
        and numbers.flags.c_contiguous
    )


def row_ends(places: Tensor, num_envs: int) -> Tensor:
    """Return which rows the next one does not follow, bool ``[N]``, given their places step * num_envs + env.

    >>> row_ends(torch.tensor([0, 2, 4, 5]), num_envs=2)
    tensor([False, False,  True,  True])
    """
    ends = torch.ones(len(places), dtype=torch.bool)
    ends[:-1] = places[1:] != places[:-1] + num_envs
    return ends

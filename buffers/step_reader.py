"""Reads the rows of a step writer by position, whether they are stored or wait to be stored."""

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers.columns.base import Columns, put_rows
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Array, Ring
from flatroll.buffers.step_goals import StepTables, choose_places
from flatroll.buffers.step_rows import StagedColumn, StepPositions
from flatroll.buffers.storages.base import Storage
from flatroll.buffers.storages.item_kinds import nest
from flatroll.buffers.transforms.base import (
    Transform,
    TransformLike,
    apply,
    chooser_of,
    looks_ahead,
    read_others,
)
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey


class Overwritten(IndexError):
    """Rows were overwritten by another writer before they were read."""


class Buffer(Protocol):
    """What a step writer uses of a `ReplayBuffer`."""

    storage: Storage
    writer: Any
    batch_size: int | None
    generator: torch.Generator | None
    _ring: Ring
    _keys: BoundaryKeys | None
    _lock: threading.Lock
    _write_lock: Any
    _transforms: list[TransformLike]

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
    _positions: StepPositions

    def _store(self) -> None:
        """Store the waiting rows."""
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
        first = self._positions.oldest() if self._positions.ring is self.buffer._ring else None
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
        at = [torch.as_tensor(part).cpu() for part in (steps, envs)]
        if any(part.numel() and (part.is_floating_point() or part.dtype is torch.bool) for part in at):
            raise TypeError(f"steps and envs are integers, got {at[0].dtype} and {at[1].dtype}")
        shape = (at[0] + at[1]).shape  # of the two, broadcast
        step, env = (part.expand(shape).reshape(-1).long() for part in at)
        with self._lock:
            if env.numel():
                first, last = (int(n) for n in torch.aminmax(step))
                if first < self._oldest() or last >= self.steps:
                    raise IndexError(
                        f"steps {first} to {last} are asked for, {self._oldest()} to {self.steps - 1} are there"
                    )
                if int(env.min()) < 0 or int(env.max()) >= self.num_envs:
                    raise IndexError(f"envs are 0 to {self.num_envs - 1}, got {env.tolist()}")
            return self._rows(step * self.num_envs + env)

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
                with self.buffer._lock:
                    places = torch.randint(first, stop, (size,), generator=self.buffer.generator)
                try:
                    return self._rows(places)
                except Overwritten:  # by another writer: of what is left, draw again
                    continue

    def _rows(self, places: Tensor) -> TensorDict:
        """The rows at these places, step * E + env, int64 ``[N]``, transformed."""
        transforms = self.buffer._transforms
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
        chooser = chooser_of(buffer._transforms)
        if chooser is None:
            return None
        choose = partial(chooser.choose, generator=buffer.generator)
        kinds: dict[NestedKey, Any] = {IS_INIT: np.bool_, TRAJ_IDS: np.int64, DONE: np.bool_}
        marks: list[Array] = [
            self._staged[key].rows if self._filled else np.zeros((1, 1), kind) for key, kind in kinds.items()
        ]
        with buffer._lock:
            positions, ring = self._positions, buffer._ring
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
        """Copies of the entries ``keys`` (default: all) of the rows at these places."""
        places = places.cpu()
        steps, envs = places.div(self.num_envs, rounding_mode="floor"), places.remainder(self.num_envs)
        stored = self.steps - self._filled
        if len(places) and int(steps.max()) < stored:
            return self._stored(steps, envs, keys)
        offset = steps - stored
        waiting = (offset >= 0).nonzero().squeeze(1)
        names = self._staged if keys is None else keys
        rows = envs[waiting].mul_(self.window).add_(offset[waiting])
        tail = {key: self._staged[key].take(rows) for key in names}
        if len(waiting) == len(places):
            device = getattr(self.buffer.storage, "device", "cpu")
            return {key: values.to(device) for key, values in tail.items()}
        # Rows that wait are read as some stored row, then replaced.
        known = int((offset < 0).nonzero()[0])
        steps[waiting], envs[waiting] = steps[known].clone(), envs[known].clone()
        columns = self._stored(steps, envs, keys)
        for key, values in tail.items():
            put_rows(columns[key], waiting.to(columns[key].device), values.to(columns[key].device))
        return columns

    def _stored(self, steps: Tensor, envs: Tensor, keys: Iterable[NestedKey] | None) -> Columns:
        """Copies of stored rows; other threads may write meanwhile."""
        buffer, storage = self.buffer, self.buffer.storage
        numbers = self._positions.numbers(steps, envs)
        asked = None if keys is None else frozenset(keys)
        while True:
            with buffer._lock:
                ring = buffer._ring
                if ring is not self._positions.ring or int(numbers.min()) < ring.head:
                    raise Overwritten("another writer has overwritten rows that are asked for")
                draw = ring.draw_slots(numbers.remainder(ring.capacity), True, storage.compact_obs)
            values: Columns = storage.read_rows(draw.slots, draw.follow, keys=asked)
            with buffer._lock:
                if ring is buffer._ring and ring.unchanged_since(draw):
                    return values


def changes_stored(transform: TransformLike) -> bool:
    """Return whether ``transform`` has an ``inv`` that may change what is stored."""
    if not isinstance(transform, Transform):
        return hasattr(transform, "inv")
    return bool(transform.in_keys_inv) or type(transform).inv is not Transform.inv


def row_ends(places: Tensor, num_envs: int) -> Tensor:
    """Return which rows the next one does not follow, bool ``[N]``, given their places step * num_envs + env.

    >>> row_ends(torch.tensor([0, 2, 4, 5]), num_envs=2)
    tensor([False, False,  True,  True])
    """
    ends = torch.ones(len(places), dtype=torch.bool)
    ends[:-1] = places[1:] != places[:-1] + num_envs
    return ends

"""Statistics of a replay buffer for logging, and its state for saving and loading."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.checkpointers.links import checkpointer_of
from flatroll.buffers.checkpointers.plain_state import from_plain, to_plain
from flatroll.buffers.checkpointers.saveable import (
    Apply,
    Others,
    Saveable,
)
from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.sharing import Shareable
from flatroll.buffers.storages.saved_columns import other_capacity
from flatroll.buffers.transforms.transform import TransformLike, reads_others
from flatroll.buffers.writers import Writer
from flatroll.disk import LoadedVersion, Version
from flatroll.disk.checkpoint import SaveOptions, read_tree, tree_of
from flatroll.layout.checks import whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.specs import Composite, make_composite_from_td

_ENTRIES = {"storage", "ring", "keys", "sampler", "writer", "generator"}


class BufferState(Facts, Saveable, Shareable):
    """The part of `ReplayBuffer` that reports its statistics and saves and restores its state."""

    sampler: Sampler
    writer: Writer
    _keys: BoundaryKeys | None
    _started: bool
    _transforms: list[TransformLike]
    batch_size: int | None

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def spec(self) -> Composite:
        """The shapes and dtypes of its rows, as they are read: a spec of shape ``(-1,)``; RuntimeError if empty."""
        if not len(self):
            raise RuntimeError("an empty buffer has no spec yet: extend it first")
        buffer: Any = self
        row: Any = make_composite_from_td(buffer[:1], unsqueeze_null_shapes=False)[0]
        return row.expand(-1)  # type: ignore[no-any-return]

    def oldest_first(self) -> Any:
        """Return all stored rows in the order in which they were written, as ``buffer[:]`` gives them in that of the
        slots: what `extend` of another buffer takes.

        >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> slots = buffer.extend(torch.tensor([0, 1])), buffer.extend(torch.tensor([2, 3]))
        >>> buffer[:], buffer.oldest_first()
        (tensor([3, 1, 2]), tensor([1, 2, 3]))
        """
        buffer: Any = self
        lanes = self.storage.lanes.numel()
        with self._lock:
            slots = self._ring.stored()
        return buffer[slots[::lanes] // lanes]  # slot = step * lanes + lane

    def __repr__(self) -> str:
        name, kind, sampler = (type(part).__name__ for part in (self, self.storage, self.sampler))
        return f"{name}({len(self)} of {self._ring.capacity} rows, {kind}, {sampler})"

    def _facts(self) -> dict[str, Any]:
        """What a notebook shows: the statistics, and the parts with their options."""
        parts = {"storage": self.storage, "sampler": self.sampler, "writer": type(self.writer).__name__}
        transforms = ", ".join(map(repr, self._transforms)) or None
        facts = {**self.stats(), **parts, "transforms": transforms, "batch_size": self.batch_size}
        rows = f"{facts.pop('rows'):,} of {facts.pop('capacity'):,}"
        unknown = {name for name in ("bytes", "bytes_per_row", "bytes_saved") if not facts[name]}
        shown = {name: facts[name] for name in facts if facts[name] is not None and name not in unknown}
        return {"": f"{rows} rows"} | {n: f"{f:,}" if isinstance(f, int) else f for n, f in shown.items()}

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index; None before the first extend, or if no part of the buffer needs one."""
        return self._ring if isinstance(self._ring, TrajectoryIndex) else None

    def _needs_index(self) -> str | None:
        """Name of what needs a trajectory index (for errors); None for nothing."""
        if self.sampler.needs_index:
            return type(self.sampler).__name__
        ahead = (type(transform).__name__ for transform in self._transforms if reads_others(transform))
        return next(ahead, "compact_obs=True" if self.storage.compact_obs else None)

    def _unshareable_part(self, ring: Ring) -> str | None:
        """Name of the component whose state other processes cannot see (for the error); None if the buffer can be
        shared: the rows, if they are in files, and the counters of a plain ring can be put where others see them."""
        if isinstance(ring, TrajectoryIndex):
            return "a trajectory index"
        names = [type(part).__name__ for part in (self.sampler, self.writer) if part.stateful]
        if type(ring) is not Ring:
            names.append(type(ring).__name__)
        name = next(iter(names), self.storage.own_column)
        return None if name is None else f"a {name}"

    def stats(self) -> dict[str, int]:
        """Return statistics to log: rows, capacity, rows ever written, bytes and, with an index, its counts.

        ``bytes`` are those of the storage and the index, ``bytes_saved`` what ``compact_obs``, ``frame_stack`` and
        ``codec`` save of it.
        """
        storage = self.storage
        with self._lock:
            ring = self._ring
            numbers = {
                "rows": len(ring),
                "capacity": ring.capacity,
                "rows_written": ring.written,
                "bytes_per_row": storage.bytes_per_row,
                "bytes": storage.nbytes,
                "bytes_saved": storage.bytes_saved,
                **storage.counts(),
            }
            if isinstance(ring, TrajectoryIndex):
                numbers["bytes"] += ring.nbytes
                numbers["trajectories"] = ring.trajectories
                numbers["open_trajectories"] = ring.open_trajectories
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the buffer, prefetched samples included, for :meth:`load_state_dict`.

        It owns its memory, and goes through ``torch.save`` and ``torch.load(..., weights_only=False)``. Transforms
        are not in it.
        """
        self._after_fork()
        ahead = self._made_ahead()
        with self._write_lock, self._lock:
            rows = self.storage.state_dict(self._ring.used, self._pool_rows)
            return {**self._tables(ahead), "storage": rows}

    def _made_ahead(self) -> list[Any]:
        """Copies of the samples made ahead; waits for those that are being made."""
        return [] if self._prefetcher is None else copy.deepcopy(self._prefetcher.results())

    @property
    def _pool_rows(self) -> int:
        return self._ring.pool_size if isinstance(self._ring, TrajectoryIndex) else 0

    def _tables(self, ahead: list[Any]) -> dict[str, Any]:
        """The state without the rows; ``ahead`` are samples made ahead. The caller holds both locks."""
        return {
            "storage": self.storage.tables(self._pool_rows),
            "ring": self._ring.state_dict() if self._started else None,
            "keys": self._keys,
            "sampler": self.sampler.state_dict(),
            "writer": self.writer.state_dict(),
            "generator": None if self.generator is None else self.generator.get_state(),
            "ahead": ahead,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore rows and random state from a :meth:`state_dict`, so that the same samples follow.

        Rows stored before are gone. Trajectories that were open are cut: rows written from now on do not continue
        them, since the envs that wrote them are not in the state. A state that does not fit changes nothing.

        Args:
            state: of a buffer with a storage, a sampler and a writer made with the same arguments; the storage may
                be in memory here and in files there. Samples made ahead are taken over if both buffers prefetch.

        Raises:
            ValueError: a storage of another capacity, kind or other entries; no trajectory index where one is
                needed; a generator on one side only; a damaged state, such as one whose columns, counters, tables or
                priorities do not fit together.
            MemoryError, OSError: the storage had no rows yet, and they do not fit in memory or on the disk.
        """
        self._after_fork()
        if self._prefetcher is not None:
            self._prefetcher.wait()  # its threads read the rows that are about to be overwritten
        with self._write_lock, self._lock:
            ring = self._check_state(state)
            ahead = copy.deepcopy(state.get("ahead", []))
            # Sampler and writer go first, since a user's own can refuse; the rows cannot be brought back.
            before = self.sampler.state_dict(), self.writer.state_dict()
            try:
                if state["ring"] is None:
                    self.sampler.emptied()
                self.sampler.load_state_dict(state["sampler"])
                self.writer.load_state_dict(state["writer"])
                if state["ring"] is None:
                    self._count_by(ring)
                else:
                    self._load_rows(ring, state)
            except BaseException:
                self.sampler.load_state_dict(before[0])
                self.writer.load_state_dict(before[1])
                if not len(self._ring):  # interrupted while rows were copied
                    self.sampler.emptied()
                raise
            if self.generator is not None:
                self.generator.set_state(state["generator"])
            if self._prefetcher is not None:
                self._prefetcher.replace(ahead)

    def _note_edit(self, slots: Tensor) -> None:
        """Let the next save write the rows in ``slots`` again. The caller holds the lock of writers."""
        for log in self._saves.logs.values():
            log.edited(self._ring.numbers(slots, self._ring.head))

    @override
    def save_version(self, path: Path, others: Others, options: SaveOptions) -> Version:
        self._after_fork()
        self._store_steps()
        return self._saves.log(path).save(self, lambda state: tree_of(to_plain(state), others), options)

    @override
    def _checkpointers(self) -> list[Any]:
        return [checkpointer_of(self.storage)]

    @override
    def load_version(self, path: Path, number: int | None, strict: bool) -> tuple[dict[str, Any], Apply]:
        checkpointer = checkpointer_of(self.storage)
        checkpointer.check_path(self.storage, path)

        def read(version: LoadedVersion) -> tuple[dict[str, Any], dict[str, Any], Version]:
            tree = read_tree(version, self.storage.max_size)
            state = from_plain(tree["buffer"])
            with self._write_lock, self._lock:
                ring = self._saved_ring(state)
            if state["ring"] is not None:
                tables = state["storage"]
                state["storage"] = checkpointer.restore_version(self.storage, tables, version, ring)
            return tree["others"], state, version.version

        def apply() -> None:
            self.load_state_dict(state)
            self._saves.log(path).note(version, self._ring)

        try:
            others, state, version = checkpointer.load_with(path, read, number, strict)
            with self._write_lock, self._lock:
                self._check_state(state)
        except (LookupError, TypeError, AttributeError) as error:
            raise damaged(f"its tables lack something, or hold something else ({error!r})") from error
        return others, apply

    def _check_state(self, state: dict[str, Any]) -> Ring:
        """The ring that will count the rows of ``state``; an error if any part of it cannot be loaded. The caller
        holds both locks, and nothing changes."""
        if missing := _ENTRIES - set(state):
            raise ValueError(
                f"state is none of a ReplayBuffer: it lacks {sorted(missing)}, and has {sorted(state)}"
            )
        check_generator(state["generator"], self.generator, "buffer")
        for made in state.get("ahead", []):
            if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[1], dict)):
                raise damaged("its samples made ahead are none")
        keys = state["keys"]
        if not isinstance(keys, BoundaryKeys | None):
            raise damaged(f"its markers are named by {type(keys).__name__}")
        ring = self._saved_ring(state)
        if state["ring"] is not None:
            self.storage.check_state_dict(state["storage"], ring)
        self.sampler.check_state_dict(state["sampler"], ring)
        return ring

    def _saved_ring(self, state: dict[str, Any]) -> Ring:
        """The ring that will count the rows of ``state``; an error if it is none for this buffer."""
        if state["ring"] is None:
            return self._empty_ring()
        needs_index = self._needs_index()
        if needs_index is not None and state["keys"] is None:
            raise ValueError(
                f"the state was saved without a trajectory index, which {needs_index} needs: load it into a buffer "
                "like the saved one, and extend this buffer with other.oldest_first()"
            )
        capacity = whole_number("capacity", state["ring"]["capacity"])
        if capacity > self.storage.max_size:  # before tables of that size are made
            raise other_capacity(capacity, self.storage.max_size)
        ring = self.writer.ring(capacity, state["keys"] is not None)
        ring.load_state_dict(state["ring"])
        self.storage.check_tables(state["storage"], ring)
        return ring

    def _empty_ring(self) -> Ring:
        """A ring for the rows after all that were written: the next one takes slot 0."""
        ring, capacity = self._ring, self._ring.capacity
        # That row has a number that no row had: written, rounded up to whole rounds.
        return self.writer.ring(capacity, self.index is not None, -(-ring.written // capacity) * capacity)

    def _count_by(self, ring: Ring) -> None:
        """Let ``ring`` count the rows, in other processes too."""
        self._ring = ring
        if self._started:
            self.storage.use_ring(ring, self._unshareable_part(ring))

    def _load_rows(self, ring: Ring, state: dict[str, Any]) -> None:
        """Copy the rows of ``state`` into the storage, and let ``ring`` count them."""
        first = not self._started
        if first:
            self._own_parts()
        if self._started and not self.storage.loads_whole:
            # Nobody reads a mixture of old and new rows, in other processes neither.
            self._count_by(self.writer.ring(ring.capacity, state["keys"] is not None))
        self.storage.load_state_dict(state["storage"])
        self.storage.use_ring(ring, self._unshareable_part(ring), first)
        self._ring, self._keys, self._started = ring, state["keys"], True


def check_generator(saved: Any, generator: torch.Generator | None, whose: str) -> None:
    """Raise ValueError unless the state ``saved`` of a generator (None: there was none) fits ``generator``."""
    if (saved is None) != (generator is None):
        raise ValueError(
            f"the state was saved with a generator and this {whose} has none, or the other way round: give "
            f"{'ReplayBuffer' if whose == 'buffer' else 'ReplayBufferEnsemble'}(generator=torch.Generator()) on both "
            "sides to draw the same rows"
        )
    if saved is not None:
        try:
            torch.Generator().set_state(saved)  # of one that is thrown away
        except (RuntimeError, TypeError) as error:
            raise damaged(f"its generator cannot be restored ({error})") from None

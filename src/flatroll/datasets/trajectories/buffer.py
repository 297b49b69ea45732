"""A replay buffer of whole trajectories, whose rows are files of a folder."""

import json
import os
import tempfile
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.buffers import DiskStorage, ReplayBuffer, Sampler, SliceSampler
from flatroll.datasets.folders import remove_folder
from flatroll.datasets.trajectories.rlinf_folder import INDEX, METADATA
from flatroll.datasets.trajectories.rows import (
    DONE,
    LANE,
    TrajectoryRecord,
    as_fields,
    from_trajectories,
    trajectory_fields,
)
from flatroll.datasets.trajectories.saving import RankSave, discard, stage
from flatroll.datasets.trajectories.sources import (
    LOADING,
    NOTES,
    OwnFolder,
    SavedTrajectories,
    State,
    is_loading,
    restore,
    share,
)
from flatroll.disk import Version, files
from flatroll.layout.checks import check_choice, check_flags, check_path, check_type, check_whole_number
from flatroll.layout.keys import NestedKey

_WITHOUT_END = 2**40  # capacity of a buffer without a limit


class TrajectoryCache:
    """A FIFO cache of trajectories by number.

    Args:
        max_size: number of trajectories. Default 5.

    >>> cache = TrajectoryCache(max_size=1)
    >>> cache.put(0, {"rewards": 1}), cache.put(1, {"rewards": 2})
    (None, None)
    >>> cache.get(0), cache.get(1), len(cache)
    (None, {'rewards': 2}, 1)
    """

    def __init__(self, max_size: int = 5) -> None:
        self.max_size = check_whole_number("max_size", max_size)
        self._trajectories: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._trajectories)

    def get(self, trajectory_id: int) -> dict[str, Any] | None:
        """Return the fields of a trajectory, or None."""
        return self._trajectories.get(trajectory_id)

    def put(self, trajectory_id: int, trajectory: dict[str, Any]) -> None:
        """Add a trajectory, dropping the oldest one if there are too many."""
        self._trajectories[trajectory_id] = trajectory
        while len(self._trajectories) > self.max_size:
            self._trajectories.popitem(last=False)

    def clear(self) -> None:
        """Remove all."""
        self._trajectories.clear()


class RowBuffer(ReplayBuffer):
    """The rows of a `TrajectoryReplayBuffer`, to be sampled and read. Only that buffer stores and removes rows, as it
    keeps a record of each trajectory; the methods of `ReplayBuffer` that would do so raise RuntimeError.
    """

    def store(self, rows: TensorDictBase) -> None:
        """Store the rows of whole trajectories."""
        super().extend(rows)

    def forget(self) -> None:
        """Remove all rows."""
        super().empty()

    @override
    def extend(self, data: Any, final: Any = None, *, update_priority: bool | None = None) -> NoReturn:
        raise _write_error("extend", "add_trajectories")

    @override
    def empty(self) -> NoReturn:
        raise _write_error("empty", "clear")

    @override
    def load_version(self, path: Path, number: int | None, strict: bool) -> NoReturn:
        raise _write_error("loads", "load_checkpoint (of what save_checkpoint wrote)")

    @override
    def load_state_dict(self, state: dict[str, Any]) -> NoReturn:
        raise _write_error("load_state_dict", "load_checkpoint (of what save_checkpoint wrote)")


def _write_error(what: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would change rows without updating the trajectories of the TrajectoryReplayBuffer: call its "
        f"{instead}"
    )


class TrajectoryReplayBuffer:
    """Keeps trajectories ``[T, B, ...]`` and draws single steps of the latest ones; names and arguments are RLinf's.

    Trajectories are added whole, and laid out as rows, lane by lane. The rows are files that are written once
    (`DiskStorage`), so there may be more than the memory holds, and they outlive a crash. A thread writes them; its
    error comes with the next call that adds or saves. All trajectories have the same fields.

    Args:
        seed: of the draws, which come from a generator of the buffer's own. Default 1234.
        enable_cache: keep trajectories that :meth:`trajectory` has read in memory. Default True. Samples do not need
            it: the system keeps in memory what is used of the files.
        cache_size: how many. Default 5.
        sample_window_size: draw from this many latest trajectories, 0 for all. Default 100.
        auto_save: keep the rows in ``auto_save_path``, where a later run finds them. Default False: in a temporary
            folder, which goes with the buffer.
        auto_save_path: a folder, new or of an earlier run, whose trajectories then are there.
        trajectory_format: which files of RLinf's folders `load_checkpoint` reads, ``"pt"`` (default) or ``"pkl"``.
            What is written here always is the form of `flatroll.disk`.
        allow_pickle: accept ``"pkl"`` files, which can run arbitrary code. Default False.
        max_size: most rows; the oldest trajectories go. Default: all stay.
        sampler: of :attr:`buffer`, for priorities, say. One of slices needs
            ``traj_key=TrajectoryReplayBuffer.traj_key`` and ``end_key=TrajectoryReplayBuffer.end_key``.
        storage_options: further arguments of `DiskStorage`, such as ``flush_seconds``.

    Attributes:
        buffer: the `ReplayBuffer` of the rows, for slices and priorities; it refuses to store or remove rows.

    Raises:
        ValueError: ``auto_save`` without a path, an unknown format, ``"pkl"`` without ``allow_pickle``.
        BlockingIOError: another process keeps its rows in ``auto_save_path``.

    >>> buffer = TrajectoryReplayBuffer(sample_window_size=10)
    >>> buffer.add_trajectories([{"rewards": torch.arange(6.0).view(3, 2)} for _ in range(4)])
    >>> len(buffer), buffer.total_samples, buffer.sample(num_chunks=5)["rewards"].shape
    (4, 24, torch.Size([5]))
    >>> buffer.sample_slices(2, slice_len=3)["rewards"].view(2, 3).diff().tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    >>> buffer.close()
    """

    traj_key: NestedKey = LANE
    end_key: NestedKey = DONE

    def __init__(
        self,
        seed: int = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | os.PathLike[str] = "",
        trajectory_format: str = "pt",
        *,
        allow_pickle: bool = False,
        max_size: int | None = None,
        sampler: Sampler | None = None,
        **storage_options: Any,
    ) -> None:
        check_type("allow_pickle", allow_pickle, bool, "True or False")
        if check_choice("trajectory_format", trajectory_format, ("pt", "pkl")) == "pkl" and not allow_pickle:
            raise ValueError(
                'trajectory_format="pkl" reads files that can run code chosen by their author: pass '
                'allow_pickle=True for files that you trust; "pt" runs none'
            )
        check_flags(auto_save=auto_save, enable_cache=enable_cache)
        if auto_save and not str(auto_save_path):
            raise ValueError("auto_save_path must name a folder if auto_save=True")

        self.sample_window_size = check_whole_number("sample_window_size", sample_window_size, 0)
        self._cache = TrajectoryCache(check_whole_number("cache_size", cache_size)) if enable_cache else None
        self.trajectory_format = trajectory_format
        self.seed = check_whole_number("seed", seed, -(2**63))
        self._generator = torch.Generator().manual_seed(self.seed)

        # Without a maximum size, slots equal row numbers and never wrap around.
        size = _WITHOUT_END
        if max_size is not None:
            size = check_whole_number("max_size", max_size)

        if sampler is None:
            sampler = SliceSampler(slice_len=1, traj_key=LANE, end_key=DONE)

        if auto_save:
            path = auto_save_path
        else:
            path = tempfile.mkdtemp(prefix="flatroll-")

        options = {"sync": auto_save, **storage_options}
        self._sync = bool(options["sync"])
        self.storage = DiskStorage(size, path, **options)

        # In place of the storage's own finalizer, which would write into a removed folder.
        self._discard = None
        if not auto_save:
            self._discard = weakref.finalize(self, discard, self.storage.close_once, path, os.getpid())

        self._turn = threading.RLock()
        self._closed = False

        #: Trajectories, oldest first, each with the number of its first row in the ring.
        self._records: deque[tuple[int, TrajectoryRecord]] = deque()
        self._counter = 0
        #: The versions of several ranks that this buffer saved or loaded last, by folder.
        self._versions: dict[Path, Version] = {}

        try:
            self.buffer = RowBuffer(storage=self.storage, sampler=sampler, generator=self._generator)
            self._find_records()
        except BaseException:
            self.storage.close()
            raise

    # -- writing ---------------------------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Sequence[Any]) -> None:
        """Add trajectories; if one is invalid, add none.

        Args:
            trajectories: mappings or dataclasses with fields ``[T, B, ...]`` (flags of ``dones``, ``terminations`` and
                ``truncations`` may have one more step, the first), nested ones too; tensordicts ``[T, B]``; or flat
                batches ``[N]``, in which each run is a trajectory. Entries, dtypes and shapes of a row must be the same
                in all. ``max_episode_length`` and ``model_weights_id`` are recorded; fields that are None are left out.

        Raises:
            TypeError: a field is not a tensor.
            KeyError: a flat batch has no mark of its runs.
            ValueError: entries that differ, within the call or from those before; fields that are not ``[T, B, ...]``.
            OSError: the disk is full or failed, perhaps while an earlier call's rows were written: no row of these is
                lost, and the next call writes them.
        """
        with self._turn:
            self._check_open()
            rows, records = from_trajectories(trajectories, self._counter)
            if rows is None:
                return

            if len(rows) > (most := self.storage.max_size):
                raise ValueError(
                    f"{len(rows)} rows at once are more than max_size={most}. Nothing was stored"
                )

            first = self.buffer.ring.written
            self.buffer.store(rows)
            self._note_records(records, first)

    def _note_records(self, records: Sequence[TrajectoryRecord], first: int) -> None:
        """Know of trajectories that were stored from the row ``first`` on, and no more of those that had to go."""
        for record in records:
            if not record.uuid:
                record = record._replace(uuid=uuid4().hex)
            self._records.append((first, record))
            first += record.rows
            self._counter = max(self._counter, record.number + 1)

        head = self.buffer.ring.head
        while self._records and self._records[0][0] < head:  # the ring has dropped its first rows
            self._records.popleft()

    def clear(self) -> None:
        """Remove all trajectories. Numbering continues, so that no old file is taken for a new one.

        Raises:
            OSError: the disk is full or failed: the folder may still have them; another call removes them.
        """
        with self._turn:
            self._check_open()
            self._records.clear()
            self.clear_cache()
            if self.storage.allocated:
                # Published along with the version that has no rows.
                self.storage.note({NOTES: self._state([])})
                self.buffer.forget()

    def flush(self) -> None:
        """Return when all rows are in files; OSError if the disk is full or failed."""
        self._check_open()
        self.storage.flush()

    def close(self, wait: bool = True) -> None:
        """Write remaining rows and release the folder; remove a temporary one.

        Trajectories can be drawn and read afterwards, too.

        Args:
            wait: taken for the sake of scripts that give it; the rows are always written.

        Raises:
            OSError: the disk is full or failed: the buffer stays open, and another call tries again.
        """
        with self._turn:
            if self._closed:
                return
            if self._discard is None:
                self.storage.save(self.storage.path, {NOTES: self._state([r for _, r in self._records])})
                self._write_index(Path(self.storage.path))
                self.storage.close()
            else:
                self._discard()
            self._closed = True

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self._records)

    @property
    def total_samples(self) -> int:
        """Number of rows of all trajectories."""
        with self._turn:
            if self._records:
                return self.buffer.ring.written - self._records[0][0]
            return 0

    def sample(self, num_chunks: int = 0) -> dict[str, Any]:
        """Draw rows uniformly, with replacement, from the latest ``sample_window_size`` trajectories.

        Args:
            num_chunks: number of rows, also if fewer are stored.

        Returns:
            the fields as they were given, ``[num_chunks, ...]``, nested ones in dicts.

        Raises:
            RuntimeError: no trajectory is stored.
        """
        check_whole_number("num_chunks", num_chunks)
        with self._turn:
            self._check_not_empty()
            window = check_whole_number("sample_window_size", self.sample_window_size, 0) or len(
                self._records
            )
            low = self._records[max(0, len(self._records) - window)][0]
            rows = torch.randint(low, self.buffer.ring.written, (num_chunks,), generator=self._generator)
            return as_fields(self.buffer[rows % self.buffer.ring.capacity])

    def sample_slices(self, num_slices: int, slice_len: int, *, strict: bool = True) -> dict[str, Any]:
        """Draw slices of consecutive rows of one lane and one episode, from all trajectories.

        Args:
            num_slices: how many slices.
            slice_len: rows of each.
            strict: draw only from episodes that are long enough. Default True; if False, shorter ones are returned
                whole.

        Returns:
            the fields, ``[num_slices * slice_len, ...]``, slice after slice.

        Raises:
            RuntimeError: no episode is long enough, or the buffer's ``sampler`` keeps no index of trajectories.
        """
        with self._turn:
            self._check_not_empty()
            index = self.buffer.index
            if index is None:
                raise RuntimeError(
                    "slices need an index of trajectories, which this sampler does not keep: use a SliceSampler"
                )
            check_flags(strict=strict)
            draw = index.draw(
                check_whole_number("num_slices", num_slices),
                check_whole_number("slice_len", slice_len),
                strict=strict,
                generator=self._generator,
            )
            return as_fields(self.buffer[draw.slots])

    def trajectory(self, trajectory_id: int) -> dict[str, Any]:
        """Return a whole trajectory, its fields ``[T, B, ...]``; KeyError if it is not stored.

        While it is in the cache, the same tensors are returned: clone what you want to change.
        """
        check_whole_number("trajectory_id", trajectory_id, 0)
        with self._turn:
            first, record = next((one for one in self._records if one[1].number == trajectory_id), (0, None))

            if record is None:
                ids = self.trajectory_ids
                there = f"those from {ids[0]} to {ids[-1]}" if ids else "none"
                raise KeyError(f"trajectory {trajectory_id} is not stored; trajectory_ids has {there}")

            kept = None
            if self._cache is not None:
                kept = self._cache.get(trajectory_id)
            if kept is not None:
                return kept

            slots = torch.arange(first, first + record.rows) % self.buffer.ring.capacity
            fields = trajectory_fields(self.buffer[slots], record)
            if self._cache is not None:
                self._cache.put(trajectory_id, fields)
            return fields

    @property
    def trajectory_ids(self) -> list[int]:
        """Numbers of the trajectories, oldest first; numbers are not reused."""
        with self._turn:
            return [record.number for _, record in self._records]

    @property
    def trajectory_counter(self) -> int:
        """Number of the next trajectory: the count of trajectories added so far, including removed ones."""
        return self._counter

    @property
    def trajectory_index(self) -> dict[int, dict[str, Any]]:
        """The record of each trajectory by number, in the form of RLinf's index: uuid, rows, ``[T, B]``, notes."""
        with self._turn:
            return {record.number: record.index_entry() for _, record in self._records}

    def clear_cache(self) -> None:
        """Forget the trajectories that are kept in memory; those in files stay."""
        if self._cache is not None:
            self._cache.clear()

    def is_ready(self, min_size: int) -> bool:
        """Whether there are at least ``min_size`` trajectories."""
        return self.size >= check_whole_number("min_size", min_size, 0)

    async def is_ready_async(self, min_size: int) -> bool:
        """As :meth:`is_ready`, to be awaited."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int | float]:
        """Return numbers to log: trajectories, rows, trajectories in memory, rows that no file holds yet, bytes."""
        stats = self.buffer.stats()
        cached = 0 if self._cache is None else len(self._cache)
        return {
            "num_trajectories": self.size,
            "total_samples": self.total_samples,
            "cache_size": cached,
            "rows_unflushed": stats["rows_unflushed"],
            "bytes": stats["bytes"],
        }

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_path: str | os.PathLike[str],
        *,
        local_rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], Any] | None = None,
    ) -> None:
        """Save trajectories and generator to a folder, atomically.

        No row is written a second time: the files get another name in the folder. ``auto_save_path`` will do, too.
        Other programs find the trajectories in ``trajectory_index.json`` and ``metadata.json``, of RLinf's form.

        Args:
            save_path: the folder.
            local_rank: rank of this process, from 0 on.
            world_size: number of ranks that save together. Default 1.
            barrier: required for several ranks; returns once all ranks have called it, like
                ``torch.distributed.barrier``.

        Raises:
            ValueError: several ranks without a ``barrier``, or ``local_rank`` is out of range.
            FileExistsError: the folder has data that this buffer has neither saved nor loaded.
            OSError: the disk is full or failed.
            RuntimeError: another rank failed to save; the previous checkpoint is intact.
        """
        share([1] * check_whole_number("world_size", world_size), local_rank, world_size)  # checks the rank
        if world_size > 1 and barrier is None:
            raise ValueError("several ranks need a barrier, such as torch.distributed.barrier")
        path = check_path("save_path", save_path)

        with self._turn:
            self._check_open()
            state = {NOTES: self._state([record for _, record in self._records])}

            if self._records:
                first = self._records[0][0]
            else:
                first = self.buffer.ring.written

            if world_size == 1 or barrier is None:
                self.storage.save(path, state, first=first)
                self._write_index(path)
                return

            ranks = RankSave(path, local_rank, world_size, barrier, self._versions.get(path.resolve()))
            self._versions[path.resolve()] = ranks.save(
                lambda own: self.storage.save(own, state, overwrite=True, first=first)
            )
            self._write_index(ranks.own)

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Replace the trajectories with those of a checkpoint, or with its latest ones that fit into ``max_size``.

        If it is damaged, nothing changes. With ``auto_save``, a crash leaves either the old trajectories or the new
        ones: the rows are first copied to a folder ``loading`` beside the old ones.

        Args:
            load_path: a folder written by :meth:`save_checkpoint` (with any number of ranks), the ``auto_save_path`` of
                a run (its own one restores everything, including the generator), or a folder written by RLinf.
            is_distributed: load one share: consecutive whole trajectories with about as many rows as the other ranks'
                shares. Only the files of the share are read.
            local_rank: number of the share, from 0 on.
            world_size: number of shares.

        Raises:
            FileNotFoundError: there is no checkpoint, or one of its files is missing.
            ValueError: there are more ranks than trajectories, ``local_rank`` is out of range, fields differ from the
                stored ones, or files are damaged.
            OSError: the disk is full or failed.
        """
        if is_distributed:
            share(
                [1] * check_whole_number("world_size", world_size), local_rank, world_size
            )  # checks the rank

        path = Path(load_path)
        with self._turn:
            self._check_open()

            if path.resolve() == Path(self.storage.path).resolve():
                if is_distributed and world_size > 1:
                    raise ValueError(f"{path} is this buffer's own folder: load it into another buffer")
                self._restore_own()
                return

            checkpoint = SavedTrajectories(path, self.trajectory_format == "pkl")
            if is_distributed:
                checkpoint.take_share(local_rank, world_size)
            checkpoint.take_last(self.storage.max_size)

            # Check everything before anything changes.
            checkpoint.check({key: (c.dtype, c.shape) for key, c in self.storage.columns.items()})

            if self._discard is None:
                stage(checkpoint, Path(self.storage.path), sync=self._sync)
                self._load_staged()
            else:
                self._replace(checkpoint)

            if checkpoint.version is not None and checkpoint.is_whole:
                # A buffer may overwrite a checkpoint that it has loaded.
                self._versions[path.resolve()] = checkpoint.version
                self.storage.may_replace(path, checkpoint.version)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(
                "the buffer is closed: create another one, and load a checkpoint or pass the same "
                "auto_save_path"
            )

    def _check_not_empty(self) -> None:
        if not self._records:
            raise RuntimeError("cannot sample from an empty buffer: call add_trajectories first")

    def _state(self, records: list[TrajectoryRecord]) -> Any:
        """The state of the buffer besides the rows stored so far, for JSON."""
        digits = bytes(self._generator.get_state().tolist()).hex()
        end = self.storage.row_offset + self.buffer.ring.written
        return State(records, self._counter, digits, end).to_json()

    def _write_index(self, folder: Path) -> None:
        """Write RLinf's index and metadata of what was saved, for other programs: nothing is read back from them."""
        index = self.trajectory_index
        metadata = {
            "trajectory_format": self.trajectory_format,
            "size": self.size,
            "total_samples": self.total_samples,
            "trajectory_counter": self.trajectory_counter,
            "seed": self.seed,
        }

        for name, facts in (
            (INDEX, {"trajectory_index": index, "trajectory_id_list": list(index)}),
            (METADATA, metadata),
        ):
            with suppress(FileNotFoundError):  # left by a process that died
                files.remove(folder / f"{name}{files.TEMPORARY}")
            files.publish(folder, name, [json.dumps(facts).encode()], synced=self._sync)

    def _replace(self, checkpoint: SavedTrajectories) -> None:
        """Replace the trajectories by those of a checkpoint."""
        checkpoint.take_last(self.storage.max_size)
        self.clear()
        first = self.buffer.ring.written
        try:
            # The first rows may belong to a trajectory that began earlier.
            for rows, records in checkpoint.read():
                self.buffer.store(rows)
                self._note_records(records, first)
                first += sum(record.rows for record in records)
        except OSError:
            self.clear()
            raise

        self._counter = max(self._counter, checkpoint.counter)
        if checkpoint.generator:
            restore(self._generator, checkpoint.generator)

    def _load_staged(self) -> None:
        """Load what was staged in the folder; nothing of it counts before, and all of it after a crash."""
        folder = Path(self.storage.path)
        self._replace(SavedTrajectories(folder, pickled=False))
        self.storage.flush()
        remove_folder(folder / LOADING)

    def _restore_own(self) -> None:
        """Restore the generator as it was saved with the rows that are there."""
        state = OwnFolder(Path(self.storage.path), None).state
        if (
            state is not None
            and state.generator
            and state.end == self.storage.row_offset + self.buffer.ring.written
        ):
            restore(self._generator, state.generator)

    def _find_records(self) -> None:
        """Find the trajectories of an earlier run in the folder."""
        folder = Path(self.storage.path)
        if is_loading(folder):
            self._load_staged()
            return

        remove_folder(folder / LOADING)
        found = OwnFolder(folder, None)
        self._counter = found.counter
        self._note_records(found.records, found.first - self.storage.row_offset)

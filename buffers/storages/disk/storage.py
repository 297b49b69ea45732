"""A storage in files: larger than memory, and crash-safe."""

import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import After, Column, Columns, RowForm, put_rows
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Draw, Follow, Ring
from flatroll.buffers.index.saved_tables import check_rows, damaged
from flatroll.buffers.index.top_k_ring import RankedRing
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.storages.column_storage import ColumnStorage
from flatroll.buffers.storages.disk.column import DiskColumn, no_edits_error
from flatroll.buffers.storages.disk.forms import Form, FrameForm, ZstdForm
from flatroll.buffers.storages.disk.layout import Layout, columns_differ
from flatroll.buffers.storages.disk.log import FlushRule, RowLog
from flatroll.buffers.storages.disk.pieces import Piece
from flatroll.buffers.storages.item_kinds import TensorDicts
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.buffers.storages.records import Links, Rows
from flatroll.buffers.storages.tensors import Encodings
from flatroll.disk import Folder, LoadedVersion, Ragged, Segment, Version, column_name
from flatroll.disk.segments import MOST_ROWS
from flatroll.disk.tensor_file import dtype_name
from flatroll.layout.checks import check_flags, check_number, check_whole_number
from flatroll.layout.keys import NestedKey

_PARTS = 32  # minimum number of files of a full storage: the oldest also holds dropped rows


class LinkedRows(NamedTuple):
    """Checked rows of a version in another folder, which will become the rows of a storage.

    Args:
        head: number of the first row, in names of files.
        end: number of the row after the last.
        offset: number of a row, less its number in the ring of the buffer.
        layout: what they are.
        segments: the files.
    """

    head: int
    end: int
    offset: int
    layout: Layout
    segments: tuple[Segment, ...]


class DiskStorage(ColumnStorage):
    """Stores rows in immutable files: more rows than fit in memory, which survive the process.

    New rows are buffered in memory; a thread atomically publishes them as a file once there are enough, or according
    to ``flush_rows`` and ``flush_seconds``. Rows are read from memory-mapped files through the system's page cache;
    missing pages of a sample are requested all at once. The oldest file is removed once all its rows are overwritten.
    ``stats()["rows_unflushed"]`` is the number of rows that a crash would lose.

    If the folder has rows, the buffer starts with them and continues after them. Trajectories open at the end of the
    last run are cut; priorities, sampler passes and generators are reset. ``buffer.dumps`` and `Checkpoint` also save
    these, without rewriting rows: see `DiskStorageCheckpointer`. Rows cannot be changed (``buffer[i] = …``), and only
    tensordicts can be stored.

    Args:
        max_size: number of rows. Default: as many as the folder has. If smaller, only the newest rows are kept, and
            the others are removed from the folder at the next write.
        path: the folder; a new one or one of `DiskStorage`.
        compact_obs: as in `LazyTensorStorage`. The last next observation of each trajectory stays in memory, too.
        frame_stack: as in `LazyTensorStorage`; rows in memory have whole stacks.
        codec: compression by key, ``{"observation": "zstd"}``: 8 rows in a block. Needs the extra ``zstd``.
        flush_rows: publish rows once this many are buffered. Default: a full file.
        flush_seconds: publish rows this long after the first buffered one. Default: no limit.
        read_only: read the folder's current rows without writing; other processes may write to it.
        sync: :meth:`flush` syncs to disk, safe from a power loss. If False, flushed rows survive only the end of the
            process. Default True.
        segment_bytes: bytes of rows per file, buffered in memory. Default 64 MiB.
        verify: read all rows once and verify their checksums. Default False: only headers are verified.

    Raises:
        DamagedFileError: with ``verify``, rows are damaged or lost; the message names the files. Load a checkpoint or
            another copy; without ``verify`` the folder opens anyway.
        BlockingIOError: another process or storage writes to the folder.
        FileNotFoundError: with ``read_only``, the folder does not exist.
        ValueError: the folder has other files, options differ from those of its rows, or a number is below 1.
        OSError: at an extend or :meth:`flush`, the disk is full or failed. No row is lost: the next call tries again.

    >>> import tempfile
    >>> from flatroll.buffers import ReplayBuffer
    >>> folder = tempfile.TemporaryDirectory()
    >>> storage = DiskStorage(1000, folder.name)
    >>> buffer = ReplayBuffer(storage=storage)
    >>> rows = buffer.extend(TensorDict({"reward": torch.arange(5.0)}, [5]))
    >>> storage.close()
    >>> ReplayBuffer(storage=DiskStorage(path=folder.name, read_only=True))[:]["reward"]
    tensor([0., 1., 2., 3., 4.])
    >>> folder.cleanup()
    """

    frame_stack: Mapping[NestedKey, int]
    codec: Mapping[NestedKey, str]

    def __init__(
        self,
        max_size: int | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        compact_obs: bool = False,
        frame_stack: Mapping[NestedKey, int] | None = None,
        codec: Mapping[NestedKey, str] | None = None,
        flush_rows: int | None = None,
        flush_seconds: float | None = None,
        read_only: bool = False,
        sync: bool = True,
        segment_bytes: int = 64 << 20,
        verify: bool = False,
    ) -> None:
        if path is None:
            raise ValueError("path must name the folder of the rows: DiskStorage(max_size, path)")

        parts = None
        if max_size is not None:
            check_whole_number("max_size", max_size)
            parts = -(-max_size // _PARTS)
        if flush_rows is not None:
            check_whole_number("flush_rows", flush_rows)
        if flush_seconds is not None:
            hint = "None for no limit"
            check_number("flush_seconds", flush_seconds, above=0, most=threading.TIMEOUT_MAX, hint=hint)
        check_flags(read_only=read_only, sync=sync, verify=verify)

        self.read_only = read_only
        self._process = os.getpid()
        folder = Folder(path, write=not read_only, sync=sync, segment_bytes=segment_bytes, segment_rows=parts)
        try:
            rows = folder.recover(verify=verify)
            super().__init__(max_size or len(rows) or 1, compact_obs=compact_obs)

            # A storage of this size would use less than twice the space of its rows.
            if not read_only and len(rows) >= 2 * self.max_size:
                warnings.warn(
                    f"{path} holds {len(rows)} rows, more than max_size={max_size}: this storage reads the "
                    "newest ones, and the first write removes the others from the folder. Pass a larger "
                    "max_size to keep them",
                    stacklevel=2,
                )

            layout = self._read_layout(folder)
            self._choose_forms(layout, frame_stack, codec, compact_obs)
            if max_size is None and not len(rows) and not read_only:
                raise ValueError(f"max_size must be given for a new folder, {path} has no rows")

            self._log = RowLog(folder, FlushRule(flush_rows, flush_seconds), self.max_size, layout)
        except BaseException as error:
            folder.close()
            if isinstance(error, ValueError) and str(folder.path) not in str(error):
                error.add_note(f"while {folder.path} was opened")
            raise

        self._closing = weakref.finalize(self, _close, self._log, read_only, os.getpid())
        self._ring: Ring | None = None
        self._offset = 0  # a row's number in the folder minus its number in the ring
        # While the buffer registers stored rows: their piece, and the number of the first one.
        self._batch: tuple[Piece, int] | None = None
        self.compiled = True
        self.loads_whole = True
        if layout is not None:
            self._use_layout(layout)

    # -- the folder ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The folder."""
        return str(self._log.folder.path)

    def save(
        self,
        path: str | os.PathLike[str],
        notes: dict[str, Any] | None = None,
        *,
        overwrite: bool = False,
        first: int | None = None,
    ) -> None:
        """Save the rows to another folder, which a `DiskStorage` can open: no row is written, the files get a second
        name there (copies are made on another disk).

        Args:
            path: of the folder; the storage's own will do for the ``notes``.
            notes: anything for JSON to save along.
            overwrite: replace what others have saved to the folder, default False.
            first: number of the first row to save, as the ring counts them. Default: the oldest one.

        Raises:
            FileExistsError: the folder holds what this storage has not saved there.
            BlockingIOError: it is being written to.
            OSError: the disk is full or failed; earlier saves are intact.
        """
        self._writable()
        if first is None:
            first = 0 if self._ring is None else self._ring.head
        self._log.save(Path(path), self._offset + first, notes or {}, overwrite)

    @property
    def row_offset(self) -> int:
        """Number of a row in the folder, less its number in the ring of the buffer."""
        return self._offset

    def note(self, notes: dict[str, Any]) -> None:
        """Save ``notes``, anything for JSON, along with the next version of the folder."""
        self._log.notes = notes

    def may_replace(self, path: Path, version: Version) -> None:
        """Allow :meth:`save` to replace this loaded version of another folder."""
        self._log.saved[path.resolve()] = version

    def _writable(self) -> None:
        if self.read_only:
            raise RuntimeError(f"{self.path} is open for reading only: DiskStorage(max_size, path) writes")
        self.enter_process()

    def flush(self) -> None:
        """Write all rows to files; OSError if the disk is full or failed, without losing rows."""
        self._writable()
        self._log.flush()

    def close(self) -> None:
        """Flush and release the folder; rows can still be read. Called at normal exit."""
        _close(self._log, self.read_only, self._process)
        # Only on success: after an error another call, or the end of the process, tries again.
        self._closing.detach()

    def close_once(self) -> None:
        """As :meth:`close`, for a folder that is removed with the storage: an error is not retried."""
        self._closing()

    @override
    def counts(self) -> dict[str, int]:
        return {"rows_unflushed": self._log.unflushed}

    @property
    @override
    def nbytes(self) -> int:
        nbytes: int = self._log.folder.stats()["bytes"]
        if self.pool is not None:
            nbytes += sum(column.nbytes for column in self.pool.entries.values())
        return nbytes

    @property
    @override
    def bytes_saved(self) -> int:
        return 0

    @property
    @override
    def bytes_per_row(self) -> int:
        stats = self._log.folder.stats()
        if stats["rows"]:
            return stats["bytes"] // stats["rows"]
        return super().bytes_per_row

    def _read_layout(self, folder: Folder) -> Layout | None:
        """What the folder notes of its rows; None if it is new."""
        if folder.version is None:
            if len(folder.segments):
                if folder.versions():
                    folder.load()  # no version is whole: raises an error that says why
                raise ValueError(
                    f"{folder.path} is not the folder of a DiskStorage: it has rows, but no description of them"
                )
            return None

        noted = folder.load().json
        try:
            layout = Layout.from_json(noted)
        except ValueError as error:
            raise ValueError(f"{folder.path}: {error}") from None

        folder.recover()  # adds the rows written after that version
        wrong = columns_differ(folder.columns, layout)
        if wrong:
            raise ValueError(f"{folder.path}: {wrong}")
        return layout

    def _choose_forms(
        self,
        layout: Layout | None,
        frame_stack: Mapping[NestedKey, int] | None,
        codec: Mapping[NestedKey, str] | None,
        compact_obs: bool,
    ) -> None:
        """Take the options that were given, or those of the rows that are there; ValueError if they differ."""
        self._encodings = Encodings(frame_stack, codec)
        self.frame_stack = self._encodings.frame_stack
        self.codec = self._encodings.codec
        both = [key for key in self.frame_stack if key in self.codec]
        if both:
            raise ValueError(
                f"frame_stack and codec both name {both[0]!r}: use one of them on disk; codec alone also "
                "detects frames that rows share"
            )

        if layout is None:
            return

        stacks = {key: form.shape[0] for key, form in layout.forms.items() if form.name == "frames"}
        codecs = {key: form.name for key, form in layout.forms.items() if form.name == "zstd"}
        for name, given, asked, there in (
            ("frame_stack", frame_stack, self.frame_stack, stacks),
            ("codec", codec, self.codec, codecs),
        ):
            if given and {key: asked[key] for key in asked if key in layout.forms} != there:
                raise ValueError(
                    f"{name} must match the rows in the folder, {there or None}, or be left out; got "
                    f"{dict(given)}"
                )

        if compact_obs and not layout.pairs:
            raise ValueError("compact_obs must be False: the rows in the folder are not compact")
        self.frame_stack = stacks
        self.codec = codecs
        self.compact_obs = bool(layout.pairs)

    def _use_layout(self, layout: Layout) -> None:
        """Know the columns."""
        self.columns = {key: self._column(key, form) for key, form in layout.forms.items()}
        self.structure = TensorDicts(torch.Size([]))
        if layout.pairs:
            self.pool = NextPool(layout.pairs)
            self.pool.allocate(self.columns)

    def _form(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Form:
        """The form that the options give an entry."""
        if key in self.frame_stack:
            return FrameForm(dtype, shape)
        if key in self.codec:
            return ZstdForm(dtype, shape)
        return Form(dtype, shape)

    def _column(self, key: NestedKey, form: Form) -> DiskColumn:
        return DiskColumn(weakref.WeakMethod(self._take), key, form)

    # -- for the buffer --------------------------------------------------------------------------------------------

    @override
    def fill(self, write: Callable[[TensorDictBase, None], Any]) -> None:
        """Register the folder's rows with the buffer, and cut the trajectories open at their end."""
        self.check_free()
        if not self.read_only and self._log.unflushed:
            self._writable()
            self._log.settle()  # rows of a buffer that no longer exists

        layout = self._log.layout
        pieces = self._log.pieces
        self._offset = self._log.end
        if layout is None or not len(pieces):
            return

        self._use_layout(layout)
        self.filling = True
        first = max(int(pieces.firsts[0]), self._log.folder.head, pieces.end - self.capacity)
        self._offset = first
        try:
            for piece in pieces.pieces:
                # Cut at the seams, where one run's trajectories were left open and the next run began.
                seams = [seam for seam in layout.seams if piece.first < seam < piece.end]
                bounds = [piece.first, *seams, piece.end]

                for low, high in itertools.pairwise(bounds):
                    if low in layout.seams:
                        self._cut()
                    if high > first:
                        self._batch = piece, max(low, first)
                        write(self._read_plain_columns(piece, max(low, first), high), None)
        finally:
            self.filling = False
            self._batch = None

        self._cut()
        if not self.read_only:
            self._log.cut(pieces.end)

    def _cut(self) -> None:
        """No row written from now on continues a trajectory that is stored."""
        if isinstance(self._ring, TrajectoryIndex):
            self._ring.load_state_dict(self._ring.state_dict())

    def _read_plain_columns(self, piece: Piece, low: int, high: int) -> TensorDict:
        """Return a file's rows of the columns that need no decoding."""
        plain = {
            key: column[low - piece.first : high - piece.first]
            for key, column in piece.columns.items()
            if isinstance(column, Tensor)
        }
        return TensorDict(dict(plain), [high - low])

    @override
    def prepare(
        self, batch: Any, final: TensorDictBase | None, keys: BoundaryKeys | None, whole: bool = False
    ) -> Rows:
        if self.filling:
            return self._prepare_stored(batch, keys)

        self._writable()
        self._log.check()
        if not isinstance(batch, TensorDictBase) or batch.batch_dims != 1:
            raise TypeError(
                f"DiskStorage keeps the rows of tensordicts [N], got {type(batch).__name__}: wrap what you have in "
                "TensorDict({'value': x}, [len(x)])"
            )

        rows = super().prepare(batch, final, keys, whole)
        layout = self._log.layout
        if self.pool is not None and layout is not None and not layout.pairs:
            layout.pairs.extend(self.pool.pairs)
        return rows

    def _prepare_stored(self, batch: TensorDict, keys: BoundaryKeys | None) -> Rows:
        """Rows of the folder, as `prepare` gives new ones."""
        assert self._batch is not None
        piece, first = self._batch
        columns: Columns = dict(batch.items(True, True))
        count = batch.batch_size[0]

        if self.pool is None:
            fragments = None
            if keys is not None:
                fragments = Fragments.read(columns, keys)
            return Rows(count, columns, fragments)

        tails: Columns = {}
        cuts = torch.zeros(count, dtype=torch.bool)
        assert piece.segment is not None
        for key, name in self.pool.next_keys.items():
            column = piece.segment.columns[column_name(name)]
            form = self._forms[key]
            if (
                not isinstance(column, Ragged)
                or int(column.lengths.max()) > 1
                or column.values.shape[1:] != form.shape
                or column.values.dtype is not form.dtype
            ):
                raise ValueError(f"{piece.segment.name}: {name!r} has no next observations")

            low = first - piece.first
            counts = column.lengths[low : low + count]
            cuts = counts > 0
            begin = int(column.lengths[:low].sum())
            tails[key] = column.values[begin : begin + int(counts.sum())]

        fragments = Fragments.read(columns, keys or BoundaryKeys.probe(batch), cuts)
        ends = {len(values) for values in tails.values()} | {len(fragments.lasts)}
        if len(ends) > 1 or not np.array_equal(fragments.lasts, np.flatnonzero(cuts.numpy())):
            raise ValueError(f"{piece.segment.name}: a trajectory ends without its next observation")

        return Rows(count, columns, fragments, tails)

    @property
    def _forms(self) -> dict[NestedKey, Form]:
        layout = self._log.layout
        if layout is None:
            return {}
        return layout.forms

    @override
    def link(self, ring: Ring, rows: Rows, keys: BoundaryKeys | None) -> Links | None:
        if not self.filling:
            return super().link(ring, rows, keys)
        if not isinstance(ring, TrajectoryIndex) or rows.fragments is None:
            return None

        before, slots, agree = ring.link(rows.fragments)[0]
        if self.pool is not None and self._batch is not None:
            # Compare the first row of each fragment with the next observation of the row before it.
            heads = self._log.pieces.read(self._batch[1] + rows.fragments.firsts, self.pool.pairs)
            at = rows.fragments._replace(firsts=np.arange(len(rows.fragments.firsts)))
            agree = self.pool.compare_heads(ring, at, before, heads, rows.tails, [])
        return Links(before, slots, agree)

    @override
    def check_removable(self) -> None:
        self._writable()

    @override
    def use_ring(self, ring: Ring, alone: str | None, first: bool = False) -> None:
        if isinstance(ring, RankedRing):
            raise TypeError(
                "DiskStorage keeps rows in the order in which they came: use RoundRobinWriter, or LazyMemmapStorage "
                "for the best rows"
            )

        super().use_ring(ring, alone, first)
        self._ring = ring
        if not first and not len(ring):  # the buffer has been emptied
            self._writable()
            # The folder counts on, although the ring skips the rest of a round.
            self._offset = self._log.end - ring.head
            self._log.empty(self._log.end)

    @override
    def write(self, slot: int, rows: Rows, after: After | None = None) -> None:
        # The ring's next row. If Ctrl-C interrupted a write, the ring has not counted the last rows of the log.
        first = self._log.end - (self._log.end - self._offset - slot) % self.capacity
        if rows.fragments is None or not rows.tails:
            lasts = np.zeros(0, np.int64)
        else:
            lasts = rows.fragments.lasts
        self._log.append(rows.columns, lasts, rows.tails, first)

    @override
    def put(self, slots: Tensor, rows: Rows, at: Tensor | None = None) -> None:
        raise no_edits_error()

    @override
    def write_drawn(self, draw: Draw, data: Any, shape: torch.Size, keys: BoundaryKeys | None) -> None:
        raise no_edits_error()

    @override
    def read_rows(
        self,
        slots: Tensor,
        follow: Follow | None = None,
        *,
        keys: frozenset[NestedKey] | None = None,
    ) -> Columns:
        if follow is None or self.pool is None:
            if self.pool is not None and self.needs_follow(keys):
                return super().read_rows(slots, follow, keys=keys)  # raises an error
            return self._take(slots, keys)

        names = self.pool.next_keys
        pairs = [key for key, name in names.items() if keys is None or name in keys]
        others = [key for key in self.columns if key not in pairs and (keys is None or key in keys)]

        # Read the rows and their next rows together, so that rows in both are decoded only once.
        following = torch.where(follow.slots < 0, slots, follow.slots)
        both = self._take(torch.cat([slots, following]), set(pairs))
        columns = self._take(slots, others)

        for key in pairs:
            rows = both[key][: len(slots)]
            later = both[key][len(slots) :]
            if follow.patch.shape[1]:
                at, entries = follow.patch
                put_rows(later, at, self.pool.entries[key].take(entries))
            columns[names[key]] = later
            if keys is None or key in keys:
                columns[key] = rows
        return columns

    def _take(self, slots: Tensor, keys: Collection[NestedKey] | None) -> Columns:
        """Return copies of the newest rows in these slots."""
        pieces = self._log.pieces  # read before the end: these pieces may not include a piece added later
        end = min(self._log.end, pieces.end)
        rows = end - 1 - (end - 1 - self._offset - slots.numpy(force=True)) % self.capacity

        # A slot claimed by the buffer may have no row yet; values read from it are discarded.
        if not len(pieces):
            return {
                key: torch.zeros((len(slots), *column.shape), dtype=column.dtype)
                for key, column in self.columns.items()
                if keys is None or key in keys
            }
        return pieces.read(np.clip(rows, pieces.firsts[0], end - 1), keys)

    @override
    def _allocate(self, like: RowForm) -> dict[NestedKey, Column]:
        self._encodings.row_bytes(like)  # raises if they are invalid

        forms: dict[NestedKey, Form] = {}
        for key, (dtype, shape) in like.items():
            dtype_name(dtype)  # raises TypeError here and not on the writer thread
            forms[key] = self._form(key, dtype, shape)

        self._log.layout = Layout(forms, [], [])
        return {key: self._column(key, form) for key, form in forms.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which the rows' files do not change; writers wait while it is being entered."""
        return self._log.held()

    def linkable(self, head: int) -> tuple[list[Segment], int]:
        """Return the files that contain the rows from the ring's ``head`` to the last row present when the files were
        `held`, and the number of the first row."""
        first = self._offset + head
        return self._log.held_segments(first, write=not self.read_only), first

    @override
    def tables(self, pool_rows: int) -> dict[str, Any]:
        layout = self._log.layout
        noted = None if layout is None else layout.to_json()
        log = {"offset": self._offset, "layout": noted}
        return super().tables(pool_rows) | {"log": log}

    def linked(self, tables: dict[str, Any], version: LoadedVersion, ring: Ring) -> dict[str, Any]:
        """Return the state of :attr:`tables` with the rows of ``version``, which ``ring`` counts; they are read once
        and checked, a file at a time, and nothing changes.

        Raises:
            DamagedFileError: a file is damaged.
            ValueError: the rows do not match the tables, or the tables the storage.
        """
        self.columns_like(tables)
        log = tables["log"]
        offset = log["offset"]
        noted = log["layout"]
        # offset is negative if the ring skipped the rest of a round and the files did not.
        if type(offset) is not int or not 0 <= offset + ring.head <= offset + ring.written < MOST_ROWS:
            raise damaged(f"its rows are shifted by {offset!r}")

        try:
            layout = Layout.from_json(noted)
        except ValueError as error:
            raise damaged(f"its rows are of an unknown form ({error})") from None

        noted_forms = {key: (form.dtype, form.shape) for key, form in layout.forms.items()}
        expected = {key: self._form(key, *kind) for key, kind in tables["like"].items()}
        if noted_forms != dict(tables["like"]) or set(layout.pairs) != set(tables["pool"]):
            raise damaged("its rows have other entries than its description lists")
        wrong = [key for key, form in layout.forms.items() if form.name != expected[key].name]
        if wrong:
            raise damaged(f"its entry {wrong[0]!r} has another form than its description says")

        head = offset + ring.head
        end = offset + ring.written
        check_rows((head, end), (version.head, version.end))
        text = columns_differ(version.columns, layout)
        if text:
            raise damaged(text)

        for segment in version.segments:
            segment.read()
            Piece.of(segment, layout.forms)

        rows = LinkedRows(head, end, offset, layout, version.segments)
        return {**tables, "columns": dict.fromkeys(layout.forms), "rows": rows}

    @override
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        super().check_state_dict(state, ring)
        rows = state.get("rows")
        if not isinstance(rows, LinkedRows):
            self.state_dict(0)
        elif self.read_only and not self._log.has(rows.segments, rows.head, rows.end):
            raise ValueError(
                f"{self.path} is open for reading only, and does not have the rows of the checkpoint: open the "
                "folder that it was saved from, or create DiskStorage(max_size, path) in another folder"
            )

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows: LinkedRows = state["rows"]
        if not self.read_only:
            self._writable()
            self._log.load(rows.segments, rows.layout, rows.head, rows.end)

        self._offset = rows.offset
        self._use_layout(rows.layout)

        if self.pool is not None:
            self.known = None
            for key, column in self.pool.entries.items():
                column.load_state_dict(state["pool"][key])

    @override
    def _blank_column(self, key: NestedKey, dtype: torch.dtype, shape: torch.Size) -> Column:
        return self._column(key, self._form(key, dtype, shape))

    @override
    def state_dict(self, rows: int, pool_rows: int = 0) -> NoReturn:
        raise RuntimeError(
            "the rows of a DiskStorage stay in its folder: save the buffer with buffer.dumps(path) or "
            f"Checkpoint, which write no row twice; DiskStorage(max_size, {self.path!r}) opens the rows, "
            "storage.save(path) copies them"
        )

    # -- processes -------------------------------------------------------------------------------------------------

    @override
    def enter_process(self) -> None:
        if self._process != os.getpid() and not self.read_only:
            raise RuntimeError(
                f"another process writes to {self.path}: open it here with DiskStorage(path=..., read_only=True)"
            )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a DiskStorage cannot be used in another process: open {self.path} there with "
            "DiskStorage(path=..., read_only=True)"
        )


def _close(log: RowLog, read_only: bool, process: int) -> None:
    if process != os.getpid():  # a fork inherits the finalizer, but not the folder
        return

    if read_only:
        log.folder.close()
    else:
        log.close_later()

"""`convert`: writes rows of any source to a folder of segments, atomically."""

import errno
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers import ReplayBuffer
from flatroll.buffers.columns.column import Columns, differ, put_rows, take_rows
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.storages.continuity import find_pairs, state_pairs
from flatroll.buffers.storages.disk.forms import Form, FrameForm, ZstdForm
from flatroll.buffers.storages.disk.layout import Layout
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.buffers.storages.tensors import Encodings
from flatroll.datasets.progress import progress_bar
from flatroll.disk import Folder, Ragged, column_name, files
from flatroll.disk.folder import Listing
from flatroll.disk.manifest import manifest_name
from flatroll.layout import checks
from flatroll.layout.export import Array
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, next_key, plain_key
from flatroll.layout.tensordict_seam import leaves

#: Rows accepted by `convert`: a flat batch, its tensors by key, or arrays by key or dotted name.
Batch: TypeAlias = TensorDictBase | Columns | Mapping[str, Array] | Mapping[tuple[str, ...], Array]
# Number of rows compared to see whether next observations are those of the next row.
_ROWS_LOOKED_AT = 1024
SEGMENT_BYTES = 32 << 20


class RowPiece(NamedTuple):
    """Consecutive rows ``[N]``.

    Attributes:
        columns: ``[N, ...]`` by key, without the next entries that follow from ``tails``.
        ends: int64 ``[E]``, ascending: the rows whose next entry may differ from the root entry of the next row; the
            last of them is row N - 1. Empty without ``tails``.
        tails: next entries of these rows ``[E, ...]``, by root key.
    """

    columns: Columns
    ends: Tensor = torch.empty(0, dtype=torch.int64)
    tails: Mapping[NestedKey, Tensor] = {}

    def cuts(self) -> Tensor:
        """Return where the next entry differs from the root entry of the row after; bool ``[N]``."""
        cut = torch.zeros(int(self.ends[-1]) + 1, dtype=torch.bool)
        inner = self.ends[:-1]
        for key, tails in self.tails.items():
            cut[inner] |= differ(tails[:-1], take_rows(self.columns[key], inner + 1))
        return cut

    def following(self, rows: Tensor) -> Columns:
        """Return the next entries ``[M, ...]`` of ``rows`` (int64 ``[M]``, ascending) by root key."""
        last = int(self.ends[-1])
        # Index in `ends` of each row that it contains.
        places = torch.searchsorted(self.ends, rows)
        known = (self.ends[places] == rows).nonzero().squeeze(-1)
        found: Columns = {}
        for key, tails in self.tails.items():
            found[key] = take_rows(self.columns[key], (rows + 1).clamp_(max=last))
            put_rows(found[key], known, take_rows(tails, places[known]))
        return found

    def whole(self) -> "RowPiece":
        """Return the piece with all next entries in its columns."""
        if not self.tails:
            return self
        following = self.following(torch.arange(int(self.ends[-1]) + 1))
        return RowPiece({**self.columns, **{next_key(key): values for key, values in following.items()}})


def gather(batches: Iterable[Batch], piece_bytes: int) -> Iterator[RowPiece]:
    """Yield the rows of all batches in pieces of ``piece_bytes`` (the last one may be smaller).

    A piece is valid until the next one is asked for, whose rows take its memory.

    Raises:
        ValueError: a batch is not flat, or differs from the first one in entries, shapes or dtypes.
        TypeError: an entry is not of numbers or bools.
    """
    memory: _PieceMemory | None = None
    names: dict[NestedKey, NestedKey] = {}

    for number, batch in enumerate(batches):
        columns = _by_key(batch, names, number)

        counts = {value.shape[:1] for value in columns.values()}
        if len(counts) > 1 or () in counts:
            shapes = {key: list(value.shape) for key, value in columns.items()}
            raise ValueError(
                f"batch {number} must have columns with the same number of rows, got shapes {shapes}"
            )

        count = next(iter(counts), (0,))[0]
        memory = memory or _PieceMemory(columns, piece_bytes)
        memory.check(columns, number)

        first = 0
        while first < count:
            first = memory.fill(columns, first, count)
            if memory.used == memory.rows:
                yield memory.piece()

    if memory is not None and memory.used:
        yield memory.piece()


class _PieceMemory:
    """Memory of one piece, which is filled again and again: pages that are new each time cost more than the copies."""

    def __init__(self, like: Mapping[NestedKey, Tensor | Array], piece_bytes: int) -> None:
        self.kinds = {key: (value.dtype, value.shape[1:]) for key, value in like.items()}

        # as tensors, so that `columns` has torch's dtypes
        rows = {key: _tensor(value[:0]) for key, value in like.items()}
        self.roots = state_pairs(rows)

        # Whether the next entries of all batches so far are views of the root entries, so that the files can
        # leave them out.
        self.shifted = bool(self.roots) and self._views(like)
        if self.shifted:
            self.left_out = {next_key(key) for key in self.roots}
        else:
            self.left_out = set()

        stored = [row for key, row in rows.items() if key not in self.left_out]
        self.rows = max(1, piece_bytes // max(1, sum(row.shape[1:].numel() * row.itemsize for row in stored)))
        self.used = 0

        self.columns = {
            key: row.new_empty((self.rows, *row.shape[1:]), device="cpu") for key, row in rows.items()
        }
        # Capacity for one tail per row; untouched pages take no memory.
        self.tails = {key: torch.empty_like(self.columns[key]) for key in self.roots}
        self.ends: list[int] = []

    def check(self, columns: Mapping[NestedKey, Tensor | Array], number: int) -> None:
        """Raise ValueError if a batch is not of the kind of the first one."""
        if columns.keys() != self.kinds.keys():
            differing = sorted(map(str, columns.keys() ^ self.kinds.keys()))
            raise ValueError(
                f"batch {number} must have the same entries as the batches before it: {differing} are not in both"
            )

        for key, value in columns.items():
            dtype, shape = self.kinds[key]
            if value.dtype != dtype or value.shape[1:] != shape:
                raise ValueError(
                    f"batch {number}: {key!r} is {value.dtype} {list(value.shape[1:])} per row, before it was "
                    f"{dtype} {list(shape)}"
                )

        if self.shifted and not self._views(columns):
            self._unshift()

    def fill(self, columns: Mapping[NestedKey, Tensor | Array], first: int, count: int) -> int:
        """Copy rows of a batch from ``first`` on, as many as fit; return the first remaining row."""
        stop = min(count, first + self.rows - self.used)
        end = self.used + stop - first

        for key, value in columns.items():
            if key not in self.left_out:
                _put(self.columns[key], self.used, end, value[first:stop])

        if self.shifted:
            for key in self.roots:
                _put(
                    self.tails[key],
                    len(self.ends),
                    len(self.ends) + 1,
                    columns[next_key(key)][stop - 1 : stop],
                )
            self.ends.append(end - 1)

        self.used = end
        return stop

    def piece(self) -> RowPiece:
        """Return the gathered rows and start over."""
        rows = self.used
        ends = torch.tensor(self.ends, dtype=torch.int64)
        self.used = 0
        self.ends = []

        if not self.shifted:
            return RowPiece({key: column[:rows] for key, column in self.columns.items()})
        columns = {key: column[:rows] for key, column in self.columns.items() if key not in self.left_out}
        return RowPiece(columns, ends, {key: tails[: len(ends)] for key, tails in self.tails.items()})

    def _views(self, columns: Mapping[NestedKey, Tensor | Array]) -> bool:
        return all(_is_view(columns[key], columns[next_key(key)]) for key in self.roots)

    def _unshift(self) -> None:
        """From now on copy next entries, too."""
        rows = self.used
        if rows:
            whole = self.piece().whole()
            for key in map(next_key, self.roots):
                self.columns[key][:rows] = whole.columns[key]
        self.used = rows
        self.shifted = False
        self.left_out = set()


def _by_key(
    batch: Batch, names: dict[NestedKey, NestedKey], number: int
) -> Mapping[NestedKey, Tensor | Array]:
    """Columns of a batch; ``names`` keeps the keys of dotted names."""
    if isinstance(batch, TensorDictBase):
        if batch.batch_dims != 1:
            raise ValueError(f"batch {number} must be flat, [N], got {list(batch.batch_size)}")
        return leaves(batch)

    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches must be flat batches or mappings, got {checks.as_text(batch)} as batch {number}"
        )

    if not any(isinstance(value, np.ndarray) for value in batch.values()):
        return cast(Columns, batch)
    found: dict[NestedKey, Tensor | Array] = {}
    for name, array in cast(Mapping[NestedKey, Array], batch).items():
        if array.dtype.kind not in "biufc":
            raise TypeError(f"column {name!r} must hold numbers or bools, got {array.dtype}: leave it out")
        if name not in names:
            parts = tuple(name.split(".")) if isinstance(name, str) else name
            names[name] = plain_key(parts)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        found[names[name]] = array
    return found


def _tensor(value: Tensor | Array) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.from_numpy(value.copy())


def _put(target: Tensor, first: int, end: int, value: Tensor | Array) -> None:
    """Copy values to the rows ``[first, end)`` of ``target``."""
    if isinstance(value, Tensor):
        target[first:end].copy_(value.detach())
    else:
        target.numpy()[first:end] = value


def _is_view(root: Tensor | Array, following: Tensor | Array) -> bool:
    """Return whether row i of ``following`` is a view of row i + 1 of ``root``."""
    if isinstance(root, Tensor) and isinstance(following, Tensor):
        same = root.device == following.device and root.stride() == following.stride()
        same &= root.is_conj() == following.is_conj() and root.is_neg() == following.is_neg()
        return same and following.data_ptr() == root.data_ptr() + root.stride(0) * root.itemsize

    places = [values.__array_interface__["data"][0] for values in (root, following)]  # type: ignore[union-attr]
    return root.strides == following.strides and places[1] == places[0] + root.strides[0]  # type: ignore[union-attr]


class Written(NamedTuple):
    """The result of `write_folder`: the end row number and the layout."""

    end: int
    layout: Layout


def write_folder(
    pieces: Iterable[RowPiece],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    kinds: Mapping[NestedKey, type[Form]] | None = None,
    layout: Layout | None = None,
    first: int = 0,
) -> Written:
    """Write rows, each piece as a segment; the arguments and errors of `convert`.

    Args:
        kinds: forms of entries that are not stored plainly.
        layout: the form of all entries, if another folder determines it.
        first: number of the first row.
    """
    target = Path(path).resolve()
    _check_place(target, overwrite)
    files.make_folder(target.parent, synced=True)

    # One file per piece, whatever its size: merging would rewrite it. Names are synced once, with the
    # manifest.
    with Folder(place_beside(target)[0], write=True, overwrite=True, segment_bytes=1, log=False) as folder:
        for piece in pieces:
            layout = layout or _choose_layout(piece, kinds or {})
            start = folder.end if folder.segments else first
            folder.append(_encode(piece, layout), first=start)

        if layout is None or not folder.segments:
            raise ValueError(f"no rows to convert into {target}")
        _check_place(target, overwrite)  # another process may have made it meanwhile
        publish(folder, layout, target, facts)
    return Written(folder.end, layout)


def _check_place(target: Path, overwrite: bool) -> None:
    """Raise FileExistsError if the target must not or cannot be replaced."""
    recover_place(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: pass overwrite=True, or choose another path")
    if not target.is_dir() or Listing.of(target).is_empty:
        raise FileExistsError(f"{target} is not a folder of rows, so it is not replaced: choose another path")


def publish(folder: Folder, layout: Layout, target: Path, facts: Mapping[str, Any] | None) -> None:
    """Publish the rows of a folder as its only version, and rename it to ``target``, replacing a folder of that name.

    Raises:
        BlockingIOError: the existing folder is being written to.
    """
    folder.publish(layout.to_json(), extra=dict(facts or {}))

    old = place_beside(target)[1]
    remove_folder(old)
    try:
        files.rename(folder.path, target)  # also replaces an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with Folder(target, write=True):
            files.replace(folder.path, target, old)

    files.sync_folder(target.parent)
    remove_folder(old)


def recover_place(target: Path) -> None:
    """Finish replacing a folder if the process that began it died."""
    beside, old = place_beside(target)
    # The target is missing here only on systems that cannot exchange names.
    if not target.exists() and old.is_dir() and beside.is_dir():
        with suppress(BlockingIOError), Folder(beside, write=True) as folder:
            if folder.versions():
                files.rename(beside, target)


def remove_folder(path: Path) -> None:
    """Remove a folder of rows, if there is one: first its manifests, so that an interruption leaves no version."""
    if path.is_dir() and not path.is_symlink():
        for number in Folder(path).versions():
            files.remove(path / manifest_name(number))
        files.sync_folder(path)
        shutil.rmtree(path)


def place_beside(target: Path) -> tuple[Path, Path]:
    """Return the temporary names of a folder: before it becomes ``target``, and after another one has replaced it."""
    return target.parent / f".{target.name}.part", target.parent / f".{target.name}.old"


def _choose_layout(piece: RowPiece, kinds: Mapping[NestedKey, type[Form]]) -> Layout:
    """Choose the layout from the first rows of a data set."""
    rows = piece.columns
    pairs = list(piece.tails)

    if not pairs:
        rows = {key: values[:_ROWS_LOOKED_AT] for key, values in rows.items()}
        piece = RowPiece(rows)
        pairs = state_pairs(rows)

    if not any(key in rows for key in (IS_INIT, DONE, TRAJ_IDS)):
        pairs = []
    if pairs and not piece.tails:
        pairs = find_pairs(rows, rows, None, _boundary_keys(rows))
    if pairs and len(_lasts(piece, pairs)) > _count(rows) // 2:
        pairs = []  # n-step rows, or trajectories of one row each

    if not pairs:
        rows = piece.whole().columns
    twice = {next_key(key) for key in pairs}
    forms = {
        key: kinds.get(key, Form)(values.dtype, values.shape[1:])
        for key, values in rows.items()
        if key not in twice
    }
    return Layout(forms, pairs, [])


def _encode(piece: RowPiece, layout: Layout) -> dict[str, Tensor | Ragged]:
    """Return what a file of the folder holds of these rows."""
    if set(piece.tails) != set(layout.pairs):
        piece = piece.whole()
    rows = piece.columns
    columns: dict[str, Tensor | Ragged] = {
        column_name(key): form.encode(rows[key]) for key, form in layout.forms.items()
    }

    if layout.pairs:
        # The next observation of the last row of each fragment, and so of the file, is stored separately.
        lasts = _lasts(piece, layout.pairs)
        lengths = torch.zeros(_count(rows), dtype=torch.int64)
        lengths[torch.from_numpy(lasts)] = 1
        if piece.tails:
            tails = piece.following(torch.from_numpy(lasts))
        else:
            tails = NextPool(layout.pairs).tails(rows, None, lasts)
        for key, values in tails.items():
            columns[column_name(next_key(key))] = Ragged(values, lengths)

    return columns


def _lasts(piece: RowPiece, pairs: list[NestedKey]) -> Array:
    """Numbers of the rows whose next observation is not that of the row after."""
    if piece.tails:
        cuts = piece.cuts()
    else:
        cuts = NextPool(pairs).cuts(piece.columns, None)
    return Fragments.read(piece.columns, _boundary_keys(piece.columns), cuts).lasts


def _boundary_keys(rows: Columns) -> BoundaryKeys:
    return BoundaryKeys.probe(TensorDict(dict(rows), [_count(rows)]))


def _count(rows: Columns) -> int:
    return len(next(iter(rows.values())))


def convert(
    batches: Iterable[Batch],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    frame_stack: Mapping[NestedKey, int] | None = None,
    codec: Mapping[NestedKey, str] | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    progress: bool | None = None,
) -> int:
    """Write flat batches to a folder of segments for `BaseDatasetExperienceReplay`; return the number of rows.

    The folder is written under a temporary name (``.<name>.part`` beside it) and renamed when complete; after a killed
    call the next one starts over. Memory holds one segment at a time. Next observations that equal the next row's are
    not written twice. `flatroll.buffers.DiskStorage` reads the folder.

    Args:
        batches: flat batches ``[N]`` of the same entries (or their tensors by key, or arrays by dotted name):
            trajectories end to end, an episode each, or any pieces of them, in order. Ids of trajectories must be
            those of the whole set.
        path: of the folder.
        facts: anything for JSON that ``flatroll inspect`` is to show.
        overwrite: put the folder in the place of one that is there. Default False.
        frame_stack: frames per stack by key, ``{"observation": 4}``: single frames are written, each once.
        codec: compression by key, ``{"pixels": "zstd"}``: lossless. Needs the extra ``zstd``.
        segment_bytes: bytes of rows that make a file. Default 32 MiB.
        progress: show a bar. Default: where the error stream is a terminal.

    Raises:
        FileExistsError: there is such a folder; with ``overwrite``, anything else of that name.
        BlockingIOError: another process converts into it.
        ValueError: no rows, or batches whose entries, shapes or dtypes differ.
        TypeError: an entry is not a tensor, or ``batches`` is a batch or a buffer itself.

    >>> import tempfile
    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.datasets import BaseDatasetExperienceReplay
    >>> batch = TensorDict({"action": torch.arange(3), "next": {"done": torch.tensor([False, False, True])}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     convert([batch, batch], f"{folder}/set"), len(BaseDatasetExperienceReplay(f"{folder}/set"))
    (6, 6)
    """
    # Iterating over them yields rows, or samples without end.
    if isinstance(batches, TensorDictBase | ReplayBuffer):
        raise TypeError(
            f"batches must be a list or an iterator of flat batches, got a {type(batches).__name__}: pass [batch], or "
            "[buffer.oldest_first()] for the rows of a buffer"
        )

    checks.check_iterable("batches", batches, "a list or an iterator of flat batches")
    checks.check_flags(overwrite=overwrite)
    if progress is not None:
        checks.check_flags(progress=progress)
    checks.check_whole_number("segment_bytes", segment_bytes)
    if facts is not None:
        facts = dict(checks.check_type("facts", facts, Mapping, "a dict"))

    place = checks.check_path("path", path)
    options = Encodings(frame_stack, codec)
    kinds: dict[NestedKey, type[Form]] = dict.fromkeys(options.frame_stack, FrameForm)
    kinds |= dict.fromkeys(options.codec, ZstdForm)

    def checked() -> Iterator[RowPiece]:
        for number, piece in enumerate(gather(batches, segment_bytes)):
            if not number:
                options.row_bytes(
                    {key: (values.dtype, values.shape[1:]) for key, values in piece.columns.items()}
                )
            yield piece
            bar.update(len(next(iter(piece.columns.values()))))

    with progress_bar(None, progress, f"converting {place.name}") as bar:
        return write_folder(checked(), path, facts=facts, overwrite=overwrite, kinds=kinds).end

"""Transforms all rows of a converted folder once, or passes them to torch's DataLoader."""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from pickle import PicklingError
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from flatroll.buffers.storages.disk.forms import Form
from flatroll.buffers.storages.disk.layout import Layout
from flatroll.datasets.folders import RowPiece, place_beside, publish, write_folder
from flatroll.datasets.progress import progress_bar
from flatroll.disk import Folder, Segment
from flatroll.layout.checks import check_whole_number
from flatroll.layout.keys import NestedKey, next_key
from flatroll.layout.tensordict_seam import leaves
from flatroll.sharing import pack, unpack

Function = Callable[[TensorDictBase], TensorDictBase]
#: Opens a folder and returns an object that reads rows by number.
OpenRows = Callable[[Path], Any]
_DATA = (bool, int, float, str, bytes, tuple, list, dict, set, np.ndarray, torch.Tensor)
_DEEPEST = 40  # nesting depth of objects that are compared


def preprocess(
    open_rows: OpenRows,
    source: Path,
    fn: Function,
    dest: Path,
    num_workers: int,
    num_chunks: int | None,
    num_frames: int | None,
    mp_start_method: str,
    progress: bool | None,
) -> None:
    """Write the rows of the folder ``source``, changed by ``fn``, to ``dest``; see `BaseDatasetExperienceReplay`."""
    dest = dest.absolute()
    bounds = _bounds(source, num_chunks, num_frames)
    if dest.exists() and dest != source.absolute():
        raise FileExistsError(f"dest={dest} exists: remove it first, or choose another folder")

    parts = dest.parent / f".{dest.name}.parts"
    stamp = {"rows": [source.name, *_files(source)], "bounds": bounds, "fn": _fingerprint(fn)}
    first = parts / str(bounds[0][0])

    # Remove pieces made by another function or from other rows, and pieces that a dead process was removing.
    if parts.exists():
        there = [path for path in parts.iterdir() if path.name.isdigit()]
    else:
        there = []

    if not all(Folder(path).versions() for path in there) or (first.exists() and _load(first)[1] != stamp):
        shutil.rmtree(parts)

    # The first piece determines the rows' form; it is created here.
    work = _Work(open_rows(source), fn, parts, stamp, None)
    forms = _load(source)[0].forms
    # Compressed entries stay compressed; entries that were frame stacks may no longer be stacks.
    work.kinds = {key: type(form) for key, form in forms.items() if form.name != "frames"}

    with progress_bar(bounds[-1][1], progress, "preprocessing") as bar:
        bar.update(work.do(bounds[0]))
        work.layout = _load(first)[0]
        if num_workers:
            packed = pack((open_rows, source, fn, parts, stamp, work.layout.to_json()))
            context = get_context(mp_start_method)
            with ProcessPoolExecutor(num_workers, context, _begin_work, packed) as pool:
                try:
                    for rows in pool.map(_do, bounds[1:]):
                        bar.update(rows)
                except BrokenProcessPool:
                    raise RuntimeError(
                        "a process of preprocess died; finished pieces are kept: call it again to continue"
                    ) from None
                finally:
                    pool.shutdown(cancel_futures=True)
        else:
            for piece in bounds[1:]:
                bar.update(work.do(piece))

    segments: list[Segment] = []
    for begin, _ in bounds:
        folder = Folder(parts / str(begin))
        folder.load()
        segments.extend(folder.segments)

    with Folder(place_beside(dest)[0], write=True, overwrite=True) as folder:
        folder.adopt(segments)
        publish(folder, work.layout, dest, _load(source)[1])
    shutil.rmtree(parts)


class _Work:
    """Transforms the rows piece by piece; each piece is a folder that is published atomically."""

    def __init__(
        self, rows: Any, fn: Function, parts: Path, stamp: dict[str, Any], layout: Layout | None
    ) -> None:
        self.rows = rows
        self.fn = fn
        self.parts = parts
        self.stamp = stamp
        self.layout = layout
        self.kinds: dict[NestedKey, type[Form]] = {}  # of entries that keep their form

    def do(self, piece: list[int]) -> int:
        """Write the rows of a piece unless they exist already; return their number."""
        first, end = piece
        place = self.parts / str(first)
        if place.exists():
            return end - first

        changed = self.fn(self.rows[first:end])
        if not isinstance(changed, TensorDictBase) or changed.batch_size != torch.Size([end - first]):
            got = list(changed.batch_size) if isinstance(changed, TensorDictBase) else type(changed).__name__
            raise ValueError(
                f"fn must return a batch [{end - first}], as many rows as it got; it returned {got}"
            )

        columns = leaves(changed)
        if self.layout is not None:
            kept = {*self.layout.forms, *map(next_key, self.layout.pairs)}
            if kept != set(columns):
                raise ValueError(
                    "fn must return the same entries for all rows, not "
                    f"{sorted(map(str, kept ^ set(columns)))} in some"
                )

        write_folder(
            [RowPiece(columns)], place, facts=self.stamp, kinds=self.kinds, layout=self.layout, first=first
        )
        return end - first


_worker: _Work


def _begin_work(rest: bytes, tensors: list[torch.Tensor]) -> None:
    global _worker
    torch.set_num_threads(1)  # there is one process per core, and OpenMP does not survive a fork
    open_rows, source, fn, parts, stamp, layout = unpack(rest, tensors)
    _worker = _Work(open_rows(source), fn, parts, stamp, Layout.from_json(layout))


def _do(piece: list[int]) -> int:
    return _worker.do(piece)


def _load(path: Path) -> tuple[Layout, Any]:
    loaded = Folder(path).load()
    return Layout.from_json(loaded.json), loaded.extra


def _files(path: Path) -> list[str]:
    folder = Folder(path)
    folder.load()
    return [str(segment.name) for segment in folder.segments]


def _bounds(path: Path, num_chunks: int | None = None, num_frames: int | None = None) -> list[list[int]]:
    """First and end of each piece of the rows: files, or ``num_chunks`` of one size."""
    folder = Folder(path)
    rows = folder.recover()  # the rows that a buffer over the folder has; the buffer numbers them from 0
    end = len(rows)
    if num_frames is not None:
        end = min(end, check_whole_number("num_frames", num_frames))

    if num_chunks is None:
        spans = [
            (max(part.first - rows.start, 0), min(part.end - rows.start, end)) for part in folder.segments
        ]
        return [[first, stop] for first, stop in spans if first < stop]

    edges = torch.linspace(0, end, min(check_whole_number("num_chunks", num_chunks), end) + 1).long().tolist()
    return [[first, stop] for first, stop in pairwise(edges)]


def _fingerprint(fn: Any) -> str:
    """Return an identity of a function: its code, constants and captured values."""
    return hashlib.sha256(repr(_describe(fn, ())).encode()).hexdigest()


def _describe(value: Any, within: tuple[int, ...]) -> Any:
    """A value as text, numbers and tuples of them, the same in all processes; ``within`` has the ids of what holds it.

    Of functions: code, defaults, what a closure holds, and the data and functions of the module that the code names. Of
    other objects: what pickle would keep. What it cannot keep (an open file, a lock) is unlike anything.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return type(value).__name__, repr(value)
    if id(value) in within:
        return "above"
    if len(within) > _DEEPEST:
        return secrets.token_hex(8)
    within = (*within, id(value))

    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
    if isinstance(value, np.ndarray) and value.dtype != object:
        content = np.ascontiguousarray(value).tobytes()
        return "array", str(value.dtype), value.shape, hashlib.sha256(content).hexdigest()

    if isinstance(value, CodeType):
        constants = _describe(value.co_consts, within)
        return value.co_code, value.co_names, value.co_varnames, value.co_freevars, constants
    if isinstance(value, FunctionType):
        return _describe_function(value, within)

    if isinstance(value, Mapping):
        items = [(_describe(key, within), _describe(item, within)) for key, item in value.items()]
        return type(value).__qualname__, tuple(items)
    if isinstance(value, set | frozenset):
        return "set", tuple(sorted(repr(_describe(item, within)) for item in value))
    if isinstance(value, list | tuple):
        return type(value).__qualname__, tuple(_describe(item, within) for item in value)

    if isinstance(value, type):
        methods = {name: item for name, item in vars(value).items() if isinstance(item, FunctionType)}
        own = value.__module__ == "__main__" or "<locals>" in value.__qualname__
        described_methods = _describe(methods, within) if own else ()
        return value.__module__, value.__qualname__, described_methods
    if isinstance(value, ModuleType):
        return "module", value.__name__
    return _describe_object(value, within)


def _describe_object(value: Any, within: tuple[int, ...]) -> Any:
    """What pickle would keep of any other object."""
    try:
        kept = value.__reduce_ex__(4)
    except (TypeError, AttributeError, PicklingError, RuntimeError):
        return secrets.token_hex(8)

    if isinstance(kept, str):
        return type(value).__qualname__, kept
    parts = [list(part) if isinstance(part, Iterator) else part for part in kept]
    return _describe(type(value), within), tuple(_describe(part, within) for part in parts)


def _describe_function(fn: FunctionType, within: tuple[int, ...]) -> Any:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # nothing was assigned yet
            cells.append(None)

    used = {}
    for name in _find_names(fn.__code__) & fn.__globals__.keys():
        value = fn.__globals__[name]
        if isinstance(value, _DATA) or (
            isinstance(value, FunctionType) and value.__module__ == fn.__module__
        ):
            used[name] = value

    holds = (fn.__code__, fn.__defaults__, fn.__kwdefaults__, cells, sorted(used.items()))
    return fn.__module__, fn.__qualname__, _describe(holds, within)


def _find_names(code: CodeType) -> set[str]:
    """Names that the code, or a function within it, looks up."""
    inner = (_find_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


class RowsDataset(IterableDataset[TensorDictBase]):
    """The rows of a converted folder in batches, for ``DataLoader(rows, batch_size=None, collate_fn=rows.collate)``.

    The workers divide the files among themselves, so a pass has every row once. Rows are returned as stored.

    Args:
        open_rows: opens the folder, in each worker.
        path: of the folder.
        batch_size: rows of a batch; the last one of a file may have fewer.
        shuffle: files in random order, and the rows of each of them.
    """

    def __init__(self, open_rows: OpenRows, path: Path, batch_size: int, shuffle: bool) -> None:
        self.open_rows = open_rows
        self.path = path
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._passes = 0  # number of passes begun in this process: persistent workers keep their seed

    def __iter__(self) -> Iterator[TensorDictBase]:
        info = get_worker_info()
        if info is None:
            worker = 0
            workers = 1
            seed = int(torch.randint(2**62, ()))
        else:
            worker = info.id
            workers = info.num_workers
            seed = info.seed - info.id

        # All workers of a pass must shuffle the files in the same order. A worker's seed is a base seed plus its id.
        generator = torch.Generator()
        generator.manual_seed((seed + self._passes) % 2**63)
        self._passes += 1

        bounds = _bounds(self.path)
        if self.shuffle:
            order = torch.randperm(len(bounds), generator=generator)
        else:
            order = torch.arange(len(bounds))
        of_file = torch.randint(2**62, (len(bounds),), generator=generator).tolist()

        rows = self.open_rows(self.path)
        for number in order[worker::workers].tolist():
            first, end = bounds[number]
            numbers = torch.arange(first, end)
            if self.shuffle:
                # the same in every worker, different for each file
                generator.manual_seed(of_file[number])
                numbers = numbers[torch.randperm(len(numbers), generator=generator)]
            for start in range(0, len(numbers), self.batch_size):
                yield rows[numbers[start : start + self.batch_size]]

    @staticmethod
    def collate(batch: TensorDictBase) -> TensorDictBase:
        """Return the batch unchanged; pass it as the loader's ``collate_fn``, whose default would split the batch."""
        return batch

"""`convert`: rows of any source into a folder of segments, which appears when it is whole."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers import ReplayBuffer
from flatroll.buffers.columns.base import Columns
from flatroll.buffers.storages.disk.forms import Form, FrameForm, ZstdForm
from flatroll.buffers.storages.item_kinds import leaves
from flatroll.buffers.storages.tensors import Encodings
from flatroll.datasets.folders import write_folder
from flatroll.datasets.progress import progress_bar
from flatroll.layout.export import Array
from flatroll.layout.keys import NestedKey, plain_key

SEGMENT_BYTES = 32 << 20


def convert(
    batches: Iterable[TensorDictBase] | Iterable[Columns],
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    frame_stack: Mapping[NestedKey, int] | None = None,
    codec: Mapping[NestedKey, str] | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    progress: bool | None = None,
) -> int:
    """Write flat batches into a folder of segments that a `BaseDatasetExperienceReplay` opens; return how many rows.

    The folder has another name while it is written (``.<name>.part`` beside it), so under ``path`` stands all of it
    or nothing; what a killed call left behind is begun anew by the next one. Memory holds one segment at a time. Next
    observations that are those of the row after are not written twice. `flatroll.buffers.DiskStorage` reads the folder.

    Args:
        batches: flat batches ``[N]`` (or their tensors by key) of the same entries: trajectories end to end, an episode
            each, or any pieces of them, in order. Ids of trajectories must be those of the whole set.
        path: of the folder.
        facts: anything for JSON that ``flatroll inspect`` is to show.
        overwrite: put the folder in the place of one that is there. Default False.
        frame_stack: frames per stack by key, ``{"observation": 4}``: single frames are written, each once.
        codec: compression by key, ``{"pixels": "zstd"}``: lossless. Needs the extra ``zstd``.
        segment_bytes: bytes of rows that make a file. Default 32 MiB.
        progress: show a bar. Default: where the error stream is a terminal.

    Raises:
        FileExistsError: there is such a folder.
        BlockingIOError: another process converts into it.
        ValueError: no rows, or batches whose entries, shapes or dtypes differ.
        TypeError: an entry is no tensor, or ``batches`` is a batch or a buffer itself.

    >>> import tempfile
    >>> from tensordict import TensorDict
    >>> from flatroll.datasets import BaseDatasetExperienceReplay
    >>> batch = TensorDict({"action": torch.arange(3), "next": {"done": torch.tensor([False, False, True])}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     convert([batch, batch], f"{folder}/set"), len(BaseDatasetExperienceReplay(f"{folder}/set"))
    (6, 6)
    """
    if isinstance(
        batches, TensorDictBase | ReplayBuffer
    ):  # their iterators yield rows, and samples without end
        raise TypeError(
            f"batches must be a list or an iterator of flat batches, got a {type(batches).__name__}: give [batch], or "
            "[buffer[:]] for the rows of a buffer"
        )
    options = Encodings(frame_stack, codec)
    kinds: dict[NestedKey, type[Form]] = dict.fromkeys(options.frame_stack, FrameForm)
    kinds |= dict.fromkeys(options.codec, ZstdForm)

    def checked() -> Iterator[Columns]:
        for number, rows in enumerate(_pieces(batches, segment_bytes)):
            if not number:
                options.row_bytes({key: (values.dtype, values.shape[1:]) for key, values in rows.items()})
            yield rows
            bar.update(len(next(iter(rows.values()))))

    with progress_bar(None, progress, f"converting {Path(path).name}") as bar:
        return write_folder(checked(), path, facts=facts, overwrite=overwrite, kinds=kinds).end


def tensors_of(columns: Mapping[str, Array]) -> Columns:
    """Return arrays ``[N, ...]`` by dotted name as tensors by key: what `from_numpy` gives, without a tensordict.

    Raises:
        TypeError: an array is not of numbers or bools.
    """
    found: Columns = {}
    for name, array in columns.items():
        if array.dtype.kind not in "biufc":
            raise TypeError(f"column {name!r} must be of numbers or bools, got {array.dtype}: leave it out")
        native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        found[plain_key(tuple(name.split(".")))] = torch.from_numpy(
            np.require(native, requirements=["C", "W"])
        )
    return found


def _pieces(batches: Iterable[TensorDictBase] | Iterable[Columns], piece_bytes: int) -> Iterator[Columns]:
    """Join and cut batches to pieces of ``piece_bytes`` (the last one: less), columns by key."""
    gathered: dict[NestedKey, list[Tensor]] = {}
    rows = row_bytes = 0
    for number, batch in enumerate(batches):
        if isinstance(batch, TensorDictBase) and batch.batch_dims != 1:
            raise ValueError(f"batch {number} must be flat, [N], got {list(batch.batch_size)}")
        columns = leaves(batch) if isinstance(batch, TensorDictBase) else batch
        if not gathered:
            gathered = {key: [] for key in columns}
        if columns.keys() != gathered.keys():
            differing = sorted(map(str, columns.keys() ^ gathered.keys()))
            raise ValueError(
                f"batch {number} must have the entries of those before it: {differing} are not in both"
            )
        for key, value in columns.items():
            column = gathered[key]
            if column and (column[0].dtype, column[0].shape[1:]) != (value.dtype, value.shape[1:]):
                raise ValueError(
                    f"batch {number}: {key!r} is {value.dtype} {list(value.shape[1:])} a row, before it was "
                    f"{column[0].dtype} {list(column[0].shape[1:])}"
                )
            column.append(value)
        rows += len(next(iter(columns.values()), ()))
        row_bytes = row_bytes or sum(value.shape[1:].numel() * value.itemsize for value in columns.values())
        fit = max(1, piece_bytes // max(1, row_bytes))
        if rows >= fit:
            joined = {key: torch.cat(column) for key, column in gathered.items()}
            for first in range(0, rows - rows % fit, fit):
                yield {key: column[first : first + fit] for key, column in joined.items()}
            gathered = {key: [column[rows - rows % fit :].clone()] for key, column in joined.items()}
            rows %= fit
    if rows:
        yield {key: torch.cat(column) for key, column in gathered.items()}

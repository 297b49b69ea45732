"""`convert`: rows of any source into a folder of segments, which appears when it is whole."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from flatroll.buffers import ReplayBuffer
from flatroll.buffers.storages.disk.forms import Form, FrameForm, ZstdForm
from flatroll.buffers.storages.tensors import Encodings
from flatroll.datasets.folders import write_folder
from flatroll.datasets.pieces import Batch, Piece, gather
from flatroll.datasets.progress import progress_bar
from flatroll.layout.keys import NestedKey

SEGMENT_BYTES = 32 << 20


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
    """Write flat batches into a folder of segments that a `BaseDatasetExperienceReplay` opens; return how many rows.

    The folder has another name while it is written (``.<name>.part`` beside it), so under ``path`` stands all of it
    or nothing; what a killed call left behind is begun anew by the next one. Memory holds one segment at a time. Next
    observations that are those of the row after are not written twice. `flatroll.buffers.DiskStorage` reads the folder.

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
        TypeError: an entry is no tensor, or ``batches`` is a batch or a buffer itself.

    >>> import tempfile
    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.datasets import BaseDatasetExperienceReplay
    >>> batch = TensorDict({"action": torch.arange(3), "next": {"done": torch.tensor([False, False, True])}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     convert([batch, batch], f"{folder}/set"), len(BaseDatasetExperienceReplay(f"{folder}/set"))
    (6, 6)
    """
    # Their iterators yield rows, and samples without end.
    if isinstance(batches, TensorDictBase | ReplayBuffer):
        raise TypeError(
            f"batches must be a list or an iterator of flat batches, got a {type(batches).__name__}: give [batch], or "
            "[buffer.oldest_first()] for the rows of a buffer"
        )
    options = Encodings(frame_stack, codec)
    kinds: dict[NestedKey, type[Form]] = dict.fromkeys(options.frame_stack, FrameForm)
    kinds |= dict.fromkeys(options.codec, ZstdForm)

    def checked() -> Iterator[Piece]:
        for number, piece in enumerate(gather(batches, segment_bytes)):
            if not number:
                options.row_bytes(
                    {key: (values.dtype, values.shape[1:]) for key, values in piece.columns.items()}
                )
            yield piece
            bar.update(len(next(iter(piece.columns.values()))))

    with progress_bar(None, progress, f"converting {Path(path).name}") as bar:
        return write_folder(checked(), path, facts=facts, overwrite=overwrite, kinds=kinds).end

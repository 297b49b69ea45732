"""`RobosetExperienceReplay`, `OpenXExperienceReplay` and `LeRobotExperienceReplay`: robots."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.buffers import (
    ImmutableDatasetWriter,
    ListStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from flatroll.buffers.replay_buffer import Made
from flatroll.buffers.transforms.transform import apply, reads_others
from flatroll.datasets import ids
from flatroll.datasets.base import BaseDatasetExperienceReplay, DatasetOptions, slices
from flatroll.datasets.formats.lerobot.reading import read_lerobot
from flatroll.datasets.formats.robots import read_rlds, read_roboset
from flatroll.datasets.sets.streaming import EpisodeStream
from flatroll.layout.boundaries import run_ends


class RobosetExperienceReplay(BaseDatasetExperienceReplay):
    """A set of RoboSet: HDF5 files of trials (`read_roboset`).

    Args:
        dataset_id: its name, such as ``"FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"``, one of `available_datasets`; with
            ``fetch`` any.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the files or their folder.

    Raises:
        ImportError: h5py is missing: ``pip install "flatroll[h5]"``.
        ValueError: no such set; the text has names like it.
    """

    kind = "roboset"
    #: Names of all sets.
    available_datasets = ids.ROBOSET

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_roboset(source)


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """A folder of LeRobot, version 3 (`read_lerobot`), without videos.

    Args:
        dataset_id: its name, such as ``"lerobot/pusht_image"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the folder.

    Raises:
        ImportError: pyarrow is missing, or Pillow where there are images: ``pip install "flatroll[parquet,minari]"``.
    """

    kind = "lerobot"

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_lerobot(source)


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """A set of Open X-Embodiment, or any episodes of steps as RLDS has them (`read_rlds`).

    With ``streaming=True`` nothing is converted and nothing stored: episodes are read one after the other, and samples
    are made of the next ones (`EpisodeStream`). A loop over the set ends after one pass; `sample` goes on without end.

    Args:
        dataset_id: its name.
        batch_size: rows of a sample. A stream gives whole episodes without it, or one slice of each.
        options: see `BaseDatasetExperienceReplay`; ``fetch`` gives an iterable of episodes, such as the one that the
            set's own library returns, or the path of a LeRobot folder. A stream takes ``fetch`` (which is called again
            for each pass if it returned an iterator), ``transform``, ``collate_fn``, ``pin_memory`` and ``generator``.
        shuffle: with False rows, or slices, come in the order of the set, once each in a pass. Default True. Of a
            stream episodes come in order, or drawn from a window of 16 of them.
        num_slices, slice_len: draw slices of episodes, so many or so long, instead of single rows. The slices of a
            stream begin at random places, one in each episode of a pass.
        pad: pad short slices, which needs ``strict_length=False``. Default None: do not. Of a stream the value of the
            padded rows, True for 0, whatever ``strict_length`` says.
        replacement: draw with replacement. Default True; of a stream False.
        streaming: read the episodes without a folder. Default None, which is False.
        strict_length: slices of the whole ``slice_len`` only. Default True: shorter episodes are left out, and of a
            stream an error. With False they give all of their rows.

    Attributes:
        stream: the `EpisodeStream`; None without ``streaming``.

    Raises:
        ValueError: arguments that exclude each other, or that a stream cannot take.
        FileNotFoundError: nobody knows where the episodes are.

    Example, three steps of one episode and two of another at a time, without a folder::

        data = OpenXExperienceReplay("cmu_stretch", 4, num_slices=2, streaming=True, fetch=lambda *_: episodes)
        for batch in data:
            batch.reshape(2, -1)
    """

    kind = "openx"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: float | bool | None = None,
        replacement: bool | None = None,
        streaming: bool | None = None,
        strict_length: bool = True,
        **options: Unpack[DatasetOptions],
    ) -> None:
        self.stream: EpisodeStream | None = None
        if options.get("download", True) is None:
            del options["download"]
        if streaming:
            if replacement:
                raise ValueError("streaming=True reads each episode once in a pass: leave out replacement")
            self._open_stream(dataset_id, batch_size, options)
            self.stream = EpisodeStream(
                self._episodes,
                shuffle=shuffle,
                num_slices=num_slices,
                slice_len=slice_len,
                pad=pad,
                strict_length=strict_length,
                generator=options.get("generator"),
            )
            return
        if pad is not None and not isinstance(pad, bool):
            raise ValueError(
                f"pad must be a bool: short slices are padded with their last row, got {pad!r}; streaming=True pads "
                "with a value"
            )
        if not shuffle:
            if (
                num_slices is not None
                or slice_len is not None
                or options.get("sampler") is not None
                or replacement
            ):
                raise ValueError(
                    "shuffle=False gives rows in order: leave out sampler, slices and replacement"
                )
            options["sampler"] = SamplerWithoutReplacement(shuffle=False)
        slices(options, num_slices, slice_len, strict_length, replacement is not False, bool(pad))
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_lerobot(source) if isinstance(source, str | Path) else read_rlds(source)

    # -- a stream --------------------------------------------------------------------------------------------------

    def _open_stream(self, dataset_id: str, batch_size: int | None, options: DatasetOptions) -> None:
        """Become a buffer without rows of its own."""
        known = {"fetch", "transform", "collate_fn", "pin_memory", "generator", "root"}
        given = {name for name, value in options.items() if value not in (None, False)}
        if unknown := sorted(given - known):
            raise ValueError(
                f"streaming=True reads a set without storing it, and takes no {unknown}: leave it out"
            )
        fetch = options.get("fetch")
        if fetch is None:
            raise FileNotFoundError(
                f"{type(self).__name__} does not know where the episodes of {dataset_id!r} are: give fetch=, a "
                "function (dataset_id, folder) that returns them, or puts the files of LeRobot into folder"
            )
        self.dataset_id, self.split_trajs = str(dataset_id), False
        self.pin_memory = options.get("pin_memory", False)
        self._fetch_with, self._source = fetch, cast(Any, None)
        self._folder: Path | None = None  # what is fetched into it stays as long as the stream
        TensorDictReplayBuffer.__init__(
            self,
            ListStorage(1),
            writer=ImmutableDatasetWriter(),
            batch_size=batch_size,
            collate_fn=options.get("collate_fn"),
            transform=options.get("transform"),
            generator=options.get("generator"),
        )

    def _episodes(self) -> Iterator[TensorDictBase]:
        """The episodes of one pass, from the start."""
        if self._source is None:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="flatroll-openx-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            folder = self._folder
            fetched = self._fetch_with(self.dataset_id, folder)
            self._source = folder if fetched is None else fetched
        source = self._source
        if isinstance(source, Iterator):
            self._source = None  # it can be read once: the next pass fetches another one
        return self._convert(source)

    @override
    def __iter__(self) -> Iterator[Any]:
        if self.stream is None:
            yield from super().__iter__()
            return
        for batch in self.stream.batches(self.batch_size):
            yield self._finish(batch)

    @property
    def data_path(self) -> Path:
        """The converted folder; ValueError if there is none."""
        if self.stream is not None:
            raise ValueError("a stream has no folder: give streaming=False, which converts the set once")
        return self._data_path

    @data_path.setter
    def data_path(self, path: Path) -> None:
        self._data_path = path

    @override
    def __repr__(self) -> str:
        return super().__repr__() if self.stream is None else f"{type(self).__name__}(a stream of episodes)"

    @override
    def __len__(self) -> int:
        if self.stream is not None:
            raise TypeError("a stream has no length: give streaming=False, which converts the set once")
        return super().__len__()

    @override
    def _next_sample(self, batch_size: int | None) -> Made:
        if self.stream is None:
            return super()._next_sample(batch_size)
        return (
            self._finish(self.stream.sample(self.batch_size if batch_size is None else batch_size)),
            {},
            False,
        )

    def _finish(self, data: Any) -> Any:
        """Put a batch of the stream through what every sample goes through."""
        if any(map(reads_others, self._transforms)):
            raise ValueError("streaming=True stores no rows, so no transform can read others: leave it out")
        data = data if self.collate_fn is None else self.collate_fn(data)
        for transform in self._transforms:
            data = apply(transform, data, partial(run_ends, data))
        return data.pin_memory() if self.pin_memory and torch.cuda.is_available() else data

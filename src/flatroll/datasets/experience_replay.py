"""`BaseDatasetExperienceReplay`: a data set as a replay buffer over a folder of segments."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack
from urllib.parse import quote

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers import (
    DiskStorage,
    ImmutableDatasetWriter,
    ReplayBuffer,
    Sampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Writer,
)
from flatroll.buffers.replay_buffer import Drawn, Made
from flatroll.buffers.transforms.transform import TransformLike
from flatroll.datasets.fetch import fetch_url
from flatroll.datasets.folders import Batch, convert, recover_place
from flatroll.datasets.ids import unknown_id_error
from flatroll.datasets.preprocess import RowsDataset, preprocess
from flatroll.disk import Folder
from flatroll.layout.checks import check_choice, check_flags, check_path, check_type, check_whole_number
from flatroll.layout.keys import NestedKey
from flatroll.layout.trajectories import split_trajectories

#: ``fetch(dataset_id, folder)``: see `BaseDatasetExperienceReplay`.
Fetch = Callable[[str, Path], Any]


class DatasetOptions(TypedDict, total=False):
    """Keyword arguments of all data sets; `BaseDatasetExperienceReplay` documents them."""

    root: str | Path | None
    download: bool | str
    fetch: Fetch | None
    download_url: str | Sequence[str] | None
    sampler: Sampler | None
    writer: Writer | None
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    prefetch: int | None
    transform: TransformLike | None
    split_trajs: bool
    priority_key: NestedKey
    verify: bool
    generator: torch.Generator | None
    codec: Mapping[NestedKey, str] | None
    frame_stack: Mapping[NestedKey, int] | None
    progress: bool | None


class BaseDatasetExperienceReplay(TensorDictReplayBuffer):
    """A data set as a replay buffer: its rows stay on disk and are read-only.

    The class itself opens a folder made by `flatroll.datasets.convert` or `preprocess`. Subclasses read the files of
    published sets: they fetch them once, convert them once into ``<root>/<dataset_id>``, and later open that folder.
    Conversions are atomic: an interrupted one starts over.

    Args:
        dataset_id: name of the set, or path of a converted folder.
        batch_size: rows per sample; with ``split_trajs``, trajectories. Default: set by each `sample` call.
        root: folder of the converted sets. Default: ``~/.cache/flatroll/<kind of set>``.
        download: True to fetch and convert a missing set, ``"force"`` to do so always, False to use only an existing
            one. Default True.
        fetch: function ``(dataset_id, folder)`` that gets the set's files, if no library does: it writes them into
            ``folder``, which is removed after the conversion, or returns the path of existing files. See `fetch_url`.
        download_url: instead of ``fetch``, the address of the set's file on a mirror, or a list of addresses, such as
            ``"https://HOST/{dataset_id}.hdf5"``; ``{dataset_id}`` is replaced by the name.
        sampler: default `RandomSampler`; any sampler can be used, such as `SliceSampler`.
        writer: default `ImmutableDatasetWriter`.
        collate_fn, prefetch, transform, generator: see `ReplayBuffer`.
        pin_memory: put samples into page-locked memory, from which a GPU copies faster. Ignored without a GPU.
        split_trajs: samples are whole trajectories, padded, ``[batch_size, T_max]``, with a mask
            (`split_trajectories`). Discouraged: a `SliceSampler` needs no padding.
        priority_key: see `TensorDictReplayBuffer`.
        verify: read and check all rows when the folder is opened; see `DiskStorage`. Default False.
        codec, frame_stack, progress: for the conversion, see `convert`.

    Raises:
        FileNotFoundError: the data set does not exist, and ``download`` is False or there is no way to fetch it.
        ValueError: ``dataset_id`` is unknown, or its path is outside ``root``; the folder does not contain a data set,
            or was converted with other arguments.
        BlockingIOError: another process is converting the set.
        ImportError: a library that reads the files is missing; the message names the extra.

    >>> import tempfile
    >>> from tensordict import TensorDict
    >>> from flatroll.datasets import convert
    >>> done = torch.tensor([False, False, True])
    >>> episode = TensorDict({"observation": torch.arange(3.0), "next": {"done": done}}, [3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = convert([episode, episode], f"{folder}/walks")
    ...     data = BaseDatasetExperienceReplay(f"{folder}/walks", batch_size=4, sampler=SliceSampler(slice_len=2))
    ...     len(data), data.sample().batch_size
    (6, torch.Size([4]))
    """

    #: Name of the kind of data set, and of its folder under the default root; empty for folders given by path.
    kind = ""
    #: Names of all data sets of the kind; empty if any name is allowed.
    available_datasets: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, dataset_id: str | Path, batch_size: int | None = None, **options: Unpack[DatasetOptions]
    ) -> None:
        # Before hours of converting, not after.
        if unknown := sorted(options.keys() - DatasetOptions.__annotations__):
            raise TypeError(
                f"{type(self).__name__} takes no argument {', '.join(unknown)}; arguments of all data sets: "
                f"{', '.join(sorted(DatasetOptions.__annotations__))}. To use several processes, call "
                "preprocess(fn, num_workers=...)"
            )

        self.dataset_id = str(dataset_id)
        root = options.pop("root", None)
        self.root = Path.home() / ".cache/flatroll" / self.kind
        if root is not None:
            self.root = check_path("root", root).expanduser().absolute()

        named = {name: options.get(name, False) for name in ("pin_memory", "split_trajs", "verify")}
        check_flags(**named)
        if (progress := options.get("progress")) is not None:
            check_flags(progress=progress)
        if (writer := options.get("writer")) is not None:
            check_type("writer", writer, Writer, "a Writer")

        download = options.pop("download", True)
        fetch = options.pop("fetch", None)
        if (urls := options.pop("download_url", None)) is not None:
            if fetch is not None:
                raise ValueError("pass fetch or download_url, not both")
            if isinstance(urls, str):
                urls = [urls]
            fetch = partial(self._download, urls)
        check_choice("download", download, (True, False, "force"))
        encoded = {name: options.pop(name, None) for name in ("codec", "frame_stack", "progress")}  # type: ignore[misc]

        self.data_path = self._place()
        recover_place(self.data_path)

        if download == "force" and not self.kind:
            raise ValueError(
                "download='force' is for published sets: to replace a folder, call convert(..., overwrite=True)"
            )

        there = self.data_path.exists() and not (
            self.data_path.is_dir() and not any(self.data_path.iterdir())
        )
        if there and download != "force":
            self._check_facts()
        else:
            if not self.kind or not download:
                if self.kind:
                    instead = "pass download=True"
                else:
                    instead = "convert() makes one"
                raise FileNotFoundError(f"there is no data set in {self.data_path}: {instead}")
            self._make(fetch, overwrite=download == "force", **encoded)

        self._options = options
        self._rows_asked = batch_size
        self._open()

    def _open(self) -> None:
        """Initialise as a buffer over the folder."""
        options = dict(self._options)
        verify = bool(options.pop("verify", False))
        storage = DiskStorage(path=self.data_path, read_only=True, verify=verify)
        self.pin_memory = bool(options.pop("pin_memory", False))
        self.split_trajs = bool(options.pop("split_trajs", False))
        if options.get("writer") is None:
            options["writer"] = ImmutableDatasetWriter()

        size = self._rows_asked
        longest = 0
        if self.split_trajs:
            longest = self._longest_trajectory(storage)
            options["sampler"] = options.get("sampler") or SliceSampler(slice_len=longest, fill=False)
            if size is not None:
                size = check_whole_number("batch_size", size) * longest
        self._longest = longest
        super().__init__(storage, batch_size=size, **options)  # type: ignore[arg-type]
        if not len(self):
            raise ValueError(f"{self.data_path} has no rows")

    # -- location and download -------------------------------------------------------------------------------------

    def _place(self) -> Path:
        """The converted folder."""
        if not self.kind:
            return Path(self.dataset_id).absolute()
        place = (self.root / self.dataset_id).resolve()
        if self.root.resolve() not in place.parents:
            raise ValueError(f"dataset_id must be a name below root, got {self.dataset_id!r}")
        self._check_id()
        return place

    def _check_id(self) -> None:
        """Raise ValueError if the data set is known not to exist."""

    def _fetch(self, folder: Path) -> Any:
        """Fetch the files with the data set's library; return the input of `_convert`."""
        self._check_known()
        raise FileNotFoundError(
            f"{self.data_path} does not exist, and flatroll knows no address to download it from: "
            f"{type(self).__name__}({self.dataset_id!r}, download_url='https://HOST/{{dataset_id}}.SUFFIX') "
            "downloads from a mirror; or pass fetch=, a function (dataset_id, folder) that puts the files "
            "there or returns their path"
        )

    def _download(self, urls: Sequence[str], dataset_id: str, folder: Path) -> None:
        """Put the files at these addresses into a folder."""
        self._check_known()
        for url in urls:
            free = shutil.disk_usage(folder).free
            fetch_url(url.replace("{dataset_id}", quote(dataset_id)), folder, max_bytes=free)

    def _check_known(self) -> None:
        """Raise ValueError if the name is not in `available_datasets`."""
        if self.available_datasets and self.dataset_id not in self.available_datasets:
            raise unknown_id_error(type(self).__name__, self.dataset_id, self.available_datasets)

    def _convert(self, source: Any) -> Iterator[Batch]:
        """Yield the rows of the fetched files as `convert` takes them, trajectories end to end."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """Return the folder's metadata; ``"options"`` are the arguments that affect its rows."""
        return {"kind": f"data set {self.kind}", "dataset_id": self.dataset_id}

    def _check_facts(self) -> None:
        """Raise ValueError if the folder is of another kind of set, or was made with other options."""
        if not self.kind:
            return
        made = Folder(self.data_path).load().extra
        asked = self._facts()
        for name in ("kind", "options"):
            if name in made and made[name] != asked.get(name):
                raise ValueError(
                    f"{self.data_path} was converted with {name} {made[name]}, but this call asks for "
                    f"{asked.get(name)}: pass download='force' to convert it again, or another root"
                )

    def _make(self, fetch: Fetch | None, *, overwrite: bool, **encoded: Any) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=self.root) as name:
            folder = Path(name)
            if fetch is None:
                found = self._fetch(folder)
            else:
                found = fetch(self.dataset_id, folder)

            if found is None:
                found = folder
            try:
                convert(
                    self._convert(found), self.data_path, facts=self._facts(), overwrite=overwrite, **encoded
                )
            except FileExistsError:  # another process has created it meanwhile
                if overwrite or not self.data_path.exists():
                    raise
            except BlockingIOError as error:
                text = f"another process makes {self.data_path} right now: open it when that is done"
                raise BlockingIOError(error.errno, text) from None

    def _longest_trajectory(self, storage: DiskStorage) -> int:
        """Number of rows of the longest trajectory."""
        folder = Folder(storage.path)
        folder.recover()
        ids = [segment.columns.get("collector/traj_ids") for segment in folder.segments]
        known = [column for column in ids if isinstance(column, Tensor)]
        if not known:
            raise ValueError(
                "split_trajs needs ('collector', 'traj_ids'), which the data set lacks: leave it out"
            )

        runs = torch.cat(known).numpy()
        bounds = [0, *(np.flatnonzero(np.diff(runs)) + 1).tolist(), len(runs)]
        return int(np.diff(bounds).max())

    def delete(self) -> None:
        """Remove the converted folder; the next object with the same arguments recreates it."""
        shutil.rmtree(self.data_path)

    # -- samples ---------------------------------------------------------------------------------------------------

    @override
    def next_sample(self, batch_size: int | None) -> Made:
        if batch_size is not None and self.split_trajs:
            batch_size = check_whole_number("batch_size", batch_size) * self._longest
        return super().next_sample(batch_size)

    @override
    def _finish_sample(self, ended: bool, drawn: Drawn) -> Made:
        data, info, ended = super()._finish_sample(ended, drawn)
        if self.split_trajs:
            data = split_trajectories(data)
        if self.pin_memory and torch.cuda.is_available():
            data = data.pin_memory()
        return data, info, ended

    # -- the whole set ---------------------------------------------------------------------------------------------

    def preprocess(
        self,
        fn: Callable[[TensorDictBase], TensorDictBase],
        num_workers: int | None = None,
        *,
        dest: str | Path | None = None,
        num_chunks: int | None = None,
        num_frames: int | None = None,
        mp_start_method: str = "spawn",
        progress: bool | None = None,
    ) -> "BaseDatasetExperienceReplay":
        """Transform all rows once, in several processes, and store them on disk; return the new data set.

        Finished pieces are kept: repeating an interrupted call with the same function (the same code, defaults, closure
        and data) resumes it. A function with values that cannot be compared (an open file, a lock) starts over each
        time. The new set appears only once it is complete.

        Args:
            fn: function from a flat batch ``[n]``, consecutive stored rows, to a batch ``[n]``. It may change, add and
                remove entries, but not the number or order of rows.
            num_workers: number of processes. Default: none, this process does the work.
            dest: folder of the new set. Default: it replaces this set, also for objects created later with the same
                arguments, except with ``download="force"``.
            num_chunks: number of pieces. Default: the set's files, of 32 MiB.
            num_frames: use only this many first rows, to try ``fn``.
            mp_start_method: ``"spawn"``, ``"forkserver"`` or ``"fork"``. Default ``"spawn"``, for which a script needs
                ``if __name__ == "__main__"``.
            progress: show a bar. Default: if stderr is a terminal.

        Raises:
            ValueError: ``fn`` does not return a flat batch of n rows, or its entries differ between pieces.
            FileExistsError: ``dest`` exists.
        """
        place = self.data_path if dest is None else Path(dest)
        preprocess(
            open_rows,
            self.data_path,
            fn,
            place,
            num_workers or 0,
            num_chunks,
            num_frames,
            mp_start_method,
            progress,
        )

        if dest is None:
            self._open()
            return self
        return BaseDatasetExperienceReplay(place, self._rows_asked)

    def as_dataset(self, batch_size: int | None = None, *, shuffle: bool = False) -> RowsDataset:
        """Return the rows for `torch.utils.data.DataLoader`; its workers divide the files among themselves.

        Args:
            batch_size: rows per batch; the last one of a file may have fewer. Default: the buffer's.
            shuffle: shuffle files, and the rows of each file, in each pass; seeded by ``torch.manual_seed``.

        >>> import tempfile
        >>> from torch.utils.data import DataLoader
        >>> from tensordict import TensorDict
        >>> from flatroll.datasets import convert
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = convert([TensorDict({"x": torch.arange(5)}, [5])], f"{folder}/set")
        ...     data = BaseDatasetExperienceReplay(f"{folder}/set", batch_size=2)
        ...     rows = data.as_dataset()
        ...     [batch["x"].tolist() for batch in DataLoader(rows, batch_size=None, collate_fn=rows.collate)]
        [[0, 1], [2, 3], [4]]
        """
        if batch_size is None:
            batch_size = self._rows_asked
        if batch_size is None:
            raise ValueError("batch_size must be given here or to the data set")
        check_flags(shuffle=shuffle)
        return RowsDataset(open_rows, self.data_path, check_whole_number("batch_size", batch_size), shuffle)


def open_rows(path: Path) -> ReplayBuffer:
    """Return a buffer that reads a folder's rows unchanged."""
    return ReplayBuffer(storage=DiskStorage(path=path, read_only=True))


def slices(
    options: DatasetOptions,
    num_slices: int | None,
    slice_len: int | None,
    strict: bool,
    replacement: bool,
    pad: bool = False,
) -> None:
    """Put a sampler of slices into the options, if slices are asked for."""
    if num_slices is None and slice_len is None:
        return

    if options.get("sampler") is not None:
        raise ValueError("pass num_slices and slice_len, or sampler, not both")
    kind = SliceSampler if replacement else SliceSamplerWithoutReplacement
    options["sampler"] = kind(
        num_slices=num_slices, slice_len=slice_len, strict_length=strict, pad_output=pad
    )

"""Episodes of RLDS steps, the format of Open X-Embodiment: `read_rlds`, and `OpenXExperienceReplay`."""

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers import (
    ImmutableDatasetWriter,
    ListStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from flatroll.buffers.replay_buffer import Made
from flatroll.buffers.transforms.transform import apply, needs_trajectory
from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions, slices
from flatroll.datasets.formats.episodes import make_episode, named_leaves
from flatroll.datasets.formats.lerobot import read_lerobot
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import as_text, check_iterable, check_whole_number
from flatroll.layout.export import Array
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    plain_key,
)

_OF_A_STEP = ("is_first", "is_last", "is_terminal", "observation", "reward")
WINDOW = 16  # number of episodes in memory that a shuffled stream draws from


def read_rlds(episodes: Iterable[Any]) -> Iterator[TensorDict]:
    """Yield episodes of steps, as RLDS has them, as flat batches ``[T]``.

    Step t of an episode is ``{"observation", "action", "reward", "is_first", "is_last", "is_terminal", …}``: the reward
    is that of its action; the last step only has an observation, its action and reward are meaningless. T + 1 steps
    therefore give T rows. Texts are left out. Steps without rewards give rows without ``("next", "reward")``.

    Some sets, demonstrations of Open X-Embodiment among them, have the reward of the goal at the last step, against
    that definition. It belongs to no action and is left out, with a warning if the episode has no other: give the
    steps their rewards one earlier.

    Args:
        episodes: each an iterable of steps, or a mapping with ``"steps"``; values are numbers, arrays, or dicts.

    Raises:
        ValueError: an episode has no rows, its steps have different entries, there are steps after its last or terminal
            one, or a later step is a first one.
        KeyError: a step without observation.

    Source: Ramos et al., RLDS: an Ecosystem to Generate, Share and Use Datasets in Reinforcement Learning (2021).

    >>> steps = [{"observation": 1.0, "reward": 0.5}, {"observation": 2.0, "is_last": True, "is_terminal": True}]
    >>> (rows,) = read_rlds([steps])
    >>> rows["next", "observation"].tolist(), rows["next", "reward"].tolist(), rows["next", "terminated"].tolist()
    ([2.0], [[0.5]], [[True]])
    """
    for number, episode in enumerate(check_iterable("episodes", episodes, "an iterable of episodes")):
        given: Any = episode.get("steps") if isinstance(episode, Mapping) else episode
        steps: list[Any] = list(
            check_iterable("each of the episodes", given, "an iterable of steps, or a mapping with 'steps'")
        )
        _check_steps(steps, number)

        states = _columns(steps, "observation", number)
        others: dict[NestedKey, Array] = {}
        for name in steps[0]:
            if name not in _OF_A_STEP:
                others |= _columns(steps[:-1], name, number)

        terminated = np.zeros(len(steps) - 1, bool)
        terminated[-1] = bool(steps[-1].get("is_terminal", False))
        truncated = np.zeros(len(steps) - 1, bool)
        truncated[-1] = not terminated[-1]
        yield make_episode(number, states, others, _rewards(steps, number), terminated, truncated)


def _check_steps(steps: list[Any], number: int) -> None:
    """Raise an error unless these are at least two steps of one episode, each with an observation."""
    if wrong := [step for step in steps if not isinstance(step, Mapping)]:
        raise TypeError(
            f"each step of an episode must be a mapping, got {as_text(wrong[0])} in episode {number}"
        )
    if len(steps) < 2:
        raise ValueError(f"episode {number} has {len(steps)} steps: a row needs two")

    if early := [t for t, step in enumerate(steps[:-1]) if bool(step.get("is_last", False))]:
        raise ValueError(f"episode {number} continues after step {early[0]}, its last one")
    if early := [t for t, step in enumerate(steps[:-1]) if bool(step.get("is_terminal", False))]:
        raise ValueError(f"episode {number} continues after step {early[0]}, which is terminal")
    if again := [t for t, step in enumerate(steps) if t and bool(step.get("is_first", False))]:
        raise ValueError(f"episode {number} begins again at step {again[0]}: split it there")
    if any("observation" not in step for step in steps):
        raise KeyError(f"episode {number} has a step without 'observation'")


def _rewards(steps: list[Any], number: int) -> Array | None:
    """The rewards of all steps but the last; None if these have none."""
    found = [step["reward"] for step in steps[:-1] if "reward" in step]
    if len(found) not in (0, len(steps) - 1):
        raise ValueError(f"episode {number} has {len(found)} rewards for {len(steps) - 1} actions")

    # Python numbers do not tell the file's dtype.
    dtype = None if found and hasattr(found[0], "dtype") else np.float32
    rewards = np.asarray(found, dtype)
    if not rewards.any() and np.any(steps[-1].get("reward", 0)):
        warnings.warn(
            "an episode has a reward only at its last step, where RLDS has no action, so that reward is "
            "dropped: shift the rewards one step earlier",
            UserWarning,
            stacklevel=3,
        )
    if found:
        return rewards
    return None


def _columns(steps: list[Any], name: str, number: int) -> dict[NestedKey, Array]:
    """The values of an entry, step after step, by key."""
    found: dict[NestedKey, list[Any]] = {}
    for step in steps:
        for path, value in named_leaves(step.get(name), (name,)):
            found.setdefault(plain_key(path), []).append(value)

    columns: dict[NestedKey, Array] = {}
    for place, values in found.items():
        if isinstance(values[0], str | bytes):
            continue
        arrays = [np.asarray(value) for value in values]
        if len(arrays) != len(steps) or len({(array.shape, array.dtype) for array in arrays}) > 1:
            raise ValueError(f"episode {number}: {place!r} must have the same shape and dtype in all steps")
        if arrays[0].dtype.kind in "biufc":
            columns[place] = np.stack(arrays)
    return columns


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """An Open X-Embodiment data set, or any episodes of RLDS steps (`read_rlds`).

    With ``streaming=True`` nothing is converted or stored: episodes are read one after another, and samples consist of
    the next ones (`EpisodeStream`). A loop over the set ends after one pass; `sample` repeats passes forever.

    Args:
        dataset_id: its name.
        batch_size: rows per sample. Without it, a stream returns whole episodes, or one slice of each.
        options: see `BaseDatasetExperienceReplay`; ``fetch`` gives an iterable of episodes, such as the one that the
            set's own library returns, or the path of a LeRobot folder. A stream accepts ``fetch`` (called again
            for each pass if it returned an iterator), ``transform``, ``collate_fn``, ``pin_memory`` and ``generator``.
        shuffle: if False, rows or slices are in the order of the set, each once per pass. Default True. A stream draws
            episodes from a window of 16, or with False reads them in order.
        num_slices, slice_len: draw slices of episodes, this many or of this length, instead of single rows. In a stream
            slices begin at random positions, one in each episode of a pass.
        pad: pad short slices, which needs ``strict_length=False``. Default None: no padding. For a stream it is the
            value of padded rows, True for 0, and does not depend on ``strict_length``.
        replacement: draw with replacement. Default True; False for a stream.
        streaming: read the episodes without a folder. Default None, which means False.
        strict_length: only slices of the full ``slice_len``. Default True: shorter episodes are left out; in a stream
            they are an error. If False, they give all of their rows.

    Attributes:
        stream: the `EpisodeStream`; None without ``streaming``.

    Raises:
        ValueError: arguments exclude each other, or a stream does not support one.
        FileNotFoundError: the episodes were not found.

    Two slices of two steps each at a time, without a folder:

    ```python
    data = OpenXExperienceReplay("cmu_stretch", 4, num_slices=2, streaming=True, fetch=lambda *_: episodes)
    for batch in data:
        batch.reshape(2, -1)
    ```
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
                raise ValueError("streaming=True reads each episode once per pass: leave out replacement")
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
                    "shuffle=False returns rows in order: leave out sampler, slices and replacement"
                )
            options["sampler"] = SamplerWithoutReplacement(shuffle=False)

        slices(options, num_slices, slice_len, strict_length, replacement is not False, bool(pad))
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        if isinstance(source, str | Path):
            return read_lerobot(source)
        return read_rlds(source)

    # -- a stream --------------------------------------------------------------------------------------------------

    def _open_stream(self, dataset_id: str, batch_size: int | None, options: DatasetOptions) -> None:
        """Initialise as a buffer without stored rows."""
        known = {"fetch", "transform", "collate_fn", "pin_memory", "generator", "root"}
        given = {name for name, value in options.items() if value not in (None, False)}
        if unknown := sorted(given - known):
            raise ValueError(
                f"streaming=True reads a set without storing it, and does not accept {unknown}: leave it out"
            )

        fetch = options.get("fetch")
        if fetch is None:
            raise FileNotFoundError(
                f"{type(self).__name__} does not know where the episodes of {dataset_id!r} are: pass fetch=, a "
                "function (dataset_id, folder) that returns them, or puts the files of LeRobot into folder"
            )

        self.dataset_id = str(dataset_id)
        self.split_trajs = False
        self.pin_memory = options.get("pin_memory", False)
        self._fetch_with = fetch
        self._source = cast(Any, None)
        self._folder: Path | None = None  # the folder to fetch into, kept as long as the stream exists

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
            if fetched is None:
                fetched = folder
            # Absolute, because each pass reads it again and the working directory may change.
            if isinstance(fetched, str | Path):
                fetched = Path(fetched).absolute()
            self._source = fetched

        source = self._source
        if isinstance(source, Iterator):
            self._source = None  # an iterator can be read only once: the next pass fetches again
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
            raise ValueError("a stream has no folder: pass streaming=False, which converts the set once")
        return self._data_path

    @data_path.setter
    def data_path(self, path: Path) -> None:
        self._data_path = path

    @override
    def __repr__(self) -> str:
        if self.stream is None:
            return super().__repr__()
        return f"{type(self).__name__}(a stream of episodes)"

    @override
    def __len__(self) -> int:
        if self.stream is not None:
            raise TypeError("a stream has no length: pass streaming=False, which converts the set once")
        return super().__len__()

    @override
    def next_sample(self, batch_size: int | None) -> Made:
        if self.stream is None:
            return super().next_sample(batch_size)
        if batch_size is None:
            batch_size = self.batch_size
        return self._finish(self.stream.sample(batch_size)), {}, False

    def _finish(self, data: Any) -> Any:
        """Apply the processing of samples to a batch of the stream."""
        if any(map(needs_trajectory, self.transforms)):
            raise ValueError(
                "streaming=True stores no rows, so a transform cannot read further rows: leave it out"
            )

        if self.collate_fn is not None:
            data = self.collate_fn(data)
        for transform in self.transforms:
            data = apply(transform, data, partial(run_ends, data))
        if self.pin_memory and torch.cuda.is_available():
            return data.pin_memory()
        return data


class EpisodeStream:
    """Reads episodes one after the other and gives batches of whole ones, of their slices, or of their rows in order.

    A slice is marked as those of a `SliceSampler` are: its first row is ``is_init``, its last one done, and truncated
    unless terminated.

    Args:
        open_episodes: returns the episodes of one pass, flat batches ``[T]`` with all markers, new ones at each call.
        shuffle: draw episodes in random order from a window of 16. False: in order.
        num_slices: slices per batch, each of ``batch_size / num_slices`` rows and of a different episode.
        slice_len: rows per slice; a batch has ``batch_size / slice_len`` slices, each of a different episode.
        pad: value of the rows appended to slices of shorter episodes; their flags are False, and so is their
            ``("collector", "mask")``, an entry that all rows then have. True: 0. None or False: no padding.
        strict_length: refuse episodes that are shorter than a slice. False: use all of their rows.
        generator: CPU generator of all draws; None: torch's global one.

    Raises:
        ValueError: both ``num_slices`` and ``slice_len`` are given, or a number is below 1.
    """

    def __init__(
        self,
        open_episodes: Callable[[], Iterable[TensorDictBase]],
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: float | bool | None = None,
        strict_length: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if num_slices is not None and slice_len is not None:
            raise ValueError("pass num_slices or slice_len, not both: the other follows from batch_size")
        self.num_slices = None
        if num_slices is not None:
            self.num_slices = check_whole_number("num_slices", num_slices)
        self.slice_len = None
        if slice_len is not None:
            self.slice_len = check_whole_number("slice_len", slice_len)

        self.shuffle = shuffle
        self.strict_length = strict_length
        if pad is None or pad is False:
            self.pad = None
        else:
            self.pad = float(pad is not True and pad)

        self._open_episodes = open_episodes
        self._generator = generator
        self._endless: tuple[int | None, Iterator[TensorDictBase]] | None = None

    def batches(self, batch_size: int | None = None) -> Iterator[TensorDictBase]:
        """Yield the batches of one pass over the episodes; the last one may have fewer rows.

        Without slices and with a ``batch_size``, each batch is one slice of that many rows if the stream is shuffled,
        else consecutive rows, each once. Without ``batch_size`` batches are whole episodes, or one slice of each.

        Raises:
            ValueError: ``batch_size`` cannot be divided into slices, or an episode is too short.
        """
        return self._batches(self._pass(), batch_size)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return the next batch of `batches`, repeating passes forever; a different ``batch_size`` begins a new pass.

        Raises:
            ValueError: as `batches`; there are no episodes.
        """
        if self._endless is None or self._endless[0] != batch_size:
            self._endless = batch_size, self._batches(self._passes(), batch_size)
        try:
            return next(self._endless[1])
        except BaseException:
            self._endless = None  # a generator that raised is exhausted
            raise

    def _batches(
        self, episodes: Iterator[TensorDictBase], batch_size: int | None
    ) -> Iterator[TensorDictBase]:
        length, count = self._slices(batch_size)
        if length is None and batch_size is None:
            yield from episodes
        elif length is None:
            yield from _in_order(episodes, check_whole_number("batch_size", batch_size))
        else:
            slices: list[TensorDictBase] = []
            for episode in episodes:
                slices.append(self._slice(episode, length))
                if len(slices) == count:
                    yield _join(slices)
                    slices = []
            if slices:
                yield _join(slices)

    def _slices(self, batch_size: int | None) -> tuple[int | None, int]:
        """Rows of a slice, None without slices; and slices of a batch."""
        if batch_size is None:
            return self.slice_len, 1
        check_whole_number("batch_size", batch_size)

        if self.num_slices is None and self.slice_len is None:
            if self.shuffle:
                return (batch_size, 1)
            return (None, 1)

        name = "slice_len" if self.num_slices is None else "num_slices"
        divisor = self.slice_len or self.num_slices or 1
        if batch_size % divisor:
            raise ValueError(f"batch_size={batch_size} is not divisible by {name}={divisor}")

        if self.slice_len:
            return (divisor, batch_size // divisor)
        return (batch_size // divisor, divisor)

    def _passes(self) -> Iterator[TensorDictBase]:
        while True:
            found = False
            for episode in self._pass():
                found = True
                yield episode
            if not found:
                raise ValueError("the stream has no episodes")

    def _pass(self) -> Iterator[TensorDictBase]:
        """All episodes once."""
        window: list[TensorDictBase] = []
        for episode in self._open_episodes():
            if not self.shuffle:
                yield episode
            elif len(window) < WINDOW:
                window.append(episode)
            else:
                at = self._draw(WINDOW)
                yield window[at]
                window[at] = episode

        order = torch.randperm(len(window), generator=self._generator) if window else ()
        for at in order:
            yield window[int(at)]

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._generator))

    def _slice(self, episode: TensorDictBase, length: int) -> TensorDictBase:
        """``length`` rows of an episode from a random place on."""
        rows = len(episode)
        if rows < length and self.strict_length and self.pad is None:
            raise ValueError(
                f"episode {int(episode.get(TRAJ_IDS)[0])} has {rows} rows, but slices have {length}: pass a "
                "smaller slice_len, strict_length=False to get shorter slices, or pad= to pad them"
            )

        first = self._draw(rows - length + 1) if rows > length else 0
        part = cast(TensorDictBase, episode[first : first + length]).clone()
        part.get(IS_INIT)[0] = True
        part.get(DONE)[-1] = True
        part.get(TRUNCATED)[-1] |= ~part.get(TERMINATED)[-1]

        if self.pad is not None:
            part[MASK] = torch.ones(len(part), dtype=torch.bool)
            if len(part) < length:
                part = _join([part, self._padding(part, length - len(part))])
        return part

    def _padding(self, part: TensorDictBase, rows: int) -> TensorDictBase:
        """Rows behind a slice, of the same trajectory."""
        assert self.pad is not None
        value = self.pad

        def fill(column: Tensor) -> Tensor:
            shape = (rows, *column.shape[1:])
            if column.dtype is torch.bool:
                return column.new_zeros(shape)
            return column.new_full(shape, value)

        padding = part.apply(fill, batch_size=[rows])
        assert padding is not None
        padding[TRAJ_IDS] = part.get(TRAJ_IDS)[-1:].expand(rows)
        return padding


def _join(parts: list[TensorDictBase]) -> TensorDictBase:
    return cast(TensorDictBase, TensorDict.cat(parts))


def _in_order(episodes: Iterator[TensorDictBase], batch_size: int) -> Iterator[TensorDictBase]:
    """All rows, one after the other."""
    parts: list[TensorDictBase] = []
    missing = batch_size  # number of rows still needed for the batch
    for episode in episodes:
        first = 0
        while len(episode) - first >= missing:
            yield _join([*parts, episode[first : first + missing]])
            parts = []
            first = first + missing
            missing = batch_size
        if first < len(episode):
            parts.append(episode[first:])
            missing -= len(episode) - first
    if parts:
        yield _join(parts)

"""`EpisodeStream`: batches of episodes that are read one after the other, and never stored."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.checks import whole_number
from flatroll.layout.keys import DONE, IS_INIT, MASK, TERMINATED, TRAJ_IDS, TRUNCATED

WINDOW = 16  # episodes in memory, of which a shuffled stream draws the next one


class EpisodeStream:
    """Reads episodes one after the other and gives batches of whole ones, of their slices, or of their rows in order.

    A slice is marked as those of a `SliceSampler` are: its first row is ``is_init``, its last one done, and truncated
    unless terminated.

    Args:
        open_episodes: returns the episodes of one pass, flat batches ``[T]`` with all markers, new ones at each call.
        shuffle: take episodes in random order, as far as a window of 16 of them allows. False: as they come.
        num_slices: slices of a batch, each of ``batch_size / num_slices`` rows and of another episode.
        slice_len: rows of a slice; a batch has ``batch_size / slice_len`` of them, each of another episode.
        pad: value of the rows that are added to slices of shorter episodes; flags are False there, and
            ``("collector", "mask")``, which all rows have then, is, too. True: 0. None or False: do not pad.
        strict_length: refuse episodes that are shorter than a slice. False: give all of their rows.
        generator: of all draws, on the CPU; None: torch's global one.

    Raises:
        ValueError: both ``num_slices`` and ``slice_len``, or a number below 1.
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
            raise ValueError("give num_slices or slice_len, not both: batch_size says the other")
        self.num_slices = None if num_slices is None else whole_number("num_slices", num_slices)
        self.slice_len = None if slice_len is None else whole_number("slice_len", slice_len)
        self.shuffle, self.strict_length = shuffle, strict_length
        self.pad = None if pad is None or pad is False else float(pad is not True and pad)
        self._open_episodes, self._generator = open_episodes, generator
        self._endless: tuple[int | None, Iterator[TensorDictBase]] | None = None

    def batches(self, batch_size: int | None = None) -> Iterator[TensorDictBase]:
        """Yield the batches of one pass over the episodes; the last one may have fewer rows.

        Without slices and with a ``batch_size``, batches are of one slice of so many rows if the stream is shuffled,
        else of consecutive rows, each once. Without ``batch_size`` they are whole episodes, or one slice of each.

        Raises:
            ValueError: ``batch_size`` cannot be divided into slices, or an episode is too short.
        """
        return self._batches(self._pass(), batch_size)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return the next batch of `batches`, of passes without end; with another ``batch_size`` a new pass begins.

        Raises:
            ValueError: as `batches`; there are no episodes.
        """
        if self._endless is None or self._endless[0] != batch_size:
            self._endless = batch_size, self._batches(self._passes(), batch_size)
        try:
            return next(self._endless[1])
        except BaseException:
            self._endless = None  # a generator that raised has ended
            raise

    def _batches(
        self, episodes: Iterator[TensorDictBase], batch_size: int | None
    ) -> Iterator[TensorDictBase]:
        length, count = self._slices(batch_size)
        if length is None and batch_size is None:
            yield from episodes
        elif length is None:
            yield from _in_order(episodes, whole_number("batch_size", batch_size))
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
        whole_number("batch_size", batch_size)
        if self.num_slices is None and self.slice_len is None:
            return (batch_size, 1) if self.shuffle else (None, 1)
        name = "slice_len" if self.num_slices is None else "num_slices"
        divisor = self.slice_len or self.num_slices or 1
        if batch_size % divisor:
            raise ValueError(f"batch_size={batch_size} cannot be divided by {name}={divisor}")
        return (divisor, batch_size // divisor) if self.slice_len else (batch_size // divisor, divisor)

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
                f"episode {int(episode.get(TRAJ_IDS)[0])} has {rows} rows, slices have {length}: give a shorter one, "
                "strict_length=False, which gives what is there, or pad=, which fills it up"
            )
        first = self._draw(rows - length + 1) if rows > length else 0
        part = cast(TensorDictBase, episode[first : first + length]).clone()
        part.get(IS_INIT)[0] = part.get(DONE)[-1] = True
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
            return column.new_zeros(shape) if column.dtype is torch.bool else column.new_full(shape, value)

        padding = part.apply(fill, batch_size=[rows])
        assert padding is not None
        padding[TRAJ_IDS] = part.get(TRAJ_IDS)[-1:].expand(rows)
        return padding


def _join(parts: list[TensorDictBase]) -> TensorDictBase:
    return cast(TensorDictBase, TensorDict.cat(parts))


def _in_order(episodes: Iterator[TensorDictBase], batch_size: int) -> Iterator[TensorDictBase]:
    """All rows, one after the other."""
    parts: list[TensorDictBase] = []
    missing = batch_size  # rows until the batch is full
    for episode in episodes:
        first = 0
        while len(episode) - first >= missing:
            yield _join([*parts, episode[first : first + missing]])
            parts, first, missing = [], first + missing, batch_size
        if first < len(episode):
            parts.append(episode[first:])
            missing -= len(episode) - first
    if parts:
        yield _join(parts)

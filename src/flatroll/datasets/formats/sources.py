"""Helpers for writers of files: rows of a batch, buffer or replay log in chunks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers import ReplayBuffer
from flatroll.datasets.replay_log.log import ReplayLog
from flatroll.datasets.replay_log.recipe import CannotRemakeError
from flatroll.layout.boundaries import run_starts
from flatroll.layout.checks import check_rows, check_whole_number
from flatroll.layout.export import Array
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    STEP_COUNT,
    TRAJ_IDS,
    NestedKey,
    next_key,
    observation_keys,
    optional_marker,
)
from flatroll.layout.ted import is_shift, rows_equal
from flatroll.specs import as_space

CHUNK_BYTES = 32 << 20  # bytes of rows in memory at a time


class Source(NamedTuple):
    """Rows to write, oldest first.

    Attributes:
        rows: number of rows.
        read: returns the flat batch of some of them, by their numbers 0 ... rows - 1, int64 ``[n]``; of a source with
            ``trajectories``, the numbers are consecutive.
        chunk_rows: how many to read at a time.
        advance: is called with the number of rows that a writer is done with.
        space_of: returns the Gymnasium space of an entry, or None: what the buffer knows of its collector's rows.
        trajectories: yields each trajectory whole, as `read_episodes` does, of a source whose rows are best read once
            and in order. None: they are found by the markers.
    """

    rows: int
    read: Callable[[Tensor], TensorDictBase]
    chunk_rows: int
    advance: Callable[[int], Any] = int
    space_of: Callable[[NestedKey], Any] = lambda key: None
    trajectories: Callable[[], Iterator[TensorDictBase]] | None = None

    def chunks(self) -> Iterator[TensorDictBase]:
        """Yield all rows in order, at most ``chunk_rows`` at a time."""
        for first in range(0, self.rows, self.chunk_rows):
            end = min(first + self.chunk_rows, self.rows)
            yield self.read(torch.arange(first, end))
            self.advance(end - first)


def open_source(source: TensorDictBase | ReplayBuffer | ReplayLog, chunk_rows: int | None = None) -> Source:
    """Return the rows of a flat batch, a buffer or a log, in the order in which they were written.

    A buffer's rows are those of ``buffer[...]``, after its transforms; with several lanes, lane after lane.

    Args:
        source: flat batch ``[N]``, a `flatroll.buffers.ReplayBuffer`, or an open `flatroll.datasets.ReplayLog`.
        chunk_rows: rows to read at a time. Default: 32 MiB.

    Raises:
        TypeError: ``source`` is none of these, or a buffer whose items are not rows.
        ValueError: it has no rows, is not ``[N]``, or ``chunk_rows`` is below 1.
    """
    if isinstance(source, ReplayLog):
        return _open_log(source, chunk_rows)

    if isinstance(source, TensorDictBase):
        check_rows(source, values=True)
        if source.batch_dims != 1:
            raise ValueError(
                f"source must be a buffer or a batch of size [N], got a batch of size {list(source.batch_size)}: "
                "join() concatenates the rows"
            )
        rows = len(source)
        lanes = torch.Size([])
        slots = None
    elif isinstance(source, ReplayBuffer):
        lanes = source.storage.lanes
        # slot = step * lanes + lane, in lane-major order.
        slots = source.ring.stored().reshape(-1, lanes.numel()).T.reshape(-1)
        rows = len(slots)
    else:
        raise TypeError(
            f"source must be a flat batch, a ReplayBuffer or a ReplayLog, got {type(source).__name__}"
        )

    if not rows:
        raise _no_rows_error()

    def read(numbers: Tensor) -> TensorDictBase:
        places: Any = numbers if slots is None else slots[numbers]
        if lanes:
            places = torch.unravel_index(places, (source.storage.max_size, *lanes))  # steps and lanes
        found = source[places]
        if not isinstance(found, TensorDictBase):
            raise TypeError(f"the buffer's items must be rows of tensors, got {type(found).__name__}")
        return found

    made = Source(rows, read, _check_chunk_rows(chunk_rows, read))
    if isinstance(source, ReplayBuffer):
        return made._replace(space_of=source.noted_space)
    return made


def _open_log(log: ReplayLog, chunk_rows: int | None) -> Source:
    """Return the rows of a log, which are made while they are read."""
    if not len(log):
        raise _no_rows_error()

    def read(numbers: Tensor) -> TensorDictBase:
        first = int(numbers[0])
        return log.rows(first, first + len(numbers))

    def space_of(key: NestedKey) -> Any:
        try:
            spec = log.spec.get(key, None)
        except CannotRemakeError:
            return None  # all rows are kept themselves: no env is needed
        if spec is None:
            return None
        return as_space(spec[0])

    chosen = _check_chunk_rows(chunk_rows, read)
    return Source(
        len(log),
        read,
        chosen,
        space_of=space_of,
        trajectories=lambda: log.trajectories(rows_at_once=chosen),
    )


def _check_chunk_rows(chunk_rows: int | None, read: Callable[[Tensor], TensorDictBase]) -> int:
    """Return how many rows to read at a time; by default those of `CHUNK_BYTES`."""
    if chunk_rows is None:
        chunk_rows = max(1, CHUNK_BYTES // max(1, read(torch.arange(1)).bytes()))
    return check_whole_number("chunk_rows", chunk_rows)


def _no_rows_error() -> ValueError:
    """Return the error for a source without rows."""
    return ValueError("source has no rows: there is nothing to export")


def select_markers(chunk: TensorDictBase, *others: NestedKey) -> TensorDictBase:
    """Return a copy of a chunk's boundary markers, and of those of ``others`` that exist."""
    return chunk.select(IS_INIT, DONE, TRAJ_IDS, *others, strict=False).clone()


def first_rows(parts: Sequence[TensorDictBase]) -> Tensor | None:
    """Return the number of the first row of each run, int64 ``[R]`` on the CPU; None without markers.

    Args:
        parts: the markers of all rows, chunk by chunk (`select_markers`).
    """
    markers = _join_markers(parts)
    if markers is None:
        return None
    return run_starts(markers).nonzero().squeeze(-1).cpu()


def _join_markers(parts: Sequence[TensorDictBase]) -> TensorDict | None:
    """Return the markers of all rows; None if there are none."""
    markers = cast(TensorDict, TensorDict.cat(list(parts)))
    kept = any(markers.get(key, None) is not None for key in (IS_INIT, DONE, TRAJ_IDS))
    if kept:
        return markers
    return None


def read_episodes(source: Source) -> Iterator[TensorDictBase]:
    """Yield each trajectory of the source as a flat batch ``[T]``, in the order in which they began.

    Runs with the same id form one trajectory if one continues the other: its first row is not an ``is_init`` row, and
    its observations and step count follow the other's last row.

    Raises:
        KeyError: there is no boundary marker.
    """
    if source.trajectories is not None:
        for rows in source.trajectories():
            yield rows
            source.advance(len(rows))
        return

    chunks = source._replace(advance=int).chunks()  # without the progress bar of writing
    markers = _join_markers([select_markers(chunk, STEP_COUNT) for chunk in chunks])
    marked = TensorDict({}, [source.rows]) if markers is None else markers
    starts = run_starts(marked)
    assert markers is not None  # without markers run_starts has raised
    first = starts.nonzero().squeeze(-1).tolist()
    stops = [*first[1:], source.rows]

    for runs in _join_runs(source, markers, first, stops):
        numbers = torch.cat([torch.arange(first[run], stops[run]) for run in runs])
        yield source.read(numbers)
        source.advance(len(numbers))


def _join_runs(source: Source, markers: TensorDict, first: list[int], stops: list[int]) -> list[list[int]]:
    """Numbers of the runs of each trajectory."""
    ids = markers.get(TRAJ_IDS, None)
    done = optional_marker(markers, DONE)
    is_init = optional_marker(markers, IS_INIT)
    if ids is None:
        return [[run] for run in range(len(first))]

    trajectories: list[list[int]] = []
    newest: dict[int, list[int]] = {}  # the last trajectory seen of each id
    for run, number in enumerate(ids.reshape(source.rows)[torch.tensor(first)].tolist()):
        before = newest.get(number)
        start = first[run]
        end = stops[before[-1]] - 1 if before else 0
        goes_on = (
            before is not None
            and not (done is not None and bool(done[end]))
            and not (is_init is not None and bool(is_init[start]))
            and _continues(source, markers, end, start)
        )
        if goes_on and before is not None:
            before.append(run)
        else:
            newest[number] = [run]
            trajectories.append(newest[number])
    return trajectories


def _continues(source: Source, markers: TensorDict, last: int, first: int) -> bool:
    """Whether row ``first`` comes after row ``last``, by step counts and observations."""
    steps = markers.get(STEP_COUNT, None)
    if steps is not None and not bool((steps[first] == steps[last] + 1).all()):
        return False

    rows = source.read(torch.tensor([last, first]))
    pairs = [(rows.get(key), rows.get(next_key(key), None)) for key in observation_keys(rows)]
    known = [(root, following) for root, following in pairs if following is not None]
    return bool(known) and all(rows_equal(root[1:], following[:1]) for root, following in known)


def check_follows(name: str, values: Array, following: Array) -> None:
    """Raise ValueError unless each of ``following`` ``[T]``, but the last, is the next row's of ``values`` ``[T]``."""
    ends = torch.zeros(len(values), dtype=torch.bool)
    ends[-1] = True
    if not is_shift(torch.from_numpy(values), torch.from_numpy(following), ends):
        raise ValueError(
            f"next.{name} is not {name} of the next row (n-step data?), which episodes cannot hold: use "
            'format="parquet" or "h5"'
        )

"""Evaluates a value network at a batch's observations and at its next observations.

Two calls, on observations and on next observations, are correct for a network that reads one row at a time (for few
rows, one call sees both). The extended stream needs one call: N + K rows instead of 2 N, exact, and required for a
recurrent network, whose state continues into the final observation of each run.

A next observation is the batch's ``("next", key)``, or in a compact batch the next row's observation or ``final``. If
none is known, the row's own observation is used, with a warning.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.values.extended_stream import (
    Appended,
    Boundaries,
    Budgeted,
    Interleaved,
    true_indices,
)
from flatroll.kernels.scan import is_tracing, zeroed
from flatroll.layout.boundaries import starts_from
from flatroll.layout.checks import check_whole_number
from flatroll.layout.final import Final, read_final
from flatroll.layout.keys import NestedKey, is_hidden, next_key, require
from flatroll.layout.tensordict_seam import call_network, call_plain, get_entry
from flatroll.modules import TransformerModule

Columns: TypeAlias = dict[NestedKey, Tensor]

#: Up to this many rows and bytes, copying the observations costs less than a second call of the network.
_FEW_ROWS = 4096
_FEW_BYTES = 1 << 17


def broadcast_like(flag: Tensor, column: Tensor) -> Tensor:
    """Append dims of size 1 to a flag ``[*B]``, so that it broadcasts over the features of ``column``."""
    return flag.reshape(*flag.shape, *[1] * (column.ndim - flag.ndim))


def flat_rows(column: Tensor, batch_dims: int) -> Tensor:
    """Flatten all batch dims of a column into one."""
    if batch_dims == 1:
        return column
    return column.flatten(0, batch_dims - 1)


@dataclass(frozen=True)
class Chunks:
    """Splits a batch into chunks for the value network, to limit the memory of its activations.

    Attributes:
        size: rows of a chunk along ``dim``.
        number: number of chunks, in place of ``size``.
        dim: the batch dim that is split.
        whole: whether everything goes through at once, as it does if neither ``size`` nor ``number`` is given.

    >>> list(Chunks(size=4).spans(10))
    [(0, 4), (4, 8), (8, 10)]
    """

    size: int | None = None
    number: int | None = None
    dim: int = 0
    whole: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size is not None and self.number is not None:
            raise ValueError(
                "pass value_chunk_size (rows per chunk) or num_chunks (number of chunks), not both: "
                f"got {self.size} and {self.number}"
            )

        for name, n in (("value_chunk_size", self.size), ("num_chunks", self.number)):
            if n is not None:
                check_whole_number(name, n)

        object.__setattr__(self, "whole", self.size is None and self.number in (None, 1))

    def along(self, batch_dims: int) -> int:
        """Return the dim to split in a batch with this many dims."""
        if not -batch_dims <= self.dim < batch_dims:
            raise ValueError(f"value_chunk_dim must name one of {batch_dims} batch dims, got {self.dim}")

        return self.dim % batch_dims

    def transposed(self, batch_dims: int, one: int, other: int) -> "Chunks":
        """Return the chunks of a batch with dims ``one`` and ``other`` swapped."""
        dim = self.along(batch_dims)
        return replace(self, dim={one: other, other: one}.get(dim, dim))

    def spans(
        self, rows: int, stops: Tensor | None = None, *, each: int = 1, first: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Yield the first row and the exclusive end of each chunk.

        Args:
            rows: past-the-last row of all.
            stops: past-the-last rows of the runs, ascending int64: then a chunk holds whole runs, as many as
                fit, and one run alone where it is longer than a chunk. Default: runs may be cut.
            each: rows that count as one for ``size``, where several batch dims have become one.
            first: first row of all.
        """
        # Rows per chunk: the given size, or all rows divided by the number of chunks, rounded up; at least 1.
        size = (self.size or 0) * each or -(-(rows - first) // (self.number or 1)) or 1

        if stops is None or size >= rows - first:
            for start in range(first, max(rows, first + 1), size):  # an empty batch gives one empty chunk
                yield start, min(start + size, rows)
            return

        bounds = stops.tolist()
        start = first
        last = 0
        while start < rows:
            # Add runs as long as the next one fits; bounds[last] is the stop of the last one.
            while last + 1 < len(bounds) and bounds[last + 1] <= start + size:
                last += 1

            yield start, bounds[last]

            start = bounds[last]
            last += 1


@dataclass(frozen=True)
class NetworkInputs:
    """What a value network reads from a batch: observations, next observations and recurrent states.

    Attributes:
        module: the network.
        is_init_key: entry that marks run starts for recurrent modules.
        observed: keys of the observations.
        next_observed: keys of the next observations.
        states: recurrent states; only those at the first rows of runs are read.
        recurrent: the network remembers, so the rows of a run must reach it together.
    """

    module: TensorDictModuleBase
    is_init_key: NestedKey
    observed: tuple[NestedKey, ...]
    next_observed: tuple[NestedKey, ...]
    states: tuple[NestedKey, ...]
    recurrent: bool

    @classmethod
    def of(cls, network: TensorDictModuleBase, is_init_key: NestedKey) -> "NetworkInputs":
        """Determine the inputs from the network's in_keys and out_keys, and from its recurrent modules."""
        read: list[NestedKey] = list(network.in_keys)  # pyright: ignore[reportAssignmentType]
        written = set(network.out_keys)
        # An entry that it reads, and writes under "next", is a state and not an observation.
        states = tuple(key for key in read if next_key(key) in written)
        observed = tuple(key for key in read if key not in states and key != is_init_key)

        recurrent = bool(states) or is_init_key in read
        if not recurrent:
            recurrent = any(hasattr(type(x), "make_tensordict_primer") for x in network.modules())

        return cls(network, is_init_key, observed, tuple(map(next_key, observed)), states, recurrent)


@dataclass(frozen=True)
class Parameters:
    """Parameters to use instead of the network's own, for root and for next values (target networks)."""

    now: TensorDictBase | None = None
    following: TensorDictBase | None = None


@dataclass(frozen=True)
class ValueInputs:
    """Inputs of :func:`state_values`: network, batch, boundaries and options.

    Attributes:
        network: the network and what it reads; None takes both values from the batch.
        value_key: entry the network writes its value under, a trailing dim included (``[*B, T, 1]``).
        batch: ``[*B, T]``.
        at: its boundaries.
        chunks: rows passed to the network at a time.
        shifted: one call over the extended stream, also where two are possible.
        shifted_budget: the stream has this many places more than rows in each series; None is what fits.
        skip_existing: use values that are in the batch.
        final: the next observations that no row of a compact batch holds.
        parameters: in place of the network's own.
        n_step: whether the next observation of a row is not the observation of the next row.
        warn: called with a message if a row's own observation is used and the run is not terminated.
    """

    network: NetworkInputs | None
    value_key: NestedKey
    batch: TensorDictBase
    at: Boundaries
    chunks: Chunks = Chunks()
    shifted: bool = False
    shifted_budget: int | None = None
    skip_existing: bool = False
    final: TensorDictBase | None = None
    parameters: Parameters = field(default_factory=Parameters)
    n_step: bool = False
    warn: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Values:
    """The values ``[*B, T, *F]`` of a batch's observations and next observations.

    Attributes:
        value: of each row's observation, 0 where not valid.
        next_value: of its next one, 0 where terminated.
        valid: bool ``[*B, T]``, the rows that a stream of fixed length has room for; None is all of them.
    """

    value: Tensor
    next_value: Tensor
    valid: Tensor | None = None


class RowInputs(NamedTuple):
    """What a value network reads at each row of a batch and after it.

    Attributes:
        root: observations ``[*B, *F]``, by key.
        following: next observations by the same keys; NaN where they are not known.
        unknown: bool ``[*B]``, the rows whose next observation the env hid, or None.
        terminated: bool ``[*B]``, the rows whose next value is 0.
    """

    root: Columns
    following: Columns
    unknown: Tensor | None
    terminated: Tensor

    def split(self, dim: int, chunks: Chunks) -> "Iterator[RowInputs]":
        """Yield the inputs of one chunk after another along a batch dim."""
        count = self.terminated.shape[dim]

        for start, stop in chunks.spans(count):
            if stop - start == count:  # all rows at once
                yield self
                continue

            rows = (*[slice(None)] * dim, slice(start, stop))
            unknown = self.unknown
            if unknown is not None:
                unknown = unknown[rows]
            yield RowInputs(
                {key: column[rows] for key, column in self.root.items()},
                {key: column[rows] for key, column in self.following.items()},
                unknown,
                self.terminated[rows],
            )


@dataclass(frozen=True)
class Observations:
    """A batch's observations and known next observations, all batch dims flattened into one.

    Attributes:
        root: the network's inputs at each row ``[N, *F]``, by key: observations, states and flags.
        next: next observations ``[N, *F]`` in the batch.
        final: next observations ``[K, *F]`` in ``final``.
        final_row: int64 ``[K]``, ascending, the rows that those follow; None if there are none of them.
        nowhere: keys whose next observations are in neither.
        unknown: bool ``[N]``, the rows whose next observation the env hid, or None.
        starts: bool ``[N, 1]``, first rows of runs, and their key for recurrent modules; None without those.
    """

    root: Columns
    next: Columns
    final: Columns
    final_row: Tensor | None
    nowhere: list[NestedKey]
    unknown: Tensor | None
    starts: tuple[NestedKey, Tensor] | None


def state_values(inputs: ValueInputs, next_value: Tensor | None = None) -> Values:
    """Return the values of a batch's observations and next observations, ``[*B, T, *F]``; known ones are kept.

    Raises:
        KeyError: the batch lacks an entry the network reads, or the network does not write ``value_key``.
        TypeError: ``final`` is not a tensordict.
        ValueError: ``final`` does not belong to this batch, the value has no trailing dim, or one stream is
            asked to serve two sets of parameters, or n-step rows.
    """
    batch = inputs.batch
    network = inputs.network
    at = inputs.at

    # Values that are known.
    if network is None:
        return _read_values(inputs, next_value)
    value = None
    if inputs.skip_existing:
        value, next_value = _existing_values(inputs, next_value)
    if value is not None and next_value is not None:
        return Values(value, _next_values(inputs, value, next_value))

    # The observations in the batch. Keys missing under "next" may be in final.
    root: Columns = {}
    following: Columns = {}
    absent: list[NestedKey] = []
    for key, following_key in zip(network.observed, network.next_observed, strict=True):
        column = get_entry(batch, key)
        if column is None:
            column = require(batch, key)  # the error says what writes the entry
        root[key] = column

        next_column = get_entry(batch, following_key)
        if next_column is None:
            absent.append(key)
        else:
            following[key] = next_column

    from_final = None
    if inputs.final is not None:
        from_final = read_final(inputs.final, absent, wanted="the collector.final of this batch")

    # Two calls of the network where they are possible, else one over the extended stream.
    rows = RowInputs(root, following, at.unknown, at.terminated)
    in_order = inputs.shifted or network.recurrent or at.crossed is not None
    if next_value is not None or absent or in_order:
        return _in_order(inputs, _flatten(inputs, network, rows, from_final), value, next_value)

    if inputs.chunks.whole and inputs.chunks.dim == 0:
        value, next_value = _row_by_row(inputs, network, rows, value)
    else:
        value, next_value = _chunk_by_chunk(inputs, network, rows, value)
    return Values(value, zeroed(next_value, at.terminated))


def _read_values(inputs: ValueInputs, next_value: Tensor | None) -> Values:
    """Return the values that the batch must hold where no network is called; ``next_value`` may be known."""
    value = require(inputs.batch, inputs.value_key)
    if next_value is None:
        next_value = require(inputs.batch, next_key(inputs.value_key))
    return Values(value, _next_values(inputs, value, next_value))


def _next_values(inputs: ValueInputs, value: Tensor, next_value: Tensor) -> Tensor:
    """Return what follows each row, given both values: 0 where terminated, the next row's value at crossed ends."""
    crossed = inputs.at.crossed
    if crossed is not None and value.shape == next_value.shape:
        behind = value.roll(-1, inputs.batch.batch_dims - 1)
        next_value = torch.where(broadcast_like(crossed, value), behind, next_value)
    return zeroed(next_value, inputs.at.terminated)


def _existing_values(inputs: ValueInputs, next_value: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return those values of observations and of next ones that the batch holds; ``next_value`` may be known."""
    value = inputs.batch.get(inputs.value_key, None)
    if next_value is None:
        next_value = inputs.batch.get(next_key(inputs.value_key), None)
    return value, next_value


def _row_by_row(
    inputs: ValueInputs, network: NetworkInputs, rows: RowInputs, value: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values of observations and next observations of a network that reads one row at a time.

    It is called on one after the other, or once where they are few. ``value``, of the observations, may be known.
    """
    now = inputs.parameters.now
    then = inputs.parameters.following
    if then is None:
        then = now

    # Next observations that are not known are replaced by the row's own.
    following: Columns = {}
    for key, column in rows.following.items():
        warn = partial(_warn_of_nan, inputs.warn, key, rows.unknown, rows.terminated)
        following[key] = fill_missing(column, rows.root[key], rows.unknown, warn)

    module = network.module
    key = inputs.value_key
    shape = rows.terminated.shape
    count = shape[0]
    few = shape.numel() <= _FEW_ROWS and sum(c.nbytes for c in rows.root.values()) <= _FEW_BYTES

    if value is None and now is then and inputs.chunks.whole and few:
        # Observations first, then next observations, in a single call.
        pairs = {key: torch.cat([column, following[key]]) for key, column in rows.root.items()}
        both = evaluate_network(module, pairs, torch.Size([2 * count, *shape[1:]]), key, now)
        return both[:count], both[count:]

    if value is None:
        value = evaluate_network(module, rows.root, shape, key, now)
    return value, evaluate_network(module, following, shape, key, then)


def _chunk_by_chunk(
    inputs: ValueInputs, network: NetworkInputs, rows: RowInputs, value: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Do the same as :func:`_row_by_row` on one chunk of the rows after another."""
    dim = inputs.chunks.along(inputs.batch.batch_dims)

    # one item per chunk
    values = []
    next_values = []
    for chunk in rows.split(dim, inputs.chunks):
        chunk_value, chunk_next_value = _row_by_row(inputs, network, chunk, value)
        values.append(chunk_value)
        next_values.append(chunk_next_value)

    if value is None:
        value = _join(values, dim)
    return value, _join(next_values, dim)


def _join(chunks: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the values of chunks; a single one is not copied."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(chunks, dim)


def _in_order(
    inputs: ValueInputs, observations: Observations, value: Tensor | None, next_value: Tensor | None
) -> Values:
    """Values of a network that reads the rows of a run in order, or whose next observations are in other rows.

    One of the two, of observations and of next observations, may be known.

    Raises:
        ValueError: n-step rows, or ``shifted`` with two sets of parameters.
    """
    at = inputs.at
    if next_value is not None:  # rows only: the stream has no insertions
        stream = Appended(torch.zeros(0, dtype=torch.int64), at.ends.numel())
        value = _values_at_places(inputs, observations, stream, inputs.parameters.now)
        value = value.reshape(*at.ends.shape, *value.shape[1:])
        return Values(value, _next_values(inputs, value, next_value))

    if inputs.n_step:
        raise ValueError(
            "n-step rows are followed by an observation several rows later, so one call over the rows (shifted=True, "
            "episodic=False, a recurrent value_network, a batch without next observations) has no value for it: "
            "evaluate before the n-step transform, or use shifted=False with a network that reads one row at a time"
        )

    now = inputs.parameters.now
    then = inputs.parameters.following
    if then is None:
        return _over_stream(inputs, observations, now, value)

    if inputs.shifted:
        raise ValueError(
            "shifted=True takes the values of the rows and of the next ones from one call, so from one set "
            "of parameters: leave target_params out, or shifted=True"
        )

    if value is None:  # the stream twice, once with each set of parameters
        value = _over_stream(inputs, observations, now, None).value
    return Values(value, _over_stream(inputs, observations, then, None).next_value)


def _flatten(
    inputs: ValueInputs, network: NetworkInputs, rows: RowInputs, final: Final | None
) -> Observations:
    """Return the observations with all batch dims flattened, and the other inputs of recurrent modules."""
    batch = inputs.batch
    dims = inputs.batch.batch_dims

    next_final: Columns = {}
    final_row = None
    if final is not None and final.next:
        next_final = final.next
        final_row = final.row
        if final_row is None:
            raise KeyError(
                "final has no entry 'row', the rows of the batch that its next observations follow: pass "
                "collector.final as it came with the batch"
            )

    columns = {key: flat_rows(column, dims) for key, column in rows.root.items()}
    starts = None
    # For recurrent modules the computed boundaries, not the markers of the batch, say where runs start.
    if network.recurrent:
        if any(map(is_hidden, network.states)):  # which no batch holds
            _warn_of_cut_runs(network.module, batch, starts_from(inputs.at.ends))
        is_init = starts_from(inputs.at.ends.reshape(-1)).unsqueeze(-1)
        states = {key: batch.get(key, None) for key in network.states}
        columns |= {key: flat_rows(column, dims) for key, column in states.items() if column is not None}
        columns[network.is_init_key] = is_init
        starts = (network.is_init_key, is_init)

    unknown = rows.unknown
    if unknown is not None:
        unknown = unknown.reshape(-1)

    return Observations(
        root=columns,
        next={key: flat_rows(column, dims) for key, column in rows.following.items()},
        final=next_final,
        final_row=final_row,
        nowhere=[key for key in rows.root if key not in rows.following and key not in next_final],
        unknown=unknown,
        starts=starts,
    )


def _warn_of_cut_runs(module: TensorDictModuleBase, batch: TensorDictBase, starts: Tensor) -> None:
    """Let the transformers of a network say that runs begin inside episodes: the stream does not tell them."""
    for part in module.modules():
        if isinstance(part, TransformerModule):
            part.warn_of_cut_runs(batch, starts)


def _over_stream(
    inputs: ValueInputs, observations: Observations, parameters: TensorDictBase | None, value: Tensor | None
) -> Values:
    """Both values from one call over the extended stream; ``value`` of the rows, if it is known, is kept."""
    at = inputs.at
    network = inputs.network

    valid = None
    lacking = None
    count = at.ends.numel()
    first = 0
    known = []
    stream: Appended | Interleaved

    if inputs.shifted and inputs.shifted_budget is not None:
        stream = Budgeted.of(at.bootstrapped.reshape(-1, at.ends.shape[-1]), inputs.shifted_budget)
        valid = stream.valid.view(at.ends.shape)
        if observations.final or observations.nowhere:  # otherwise no sync is needed
            _check_known(inputs, observations, true_indices(at.bootstrapped & valid))
    else:
        used = None
        if _final_tells(inputs, observations):
            after, used, lacking = _rows_in_final(observations, at.bootstrapped.reshape(-1))
        else:
            after = true_indices(at.bootstrapped)
            _check_known(inputs, observations, after)
        if network is not None and network.recurrent:
            stream = Interleaved.behind(after, count)
        else:
            stream = Appended(after, count, used)
            if value is not None:  # only the inserted places remain to be evaluated
                first = count
                known = [flat_rows(value, inputs.batch.batch_dims)]

    # The values at the places of the rows, and at the place after each.
    evaluated = _values_at_places(inputs, observations, stream, parameters, first)
    if known:
        evaluated = torch.cat([*known, evaluated])
    now, next_value = stream.split(evaluated)

    shape = (*inputs.batch.batch_size, *now.shape[1:])
    now = now.reshape(shape)
    next_value = next_value.reshape(shape)

    if lacking is not None:
        # Instead of the error of `_check_known`, for which the device would be waited for.
        lost = broadcast_like(lacking.view(at.ends.shape), next_value)
        next_value = torch.where(lost, torch.nan, next_value)
    if valid is not None:  # a row without a place has the value of another row
        now = torch.where(broadcast_like(valid, now), now, 0.0)
    if value is not None:
        now = value

    return Values(now, zeroed(next_value, at.terminated), valid)


def _values_at_places(
    inputs: ValueInputs,
    observations: Observations,
    stream: Appended | Interleaved,
    parameters: TensorDictBase | None,
    first: int = 0,
) -> Tensor:
    """Return the network's output for the stream's places from ``first`` on, chunk by chunk."""
    assert inputs.network is not None
    chunks = inputs.chunks
    ends = inputs.at.ends.reshape(-1)

    # A recurrent network must see each run in one chunk.
    stops = None
    if inputs.network.recurrent and not chunks.whole:
        stops = stream.stops(ends)
    # Rows per index of the dim that is split: all batch dims are flattened here.
    each = len(ends) // max(inputs.batch.shape[chunks.along(inputs.batch.batch_dims)], 1)

    # one item per chunk
    module = inputs.network.module
    key = inputs.value_key
    values = []
    for start, stop in chunks.spans(stream.places, stops, each=each, first=first):
        columns = _columns_at_places(inputs, observations, stream, start, stop)
        values.append(evaluate_network(module, columns, torch.Size([stop - start]), key, parameters))

    return _join(values)


def _columns_at_places(
    inputs: ValueInputs, observations: Observations, stream: Appended | Interleaved, start: int, stop: int
) -> Columns:
    """Return the network's inputs at the stream's places ``start`` to ``stop``; states repeat the previous row."""
    if isinstance(stream, Appended):
        count = stream.count  # place count + k holds the observation after row after[k]
        if stop <= count:
            return {key: column[start:stop] for key, column in observations.root.items()}

        after = stream.after[max(start - count, 0) : stop - count]
        inserted = next_observations(inputs, observations, after)
        for key, column in observations.root.items():
            if key not in inserted:
                inserted[key] = column[after]
        if start >= count:  # only inserted places
            return inserted

        return {
            key: torch.cat([column[start:], inserted[key].to(column.dtype)])
            for key, column in observations.root.items()
        }

    rows = stream.source[start:stop]
    columns = {key: column.index_select(0, rows) for key, column in observations.root.items()}
    if isinstance(stream, Budgeted):  # static shapes: looked up for all places, used for the inserted ones
        return columns | next_observations(inputs, observations, rows, stream.inserted[start:stop])

    assert stream.after is not None
    places = stream.position[stream.after] + 1  # of the inserted observations, ascending

    # range of the inserted places in this chunk
    low = 0
    high = len(places)
    if (start, stop) != (0, stream.places):
        low, high = torch.searchsorted(places, places.new_tensor([start, stop])).tolist()

    local = places[low:high] - start  # indices within this chunk
    for key, column in next_observations(inputs, observations, stream.after[low:high]).items():
        columns[key][local] = column.to(columns[key].dtype)

    return columns


def next_observations(
    inputs: ValueInputs, observations: Observations, rows: Tensor, chosen: Tensor | None = None
) -> Columns:
    """Return the next observations of these rows (int64 ``[M]``); unknown entries are absent.

    Rows that are not ``chosen`` (bool ``[M]``; None is all) get their own observation.
    """
    columns: Columns = {}

    # Rows that fall back to their own observation: the env hid the next one, it is not chosen, or final lacks it.
    hidden = None
    if observations.unknown is not None:
        hidden = observations.unknown[rows]
    if chosen is not None:
        hidden = ~chosen if hidden is None else hidden | ~chosen

    # Sources of next observations: columns by key, the index of each row in them, and the rows for which they
    # are invalid.
    sources = [(observations.next, rows, hidden)]
    if observations.final_row is not None and len(observations.final_row):
        place, missing = _places_in_final(observations.final_row, rows)
        if hidden is not None:
            missing = hidden | missing
        sources.append((observations.final, place, missing))

    for source, place, lost in sources:
        for key, column in source.items():
            own = observations.root[key].index_select(0, rows)
            warn = partial(_warn_of_nan, inputs.warn, key, lost, None)
            columns[key] = fill_missing(column.index_select(0, place).to(own.dtype), own, lost, warn)

    if observations.starts is not None:  # an inserted place continues the previous run, so it is not a start
        key, starts = observations.starts
        start = starts.index_select(0, rows)
        if chosen is None:
            columns[key] = torch.zeros_like(start)
        else:
            columns[key] = start & ~chosen.unsqueeze(-1)

    return columns


def _final_tells(inputs: ValueInputs, observations: Observations) -> bool:
    """Return whether ``final`` on a device may tell which places stand behind the stream, so that nobody waits.

    These are more than those that are used, so their number must not matter to the network: a recurrent one would
    carry its state over a place, and batch normalisation averages over all.
    """
    row = observations.final_row
    network = inputs.network
    if row is None or row.device.type == "cpu" or is_tracing():
        return False
    if observations.unknown is not None or observations.nowhere or network is None or network.recurrent:
        return False
    # what all of torch's layers have whose statistics are those of a batch
    return not any(
        hasattr(part, "track_running_stats") and part.training for part in network.module.modules()
    )


def _rows_in_final(observations: Observations, bootstrapped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of ``final``, which of them are bootstrapped rows, and which of those it lacks, bool ``[N]``."""
    row = observations.final_row
    assert row is not None
    count = len(bootstrapped)

    after = row.clamp(0, count - 1)
    used = (after == row) & bootstrapped[after]
    # one place more, for what is not used
    there = torch.zeros(count + 1, dtype=torch.bool, device=row.device)
    there = there.index_fill_(0, torch.where(used, after, count), True)[:count]
    return after, used, bootstrapped & ~there


def _check_known(inputs: ValueInputs, observations: Observations, rows: Tensor) -> None:
    """Refuse a ``final`` that lacks what follows one of these rows (int64, ascending), unless the env hid it."""
    if observations.final_row is not None:
        missing = _places_in_final(observations.final_row, rows)[1]
        if observations.unknown is not None:
            missing = missing & ~observations.unknown[rows]
        if bool(missing.any()):
            raise ValueError(
                f"final has no next observation for row {int(rows[missing][0])}, which ends a run without "
                "terminating: final must be the one that came with this batch, rows in the same order"
            )

    if observations.nowhere and len(rows):
        key = observations.nowhere[0]
        if inputs.final is None:
            lost = "no final= came with it"
        else:
            lost = "final= holds none"

        inputs.warn(
            f"the batch has no entry {next_key(key)!r} and {lost}: at the end of each run that is not "
            f"terminated the value of the row's own {key!r} is used as the next value. For exact values pass "
            "collector.final as final= or keep next observations; if a module writes the entry, the value network can "
            "begin with that module instead"
        )


def _places_in_final(final_row: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of these rows in ``final`` ``[M]``, and which are missing, bool ``[M]``."""
    if not len(final_row):
        return torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    # The first index whose row is not smaller. It is past the end for rows after all of them, hence the clamp.
    place = torch.searchsorted(final_row, rows).clamp(max=len(final_row) - 1)
    return place, final_row[place] != rows


def fill_missing(
    column: Tensor, root: Tensor, hidden: Tensor | None, warn: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Next observations ``[*B, *F]``, the root's where they are NaN (elementwise) or hidden (rows ``[*B]``).

    ``warn`` is called with the mask of the NaN, if the tensor is on the CPU and there is any.

    >>> fill_missing(torch.tensor([float("nan"), 2.0, 3.0]), torch.ones(3), torch.tensor([False, False, True]))
    tensor([1., 2., 1.])
    """
    bad = None
    if column.is_floating_point():
        # One pass: a sum is finite only if no element is NaN. Not on a device, where it would sync.
        asked = column.device.type == "cpu" and not is_tracing()
        if not (asked and math.isfinite(column.detach().sum().item())):
            bad = column.isnan()
            if asked and warn is not None:
                warn(bad)

    if hidden is not None:
        rows = broadcast_like(hidden, column)
        bad = rows if bad is None else bad | rows

    if bad is None:
        return column
    return torch.where(bad, root, column)


def _warn_of_nan(
    warn: Callable[[str], None], key: NestedKey, hidden: Tensor | None, over: Tensor | None, nan: Tensor
) -> None:
    """Warn about NaN in next observations, except in rows that are hidden or ``over``, which do not count."""
    if hidden is None:
        silent = over
    elif over is None:
        silent = hidden
    else:
        silent = hidden | over

    # Rows with any NaN are reported.
    if silent is None:
        rows = nan.reshape(*nan.shape[:1], -1).any(-1)
    else:
        rows = nan.reshape(*silent.shape, -1).any(-1) & ~silent

    if bool(rows.any()):
        warn(
            f"batch[{next_key(key)!r}] is NaN in {int(rows.sum())} rows that are not terminated: the row's own "
            f"{key!r} is used instead. A storage with compact_obs=True keeps the true ones, and so does final= "
            "with a compact batch"
        )


def evaluate_network(
    network: TensorDictModuleBase,
    columns: Mapping[NestedKey, Tensor],
    shape: torch.Size,
    value_key: NestedKey,
    parameters: TensorDictBase | None = None,
) -> Tensor:
    """Return the network's output under ``value_key``, ``[*shape, *F]``, for these input columns.

    ``parameters`` take the place of its own. A KeyError says that it writes no such entry, a ValueError that the
    value is not one for each row, with a trailing dim.
    """
    # The parameters replace the network's own only during the call.
    with nullcontext() if parameters is None else parameters.to_module(network):
        outputs: Any = None
        if value_key in network.out_keys:
            outputs = call_plain(network, columns)
        if outputs is None:
            outputs = call_network(network, TensorDict(dict(columns), batch_size=shape))

    value: Tensor | None = outputs.get(value_key, None)
    if value is None:
        raise KeyError(
            f"value_network wrote no entry {value_key!r}: its out_keys are {list(network.out_keys)}; "
            "name the one that holds the value with value_key="
        )

    if value.ndim == len(shape) or value.shape[: len(shape)] != shape:
        raise ValueError(
            f"value_network, given a batch of {tuple(shape)}, must write {value_key!r} of shape {(*shape, 1)}, "
            f"got {tuple(value.shape)}"
        )

    return value

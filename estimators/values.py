"""The values of a batch's observations and next observations, from one network.

Two calls, on the observations and on the next observations, are right for a network that reads one row at
a time. The *extended stream* needs one: the rows, and for each run the final observation it bootstraps from.
A row's next value is then the value of the row behind it. That is N + K rows instead of 2 N, exact, and the
only right form for a recurrent network, whose memory runs on into the final observation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.chunks import Chunks
from flatroll.estimators.stream import Appended, Columns, Interleaved, Stream, open_ends
from flatroll.layout.keys import NestedKey, next_key, require


@dataclass(frozen=True)
class NetworkInputs:
    """What a value network reads: observations, whose next ones matter, and what a memory needs.

    Attributes:
        observed: keys that have a next version in the stream.
        states: recurrent states, of which only the one at a run's first row is read.
        recurrent: the network remembers, so the rows of a run must reach it together.
    """

    observed: tuple[NestedKey, ...]
    states: tuple[NestedKey, ...]
    recurrent: bool

    @classmethod
    def of(cls, network: TensorDictModuleBase, is_init_key: NestedKey) -> "NetworkInputs":
        read: list[NestedKey] = list(network.in_keys)  # pyright: ignore[reportAssignmentType]
        written = set(network.out_keys)
        states = tuple(key for key in read if next_key(key) in written)
        observed = tuple(key for key in read if key not in states and key != is_init_key)
        remembers = any(hasattr(module, "make_tensordict_primer") for module in network.modules())
        return cls(observed, states, bool(states) or is_init_key in read or remembers)


@dataclass(frozen=True)
class Boundaries:
    """Where runs stop and what is known behind them; bool tensors of the batch's shape.

    Attributes:
        ends: last row of each run.
        terminated: ends whose next value is 0.
        unknown: ends whose next observation the env hid, or None.
    """

    ends: Tensor
    terminated: Tensor
    unknown: Tensor | None


class StateValues:
    """Evaluate a batch: ``value`` of each row's observation, ``next_value`` of its next one.

    Args:
        network: tensordict module that writes ``value_key``, a trailing dim included (``[*B, T, 1]``).
        value_key: entry the network writes its value under.
        is_init_key: entry that tells a recurrent network where runs start.
        shifted: one call over the extended stream even where two calls would do.
        chunks: rows that go through the network at a time.
        warn: called with a text when a next observation is missing and the root one stands in for it.
    """

    def __init__(
        self,
        network: TensorDictModuleBase,
        *,
        value_key: NestedKey,
        is_init_key: NestedKey,
        shifted: bool,
        chunks: Chunks,
        warn: Callable[[str], None],
    ) -> None:
        self.network, self.value_key, self.is_init_key = network, value_key, is_init_key
        self.shifted, self.chunks, self.warn = shifted, chunks, warn
        self.inputs = NetworkInputs.of(network, is_init_key)

    def __call__(
        self, batch: TensorDictBase, at: Boundaries, final: TensorDictBase | None = None
    ) -> tuple[Tensor, Tensor]:
        """``value`` and ``next_value`` ``[*B, T, *F]``; ``next_value`` is 0 where terminated.

        Raises:
            KeyError: the batch lacks an entry the network reads, or the network does not write ``value_key``.
            ValueError: ``final`` does not belong to this batch, or the value has no trailing dim.
        """
        complete = all(batch.get(next_key(key), None) is not None for key in self.inputs.observed)
        if self.shifted or self.inputs.recurrent or not complete:
            value, next_value = self._one_call(batch, at, final)
        else:
            value, next_value = self._two_calls(batch, at.unknown)
        return value, next_value.masked_fill(_beside(at.terminated, next_value), 0.0)

    def _two_calls(self, batch: TensorDictBase, unknown: Tensor | None) -> tuple[Tensor, Tensor]:
        root = {key: require(batch, key) for key in self.inputs.observed}
        after = {key: require(batch, next_key(key)) for key in self.inputs.observed}
        values, next_values = [], []
        for start, stop in self.chunks.spans(batch.shape[0]):
            rows = slice(start, stop)
            shape = torch.Size([stop - start, *batch.shape[1:]])
            hidden = None if unknown is None else unknown[rows]
            part = {key: column[rows] for key, column in root.items()}
            next_part = {key: _usable(column[rows], part[key], hidden) for key, column in after.items()}
            values.append(self._evaluate(part, shape))
            next_values.append(self._evaluate(next_part, shape))
        return _joined(values), _joined(next_values)

    def _one_call(
        self, batch: TensorDictBase, at: Boundaries, final: TensorDictBase | None
    ) -> tuple[Tensor, Tensor]:
        ends = at.ends.reshape(-1)
        after = open_ends(ends, at.terminated.reshape(-1))
        unknown = None if at.unknown is None else at.unknown.reshape(-1)[after]
        held = [key for key in self.inputs.states if batch.get(key, None) is not None]
        root = {key: _flat(require(batch, key), batch) for key in (*self.inputs.observed, *held)}
        behind = self._behind(batch, root, after, unknown, final)
        stream: Stream = Appended(after, ends.shape[0])
        stops = None
        if self.inputs.recurrent:
            starts = torch.ones_like(ends)
            starts[1:] = ends[:-1]
            root[self.is_init_key] = starts.unsqueeze(-1)
            behind[self.is_init_key] = starts.new_zeros(after.shape[0], 1)
            stream = interleaved = Interleaved.of(after, ends.shape[0])
            stops = interleaved.stops(ends)
        values = [
            self._evaluate(stream.columns(root, behind, start, stop), torch.Size([stop - start]))
            for start, stop in self.chunks.spans(stream.rows, stops)
        ]
        value, next_value = stream.split(_joined(values))
        shape = (*batch.batch_size, *value.shape[1:])
        return value.reshape(shape), next_value.reshape(shape)

    def _behind(
        self,
        batch: TensorDictBase,
        root: Columns,
        after: Tensor,
        unknown: Tensor | None,
        final: TensorDictBase | None,
    ) -> Columns:
        """What to insert behind the rows ``after``: the batch's next observations, or those of ``final``."""
        behind: Columns = {}
        for key in self.inputs.observed:
            found = batch.get(next_key(key), None)
            if found is not None:
                found = _flat(found, batch)[after]
            elif final is not None and final.get(next_key(key), None) is not None:
                found = _final_rows(final, key, after, unknown)
            elif after.shape[0]:
                self.warn(
                    f"the batch has no entry {next_key(key)!r} and no final= came with it: at the end of "
                    f"each run that is not terminated the value of the row's own {key!r} stands in for the "
                    "next one's. Pass collector.final as final=, or keep next observations, to be exact"
                )
            if found is not None:
                behind[key] = _usable(found, root[key][after], unknown)
        return behind

    def _evaluate(self, columns: Columns, shape: torch.Size) -> Tensor:
        out = self.network(TensorDict(columns, batch_size=shape))
        value: Tensor | None = out.get(self.value_key, None)
        if value is None:
            raise KeyError(
                f"value_network wrote no entry {self.value_key!r}: its out_keys are "
                f"{list(self.network.out_keys)}; name the one that holds the value with value_key="
            )
        if value.ndim == len(shape):
            raise ValueError(
                f"value_network must write {self.value_key!r} of shape {(*shape, 1)}, "
                f"got {tuple(value.shape)}"
            )
        return value


def _final_rows(
    final: TensorDictBase, key: NestedKey, after: Tensor, unknown: Tensor | None
) -> Tensor | None:
    """The next observations of the rows ``after``, or None where ``final`` holds none and none is known."""
    rows = require(final, "row")
    slots = torch.searchsorted(rows, after).clamp(max=max(rows.shape[0] - 1, 0))
    missing = rows[slots] != after if rows.shape[0] else torch.ones_like(after, dtype=torch.bool)
    if unknown is not None:
        missing = missing & ~unknown
    if bool(missing.any()):
        raise ValueError(
            f"final has no next observation for row {int(after[missing][0])}, which ends a run without "
            "terminating: final must be the one that came with this batch, rows in the same order"
        )
    return require(final, next_key(key))[slots] if rows.shape[0] else None


def _usable(found: Tensor, root: Tensor, unknown: Tensor | None) -> Tensor:
    """``found`` with the root observation where it is NaN (element by element) or unknown (whole rows)."""
    bad = None if unknown is None else _beside(unknown, found)
    if found.is_floating_point():
        bad = found.isnan() if bad is None else bad | found.isnan()
    return found if bad is None else torch.where(bad, root, found)


def _beside(flag: Tensor, column: Tensor) -> Tensor:
    """A flag of the batch's shape, broadcast over the features of ``column``."""
    return flag.reshape(*flag.shape, *[1] * (column.ndim - flag.ndim))


def _flat(column: Tensor, batch: TensorDictBase) -> Tensor:
    """A column of the batch with all its batch dims as one."""
    return column.flatten(0, batch.batch_dims - 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

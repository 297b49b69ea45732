"""The values of a batch's observations and next observations, from one network.

Two calls, on the observations and on the next observations, are right for a network that reads one row at a time
(where they are few, one call sees both). The *extended stream* needs one: the rows, and for each run the final
observation it bootstraps from. A row's next value is then the value of the row behind it. That is N + K rows instead
of 2 N, exact, and the only right form for a recurrent network, whose memory runs on into the final observation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.values.budget import Budgeted
from flatroll.estimators.values.chunks import Chunks
from flatroll.estimators.values.extended_stream import (
    Appended,
    Columns,
    Interleaved,
    Stream,
    marked,
    row_stops,
)
from flatroll.estimators.values.network import NetworkInputs as NetworkInputs
from flatroll.estimators.values.network import value_of
from flatroll.estimators.values.next_observations import Boundaries, Following, beside, flat
from flatroll.kernels import zeroed
from flatroll.layout.boundaries import starts_from
from flatroll.layout.keys import NestedKey, next_key, require

#: Rows and bytes of observations up to which copying them costs less than calling a network twice.
_FEW_ROWS, _FEW_BYTES = 4096, 1 << 17


@dataclass(frozen=True)
class Route:
    """How values come about.

    Attributes:
        shifted: one call over the extended stream even where two calls would do.
        budget: places that a stream of fixed length adds to each series; None is the stream that fits.
        chunks: rows that go through the network at a time.
        skip_existing: values that stand in the batch are not computed again.
        turned: the batch dim that has changed places with the last one since the chunks were chosen.
    """

    shifted: bool = False
    budget: int | None = None
    chunks: Chunks = field(default_factory=Chunks)
    skip_existing: bool = False
    turned: int | None = None


@dataclass(frozen=True)
class Parameters:
    """Other parameters than the network's own, for the values of the rows and for those of the next ones."""

    now: TensorDictBase | None = None
    following: TensorDictBase | None = None


@dataclass(frozen=True)
class Values:
    """Values ``[*B, T, *F]`` of a batch.

    Attributes:
        value: of each row's observation, 0 where not valid.
        next_value: of its next one, 0 where terminated.
        valid: bool ``[*B, T]``, the rows that a stream of fixed length has room for; None is all of them.
    """

    value: Tensor
    next_value: Tensor
    valid: Tensor | None = None


class StateValues:
    """Evaluate a batch.

    Args:
        network: tensordict module that writes ``value_key``, a trailing dim included (``[*B, T, 1]``); None
            takes both values from the batch.
        value_key: entry the network writes its value under.
        is_init_key: entry that tells a recurrent network where runs start.
        route: how.
        warn: called with a text when a next observation is missing and the root one stands in for it.
    """

    def __init__(
        self,
        network: TensorDictModuleBase | None,
        *,
        value_key: NestedKey,
        is_init_key: NestedKey,
        route: Route,
        warn: Callable[[str], None],
    ) -> None:
        self.network, self.value_key, self.is_init_key = network, value_key, is_init_key
        self.route, self.warn = route, warn

    def __call__(
        self,
        batch: TensorDictBase,
        at: Boundaries,
        final: TensorDictBase | None = None,
        parameters: Parameters | None = None,
        next_value: Tensor | None = None,
        *,
        n_step: bool = False,
    ) -> Values:
        """The values of the batch.

        Args:
            batch: ``[*B, T]``.
            at: its boundaries.
            final: the next observations that no row of a compact batch holds.
            parameters: in place of the network's own.
            next_value: of the next observations ``[*B, T, *F]``, if they are known.
            n_step: the next observation of a row is not that of the row behind it.

        Raises:
            KeyError: the batch lacks an entry the network reads, or the network does not write ``value_key``.
            ValueError: ``final`` does not belong to this batch, the value has no trailing dim, or one stream is
                asked to serve two sets of parameters, or n-step rows.
        """
        value, next_value = self._existing(batch, next_value)
        if value is not None and next_value is not None:
            return Values(value, zeroed(next_value, at.terminated))
        assert self.network is not None
        work = _Work(self, self.network, batch, at, final, parameters or Parameters(), value)
        if next_value is not None:
            return Values(work.of_rows(), zeroed(next_value, at.terminated))
        if work.row_by_row:
            return work.two_calls()
        if n_step:
            raise ValueError(
                "n-step rows are followed by an observation several rows on, so one call over the rows (shifted=True, "
                "a recurrent value_network, a batch without next observations) has no value for it: evaluate "
                "before the n-step transform, or use shifted=False with a network that reads one row at a time"
            )
        return work.one_call()

    def _existing(
        self, batch: TensorDictBase, next_value: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The values that need not be computed; ``next_value`` as it is, if it is known."""
        key = next_key(self.value_key)
        if self.network is None:
            return require(batch, self.value_key), require(batch, key) if next_value is None else next_value
        if not self.route.skip_existing:
            return None, next_value
        return batch.get(self.value_key, None), batch.get(key, None) if next_value is None else next_value


class _Work:
    """One batch on its way through the network."""

    def __init__(
        self,
        values: StateValues,
        network: TensorDictModuleBase,
        batch: TensorDictBase,
        at: Boundaries,
        final: TensorDictBase | None,
        parameters: Parameters,
        value: Tensor | None,
    ) -> None:
        self.network, self.value_key, self.is_init_key = network, values.value_key, values.is_init_key
        self.route, self.batch, self.at, self.parameters, self.value = (
            values.route,
            batch,
            at,
            parameters,
            value,
        )
        self.inputs = NetworkInputs.of(network, values.is_init_key)
        self.following = Following(batch, self.inputs.observed, at, final, values.warn)
        self.dim = values.route.chunks.along(batch.batch_dims, values.route.turned)

    @property
    def row_by_row(self) -> bool:
        """Whether two calls will do."""
        return not self.route.shifted and not self.inputs.recurrent and self.following.complete

    def two_calls(self) -> Values:
        """The observations and the next observations: one after the other, or in one call where they are few."""
        batch, at, following, now = self.batch, self.at, self.following, self.parameters.now
        then = now if self.parameters.following is None else self.parameters.following
        root = {key: require(batch, key) for key in following.root}
        after = {key: require(batch, next_key(key)) for key in following.root}
        together = self.value is None and now is then and self.route.chunks.whole
        values, next_values = [], []
        for start, stop in self.route.chunks.spans(batch.shape[self.dim]):
            cut = partial(_rows, dim=self.dim, start=start, stop=stop)
            part = {key: cut(column) for key, column in root.items()}
            hidden, over = None if at.unknown is None else cut(at.unknown), cut(at.terminated)
            next_part = {
                key: following.usable(key, cut(column), part[key], hidden, over)
                for key, column in after.items()
            }
            if together and _few(part, over.numel()):
                both = {key: torch.cat([column, next_part[key]]) for key, column in part.items()}
                found = self._evaluate(both, torch.Size([2 * over.shape[0], *over.shape[1:]]), now)
                values.append(found[: over.shape[0]])
                next_values.append(found[over.shape[0] :])
                continue
            if self.value is None:
                values.append(self._evaluate(part, over.shape, now))
            next_values.append(self._evaluate(next_part, over.shape, then))
        next_value = _joined(next_values, self.dim)
        return Values(
            self.value if self.value is not None else _joined(values, self.dim),
            zeroed(next_value, at.terminated),
        )

    def of_rows(self) -> Tensor:
        """The values of the rows alone."""
        rows, ends = self.at.ends.numel(), self.at.ends.reshape(-1)
        root, _ = self._columns()
        chunks = self.route.chunks
        bounds = row_stops(ends) if self.inputs.recurrent and not chunks.whole else None
        each = rows // max(self.batch.shape[self.dim], 1)
        found = [
            self._evaluate(
                {key: column[start:stop] for key, column in root.items()},
                torch.Size([stop - start]),
                self.parameters.now,
            )
            for start, stop in chunks.spans(rows, bounds, each=each)
        ]
        value = _joined(found, 0)
        return value.reshape(*self.batch.batch_size, *value.shape[1:])

    def one_call(self) -> Values:
        """The extended stream; twice where the next values have parameters of their own."""
        if self.parameters.following is None:
            return self._over_stream(self.parameters.now, self.value)
        if self.route.shifted:
            raise ValueError(
                "shifted=True takes the values of the rows and of the next ones from one call, so from one set "
                "of parameters: leave target_params out, or shifted=True"
            )
        value = self._over_stream(self.parameters.now, None).value if self.value is None else self.value
        return Values(value, self._over_stream(self.parameters.following, None).next_value)

    def _over_stream(self, parameters: TensorDictBase | None, value: Tensor | None) -> Values:
        stream, valid = self._stream()
        root, behind = self._columns()
        chunks, count = self.route.chunks, self.at.ends.numel()
        bounds = None
        if self.inputs.recurrent and not chunks.whole and isinstance(stream, Interleaved | Budgeted):
            bounds = stream.stops(self.at.ends.reshape(-1))
        known: list[Tensor] = []
        if value is not None and isinstance(stream, Appended):
            known = [flat(value, self.batch)]
        each = count // max(self.batch.shape[self.dim], 1)
        spans = chunks.spans(stream.rows, bounds, each=each, first=count if known else 0)
        found = [
            self._evaluate(stream.columns(root, behind, start, stop), torch.Size([stop - start]), parameters)
            for start, stop in spans
        ]
        now, next_value = stream.split(_joined(known + found, 0))
        shape = (*self.batch.batch_size, *now.shape[1:])
        now, next_value = now.reshape(shape), next_value.reshape(shape)
        if valid is not None:
            now = torch.where(beside(valid, now), now, 0.0)
        return Values(now if value is None else value, zeroed(next_value, self.at.terminated), valid)

    def _stream(self) -> tuple[Stream, Tensor | None]:
        """The stream, and which rows it has room for if not all."""
        at, count = self.at, self.at.ends.numel()
        if self.route.shifted and self.route.budget is not None:
            fixed = Budgeted.of(at.opened.reshape(-1, at.ends.shape[-1]), self.route.budget)
            valid = fixed.valid.view(at.ends.shape)
            if not self.following.complete:
                self.following.expect(marked(at.opened & valid))
            return fixed, valid
        after = marked(at.opened)
        self.following.expect(after)
        return Interleaved.of(after, count) if self.inputs.recurrent else Appended(after, count), None

    def _columns(self) -> tuple[Columns, Callable[[Tensor, Tensor | None], Columns]]:
        """What the rows hold, and what follows them; a memory is told where runs start."""
        batch, following = self.batch, self.following
        if not self.inputs.recurrent:
            return following.root, following.behind
        held = [key for key in self.inputs.states if batch.get(key, None) is not None]
        ends = self.at.ends.reshape(-1)
        starts = starts_from(ends).unsqueeze(-1)

        def behind(after: Tensor, chosen: Tensor | None) -> Columns:
            row = starts.index_select(0, after)
            start = torch.zeros_like(row) if chosen is None else row & ~chosen.unsqueeze(-1)
            return following.behind(after, chosen) | {self.is_init_key: start}

        states = {key: flat(require(batch, key), batch) for key in held}
        return following.root | states | {self.is_init_key: starts}, behind

    def _evaluate(self, columns: Columns, shape: torch.Size, parameters: TensorDictBase | None) -> Tensor:
        return value_of(self.network, columns, shape, self.value_key, parameters)


def _rows(column: Tensor, *, dim: int, start: int, stop: int) -> Tensor:
    """These rows along ``dim``; the column itself where they are all."""
    return column if stop - start == column.shape[dim] else column.narrow(dim, start, stop - start)


def _few(columns: Columns, rows: int) -> bool:
    return rows <= _FEW_ROWS and sum(column.nbytes for column in columns.values()) <= _FEW_BYTES


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

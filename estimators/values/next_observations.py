"""What stands behind rows of a batch: the batch's own next observations, or what takes their place."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.estimators.values.extended_stream import Columns
from flatroll.kernels.scans.scan import is_tracing
from flatroll.layout.keys import NestedKey, next_key, require


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

    @property
    def opened(self) -> Tensor:
        """Ends that are bootstrapped."""
        return self.ends & ~self.terminated


class Following:
    """The next observations of chosen rows of a batch, whose batch dims count as one here.

    They are those of the batch. A compact batch has none: there they are those of ``final``, and without it the
    row's own observation stands in. So it does, number by number, for NaN and for what the env hid.

    Args:
        batch: the batch.
        keys: the observations that a network reads.
        at: the batch's boundaries.
        final: what came with a compact batch, or None.
        warn: called with a text where the row's own observation stands in and the run is not terminated. A
            device is not asked whether there is NaN.

    Raises:
        KeyError: an observation is missing.
        TypeError: ``final`` is no tensordict.
    """

    def __init__(
        self,
        batch: TensorDictBase,
        keys: tuple[NestedKey, ...],
        at: Boundaries,
        final: TensorDictBase | None,
        warn: Callable[[str], None],
    ) -> None:
        if final is not None and not isinstance(final, TensorDictBase):
            raise TypeError(
                f"final must be a tensordict, the collector.final of this batch, got {type(final).__name__}"
            )
        self._lost = "no final= came with it" if final is None else "final= holds none"
        self.root: Columns = {key: flat(require(batch, key), batch) for key in keys}
        there = {key: batch.get(next_key(key), None) for key in keys}
        self.next: Columns = {key: flat(x, batch) for key, x in there.items() if x is not None}
        lacking = [key for key in keys if key not in self.next]
        held = {} if final is None else {key: final.get(next_key(key), None) for key in lacking}
        self.held: Columns = {key: x for key, x in held.items() if x is not None}
        self._rows = _rows_of(final) if self.held and final is not None else None
        self._nowhere = [key for key in lacking if key not in self.held]
        self._unknown = None if at.unknown is None else at.unknown.reshape(-1)
        self._warn = warn

    @property
    def complete(self) -> bool:
        """Whether the batch holds every next observation itself."""
        return not self.held and not self._nowhere

    def expect(self, rows: Tensor) -> None:
        """Look once whether something is known behind each of these rows (int64, ascending).

        Raises:
            ValueError: ``final`` holds nothing for a row of which the env did not hide it.
        """
        if self._rows is not None:
            missing = self._places(rows)[1]
            if self._unknown is not None:
                missing = missing & ~self._unknown[rows]
            if bool(missing.any()):
                raise ValueError(
                    f"final has no next observation for row {int(rows[missing][0])}, which ends a run without "
                    "terminating: final must be the one that came with this batch, rows in the same order"
                )
        if self._nowhere and rows.shape[0]:
            key = self._nowhere[0]
            self._warn(
                f"the batch has no entry {next_key(key)!r} and {self._lost}: at the end of each run "
                f"that is not terminated the value of the row's own {key!r} stands in for the next one's. Pass "
                "collector.final as final=, keep next observations, or, if a module wrote it, let the value network "
                "begin with that module, to be exact"
            )

    def behind(self, rows: Tensor, chosen: Tensor | None = None) -> Columns:
        """What follows these rows; an entry of which nothing is known is absent.

        Args:
            rows: int64 ``[M]``.
            chosen: bool ``[M]``; the others get their own observation. Default: all.
        """
        out: Columns = {}
        hidden = None if self._unknown is None else self._unknown[rows]
        if chosen is not None:
            hidden = ~chosen if hidden is None else hidden | ~chosen
        for key, column in self.next.items():
            out[key] = self.usable(
                key, column.index_select(0, rows), self.root[key].index_select(0, rows), hidden
            )
        if self._rows is not None and self._rows.shape[0]:
            place, missing = self._places(rows)
            hidden = missing if hidden is None else hidden | missing
            for key, column in self.held.items():
                own = self.root[key].index_select(0, rows)
                out[key] = self.usable(key, column.index_select(0, place).to(own.dtype), own, hidden)
        return out

    def usable(
        self, key: NestedKey, found: Tensor, root: Tensor, hidden: Tensor | None, quiet: Tensor | None = None
    ) -> Tensor:
        """:func:`usable`, with a warning where NaN is replaced.

        Args:
            key: whose columns these are.
            found, root, hidden: as there.
            quiet: rows whose next value does not count.
        """

        def tell(nan: Tensor) -> None:
            silent = quiet if hidden is None else hidden if quiet is None else hidden | quiet
            rows = nan.reshape(*(silent.shape if silent is not None else nan.shape[:1]), -1).any(-1)
            rows = rows if silent is None else rows & ~silent
            if bool(rows.any()):
                self._warn(
                    f"batch[{next_key(key)!r}] is NaN in {int(rows.sum())} rows that are not terminated: the "
                    f"number of the row's own {key!r} stands in. A storage with compact_obs=True keeps the "
                    "true ones, and so does final= with a compact batch"
                )

        return usable(found, root, hidden, tell)

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where ``final`` holds these rows, and which it does not hold."""
        assert self._rows is not None
        if not self._rows.shape[0]:
            return torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
        place = torch.searchsorted(self._rows, rows).clamp(max=self._rows.shape[0] - 1)
        return place, self._rows[place] != rows


def _rows_of(final: TensorDictBase) -> Tensor:
    rows: Tensor | None = final.get("row", None)
    if rows is None:
        raise KeyError(
            "final has no entry 'row', the rows of the batch that its next observations follow: pass "
            "collector.final as it came with the batch"
        )
    return rows


def usable(
    found: Tensor, root: Tensor, hidden: Tensor | None, tell: Callable[[Tensor], None] | None = None
) -> Tensor:
    """``found`` with the root observation where it is NaN (number by number) or hidden (whole rows).

    Args:
        found, root: next and root observations ``[*B, *F]``.
        hidden: bool ``[*B]``, or None.
        tell: called with the mask of the NaN, if the tensor is on the CPU and there is any.

    >>> usable(torch.tensor([float("nan"), 2.0, 3.0]), torch.ones(3), torch.tensor([False, False, True]))
    tensor([1., 2., 1.])
    """
    bad = None
    if found.is_floating_point():
        asked = found.device.type == "cpu" and not is_tracing()
        if not (asked and math.isfinite(found.detach().sum().item())):  # one pass, where no number is NaN
            bad = found.isnan()
            if asked and tell is not None:
                tell(bad)
    if hidden is not None:
        rows = beside(hidden, found)
        bad = rows if bad is None else bad | rows
    return found if bad is None else torch.where(bad, root, found)


def beside(flag: Tensor, column: Tensor) -> Tensor:
    """A flag of the batch's shape, broadcast over the features of ``column``."""
    return flag.reshape(*flag.shape, *[1] * (column.ndim - flag.ndim))


def flat(column: Tensor, batch: TensorDictBase) -> Tensor:
    """A column of the batch with all its batch dims as one."""
    return column if batch.batch_dims == 1 else column.flatten(0, batch.batch_dims - 1)

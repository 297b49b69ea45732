"""`RunningNorm`: a layer that normalises an observation by the mean and variance of all observations so far."""

import math
import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor

from flatroll.layout.boundaries import run_ends, starts_from
from flatroll.layout.checks import need_keys, number, sizes
from flatroll.layout.delta import decode_delta
from flatroll.layout.final import check_final, read_final
from flatroll.layout.keys import (
    DELTA,
    IS_INIT,
    MASK,
    NEXT,
    NEXT_KNOWN,
    NestedKey,
    as_tuple,
    next_key,
    optional_marker,
    plain_key,
    require,
)
from flatroll.layout.moments import Moments
from flatroll.layout.tensordict_seam import get_entry, set_entry


class RunningNorm(TensorDictModuleBase):
    """Normalises an entry by its running mean and deviation; rows stay raw, and the network normalises.

    ``out = clip((x - mean) / sqrt(var + epsilon))``. It stands in front of an actor, a critic or a recurrent module,
    as one module in all of them. The statistics are buffers: they are saved with the policy's ``state_dict``, go to
    workers along with its weights, and a row of a replay buffer is always seen through today's. Collectors do not
    store what it writes.

    Only :meth:`update` changes the statistics. Call it in the process that learns, once for each collected batch, and
    update the collector's weights afterwards, as after a step of the optimizer: with ``track_policy_version=True`` the
    version in a row says which statistics acted, too. Before the first update only ``clip`` has an effect; after 10,000
    calls of losses without one, it warns.

    Integer and bool entries, such as images in uint8, are passed on as they are. A stack of frames is one observation
    like any other: each place in the stack has statistics of its own. A Dict observation needs one module for each
    entry.

    Args:
        in_key: the entry, such as ``"observation"``, ``[*B, *shape]``.
        shape: of one observation, such as ``env.single_observation_space.shape``.
        out_key: where to write, in the dtype of the entry. Default: ``in_key`` with ``"_norm"`` at its end.
        clip: largest absolute value that is written. Default: 10. None: no limit.
        epsilon: added to the variance. Default: 1e-8.
        device: of the statistics. Default: torch's.

    Attributes:
        statistics: ``count`` (float64 ``[1]``), ``mean`` and ``var`` (float64 ``[*shape]``, ``[1]`` for numbers).

    Raises:
        ValueError: ``clip`` or ``epsilon`` is not above 0; called: the entry has another shape.

    >>> from tensordict import TensorDict
    >>> norm = RunningNorm("observation", shape=(1,))
    >>> rows = TensorDict({"observation": torch.tensor([[1.0], [2.0], [3.0]])}, [3])
    >>> norm.update(rows)
    >>> norm(rows)["observation_norm"].squeeze(-1)
    tensor([-1.2247,  0.0000,  1.2247])
    >>> norm(observation=torch.tensor([[1000.0]]))
    tensor([[10.]])
    """

    def __init__(
        self,
        in_key: NestedKey,
        *,
        shape: tuple[int, ...],
        out_key: NestedKey | None = None,
        clip: float | None = 10.0,
        epsilon: float = 1e-8,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        need_keys(in_key=in_key)
        need_keys(optional=True, out_key=out_key)
        *folders, name = as_tuple(in_key)
        self.in_key: NestedKey = plain_key(as_tuple(in_key))
        self.out_key: NestedKey = plain_key((*folders, f"{name}_norm")) if out_key is None else out_key
        self.in_keys: list[Any] = [self.in_key]
        self.out_keys: list[Any] = [self.out_key]
        self.shape = torch.Size(sizes("shape", shape))
        self.clip = None if clip is None else float(number("clip", clip, above=0))
        self.epsilon = float(number("epsilon", epsilon, above=0, below=math.inf))
        self.statistics = Moments(self.shape, device)

    @property
    def recomputed_keys(self) -> list[NestedKey]:
        """What collectors do not store, since it is computed from the rows whenever it is needed."""
        return [self.out_key]

    # a tensordict, or the entry by keyword
    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the normalised entry into the batch ``[*B]``; return it."""
        x = get_entry(tensordict, self.in_key)
        x = require(tensordict, self.in_key) if x is None else x
        self._check_shape(self.in_key, x)
        if x.is_floating_point():
            moments = self.statistics
            if not torch.compiler.is_compiling() and moments.unlearned:
                self._warn_of_none(moments)
            x = moments.normalized(x, self.epsilon, self.clip)
        set_entry(tensordict, self.out_key, x)
        return tensordict

    def update(self, batch: TensorDictBase, *, final: TensorDictBase | None = None) -> None:
        """Count each observation of a collected batch once; after ``eval()`` nothing.

        An observation that is the next one of a row and stands in the row behind it, too, is counted once. So are the
        last observations of episodes, and those at the cut between two batches: if all batches of a collector are
        counted, then so is each observation that its env has shown, in any autoreset mode. Left out are padding and
        observations that the env hid. A sample of a replay buffer counts its rows again: count batches as they come.

        Args:
            batch: rows ``[*B]``, time last, as a collector yields them, with ``("next", key)``, the differences of
                `NextObservationDelta` in its place, or ``final``. Without any ``"next"`` all rows count: so a data set
                of observations can be counted.
            final: the next observations that no row of a compact batch holds (``collector.final``).

        Raises:
            KeyError: the entry, or all markers of boundaries, are missing.
            ValueError: another shape; a compact batch without ``final``, or the ``final`` of another batch; NaN or
                infinite numbers. Then the statistics stay as they were. Numbers are looked at on the host only: on a
                device this would wait, and NaN there makes every output NaN.
        """
        key = self.in_key
        column = require(batch, key)
        self._check_shape(key, column, batch.batch_size)
        if not (self.training and column.is_floating_point()):
            return
        rows = column.reshape(batch.batch_size.numel(), *self.shape)
        flags = (optional_marker(batch, name) for name in (MASK, NEXT_KNOWN, IS_INIT))
        real, known, is_init = (None if flag is None else flag.reshape(-1) for flag in flags)
        if batch.get(NEXT, None) is None:
            self.statistics.add((f"batch[{key!r}]", rows, real))
            return
        ends = run_ends(batch)
        # All next observations, and first ones of episodes. Written as rows, those are the rows, without the first of
        # a run that a window before this one has shown as its last next observation, and what follows the run ends.
        counted = None if is_init is None else is_init | ~starts_from(ends).reshape(-1)
        following, follows = self._following(batch, rows, ends.reshape(-1), final)
        if real is not None:
            counted = real if counted is None else counted & real
            follows = None if follows is None else follows & real
        if known is not None and follows is not None:
            follows = follows & known
        if follows is not None and follows.is_cpu and not torch.compiler.is_compiling():
            following, follows = following[follows], None  # few; elsewhere their number is not known
        self.statistics.add(
            (f"batch[{key!r}]", rows, counted),
            (f"the next observations, {next_key(key)!r},", following, follows),
        )

    def merge(self, other: "RunningNorm") -> None:
        """Count what another module has counted, as ranks or parts of a data set that were counted apart.

        Raises:
            ValueError: it is for another shape.

        >>> norms = [RunningNorm("observation", shape=()) for _ in range(2)]
        >>> _ = [norm.statistics.add(("x", torch.tensor([x]), None)) for norm, x in zip(norms, (1.0, 3.0))]
        >>> norms[0].merge(norms[1])
        >>> norms[0].statistics.mean.item(), norms[0].statistics.var.item()
        (2.0, 1.0)
        """
        if other.shape != self.shape:
            raise ValueError(f"other must be for shape {tuple(self.shape)}, got {tuple(other.shape)}")
        self.statistics.merge(other.statistics)

    def _warn_of_none(self, moments: Moments) -> None:
        """Warn once where networks learn and nothing is ever counted; a first batch or two is usual."""
        if not (self.training and torch.is_grad_enabled()):
            return
        moments.unlearned -= 1
        if not moments.unlearned:
            acts = "passes numbers on" if self.clip is None else f"only clips to {self.clip:g}"
            warnings.warn(
                f"RunningNorm({self.in_key!r}) was used in many losses and has counted nothing, so it {acts}: call its "
                "update(batch) for each collected batch, or leave it out (norm=False). TorchRL's losses copy it",
                UserWarning,
                stacklevel=2,
            )

    def _following(
        self, batch: TensorDictBase, rows: Tensor, ends: Tensor, final: TensorDictBase | None
    ) -> tuple[Tensor, Tensor | None]:
        """Next observations ``[K, *shape]``, and which of them follow a run's end, bool ``[K]``; None: all do."""
        key = self.in_key
        if final is not None:
            given = read_final(final, [key])
            if key in given.next:
                if rows.is_cpu and not torch.compiler.is_compiling():  # reads row numbers
                    check_final(given, {key: rows}, len(rows))
                return given.next[key], None
        column: Tensor | None = batch.get(next_key(key), None)
        if column is None:
            delta: Tensor | None = batch.get((*DELTA, *as_tuple(key)), None)
            if delta is None:
                raise ValueError(
                    f"batch has no entry {next_key(key)!r}, so the last observations of its runs are missing: call "
                    "update(batch, final=collector.final), which came with a compact batch"
                )
            column = decode_delta(batch.get(key), delta)
        self._check_shape(next_key(key), column, batch.batch_size)
        return column.reshape(rows.shape), ends

    def _check_shape(self, key: NestedKey, column: Tensor, rows: torch.Size | None = None) -> None:
        """Refuse a column whose shape does not end with ``shape``, or if given, is not ``[*rows, *shape]``."""
        lead = max(column.ndim - len(self.shape), 0)
        if column.shape[lead:] != self.shape or rows not in (None, column.shape[:lead]):
            raise ValueError(
                f"batch[{key!r}] must have shape {(*(rows or '*'), *self.shape)}, as RunningNorm(shape="
                f"{tuple(self.shape)}) was made for, got {tuple(column.shape)}: another shape needs another RunningNorm"
            )

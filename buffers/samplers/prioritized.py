"""Prioritized experience replay: draws rows in proportion to their priorities with a sum tree."""

import math
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import check_values
from flatroll.buffers.index.ring import Array, Draw, Ring
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.samplers.sampler import RandomSampler
from flatroll.buffers.samplers.slices import SliceSampler, Span, bounds, fill, indexed, spans
from flatroll.layout.checks import as_text, check_choice, check_flags, check_whole_number
from flatroll.layout.keys import IS_INIT, TRUNCATED, NestedKey

REDUCTIONS = ("max", "min", "median", "mean")
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
_BLOCK = 256  # slots per block with a common maximum
_NO_GENERATIONS = np.zeros(0, np.int64)


class PrioritizedSampler(RandomSampler):
    """Prioritized replay: draws rows in proportion to ``(priority + eps) ** alpha``, with replacement.

    Each row of a sample is marked as a separate run, as by `RandomSampler`. A new row gets the highest priority so
    far (1 at first), so that it is drawn soon. The sample's info has ``"priority_weight"``, float32 ``[N]``: ``(P /
    min P) ** -beta``, where P is ``(priority + eps) ** alpha`` and the minimum is over the rows that can be drawn, so
    the largest possible weight is 1; and ``"index_generation"``, int64 ``[N]``, with which `update_priority` detects
    rows that were overwritten since.

    Schaul, Quan, Antonoglou, Silver: "Prioritized experience replay" (2015), the proportional variant; draws are
    independent, not stratified. Weights are kept in a float64 sum tree: a draw or an update costs time in the
    logarithm of the capacity per row, whatever the priorities.

    Args:
        max_capacity: at least the capacity of the buffer.
        alpha: exponent of the priorities, at least 0 (uniform draws). A number or one-element tensor; it may be set
            later, for example by `LinearScheduler`; the next use then takes time in the capacity.
        beta: exponent of the importance weights, at least 0. Like ``alpha``, it may be a tensor and be set later.
        eps: added to priorities, so that rows of priority 0 are drawn occasionally; at least 0. With 0, such rows are
            never drawn and are ignored in the minimum.
        dtype: dtype of the stored priorities, ``torch.float`` or ``torch.double``.
        reduction: reduces several priorities per row to one: ``"max"``, ``"min"``, ``"median"`` or ``"mean"``.
        max_priority_within_buffer: a new row gets the highest priority of the rows stored now.
        max_policy_lag: rows that are older get no weight, see `RandomSampler`. Default: no limit.

    Attributes:
        priorities: priorities and weights of all slots (a `Priorities`).

    Raises:
        ValueError: a number out of range, or an unknown ``reduction`` or ``dtype``.

    >>> import torch
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> sampler = PrioritizedSampler(4, alpha=1.0, beta=0.5, eps=0.0)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=1000)
    >>> rows = buffer.extend(torch.arange(4))
    >>> buffer.update_priority(rows, torch.tensor([0.0, 0.0, 1.0, 4.0]))
    >>> sample, info = buffer.sample(return_info=True)
    >>> sorted(set(zip(sample.tolist(), info["priority_weight"].tolist())))
    [(2, 1.0), (3, 0.5)]
    >>> 700 < sum(sample == 3) < 900
    tensor(True)
    """

    independent = True
    _shown: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eps", "reduction")

    def __init__(
        self,
        max_capacity: int,
        alpha: float | Tensor,
        beta: float | Tensor,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        max_policy_lag: int | None = None,
    ) -> None:
        RandomSampler.__init__(self, max_policy_lag)
        check_flags(max_priority_within_buffer=max_priority_within_buffer)
        check_whole_number("max_capacity", max_capacity)

        self.max_capacity = max_capacity
        self.dtype = dtype
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self._beta = _number("beta", beta)
        alpha = _number("alpha", alpha, 1e6)
        eps = _number("eps", eps)
        self.priorities = Priorities(max_capacity, alpha, eps, dtype, max_priority_within_buffer)

        # The ring's counters at the last update: rows _head ... _written - 1 are in the tree.
        self._head = 0
        self._written = 0
        self._changing = False  # True during a change, and after one that was interrupted
        self._fresh: Tensor | None = None  # with max_policy_lag: the slots that still have weights

    @property
    @override
    def nbytes(self) -> int:
        return self.priorities.nbytes

    @property
    def alpha(self) -> float:
        """Exponent of the priorities. After it is set, the next use recomputes the weights of all slots."""
        return self.priorities.alpha

    @alpha.setter
    def alpha(self, value: float | Tensor) -> None:
        alpha = _number("alpha", value)
        most = self.priorities.most(alpha)
        if self.priorities.ever > most:
            raise ValueError(
                f"alpha={alpha} makes weights too large: priorities up to {self.priorities.ever} were given, and the "
                f"largest possible would be {most:.3g}"
            )
        self.priorities.alpha = alpha

    @property
    def beta(self) -> float:
        """Exponent of the importance weights returned with each sample."""
        return self._beta

    @beta.setter
    def beta(self, value: float | Tensor) -> None:
        self._beta = _number("beta", value)

    @property
    def eps(self) -> float:
        """Constant added to every priority."""
        return self.priorities.eps

    @property
    def default_priority(self) -> float:
        """Priority that the next new row will get."""
        return self.priorities.top(self._written - self._head)

    # -- following the ring ------------------------------------------------------------------------------------

    @override
    def claimed(self, ring: Ring, first: int, rows: int) -> None:
        self._catch_up(ring)

    # Exclude the rows about to be overwritten, and give new rows their priority.
    entered = claimed

    @override
    def emptied(self) -> None:
        self.priorities.keep([])
        self.priorities.ever = 1.0
        self.priorities.weigh_all()
        self._head = 0
        self._written = 0

    state_key = "priority"
    #: Whether every stored row may be drawn; otherwise `_allow_starts` decides.
    _every_row = True

    def _allow_starts(self, ring: Ring, first: int | None) -> None:
        """Make rows drawable after rows from ``first`` on were written (None: after rows were dropped)."""

    def _catch_up(self, ring: Ring) -> None:
        """Add the rows written since the last update to the tree and remove dropped ones."""
        if ring.capacity > self.max_capacity:
            raise ValueError(
                f"max_capacity={self.max_capacity} is less than the buffer's {ring.capacity} rows: give "
                f"{type(self).__name__} at least max_capacity={ring.capacity}"
            )

        head = ring.head
        written = ring.written
        in_order = not self._changing and self.priorities.in_step
        if in_order and (self._head, self._written) == (head, written):
            return
        if not in_order or not self._head <= head <= self._written <= written:
            self._start_over(ring)
            return

        self._changing = True
        for slots in _stretches(self._head, head, ring.capacity):  # dropped rows
            self.priorities.fill(slots, 0.0, drawable=False)

        if head > self._head:
            self._allow_starts(ring, None)

        default = self.priorities.top(self._written - head)
        for slots in _stretches(self._written, written, ring.capacity):  # new rows
            self.priorities.fill(slots, default, drawable=self._every_row)

        if written > self._written:
            self._allow_starts(ring, self._written)

        self._head = head
        self._written = written
        self._changing = False

    def _start_over(self, ring: Ring) -> None:
        """Recompute all weights from priorities and ring, after an interrupt, a new ``alpha`` or a load."""
        self._changing = True
        self._fresh = None
        head = ring.head
        written = ring.written
        priorities = self.priorities

        # Rows head ... known - 1 already have a priority; rows known ... written - 1 are new.
        known = min(max(self._written, head), written)
        priorities.keep(_stretches(head, known, ring.capacity))
        default = priorities.top(known - head)

        for slots in _stretches(known, written, ring.capacity):
            priorities.values[slots] = default
        if self._every_row:
            for slots in _stretches(head, written, ring.capacity):
                priorities.drawable[slots] = True

        priorities.weigh_all()
        self._allow_starts(ring, head)
        self._head = head
        self._written = written
        self._changing = False

    def mass(self, ring: Ring) -> tuple[float, float]:
        """Return the sum and the minimum of P over the rows that can be drawn; (0, inf) if there are none."""
        self._catch_up(ring)
        return self.priorities.tree.total, self.priorities.tree.least

    # -- drawing and updating ----------------------------------------------------------------------------------

    @override
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """Draw ``batch_size`` rows by priority, with their importance weights.

        Raises:
            RuntimeError: nothing is stored, or all priorities are 0 and so is ``eps``.
        """
        self._catch_up(ring)
        slots, weights, generation = self._choose(ring, batch_size, generator)
        info = {"priority_weight": weights, "index_generation": generation}

        following = None
        if follow and isinstance(ring, TrajectoryIndex):
            following = ring.follow(slots)
        return Draw(slots, follow=following, version=ring.version, info=info, scale=self._scale)

    @property
    def _scale(self) -> tuple[float, ...]:
        """What importance weights are relative to: see `Draw.scale`."""
        priorities = self.priorities
        return priorities.tree.least, priorities.alpha, priorities.eps, self._beta

    def _choose(
        self, ring: Ring, count: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw ``count`` rows independently; return slots, weights and generations, each ``[count]``."""
        ring.check_not_empty()
        priorities = self.priorities
        tree = priorities.tree

        if self.freshness is not None:
            fresh = self.freshness.stored(ring)
            # If the list has changed since the last draw, rows that became too old lose their weight.
            if fresh is not self._fresh:
                stale = priorities.drawable.copy()
                stale[fresh.numpy()] = False
                slots_out = stale.nonzero()[0]
                priorities.drawable[slots_out] = False
                priorities.weigh(slots_out)
                self._fresh = fresh
        if not tree.total > 0:
            raise RuntimeError(
                "no row can be drawn: all priorities are 0 and so is eps; update the priorities or give "
                f"{type(self).__name__} eps=1e-8"
            )

        # A uniform number times the total weight falls into the interval of one slot, which the tree finds.
        uniform = torch.rand(count, dtype=torch.float64, generator=generator).numpy()
        slots = np.empty(count, np.int64)
        generation = np.empty(count, np.int64)
        ratios = np.empty(count, np.float32)  # P / min P
        draw = priorities.kernels.draw
        draw(tree.nodes, tree.levels, ring.head, ring.capacity, uniform, slots, ratios, generation)

        weights = torch.from_numpy(ratios).pow_(-self._beta)
        return torch.from_numpy(slots), weights, torch.from_numpy(generation)

    @override
    def update_priority(self, ring: Ring, slots: Tensor, priority: Tensor, generation: Tensor | None) -> None:
        """Set the priorities of the rows in ``slots``; of duplicate slots, the last priority counts.

        Args:
            ring: the counters of the buffer.
            slots: integers of any shape, on any device. -1 and rows being overwritten are skipped.
            priority: a number, one per slot, or several per slot (further dimensions), which ``reduction`` reduces.
            generation: the ``"index_generation"`` of the slots; rows overwritten since are skipped.

        Raises:
            IndexError: a slot outside the buffer.
            TypeError: ``slots`` or ``generation`` are not integers.
            ValueError: a priority is negative, infinite or NaN, or sizes do not match. Nothing is changed.
        """
        index = _host_integers("index", slots)
        values = _reduce(priority, len(index), self.reduction)
        generations = _NO_GENERATIONS
        if generation is not None:
            generations = _host_integers("generation", generation)
            if len(generations) != len(index):
                raise ValueError(
                    f"generation must have {len(index)} entries, like index, got {len(generations)}"
                )

        self._catch_up(ring)
        most = self.priorities.most(self.alpha)

        # The kernel moves the slots whose rows are still stored to the front, along with their priorities.
        stored = index.copy()
        new = values.to(self.dtype, copy=True).numpy()
        count, outside, bad = self.priorities.kernels.standing(
            ring.head, ring.written, ring.capacity, most, stored, new, generations
        )

        if outside >= 0:
            raise IndexError(
                f"index[{outside}] is {index[outside]}, where no row has been stored: the buffer has {len(ring)} "
                f"rows of at most {ring.capacity}"
            )
        if bad >= 0:
            raise ValueError(
                f"priority[{bad}] is {float(values[bad])}: priorities must be numbers from 0 to {most:.3g} that "
                f"{self.dtype} can hold"
            )

        self._changing = True
        self.priorities.put(stored[:count], new[:count])
        self._changing = False

    @override
    def mark_update(self, ring: Ring, slots: Tensor) -> None:
        self.update_priority(ring, slots, torch.tensor(self.default_priority, dtype=torch.float64), None)

    # -- state -------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return copies of all priorities, the highest one so far, and alpha, beta and eps."""
        used = min(self._written, self.max_capacity)
        return {
            **super().state_dict(),
            "priority": torch.from_numpy(self.priorities.values[:used].copy()),
            "highest": self.priorities.ever,
            "head": self._head,
            "written": self._written,
            "alpha": self.alpha,
            "beta": self.beta,
            "eps": self.eps,
        }

    @override
    def check_state_dict(self, state: dict[str, Any], ring: Ring) -> None:
        super().check_state_dict(state, ring)
        priority = state["priority"]
        highest = state["highest"]
        alpha, _, _ = (_number(name, state[name]) for name in ("alpha", "beta", "eps"))
        count = check_values("priorities", priority, priority.dtype, ())
        self._check_fits(priority)
        head = state["head"]

        written = state["written"]
        most = self.priorities.most(alpha)
        counted = type(head) is int and type(written) is int and 0 <= head <= written <= ring.written
        if not counted or count != min(written, self.max_capacity):
            raise damaged(f"it has {count} priorities for the rows {head} ... {written}")

        low = 0.0
        high = 0.0
        if count:
            low, high = map(float, torch.aminmax(priority))
        if not (low >= 0 and high <= most and isinstance(highest, float) and 0 <= highest <= most):
            raise damaged(f"its priorities are not all numbers from 0 to {most:.3g}")

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the priorities from a checked :meth:`state_dict`; the buffer must also restore its ring."""
        super().load_state_dict(state)
        priority = state["priority"].detach()
        self._check_fits(priority)
        self._changing = True  # weights are recomputed at the next use, once the ring exists
        self._beta, self.priorities.alpha, self.priorities.eps = state["beta"], state["alpha"], state["eps"]
        self.priorities.values[: len(priority)] = priority.numpy(force=True)
        self.priorities.ever = state["highest"]
        self._head, self._written = state["head"], state["written"]

    def _check_fits(self, priority: Tensor) -> None:
        """Raise ValueError if a state has too many priorities or another dtype."""
        if len(priority) > self.max_capacity or priority.dtype is not self.dtype:
            raise ValueError(
                f"the state has {len(priority)} priorities of {priority.dtype}, this sampler has "
                f"max_capacity={self.max_capacity} and dtype={self.dtype}"
            )


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices of trajectories in proportion to the priority of their first row.

    Slices and their marks are those of `SliceSampler`, priorities and info those of `PrioritizedSampler`. A row's
    priority applies to slices that start there; rows that cannot start a slice are never drawn and are ignored in the
    minimum. Possible starts are updated at each write; a draw takes time in its rows and the logarithm of the
    capacity.

    ``info["priority_weight"]`` is the first row's weight at every row of a slice.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: see `PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, fill: see `SliceSampler`. With
            ``num_slices``, the length is ``batch_size // num_slices``; a draw of another length than the last takes
            time in the capacity.
        strict_length: a slice starts only where ``slice_len`` rows (less ``span``) follow. Default False: the first
            stored row of a shorter trajectory starts a short slice.
        cache_values, compile: accepted and without effect.
        span: slices may extend beyond the end of a trajectory and are then shorter: by up to ``span`` rows, or down
            to one row with True. Of a pair (before, after), the first must be False: a slice starts at the drawn row.
        max_policy_lag: rows that are older start no slice, see `PrioritizedSampler`; later rows of a trajectory are
            never older than its first ones.

    Raises:
        TypeError, ValueError: as `SliceSampler` and `PrioritizedSampler`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> sampler = PrioritizedSliceSampler(9, alpha=1.0, beta=1.0, eps=0.0, slice_len=2)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=4)
    >>> step = torch.arange(9)
    >>> rows = buffer.extend(TensorDict({"step": step % 3, "episode": step // 3}, [9]))
    >>> buffer.update_priority(rows, torch.tensor([0.0, 3, 3, 0, 0, 0, 0, 0, 1]))
    >>> sample, info = buffer.sample(return_info=True)
    >>> sample["episode"].tolist(), sample["step"].tolist(), info["priority_weight"].tolist()
    ([0, 0, 0, 0], [1, 2, 1, 2], [1.0, 1.0, 1.0, 1.0])
    """

    _every_row = False
    _not_at = "it draws them by the priority of their first row"

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | list[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = TRUNCATED,
        init_key: NestedKey | None = IS_INIT,
        strict_length: bool = False,
        cache_values: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Span = False,
        max_priority_within_buffer: bool = False,
        end_keys: Sequence[NestedKey] | None = None,
        fill: bool = True,
        max_policy_lag: int | None = None,
    ) -> None:
        before: bool | int = False
        after = span
        if isinstance(span, Sequence) and len(span) == 2:
            before, after = span
        if before:
            raise ValueError(f"span[0] must be False: a slice starts at the row that was drawn, got {span!r}")

        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            traj_key=traj_key,
            truncated_key=truncated_key,
            strict_length=strict_length,
            init_key=init_key,
            span=(False, after),  # type: ignore[arg-type]
            end_keys=end_keys,
            fill=fill,
        )
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, max_policy_lag
        )
        self._least: int | None = None  # minimum number of stored rows from a start on

    @override
    def _allow_starts(self, ring: Ring, first: int | None) -> None:
        # Only rows at which a slice can start are drawable. A write changes few of them, and the index lists those.
        if self._least is None or not isinstance(ring, TrajectoryIndex):
            return
        if first is not None:
            self.priorities.weigh(ring.new_starts(first, self._least, strict=self.strict_length), allow=True)
        elif not self.strict_length:
            self.priorities.weigh(ring.shortened_trajectories(self._least, self._head), allow=True)

    @override
    def _draw_rows(
        self, ring: Ring, batch_size: int, length: int, generator: torch.Generator | None, follow: bool
    ) -> Draw:
        """Draw slices with ``batch_size`` rows in all; without ``fill``, fewer if some slices are short.

        Raises:
            RuntimeError: nothing is stored, no trajectory is long enough, or all priorities are 0 and so is ``eps``.
        """
        index = indexed(ring, self)
        least = length - spans(self.span, length)[1]

        if least != self._least:  # other starts: search all again
            self._least = least
            self._changing = True
        self._catch_up(ring)
        if len(ring) and not self.priorities.tree.total > 0 and not self.priorities.drawable.any():
            raise index.too_short_error(least)

        more = partial(self._slices, index, length, generator, follow)
        draw = more(batch_size // length)
        if len(draw.slots) != batch_size and self.fill:
            draw = fill(draw, batch_size, more)
        draw.scale = self._scale
        return draw

    def _slices(
        self, index: TrajectoryIndex, length: int, generator: torch.Generator | None, follow: bool, count: int
    ) -> Draw:
        """Draw ``count`` slices by priority; rows get their slice's weight and their own generation."""
        starts, weights, _ = self._choose(index, count, generator)
        draw = index.slices_from(starts, length, follow=follow)
        firsts, lasts = (ends.numpy() for ends in bounds(draw))

        row_weights = torch.empty(len(draw.slots), dtype=torch.float32)
        generation = torch.empty_like(draw.slots)
        rows = draw.slots.numpy(), row_weights.numpy(), generation.numpy()
        self.priorities.kernels.spread(index.head, index.capacity, weights.numpy(), firsts, lasts, *rows)

        draw.info = {"priority_weight": row_weights, "index_generation": generation}
        return draw


class Priorities:
    """Stores one priority per slot and a sum tree of the weights ``(priority + eps) ** alpha``.

    The tree is derived from the priorities and the drawable slots; :meth:`weigh_all` rebuilds it after an interrupted
    change. Weights are float64.

    Attributes:
        values: the priorities, 0 where no row is stored; padded to blocks of 256.
        drawable: bool, slots with a weight.
        alpha: may be set; the next :meth:`weigh_all` updates the weights.
        ever: the highest priority ever set, at least 1.
        within_buffer: new rows get the highest stored priority, not the highest ever set.
    """

    def __init__(
        self, capacity: int, alpha: float, eps: float, dtype: torch.dtype, within_buffer: bool
    ) -> None:
        # Numba takes 0.3 s to import, so only where priorities are kept.
        from flatroll.kernels.trees.sum_tree import SumTree

        check_choice("dtype", dtype, _DTYPES)

        self.alpha = alpha
        self.eps = eps
        self.within_buffer = within_buffer
        self.tree = SumTree(capacity)

        # The highest priority of each block of 256 slots, so that an update only rescans its own blocks.
        blocks = -(-capacity // _BLOCK)  # rounded up
        self.values: Array = np.zeros(blocks * _BLOCK, _DTYPES[dtype])
        self._highest: Array = np.zeros(blocks, _DTYPES[dtype])
        self.drawable: Array = np.zeros(capacity, np.bool_)
        self._used = alpha  # the exponent of the weights now in the tree
        self.ever = 1.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The kernels iterate over all tables by the size of one of them.
        size = len(state["drawable"])
        blocks = len(state["_highest"])
        sizes = state["tree"].capacity, len(state["values"])
        matching = sizes == (size, blocks * _BLOCK) and blocks == -(-size // _BLOCK)
        if not matching or state["drawable"].dtype != np.bool_:
            raise ValueError(
                f"the pickle is damaged: its tables have {size}, {sizes[0]} and {sizes[1]} slots"
            )
        vars(self).update(state)

    @property
    def kernels(self) -> ModuleType:
        """The compiled kernels of the sum tree, imported on first use: numba takes 0.3 s to load."""
        from flatroll.kernels.trees import sum_tree

        return sum_tree

    @property
    def nbytes(self) -> int:
        """Bytes of the priorities and of the tree."""
        return self.tree.nbytes + self.values.nbytes + self._highest.nbytes + self.drawable.nbytes

    @property
    def in_step(self) -> bool:
        """Whether the weights were computed with the current `alpha`; if not, call :meth:`weigh_all`."""
        return self.alpha == self._used

    def top(self, stored: int) -> float:
        """Return the priority of new rows, given the number of ``stored`` rows: the highest one, or 1."""
        if self.within_buffer:
            if stored:
                return float(self._highest.max())
            return 1.0
        return self.ever

    def most(self, alpha: float) -> float:
        """Return the largest priority for which, with exponent ``alpha``, the sum of weights stays finite."""
        # Weights stay below 10 ** LARGEST, so priorities below 10 ** (LARGEST / alpha); floats end at 10 ** 308.
        digits = self.kernels.LARGEST / alpha if alpha else math.inf
        if digits < 308:
            return float(10**digits)
        return float(np.finfo(np.float64).max)

    def fill(self, slots: slice, priority: float, drawable: bool) -> None:
        """Set the same priority for all ``slots``; slots that are not ``drawable`` get weight 0."""
        self.values[slots] = priority
        self.drawable[slots] = drawable

        weight = 0.0
        if drawable:  # from the stored priority, which may be rounded to float32
            rounded = float(self.values.dtype.type(priority))
            weight = self.kernels.weight(rounded, self.eps, self._used)
        self.tree.fill(slots.start, slots.stop - slots.start, weight)

        if self.within_buffer:
            # Blocks that the stretch touches, rounded up.
            blocks = slice(slots.start // _BLOCK, -(-slots.stop // _BLOCK))
            self._highest[blocks] = self.values.reshape(-1, _BLOCK)[blocks].max(1)

    def put(self, slots: Array, priorities: Array) -> None:
        """Set the priorities of the rows in ``slots`` (int64); of duplicate slots, the last one counts."""
        if not len(slots):
            return

        self.values[slots] = priorities
        self.ever = max(self.ever, float(priorities.max()))
        if self.within_buffer:
            blocks = np.unique(slots // _BLOCK)
            self._highest[blocks] = self.values.reshape(-1, _BLOCK)[blocks].max(1)
        self.weigh(slots)

    def weigh(self, slots: Array, allow: bool = False) -> None:
        """Compute the weights of ``slots`` (int64) and the sums above; ``allow`` first makes them drawable."""
        if allow:
            self.drawable[slots] = True
        tree = self.tree
        self.kernels.weigh(tree.nodes, tree.levels, slots, self.values, self.drawable, self.eps, self._used)

    def keep(self, stretches: list[slice]) -> None:
        """Reset the priorities outside ``stretches`` to 0, and make every slot undrawable."""
        empty = np.ones(len(self.values), np.bool_)
        for slots in stretches:
            empty[slots] = False
        self.values[empty] = 0
        self.drawable[:] = False
        self._highest[:] = self.values.reshape(-1, _BLOCK).max(1)

    def weigh_all(self) -> None:
        """Recompute all weights and their sums from `values`, `drawable` and `alpha`."""
        self._used = self.alpha
        tree = self.tree
        values = self.values[: len(self.drawable)]
        self._highest[:] = self.values.reshape(-1, _BLOCK).max(1)
        self.kernels.weigh_all(tree.nodes, tree.levels, values, self.drawable, self.eps, self._used)


def _reduce(priority: Tensor, count: int, reduction: str) -> Tensor:
    """Return one priority per slot, float64 ``[count]`` on the host; ``reduction`` reduces several per slot."""
    if priority.is_complex():
        raise TypeError(f"priority must be real numbers, got {priority.dtype}")

    values = priority.detach().to("cpu", torch.float64)
    if values.numel() == 1:
        return values.reshape(1).expand(count)
    if values.numel() == count:
        return values.reshape(-1)
    if values.ndim < 2 or len(values) != count:
        raise ValueError(
            f"priority must be a number or have one entry per index, got {list(priority.shape)} for {count}"
        )

    values = values.flatten(1)
    # Before the reduction, which could hide them: the maximum of 1 and -2 is 1.
    if not values.min() >= 0:  # written so that NaN fails, too
        row = int((~(values >= 0)).any(1).nonzero()[0])
        raise ValueError(f"priority[{row}] is {values[row].tolist()}: priorities must be at least 0")

    reduced = getattr(values, reduction)(1)
    if isinstance(reduced, Tensor):
        return reduced
    median: Tensor = reduced.values  # it comes with its positions
    return median


def _host_integers(name: str, values: Tensor) -> Array:
    """Convert integers of any shape and device to int64 ``[N]`` on the host; TypeError for other numbers."""
    if values.numel() and (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    integers: Array = values.detach().reshape(-1).to("cpu", torch.int64).numpy()
    return integers


def _number(name: str, value: float | Tensor, below: float = math.inf) -> float:
    number: Any = value
    if isinstance(value, Tensor | np.generic) and math.prod(value.shape) == 1:
        number = value.item()
    if not (isinstance(number, (int, float)) and 0 <= number < below):
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} must be a number of at least 0{limit}, got {as_text(value)}")
    return float(number)


def _stretches(first: int, stop: int, capacity: int) -> list[slice]:
    """Return the slots of at most ``capacity`` rows ``first ... stop - 1``, as one or two ranges."""
    count = stop - first
    slot = first % capacity
    if slot + count > capacity:  # beyond the end of the ring
        return [slice(slot, capacity), slice(0, slot + count - capacity)]
    if count:
        return [slice(slot, slot + count)]
    return []

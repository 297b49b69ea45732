"""Rows drawn in proportion to their priorities."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatroll.buffers.index.ring import Draw, Ring
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.samplers.base import RandomSampler
from flatroll.buffers.samplers.priorities import REDUCTIONS, Priorities, integers, one_each
from flatroll.layout.checks import whole_number

_NONE = np.zeros(0, np.int64)


class PrioritizedSampler(RandomSampler):
    """Rows drawn in proportion to ``(priority + eps) ** alpha``, with replacement, each a run of its own.

    A new row gets the highest priority there was so far (1 at first), so that it is soon drawn. The sample's info
    has ``"priority_weight"``, float32 ``[N]``: ``(P / min P) ** -beta``, where P is ``(priority + eps) ** alpha``
    and the minimum is over the rows that can be drawn, so the largest possible weight is 1; and
    ``"index_generation"``, int64 ``[N]``, by which `update_priority` knows rows that were overwritten since.

    Schaul, Quan, Antonoglou, Silver: "Prioritized experience replay" (2015), the proportional variant; draws are
    independent, not stratified. Weights are kept in a float64 sum tree: a draw or an update costs time in the
    logarithm of the capacity per row, whatever the priorities.

    Args:
        max_capacity: at least the capacity of the buffer.
        alpha: how much priorities count, at least 0 (then draws are uniform). It may be set later, which takes time
            in the capacity at the next use.
        beta: how much of the bias the weights take back, at least 0. It may be set later.
        eps: added to priorities, so that a row of priority 0 is drawn now and then; at least 0. With 0, such rows
            are never drawn and do not count in the minimum.
        dtype: of the priorities kept, ``torch.float`` or ``torch.double``.
        reduction: makes one priority of several per row: ``"max"``, ``"min"``, ``"median"`` or ``"mean"``.
        max_priority_within_buffer: a new row gets the highest priority of the rows stored now.

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

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
    ) -> None:
        whole_number("max_capacity", max_capacity)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        self.max_capacity = max_capacity
        self.reduction = reduction
        self.dtype = dtype
        self._beta = _number("beta", beta)
        self._priorities = Priorities(
            max_capacity, _number("alpha", alpha), _number("eps", eps), dtype, max_priority_within_buffer
        )
        self._head = self._written = 0  # of the ring, as far as the priorities know
        self._changing = False

    def __repr__(self) -> str:
        numbers = f"alpha={self.alpha}, beta={self.beta}, eps={self.eps}, reduction={self.reduction!r}"
        return f"{type(self).__name__}({numbers})"

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; setting it takes time in the capacity at the next use."""
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        alpha = _number("alpha", value)
        most = self._priorities.most(alpha)
        if self._priorities.ever > most:
            raise ValueError(
                f"alpha={alpha} makes weights too large: priorities up to {self._priorities.ever} were given, and the "
                f"largest possible would be {most:.3g}"
            )
        self._priorities.alpha = alpha

    @property
    def beta(self) -> float:
        """Exponent of the weights given out."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _number("beta", value)

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self._priorities.eps

    @property
    def default_priority(self) -> float:
        """Priority of the next new row."""
        return self._priorities.top(self._written - self._head)

    # -- in step with the ring ---------------------------------------------------------------------------------

    def claimed(self, ring: Ring, first: int, rows: int) -> None:
        """Take the rows that are about to be overwritten out of the draw.

        Raises:
            ValueError: the buffer is larger than ``max_capacity``.
        """
        self._check_capacity(ring)
        self._follow(ring)

    def entered(self, ring: Ring, first: int, rows: int) -> None:
        """Give new rows their priority and let them be drawn."""
        self._follow(ring)

    def emptied(self) -> None:
        """Forget all priorities, and the highest there ever was."""
        self._priorities.keep([])
        self._priorities.ever = 1.0
        self._priorities.weigh_all()
        self._head = self._written = 0

    #: Whether every stored row may be drawn.
    _every_row = True

    def _lost(self, ring: Ring) -> None:
        """Let rows be drawn that may be since the ring dropped others."""

    def _gained(self, ring: Ring, first: int) -> None:
        """Let rows be drawn that may be since the rows from number ``first`` on are there."""

    def _follow(self, ring: Ring) -> None:
        """Bring the priorities in step with the ring, if they are not."""
        head, written = ring.head, ring.written
        in_order = not self._changing and self._priorities.in_step
        if in_order and (self._head, self._written) == (head, written):
            return
        if not in_order or not self._head <= head <= self._written <= written:
            self._start_over(ring)
            return
        self._changing = True
        for slots in _stretches(self._head, head, ring.capacity):
            self._priorities.fill(slots, 0.0, drawable=False)
        if head > self._head:
            self._lost(ring)
        default = self._priorities.top(self._written - head)
        for slots in _stretches(self._written, written, ring.capacity):
            self._priorities.fill(slots, default, drawable=self._every_row)
        if written > self._written:
            self._gained(ring, self._written)
        self._head, self._written = head, written
        self._changing = False

    def _start_over(self, ring: Ring) -> None:
        """Bring everything in step with ``ring``: after an interrupted change (Ctrl-C), another ``alpha``, a state
        loaded, or rows that were written before the sampler was there."""
        self._check_capacity(ring)
        self._changing = True
        head, written, priorities = ring.head, ring.written, self._priorities
        known = min(max(self._written, head), written)
        priorities.keep(_stretches(head, known, ring.capacity))
        default = priorities.top(known - head)
        for slots in _stretches(known, written, ring.capacity):
            priorities.values[slots] = default
        for slots in _stretches(head, written, ring.capacity) if self._every_row else []:
            priorities.drawable[slots] = True
        priorities.weigh_all()
        self._gained(ring, head)
        self._head, self._written = head, written
        self._changing = False

    def _check_capacity(self, ring: Ring) -> None:
        if ring.capacity > self.max_capacity:
            raise ValueError(
                f"max_capacity={self.max_capacity} is less than the buffer's {ring.capacity} rows: give "
                f"{type(self).__name__} at least max_capacity={ring.capacity}"
            )

    # -- drawing and updating ----------------------------------------------------------------------------------

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        """``batch_size`` rows.

        Raises:
            RuntimeError: nothing is stored, or all priorities are 0 and so is ``eps``.
        """
        self._follow(ring)
        slots, weights, generation = self._choose(ring, batch_size, generator)
        info = {"priority_weight": weights, "index_generation": generation}
        indexed = follow and isinstance(ring, TrajectoryIndex)
        return Draw(slots, follow=ring.follow(slots) if indexed else None, version=ring.version, info=info)

    def _choose(
        self, ring: Ring, count: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, weights and generations of ``count`` drawable rows, drawn independently."""
        ring.check_not_empty()
        tree = self._priorities.tree
        if not tree.total > 0:
            raise self._nothing(ring)
        uniform = torch.rand(count, dtype=torch.float64, generator=generator)
        slots, generation = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        ratios = torch.empty(count, dtype=torch.float32)
        self._priorities.kernels.draw(
            tree.nodes,
            tree.levels,
            ring.head,
            ring.capacity,
            uniform.numpy(),
            slots.numpy(),
            ratios.numpy(),
            generation.numpy(),
        )
        return slots, ratios.pow_(-self._beta), generation

    def _nothing(self, ring: Ring) -> RuntimeError:
        return RuntimeError(
            "no row can be drawn: all priorities are 0 and so is eps; update the priorities or give "
            f"{type(self).__name__} eps=1e-8"
        )

    def update_priority(self, ring: Ring, slots: Tensor, priority: Tensor, generation: Tensor | None) -> None:
        """Set the priorities of the rows in ``slots``; where one comes twice, the last priority stays.

        Args:
            ring: the counters of the buffer.
            slots: integers of any shape, on any device. -1 is left out, and so is a row that is being overwritten.
            priority: a number, one per slot, or several per slot (further dimensions), which ``reduction``
                makes one.
            generation: the ``"index_generation"`` of the slots; rows overwritten since are left out.

        Raises:
            IndexError: a slot outside the buffer.
            TypeError: ``slots`` or ``generation`` are not integers.
            ValueError: a negative or infinite priority or NaN, or sizes that do not fit. Nothing has changed then.
        """
        index = integers("index", slots)
        values = one_each(priority, len(index), self.reduction)
        generations = _NONE if generation is None else integers("generation", generation)
        if generation is not None and len(generations) != len(index):
            raise ValueError(
                f"generation must have one entry per index, {len(index)}, got {len(generations)}"
            )
        self._follow(ring)
        most = self._priorities.most(self.alpha)
        standing, kept = index.copy(), values.to(self.dtype, copy=True).numpy()
        count, outside, bad = self._priorities.kernels.standing(
            ring.head, ring.written, ring.capacity, most, standing, kept, generations
        )
        if outside >= 0:
            raise IndexError(
                f"index[{outside}] is {index[outside]}, but {len(ring)} rows are stored in positions from 0 on, of "
                f"{ring.capacity}"
            )
        if bad >= 0:
            raise ValueError(
                f"priority[{bad}] is {float(values[bad])}: priorities must be numbers from 0 to {most:.3g} that "
                f"{self.dtype} can hold"
            )
        self._changing = True
        self._priorities.put(standing[:count], kept[:count])
        self._changing = False

    def mark_update(self, ring: Ring, slots: Tensor) -> None:
        """Give the rows in ``slots`` the priority of new ones."""
        self.update_priority(ring, slots, torch.tensor(self.default_priority, dtype=torch.float64), None)

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All priorities, the highest there ever was, and the numbers that may be set; owns its memory."""
        used = min(self._written, self.max_capacity)
        return {
            "priority": torch.from_numpy(self._priorities.values[:used].copy()),
            "highest": self._priorities.ever,
            "head": self._head,
            "written": self._written,
            "alpha": self.alpha,
            "beta": self.beta,
            "eps": self.eps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw as the sampler that gave ``state`` would; the buffer must load the state of its ring, too.

        Raises:
            ValueError: the state has more rows than ``max_capacity``, or another ``dtype``.
        """
        priority = state["priority"]
        if len(priority) > self.max_capacity or priority.dtype is not self.dtype:
            raise ValueError(
                f"the state has {len(priority)} priorities of {priority.dtype}, this sampler is of "
                f"max_capacity={self.max_capacity} and dtype={self.dtype}"
            )
        self._changing = True  # the weights follow at the next use, when the ring is there
        self.alpha, self.beta, self._priorities.eps = state["alpha"], state["beta"], state["eps"]
        self._priorities.values[: len(priority)] = priority.numpy()
        self._priorities.ever = state["highest"]
        self._head, self._written = state["head"], state["written"]


def _number(name: str, value: float) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def _stretches(first: int, stop: int, capacity: int) -> list[slice]:
    """Slots of the rows ``first ... stop - 1``, of which there are at most ``capacity``."""
    count, slot = stop - first, first % capacity
    if slot + count > capacity:
        return [slice(slot, capacity), slice(0, slot + count - capacity)]
    return [slice(slot, slot + count)] if count else []

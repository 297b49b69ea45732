"""What goes into a recursion and what comes out of an estimator."""

from dataclasses import dataclass

from tensordict import TensorDictBase
from torch import Tensor

from flatroll.estimators.following import Boundaries


@dataclass(frozen=True)
class Given:
    """What an estimate is made of: columns ``[*B, T, *F]`` of a batch whose last dim is time, flags with 1 for F.

    Attributes:
        batch: the batch.
        at: its boundaries.
        gamma: discount.
        value: of each row's observation.
        next_value: of its next one.
        reward, terminated, ends: as the functions of ``flatroll.estimators.functional`` take them.
        time_dim: likewise.
    """

    batch: TensorDictBase
    at: Boundaries
    gamma: float | Tensor
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    ends: Tensor
    time_dim: int


@dataclass(frozen=True)
class Estimated:
    """What an estimator writes.

    Attributes:
        advantage, target, value, next_value: ``[*B, T, *F]``.
        valid: bool ``[*B, T]``, the rows that count; None if all do.
    """

    advantage: Tensor
    target: Tensor
    value: Tensor
    next_value: Tensor
    valid: Tensor | None

"""What goes into a recursion and what comes out of an estimator."""

from dataclasses import dataclass

from tensordict import TensorDictBase
from torch import Tensor

from flatroll.estimators.functional.time_columns import factor_over
from flatroll.estimators.values.next_observations import Boundaries


@dataclass(frozen=True)
class Given:
    """What an estimate is made of: columns ``[*B, T, *F]`` of a batch whose last dim is time, flags with 1 for F.

    Attributes:
        batch: the batch.
        at: its boundaries.
        gamma: discount.
        value: of each row's observation.
        next_value: of its next one.
        reward, terminated, ends: as the functions of ``flatroll.estimators.functional.gae`` take them.
        time_dim: likewise.
        turned: the batch dim in which the caller has time, if that is not the last.
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
    turned: int | None = None

    def factor(self, name: str, x: float | Tensor) -> float | Tensor:
        """A factor in the caller's order of dims, in that of these columns."""
        return in_order(name, x, self.reward, self.time_dim + 1, self.turned)


def in_order(name: str, x: float | Tensor, reward: Tensor, rows: int, turned: int | None) -> float | Tensor:
    """A factor of the reward whose last row dim stands at dim ``turned``, for the reward as it is.

    Args:
        name: of the factor.
        x: a number, one per row or what broadcasts to the reward.
        reward: ``[*B, T, *F]``.
        rows: number of its dims that are rows.
        turned: where ``x`` has its time; None is the last dim of the rows.
    """
    if turned is None or not isinstance(x, Tensor) or not x.ndim:
        return x
    full = factor_over(name, x, reward.transpose(turned, rows - 1).shape, rows)
    return full.transpose(turned, rows - 1)


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

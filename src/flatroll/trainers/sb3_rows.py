"""What `FlatReplayBuffer` stores of a step, and the n-step returns of its samples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.column import Columns
from flatroll.layout.keys import NEXT, REWARD, as_tuple

DISCOUNTS = "discounts"  # entry of n-step rows


class Entry(NamedTuple):
    """What is stored of a space, of observations or actions, for E envs."""

    name: str  # for errors
    given: tuple[int, ...]  # shape of a step's values, [E, ...]
    stored: tuple[int, ...]  # their shape in the buffer
    dtype: np.dtype[Any]  # their dtype there

    def checked(self, value: Any) -> np.ndarray[Any, Any]:
        """Return a step's values as they are stored; ValueError or TypeError if the space has no such values."""
        array = np.asarray(value)
        if array.shape != self.stored or array.dtype != self.dtype:
            if array.shape not in (self.given, self.stored):
                raise ValueError(
                    f"{self.name} must be {list(self.given)}, envs first, as the model's spaces say, got "
                    f"{list(array.shape)}"
                )
            if not np.can_cast(array.dtype, self.dtype, "same_kind"):
                raise TypeError(f"{self.name} must be {self.dtype}, as its space says, got {array.dtype}")
            array = array.astype(self.dtype, copy=False).reshape(self.stored)
        return array


class NStepReturns:
    """A transform that makes n-step transitions by the same float32 operations as SB3's ``NStepReplayBuffer``.

    `MultiStepTransform` computes the same with discounts in float64, so that the last bits may differ.
    """

    def __init__(self, n_steps: int, gamma: float) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
        self.look_ahead, self.gamma = n_steps, gamma
        self.env: Any = None  # SB3's VecNormalize, by which rewards are normalized, before they are summed

    def read(self, columns: Columns, ahead: Tensor, get: Callable[..., Columns]) -> Columns:
        """The columns of N rows as n-step transitions; ``ahead``, ``[N, n]``: the rows of each, -1 from its end on."""
        used = ahead >= 0
        column = get(torch.where(used, ahead, ahead[:, :1]).flatten(), [REWARD])[REWARD]
        rewards = column.view(used.shape).numpy(force=True)
        if self.env is not None:
            rewards = self.env.normalize_reward(rewards)
        powers = self.gamma ** np.arange(self.look_ahead, dtype=np.float32)
        sums = (rewards * powers * used.numpy(force=True)).sum(1, keepdims=True)
        steps = used.sum(1, keepdim=True)
        last = ahead.gather(1, steps - 1).squeeze(1)
        changed = {**columns, **get(last, [key for key in columns if as_tuple(key)[0] == NEXT])}
        discounts = self.gamma ** steps.numpy(force=True).astype(np.float32)
        changed[REWARD] = torch.from_numpy(sums).to(column.device)
        changed[DISCOUNTS] = torch.from_numpy(discounts).to(column.device)
        return changed

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return the sample: :meth:`read` has done it."""
        return td

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "env": None}

"""The records of an estimator's call: its arguments, the columns that were read, what is summed, and the result."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.estimators.functional import factor_over
from flatroll.estimators.values.evaluate import Chunks, Parameters
from flatroll.estimators.values.extended_stream import Boundaries
from flatroll.layout.keys import REWARD, NestedKey, require


class Series(NamedTuple):
    """The arguments of one call, with time in the last dim of the batch.

    Attributes:
        batch: ``[*B, T]``.
        factors: what the estimator names in ``factor_names``, by name.
        chunks: rows passed to the network at a time.
        parameters: in place of the network's own.
        next_value: of the next observations, ``[*B, T, *F]``, if they are known already.
        final: the next observations that no row of a compact batch holds.
    """

    batch: TensorDictBase
    factors: dict[str, float | Tensor]
    chunks: Chunks
    parameters: Parameters
    next_value: Tensor | None
    final: TensorDictBase | None

    def turned(self, dim: int, reward_key: NestedKey) -> "Series":
        """Return the same arguments with the batch's dim ``dim`` as its last."""
        dims = self.batch.batch_dims
        shape = require(self.batch, reward_key, REWARD).shape
        if shape == self.batch.batch_size:
            shape = torch.Size([*shape, 1])

        factors = dict(self.factors)
        for name, x in self.factors.items():
            if isinstance(x, Tensor) and x.ndim:
                factors[name] = factor_over(name, x, shape, dims).transpose(dim, dims - 1)

        next_value = self.next_value
        if next_value is not None:
            next_value = next_value.transpose(dim, dims - 1)

        return self._replace(
            batch=self.batch.transpose(dim, dims - 1),
            factors=factors,
            chunks=self.chunks.transposed(dims, dim, dims - 1),
            next_value=next_value,
        )


class SeriesColumns(NamedTuple):
    """What an estimator itself reads of a batch ``[*B, T]``, once in a call.

    Attributes:
        batch: what its networks read; 0 in padding.
        reward: floating ``[*B, T, *F]``, scaled.
        at: the boundaries.
        mask: bool ``[*B, T]``, False at padding; None without any.
        steps: of n-step rows, the steps to their next observations ``[*B, T]`` or ``[*B, T, 1]``; None for one step.
    """

    batch: TensorDictBase
    reward: Tensor
    at: Boundaries
    mask: Tensor | None
    steps: Tensor | None


@dataclass(frozen=True)
class EstimatorInputs:
    """Inputs of an estimator: rewards and values ``[*B, T, *F]`` and flags ``[*B, T]``, time dim last.

    Attributes:
        batch: the batch.
        at: its boundaries.
        value: of each row's observation.
        next_value: of its next one.
        reward, terminated, ends: as the functions of ``flatroll.estimators.functional`` take them.
        time_dim: likewise.
        factors: what the estimator names in ``factor_names``, by name: numbers, or one number per row in the order
            of these columns.
        chunks: rows passed to a network at a time.
    """

    batch: TensorDictBase
    at: Boundaries
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    ends: Tensor
    time_dim: int
    factors: dict[str, float | Tensor]
    chunks: Chunks


class Estimate(NamedTuple):
    """What an estimator has computed of a batch: ``[*B, T, *F]``.

    Attributes:
        reward: as it was read.
        advantage, target, value, next_value: of each row; the next value is 0 where terminated.
        valid: bool ``[*B, T]``, the rows that count; None for all.
    """

    reward: Tensor
    advantage: Tensor
    target: Tensor
    value: Tensor
    next_value: Tensor
    valid: Tensor | None

    def turned(self, dim: int, last: int) -> "Estimate":
        """Return the same with two dims swapped."""
        valid = self.valid
        if valid is not None:
            valid = valid.transpose(dim, last)

        return Estimate(
            reward=self.reward.transpose(dim, last),
            advantage=self.advantage.transpose(dim, last),
            target=self.target.transpose(dim, last),
            value=self.value.transpose(dim, last),
            next_value=self.next_value.transpose(dim, last),
            valid=valid,
        )

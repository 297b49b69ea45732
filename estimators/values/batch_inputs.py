"""Helpers of estimators and losses: broadcasting flags, flattening batch dims, checks for NaN."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.keys import NestedKey, next_key


def broadcast_like(flag: Tensor, column: Tensor) -> Tensor:
    """Append dims of size 1 to a flag ``[*B]``, so that it broadcasts over the features of ``column``."""
    return flag.reshape(*flag.shape, *[1] * (column.ndim - flag.ndim))


def flat_rows(column: Tensor, batch_dims: int) -> Tensor:
    """Flatten all batch dims of a column into one."""
    return column if batch_dims == 1 else column.flatten(0, batch_dims - 1)


def check_finite(
    batch: TensorDictBase,
    observed: Sequence[NestedKey],
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    turned: int | None = None,
) -> None:
    """Raise ValueError unless rewards and values ``[*B, T, *F]`` are finite, naming the first row where they are not.

    The text says whether what the network read there, the entries ``observed``, was finite. Rows are named in the
    caller's order, who has the batch dim ``turned`` in the last one's place.
    """
    for column, words, read in (
        (reward, "", ()),
        (value, "observation", observed),
        (next_value, "next observation", tuple(map(next_key, observed))),
    ):
        if bool(column.isfinite().all()):
            continue
        bad_rows = ~column.isfinite().reshape(*batch.batch_size, -1).all(-1)
        row = tuple(int(i) for i in torch.nonzero(bad_rows)[0])
        numbers: list[float] = column[row].reshape(-1).tolist()
        shown = numbers[0] if len(numbers) == 1 else numbers
        index = list(row)
        if turned is not None:  # as the caller counts: time where he has it
            index[turned], index[-1] = index[-1], index[turned]
        named = index[0] if len(index) == 1 else tuple(index)
        if not words:
            raise ValueError(f"the reward of row {named} is {shown}")
        entries = {key: batch.get(key, None) for key in read}
        bad = [key for key, x in entries.items() if x is not None and not bool(x[row].isfinite().all())]
        of_input = f"{bad[0]!r} is not finite there" if bad else "what it reads there is finite"
        raise ValueError(
            f"the value of the {words} of row {named} is {shown}, and {of_input}: "
            + ("mend the data" if bad else "value_network has diverged, or divides by zero")
        )

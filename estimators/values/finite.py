"""Naming the row at which a number is not finite, before it spreads along a run."""

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.values.evaluate import Values
from flatroll.layout.keys import NestedKey, next_key


def check_finite(
    batch: TensorDictBase,
    network: TensorDictModuleBase | None,
    reward: Tensor,
    values: Values,
    turned: int | None = None,
) -> None:
    """Raise unless rewards and values are finite.

    Args:
        batch, network, reward, values: whose they are.
        turned: the batch dim that the caller has in the last one's place, if any; rows are named in his order.

    Raises:
        ValueError: NaN or inf; the text names the row, and whether the network's input was finite.
    """
    row = _first_bad(reward, batch)
    if row is not None:
        raise ValueError(f"the reward of row {_named(row, turned)} is {_shown(reward, row)}")
    keys: list[NestedKey] = [] if network is None else list(network.in_keys)  # pyright: ignore[reportAssignmentType]
    for column, words, read in (
        (values.value, "observation", keys),
        (values.next_value, "next observation", [next_key(key) for key in keys]),
    ):
        row = _first_bad(column, batch)
        if row is not None:
            entries = {key: batch.get(key, None) for key in read}
            bad = [k for k, x in entries.items() if x is not None and not bool(x[row].isfinite().all())]
            of_input = f"{bad[0]!r} is not finite there" if bad else "what it reads there is finite"
            raise ValueError(
                f"the value of the {words} of row {_named(row, turned)} is {_shown(column, row)}, and {of_input}: "
                + ("mend the data" if bad else "value_network has diverged, or divides by zero")
            )


def _first_bad(column: Tensor, batch: TensorDictBase) -> int | tuple[int, ...] | None:
    """Index of the first row with a number that is not finite."""
    if bool(column.isfinite().all()):
        return None
    bad = ~column.isfinite().reshape(*batch.batch_size, -1).all(-1)
    index = tuple(int(i) for i in torch.nonzero(bad)[0])
    return index[0] if len(index) == 1 else index


def _named(row: int | tuple[int, ...], turned: int | None) -> int | tuple[int, ...]:
    if turned is None or isinstance(row, int):
        return row
    index = list(row)
    index[turned], index[-1] = index[-1], index[turned]
    return tuple(index)


def _shown(column: Tensor, row: int | tuple[int, ...]) -> list[float] | float:
    numbers: list[float] = column[row].reshape(-1).tolist()
    return numbers[0] if len(numbers) == 1 else numbers

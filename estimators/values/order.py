"""Detects rows that do not follow one another, in batches that were shuffled or drawn row by row.

Only values on the host are checked: on a device, in ``torch.compile`` and in ``torch.func`` transforms reading values
would sync or is impossible.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.estimators.masked import WarnOnce
from flatroll.estimators.values.evaluate import ValueInputs
from flatroll.estimators.values.extended_stream import Boundaries
from flatroll.layout.following import follow
from flatroll.layout.keys import NestedKey, marker, next_key
from flatroll.layout.tensordict_seam import get_entry

Array: TypeAlias = NDArray[Any]

_PAIRS = 32  # number of rows whose next observation is compared with the next row's observation
_SEARCHED = 1 << 26  # maximum bytes of observations searched for a match elsewhere
_FEW = 16  # up to this many rows, a batch may consist of single steps
_WAY_OUT = (
    "Call the estimator on the batch as it was collected, before you shuffle, index or filter its rows (TD0Estimator "
    "takes rows in any order), or set is_init where a run begins"
)


class OrderCheck:
    """Checks whether consecutive rows of a run follow one another, in some of an estimator's calls.

    It takes a tenth of a call with few rows, so only the first calls and every 16th check.

    Args:
        sums_along: whether the estimator sums along runs. Otherwise the order matters only to its network.
    """

    def __init__(self, sums_along: bool) -> None:
        self._sums_along = sums_along
        self._warn = WarnOnce()
        self._calls = 0

    def __call__(self, inputs: ValueInputs, keys: Mapping[str, NestedKey], trace: float | Tensor) -> None:
        """Check a batch ``[*B, T]``, on the host.

        Args:
            inputs: the batch, its boundaries and the value network.
            keys: of ``step_count``, ``done`` and ``mask``.
            trace: lambda. Where it is 0, nothing is lost in runs of one row.

        Raises:
            ValueError: a row does not follow the one before it, as their step counts say, else the next observations
                of some rows.
        """
        self._calls += 1
        if self._calls > 4 and self._calls % 16:
            return
        if not self._sums_along and not _is_read_in_order(inputs):
            return

        batch = inputs.batch
        at = inputs.at
        ends: Array = at.ends.reshape(-1).numpy()
        rows = len(ends)
        if rows >= _FEW and 10 * int(np.count_nonzero(ends)) >= 9 * rows:
            self._look_for_single_rows(batch, at, keys["done"], trace)

        # Step counts go up by one inside each run.
        step: Tensor | None = get_entry(batch, keys["step_count"])
        if step is not None and step.numel() == rows and not (step.is_floating_point() or step.is_complex()):
            numbers: Array = step.reshape(-1).numpy()
            follows = np.equal(numbers[1:] - numbers[:-1], 1)  # whether the next row follows directly
            follows |= ends[:-1]
            if not follows.all():
                _check_gaps(batch, at, keys, numbers, follows)
        elif inputs.network is not None and not inputs.n_step:
            check_observations(batch, at, inputs.network.observed)

    def _look_for_single_rows(
        self, batch: TensorDictBase, at: Boundaries, done_key: NestedKey, trace: float | Tensor
    ) -> None:
        """Warn once if the estimator sums along runs, but nearly every row is a run of its own that is not done."""
        if not self._sums_along or (isinstance(trace, float) and trace == 0.0):
            return

        single = at.ends & ~at.terminated
        if get_entry(batch, done_key) is not None:
            single &= ~marker(batch, done_key)

        alone = int(single.sum())
        count = single.numel()
        if alone >= 0.9 * count:
            self._warn(
                f"{alone} of {count} rows are runs of one row that are not done, so there is nothing to sum along: "
                "call the estimator before rows are stored or shuffled, sample slices (SliceSampler), or use "
                "TD0Estimator"
            )


def _is_read_in_order(inputs: ValueInputs) -> bool:
    """Return whether the next value of a row is that of the next row: the network is called once for both."""
    network = inputs.network
    if inputs.shifted or network is None:
        return inputs.shifted
    return network.recurrent or any(get_entry(inputs.batch, key) is None for key in network.next_observed)


def _check_gaps(
    batch: TensorDictBase, at: Boundaries, keys: Mapping[str, NestedKey], numbers: Array, follows: Array
) -> None:
    """Raise ValueError at the first gap in the step counts ``numbers`` ``[N]`` that is in a run, outside of padding.

    ``follows``, bool ``[N - 1]``, says which rows the next one follows, or need not.
    """
    follows = follows | at.terminated.reshape(-1).numpy()[:-1]
    if get_entry(batch, keys["mask"]) is not None:
        follows |= ~marker(batch, keys["mask"]).reshape(-1).numpy()[:-1]

    gaps = np.flatnonzero(~follows)
    if len(gaps):
        row = int(gaps[0])
        raise ValueError(
            f"{_name_row(batch, row)}: {keys['step_count']!r} is {numbers[row + 1]} after {numbers[row]}. {_WAY_OUT}"
        )


def check_observations(batch: TensorDictBase, at: Boundaries, observed: Sequence[NestedKey]) -> None:
    """Check some rows inside runs: their next observation must be the observation of the next row.

    Next observations that match no row are accepted: they may have been changed on purpose, for example by random
    crops.

    Args:
        batch: ``[*B, T]``, on the host.
        at: its boundaries.
        observed: keys of the observations; those without a next entry are left out.

    Raises:
        ValueError: a row's next observation is the observation of a row other than the next one.
    """
    count = at.ends.numel()
    size = batch.batch_size
    if count < 2:
        return

    every = max((count - 1) // _PAIRS, 1)
    here: Any = slice(0, count - 1, every)
    behind: Any = slice(1, None, every)
    if len(size) > 1:
        numbers = np.arange(count)
        here = np.unravel_index(numbers[here], size)
        behind = np.unravel_index(numbers[behind], size)

    follows: Array = at.ends.numpy()[here]
    unequal = np.zeros_like(follows)

    columns = list[tuple[Tensor, Tensor]]()
    for key in observed:
        root = get_entry(batch, key)
        after = get_entry(batch, next_key(key))
        if root is not None and after is not None and root.shape == after.shape and root.dtype == after.dtype:
            columns.append((root, after))
            unequal |= (_bits(after)[here] != _bits(root)[behind]).reshape(len(follows), -1).any(1)

    if follows[unequal].all():
        return

    # Rarely reached: deltas of low precision, NaN, and errors.
    follows = follows | at.terminated.numpy()[here]
    rows = torch.arange(count)[: count - 1 : every]
    flat = [(root.detach().reshape(count, -1), after.detach().reshape(count, -1)) for root, after in columns]
    followed = torch.stack([follow(root[rows], after[rows], root[rows + 1]) for root, after in flat]).all(0)
    wrong = rows[~(followed | torch.from_numpy(follows))].tolist()

    searched = _SEARCHED // max(sum(root[0].nbytes for root, _ in flat), 1)
    for row in wrong[:4]:
        found = torch.stack([(root[:searched] == after[row]).all(1) for root, after in flat]).all(0)
        if bool(found.any()):
            raise ValueError(
                f"{_name_row(batch, row)}: its next observation is that of row {int(found.nonzero()[0])}. {_WAY_OUT}"
            )


def _bits(column: Tensor) -> Array:
    """Return the column as an array for bitwise comparison: NumPy has no bfloat16."""
    column = column.detach()
    if column.dtype is torch.bfloat16:
        column = column.view(torch.int16)
    array: Array = column.numpy()
    return array


def _name_row(batch: TensorDictBase, row: int) -> str:
    """Describe a row that does not lead to the next row, by its number."""
    *series, step = np.unravel_index(row, batch.batch_size)
    where = f" of series {tuple(map(int, series))}" if series else ""
    return f"row {int(step) + 1}{where} does not follow row {int(step)} in its run"

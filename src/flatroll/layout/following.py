"""Checks that rows of runs follow one another: compares next observations with the observations that follow them.

Only values on the host are compared: on a device, reading them would sync.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.keys import (
    MASK,
    NEXT_KNOWN,
    OBSERVATION,
    STEP_COUNT,
    STEPS_TO_NEXT_OBS,
    NestedKey,
    marker,
    next_key,
)

_PAIRS = 64  # maximum number of rows that are compared with the next one
_SEARCHED = 1 << 26  # maximum bytes of observations searched for a match elsewhere


def check_runs_in_order(
    batch: TensorDictBase, starts: Tensor, observed: Sequence[NestedKey], way_out: str
) -> None:
    """Check that rows of runs follow one another: their step counts, or else up to 64 next observations.

    Step counts must go up by one. Without them, the next observation of a row must not be that of another row than the
    next; next observations that match no row may have been changed on purpose, for example by random crops. Only a
    single entry ``"observation"`` of one number or vector per row must agree. NaN may be anything, and n-step rows and
    rows whose next observation is not known are not compared.

    Args:
        batch: ``[*B]``, on the host, time last.
        starts: bool ``[*B]``, True at the first row of each run.
        observed: keys of observations; those without a next entry are left out.
        way_out: what to do, for the error.

    Raises:
        ValueError: a row does not follow the one before it; the message names both.
    """
    inside = ~starts.flatten()[1:]  # whether row i + 1 belongs to the run of row i
    if batch.get(MASK, None) is not None:
        inside = inside & marker(batch, MASK).flatten()[:-1]

    steps = batch.get(STEP_COUNT, None)
    if steps is not None and steps.numel() == starts.numel() and not steps.is_floating_point():
        steps = steps.flatten()
        gaps = (inside & (steps[1:] != steps[:-1] + 1)).nonzero()
        if len(gaps):
            row = int(gaps[0])
            reason = f"{STEP_COUNT!r} is {int(steps[row + 1])} after {int(steps[row])}"
            raise _order_error(row, reason, way_out)
        return

    if batch.get(STEPS_TO_NEXT_OBS, None) is not None:
        return

    if batch.get(NEXT_KNOWN, None) is not None:
        inside = inside & marker(batch, NEXT_KNOWN).flatten()[:-1]
    _check_observations(batch, inside, observed, way_out)


def _check_observations(
    batch: TensorDictBase, inside: Tensor, observed: Sequence[NestedKey], way_out: str
) -> None:
    """Do the second part of `check_runs_in_order`: ``inside``, bool ``[N - 1]``, says which rows are compared."""
    rows = len(inside) + 1
    columns = dict[NestedKey, tuple[Tensor, Tensor]]()
    for key in observed:
        root = batch.get(key, None)
        later = batch.get(next_key(key), None)
        pair = isinstance(root, Tensor) and isinstance(later, Tensor)
        if pair and root.is_cpu and root.shape == later.shape and root.dtype is later.dtype:
            columns[key] = root.detach().reshape(rows, -1), later.detach().reshape(rows, -1)

    if not columns or rows < 2:
        return

    pairs = min(rows - 1, _PAIRS)
    at = torch.arange(pairs) * (rows - 1) // pairs  # spread over the batch
    at = at[inside[at]]
    equal = [follow(root[at], later[at], root[at + 1]) for root, later in columns.values()]
    broken = at[~torch.stack(equal).all(0)].tolist()
    if not broken:
        return

    vector = list(columns) == [OBSERVATION] and batch.get(OBSERVATION).ndim <= batch.batch_dims + 1
    most = _SEARCHED // max(1, sum(root[0].nbytes for root, _ in columns.values()))

    for row in broken[:4]:
        found = torch.stack([(root[:most] == later[row]).all(1) for root, later in columns.values()]).all(0)
        if bool(found.any()):
            other = int(found.nonzero()[0])
            raise _order_error(row, f"its next observation is that of row {other}", way_out)
        if vector:
            raise _order_error(row, f"its next observation is not the observation of row {row + 1}", way_out)


def _order_error(row: int, reason: str, way_out: str) -> ValueError:
    return ValueError(f"row {row + 1} does not follow row {row} in its run: {reason}. {way_out}")


def follow(before: Tensor, after: Tensor, behind: Tensor) -> Tensor:
    """Return where ``after``, the next observations of ``before``, are the observations ``behind``.

    NaN may be anything, and so may what a delta of low precision rounds away.

    Args:
        before, after, behind: ``[K, F]``, of one dtype.

    Returns:
        bool ``[K]``.

    >>> import torch
    >>> before, after = torch.zeros(3, 1), torch.tensor([[1.0], [torch.nan], [2.0]])
    >>> follow(before, after, torch.tensor([[1.0], [5.0], [5.0]]))
    tensor([ True,  True, False])
    """
    equal = after == behind
    if not bool(equal.all()) and after.is_floating_point():
        # bfloat16 keeps 8 bits of a difference, and the sum is rounded once more
        slack = (after - before).abs() * 2**-8 + behind.abs() * (2 * torch.finfo(behind.dtype).eps)
        equal |= ~((after - behind).abs() > slack)

    if after.is_complex():
        equal |= after.isnan()
    return equal.all(1)

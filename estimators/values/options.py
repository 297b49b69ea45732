"""The arguments that all value estimators share."""

from typing import TypedDict

import torch

from flatroll.estimators.values.batch_inputs import BootstrapMissing
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey


class EstimatorOptions(TypedDict, total=False):
    """What each estimator takes besides its own arguments; :class:`ValueEstimator` says what they mean."""

    differentiable: bool
    shifted: bool
    shifted_budget: int | None
    single_call: bool | None
    value_chunk_size: int | None
    num_chunks: int | None
    num_chunk: int | None
    value_chunk_dim: int
    skip_existing: bool | None
    check_finite: bool
    bootstrap_missing: BootstrapMissing
    group_key: NestedKey | None
    time_dim: int | None
    advantage_key: NestedKey | None
    value_target_key: NestedKey | None
    value_key: NestedKey | None
    device: torch.device | str | None
    vectorized: bool | None
    deactivate_vmap: bool


def one_stream(shifted: bool, single_call: bool | None) -> bool:
    """``shifted``, or its other name.

    Raises:
        ValueError: they differ, or ``shifted`` is no bool.
    """
    if not isinstance(shifted, bool):
        raise ValueError(f"shifted must be True or False, got {shifted!r}")
    if single_call is not None and shifted and not single_call:
        raise ValueError(f"single_call is another name of shifted, got {single_call} and {shifted}")
    return shifted or bool(single_call)


def checked_budget(budget: int | None, shifted: bool) -> int | None:
    """``shifted_budget``, which must be a positive number and needs ``shifted``."""
    if budget is None:
        return None
    whole_number("shifted_budget", budget)
    if not shifted:
        raise ValueError(
            f"shifted_budget={budget} says how long the one call of shifted=True is: give that, too"
        )
    return budget

"""Returns and advantages from tensors alone: one time axis, one segmented scan over it.

All of them under one roof; ``vec_…`` names are the same functions, since there is no slower form.
"""

from torch import Tensor

from flatroll.estimators.functional.td import (
    td0_advantage_estimate,
    td0_return_estimate,
    td1_advantage_estimate,
    td1_return_estimate,
    td_lambda_advantage_estimate,
    td_lambda_return_estimate,
    vec_td1_advantage_estimate,
    vec_td1_return_estimate,
    vec_td_lambda_advantage_estimate,
    vec_td_lambda_return_estimate,
)
from flatroll.estimators.functional.time_columns import Series
from flatroll.estimators.functional.vtrace import vtrace_advantage_estimate
from flatroll.kernels import residual_scan, segmented_scan

__all__ = [
    "generalized_advantage_estimate",
    "reward2go",
    "td0_advantage_estimate",
    "td0_return_estimate",
    "td1_advantage_estimate",
    "td1_return_estimate",
    "td_lambda_advantage_estimate",
    "td_lambda_return_estimate",
    "vec_generalized_advantage_estimate",
    "vec_td1_advantage_estimate",
    "vec_td1_return_estimate",
    "vec_td_lambda_advantage_estimate",
    "vec_td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    ends: Tensor | None = None,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimate, exact at every kind of boundary, linear in the rows.

    ``delta[t] = reward[t] + gamma * next_state_value[t] * (1 - terminated[t]) - state_value[t]``,
    ``advantage[t] = delta[t] + gamma * lmbda * advantage[t + 1]``, and ``advantage[t] = delta[t]`` at the
    last row of a run. Termination removes the bootstrap; every end, a mere cut included, stops the trace. A
    row that is both terminated and truncated is terminated.

    Args:
        gamma: discount in [0, 1]; a number, one per row ``[*B, T]``, or a tensor that broadcasts to the reward.
        lmbda: trace decay in [0, 1], likewise.
        state_value: value of each row's observation, floating ``[*B, T, *F]`` or ``[N]``.
        next_state_value: value of each row's next observation, same shape; not read where terminated.
        reward: floating, same shape.
        done: bool, same shape or 1 for its features: the rows at which an episode ends.
        terminated: bool like ``done``: ends that are not bootstrapped. Default: ``done``, which takes
            truncations for terminations.
        ends: bool like ``done``: further rows at which a run ends, e.g. where windows or slices lie next to
            each other (:func:`flatroll.layout.run_ends`). Default: none but ``done`` and the last one.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has but one.

    Returns:
        advantage and value target (advantage plus ``state_value``), shaped like the reward.

    Raises:
        ValueError: shapes that do not match, or a factor out of range.
        TypeError: the reward is not floating, or a flag not bool.

    Example:
        >>> import torch
        >>> value = torch.tensor([1.0, 1.0, 100.0, 100.0])        # two episodes, of value 1 and 100
        >>> next_value = torch.tensor([1.0, 1.0, 100.0, 100.0])
        >>> truncated = torch.tensor([False, True, False, True])
        >>> generalized_advantage_estimate(
        ...     1.0, 0.95, value, next_value, torch.zeros(4), truncated, torch.zeros(4, dtype=torch.bool)
        ... )[0]
        tensor([0., 0., 0., 0.])

    References:
        J. Schulman et al., High-dimensional continuous control using generalized advantage estimation,
        https://arxiv.org/abs/1506.02438
    """
    series = Series(reward, time_dim, state_value=state_value, next_state_value=next_state_value)
    over, stop = series.flags(done, terminated, ends)
    factor = series.factor("gamma", gamma)
    advantage, target = residual_scan(
        factor,
        factor * series.factor("lmbda", lmbda),
        series.number(reward),
        series.number(state_value),
        series.number(next_state_value),
        over,
        stop,
        longest=series.longest,
    )
    return series.back(advantage), series.back(target)


def reward2go(
    reward: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    *,
    ends: Tensor | None = None,
    time_dim: int = -2,
) -> Tensor:
    """Discounted sum of the rewards from each row to the end of its run, without a bootstrap.

    ``G[t] = reward[t] + gamma * G[t + 1]`` inside a run, ``G[t] = reward[t]`` at its end.

    Args:
        reward: floating ``[*B, T, *F]`` or ``[N]``.
        done: bool, same shape or 1 for its features: the rows at which an episode ends.
        gamma: discount in [0, 1]; a number, one per row ``[*B, T]``, or a tensor that broadcasts to the reward.
        ends: bool like ``done``: further rows at which a run ends.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has but one.

    Returns:
        tensor of the reward's shape.

    Raises:
        ValueError: shapes that do not match, or ``gamma`` out of range.
        TypeError: the reward is not floating, or a flag not bool.

    >>> import torch
    >>> reward2go(torch.ones(4), torch.tensor([False, True, False, False]), 0.5)
    tensor([1.5000, 1.0000, 1.5000, 1.0000])
    """
    series = Series(reward, time_dim)
    _, stop = series.flags(done, None, ends)
    factor = series.factor("gamma", gamma)
    return series.back(segmented_scan(factor, series.number(reward), stop, longest=series.longest))


vec_generalized_advantage_estimate = generalized_advantage_estimate

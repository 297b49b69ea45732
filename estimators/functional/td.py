"""Temporal-difference returns and advantages of tensors: TD(0), TD(1), TD(lambda).

What the functions share:

* The value that follows row t is ``next_state_value[t]``, and 0 where the row terminated.
* Every end of a run stops the trace: rows that are done, rows in ``ends``, the last one. A run that ends without
  termination is bootstrapped. A row that is both terminated and truncated is terminated.
* ``[*B, T, *F]`` tensors are B series of T rows, with any number of features; a tensor ``[N]`` is one series.
"""

import torch
from torch import Tensor

from flatroll.estimators.functional.time_columns import Series, checked_flag
from flatroll.kernels import return_scan


def td0_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor | None = None,
    *,
    done: Tensor | None = None,
    time_dim: int = -2,
) -> Tensor:
    """One-step return: ``reward[t] + gamma * next_state_value[t] * (1 - terminated[t])``.

    Args:
        gamma: discount in [0, 1]; a number, one per row ``[*B, T]``, or a tensor that broadcasts to the reward.
        next_state_value: value of each row's next observation, floating, of the reward's shape; not read where
            terminated.
        reward: floating ``[*B, T, *F]`` or ``[N]``.
        terminated: bool of the same shape, or 1 for its features: rows that are not bootstrapped.
        done: stands in for ``terminated`` where that is not given, which takes truncations for terminations.
        time_dim: the last dim of the rows; those behind it are features. Default: -2; a tensor ``[N]`` has but one.

    Returns:
        tensor of the reward's shape.

    Raises:
        ValueError: shapes that do not match, ``gamma`` out of range, or neither flag.
        TypeError: the reward is not floating, or the flag not bool.

    >>> import torch
    >>> end = torch.tensor([False, True])
    >>> td0_return_estimate(0.5, torch.tensor([2.0, 9.0]), torch.ones(2), end)
    tensor([2., 1.])
    """
    name, over = ("terminated", terminated) if terminated is not None else ("done", done)
    if over is None:
        raise ValueError("give terminated= (the rows that are not bootstrapped), or done=")
    series = Series(reward, time_dim, next_state_value=next_state_value)
    factor = series.factor("gamma", gamma)
    over = series.spread(name, checked_flag(name, over))
    bootstrap = torch.where(over, 0.0, next_state_value)
    if not isinstance(factor, Tensor):
        return torch.add(reward, bootstrap, alpha=factor)
    return torch.addcmul(reward, series.back(factor) if factor.ndim else factor, bootstrap)


def td0_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
) -> Tensor:
    """:func:`td0_return_estimate` minus ``state_value``, the temporal-difference residual.

    >>> import torch
    >>> end = torch.tensor([False, True])
    >>> td0_advantage_estimate(0.5, torch.ones(2), torch.tensor([2.0, 9.0]), torch.ones(2), end)
    tensor([1., 0.])
    """
    Series(reward, -2, state_value=state_value, next_state_value=next_state_value)
    return td0_return_estimate(gamma, next_state_value, reward, terminated, done=done) - state_value


def td1_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    ends: Tensor | None = None,
) -> Tensor:
    """Discounted sum of the rewards of a run, and of what it bootstraps from: TD(lambda) with ``lmbda = 1``.

    ``G[t] = reward[t] + gamma * G[t + 1]`` inside a run, ``reward[t] + gamma * next_state_value[t]`` at its end.
    Arguments, shapes and errors as for :func:`td_lambda_return_estimate`.

    >>> import torch
    >>> truncated, never = torch.tensor([False, True]), torch.tensor([False, False])
    >>> td1_return_estimate(0.5, torch.tensor([7.0, 4.0]), torch.ones(2), truncated, never)
    tensor([2.5000, 3.0000])
    """
    return td_lambda_return_estimate(
        gamma, 1.0, next_state_value, reward, done, terminated, rolling_gamma, time_dim, ends=ends
    )


def td1_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    ends: Tensor | None = None,
) -> Tensor:
    """:func:`td1_return_estimate` minus ``state_value``.

    >>> import torch
    >>> one, end = torch.ones(2), torch.tensor([False, True])
    >>> td1_advantage_estimate(0.5, one, one, one, end)
    tensor([0.5000, 0.0000])
    """
    return td_lambda_advantage_estimate(
        gamma,
        1.0,
        state_value,
        next_state_value,
        reward,
        done,
        terminated,
        rolling_gamma,
        time_dim,
        ends=ends,
    )


def td_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    ends: Tensor | None = None,
) -> Tensor:
    """Lambda-return, exact at every kind of boundary, linear in the rows.

    ``G[t] = reward[t] + gamma * ((1 - lmbda) * next_state_value[t] + lmbda * G[t + 1])`` inside a run, and
    ``G[t] = reward[t] + gamma * next_state_value[t]`` at its end.

    Args:
        gamma: discount in [0, 1]; a number, one per row ``[*B, T]``, or a tensor that broadcasts to the reward.
        lmbda: trace decay in [0, 1], likewise.
        next_state_value: value of each row's next observation, floating, of the reward's shape; not read where
            terminated, nor where its factor is 0.
        reward: floating ``[*B, T, *F]`` or ``[N]``.
        done: bool of the same shape, or 1 for its features: the rows at which an episode ends.
        terminated: bool like ``done``: ends that are not bootstrapped. Default: ``done``, which takes
            truncations for terminations.
        rolling_gamma: each row's ``gamma`` counts for the step behind it, as above: None and True say so, and
            there is no other form.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has but one.
        ends: bool like ``done``: further rows at which a run ends, e.g. where windows or slices lie next to
            each other (:func:`flatroll.layout.run_ends`).

    Returns:
        tensor of the reward's shape.

    Raises:
        ValueError: shapes that do not match, a factor out of range, or ``rolling_gamma=False``.
        TypeError: the reward is not floating, or a flag not bool.

    Example:
        >>> import torch
        >>> truncated, never = torch.tensor([False, True]), torch.tensor([False, False])
        >>> td_lambda_return_estimate(1.0, 0.5, torch.tensor([7.0, 4.0]), torch.ones(2), truncated, never)
        tensor([7., 5.])

    References:
        R. Sutton, A. Barto, Reinforcement Learning: An Introduction, 2nd ed., section 12.1.
    """
    if rolling_gamma is False:
        raise ValueError(
            "rolling_gamma=False (one row's gamma for all the rewards behind it) is no recursion and has no "
            "linear form: leave it out, and give each run one gamma, where both mean the same"
        )
    series = Series(reward, time_dim, next_state_value=next_state_value)
    over, stop = series.flags(done, terminated, ends)
    returns = return_scan(
        series.factor("gamma", gamma),
        series.factor("lmbda", lmbda),
        series.number(reward),
        series.number(next_state_value),
        over,
        stop,
        longest=series.longest,
    )
    return series.back(returns)


def td_lambda_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    ends: Tensor | None = None,
) -> Tensor:
    """:func:`td_lambda_return_estimate` minus ``state_value``.

    >>> import torch
    >>> one, end = torch.ones(2), torch.tensor([False, True])
    >>> td_lambda_advantage_estimate(1.0, 0.5, one, one, one, end)
    tensor([1., 0.])
    """
    Series(reward, time_dim, state_value=state_value, next_state_value=next_state_value)
    returns = td_lambda_return_estimate(
        gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma, time_dim, ends=ends
    )
    return returns - state_value


vec_td1_return_estimate = td1_return_estimate
vec_td1_advantage_estimate = td1_advantage_estimate
vec_td_lambda_return_estimate = td_lambda_return_estimate
vec_td_lambda_advantage_estimate = td_lambda_advantage_estimate

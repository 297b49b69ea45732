"""Advantages from tensors alone: one time axis, one segmented scan over it."""

import torch
from torch import Tensor

from flatroll.kernels import residual_scan


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
        gamma: discount in [0, 1]; a number, or a tensor that broadcasts to the reward.
        lmbda: trace decay in [0, 1]; a number, or a tensor that broadcasts to the reward.
        state_value: value of each row's observation, floating ``[*B, T, F]``, ``[N, 1]`` or ``[N]``.
        next_state_value: value of each row's next observation, same shape; not read where terminated.
        reward: floating, same shape.
        done: bool, same shape or with a last dim of 1: the rows at which an episode ends.
        terminated: bool like ``done``: ends that are not bootstrapped. Default: ``done``, which takes
            truncations for terminations.
        ends: bool like ``done``: further rows at which a run ends, e.g. where windows or slices lie next to
            each other (:func:`flatroll.layout.run_ends`). Default: none but ``done`` and the last one.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has but one.

    Returns:
        advantage and value target (advantage plus ``state_value``), shaped like the reward.

    Raises:
        ValueError: shapes that do not match.
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
    if not reward.is_floating_point():
        raise TypeError(f"reward must be floating, got {reward.dtype}: cast it, e.g. with .float()")
    if not state_value.shape == next_state_value.shape == reward.shape:
        raise ValueError(
            "state_value, next_state_value and reward must have one shape, "
            f"got {tuple(state_value.shape)}, {tuple(next_state_value.shape)} and {tuple(reward.shape)}"
        )
    time = 0 if reward.ndim == 1 else time_dim
    shape = reward.movedim(time, -1).shape

    def row(x: Tensor) -> Tensor:  # time last, then flat: a view wherever there is one feature
        return x.movedim(time, -1).reshape(-1)

    def factor(x: float | Tensor) -> float | Tensor:
        return row(x.expand(reward.shape)) if isinstance(x, Tensor) and x.ndim else x

    stopped = row(_flag("done", done, reward))
    over = stopped if terminated is None else row(_flag("terminated", terminated, reward))
    stop = stopped | over
    if ends is not None:
        stop |= row(_flag("ends", ends, reward))
    stop.view(shape)[..., -1:] = True
    dtype = torch.promote_types(reward.dtype, state_value.dtype)
    scanned = residual_scan(
        factor(gamma),
        factor(gamma * lmbda),
        row(reward).to(dtype),
        row(state_value).to(dtype),
        row(next_state_value).to(dtype),
        over,
        stop,
        longest=shape[-1],
    )
    advantage, target = (x.view(shape).movedim(-1, time) for x in scanned)
    return advantage, target


def _flag(name: str, flag: Tensor, reward: Tensor) -> Tensor:
    """The flag in the reward's shape (by a view), a last dim of 1 spread over the features."""
    if flag.dtype is not torch.bool:
        raise TypeError(f"{name} must be bool, got {flag.dtype}: cast it with .bool()")
    if flag.shape == reward.shape:
        return flag
    if flag.shape == (*reward.shape[:-1], 1):
        return flag.expand(reward.shape)
    raise ValueError(
        f"{name} must have the reward's shape {tuple(reward.shape)}, or 1 as last dim, "
        f"got {tuple(flag.shape)}"
    )

"""V-trace targets and advantages of tensors: off-policy correction by clipped importance weights."""

import torch
from torch import Tensor

from flatroll.estimators.functional.returns import TimeColumns
from flatroll.kernels.scans.scan import is_tracing, vtrace_scan


def vtrace_advantage_estimate(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    time_dim: int = -2,
    *,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace advantages and targets, correct at terminated, truncated and cut rows, in linear time.

    With ``rho = min(rho_thresh, pi / mu)``, ``c = min(c_thresh, pi / mu)`` and the residual
    ``delta[t] = rho[t] * (reward[t] + gamma * next_state_value[t] * (1 - terminated[t]) - state_value[t])``:
    ``target[t] - state_value[t] = delta[t] + gamma * c[t] * (target[t + 1] - state_value[t + 1])``, the second
    summand inside a run only, and ``advantage[t] = rho[t] * (reward[t] + gamma * target[t + 1] - state_value[t])``,
    with ``next_state_value[t]`` for ``target[t + 1]`` at the end of a run, and 0 where it terminated.

    Args:
        gamma: discount in [0, 1]; a number, one per row ``[*B, T]``, or a tensor that broadcasts to the reward.
        log_pi: log-probability of each row's action under the policy that learns; the reward's shape, or 1 for
            its features.
        log_mu: the same under the policy that acted.
        state_value: value of each row's observation, floating ``[*B, T, *F]`` or ``[N]``.
        next_state_value: value of each row's next observation, same shape; not read where terminated.
        reward: floating, same shape.
        done: bool, same shape or 1 for its features: the rows at which an episode ends.
        terminated: bool like ``done``: ends that are not bootstrapped. Default: ``done``, which takes
            truncations for terminations.
        rho_thresh: largest weight of a row's own residual; it decides which policy's value is found. A number,
            or a tensor that broadcasts to the reward. Default: 1.
        c_thresh: largest weight of what lies behind a row; it decides how fast. Default: 1.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has but one.
        ends: bool like ``done``: further rows at which a run ends (:func:`flatroll.layout.run_ends`).

    Returns:
        advantage and value target, shaped like the reward.

    Raises:
        ValueError: shapes that do not match, or a number out of range.
        TypeError: the reward is not floating, or a flag not bool.

    Example:
        >>> import torch
        >>> log, one, end = torch.zeros(2), torch.ones(2), torch.tensor([False, True])
        >>> vtrace_advantage_estimate(1.0, log - 1, log, one, one, one, end)
        (tensor([0.3679, 0.0000]), tensor([1.3679, 1.0000]))

    References:
        L. Espeholt et al., IMPALA: scalable distributed deep-RL with importance weighted actor-learner
        architectures, https://arxiv.org/abs/1802.01561
    """
    series = TimeColumns(reward, time_dim, state_value=state_value, next_state_value=next_state_value)
    terminated, ends = series.flags(done, terminated, ends)
    # pi / mu, written over the difference of logs, which is a new tensor.
    ratio = (series.expanded("log_pi", log_pi) - series.expanded("log_mu", log_mu)).exp_()
    same = not isinstance(c_thresh, Tensor) and not isinstance(rho_thresh, Tensor) and c_thresh == rho_thresh
    # One weight for both uses where the thresholds are one number; autograd still needs the ratio as it was.
    rho = _clipped("rho_thresh", ratio, rho_thresh, in_place=same and not ratio.requires_grad)
    c = rho if same else _clipped("c_thresh", ratio, c_thresh)
    discount = series.factor("gamma", gamma)
    weights = series.column(rho), series.column(c)
    columns = series.column(reward), series.column(state_value), series.column(next_state_value)
    advantage, target = vtrace_scan(discount, *weights, *columns, terminated, ends, longest=series.longest)
    return series.restored(advantage), series.restored(target)


def _clipped(name: str, ratio: Tensor, threshold: float | Tensor, *, in_place: bool = False) -> Tensor:
    """``min(ratio, threshold)``, written over ``ratio`` if ``in_place``."""
    if isinstance(threshold, Tensor):
        read = threshold.device.type == "cpu" and not is_tracing()
        if read and not bool((threshold >= 0.0).all()):
            raise ValueError(f"{name} must be at least 0, got {threshold}")
        return torch.minimum(ratio, threshold.to(ratio.dtype))
    if not threshold >= 0.0:
        raise ValueError(f"{name} must be at least 0, got {threshold}")
    return ratio.clamp_(max=threshold) if in_place else ratio.clamp(max=threshold)

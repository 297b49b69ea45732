"""Returns and advantages of tensors along one time axis: GAE, TD(0), TD(1), TD(lambda), V-trace, discounted sums.

All functions share these rules:

* The value after row t is ``next_state_value[t]``, and 0 where the row terminated.
* Every end of a run stops the trace: rows that are done, rows in ``ends``, the last one. A run that ends without
  termination is bootstrapped. A row that is both terminated and truncated is terminated.
* Values multiplied by a factor of 0 are ignored, even NaN and inf: next values with a discount of 0, later rows after
  a trace of 0.
* ``[*B, T, *F]`` tensors are B series of T rows, with any number of features; a tensor ``[N]`` is one series.
* ``vec_...`` names are aliases of the same functions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatroll.kernels.scan import (
    is_tracing,
    readable,
    residual_scan,
    return_scan,
    segmented_scan,
    vtrace_scan,
)
from flatroll.layout import checks


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
    """Generalized advantage estimate, correct at terminated, truncated and cut rows, in linear time.

    ``delta[t] = reward[t] + gamma * next_state_value[t] * (1 - terminated[t]) - state_value[t]``,
    ``advantage[t] = delta[t] + gamma * lmbda * advantage[t + 1]``, and ``advantage[t] = delta[t]`` at the
    last row of a run. Termination removes the bootstrap; every end, including a cut, stops the trace. A row that is
    both terminated and truncated is terminated.

    Args:
        gamma: discount in [0, 1]; a number, one per row ``[*B, T]``, or a tensor that broadcasts to the reward.
        lmbda: trace decay in [0, 1], likewise.
        state_value: value of each row's observation, floating ``[*B, T, *F]`` or ``[N]``.
        next_state_value: value of each row's next observation, same shape; not read where terminated.
        reward: floating, same shape.
        done: bool, same shape or 1 for its features: the rows at which an episode ends.
        terminated: bool like ``done``: ends that are not bootstrapped. Default: ``done``, which takes
            truncations for terminations.
        ends: bool like ``done``: further rows at which a run ends, e.g. where windows or slices are
            concatenated (:func:`flatroll.layout.run_ends`). Default: none but ``done`` and the last one.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has only one.

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
    # Every argument as a column [B * F * T], in which each run is contiguous.
    series = TimeColumns(reward, time_dim, state_value=state_value, next_state_value=next_state_value)
    terminated, ends = series.flags(done, terminated, ends)

    discount = series.factor("gamma", gamma)
    trace = series.factor("lmbda", lmbda)
    columns = (series.column(reward), series.column(state_value), series.column(next_state_value))

    advantage, target = residual_scan(
        discount, discount * trace, *columns, terminated, ends, longest=series.longest
    )

    return series.restored(advantage), series.restored(target)


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
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has only one.

    Returns:
        tensor of the reward's shape.

    Raises:
        ValueError: shapes that do not match, or ``gamma`` out of range.
        TypeError: the reward is not floating, or a flag not bool.

    >>> import torch
    >>> reward2go(torch.ones(4), torch.tensor([False, True, False, False]), 0.5)
    tensor([1.5000, 1.0000, 1.5000, 1.0000])
    """
    series = TimeColumns(reward, time_dim)
    _, ends = series.flags(done, None, ends)
    discount = series.factor("gamma", gamma)
    return series.restored(segmented_scan(discount, series.column(reward), ends, longest=series.longest))


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
        done: used if ``terminated`` is not given; truncations then count as terminations.
        time_dim: the last dim of the rows; dims after it are features. Default: -2; a tensor ``[N]`` has only one.

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
    name = "terminated"
    final = terminated
    if final is None:
        name = "done"
        final = done
    if final is None:
        raise ValueError("pass terminated= (the rows that are not bootstrapped), or done=")

    series = TimeColumns(reward, time_dim, next_state_value=next_state_value)
    discount = series.factor("gamma", gamma)
    if isinstance(discount, Tensor) and discount.ndim:
        discount = series.restored(discount)

    # where(), not a product: values after a termination or with a discount of 0 may be NaN.
    bootstrap = readable(next_state_value, discount, series.expanded(name, final, flag=True))

    # reward + discount * bootstrap in one fused pass.
    if not isinstance(discount, Tensor):
        return torch.add(reward, bootstrap, alpha=discount)
    return torch.addcmul(reward, discount, bootstrap)


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
    TimeColumns(reward, -2, state_value=state_value, next_state_value=next_state_value)
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
    """Return the discounted sum of rewards to the end of the run, bootstrapped there (TD(lambda), lambda 1).

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
    columns = (state_value, next_state_value, reward, done)
    return td_lambda_advantage_estimate(gamma, 1.0, *columns, terminated, rolling_gamma, time_dim, ends=ends)


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
    """Lambda-return, correct at terminated, truncated and cut rows, in linear time.

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
        rolling_gamma: each row's ``gamma`` applies to the step after it, as above; only None and True are supported.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has only one.
        ends: bool like ``done``: further rows at which a run ends, e.g. where windows or slices are
            concatenated (:func:`flatroll.layout.run_ends`).

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
            "rolling_gamma=False (one row's gamma for all later rewards) is not supported, as it is no recursion: "
            "leave it out, and use one gamma in each run, where True and False give the same"
        )

    series = TimeColumns(reward, time_dim, next_state_value=next_state_value)
    terminated, ends = series.flags(done, terminated, ends)

    discount = series.factor("gamma", gamma)
    trace = series.factor("lmbda", lmbda)
    columns = (series.column(reward), series.column(next_state_value))
    return series.restored(return_scan(discount, trace, *columns, terminated, ends, longest=series.longest))


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
    TimeColumns(reward, time_dim, state_value=state_value, next_state_value=next_state_value)
    returns = td_lambda_return_estimate(
        gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma, time_dim, ends=ends
    )
    return returns - state_value


vec_generalized_advantage_estimate = generalized_advantage_estimate  #: Alias with TorchRL's name.
vec_td1_return_estimate = td1_return_estimate  #: Alias with TorchRL's name.
vec_td1_advantage_estimate = td1_advantage_estimate  #: Alias with TorchRL's name.
vec_td_lambda_return_estimate = td_lambda_return_estimate  #: Alias with TorchRL's name.
vec_td_lambda_advantage_estimate = td_lambda_advantage_estimate  #: Alias with TorchRL's name.


class TimeColumns:
    """Flattens tensors ``[*B, T, *F]`` to ``[B * F * T]`` for the kernels, one time series after another.

    The reward and the ``values``, further floating tensors by name, must have one shape; the columns are in the dtype
    that all of them promote to.
    """

    def __init__(self, reward: Tensor, time_dim: int, **values: Tensor) -> None:
        checks.check_floating_tensor("reward", reward)
        self.shape = reward.shape
        self.dtype = reward.dtype
        self.device = reward.device
        dims = reward.ndim

        for name, x in values.items():
            checks.check_dense_tensor(name, x, self.device, "the reward")
            if x.dtype is torch.bool:
                raise TypeError(f"{name} must be floating, got {x.dtype}: cast it, e.g. with .float()")

        if any(x.shape != self.shape for x in values.values()):
            shapes = [tuple(x.shape) for x in (*values.values(), reward)]
            raise ValueError(
                f"{join_words([*values, 'reward'])} must have one shape, got {join_words(shapes)}"
            )
        for x in values.values():
            self.dtype = torch.promote_types(self.dtype, x.dtype)

        if dims < 1:
            raise ValueError("reward must have at least one dim, time, got shape ()")
        if dims > 1 and not (isinstance(time_dim, int) and -dims <= time_dim < dims):
            raise ValueError(f"time_dim must name a dim of the reward {tuple(self.shape)}, got {time_dim!r}")

        self.time = 0 if dims == 1 else time_dim % dims
        self.longest = self.shape[self.time]
        # Whether only dims of size 1 follow time: then the memory is already in the order of the columns.
        self._in_order = self.shape[self.time + 1 :].numel() == 1

    def column(self, x: Tensor) -> Tensor:
        """Flatten ``x``, of the reward's shape, a view if possible; floats are cast to the common dtype."""
        column = x
        if not self._in_order:
            column = x.movedim(self.time, -1)
        column = column.reshape(-1)

        if x.dtype is torch.bool:
            return column
        return column.to(self.dtype)

    def restored(self, column: Tensor) -> Tensor:
        """Reshape a column to the reward's shape: the inverse of :meth:`column`."""
        if self._in_order:
            return column.view(self.shape)

        # column() moved time after the features: restore that shape, then move time back.
        moved = (*self.shape[: self.time], *self.shape[self.time + 1 :], self.longest)
        return column.view(moved).movedim(-1, self.time)

    def expanded(self, name: str, x: Tensor, *, flag: bool = False) -> Tensor:
        """Broadcast ``x`` to the reward's shape; feature dims may be 1 or missing (``[*B, T]``)."""
        checks.check_dense_tensor(name, x, self.device, "the reward")
        if flag and x.dtype is not torch.bool:
            raise TypeError(f"{name} must be bool, got {x.dtype}: cast it with .bool()")
        if x.shape == self.shape:
            return x

        rows = self.time + 1  # the number of dims in [*B, T]; later dims are features
        fits = x.ndim <= len(self.shape) and x.shape[:rows] == self.shape[:rows]
        if not fits or any(n not in (1, m) for n, m in zip(x.shape[rows:], self.shape[rows:], strict=False)):
            raise ValueError(
                f"{name} must have the reward's shape {tuple(self.shape)}, where feature dims may be 1 or missing, "
                f"got {tuple(x.shape)}"
            )

        # Append missing feature dims with size 1, then expand, which copies nothing.
        return x.reshape(*x.shape, *[1] * (len(self.shape) - x.ndim)).expand(self.shape)

    def flags(self, done: Tensor, terminated: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return two bool columns: rows that are not bootstrapped, and last rows of runs."""
        over = self.column(self.expanded("done", done, flag=True))
        stop = over
        if terminated is not None:
            over = self.column(self.expanded("terminated", terminated, flag=True))
        stop = stop | over  # a new tensor, because the lines below write into it
        if ends is not None:
            stop = stop | self.column(self.expanded("ends", ends, flag=True))

        # A column holds one series after another. Mark their ends; the kernel ends the last one itself.
        if stop.shape[0] != self.longest:
            stop.view(-1, self.longest)[:, -1:] = True
        return over, stop

    def factor(self, name: str, x: float | Tensor) -> float | Tensor:
        """Return a discount or decay as a number or as a column, one per row; ValueError if outside [0, 1]."""
        if not isinstance(x, Tensor):
            return unit_interval(name, x)

        # A number on the host fits a reward on any device.
        device = self.device if x.ndim or not x.is_cpu else None
        checks.check_dense_tensor(name, x, device, "the reward")
        # On a device the check would sync.
        if x.device.type == "cpu" and not is_tracing() and x.numel():
            for bound in x.detach().aminmax():
                unit_interval(name, float(bound))

        x = x.to(self.dtype)
        if x.ndim:
            return self.column(factor_over(name, x, self.shape, self.time + 1))
        return x


def factor_over(name: str, x: Tensor, shape: torch.Size, rows: int) -> Tensor:
    """Expand ``x``, one number per row or broadcastable, to the reward's ``shape`` (with ``rows`` row dims).

    >>> factor_over("gamma", torch.tensor([0.5, 0.9]), torch.Size([2, 3]), 1).tolist()
    [[0.5, 0.5, 0.5], [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]]
    """
    try:  # one per row: append a dim of size 1 per feature dim, so that it broadcasts from the left
        over = x
        if x.shape == shape[:rows]:
            over = x.reshape(*x.shape, *[1] * (len(shape) - rows))
        return over.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number, one per row {tuple(shape[:rows])} or broadcast to the reward "
            f"{tuple(shape)}, got shape {tuple(x.shape)}"
        ) from None


def unit_interval(name: str, number: float | Tensor) -> float:
    """Return ``number`` as a float; ValueError unless it lies in [0, 1]."""
    return float(checks.check_number(name, number, least=0, most=1))


def join_words(items: Sequence[object]) -> str:
    """``a, b and c``."""
    *first, last = map(str, items)
    if first:
        return f"{', '.join(first)} and {last}"
    return last


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
        log_pi: log-probability of each row's action under the current policy; the reward's shape, or 1 for its
            features.
        log_mu: the same under the behaviour policy.
        state_value: value of each row's observation, floating ``[*B, T, *F]`` or ``[N]``.
        next_state_value: value of each row's next observation, same shape; not read where terminated.
        reward: floating, same shape.
        done: bool, same shape or 1 for its features: the rows at which an episode ends.
        terminated: bool like ``done``: ends that are not bootstrapped. Default: ``done``, which takes
            truncations for terminations.
        rho_thresh: maximum weight of a row's own residual; it determines the policy whose value is estimated. A number,
            or a tensor that broadcasts to the reward. Default: 1.
        c_thresh: maximum weight of the trace after a row; it determines the speed of convergence. Default: 1.
        time_dim: dim along which time runs. Default: -2; a tensor ``[N]`` has only one.
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
    for name, column in (("log_pi", log_pi), ("log_mu", log_mu)):
        checks.check_floating_tensor(name, column, series.device, "the reward")

    # pi / mu, computed in place of the difference of the logs.
    ratio = (series.expanded("log_pi", log_pi) - series.expanded("log_mu", log_mu)).exp_()

    for name, threshold in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
        if not isinstance(threshold, Tensor):
            checks.check_number(name, threshold, least=0)
    same = not isinstance(c_thresh, Tensor) and not isinstance(rho_thresh, Tensor) and c_thresh == rho_thresh

    # If both thresholds are equal, one weight serves for both. Autograd needs the unclipped ratio.
    rows = series.time + 1
    rho = _clip_ratio("rho_thresh", ratio, rho_thresh, rows, in_place=same and not ratio.requires_grad)
    c = rho if same else _clip_ratio("c_thresh", ratio, c_thresh, rows)

    discount = series.factor("gamma", gamma)
    weights = (series.column(rho), series.column(c))
    columns = (series.column(reward), series.column(state_value), series.column(next_state_value))
    advantage, target = vtrace_scan(discount, *weights, *columns, terminated, ends, longest=series.longest)
    return series.restored(advantage), series.restored(target)


def _clip_ratio(
    name: str, ratio: Tensor, threshold: float | Tensor, rows: int, *, in_place: bool = False
) -> Tensor:
    """``min(ratio, threshold)``, written over ``ratio`` (with ``rows`` row dims) if ``in_place``."""
    if isinstance(threshold, Tensor):
        checks.check_dense_tensor(name, threshold)
        threshold = factor_over(name, threshold, ratio.shape, rows)
        read = threshold.device.type == "cpu" and not is_tracing()
        if read and not bool((threshold >= 0.0).all()):
            raise ValueError(f"{name} must be at least 0, got {threshold}")
        return torch.minimum(ratio, threshold.to(ratio.dtype))

    threshold = float(threshold)
    if in_place:
        return ratio.clamp_(max=threshold)
    return ratio.clamp(max=threshold)

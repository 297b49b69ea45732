"""The Numba forms of the fused recursions: one pass over the arrays. Import it inside a function.

Each is :func:`flatroll.kernels.scans.scan_numba.step` with its summand computed on the way. Loads stand outside of
conditions, so that the compiler selects instead of branching. Arrays are ``[N]``, factors of any stride.
"""

from typing import Any

from flatroll.kernels.scans.scan_numba import compiled, step


@compiled(fastmath={"contract"})
def residual_scan(
    gamma: Any,
    decay: Any,
    reward: Any,
    value: Any,
    next_value: Any,
    terminated: Any,
    ends: Any,
    advantage: Any,
    target: Any,
) -> None:
    """Residual, scan and target."""
    zero = reward.dtype.type(0)
    acc = zero  # the row after the last: it adds nothing
    for i in range(reward.shape[0] - 1, -1, -1):
        ahead = next_value[i]
        bootstrap = zero if terminated[i] else ahead
        acc = step(decay[i], reward[i] + gamma[i] * bootstrap - value[i], ends[i], acc)
        advantage[i] = acc
        target[i] = acc + value[i]


@compiled()
def _behind_last(next_value: Any, terminated: Any) -> Any:
    """What the last row bootstraps from, so that it need not be marked as an end."""
    zero = next_value.dtype.type(0)
    last = next_value.shape[0] - 1
    return zero if last < 0 or terminated[last] else next_value[last]


@compiled(fastmath={"contract"})
def return_scan(
    gamma: Any, lmbda: Any, reward: Any, next_value: Any, terminated: Any, ends: Any, returns: Any
) -> None:
    """The lambda-return: ``1 - lmbda`` of the bootstrap inside a run, all of it at its end."""
    zero, one = reward.dtype.type(0), reward.dtype.type(1)
    acc = _behind_last(next_value, terminated)
    for i in range(reward.shape[0] - 1, -1, -1):
        ahead, decay = next_value[i], lmbda[i]
        share = one if ends[i] else one - decay
        bootstrap = zero if terminated[i] | (share == zero) else ahead * share  # "or" would branch
        acc = step(gamma[i] * decay, reward[i] + gamma[i] * bootstrap, ends[i], acc)
        returns[i] = acc


@compiled(fastmath={"contract"})
def vtrace_scan(
    gamma: Any,
    rho: Any,
    c: Any,
    reward: Any,
    value: Any,
    next_value: Any,
    terminated: Any,
    ends: Any,
    advantage: Any,
    target: Any,
) -> None:
    """Corrected residuals, scan, target, and the advantage over the target of the row behind."""
    zero = reward.dtype.type(0)
    acc, behind = zero, _behind_last(next_value, terminated)
    for i in range(reward.shape[0] - 1, -1, -1):
        ahead = next_value[i]
        bootstrap = zero if terminated[i] else ahead
        acc = step(gamma[i] * c[i], rho[i] * (reward[i] + gamma[i] * bootstrap - value[i]), ends[i], acc)
        following = bootstrap if ends[i] else behind
        advantage[i] = rho[i] * (reward[i] + gamma[i] * following - value[i])
        behind = acc + value[i]
        target[i] = behind


@compiled()
def zeroed(column: Any, flag: Any, out: Any) -> None:
    """Fill ``out [N, F]`` with ``column [N, F]``, and with 0 where ``flag [N]``."""
    zero = column.dtype.type(0)
    if column.shape[1] == 1:  # one loop, which the compiler makes a vector of
        for i in range(column.shape[0]):
            number = column[i, 0]
            out[i, 0] = zero if flag[i] else number
        return
    for i in range(column.shape[0]):
        for f in range(column.shape[1]):
            number = column[i, f]
            out[i, f] = zero if flag[i] else number

"""Backward recursions within the runs of a column: segmented scan, lambda-returns, GAE, V-trace.

Each is implemented twice. The loops at the end (``_..._loop``) are compiled by Numba at their first call and make one
pass over float32 or float64 columns on the CPU; the torch form handles everything else (other dtypes and devices,
gradients, ``torch.compile``) in log2(longest run) passes, without a host sync.

The loops' outputs are allocated by ``np.empty``, not by torch: NumPy asks the system for huge pages, and at tens of
megabytes the first touch of an array from ``torch.empty``, or from ``np.empty_like``, costs twice what a scan does.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]
_Columns: TypeAlias = tuple[Array, Array, Array, Array, Array]
_COMPILED_DTYPES = (torch.float32, torch.float64)
_LANE_ROWS = 2**16  # fewer rows are not worth another kernel to compile
_BLOCK = 256  # rows of a lane whose residuals are computed at a time


def segmented_scan(a: Tensor | float, b: Tensor, ends: Tensor, *, longest: int | None = None) -> Tensor:
    """Compute ``y[i] = b[i] + a[i] * y[i + 1]`` backward in each run, ``y[i] = b[i]`` at its end.

    Nothing crosses the end of a run or a row at which ``a`` is 0, not even NaN or inf. Differentiable in ``a`` and
    ``b``, also twice: the gradient is the same scan run forward in time, so it saves two arrays and no intermediate
    passes. Where ``a[i]`` is 0, its gradient is computed from ``y[i + 1]`` as usual, but is 0 if ``y[i + 1]`` is NaN or
    inf.

    On the CPU, float32 and float64 use one Numba loop over the rows; everything else, and ``torch.compile``, uses
    log2(longest run) passes of plain torch without a host sync.

    Args:
        a: decay; a number, a tensor ``[N]`` (one per row) or one that broadcasts to ``b``.
        b: floating or complex tensor ``[N, *F]``.
        ends: bool tensor ``[N]``, True on the last row of each run. The very last row always ends one.
        longest: an upper bound on the rows of a run, if known: it saves passes of the torch form and does not change
            the result. Results are wrong for runs that are longer. Default: ``N``.

    Returns:
        tensor of the shape, dtype and device of ``b``.

    Raises:
        TypeError: ``b`` is neither floating nor complex, or ``ends`` not bool.
        ValueError: the shapes do not match.

    Example:
        >>> import torch
        >>> ends = torch.tensor([False, False, True, False, True])
        >>> segmented_scan(0.5, torch.ones(5), ends)
        tensor([1.7500, 1.5000, 1.0000, 1.5000, 1.0000])

    References:
        G. E. Blelloch, Prefix sums and their applications, 1990.
    """
    a = _checked(a, b, ends)

    if not (longest is None or isinstance(longest, int)):
        raise TypeError(f"longest must be an integer or None, got {type(longest).__name__}")
    if b.numel() == 0:
        return b.clone()
    rows = b.shape[0]
    if longest is not None:
        rows = min(longest, rows)

    if is_tracing():
        return _doubling(a, b, ends, rows)
    if torch.is_grad_enabled() and (b.requires_grad or (isinstance(a, Tensor) and a.requires_grad)):
        y: Tensor = _Scan.apply(a, b, ends, rows)  # type: ignore[no-untyped-call]  # torch's own
        return y
    return _evaluate(a, b, ends, rows)


def _checked(a: Tensor | float, b: Tensor, ends: Tensor) -> Tensor | float:
    """Return ``a`` in a shape that broadcasts to ``b`` from the left; raises the errors of :func:`segmented_scan`."""
    for name, x in (("b", b), ("ends", ends)):
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {type(x).__name__}")

    if not (b.is_floating_point() or b.is_complex()):
        raise TypeError(f"b must be a floating tensor, got {b.dtype}: cast it, e.g. with .float()")
    if ends.dtype is not torch.bool:
        raise TypeError(f"ends must be bool, got {ends.dtype}: cast it with .bool()")
    if b.ndim < 1 or ends.shape != b.shape[:1]:
        raise ValueError(
            f"ends must have shape [N] for b of shape [N, *F], got {tuple(ends.shape)} for {tuple(b.shape)}"
        )

    if not isinstance(a, Tensor):
        if not isinstance(a, (int, float)):
            raise TypeError(f"a must be a number or a tensor, got {type(a).__name__}")
        return float(a)

    only_a_complex = a.is_complex() and not b.is_complex()
    if a.layout is not torch.strided or only_a_complex or ends.device != b.device or a.is_meta != b.is_meta:
        raise ValueError(
            "a, b and ends must be dense tensors on one device, of real numbers unless b is complex, got "
            f"{a.dtype} ({a.layout}) on {a.device}, {b.device} and {ends.device}"
        )
    if a.ndim == 1 and a.shape == b.shape[:1]:
        a = a.reshape(-1, *[1] * (b.ndim - 1))

    if a.ndim > b.ndim or any(n not in (1, m) for n, m in zip(a.shape[::-1], b.shape[::-1], strict=False)):
        raise ValueError(
            "a must be a number, a tensor [N] or one that broadcasts to b, "
            f"got {tuple(a.shape)} for b of shape {tuple(b.shape)}"
        )
    return a.to(b.dtype)


def _evaluate(a: Tensor | float, b: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Compute the scan without gradients, in the form that suits the device."""
    arrays = _readable_arrays((b,), (ends,), (a,))
    if arrays is None:
        return _doubling(a, b, ends, longest)
    decay, summand, closed = arrays

    y = np.empty(b.shape, summand.dtype)
    flat = (b.shape[0], math.prod(b.shape[1:]))  # all feature dims as one, the inner loop
    machine_code(_scan_loop)(decay.reshape(flat), summand.reshape(flat), closed, y.reshape(flat))

    return torch.from_numpy(y)


def _doubling(a: Tensor | float, b: Tensor, ends: Tensor, longest: int) -> Tensor:
    """The scan in plain torch: after the pass of stride ``k``, a row holds the sum over ``2 k`` rows.

    ``y_2k[i] = y_k[i] + a_k[i] * y_k[i + k]`` and ``a_2k[i] = a_k[i] * a_k[i + k]``, as long as the run of row i
    continues for k rows.
    """

    shape = (-1, *[1] * (b.ndim - 1))
    # Whether row i + k is in the run of row i, for the stride k of the pass.
    goes_on = torch.cat([~ends[:-1], torch.zeros_like(ends[-1:])]).view(shape)
    row_wise = isinstance(a, Tensor) and a.ndim == b.ndim and a.shape[0] > 1
    # Whether no decay from row i to row i + k - 1 is 0. The product a_k is not enough: it may underflow to 0.
    reads: Any = a != 0

    k = 1
    while k < longest:
        if row_wise:
            head = a[:-k]  # type: ignore[index]  # a tensor where row_wise
            read = reads[:-k]
        else:
            head = a
            read = reads

        # Selected, not multiplied by 0: a NaN or inf after the end of a run, or after a decay of 0, must not cross it.
        # A finite number after a decay of 0 is still multiplied, for the gradient of the decay.
        open_ = goes_on[:-k] & (b[k:].isfinite() | read)
        carried = torch.where(goes_on[:-k], head * torch.where(open_, b[k:], 0.0), 0.0)
        b = torch.cat([b[:-k] + carried, b[-k:]])

        if row_wise:
            reads = torch.cat([reads[:-k] & reads[k:], reads[-k:]])
            a = torch.cat([head * a[k:], a[-k:]])  # type: ignore[index]
        else:
            a = a * a
        goes_on = torch.cat([goes_on[:-k] & goes_on[k:], goes_on[-k:]])
        k *= 2

    return b


class _Scan(torch.autograd.Function):
    """The scan and its gradient: ``db[i] = dy[i] + a[i - 1] * db[i - 1]``, ``da[i] = db[i] * y[i + 1]``.

    Of complex numbers, ``a`` and ``y`` are conjugated there.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor | float, b: Tensor, ends: Tensor, longest: int) -> Tensor:
        y = _evaluate(a, b, ends, longest)
        ctx.longest = longest
        if isinstance(a, Tensor):
            ctx.number = None
            ctx.save_for_backward(y, ends, a)
        else:
            ctx.number = a
            ctx.save_for_backward(y, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (grad,) = grad_outputs
        y, ends, *rest = ctx.saved_tensors
        a = rest[0].conj() if rest else ctx.number
        row_wise = bool(rest) and a.ndim == y.ndim and a.shape[0] > 1

        # db is the same scan forward in time: on flipped rows, with the decay one row earlier (a[i - 1] at
        # row i), and with runs that end at their first rows: row 0 and each row after an end.
        before = torch.cat([a[:1], a[:-1]]).flip(0) if row_wise else a
        first = torch.cat([torch.ones_like(ends[:1]), ends[:-1]]).flip(0)
        db = segmented_scan(before, grad.flip(0), first, longest=ctx.longest).flip(0)
        if not ctx.needs_input_grad[0]:
            return None, db, None, None

        y = y.conj()
        inside = ~ends[:-1].view(-1, *[1] * (y.ndim - 1))
        # NaN and inf count only if the next row was read, and if this row has a gradient.
        decay = a[:-1] if row_wise else a
        inside = inside & (y[1:].isfinite() | ((db[:-1] != 0) & (decay != 0)))
        da = torch.cat([torch.where(inside, db[:-1] * y[1:], 0.0), torch.zeros_like(y[-1:])])
        # Sum over the rows and features that share one decay.
        return da.sum_to_size(a.shape), db, None, None


def residual_scan(
    gamma: Tensor | float,
    decay: Tensor | float,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Accumulate TD residuals b: ``y[i] = b[i] + decay * y[i + 1]``, ``y[i] = b[i]`` where a run ends (GAE).

    ``b[i] = reward[i] + gamma * next_value[i] - value[i]``, where ``next_value`` is taken as 0 where ``terminated``.
    Values multiplied by a factor of 0 are ignored, even NaN. One fused pass takes 0.6 of the time of four.

    Args:
        gamma, decay: a number or a tensor ``[N]``.
        reward, value, next_value: floating tensors ``[N]``.
        terminated, ends: bool tensors ``[N]``. The last row always ends a run.
        longest: as in :func:`segmented_scan`.

    Returns:
        the scan, and the scan plus ``value``, both ``[N]``.

    Example:
        >>> import torch
        >>> one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> residual_scan(1.0, 0.5, one, one, one, no, no)
        (tensor([1.7500, 1.5000, 1.0000]), tensor([2.7500, 2.5000, 2.0000]))
    """
    arrays = _readable_arrays((reward, value, next_value), (terminated, ends), (gamma, decay))
    if arrays is not None:
        scanned = np.empty(reward.shape, arrays[0].dtype)
        target = np.empty(reward.shape, arrays[0].dtype)
        lasts = None
        if reward.numel() >= _LANE_ROWS and not isinstance(gamma, Tensor) and not isinstance(decay, Tensor):
            lasts = find_lanes(arrays[-1])

        first, second, *columns = arrays
        if lasts is None:
            machine_code(_residual_loop)(first, second, tuple(columns), scanned, target)
        else:
            machine_code(_lane_loop)(first[0], second[0], tuple(columns), scanned, target, lasts)
        return torch.from_numpy(scanned), torch.from_numpy(target)

    _check_columns(
        {"gamma": gamma, "decay": decay},
        {"terminated": terminated, "ends": ends},
        reward=reward,
        value=value,
        next_value=next_value,
    )
    residual = reward + gamma * readable(next_value, gamma, terminated) - value
    y = segmented_scan(decay, residual, ends, longest=longest)
    return y, y + value


def find_lanes(ends: Array) -> Array | None:
    """Return the last row of each of four lanes, int64 ``[4]``, for `_lane_loop`; None if runs are too long for that.

    Each lane ends where a run does. With ``rows = lasts[0] + 1`` in each, they cover the rows of ``ends`` ``[N]`` and
    overlap little.

    >>> find_lanes(np.arange(4000) % 5 == 4)
    array([1064, 2129, 3194, 3999])
    """
    rows = len(ends)
    least = rows // 4 + rows // 64  # more than a quarter, because the other lanes end before they have to
    first = least + int(ends[least : rows // 3].argmax())

    lasts = [first]
    for _ in range(2):
        # The last end that leaves no gap between the two lanes.
        begin = lasts[-1] + 1
        stop = min(begin + first + 1, rows - 1)
        lasts.append(stop - 1 - int(ends[begin:stop][::-1].argmax()))

    closed = all(ends[row] for row in lasts)
    covered = rows - 1 - lasts[-1] <= first + 1
    lasts.append(rows - 1)
    # Two lanes whose blocks meet would read each other's sums.
    apart = all(after - before >= _BLOCK for before, after in pairwise(lasts))
    if not closed or not covered or not apart:
        return None
    return np.array(lasts, np.int64)


def return_scan(
    gamma: Tensor | float,
    lmbda: Tensor | float,
    reward: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    longest: int | None = None,
) -> Tensor:
    """Compute the lambda-return ``y[i] = reward[i] + gamma * ((1 - lmbda) * next_value[i] + lmbda * y[i + 1])``.

    At the end of a run ``lmbda`` is taken as 0, and where ``terminated`` ``next_value`` is. Values multiplied by a
    factor of 0 are ignored, even NaN.

    Args:
        gamma, lmbda: a number or a tensor ``[N]``.
        reward, next_value: floating tensors ``[N]``.
        terminated, ends: bool tensors ``[N]``. The last row always ends a run.
        longest: as in :func:`segmented_scan`.

    Returns:
        tensor ``[N]``.

    Example:
        >>> import torch
        >>> one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> return_scan(0.5, 1.0, one, 4 * one, no, no)
        tensor([2.2500, 2.5000, 3.0000])
    """
    arrays = _readable_arrays((reward, next_value), (terminated, ends), (gamma, lmbda))
    if arrays is not None:
        returns = np.empty(reward.shape, arrays[0].dtype)
        machine_code(_return_loop)(*arrays, returns)
        return torch.from_numpy(returns)

    _check_columns(
        {"gamma": gamma, "lmbda": lmbda},
        {"terminated": terminated, "ends": ends},
        reward=reward,
        next_value=next_value,
    )

    # Weight of a row's own next value: 1 - lmbda inside a run, 1 at its end and at the last row.
    stop = torch.cat([ends[:-1], torch.ones_like(ends[-1:])])
    share = torch.where(stop, 1.0, 1.0 - torch.as_tensor(lmbda, dtype=reward.dtype))
    bootstrap = readable(next_value, gamma * share, terminated) * share
    return segmented_scan(gamma * lmbda, reward + gamma * bootstrap, ends, longest=longest)


def vtrace_scan(
    gamma: Tensor | float,
    rho: Tensor,
    c: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute V-trace targets and advantages backward in each run.

    ``target[i] = value[i] + rho[i] * (reward[i] + gamma * next_value[i] - value[i])
    + gamma * c[i] * (target[i + 1] - value[i + 1])``, the last summand only inside a run, and
    ``advantage[i] = rho[i] * (reward[i] + gamma * target[i + 1] - value[i])``, with ``next_value[i]`` for
    ``target[i + 1]`` at the end of a run. ``next_value`` is taken as 0 where ``terminated``, and values
    multiplied by a factor of 0 are ignored, even NaN.

    Args:
        gamma: a number or a tensor ``[N]``.
        rho, c: clipped importance weights ``[N]``.
        reward, value, next_value: floating tensors ``[N]``.
        terminated, ends: bool tensors ``[N]``. The last row always ends a run.
        longest: as in :func:`segmented_scan`.

    Returns:
        advantage and target, both ``[N]``.

    Example:
        >>> import torch
        >>> one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> vtrace_scan(1.0, one, one, one, one, one, no, no)
        (tensor([3., 2., 1.]), tensor([4., 3., 2.]))
    """
    arrays = _readable_arrays((reward, value, next_value), (terminated, ends), (gamma, rho, c))
    if arrays is not None:
        of_advantage = np.empty(reward.shape, arrays[0].dtype)
        of_target = np.empty(reward.shape, arrays[0].dtype)
        first, second, third, *columns = arrays
        machine_code(_vtrace_loop)(first, second, third, tuple(columns), of_advantage, of_target)
        return torch.from_numpy(of_advantage), torch.from_numpy(of_target)

    _check_columns(
        {"gamma": gamma, "rho": rho, "c": c},
        {"terminated": terminated, "ends": ends},
        reward=reward,
        value=value,
        next_value=next_value,
    )

    bootstrap = torch.where(terminated, 0.0, next_value)
    residual = rho * readable(reward + gamma * readable(bootstrap, gamma) - value, rho)
    target = value + segmented_scan(gamma * c, residual, ends, longest=longest)

    # The next row's target inside a run; the bootstrap value at its end and at the last row.
    stop = torch.cat([ends[:-1], torch.ones_like(ends[-1:])])
    next_target = readable(torch.where(stop, bootstrap, torch.cat([target[1:], target[-1:]])), gamma)
    return rho * readable(reward + gamma * next_target - value, rho), target


def readable(x: Tensor, factor: Tensor | float, hidden: Tensor | None = None) -> Tensor:
    """Return ``x`` with 0 where ``hidden``, and where it is NaN or inf and its factor is 0, so that the product is 0.

    Finite numbers are kept where the factor is 0, so that the factor gets its gradient.

    >>> import torch
    >>> readable(torch.tensor([float("inf"), 2.0]), torch.zeros(2)).tolist()
    [0.0, 2.0]
    """
    if isinstance(factor, Tensor) or factor == 0.0:
        unread = ~x.isfinite() & (factor == 0.0)
        hidden = unread if hidden is None else hidden | unread

    if hidden is None:
        return x
    return x.masked_fill(hidden, 0.0)


def _check_columns(factors: dict[str, Tensor | float], flags: dict[str, Tensor], **columns: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these match; for arguments of the torch form."""
    first, like = next(iter(columns.items()))
    for name, x in (columns | flags).items():
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {type(x).__name__}")
        if (x.dtype is torch.bool) != (name in flags) or x.is_complex():
            wanted = "bool" if name in flags else "floating"
            raise TypeError(f"{name} must be {wanted}, got {x.dtype}")
        if x.shape != like.shape or x.device != like.device:
            raise ValueError(
                f"{name} must have the shape of {first}, {tuple(like.shape)}, on {like.device}, got {tuple(x.shape)} "
                f"on {x.device}"
            )

    if not like.is_floating_point():
        raise TypeError(f"{first} must be floating, got {like.dtype}")

    for name, factor in factors.items():
        if not isinstance(factor, Tensor):
            if not isinstance(factor, (int, float)):
                raise TypeError(f"{name} must be a number or a tensor, got {type(factor).__name__}")
            continue

        sizes = zip(factor.shape[::-1], like.shape[::-1], strict=False)
        fits = factor.ndim <= like.ndim and all(n in (1, m) for n, m in sizes)
        if (
            not fits
            or factor.is_complex()
            or factor.layout is not torch.strided
            or factor.is_meta != like.is_meta
        ):
            raise ValueError(f"{name} must be a number or have the shape of {first}, {tuple(like.shape)}")


def zeroed(column: Tensor, flag: Tensor) -> Tensor:
    """Return a copy of ``column [*B, *F]`` with 0 in the rows where ``flag [*B]`` is True, even for NaN.

    >>> import torch
    >>> zeroed(torch.tensor([[1.0], [float("nan")]]), torch.tensor([False, True])).tolist()
    [[1.0], [0.0]]
    """
    for name, x in (("column", column), ("flag", flag)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")

    if (
        flag.dtype is not torch.bool
        or flag.shape != column.shape[: flag.ndim]
        or flag.device != column.device
    ):
        raise ValueError(
            f"flag must be bool, with the first dims of the column {tuple(column.shape)} on {column.device}, got "
            f"{flag.dtype} {tuple(flag.shape)} on {flag.device}"
        )

    arrays = _readable_arrays((column,), (flag,)) if column.numel() else None
    if arrays is None:
        return torch.where(flag.reshape(*flag.shape, *[1] * (column.ndim - flag.ndim)), 0.0, column)

    # batch dims as one, feature dims as another
    numbers, flags = arrays
    out = np.empty(column.shape, numbers.dtype)
    rows = (flags.size, -1)
    machine_code(_zero_loop)(numbers.reshape(rows), flags.reshape(-1), out.reshape(rows))
    return torch.from_numpy(out)


def is_tracing() -> bool:
    """Return whether tensor values cannot be read: in ``torch.compile``, ``torch.jit.trace`` or a ``torch.func``
    transform."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def _readable_arrays(
    columns: Sequence[Tensor],
    flags: Sequence[Tensor],
    factors: Sequence[Tensor | float] = (),
) -> list[Any] | None:
    """Return factors, columns and flags as NumPy arrays for a compiled loop; None if it cannot be used.

    It requires plain CPU tensors without gradients, columns of one shape and one compiled dtype, and flags of their
    first dims, since a loop does not check bounds. Columns and flags are copied only if they are not contiguous,
    factors ``[N]`` or of the columns' shape never.
    """
    tensors = [*columns, *flags, *(x for x in factors if isinstance(x, Tensor))]

    if is_tracing():
        return None
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or x.layout is not torch.strided:
            return None

    shape = columns[0].shape
    dtype = columns[0].dtype
    if dtype not in _COMPILED_DTYPES or any(x.dtype != dtype or x.shape != shape for x in columns):
        return None
    if any(x.dtype is not torch.bool or x.shape != shape[: x.ndim] for x in flags):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None

    arrays: list[Any] = []
    for factor in factors:
        if isinstance(factor, Tensor):
            wide = zip(factor.shape[::-1], shape[::-1], strict=False)
            if factor.ndim > len(shape) or any(n not in (1, m) for n, m in wide):
                return None
            arrays.append(factor.detach().to(dtype).expand(shape).numpy())
        elif not isinstance(factor, (int, float)):
            return None
        else:  # one number in memory, repeated for every row by strides of 0
            kind: Any = np.float32 if dtype is torch.float32 else np.float64
            number = np.array([factor], kind)
            arrays.append(np.ndarray(shape, number.dtype, number, strides=(0,) * len(shape)))

    return arrays + [x.detach().contiguous().numpy() for x in (*columns, *flags)]


@functools.cache
def machine_code(loop: Callable[..., None], *, sums_in_any_order: bool = False) -> Callable[..., None]:
    """Compile a loop of this file with Numba, which is imported at the first call.

    Args:
        loop: the function.
        sums_in_any_order: whether terms of a sum may be added in another order, by vector instructions.
    """
    from flatroll.kernels.compiled import compiled

    # "contract" lets a * y + b round once (one FMA) and allows no other optimisation: NaN and inf stay exact.
    allowed = {"contract"}
    if sums_in_any_order:
        allowed.add("reassoc")
    code: Callable[..., None] = compiled(fastmath=allowed)(loop)
    return code


# The loops go backward from the last row; `y` is the value accumulated up to the next row. Both the sum
# inside a run and the one at its end are computed and one is selected: a branch would be mispredicted at
# every other short run, and 0 * NaN must not cross an end or a factor of 0. The compiler emits selects only
# if loads are outside conditions and flags are joined by "|" ("or" would branch). Unless noted, arrays are
# [N] and factors may have any stride. Columns are reward, value, next_value, terminated and ends.


def _scan_loop(a: Array, b: Array, ends: Array, out: Array) -> None:
    """Fill ``out [N, F]`` from ``a [N, F]`` (of any stride), contiguous ``b [N, F]`` and ``ends [N]``."""
    rows, features = b.shape
    if rows == 0:
        return

    zero = b.dtype.type(0)
    last = rows - 1
    if features == 1:  # the accumulator stays in a register: 1.5 ms per million rows instead of 2.1
        y = b[last, 0]
        out[last, 0] = y
        for i in range(last - 1, -1, -1):
            summand = b[i, 0]
            decay = a[i, 0]
            decay = zero if ends[i] else decay

            inside = summand + decay * y
            y = summand if decay == zero else inside
            out[i, 0] = y
        return

    ys = b[last].copy()
    out[last] = ys
    for i in range(last - 1, -1, -1):
        end = ends[i]
        for f in range(features):
            summand = b[i, f]
            decay = a[i, f]
            inside = summand + decay * ys[f]
            ys[f] = summand if end | (decay == zero) else inside
            out[i, f] = ys[f]


def _residual_loop(gamma: Array, decay: Array, columns: _Columns, advantage: Array, target: Array) -> None:
    """Compute residual, scan and target in one pass."""
    reward, value, next_value, terminated, ends = columns

    zero = reward.dtype.type(0)
    y = zero  # nothing is accumulated after the last row
    for i in range(reward.shape[0] - 1, -1, -1):
        ahead = next_value[i]
        discount = gamma[i]
        trace = decay[i]

        bootstrap = zero if terminated[i] | (discount == zero) else ahead
        residual = reward[i] + discount * bootstrap - value[i]

        inside = residual + trace * y
        y = residual if ends[i] | (trace == zero) else inside

        advantage[i] = y
        target[i] = y + value[i]


def _lane_loop(
    gamma: Any, decay: Any, columns: _Columns, advantage: Array, target: Array, lasts: Array
) -> None:
    """Do the same as `_residual_loop` in half of its time, where the factors are numbers.

    A sum waits for the one before it; those of four lanes do not wait for one another. Lane k has the ``lasts[0] + 1``
    rows up to ``lasts[k]``, see `find_lanes`. Where two lanes overlap, both compute the same numbers, since a run ends
    there. The residuals of a block are computed by vector instructions, and are still in the cache when summed.
    """
    reward, value, next_value, terminated, ends = columns

    zero = reward.dtype.type(0)
    blind = gamma == zero
    alone = decay == zero
    y0 = zero
    y1 = zero
    y2 = zero
    y3 = zero

    left = lasts[0] + 1
    while left > 0:
        count = min(left, _BLOCK)

        for lane in range(4):
            stop = lasts[lane] - lasts[0] + left
            first = stop - count
            rewards = reward[first:stop]
            values = value[first:stop]
            next_values = next_value[first:stop]
            final = terminated[first:stop]
            residuals = advantage[first:stop]
            for i in range(count):
                ahead = next_values[i]
                bootstrap = zero if final[i] | blind else ahead
                residuals[i] = rewards[i] + gamma * bootstrap - values[i]

        # Unsigned row numbers, as Numba asks of signed ones at each access whether they count from the end.
        row0 = np.uint64(left)
        row1 = np.uint64(lasts[1] - lasts[0] + left)
        row2 = np.uint64(lasts[2] - lasts[0] + left)
        row3 = np.uint64(lasts[3] - lasts[0] + left)
        one = np.uint64(1)
        for _ in range(count):
            row0 -= one
            residual = advantage[row0]
            inside = residual + decay * y0
            y0 = residual if ends[row0] | alone else inside
            advantage[row0] = y0

            row1 -= one
            residual = advantage[row1]
            inside = residual + decay * y1
            y1 = residual if ends[row1] | alone else inside
            advantage[row1] = y1

            row2 -= one
            residual = advantage[row2]
            inside = residual + decay * y2
            y2 = residual if ends[row2] | alone else inside
            advantage[row2] = y2

            row3 -= one
            residual = advantage[row3]
            inside = residual + decay * y3
            y3 = residual if ends[row3] | alone else inside
            advantage[row3] = y3

        for lane in range(4):
            stop = lasts[lane] - lasts[0] + left
            first = stop - count
            values = value[first:stop]
            sums = advantage[first:stop]
            targets = target[first:stop]
            for i in range(count):
                targets[i] = sums[i] + values[i]

        left -= count


def _return_loop(
    gamma: Array,
    lmbda: Array,
    reward: Array,
    next_value: Array,
    terminated: Array,
    ends: Array,
    returns: Array,
) -> None:
    """Compute the lambda-return: ``1 - lmbda`` of the bootstrap inside a run, all of it at its end."""
    zero = reward.dtype.type(0)
    one = reward.dtype.type(1)
    last = reward.shape[0] - 1
    # Starts with the last row's bootstrap value. The row adds lmbda of it as the next return and 1 - lmbda as
    # its own bootstrap, all of it in total, so the last row need not be marked as an end.
    y = zero if last < 0 or terminated[last] else next_value[last]
    for i in range(last, -1, -1):
        ahead = next_value[i]
        discount = gamma[i]
        decay = lmbda[i]
        decay = zero if ends[i] else decay

        factor = discount * (one - decay)
        trace = discount * decay
        bootstrap = zero if terminated[i] | (factor == zero) else ahead
        summand = reward[i] + factor * bootstrap

        inside = summand + trace * y
        y = summand if trace == zero else inside
        returns[i] = y


def _vtrace_loop(
    gamma: Array, rho: Array, c: Array, columns: _Columns, advantage: Array, target: Array
) -> None:
    """Compute corrected residuals, their scan, the target, and the advantage from the next row's target."""
    reward, value, next_value, terminated, ends = columns

    zero = reward.dtype.type(0)
    last = reward.shape[0] - 1
    y = zero
    # The target of the next row, or the bootstrap value of the last row.
    behind = zero if last < 0 or terminated[last] else next_value[last]
    for i in range(last, -1, -1):
        ahead = next_value[i]
        discount = gamma[i]
        weight = rho[i]

        bootstrap = zero if terminated[i] | (discount == zero) else ahead
        error = weight * (reward[i] + discount * bootstrap - value[i])
        residual = zero if weight == zero else error

        trace = discount * c[i]
        inside = residual + trace * y
        y = residual if ends[i] | (trace == zero) else inside

        next_target = bootstrap if ends[i] | (discount == zero) else behind
        corrected = weight * (reward[i] + discount * next_target - value[i])
        advantage[i] = zero if weight == zero else corrected

        behind = y + value[i]
        target[i] = behind


def _zero_loop(column: Array, flag: Array, out: Array) -> None:
    """Fill ``out [N, F]`` with ``column [N, F]``, with 0 where ``flag [N]``."""
    zero = column.dtype.type(0)
    if column.shape[1] == 1:  # one loop, which the compiler vectorises
        for i in range(column.shape[0]):
            number = column[i, 0]
            out[i, 0] = zero if flag[i] else number
        return
    for i in range(column.shape[0]):
        for f in range(column.shape[1]):
            number = column[i, f]
            out[i, f] = zero if flag[i] else number

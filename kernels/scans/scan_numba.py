"""The Numba form of the segmented scan. Import it inside a function: Numba itself costs half a second."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Any], Any]:
    """``numba.njit`` for machine code kept on disk, or kept in memory where no directory can be written."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # Numba found no writable place: each process compiles for itself
            return numba.njit(nogil=True, **options)(function)

    return decorate


# "contract" lets a * acc + b round once (one FMA); it assumes nothing about NaN or inf.
@compiled(fastmath={"contract"})
def step(a: Any, b: Any, end: Any, acc: Any) -> Any:
    """The recursion, once: ``b + a * acc`` in a run, ``b`` alone at its end (0 * NaN must not cross it).

    Both numbers are computed and one is selected: a branch would be guessed wrong at every other short run.
    """
    further = b + a * acc
    return b if end else further


@compiled(fastmath={"contract"})
def scan(a: Any, b: Any, ends: Any, y: Any) -> None:
    """Fill ``y [N, F]`` from ``a [N, F]`` (of any stride), contiguous ``b [N, F]`` and ``ends [N]``."""
    rows, features = b.shape
    if rows == 0:
        return
    last = rows - 1
    if features == 1:  # the accumulator stays in a register: 1.5 ms per million rows instead of 2.1
        acc = y[last, 0] = b[last, 0]
        for i in range(last - 1, -1, -1):
            acc = step(a[i, 0], b[i, 0], ends[i], acc)
            y[i, 0] = acc
        return
    accs = b[last].copy()
    y[last] = accs
    for i in range(last - 1, -1, -1):
        end = ends[i]
        for f in range(features):
            accs[f] = step(a[i, f], b[i, f], end, accs[f])
            y[i, f] = accs[f]

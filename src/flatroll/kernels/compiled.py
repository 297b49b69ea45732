"""Compiles functions with Numba and caches the machine code on disk between processes.

This module imports numba (half a second): import it inside the function that needs it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numpy.typing import NDArray

Array = NDArray[Any]
Int = Any  # a 64-bit integer of NumPy's or Python's
Records = Any  # a structured array: its entries' fields are attributes, which no type checker knows

# Numba compiles a kernel anew when the kernel's own file changes, but not when a function that it calls changes in
# another file. Hence the machine code is kept under a name that ends with a hash of all files of this folder.
_FILES = sorted(Path(__file__).parent.rglob("*.py"))
_HASH = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()[:12]


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Decorate with ``numba.njit``, cached on disk, or in memory if no directory is writable.

    Args:
        options: of ``numba.njit``, besides ``cache`` and ``nogil``.

    >>> @compiled()
    ... def twice(x):
    ...     return 2 * x
    >>> twice(21)
    42
    """

    def decorate(function: Any) -> Any:
        name = function.__qualname__
        function.__qualname__ = f"{name}-{_HASH}"  # Numba names the file on disk by it
        try:
            kernel = numba.njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # Numba found no writable place: each process compiles for itself
            kernel = numba.njit(nogil=True, **options)(function)
        function.__qualname__ = kernel.__qualname__ = name
        return kernel

    return decorate

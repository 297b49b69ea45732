"""Compiles functions with Numba and caches the machine code on disk between processes.

A kernel has at most eight parameters. Arrays that belong together are one of these, a record: a plain tuple whose
fields the kernel unpacks in its first lines. It is not a `NamedTuple`, since Numba encodes the names of the class and
its fields at each call: with four tables a call takes 0.9 µs, with a plain tuple 0.4, with four parameters 0.5.

This module imports numba (half a second): import it inside the function that needs it.
"""

import atexit
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.caching import IndexDataCacheFile
from numba.extending import register_jitable
from numpy.typing import NDArray

Array = NDArray[Any]
Int = Any  # a 64-bit integer of NumPy's or Python's
Records = Any  # a structured array whose fields are read as attributes, which type checkers do not know

# Numba recompiles a kernel when its own file changes, but not when a called function in another file does. Therefore
# the cache's name ends with a hash of all files of this folder.
_FILES = sorted(Path(__file__).parent.rglob("*.py"))
_HASH = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()[:12]


class _Notice(event.Listener):
    """Tells, on stderr, when this process first compiles a kernel instead of loading it from disk, and at its end how
    long all of them took."""

    def __init__(self) -> None:
        self.kernels: set[Any] = set()
        self.told = False
        self.count = 0
        self.seconds = 0.0
        self._depth = 0  # a kernel may compile functions that it calls
        self._begun = 0.0

    def on_start(self, event: Any) -> None:
        """Called when Numba begins to compile a function of this or another package."""
        if self._depth or event.data["dispatcher"] in self.kernels:
            self._depth += 1
        if self._depth != 1:
            return

        self._begun = time.perf_counter()
        if not self.told:
            self.told = True
            self._tell(
                "compiling kernels that were not used on this machine before (some seconds; `flatroll compile` "
                "compiles all ahead)"
            )
            atexit.register(self._tell_total)

    def on_end(self, event: Any) -> None:
        """Called when the compilation has finished."""
        if not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self.count += 1
            self.seconds += time.perf_counter() - self._begun

    def _tell_total(self) -> None:
        self._tell(f"compiling took {self.seconds:.1f} s in all (kernels: {self.count})")

    def _tell(self, text: str) -> None:
        print(f"flatroll: {text}", file=sys.stderr, flush=True)


class _CacheFiles(IndexDataCacheFile):
    """The files of a kernel on disk: an index, and one file of machine code for each signature.

    Numba gives these files the next number that the index leaves free. Processes that compile a kernel for different
    types at the same time then take the same one, and the index of one process stays beside the code of the other.
    Here the number is a hash of the signature. The index of one process may still replace that of the other: the
    signature that it leaves out is compiled again.
    """

    #: Methods of Numba's class that are used here.
    USED = ("_dump", "_data_name", "_save_data", "_load_index", "_save_index")
    #: Attributes of its objects.
    READ = ("_index_name", "_cache_path", "_source_stamp")

    def __init__(self, numbered: Any) -> None:
        """Take the place of Numba's own."""
        base = numbered._index_name.removesuffix(".nbi")
        super().__init__(numbered._cache_path, base, numbered._source_stamp)  # type: ignore[no-untyped-call]

    @classmethod
    def take_place(cls, kernel: Any) -> None:
        """Replace the files of ``kernel``'s cache, unless this version of Numba keeps them in another way."""
        cache: Any = getattr(kernel, "_cache", None)
        numbered = getattr(cache, "_cache_file", None)
        has_methods = all(hasattr(cls, name) for name in cls.USED)
        has_attributes = all(hasattr(numbered, name) for name in cls.READ)
        if has_methods and has_attributes:
            cache._cache_file = cls(numbered)

    def save(self, key: Any, data: Any) -> None:
        """Save the machine code of the signature ``key``."""
        files: Any = self  # Numba's methods have no types
        signature = files._dump((self._source_stamp, key))
        number = int.from_bytes(hashlib.sha256(signature).digest()[:6])
        name = files._data_name(number)

        files._save_data(name, data)  # first: what an index names is there
        overloads = files._load_index()
        overloads[key] = name
        files._save_index(overloads)


_notice = _Notice()
event.register("numba:compile", _notice)  # type: ignore[no-untyped-call]


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Decorate with ``numba.njit``, cached on disk, or in memory if no directory is writable.

    Args:
        options: options of ``numba.njit``, besides ``cache`` and ``nogil``.

    >>> @compiled()
    ... def twice(x):
    ...     return 2 * x
    >>> twice(21)
    42
    """

    # Only C code calls through a C wrapper, and kernels have no such callers.
    options = {"nogil": True, "no_cfunc_wrapper": True, **options}

    def decorate(function: Any) -> Any:
        name = function.__qualname__
        function.__qualname__ = f"{name}-{_HASH}"  # Numba names the file on disk by it
        try:
            kernel = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no writable cache directory: each process compiles for itself
            kernel = numba.njit(**options)(function)
        else:
            _CacheFiles.take_place(kernel)
        function.__qualname__ = name
        kernel.__qualname__ = name

        _notice.kernels.add(kernel)
        return kernel

    return decorate


def helper(function: Any) -> Any:
    """Decorate a function that kernels call, and return it unchanged.

    It is compiled into each kernel that calls it, without the entry point for calls from Python and without a file in
    the cache, which together take half of the time to compile a short function.

    >>> @helper
    ... def twice(x):
    ...     return 2 * x
    >>> @compiled()
    ... def four_times(x):
    ...     return twice(twice(x))
    >>> four_times(21)
    84
    """
    return register_jitable(function)

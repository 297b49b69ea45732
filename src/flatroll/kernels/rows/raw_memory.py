"""Access to memory by address, for kernels: array views, copies, comparisons and prefetching of cache lines.

Passing an address to a kernel takes a tenth of the time of creating the NumPy array of a tensor, which matters for many
short columns.

This module imports numba: import it inside the function that needs it.
"""

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]  # numba's own
from numba import carray, types  # type: ignore[attr-defined]
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

_BIT = ir.IntType(1)
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_OCTET = ir.IntType(8)
_POINTER = _OCTET.as_pointer()


def _copy_code(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_POINTER, _POINTER, _LONG])
        to, source, size = arguments
        to = builder.inttoptr(to, _POINTER)
        source = builder.inttoptr(source, _POINTER)
        builder.call(memcpy, [to, source, size, _BIT(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _ask_code(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT, _INT, _INT])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind)
        # to read it, to keep it in the nearest cache, as data
        builder.call(prefetch, [builder.inttoptr(arguments[0], _POINTER), _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _number_code(typing_context: Any, address: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.load(builder.gep(numbers, [arguments[1]]))

    return types.int64(types.int64, types.int64), generate


def _flag_code(typing_context: Any, address: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flag = builder.load(builder.gep(builder.inttoptr(arguments[0], _POINTER), [arguments[1]]))
        return builder.icmp_unsigned("!=", flag, flag.type(0))

    return types.boolean(types.int64, types.int64), generate


def _set_code(typing_context: Any, address: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flag = builder.gep(builder.inttoptr(arguments[0], _POINTER), [arguments[1]])
        builder.store(_OCTET(1), flag)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _compare_code(typing_context: Any, left: Any, right: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT, [_POINTER, _POINTER, _LONG])
        memcmp = get_or_insert_function(builder.module, kind, "memcmp")  # type: ignore[no-untyped-call]
        left = builder.inttoptr(arguments[0], _POINTER)
        right = builder.inttoptr(arguments[1], _POINTER)
        return builder.call(memcmp, [left, right, arguments[2]])

    return types.int32(types.int64, types.int64, types.int64), generate


def _pointer_code(kind: Any) -> Any:
    pointer: Any = types.CPointer(kind)  # type: ignore[no-untyped-call]

    def code(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    return code


#: ``copy_bytes(target, source, size)`` between addresses that do not overlap; nothing is checked.
copy_bytes: Any = intrinsic(_copy_code)
#: ``ask(address)`` prefetches a cache line and has no other effect; any address is allowed.
ask: Any = intrinsic(_ask_code)
#: ``number_at(address, i)`` is number i of the int64 numbers there.
number_at: Any = intrinsic(_number_code)
#: ``flag_at(address, i)`` is flag i of the bool numbers there.
flag_at: Any = intrinsic(_flag_code)
#: ``set_flag(address, i)`` sets flag i of the bool numbers there.
set_flag: Any = intrinsic(_set_code)
#: ``compare_bytes(left, right, size)`` is 0 if the bytes at two addresses are equal: C's ``memcmp``.
compare_bytes: Any = intrinsic(_compare_code)

_to_numbers: Any = intrinsic(_pointer_code(types.int64))


@numba.njit(inline="always")
def numbers(address: Any, size: Any) -> Any:
    """View the memory at an address as an int64 array ``[size]``."""
    return carray(_to_numbers(address), size)

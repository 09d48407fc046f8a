"""Operations that numba does not offer: unaligned loads, bits as numbers, the lowest set bit, cache prefetches.

Each is a few LLVM instructions. If numba's compiler is disabled, plain Python functions replace them.

What may go wrong: an intrinsic checks no bounds. The caller guarantees that the bytes or rows exist; a prefetch alone
may name a row outside the array.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BOUNDS_CHECKED: Final = bool(numba.config.BOUNDSCHECK)  # type: ignore[attr-defined]
COMPILER_DISABLED: Final = bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]


def silent_arithmetic() -> contextlib.AbstractContextManager[None]:
    """Returns a context that silences numpy's warnings while kernels run without the compiler.

    numpy warns where hashes wrap around, and where infinity is multiplied by the scale of a segment without width."""
    if COMPILER_DISABLED:
        return np.errstate(over="ignore", invalid="ignore")
    return contextlib.nullcontext()


if COMPILER_DISABLED:

    def load(data: Any, position: int) -> Any:
        return np.uint64(int.from_bytes(bytes(data[position : position + 8]), "little"))

    def double_of(word: Any) -> float:
        return float(struct.unpack("<d", struct.pack("<Q", int(word)))[0])

    def word_of(number: float) -> Any:
        return np.uint64(struct.unpack("<Q", struct.pack("<d", number))[0])

    def lowest_bit(word: Any) -> int:
        return (int(word) & -int(word)).bit_length() - 1

    def prefetch(array: Any, row: int) -> None:
        """Does nothing: the interpreter cannot prefetch."""

else:

    def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Returns the address of the first byte of row `arguments[1]` of the array `arguments[0]`."""
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        word = ir.IntType(64)
        row = arguments[1] if arguments[1].type.width == 64 else builder.sext(arguments[1], word)
        stride = cgutils.unpack_tuple(builder, array.strides)[0]
        return builder.add(builder.ptrtoint(array.data, word), builder.mul(row, stride))

    @intrinsic
    def load(_typing: Any, data: Any, position: Any) -> Any:
        """Loads eight bytes from `position` on, which need not be aligned."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = _address(context, builder, signature, arguments)
            loaded = builder.load(builder.inttoptr(address, ir.IntType(64).as_pointer()))
            loaded.align = 1
            return loaded

        return types.uint64(data, position), generate

    @intrinsic
    def double_of(_typing: Any, word: Any) -> Any:
        """Returns the double that has these bits."""
        return types.float64(word), lambda _c, builder, _s, a: builder.bitcast(a[0], ir.DoubleType())

    @intrinsic
    def word_of(_typing: Any, number: Any) -> Any:
        """Returns the bits of a double."""
        return types.uint64(number), lambda _c, builder, _s, a: builder.bitcast(a[0], ir.IntType(64))

    @intrinsic
    def lowest_bit(_typing: Any, word: Any) -> Any:
        """Returns the position of the lowest set bit. At least one bit must be set."""
        return types.int64(word), lambda _c, builder, _s, a: builder.cttz(a[0], ir.Constant(ir.IntType(1), 1))

    @intrinsic
    def prefetch(_typing: Any, array: Any, row: Any) -> Any:
        """Tells the processor's cache that a row will be read soon."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(_address(context, builder, signature, arguments), ir.IntType(8).as_pointer())
            flag = ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag]), "llvm.prefetch.p0"
            )
            builder.call(function, [pointer, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])
            return context.get_dummy_value()

        return types.void(array, row), generate

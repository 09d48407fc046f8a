"""What numba has no words for: a load that need not be aligned, bits as numbers, the lowest bit, a hint to the cache.

Each is a few instructions of LLVM; where the compiler is switched off, plain Python takes its place.
"""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]

    def load(data: Any, position: int) -> Any:
        return np.uint64(int.from_bytes(bytes(data[position : position + 8]), "little"))

    def double_of(word: Any) -> float:
        return float(struct.unpack("<d", struct.pack("<Q", int(word)))[0])

    def word_of(number: float) -> Any:
        return np.uint64(struct.unpack("<Q", struct.pack("<d", number))[0])

    def lowest_bit(word: Any) -> int:
        return (int(word) & -int(word)).bit_length() - 1

    def prefetch(array: Any, row: int) -> None:
        """A hint to the cache, which the interpreter has no use for."""

else:

    def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Of the first byte of row `arguments[1]` of an array."""
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        word = ir.IntType(64)
        row = arguments[1] if arguments[1].type.width == 64 else builder.sext(arguments[1], word)
        stride = cgutils.unpack_tuple(builder, array.strides)[0]
        return builder.add(builder.ptrtoint(array.data, word), builder.mul(row, stride))

    @intrinsic
    def load(_typing: Any, data: Any, position: Any) -> Any:
        """Eight bytes from `position` on, which need not be aligned."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = _address(context, builder, signature, arguments)
            loaded = builder.load(builder.inttoptr(address, ir.IntType(64).as_pointer()))
            loaded.align = 1
            return loaded

        return types.uint64(data, position), generate

    @intrinsic
    def double_of(_typing: Any, word: Any) -> Any:
        """The number that has these bits."""
        return types.float64(word), lambda _c, builder, _s, a: builder.bitcast(a[0], ir.DoubleType())

    @intrinsic
    def word_of(_typing: Any, number: Any) -> Any:
        """The bits of a number."""
        return types.uint64(number), lambda _c, builder, _s, a: builder.bitcast(a[0], ir.IntType(64))

    @intrinsic
    def lowest_bit(_typing: Any, word: Any) -> Any:
        """The place of the lowest bit that is set; one must be."""
        return types.int64(word), lambda _c, builder, _s, a: builder.cttz(a[0], ir.Constant(ir.IntType(1), 1))

    @intrinsic
    def prefetch(_typing: Any, array: Any, row: Any) -> Any:
        """Tells the cache that a row will be read soon."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(_address(context, builder, signature, arguments), ir.IntType(8).as_pointer())
            flag = ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag]), "llvm.prefetch.p0"
            )
            builder.call(function, [pointer, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])
            return context.get_dummy_value()

        return types.void(array, row), generate

"""What the compiled kernels are made of: bits, addresses, threads, e^x, number formats of K/V.

Written for numba, which compiles these into whatever calls them. Indices into pages are unsigned
throughout the kernels, since a signed one would make numba check for negatives at every load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from paceline.attention.compiled import register_symbols

register_symbols()

F, U, I32 = np.float32, np.uintp, np.int32
FLOAT32, BFLOAT16 = types.float32, types.uint16  # element types of K/V pages

thread_index = types.ExternalFunction("paceline_omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("paceline_omp_get_num_threads", types.int32())
ARGUMENTS = types.void(types.CPointer(types.int64))


def _bitcast(source: Any, target: Any) -> Any:
    """An intrinsic that reads the bits of one number type as another of the same width."""

    @intrinsic
    def cast(_context: Any, _x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), build

    return cast


int_as_float = _bitcast(types.int32, types.float32)
float_as_int = _bitcast(types.float32, types.int32)
word_as_double = _bitcast(types.int64, types.float64)


@intrinsic
def pointer(_context: Any, _address: Any, kind: Any) -> Any:
    """An address (int64) as a pointer to numbers of `kind`."""
    result = types.CPointer(kind.dtype)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.int64, kind), build


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Ask for the cache line at this address (int64) to be read soon."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        hints = [ir.Constant(word, value) for value in (0, 3, 1)]  # read, keep, data
        builder.call(function, [builder.inttoptr(arguments[0], byte), *hints])
        return context.get_dummy_value()

    return types.void(types.int64), build


def as_float(x: Any) -> Any:
    """A stored K/V element as float32."""
    raise NotImplementedError("compiled only")


def as_stored(x: Any, like: Any) -> Any:
    """float32 in the format of a K/V element, rounded to nearest even."""
    raise NotImplementedError("compiled only")


@overload(as_float, inline="always")
def _as_float(x):
    if x == types.uint16:
        return lambda x: int_as_float(I32(x) << I32(16))
    return lambda x: x


@njit(error_model="numpy", inline="always")
def round_to_bf16(x):
    bits = float_as_int(x)
    return np.uint16((bits + I32(0x7FFF) + ((bits >> I32(16)) & I32(1))) >> I32(16))


@overload(as_stored, inline="always")
def _as_stored(x, like):
    if like == types.uint16:
        return lambda x, like: round_to_bf16(x)
    return lambda x, like: x


@njit(fastmath=True, error_model="numpy", inline="always")
def exp(x):
    """e^x for x <= 0 or moderate, relative error about 2e-6; polynomial, so that it vectorises."""
    y = min(max(x * F(1.44269504), F(-126)), F(126))
    whole = np.floor(y)
    r = y - whole
    p = F(0.00133389) + r * F(0.000154)
    p = F(0.24022651) + r * (F(0.05550327) + r * (F(0.00961804) + r * p))
    p = F(1.0) + r * (F(0.69314718) + r * p)
    return p * int_as_float((I32(whole) + I32(127)) << I32(23))

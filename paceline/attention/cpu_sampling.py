"""Source of the compiled choice of tokens: argmax over logits plus keyed noise, in one pass.

Follows `paceline.model.noise` operation by operation, so that both give the same bits: no fast-math
here. The noise of a token exists in registers only.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

from paceline.attention.cpu_intrinsics import (
    ARGUMENTS,
    I32,
    F,
    U,
    float_as_int,
    int_as_float,
    pointer,
    thread_count,
    thread_index,
)
from paceline.model import noise

polynomial = tuple(F(x) for x in noise.LOG_POLYNOMIAL)
golden = I32(noise._signed(noise.GOLDEN, 32))
mul_a = I32(noise._signed(noise.MULTIPLY_A, 32))
mul_b = I32(noise._signed(noise.MULTIPLY_B, 32))
half_bits = I32(noise.SQRT_HALF_BITS)
ln2_high, ln2_low = F(noise.LN2_HIGH), F(noise.LN2_LOW)
p0, p1, p2, p3, p4, p5, p6, p7, p8 = polynomial


@njit(error_model="numpy", inline="always")
def right(x, by, mask):
    return (x >> I32(by)) & I32(mask)


@njit(error_model="numpy", inline="always")
def log(x):
    bits = float_as_int(x)
    exponent = (bits - half_bits) >> I32(23)
    f = int_as_float(bits - (exponent << I32(23))) - F(1)
    e = F(exponent)
    z = f * f
    p = p0 * f + p1
    p = p * f + p2
    p = p * f + p3
    p = p * f + p4
    p = p * f + p5
    p = p * f + p6
    p = p * f + p7
    p = p * f + p8
    y = p * f * z
    y = y + e * ln2_low
    y = y - z * F(0.5)
    y = y + f
    return y + e * ln2_high


@njit(error_model="numpy", inline="always")
def gumbel(token, low, high):
    x = (token * golden) ^ low
    x = (x ^ right(x, 16, 0xFFFF)) * mul_a
    x = ((x ^ right(x, 15, 0x1FFFF)) + high) * mul_b
    x = (x ^ right(x, 16, 0xFFFF)) * mul_a
    bits = right(x ^ right(x, 15, 0x1FFFF), 9, 0x7FFFFF)
    u = (F(bits) + F(0.5)) * F(2.0**-23)
    return -log(-log(u))


@njit(error_model="numpy")
def add_noise(logits, first, count, low, high, out):
    for j in range(count):
        out[j] = logits[U(first + j)] + gumbel(I32(first + j), low, high)


@njit(error_model="numpy")
def add_noise_of(ids, low, high, logits):
    for j in range(len(ids)):
        logits[U(j)] += gumbel(ids[U(j)], low, high)


@njit(fastmath={"nsz", "contract"}, error_model="numpy")
def peak(x, count):
    best = F(-np.inf)
    for j in range(count):
        best = max(best, x[U(j)])
    return best


@njit(error_model="numpy")
def find(x, count, value):
    for j in range(count):
        if x[U(j)] == value:
            return j
    return 0


# logits (S, V), keys (S) int64, noisy (S) int64 (0: plain argmax), out (S) int64, S, V
@cfunc(ARGUMENTS, cache=True)
def argmax(words):
    a = carray(words, 6)
    rows, vocab = a[4], a[5]
    logits = carray(pointer(a[0], types.float32), (rows, vocab))
    keys = carray(pointer(a[1], types.int64), rows)
    noisy = carray(pointer(a[2], types.int64), rows)
    out = carray(pointer(a[3], types.int64), rows)
    chunk = np.empty(2048, np.float32)
    for row in range(thread_index(), rows, thread_count()):
        best, where = F(-np.inf), 0
        low, high = I32(keys[row] & 0xFFFFFFFF), I32(keys[row] >> 32)
        for first in range(0, vocab, 2048):
            count = min(2048, vocab - first)
            values = logits[row, first : first + count]
            if noisy[row] != 0:
                add_noise(logits[row], first, count, low, high, chunk)
                values = chunk
            top = peak(values, count)
            if top > best:
                best, where = top, first + find(values, count, top)
        out[row] = where


# logits (S, n), ids (n) int32, keys (S) int64, noisy (S) int64 (0: left as it is), S, n
@cfunc(ARGUMENTS, cache=True)
def noise_of(words):
    a = carray(words, 6)
    rows, width = a[4], a[5]
    logits = carray(pointer(a[0], types.float32), (rows, width))
    ids = carray(pointer(a[1], types.int32), width)
    keys = carray(pointer(a[2], types.int64), rows)
    noisy = carray(pointer(a[3], types.int64), rows)
    for row in range(thread_index(), rows, thread_count()):
        if noisy[row] != 0:
            add_noise_of(ids, I32(keys[row] & 0xFFFFFFFF), I32(keys[row] >> 32), logits[row])

"""Source of the compiled CPU kernels, as numba compiles it. See `compiled` for how they run.

Each kernel takes a pointer to 64-bit words; their order is written above it. Activations are
float32; K/V pages hold float32 or bfloat16 (as uint16), told apart by the type of the array.
Work is dealt to threads in turns. Indices into pages are unsigned, since a signed one would make
numba check for negative values at every load. The noise kernel follows `paceline.model.noise`
operation by operation and must not use fast-math.

Everything stands at module level: numba finds machine code in its cache on disk only for functions
whose closures hold no other compiled function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils  # noqa: F401  (initialises numba's code generation)
from numba.extending import intrinsic, overload

from paceline.attention.compiled import register_symbols
from paceline.model import noise

register_symbols()

F, U, I32 = np.float32, np.uintp, np.int32
BLOCK = 64  # keys that one pass of the attention loop takes
MINUS_INFINITY = F(-1e30)

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
def _as_float(x):  # type: ignore[no-untyped-def]
    if x == types.uint16:
        return lambda x: int_as_float(I32(x) << I32(16))
    return lambda x: x


@njit(error_model="numpy", inline="always")
def round_to_bf16(x):  # type: ignore[no-untyped-def]
    bits = float_as_int(x)
    return np.uint16((bits + I32(0x7FFF) + ((bits >> I32(16)) & I32(1))) >> I32(16))


@overload(as_stored, inline="always")
def _as_stored(x, like):  # type: ignore[no-untyped-def]
    if like == types.uint16:
        return lambda x, like: round_to_bf16(x)
    return lambda x, like: x


@njit(fastmath=True, error_model="numpy", inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """e^x for x <= 0 or moderate, relative error about 2e-6; polynomial, so that it vectorises."""
    y = min(max(x * F(1.44269504), F(-126)), F(126))
    whole = np.floor(y)
    r = y - whole
    p = F(0.00133389) + r * F(0.000154)
    p = F(0.24022651) + r * (F(0.05550327) + r * (F(0.00961804) + r * p))
    p = F(1.0) + r * (F(0.69314718) + r * p)
    return p * int_as_float((I32(whole) + I32(127)) << I32(23))


# residual (T, H), delta (T, H) or 0, weight (H), out (T, H), T, H, eps
@njit(fastmath=True, error_model="numpy")
def row_norm(residual, delta, weight, out, width, eps):  # type: ignore[no-untyped-def]
    total = F(0)
    for i in range(width):
        x = residual[i] + delta[i]
        residual[i] = x
        total += x * x
    scale = F(1) / np.sqrt(total / F(width) + eps)
    for i in range(width):
        out[i] = residual[i] * scale * weight[i]

@cfunc(ARGUMENTS, cache=True)
def norm(words):  # type: ignore[no-untyped-def]
    a = carray(words, 7)
    rows, width = a[4], a[5]
    residual = carray(pointer(a[0], types.float32), (rows, width))
    weight = carray(pointer(a[2], types.float32), width)
    out = carray(pointer(a[3], types.float32), (rows, width))
    eps = F(word_as_double(a[6]))
    nothing = np.zeros(width if a[1] == 0 else 0, np.float32)
    for row in range(thread_index(), rows, thread_count()):
        if a[1] == 0:
            row_norm(residual[row], nothing, weight, out[row], width, eps)
        else:
            delta = carray(pointer(a[1] + row * width * 4, types.float32), width)
            row_norm(residual[row], delta, weight, out[row], width, eps)


# gate_up (T, 2 W), out (T, W), T, W
@njit(fastmath=True, error_model="numpy")
def row_silu(gate_up, out, width):  # type: ignore[no-untyped-def]
    for i in range(width):
        x = gate_up[i]
        out[i] = x / (F(1) + exp(-x)) * gate_up[width + i]

@cfunc(ARGUMENTS, cache=True)
def silu_mul(words):  # type: ignore[no-untyped-def]
    a = carray(words, 4)
    rows, width = a[2], a[3]
    gate_up = carray(pointer(a[0], types.float32), (rows, 2 * width))
    out = carray(pointer(a[1], types.float32), (rows, width))
    for row in range(thread_index(), rows, thread_count()):
        row_silu(gate_up[row], out[row], width)


@njit(fastmath=True, error_model="numpy")
def normed(x, weight, eps):  # type: ignore[no-untyped-def]
    total = F(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = F(1) / np.sqrt(total / F(len(x)) + eps)
    for i in range(len(x)):
        x[i] = x[i] * scale * weight[i]

@njit(error_model="numpy")
def rotate_rows(a, cache):  # type: ignore[no-untyped-def]
    rows, nq, nk, page_size, length, D = a[9], a[10], a[11], a[12], a[13], a[16]
    half = D // 2
    qkv = carray(pointer(a[0], types.float32), (rows, nq + 2 * nk, D))
    out = carray(pointer(a[1], types.float32), (rows, nq, D))
    positions = carray(pointer(a[3], types.int64), rows)
    cache_index = carray(pointer(a[4], types.int64), rows)
    cos = carray(pointer(a[5], types.float32), (length, half))
    sin = carray(pointer(a[6], types.float32), (length, half))
    eps = F(word_as_double(a[15]))
    for row in range(thread_index(), rows, thread_count()):
        c, s = cos[positions[row]], sin[positions[row]]
        page, offset = cache_index[row] // page_size, cache_index[row] % page_size
        for head in range(nq + nk):
            x = qkv[row, head]
            if a[7] != 0:
                weight = a[7] if head < nq else a[8]
                normed(x, carray(pointer(weight, types.float32), D), eps)
            if head < nq:
                y = out[row, head]
                for i in range(half):
                    y[i] = x[i] * c[i] - x[half + i] * s[i]
                    y[half + i] = x[half + i] * c[i] + x[i] * s[i]
            else:
                base = U(((page * 2 * nk + head - nq) * page_size + offset) * D)
                for i in range(half):
                    cache[base + U(i)] = as_stored(x[i] * c[i] - x[half + i] * s[i], cache[0])
                    cache[base + U(half + i)] = as_stored(
                        x[half + i] * c[i] + x[i] * s[i], cache[0]
                    )
        for head in range(nk):
            v = qkv[row, nq + nk + head]
            base = U(((page * 2 * nk + nk + head) * page_size + offset) * D)
            for i in range(D):
                cache[base + U(i)] = as_stored(v[i], cache[0])


def rotate_store_kernel(stored: Any) -> Any:
    """Rotate q and k, store k and v, for one K/V format (a numba type).

    qkv (T, (nq + 2 nk) D), q out (T, nq D), cache, positions (T), cache_index (T), cos (L, D/2),
    sin, q norm (D) or 0, k norm (D) or 0, T, nq, nk, page size, L, cache size, eps, D.
    """

    @cfunc(ARGUMENTS, cache=True)
    def rotate_store(words):  # type: ignore[no-untyped-def]
        a = carray(words, 17)
        rotate_rows(a, carray(pointer(a[2], stored), a[14]))

    return rotate_store


# Loops over a head's elements vectorise well only if their length is known when they are compiled:
# `size` is a literal, and each of these functions is compiled for its value.


def load(cache, table, page_size, heads, head, first, count, into, size):  # type: ignore[no-untyped-def]
    """K or V of `count` positions from `first` as float32; zeros up to a multiple of 8."""
    raise NotImplementedError("compiled only")


def scores(q, keys, count, scale, out, size):  # type: ignore[no-untyped-def]
    """out[j] = scale * q . keys[j]."""
    raise NotImplementedError("compiled only")


def mix(weights, values, count, acc, size):  # type: ignore[no-untyped-def]
    """acc += weights . values."""
    raise NotImplementedError("compiled only")


def tile(q, out, cache, table, context, ancestors, kv, shape, scratch, size):  # type: ignore[no-untyped-def]
    """All query heads of one K/V head over one tile: K and V are read once."""
    raise NotImplementedError("compiled only")


def attend_tiles(a, cache, size):  # type: ignore[no-untyped-def]
    """Deal (tile, K/V head) pairs to threads."""
    raise NotImplementedError("compiled only")


FAST = {"fastmath": True, "error_model": "numpy"}
EXACT = {"error_model": "numpy"}


@njit(error_model="numpy", inline="always")
def place(table, position, page_size, heads, head, size):  # type: ignore[no-untyped-def]
    """Where K or V of one position and head begins in a layer's storage."""
    page = U(table[U(position) // page_size])
    return ((page * heads + head) * page_size + U(position) % page_size) * U(size)


@njit(error_model="numpy")
def fetch(cache, address, table, page_size, heads, head, first, count, size):  # type: ignore[no-untyped-def]
    """Ask for K or V that will be loaded soon."""
    width = np.int64(cache.itemsize)
    for j in range(count):
        base = place(table, first + j, page_size, heads, head, size)
        for part in range(0, size, 64 // width):
            prefetch(address + np.int64(base + U(part)) * width)


@njit(fastmath=True, error_model="numpy")
def soften(score, count, peak):  # type: ignore[no-untyped-def]
    """Scores to weights relative to the running peak; returns (new peak, their sum)."""
    for j in range(count):
        peak = max(peak, score[j])
    total = F(0)
    for j in range(count):
        e = exp(score[j] - peak)
        score[j] = e
        total += e
    return peak, total


@njit(fastmath=True, error_model="numpy")
def scale_row(x, y, factor):  # type: ignore[no-untyped-def]
    for d in range(len(x)):
        y[d] = x[d] * factor


@overload(load, prefer_literal=True, jit_options=FAST)
def _load(cache, table, page_size, heads, head, first, count, into, size):  # type: ignore[no-untyped-def]
    n = size.literal_value

    def run(cache, table, page_size, heads, head, first, count, into, size):  # type: ignore[no-untyped-def]
        for j in range(count):
            base = place(table, first + j, page_size, heads, head, n)
            for d in range(n):
                into[j, d] = as_float(cache[base + U(d)])
        for j in range(count, (count + 7) // 8 * 8):
            into[j, :] = F(0)

    return run


@overload(scores, prefer_literal=True, jit_options=FAST)
def _scores(q, keys, count, scale, out, size):  # type: ignore[no-untyped-def]
    n = size.literal_value

    def run(q, keys, count, scale, out, size):  # type: ignore[no-untyped-def]
        for j in range(0, count, 4):
            a0, a1, a2, a3 = F(0), F(0), F(0), F(0)
            for d in range(n):
                x = q[d]
                a0 += x * keys[j, d]
                a1 += x * keys[j + 1, d]
                a2 += x * keys[j + 2, d]
                a3 += x * keys[j + 3, d]
            out[j], out[j + 1] = a0 * scale, a1 * scale
            out[j + 2], out[j + 3] = a2 * scale, a3 * scale

    return run


@overload(mix, prefer_literal=True, jit_options=FAST)
def _mix(weights, values, count, acc, size):  # type: ignore[no-untyped-def]
    n = size.literal_value

    def run(weights, values, count, acc, size):  # type: ignore[no-untyped-def]
        for j in range(0, count, 8):
            w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
            w4, w5, w6, w7 = weights[j + 4], weights[j + 5], weights[j + 6], weights[j + 7]
            for d in range(n):
                acc[d] += (
                    w0 * values[j, d]
                    + w1 * values[j + 1, d]
                    + w2 * values[j + 2, d]
                    + w3 * values[j + 3, d]
                    + w4 * values[j + 4, d]
                    + w5 * values[j + 5, d]
                    + w6 * values[j + 6, d]
                    + w7 * values[j + 7, d]
                )

    return run


@overload(tile, prefer_literal=True, jit_options=EXACT)
def _tile(q, out, cache, table, context, ancestors, kv, shape, scratch, size):  # type: ignore[no-untyped-def]
    n = size.literal_value

    def run(q, out, cache, table, context, ancestors, kv, shape, scratch, size):  # type: ignore[no-untyped-def]
        group, nk, page_size, scale, address = shape
        block, score, acc, peak, total = scratch
        rows = len(ancestors)
        end = context + rows
        heads, key, value = U(2 * nk), U(kv), U(nk + kv)
        for i in range(rows * group):
            acc[i, :] = F(0)
            peak[i], total[i] = MINUS_INFINITY, F(0)
        for first in range(0, end, BLOCK):
            count = min(BLOCK, end - first)
            following = max(min(BLOCK, end - first - count), 0)
            padded = (count + 7) // 8 * 8
            load(cache, table, page_size, heads, key, first, count, block, n)
            fetch(cache, address, table, page_size, heads, value, first, count, n)
            for i in range(rows * group):
                row = i // group
                scores(q[row, kv * group + i % group], block, padded, scale, score[i], n)
                for j in range(count, padded):
                    score[i, j] = MINUS_INFINITY
                for j in range(max(context - first, 0), count):
                    if (ancestors[row] >> np.int64(first + j - context)) & 1 == 0:
                        score[i, j] = MINUS_INFINITY
                was = peak[i]
                peak[i], added = soften(score[i], padded, was)
                fade = exp(was - peak[i])
                total[i] = total[i] * fade + added
                scale_row(acc[i], acc[i], fade)
            load(cache, table, page_size, heads, value, first, count, block, n)
            fetch(cache, address, table, page_size, heads, key, first + count, following, n)
            for i in range(rows * group):
                mix(score[i], block, padded, acc[i], n)
        for i in range(rows * group):
            scale_row(acc[i], out[i // group, kv * group + i % group], F(1) / total[i])

    return run


@overload(attend_tiles, prefer_literal=True, jit_options=EXACT)
def _attend_tiles(a, cache, size):  # type: ignore[no-untyped-def]
    n = size.literal_value

    def run(a, cache, size):  # type: ignore[no-untyped-def]
        tiles, tokens, nq, nk, longest = a[7], a[8], a[9], a[10], a[15]
        group = nq // nk
        q = carray(pointer(a[0], types.float32), (tokens, nq, n))
        out = carray(pointer(a[1], types.float32), (tokens, nq, n))
        starts = carray(pointer(a[3], types.int32), tiles + 1)
        contexts = carray(pointer(a[4], types.int32), tiles)
        pages = carray(pointer(a[5], types.int32), (tiles, a[12]))
        ancestors = carray(pointer(a[6], types.int64), tokens)
        shape = (group, nk, U(a[11]), F(word_as_double(a[14])), a[2])
        scratch = (
            np.empty((BLOCK, n), np.float32),
            np.empty((longest * group, BLOCK), np.float32),
            np.empty((longest * group, n), np.float32),
            np.empty(longest * group, np.float32),
            np.empty(longest * group, np.float32),
        )
        for work in range(thread_index(), tiles * nk, thread_count()):
            r, kv = work // nk, work % nk
            lo, hi = starts[r], starts[r + 1]
            if hi - lo <= BLOCK:
                tile(
                    q[lo:hi], out[lo:hi], cache, pages[r], contexts[r], ancestors[lo:hi], kv,
                    shape, scratch, n,
                )  # fmt: skip

    return run


def attend_kernel(size: int, stored: Any) -> Any:
    """Attention for one head size and K/V format (a numba type).

    q (T, nq D), out, cache, tile_starts (R + 1) int32, contexts (R) int32, pages (R, P) int32,
    ancestors (T) int64, R, T, nq, nk, page size, P, cache size, scale, longest tile.
    Tiles of more than 64 tokens are left to the caller.
    """

    @cfunc(ARGUMENTS, cache=True)
    def attend(words):  # type: ignore[no-untyped-def]
        a = carray(words, 16)
        attend_tiles(a, carray(pointer(a[2], stored), a[13]), size)

    return attend


polynomial = tuple(F(x) for x in noise.LOG_POLYNOMIAL)
golden = I32(noise._signed(noise.GOLDEN, 32))
mul_a = I32(noise._signed(noise.MULTIPLY_A, 32))
mul_b = I32(noise._signed(noise.MULTIPLY_B, 32))
half_bits = I32(noise.SQRT_HALF_BITS)
ln2_high, ln2_low = F(noise.LN2_HIGH), F(noise.LN2_LOW)
p0, p1, p2, p3, p4, p5, p6, p7, p8 = polynomial


@njit(error_model="numpy", inline="always")
def right(x, by, mask):  # type: ignore[no-untyped-def]
    return (x >> I32(by)) & I32(mask)

@njit(error_model="numpy", inline="always")
def log(x):  # type: ignore[no-untyped-def]
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

@njit(error_model="numpy")
def add_noise(logits, first, count, low, high, out):  # type: ignore[no-untyped-def]
    for j in range(count):
        x = (I32(first + j) * golden) ^ low
        x = (x ^ right(x, 16, 0xFFFF)) * mul_a
        x = ((x ^ right(x, 15, 0x1FFFF)) + high) * mul_b
        x = (x ^ right(x, 16, 0xFFFF)) * mul_a
        bits = right(x ^ right(x, 15, 0x1FFFF), 9, 0x7FFFFF)
        u = (F(bits) + F(0.5)) * F(2.0**-23)
        out[j] = logits[U(first + j)] + -log(-log(u))

@njit(fastmath={"nsz", "contract"}, error_model="numpy")
def peak(x, count):  # type: ignore[no-untyped-def]
    best = F(-np.inf)
    for j in range(count):
        best = max(best, x[U(j)])
    return best

@njit(error_model="numpy")
def find(x, count, value):  # type: ignore[no-untyped-def]
    for j in range(count):
        if x[U(j)] == value:
            return j
    return 0

# logits (S, V), keys (S) int64, noisy (S) int64 (0: plain argmax), out (S) int64, S, V
@cfunc(ARGUMENTS, cache=True)
def argmax(words):  # type: ignore[no-untyped-def]
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



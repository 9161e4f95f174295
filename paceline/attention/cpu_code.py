"""Source of the compiled CPU kernels of a layer. See `compiled` for how they run.

Each kernel takes a pointer to 64-bit words; their order is written above it. Activations are
float32; K/V pages hold float32 or bfloat16, told apart by the type of the array. Work is dealt to
threads in turns.

Everything stands at module level: numba finds machine code in its cache on disk only for functions
whose closures hold no other compiled function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import overload

from paceline.attention.cpu_intrinsics import (
    ARGUMENTS,
    F,
    U,
    as_float,
    as_stored,
    exp,
    pointer,
    prefetch,
    thread_count,
    thread_index,
    word_as_double,
)

BLOCK = 64  # keys that one pass of the attention loop takes
MINUS_INFINITY = F(-1e30)


# residual (T, H), delta (T, H) or 0, weight (H), out (T, H), T, H, eps
@njit(fastmath=True, error_model="numpy")
def row_norm(residual, delta, weight, out, width, eps):
    total = F(0)
    for i in range(width):
        x = residual[i] + delta[i]
        residual[i] = x
        total += x * x
    scale = F(1) / np.sqrt(total / F(width) + eps)
    for i in range(width):
        out[i] = residual[i] * scale * weight[i]


@cfunc(ARGUMENTS, cache=True)
def norm(words):
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
def row_silu(gate_up, out, width):
    for i in range(width):
        x = gate_up[i]
        out[i] = x / (F(1) + exp(-x)) * gate_up[width + i]


@cfunc(ARGUMENTS, cache=True)
def silu_mul(words):
    a = carray(words, 4)
    rows, width = a[2], a[3]
    gate_up = carray(pointer(a[0], types.float32), (rows, 2 * width))
    out = carray(pointer(a[1], types.float32), (rows, width))
    for row in range(thread_index(), rows, thread_count()):
        row_silu(gate_up[row], out[row], width)


@njit(fastmath=True, error_model="numpy")
def normed(x, weight, eps):
    total = F(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = F(1) / np.sqrt(total / F(len(x)) + eps)
    for i in range(len(x)):
        x[i] = x[i] * scale * weight[i]


@njit(error_model="numpy")
def rotate_rows(a, cache):
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
    def rotate_store(words):
        a = carray(words, 17)
        rotate_rows(a, carray(pointer(a[2], stored), a[14]))

    return rotate_store


# Loops over a head's elements vectorise well only if their length is known when they are compiled:
# `size` is a literal, and each of these functions is compiled for its value.


def load(cache, table, page_size, heads, head, first, count, into, size):
    """K or V of `count` positions from `first` as float32; zeros up to a multiple of 8."""
    raise NotImplementedError("compiled only")


def scores(q, row, head, keys, count, scale, out, at, size):
    """out[at, j] = scale * q[row, head] . keys[j]."""
    raise NotImplementedError("compiled only")


def mix(weights, values, count, acc, at, size):
    """acc[at] += weights[at] . values."""
    raise NotImplementedError("compiled only")


def tile(q, out, cache, table, span, ancestors, kv, shape, scratch, size):
    """All query heads of one K/V head over one tile: K and V are read once."""
    raise NotImplementedError("compiled only")


def attend_tiles(a, cache, size):
    """Deal (tile, K/V head) pairs to threads."""
    raise NotImplementedError("compiled only")


FAST = {"fastmath": True, "error_model": "numpy"}
EXACT = {"error_model": "numpy"}


@njit(error_model="numpy", inline="always")
def place(table, position, page_size, heads, head, size):
    """Where K or V of one position and head begins in a layer's storage."""
    page = U(table[U(position) // page_size])
    return ((page * heads + head) * page_size + U(position) % page_size) * U(size)


@njit(error_model="numpy")
def fetch(cache, address, table, page_size, heads, head, first, count, size):
    """Ask for K or V that will be loaded soon."""
    width = np.int64(cache.itemsize)
    for j in range(count):
        base = place(table, first + j, page_size, heads, head, size)
        for part in range(0, size, 64 // width):
            prefetch(address + np.int64(base + U(part)) * width)


@njit(fastmath=True, error_model="numpy")
def soften(score, at, count, peak):
    """Scores to weights relative to the running peak; returns (new peak, their sum)."""
    for j in range(count):
        peak = max(peak, score[at, j])
    total = F(0)
    for j in range(count):
        e = exp(score[at, j] - peak)
        score[at, j] = e
        total += e
    return peak, total


@overload(load, prefer_literal=True, jit_options=FAST)
def _load(cache, table, page_size, heads, head, first, count, into, size):
    n = size.literal_value

    def run(cache, table, page_size, heads, head, first, count, into, size):
        for j in range(count):
            base = place(table, first + j, page_size, heads, head, n)
            for d in range(n):
                into[j, d] = as_float(cache[base + U(d)])
        for j in range(count, (count + 7) // 8 * 8):
            into[j, :] = F(0)

    return run


@overload(scores, prefer_literal=True, jit_options=FAST)
def _scores(q, row, head, keys, count, scale, out, at, size):
    n = size.literal_value

    def run(q, row, head, keys, count, scale, out, at, size):
        for j in range(0, count, 4):
            a0, a1, a2, a3 = F(0), F(0), F(0), F(0)
            for d in range(n):
                x = q[row, head, d]
                a0 += x * keys[j, d]
                a1 += x * keys[j + 1, d]
                a2 += x * keys[j + 2, d]
                a3 += x * keys[j + 3, d]
            out[at, j], out[at, j + 1] = a0 * scale, a1 * scale
            out[at, j + 2], out[at, j + 3] = a2 * scale, a3 * scale

    return run


@overload(mix, prefer_literal=True, jit_options=FAST)
def _mix(weights, values, count, acc, at, size):
    n = size.literal_value

    def run(weights, values, count, acc, at, size):
        for j in range(0, count, 8):
            w0, w1 = weights[at, j], weights[at, j + 1]
            w2, w3 = weights[at, j + 2], weights[at, j + 3]
            w4, w5 = weights[at, j + 4], weights[at, j + 5]
            w6, w7 = weights[at, j + 6], weights[at, j + 7]
            for d in range(n):
                acc[at, d] += (
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
def _tile(q, out, cache, table, span, ancestors, kv, shape, scratch, size):
    n = size.literal_value

    def run(q, out, cache, table, span, ancestors, kv, shape, scratch, size):
        group, nk, page_size, scale, address = shape
        block, score, acc, peak, total = scratch
        rows = len(ancestors)
        hidden, context, end = span
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
                scores(q, row, kv * group + i % group, block, padded, scale, score, i, n)
                for j in range(count, padded):
                    score[i, j] = MINUS_INFINITY
                for j in range(hidden - first):
                    score[i, j] = MINUS_INFINITY
                for j in range(max(context - first, 0), count):
                    if (ancestors[row] >> np.int64(first + j - context)) & 1 == 0:
                        score[i, j] = MINUS_INFINITY
                was = peak[i]
                peak[i], added = soften(score, i, padded, was)
                fade = exp(was - peak[i])
                total[i] = total[i] * fade + added
                for d in range(n):
                    acc[i, d] *= fade
            load(cache, table, page_size, heads, value, first, count, block, n)
            fetch(cache, address, table, page_size, heads, key, first + count, following, n)
            for i in range(rows * group):
                mix(score, block, padded, acc, i, n)
        for i in range(rows * group):
            part = F(1) / total[i]
            for d in range(n):
                out[i // group, kv * group + i % group, d] = acc[i, d] * part

    return run


@overload(attend_tiles, prefer_literal=True, jit_options=EXACT)
def _attend_tiles(a, cache, size):
    n = size.literal_value

    def run(a, cache, size):
        tiles, tokens, nq, nk, longest = a[7], a[8], a[9], a[10], a[15]
        group = nq // nk
        q = carray(pointer(a[0], types.float32), (tokens, nq, n))
        out = carray(pointer(a[1], types.float32), (tokens, nq, n))
        starts = carray(pointer(a[3], types.int32), tiles + 1)
        contexts = carray(pointer(a[4], types.int32), tiles)
        pages = carray(pointer(a[5], types.int32), (tiles, a[12]))
        ancestors = carray(pointer(a[6], types.int64), tokens)
        tails = carray(pointer(a[16], types.int32), tiles)
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
                span = (a[17], np.int64(contexts[r]), np.int64(contexts[r] + tails[r]))
                tile(
                    q[lo:hi], out[lo:hi], cache, pages[r], span, ancestors[lo:hi], kv,
                    shape, scratch, n,
                )  # fmt: skip

    return run


def attend_kernel(size: int, stored: Any) -> Any:
    """Attention for one head size and K/V format (a numba type).

    q (T, nq D), out, cache, tile_starts (R + 1) int32, contexts (R) int32, pages (R, P) int32,
    ancestors (T) int64, R, T, nq, nk, page size, P, cache size, scale, longest tile,
    tails (R) int32, hidden positions (at most 64).
    Tiles of more than 64 tokens are left to the caller.
    """

    @cfunc(ARGUMENTS, cache=True)
    def attend(words):
        a = carray(words, 18)
        attend_tiles(a, carray(pointer(a[2], stored), a[13]), size)

    return attend

"""What stands between the weight GEMMs on a GPU, each in one pass over memory. Triton.

The same roundings as `paceline.attention.reference`: statistics in float32, results rounded to the
activations' format where plain torch would round them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(RESIDUAL, DELTA, WEIGHT, OUT, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """RESIDUAL += DELTA where ADD; OUT = RMSNorm(RESIDUAL) * WEIGHT. A program a row."""
    at = tl.arange(0, BLOCK)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    x = tl.load(RESIDUAL + row + at, mask=inside, other=0.0)
    weight = tl.load(WEIGHT + at, mask=inside, other=0.0)
    if ADD:
        delta = tl.load(DELTA + row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(RESIDUAL + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(x.dtype)
    tl.store(OUT + row + at, normed * weight, mask=inside)


@triton.jit
def rotate_and_store(
    X, Q, CACHE, COS, SIN, POSITIONS, CACHE_INDEX, Q_NORM, K_NORM, stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm and rotate q and k, write k and v to their pages and q to Q. Programs: T x all heads.

    X: (T, stride), HEADS of q (0: none), KV_HEADS of k, KV_HEADS of v. HALF: SIZE / 2 lanes.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    x = X + token.to(tl.int64) * stride + head * SIZE
    a, b = tl.load(x + half), tl.load(x + HALF + half)
    if head < HEADS + KV_HEADS:
        if NORM:
            wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
            squares = tl.sum(wide_a * wide_a, 0) + tl.sum(wide_b * wide_b, 0)
            scale = tl.rsqrt(squares / SIZE + eps)
            weight = Q_NORM if head < HEADS else K_NORM
            a = (wide_a * scale).to(a.dtype) * tl.load(weight + half)
            b = (wide_b * scale).to(b.dtype) * tl.load(weight + HALF + half)
        angle = tl.load(POSITIONS + token) * HALF
        cos, sin = tl.load(COS + angle + half), tl.load(SIN + angle + half)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = (wide_a * cos - wide_b * sin).to(a.dtype)
        b = (wide_b * cos + wide_a * sin).to(b.dtype)
    if head < HEADS:
        out = Q + (token.to(tl.int64) * HEADS + head) * SIZE
    else:
        index = tl.load(CACHE_INDEX + token)
        kv = head - HEADS  # k heads, then v heads: as they lie in a page
        out = CACHE + ((index // PAGE * 2 * KV_HEADS + kv) * PAGE + index % PAGE) * SIZE
    tl.store(out + half, a.to(out.dtype.element_ty))
    tl.store(out + HALF + half, b.to(out.dtype.element_ty))


@triton.jit
def silu_mul(X, OUT, width, BLOCK: tl.constexpr):
    """silu(first half of a row) * its second half. Programs: T x blocks of the width."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    gate = tl.load(X + 2 * row + at, mask=inside, other=0.0)
    up = tl.load(X + 2 * row + width + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    act = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(OUT + row + at, act * up, mask=inside)

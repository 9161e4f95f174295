"""Keyed Gumbel noise and the noisy argmax on a GPU: the numbers of `paceline.model.noise`. Triton.

Launch with `enable_fp_fusion=False`: a fused multiply-add rounds once where the definition rounds
twice, and the bits would differ from the CPU's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.model import noise

MULTIPLY_A = tl.constexpr(noise.MULTIPLY_A)
MULTIPLY_B = tl.constexpr(noise.MULTIPLY_B)
GOLDEN = tl.constexpr(noise.GOLDEN)
SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
LN2_HIGH = tl.constexpr(noise.LN2_HIGH)
LN2_LOW = tl.constexpr(noise.LN2_LOW)
P0, P1, P2, P3, P4, P5, P6, P7, P8 = (tl.constexpr(c) for c in noise.LOG_POLYNOMIAL)


SPLIT_A = tl.constexpr(noise.SPLIT_A)
SPLIT_B = tl.constexpr(noise.SPLIT_B)
SPLIT_GAMMA = tl.constexpr(noise.SPLIT_GAMMA)


@triton.jit
def _split_mix(x):
    """`noise._split_mix` of uint64."""
    x = x + SPLIT_GAMMA
    x = (x ^ (x >> 30)) * SPLIT_A
    x = (x ^ (x >> 27)) * SPLIT_B
    return x ^ (x >> 31)


@triton.jit
def _row_key(seed, position):
    """`noise.row_keys` of one row."""
    return _split_mix(_split_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * SPLIT_GAMMA)


@triton.jit
def _log(x):
    """`noise.log`, operation by operation."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    z = f * f
    p = P0 * f + P1
    p = p * f + P2
    p = p * f + P3
    p = p * f + P4
    p = p * f + P5
    p = p * f + P6
    p = p * f + P7
    p = p * f + P8
    y = p * f * z + e * LN2_LOW - z * 0.5
    return y + f + e * LN2_HIGH


@triton.jit
def _gumbel(key, ids):
    """`noise.gumbel` of one row's key, (n,) int32 ids."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32) * GOLDEN ^ low
    x = (x ^ (x >> 16)) * MULTIPLY_A
    x = ((x ^ (x >> 15)) + high) * MULTIPLY_B
    x = (x ^ (x >> 16)) * MULTIPLY_A
    bits = ((x ^ (x >> 15)) >> 9).to(tl.int32)
    u = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -_log(-_log(u))


@triton.jit
def add_noise(LOGITS, IDS, SEEDS, POSITIONS, count, BLOCK: tl.constexpr):
    """LOGITS += noise of IDS, in rows with POSITIONS >= 0. Programs: rows x blocks of columns."""
    row = tl.program_id(0)
    position = tl.load(POSITIONS + row)
    if position >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        ids = tl.load(IDS + at, mask=inside, other=0)
        place = LOGITS + row.to(tl.int64) * count + at
        found = _gumbel(_row_key(tl.load(SEEDS + row), position), ids)
        tl.store(place, tl.load(place, mask=inside, other=0.0) + found, mask=inside)


@triton.jit
def best_of_block(LOGITS, SEEDS, POSITIONS, VALUES, PLACES, count, BLOCK: tl.constexpr):
    """The largest of (LOGITS + noise) of each block of columns, and where: the first of equals.

    Programs: rows x blocks. VALUES, PLACES: (rows, blocks) float32 and int32.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = row.to(tl.int64) * count + at
    logits = tl.load(LOGITS + place, mask=inside, other=-float("inf")).to(tl.float32)
    position = tl.load(POSITIONS + row)
    if position >= 0:
        logits += _gumbel(_row_key(tl.load(SEEDS + row), position), at)
    top = tl.max(logits, 0)
    first = tl.min(tl.where(logits == top, at, count - 1), 0)  # some id even if all are NaN
    blocks = tl.num_programs(1)
    tl.store(VALUES + row * blocks + block, top)
    tl.store(PLACES + row * blocks + block, first)


@triton.jit
def best_of_blocks(VALUES, PLACES, OUT, blocks, count, BLOCKS: tl.constexpr):
    """The largest of each row's blocks. VALUES, PLACES: as above. OUT: (rows,) int64."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    values = tl.load(VALUES + row * blocks + at, mask=inside, other=-float("inf"))
    places = tl.load(PLACES + row * blocks + at, mask=inside, other=count - 1)
    top = tl.max(values, 0)
    first = tl.min(tl.where(values == top, places, count - 1), 0)
    tl.store(OUT + row, first.to(tl.int64))

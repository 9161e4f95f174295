"""Attention of long chunks of prompts over paged K/V on a GPU. Triton.

A program takes `ROWS` consecutive tokens of one tile and one query head, and goes over all that
they see: committed positions and the chunk's own, up to the diagonal. Only the blocks on the
diagonal are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.attention.triton_attention import NEVER, pages_of, weigh


@triton.jit
def _block(
    q, mixed, top, mass, CACHE, table, first, seen, hidden, head, scale,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of positions. seen: (ROWS,), each row sees the positions below this."""
    at = first + tl.arange(0, KEYS)
    d = tl.arange(0, SIZE)
    if MASKED:
        inside = at < tl.max(seen, 0)
    page = pages_of(table, first, tl.max(seen, 0), PAGE, KEYS)
    place = ((page * 2 * KV_HEADS + head) * PAGE + at % PAGE) * SIZE
    if MASKED:
        keys = tl.load(CACHE + place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
    else:
        keys = tl.load(CACHE + place[None, :] + d[:, None])
    scores = tl.dot(q, keys, input_precision="ieee")
    unit = scale
    if MASKED:
        visible = (at[None, :] < seen[:, None]) & (at >= hidden)[None, :]
        scores = tl.where(visible, scores * scale, NEVER)
        unit = 1.0
    weight, fade, higher, mass = weigh(scores, unit, top, mass)
    place += KV_HEADS * PAGE * SIZE
    if MASKED:
        values = tl.load(CACHE + place[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    else:
        values = tl.load(CACHE + place[:, None] + d[None, :])
    mixed = tl.dot(weight.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return mixed, higher, mass


@triton.jit
def attend_chunks(
    Q, CACHE, OUT, BLOCKS, TILE_STARTS, CONTEXTS, PAGES, max_pages, hidden, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Q, OUT: (T, HEADS, SIZE). BLOCKS: (N, 2) int32, tile and first row of each block of rows,
    the longest first. Programs: N x HEADS. Tiles are causal.
    """
    tile = tl.load(BLOCKS + 2 * tl.program_id(0))
    above = tl.load(BLOCKS + 2 * tl.program_id(0) + 1)
    lane = tl.program_id(1)
    head = lane // (HEADS // KV_HEADS)
    lo = tl.load(TILE_STARTS + tile)
    rows = tl.load(TILE_STARTS + tile + 1) - lo
    context = tl.load(CONTEXTS + tile)
    table = PAGES + tile.to(tl.int64) * max_pages
    row = above + tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    inside = row < rows
    place = ((lo + row).to(tl.int64) * HEADS + lane) * SIZE
    q = tl.load(Q + place[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    seen = context + tl.minimum(row, rows - 1) + 1
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    top = tl.full((ROWS,), NEVER, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    clear = (context + above + 1) // KEYS * KEYS  # seen by all rows of the block up to here
    end = context + tl.minimum(above + ROWS, rows)
    veiled = tl.where((hidden > 0) & (clear > 0), 1, 0)
    for at in range(veiled * KEYS, clear, KEYS):
        mixed, top, mass = _block(
            q, mixed, top, mass, CACHE, table, at, seen, hidden, head, scale,
            KV_HEADS, SIZE, PAGE, KEYS, False,
        )  # fmt: skip
    for k in range(veiled + tl.cdiv(end - clear, KEYS)):
        at = tl.where(k < veiled, 0, clear + (k - veiled) * KEYS)
        mixed, top, mass = _block(
            q, mixed, top, mass, CACHE, table, at, seen, hidden, head, scale,
            KV_HEADS, SIZE, PAGE, KEYS, True,
        )  # fmt: skip
    out = (mixed / mass[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + place[:, None] + d[None, :], out, mask=inside[:, None])

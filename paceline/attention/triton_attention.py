"""Paged attention on a GPU: few tokens over many positions, K/V read once. Triton.

One kernel serves decode, chains, trees and the levels of a drafter, in two cuts: for tiles of a few
rows, and for those of many. The query heads that share a K/V head are packed with the tokens of a
tile into one matrix, so that K/V is read once for all. A tile's positions are cut into chunks
(split K) that fill the chip; whoever is the last to finish a chunk of some rows merges what all of
them found. Nothing is planned on the host: `plan` reads tiles and lengths on the device and writes,
once a step, the list of items that `attend` works off.

    item = (tile, block of its rows, chunk of its positions), for every K/V head

Positions below a tile's context are seen by all of its tokens, so the loop over them has no mask;
only the last few positions are looked up in the ancestor masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(-1.0e30)  # a score that counts for nothing
HEAD = tl.constexpr(16)  # numbers at the beginning of a plan: how many items
FIELDS = tl.constexpr(16)  # numbers of an item
OVERHEAD = tl.constexpr(2)  # blocks that could be visited while an item starts
FINEST = tl.constexpr(4)  # chunks are not smaller than a quarter of an even share


@triton.jit
def plan(
    PLAN, TILE_STARTS, CONTEXTS, TAILS, tiles, capacity, least, most,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Cut the tiles into items. One program.

    PLAN: int32, HEAD numbers (0: how many items), then FIELDS for each of at most `capacity` items:
    0 the tile's first token, 1 its tokens, 2 its context, 3 the tile; 4 block of rows; 5, 6 first
    position and end; 7 chunk, 8 of how many; 9 the tile's first partial row, 10 where the block's
    chunks are counted. TILES: room for tiles, a power of two. least, most: tokens of a tile; others
    are left to others. Two chunks are taken to merge in the time of a block.
    """
    r = tl.arange(0, TILES)
    lo = tl.load(TILE_STARTS + r, mask=r < tiles, other=0)
    hi = tl.load(TILE_STARTS + r + 1, mask=r < tiles, other=0)
    rows = tl.where((hi - lo >= least) & (hi - lo <= most), hi - lo, 0)
    context = tl.load(CONTEXTS + r, mask=r < tiles, other=0)
    length = context + tl.load(TAILS + r, mask=r < tiles, other=0)
    blocks = tl.where(rows > 0, tl.cdiv(length, KEYS), 0)
    parts = tl.cdiv(rows * GROUP, ROWS)  # blocks of rows
    share = tl.cdiv(tl.sum(blocks * parts) * KV_HEADS, PROGRAMS)
    best, chunk = 1 << 30, 1
    for k in range(16 // FINEST, 33):
        size = tl.maximum(tl.cdiv(share * k, 16), 1)
        chunks = tl.cdiv(blocks, size)
        items = tl.sum(chunks * parts) * KV_HEADS
        cost = 2 * tl.cdiv(items, PROGRAMS) * (size + OVERHEAD) + tl.max(chunks)
        chunk = tl.where(cost < best, size, chunk)
        best = tl.minimum(cost, best)
    chunks = tl.cdiv(blocks, chunk)
    items = chunks * parts
    partial = tl.where(chunks > 1, rows * chunks, 0)
    partial = tl.cumsum(partial, 0) - partial
    first = tl.cumsum(items, 0) - items
    meeting = tl.cumsum(parts, 0) - parts
    tl.store(PLAN, tl.minimum(tl.sum(items), capacity))
    for k in range(tl.max(items)):
        there = (k < items) & (first + k < capacity)
        number = k // tl.maximum(parts, 1)
        part = k % tl.maximum(parts, 1)
        item = PLAN + HEAD + (first + k) * FIELDS
        tl.store(item, lo, mask=there)
        tl.store(item + 1, rows, mask=there)
        tl.store(item + 2, context, mask=there)
        tl.store(item + 3, r, mask=there)
        tl.store(item + 4, part, mask=there)
        tl.store(item + 5, number * chunk * KEYS, mask=there)
        tl.store(item + 6, tl.minimum((number + 1) * chunk * KEYS, length), mask=there)
        tl.store(item + 7, number, mask=there)
        tl.store(item + 8, chunks, mask=there)
        tl.store(item + 9, partial, mask=there)
        tl.store(item + 10, meeting + part, mask=there)


@triton.jit
def pages_of(table, first, end, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Page of each of KEYS positions from `first` on; what lies beyond `end` may be any page."""
    at = first + tl.arange(0, KEYS)
    if PAGE % KEYS == 0:  # the whole block lies in one page
        page = tl.load(table + first // PAGE, mask=first < end, other=0) + at * 0
    elif KEYS % PAGE == 0:  # a few pages: each is looked up once
        some = first // PAGE + tl.arange(0, KEYS // PAGE)
        some = tl.load(table + some, mask=some * PAGE < end, other=0)
        page = tl.reshape(tl.broadcast_to(some[:, None], (KEYS // PAGE, PAGE)), (KEYS,))
    else:
        page = tl.load(table + at // PAGE, mask=at < end, other=0)
    return page.to(tl.int64)


@triton.jit
def weigh(scores, unit, top, mass):
    """A block of scores (M, KEYS), to be multiplied by `unit`: (weights, what earlier results fade
    by, top score, mass)."""
    higher = tl.maximum(top, tl.max(scores, 1) * unit)
    fade = tl.exp2(top - higher)
    weight = tl.exp2(scores * unit - higher[:, None])
    return weight, fade, higher, mass * fade + tl.sum(weight, 1)


@triton.jit
def _visit(
    q, mixed, top, mass, CACHE, table, first, end, context, hidden, row, ancestors, causal, head,
    scale,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of positions, from `first` on: (mixed values, top score, mass) go on.

    q: (M, SIZE). scale: of scores, log2(e) included. MASKED: not every row sees all positions.
    """
    at = first + tl.arange(0, KEYS)
    d = tl.arange(0, SIZE)
    page = pages_of(table, first, end, PAGE, KEYS)
    place = ((page * 2 * KV_HEADS + head) * PAGE + at % PAGE) * SIZE
    if MASKED:
        keys = tl.load(CACHE + place[None, :] + d[:, None], mask=(at < end)[None, :], other=0.0)
    else:
        keys = tl.load(CACHE + place[None, :] + d[:, None])
    scores = tl.dot(q, keys, input_precision="ieee")
    unit = scale
    if MASKED:
        trailing = at - context
        shift = tl.minimum(tl.maximum(trailing, 0), 63).to(tl.int64)
        bit = (ancestors[:, None] >> shift[None, :]) & 1
        seen = tl.where(causal, trailing[None, :] <= row[:, None], bit == 1)
        seen = ((trailing < 0)[None, :] | seen) & (at >= hidden)[None, :]
        # Scaled first: NEVER times scale, fused with a subtraction, is no exact zero any more.
        scores = tl.where(seen & (at < end)[None, :], scores * scale, NEVER)
        unit = 1.0
    weight, fade, higher, mass = weigh(scores, unit, top, mass)
    place += KV_HEADS * PAGE * SIZE
    if MASKED:
        values = tl.load(CACHE + place[:, None] + d[None, :], mask=(at < end)[:, None], other=0.0)
    else:
        values = tl.load(CACHE + place[:, None] + d[None, :])
    mixed = tl.dot(weight.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return mixed, higher, mass


@triton.jit
def _merge(
    MIXED, WEIGHT, lane, inside, stride, chunks, HEADS: tl.constexpr, SIZE: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """What all chunks found for some rows. lane: (M,), place of each row's results in the first
    chunk's; stride: from one chunk's to the next. Returns (M, SIZE) float32."""
    TOGETHER: tl.constexpr = 64 // M  # so many are on their way at a time
    d = tl.arange(0, SIZE)
    mixed = tl.zeros((M, SIZE), tl.float32)
    top = tl.full((M,), NEVER, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    for k in range(0, chunks, TOGETHER):
        for j in tl.static_range(TOGETHER):
            at = lane + (k + j) * stride
            there = inside & (k + j < chunks)
            weight = tl.load(WEIGHT + at, mask=there, other=NEVER, cache_modifier=".cg")
            found = tl.load(
                MIXED + at[:, None] * SIZE + d[None, :], mask=there[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            higher = tl.maximum(top, weight)
            fade, share = tl.exp2(top - higher), tl.exp2(weight - higher)
            mixed = mixed * fade[:, None] + found * share[:, None]
            mass = mass * fade + share
            top = higher
    return mixed / mass[:, None]


@triton.jit
def _item(
    Q, CACHE, OUT, MIXED, WEIGHT, MET, PAGES, ANCESTORS, item, head, max_pages, hidden, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One item, M query heads at a time. item: its FIELDS."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lo, rows, context = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    tile, part = tl.load(item + 3), tl.load(item + 4)
    first, end = tl.load(item + 5), tl.load(item + 6)
    number, chunks, partial = tl.load(item + 7), tl.load(item + 8), tl.load(item + 9)
    table = PAGES + tile.to(tl.int64) * max_pages
    m = part * M + tl.arange(0, M)
    d = tl.arange(0, SIZE)
    row, member = m // GROUP, head * GROUP + m % GROUP
    inside = row < rows
    lane = (lo + row).to(tl.int64) * HEADS + member
    q = tl.load(Q + lane[:, None] * SIZE + d[None, :], mask=inside[:, None], other=0.0)
    ancestors = tl.load(ANCESTORS + lo + row, mask=inside, other=0)
    causal = rows > 64
    mixed = tl.zeros((M, SIZE), tl.float32)
    top = tl.full((M,), NEVER, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    clear = tl.maximum(tl.minimum(end, context // KEYS * KEYS), first)  # seen by all below
    veiled = tl.where((hidden > first) & (clear > first), 1, 0)  # blocks with hidden positions
    for at in range(first + veiled * KEYS, clear, KEYS):
        mixed, top, mass = _visit(
            q, mixed, top, mass, CACHE, table, at, end, context, hidden, row, ancestors, causal,
            head, scale, KV_HEADS, SIZE, PAGE, KEYS, False,
        )  # fmt: skip
    for k in range(veiled + tl.cdiv(end - clear, KEYS)):
        at = tl.where(k < veiled, first, clear + (k - veiled) * KEYS)
        mixed, top, mass = _visit(
            q, mixed, top, mass, CACHE, table, at, end, context, hidden, row, ancestors, causal,
            head, scale, KV_HEADS, SIZE, PAGE, KEYS, True,
        )  # fmt: skip
    mixed = mixed / mass[:, None]
    last = chunks == 1
    if chunks > 1:
        base = (partial + row).to(tl.int64) * HEADS + member
        own = base + number * rows * HEADS
        tl.store(MIXED + own[:, None] * SIZE + d[None, :], mixed, mask=inside[:, None])
        tl.store(WEIGHT + own, top + tl.log2(mass), mask=inside)
        tl.debug_barrier()  # all of it is written before it is counted
        met = MET + tl.load(item + 10) * KV_HEADS + head
        last = tl.atomic_add(met, 1, sem="acq_rel") == chunks - 1
        if last:
            tl.store(met, 0)
            mixed = _merge(MIXED, WEIGHT, base, inside, rows * HEADS, chunks, HEADS, SIZE, M)
    if last:
        out = OUT + lane[:, None] * SIZE + d[None, :]
        tl.store(out, mixed.to(OUT.dtype.element_ty), mask=inside[:, None])


@triton.jit
def attend(
    Q, CACHE, OUT, MIXED, WEIGHT, MET, PLAN, PAGES, ANCESTORS, max_pages, hidden, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Work off the items of a plan, all programs together.

    Q, OUT: (T, HEADS, SIZE). CACHE: (pages, 2, KV_HEADS, PAGE, SIZE). MIXED: (partial rows, HEADS,
    SIZE) float32 and WEIGHT: (partial rows, HEADS) float32, log2 of each chunk's weight. MET:
    (blocks of rows, KV_HEADS) int32, chunks that are done; zero before and after.
    """
    total = tl.load(PLAN) * KV_HEADS
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item = PLAN + HEAD + work // KV_HEADS * FIELDS
        _item(
            Q, CACHE, OUT, MIXED, WEIGHT, MET, PAGES, ANCESTORS, item, work % KV_HEADS,
            max_pages, hidden, scale, HEADS, KV_HEADS, SIZE, PAGE, ROWS, KEYS,
        )  # fmt: skip

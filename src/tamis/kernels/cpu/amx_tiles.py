"""Steps of attention on matrix tiles: 16 query rows against a chunk of up to CHUNK tokens of one KV head.

Keys are the left operand, read in place: 16 tokens are 16 rows of a page. Logits therefore come as [token][query row],
and the softmax works on sixteen query rows at a time without a shuffle. For the weighted sum the weights are
transposed, and values are packed in pairs of tokens once a chunk. Logits are in base 2 after the factor `scale`.
All memory is given by address (see `simd.peek`), the tiles of a chunk as a table of int64 addresses; `row` is the bytes
of a token's key or value.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu import amx, simd

ROWS = 16
"""Query rows of a tile, tokens of a tile."""
CHUNK = 128
"""Most tokens of a chunk: packed values, keys and logits stay in the second-level cache, one chunk ahead."""
PAIRED = 32
"""Tokens one tile product sums over: weights and values are padded to a multiple."""
LINE = 64
"""Bytes of a tile row, of a vector and of a cache line."""
TABLE = CHUNK // ROWS * 8
"""Bytes of the addresses of a chunk's tiles."""


@njit
def copy_row(source, target, row):  # type: ignore[no-untyped-def]
    """Copy `row` bytes, a multiple of LINE."""
    for at in range(0, row, LINE):
        simd.store(target + at, simd.load(source + at))


@njit
def plane_place(plane):  # type: ignore[no-untyped-def]
    """What `find_tiles` needs of a plane: address, heads, tokens of a page, bytes of a token's row."""
    return plane.ctypes.data, plane.shape[1], plane.shape[2], plane.shape[3] * 2


@njit
def token_address(plane, pages, head, token):  # type: ignore[no-untyped-def]
    """Where a token's row of a plane is; `pages` as for `find_tiles`."""
    base, heads, page_size, row = plane
    return base + ((simd.peek32(pages + token // page_size * 4) * heads + head) * page_size + token % page_size) * row


@njit
def find_tiles(plane, pages, head, start, count, copies, addresses):  # type: ignore[no-untyped-def]
    """The i-th address: tokens start + 16 * i and following as 16 rows, in place or, across pages, copied to `copies`.

    `pages`: where the sequence's row of the page table is. Tokens from `count` on may be anything.
    """
    page_size, row = plane[2], plane[3]
    for first in range(0, count, ROWS):
        place = copies + first * row
        if (start + first) % page_size + ROWS <= page_size:
            place = token_address(plane, pages, head, start + first)
        else:
            for token in range(first, min(first + ROWS, count)):
                copy_row(token_address(plane, pages, head, start + token), copies + token * row, row)
        simd.poke(addresses + first // ROWS * 8, place)


@njit
def find_ahead(plane, pages, head, start, count, spare, addresses):  # type: ignore[no-untyped-def]
    """As `find_tiles` for tokens wanted soon; a place of no interest where 16 cross pages or are past `count`."""
    for first in range(0, CHUNK, ROWS):
        place = spare
        if first < count and (start + first) % plane[2] + ROWS <= plane[2]:
            place = token_address(plane, pages, head, start + first)
        simd.poke(addresses + first // ROWS * 8, place)


@njit
def fetch_lines(addresses, number, step, row):  # type: ignore[no-untyped-def]
    """Prefetch lines `number`, `number + step`, ... of each tile of a chunk, whose table is at `addresses`.

    The hardware follows one run of reads in each 4 KB, as much as a tile of heads of dim 128 has: going through all
    tiles side by side gives it more to fetch at a time than one tile after the other.
    """
    for at in range(number * LINE, ROWS * row, step * LINE):
        simd.prefetch_each(addresses, at)


@njit
def touch_tiles(addresses, count, row, spare):  # type: ignore[no-untyped-def]
    """Read tokens once in the order of memory, which the hardware fetches ahead; tile loads do not go in that order."""
    seen = simd.load(spare)
    for token in range(count):
        address = simd.peek(addresses + token // ROWS * 8) + token % ROWS * row
        for at in range(0, row, LINE):
            seen = simd.maximum(simd.load(address + at), seen)
    simd.store(spare, seen)


@njit
def pack_queries(rows, row, tile):  # type: ignore[no-untyped-def]
    """16 query rows in a row as right operands: [row / LINE] tiles of 16 pairs of dims x 16 query rows."""
    for part in range(row // LINE):
        simd.transpose(rows + part * LINE, row, tile + part * amx.TILE_BYTES, LINE)


@njit
def pack_values(addresses, count, row, zeros, values):  # type: ignore[no-untyped-def]
    """`count` tokens as right operands: tiles of 16 pairs of tokens x 16 dims, all dims of 32 tokens one after another.

    Padded with zeros to a multiple of PAIRED; `zeros` is a token of them.
    """
    parts = row // LINE
    for pair in range((count + PAIRED - 1) // PAIRED * ROWS):
        token = 2 * pair
        first = simd.peek(addresses + token // ROWS * 8) + token % ROWS * row if token < count else zeros
        second = first + row if token + 1 < count else zeros
        target = values + (pair // ROWS * 2 * parts * ROWS + pair % ROWS) * LINE
        for part in range(parts):
            low = target + part * 2 * amx.TILE_BYTES
            simd.interleave(first + part * LINE, second + part * LINE, low, low + amx.TILE_BYTES)


@njit
def touch_tile(tile, row, spare):  # type: ignore[no-untyped-def]
    """`touch_tiles` for one tile of 16 tokens."""
    seen = simd.load(spare)
    for at in range(0, ROWS * row, LINE):
        seen = simd.maximum(simd.load(tile + at), seen)
    simd.store(spare, seen)


@njit
def _four_tiles(queries, at, row, logits, following, spare):  # type: ignore[no-untyped-def]
    """Products of the four tiles of keys in the table at `at`; tile loads and products take turns.

    `following`: a table of four more tiles, read while products are on their way, or None.
    """
    a, b, c, d = simd.peek(at), simd.peek(at + 8), simd.peek(at + 16), simd.peek(at + 24)
    amx.zero(0)
    amx.zero(1)
    amx.zero(2)
    amx.zero(3)
    touched = 0
    for part in range(0, row, LINE):
        amx.load(4, queries + part * ROWS, LINE)
        amx.load(5, a + part, row)
        amx.dot(0, 5, 4)
        amx.load(6, b + part, row)
        amx.dot(1, 6, 4)
        amx.load(7, c + part, row)
        amx.dot(2, 7, 4)
        amx.load(5, d + part, row)
        amx.dot(3, 5, 4)
        if following is not None and touched < 4:
            touch_tile(simd.peek(following + touched * 8), row, spare)
            touched += 1
    if following is not None:
        for i in range(touched, 4):
            touch_tile(simd.peek(following + i * 8), row, spare)
    amx.store(0, logits, LINE)
    amx.store(1, logits + amx.TILE_BYTES, LINE)
    amx.store(2, logits + 2 * amx.TILE_BYTES, LINE)
    amx.store(3, logits + 3 * amx.TILE_BYTES, LINE)


@njit
def chunk_logits(queries, addresses, row, logits, ahead, spare):  # type: ignore[no-untyped-def]
    """`tile_logits` of a whole chunk; reads the tiles of the next, at `ahead`, while products are on their way."""
    for tile in range(0, CHUNK // ROWS, 4):
        target = logits + tile * amx.TILE_BYTES
        _four_tiles(queries, addresses + tile * 8, row, target, ahead + tile * 8, spare)


@njit
def tile_logits(queries, addresses, count, row, logits):  # type: ignore[no-untyped-def]
    """logits [tokens padded to 16][16]: products of the keys at `addresses` and packed query rows."""
    tiles = (count + ROWS - 1) // ROWS
    tile = 0
    while tile + 4 <= tiles:
        _four_tiles(queries, addresses + tile * 8, row, logits + tile * amx.TILE_BYTES, None, 0)
        tile += 4
    while tile < tiles:
        amx.zero(0)
        for part in range(0, row, LINE):
            amx.load(4, queries + part * ROWS, LINE)
            amx.load(5, simd.peek(addresses + tile * 8) + part, row)
            amx.dot(0, 5, 4)
        amx.store(0, logits + tile * amx.TILE_BYTES, LINE)
        tile += 1


@njit
def hide_tokens(logits, count, start, limits):  # type: ignore[no-untyped-def]
    """Minus infinity where token start + t lies past the int32 limit of a query row."""
    for t in range(count):
        at = logits + t * LINE
        simd.store(at, simd.hide_above(simd.load(at), limits, start + t))


@njit
def largest(logits, count, before):  # type: ignore[no-untyped-def]
    """Store at `before` the largest of what is there and the logits of `count` tokens; NaN is passed over."""
    a = b = c = d = simd.load(before)
    t = 0
    while t + 4 <= count:
        at = logits + t * LINE
        a = simd.maximum(simd.load(at), a)
        b = simd.maximum(simd.load(at + LINE), b)
        c = simd.maximum(simd.load(at + 2 * LINE), c)
        d = simd.maximum(simd.load(at + 3 * LINE), d)
        t += 4
    while t < count:
        a = simd.maximum(simd.load(logits + t * LINE), a)
        t += 1
    simd.store(before, simd.maximum(simd.maximum(a, b), simd.maximum(c, d)))


@njit
def soften(logits, count, scale, peaks, totals, shrink, pairs, weights, ahead, row):  # type: ignore[no-untyped-def]
    """Logits as weights 2**(scale * (logit - peak)) in bf16, left operands [tokens / 32] of 16 rows x 32 tokens.

    Fetches meanwhile, unless `row` is 0, the tiles that `ahead` names: the next chunk's values.
    Updates peaks and totals of 16 rows; `shrink` becomes the factor for what was summed under the old peaks.
    """
    factor = simd.splat(scale)
    old = simd.mul(simd.load(peaks), factor)
    largest(logits, count, peaks)
    base = simd.zero_where_infinite(simd.mul(simd.load(peaks), factor))
    down = simd.mul(base, simd.splat(np.float32(-1)))
    less = simd.exp2(simd.add(old, down))
    simd.store(shrink, less)
    total = simd.mul(simd.load(totals), less)
    other = simd.splat(np.float32(0))
    none = other
    for t in range(0, count - 1, 2):
        at = logits + t * LINE
        if row:
            fetch_lines(ahead, t // 2, count // 2, row)
        a = simd.exp2(simd.fma(simd.load(at), factor, down))
        b = simd.exp2(simd.fma(simd.load(at + LINE), factor, down))
        total, other = simd.add(total, a), simd.add(other, b)
        simd.store_pairs(pairs + t // 2 * LINE, a, b)
    if count % 2:
        a = simd.exp2(simd.fma(simd.load(logits + (count - 1) * LINE), factor, down))
        total = simd.add(total, a)
        simd.store_pairs(pairs + count // 2 * LINE, a, none)
    simd.store(totals, simd.add(total, other))
    steps = (count + PAIRED - 1) // PAIRED
    for pair in range((count + 1) // 2, steps * ROWS):
        simd.store(pairs + pair * LINE, none)
    for step in range(steps):
        simd.transpose(pairs + step * amx.TILE_BYTES, LINE, weights + step * amx.TILE_BYTES, LINE)


@njit
def shrink_add(total, part, shrink, row):  # type: ignore[no-untyped-def]
    """total = total * shrink + part for the float32 values of one row; `shrink` is the address of the factor."""
    factor = simd.spread(shrink)
    for at in range(0, 2 * row, LINE):
        simd.store(total + at, simd.fma(simd.load(total + at), factor, simd.load(part + at)))


@njit
def weigh_values(weights, values, count, row, sums):  # type: ignore[no-untyped-def]
    """sums [16][dim] float32: packed weights times packed values of `count` tokens."""
    steps, tiles = (count + PAIRED - 1) // PAIRED, row // 32
    for first in range(0, tiles - 3, 4):
        amx.zero(0)
        amx.zero(1)
        amx.zero(2)
        amx.zero(3)
        for step in range(steps):
            at = values + (step * tiles + first) * amx.TILE_BYTES
            amx.load(4, weights + step * amx.TILE_BYTES, LINE)
            amx.load(5, at, LINE)
            amx.dot(0, 4, 5)
            amx.load(6, at + amx.TILE_BYTES, LINE)
            amx.dot(1, 4, 6)
            amx.load(7, at + 2 * amx.TILE_BYTES, LINE)
            amx.dot(2, 4, 7)
            amx.load(5, at + 3 * amx.TILE_BYTES, LINE)
            amx.dot(3, 4, 5)
        at = sums + first * LINE
        amx.store(0, at, 2 * row)
        amx.store(1, at + LINE, 2 * row)
        amx.store(2, at + 2 * LINE, 2 * row)
        amx.store(3, at + 3 * LINE, 2 * row)
    for first in range(tiles // 4 * 4, tiles, 2):
        amx.zero(0)
        amx.zero(1)
        for step in range(steps):
            at = values + (step * tiles + first) * amx.TILE_BYTES
            amx.load(4, weights + step * amx.TILE_BYTES, LINE)
            amx.load(5, at, LINE)
            amx.dot(0, 4, 5)
            amx.load(6, at + amx.TILE_BYTES, LINE)
            amx.dot(1, 4, 6)
        amx.store(0, sums + first * LINE, 2 * row)
        amx.store(1, sums + (first + 1) * LINE, 2 * row)

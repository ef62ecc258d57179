"""Block scores (the largest logit of each block) on matrix tiles: no score of a single token leaves the cache.

A work item is a range of query tokens of one sequence, all index heads, and some groups of GROUP blocks. The results of
a group lie block by block until its end, and are then written as GROUP neighbours of a row. Of small blocks several
make a chunk, and are told apart only when their largest logits are looked for.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from tamis.kernels.cpu import amx, simd
from tamis.kernels.cpu.amx_room import Array
from tamis.kernels.cpu.amx_tiles import (
    CHUNK,
    LINE,
    ROWS,
    TABLE,
    chunk_logits,
    copy_row,
    find_tiles,
    hide_tokens,
    largest,
    pack_queries,
    plane_place,
    tile_logits,
    touch_tiles,
)
from tamis.kernels.cpu.frames import borrow, places, view1, view2, view3
from tamis.kernels.cpu.score import select
from tamis.kernels.cpu.threads import share, take_ticket

# What stands where in a call's frame (`prefill.plan_scores` writes it).
(
    _TOKENS, _HEADS, _DIM, _PAGE_SIZE, _BLOCKS, _TABLE, _LENS, _POSITIONS, _CONFIG, _ITEMS, _BYTES, _LIMITS, _TILES,
) = places(*[1] * 5, 3, 2, 2, 2, 3, 3, 4, 3)  # fmt: skip

GROUP = 16
"""Blocks that are written together: as many as a vector has scores."""
SPAN = 1024
"""Tokens of context that an item covers at least: with small blocks a group alone would not be worth a ticket."""
NEG_INF = np.float32(-np.inf)


class ScoreRoom(NamedTuple):
    """Scratch of the threads; the first axis is the thread."""

    bytes: Array
    """uint8 [threads, score_room_bytes]"""
    limits: Array
    """int32 [threads, 3, rows]: the last position a row sees; for each tile of rows the first and last of those."""
    tiles: Array
    """int64 [threads, 2 * CHUNK / 16]: where a chunk's keys are."""


def score_room_bytes(dim: int, rows: int) -> int:
    """Bytes a thread needs for items of up to `rows` rows, a multiple of 16."""
    token = 2 * dim
    return CHUNK * (LINE + 2 * token) + ROWS * token + LINE + ROWS * LINE + rows * (token + GROUP * 4)


@njit
def _load_rows(q, token, rows, gathered, queries):  # type: ignore[no-untyped-def]
    """Pack rows of the range that begins at `token` ([T, Hi, dim]: they lie in a row)."""
    heads, row = q.shape[1], q.shape[2] * 2
    source = q.ctypes.data + token * heads * row
    for first in range(0, rows, ROWS):
        used = min(ROWS, rows - first)
        for i in range(used):
            copy_row(source + (first + i) * row, gathered + i * row, row)
        for at in range(used * row, ROWS * row, LINE):
            simd.store(gathered + at, simd.splat(np.float32(0)))
        pack_queries(gathered, row, queries + first * row)


@njit
def _set_limits(positions, length, token, rows, heads, limits):  # type: ignore[no-untyped-def]
    """limits[0]: what each row sees; [1] and [2]: the least and most of each tile; returns the most of all."""
    last = -1
    for first in range(0, rows, ROWS):
        low, high = np.iinfo(np.int32).max, -1
        for r in range(first, first + ROWS):
            limits[0, r] = min(positions[token + r // heads], length - 1) if r < rows else -1
            if r < rows:
                low, high = min(low, limits[0, r]), max(high, limits[0, r])
        limits[1, first // ROWS], limits[2, first // ROWS] = low, high
        last = max(last, high)
    return last


@njit
def _write_scores(found, stride, rows, token, heads, block, scale, turned, scores):  # type: ignore[no-untyped-def]
    """scores[h, t, block + i] = scale * found[i][row] for the blocks there are, from [GROUP][rows] float32."""
    count = min(GROUP, scores.shape[2] - block)
    factor = simd.splat(scale)
    for first in range(0, rows, ROWS):
        simd.transpose(found + first * 4, stride, turned, LINE)
        for i in range(min(ROWS, rows - first)):
            line = simd.mul(simd.load(turned + i * LINE), factor)
            target = scores[(first + i) % heads, token + (first + i) // heads]
            if count == GROUP:
                simd.store(target.ctypes.data + block * 4, line)
                continue
            for j in range(count):
                target[block + j] = simd.get(line, j)


@njit(nogil=True)
def score_items(tickets, frame, index_q, index_k, pages, block_size, scale, out):  # type: ignore[no-untyped-def]
    """Items int32 [n, 3] (sequence, first token, tokens), each times the groups of blocks of `scores`, some at a time.

    `frame` as `prefill.plan_scores` writes it; index_q, index_k and out are the addresses of queries [T, Hi, dim], of
    the plane (`pages` of them) and of scores float32 [Hi, T, NB].
    """
    tokens, heads, dim = frame[_TOKENS], frame[_HEADS], frame[_DIM]
    page_size, blocks = frame[_PAGE_SIZE], frame[_BLOCKS]
    q, k = borrow(index_q, (tokens, heads, dim), np.uint16), borrow(index_k, (pages, 1, page_size, dim), np.uint16)
    scores = borrow(out, (heads, tokens, blocks), np.float32)
    page_table, seq_lens = view2(frame, _TABLE, np.int32), view1(frame, _LENS, np.int32)
    positions, config = view1(frame, _POSITIONS, np.int32), view1(frame, _CONFIG, np.uint8)
    items = view2(frame, _ITEMS, np.int32)
    room = ScoreRoom(view2(frame, _BYTES, np.uint8), view3(frame, _LIMITS, np.int32), view2(frame, _TILES, np.int64))
    row = dim * 2
    groups = (scores.shape[2] + GROUP - 1) // GROUP
    together = max(1, SPAN // (GROUP * block_size))
    shares = (groups + together - 1) // together
    most = CHUNK if block_size >= CHUNK else min(CHUNK // block_size, GROUP) * block_size
    thread = take_ticket(tickets, 7)
    limits, tiles = room.limits[thread], room.tiles[thread].ctypes.data
    ahead = tiles + TABLE
    keys = plane_place(k)
    stride = limits.shape[1] * 4
    logits = room.bytes[thread].ctypes.data
    copies = logits + CHUNK * LINE
    others = copies + CHUNK * row
    gathered = others + CHUNK * row
    spare = gathered + ROWS * row
    turned = spare + LINE
    found = turned + ROWS * LINE
    queries = found + GROUP * stride
    before = last = low = -1
    amx.configure(config.ctypes.data)
    while True:
        ticket = take_ticket(tickets, 0)
        item, group = ticket // shares, ticket % shares * together
        if item >= items.shape[0]:
            break
        seq, token, rows = items[item, 0], items[item, 1], items[item, 2] * heads
        if item != before:
            last = _set_limits(positions, seq_lens[seq], token, rows, heads, limits)
            _load_rows(q, token, rows, gathered, queries)
            before = item
            low = simd.peek32(limits.ctypes.data + limits.shape[1] * 4)
        table = page_table[seq].ctypes.data
        ready = -1
        until = min((group + together) * GROUP * block_size, last + 1)
        for first_block in range(group * GROUP, min(group + together, groups) * GROUP, GROUP):
            for at in range(0, GROUP * stride, LINE):
                simd.store(found + at, simd.splat(NEG_INF))
            end = min((first_block + GROUP) * block_size, last + 1)
            start = first_block * block_size
            while start < end:
                block = start // block_size
                count = min(most, end - start)
                if block_size > CHUNK:
                    count = min(count, (block + 1) * block_size - start)
                following = start + count
                here = found + (block - first_block) * stride
                if ready != start:
                    find_tiles(keys, table, 0, start, count, copies, tiles)
                if rows <= ROWS and count == CHUNK and following + CHUNK <= until:
                    find_tiles(keys, table, 0, following, CHUNK, others, ahead)
                    chunk_logits(queries, tiles, row, logits, ahead, spare)
                    if low < start + count - 1:
                        hide_tokens(logits, count, start, limits.ctypes.data)
                    _largest_of_blocks(logits, count, block_size, stride, here)
                    tiles, ahead, copies, others, ready = ahead, tiles, others, copies, following
                else:
                    touch_tiles(tiles, count, row, spare)
                    _score_chunk(
                        tiles, start, count, rows, row, limits.ctypes.data, limits.shape[1], queries, logits,
                        block_size, stride, here,
                    )  # fmt: skip
                start = following
            _write_scores(found, stride, rows, token, heads, first_block, scale, turned, scores)
    amx.release()


@njit(nogil=True, cache=True)
def launch_score_items(box, *args):  # type: ignore[no-untyped-def]
    """Run `score_items` on a team."""
    return share(box, score_items, args)


@njit
def pick_blocks(  # type: ignore[no-untyped-def]
    box, frame, index_q, index_k, pages, block_size, scale, out, init_blocks, local_blocks, picked, topk
):
    """`score_items`, then `select` into int32 [Hi, T, topk] at `picked`, on a team."""
    failed = share(box, score_items, (frame, index_q, index_k, pages, block_size, scale, out))
    heads, tokens = frame[_HEADS], frame[_TOKENS]
    scores = borrow(out, (heads, tokens, frame[_BLOCKS]), np.float32)
    picks = borrow(picked, (heads, tokens, topk), np.int32)
    positions = view1(frame, _POSITIONS, np.int32)
    return failed | share(box, select, (scores, positions, block_size, init_blocks, local_blocks, picks))


@njit(nogil=True, cache=True)
def launch_pick_blocks(box, *args):  # type: ignore[no-untyped-def]
    """Run `pick_blocks`."""
    return pick_blocks(box, *args)


@njit
def _largest_of_blocks(logits, count, block_size, stride, found):  # type: ignore[no-untyped-def]
    """Raise the results of a chunk's blocks, `stride` bytes apart, to the largest logits of their `count` tokens."""
    first = 0
    while first < count:
        largest(logits + first * LINE, min(block_size, count - first), found)
        found += stride
        first += block_size


@njit
def _score_chunk(  # type: ignore[no-untyped-def]
    tiles, start, count, rows, row, limits, apart, queries, logits, block_size, stride, found
):
    """Raise found, [rows] for each block, to the largest logits that each row sees; `apart`: rows in `limits`."""
    for first in range(0, rows, ROWS):
        low = simd.peek32(limits + (apart + first // ROWS) * 4)
        high = simd.peek32(limits + (2 * apart + first // ROWS) * 4)
        seen = min(count, high + 1 - start)
        if seen <= 0:
            continue
        tile_logits(queries + first * row, tiles, seen, row, logits)
        if low < start + seen - 1:
            hide_tokens(logits, seen, start, limits + first * 4)
        _largest_of_blocks(logits, seen, block_size, stride, found + first * 4)

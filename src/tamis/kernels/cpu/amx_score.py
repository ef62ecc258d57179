"""Block scores (the largest logit of each block) on matrix tiles: no score of a single token leaves the cache.

A work item is a range of query tokens of one sequence, all index heads, and GROUP blocks. Its rows' results lie block
by block until the end, and are then written as GROUP neighbours of a row.
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
    copy_row,
    find_tiles,
    hide_tokens,
    largest,
    pack_queries,
    plane_place,
    tile_logits,
    touch_tiles,
)
from tamis.kernels.cpu.threads import take_ticket

GROUP = 16
"""Blocks of an item: as many as a vector has scores."""
NEG_INF = np.float32(-np.inf)


class ScoreRoom(NamedTuple):
    """Scratch of the threads; the first axis is the thread."""

    bytes: Array
    """uint8 [threads, score_room_bytes]"""
    limits: Array
    """int32 [threads, 3, rows]: the last position a row sees; for each tile of rows the first and last of those."""
    tiles: Array
    """int64 [threads, CHUNK / 16]: where a chunk's keys are."""


def score_room_bytes(dim: int, rows: int) -> int:
    """Bytes a thread needs for items of up to `rows` rows, a multiple of 16."""
    token = 2 * dim
    return CHUNK * (LINE + token) + ROWS * token + LINE + ROWS * LINE + rows * (token + GROUP * 4)


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


@njit(nogil=True, cache=True)
def score_items(  # type: ignore[no-untyped-def]
    tickets, config, items, q, k, page_table, seq_lens, positions, block_size, scale, room, scores
):
    """Items int32 [n, 3] (sequence, first token, tokens), each times the groups of blocks of `scores`."""
    heads, row = q.shape[1], q.shape[2] * 2
    groups = (scores.shape[2] + GROUP - 1) // GROUP
    thread = take_ticket(tickets, 7)
    limits, tiles = room.limits[thread], room.tiles[thread].ctypes.data
    keys = plane_place(k)
    stride = limits.shape[1] * 4
    logits = room.bytes[thread].ctypes.data
    copies = logits + CHUNK * LINE
    gathered = copies + CHUNK * row
    spare = gathered + ROWS * row
    turned = spare + LINE
    found = turned + ROWS * LINE
    queries = found + GROUP * stride
    before = -1
    last = -1
    amx.configure(config.ctypes.data)
    while True:
        ticket = take_ticket(tickets, 0)
        item, first_block = ticket // groups, ticket % groups * GROUP
        if item >= items.shape[0]:
            break
        seq, token, rows = items[item, 0], items[item, 1], items[item, 2] * heads
        if item != before:
            last = _set_limits(positions, seq_lens[seq], token, rows, heads, limits)
            _load_rows(q, token, rows, gathered, queries)
            before = item
        for at in range(0, GROUP * stride, LINE):
            simd.store(found + at, simd.splat(NEG_INF))
        pages = page_table[seq].ctypes.data
        end = min((first_block + GROUP) * block_size, last + 1)
        start = first_block * block_size
        while start < end:
            block = start // block_size
            count = min(CHUNK, (block + 1) * block_size - start, end - start)
            find_tiles(keys, pages, 0, start, count, copies, tiles)
            touch_tiles(tiles, count, row, spare)
            _score_chunk(
                tiles,
                start,
                count,
                rows,
                row,
                limits.ctypes.data,
                limits.shape[1],
                queries,
                logits,
                found + (block - first_block) * stride,
            )
            start += count
        _write_scores(found, stride, rows, token, heads, first_block, scale, turned, scores)
    amx.release()


@njit
def _score_chunk(tiles, start, count, rows, row, limits, apart, queries, logits, found):  # type: ignore[no-untyped-def]
    """Raise found [rows] to the largest logit of the chunk's tokens that each row sees; `apart`: rows in `limits`."""
    for first in range(0, rows, ROWS):
        low = simd.peek32(limits + (apart + first // ROWS) * 4)
        high = simd.peek32(limits + (2 * apart + first // ROWS) * 4)
        seen = min(count, high + 1 - start)
        if seen <= 0:
            continue
        tile_logits(queries + first * row, tiles, seen, row, logits)
        if low < start + seen - 1:
            hide_tokens(logits, seen, start, limits + first * 4)
        largest(logits, seen, found + first * 4)

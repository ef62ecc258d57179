"""Block-sparse paged attention on matrix tiles: each picked block is opened once for a range of queries.

Inside a work item the picks are turned round: for each block, the query tokens that picked it (a counting sort). Their
rows are gathered sixteen at a time, whatever tokens they belong to.

A single token of a sequence, as in decoding, has nothing to share with others: its small blocks are copied together to
chunks, so that tiles are full.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu import amx, simd
from tamis.kernels.cpu.amx_attention import (
    attend_rows,
    attend_scattered,
    begin_range,
    finish_range,
    gather_rows,
    look_ahead,
    open_chunk,
    open_partly,
    spoil,
    spoil_rows,
)
from tamis.kernels.cpu.amx_room import open_operands, open_room, open_work, room_places, slot_of, state_places
from tamis.kernels.cpu.amx_score import pick_blocks
from tamis.kernels.cpu.amx_tiles import (
    CHUNK,
    LINE,
    ROWS,
    TABLE,
    copy_row,
    pack_queries,
    pack_values,
    plane_place,
    token_address,
)
from tamis.kernels.cpu.frames import borrow
from tamis.kernels.cpu.threads import share, take_ticket

RUN = 16 * LINE
"""Bytes that `simd.prefetch_run` asks for."""


@njit
def _sort_picks(picks, token, tokens, head, share, limits, group, block_size, blocks, ends, stamps, entries):  # type: ignore[no-untyped-def]
    """Which tokens of a range picked which block: those of block b are entries[ends[b - 1] : ends[b]], ascending.

    A KV head reads the union of the picks of its `share` index heads; ids below 0 and past a token's own block do not
    count. Returns the number of blocks that were picked.
    """
    ends[:blocks], stamps[:blocks] = 0, -1
    for i in range(tokens):
        own = limits[i * group] // block_size
        for line in range(head * share, (head + 1) * share):
            for block in picks[line, token + i]:
                if 0 <= block <= own and stamps[block] != i:
                    stamps[block] = i
                    ends[block] += 1
    total = picked = 0
    for block in range(blocks):
        count = ends[block]
        picked += 1 if count > 0 else 0
        ends[block] = total
        total += count
    for i in range(tokens):
        own = limits[i * group] // block_size
        for line in range(head * share, (head + 1) * share):
            for block in picks[line, token + i]:
                if 0 <= block <= own and stamps[block] != i + tokens:
                    stamps[block] = i + tokens
                    entries[ends[block]] = i
                    ends[block] += 1
    return picked


@njit
def _next_block(ends, block, blocks):  # type: ignore[no-untyped-def]
    """The first block after `block` that was picked, or `blocks`."""
    before = ends[block] if block >= 0 else 0
    block += 1
    while block < blocks and ends[block] == before:
        block += 1
    return block


@njit
def _attend_block(ops, seq, head, block, block_size, following, entries, scale, room, thread, place, state, slot):  # type: ignore[no-untyped-def]
    """Let the tokens `entries` of a range see one block; `following` is the block that comes next, or -1."""
    group = ops.q.shape[1] // ops.k.shape[1]
    row = ops.k.shape[3] * 2
    limits, marks, lanes = room.limits[thread], room.marks[thread], room.lanes[thread]
    tables = room.tiles[thread].ctypes.data
    keys, values, pages = plane_place(ops.k), plane_place(ops.v), ops.page_table[seq].ctypes.data
    peaks, totals, sums = state_places(state, slot)
    low = high = limits[0, entries[0] * group]
    for i in entries:
        low, high = min(low, limits[0, i * group]), max(high, limits[0, i * group])
    end = min((block + 1) * block_size, high + 1)
    rows = entries.shape[0] * group
    token = room.marks[thread, 2, 0]
    for start in range(block * block_size, end, CHUNK):
        count = min(CHUNK, end - start)
        if start + CHUNK < end:
            look_ahead(keys, values, pages, head, start + CHUNK, end - start - CHUNK, place[6], tables)
        else:
            left = ops.seq_lens[seq] - following * block_size if following >= 0 else 0
            look_ahead(keys, values, pages, head, following * block_size, min(left, block_size), place[6], tables)
        spoiled = False
        if low >= start + count - 1:
            open_chunk(keys, values, pages, head, start, count, tables, place)
        else:
            spoiled = open_partly(ops, keys, pages, seq, head, start, count, tables, place, room.clean[thread])
        for first in range(0, rows, ROWS):
            used, fetch = min(ROWS, rows - first), row if first == 0 else 0
            if group % ROWS == 0:
                own = entries[first // group] * group + first % group
                attend_rows(
                    place, place[10] + own * row, limits.ctypes.data, limits.shape[1], peaks, totals, sums, tables,
                    start, count, own, used, scale, row, fetch,
                )  # fmt: skip
                if spoiled:
                    spoil_rows(ops, seq, head, start, count, own, used, marks, limits[0], state.sums[slot])
                continue
            for i in range(used):
                marks[1, i] = entries[(first + i) // group] * group + (first + i) % group
            gather_rows(ops, token, head, marks, used, place[8])
            pack_queries(place[8], row, place[9])
            attend_scattered(
                place, place[9], marks, lanes, limits[0], state.peaks[slot], state.totals[slot], sums, tables, start,
                count, used, scale, row, fetch,
            )  # fmt: skip
            if spoiled:
                spoil(ops, seq, head, start, count, marks, used, state.sums[slot])


@njit
def _fetch_blocks(keys, values, pages, head, ends, block, left, block_size):  # type: ignore[no-untyped-def]
    """Ask for the next `left` picked blocks after `block`, so that memory is busy with many of them at a time."""
    size = block_size * keys[3]
    for _ in range(left):
        block = _next_block(ends, block, ends.shape[0])
        for plane in (keys, values):
            place = token_address(plane, pages, head, block * block_size)
            for at in range(0, size, RUN):
                simd.prefetch_run(place + at)


@njit
def _gather_blocks(keys, values, pages, head, ends, block, left, block_size, limit, place):  # type: ignore[no-untyped-def]
    """Copy what is visible of the next picked blocks after `block`, as many as a chunk has room for, side by side.

    `left`: picked blocks there are; `limit`: the last token that is visible. Returns the last block, how many are left,
    tokens.
    """
    page_size, row = keys[2], keys[3]
    count = 0
    while left > 0 and count + block_size <= CHUNK:
        block = _next_block(ends, block, ends.shape[0])
        start, stop = block * block_size, min((block + 1) * block_size, limit + 1)
        while start < stop:
            run = min(page_size - start % page_size, stop - start)
            copy_row(token_address(keys, pages, head, start), place[5] + count * row, run * row)
            copy_row(token_address(values, pages, head, start), place[6] + count * row, run * row)
            count += run
            start += run
        left -= 1
    return block, left, count


@njit
def _attend_gathered(ops, seq, head, ends, block, left, block_size, scale, room, thread, place, state, slot):  # type: ignore[no-untyped-def]
    """Let the only token of a range, whose queries are packed, see the next `left` picked blocks after `block`."""
    row, rows = ops.k.shape[3] * 2, ops.q.shape[1] // ops.k.shape[1]
    limits, tables = room.limits[thread], room.tiles[thread].ctypes.data
    keys, values, pages = plane_place(ops.k), plane_place(ops.v), ops.page_table[seq].ctypes.data
    peaks, totals, sums = state_places(state, slot)
    for tile in range(CHUNK // ROWS):
        simd.poke(tables + tile * 8, place[5] + tile * ROWS * row)
        simd.poke(tables + TABLE + tile * 8, place[6] + tile * ROWS * row)
    limit = np.int64(limits[0, 0])
    _fetch_blocks(keys, values, pages, head, ends, block, left, block_size)
    while left > 0:
        block, left, count = _gather_blocks(keys, values, pages, head, ends, block, left, block_size, limit, place)
        pack_values(tables + TABLE, count, row, place[7], place[4])
        for first in range(0, rows, ROWS):
            # All that was gathered is visible: it is as good as the first tokens of the sequence.
            attend_rows(
                place, place[10] + first * row, limits.ctypes.data, limits.shape[1], peaks, totals, sums, tables, 0,
                count, first, min(ROWS, rows - first), scale, row, 0,
            )  # fmt: skip


@njit(nogil=True)
def sparse_items(  # type: ignore[no-untyped-def]
    tickets, frame, q, k, v, pages, sinks, out, lse, scale, v_scale, picked, index_heads, topk, block_size
):
    """Attention over the picked blocks; items as `plan_items` writes them, each times every KV head.

    A part of an item is a part of the blocks that its range picked. Operands as for `open_operands`; `picked`: the
    address of the picks, int32 [index_heads, T, topk].
    """
    ops = open_operands(frame, q, k, v, pages, sinks, out, lse)
    config, items, done = open_work(frame)
    room, state = open_room(frame)
    picks = borrow(picked, (index_heads, frame[0], topk), np.int32)
    heads = ops.k.shape[1]
    group, share = ops.q.shape[1] // heads, picks.shape[0] // heads
    thread = take_ticket(tickets, 7)
    place = room_places(room.bytes[thread].ctypes.data, ops.k.shape[3] * 2)
    limits = room.limits[thread, 0]
    amx.configure(config.ctypes.data)
    while True:
        ticket = take_ticket(tickets, 0)
        item, head = ticket // heads, ticket % heads
        if item >= items.shape[0]:
            break
        seq, token, tokens, part, parts = items[item, 0], items[item, 1], items[item, 2], items[item, 3], items[item, 4]
        slot, base = slot_of(items, item, head, heads, room.bytes.shape[0], thread)
        gathers = tokens == 1 and block_size < CHUNK
        packed = group % ROWS == 0 or gathers
        last = begin_range(ops, seq, token, tokens, head, packed, room, thread, place, state, slot)
        room.marks[thread, 2, 0] = token
        blocks = last // block_size + 1
        ends, stamps = room.lists[thread, :blocks], room.lists[thread, blocks : 2 * blocks]
        entries = room.lists[thread, 2 * blocks :]
        found = _sort_picks(picks, token, tokens, head, share, limits, group, block_size, blocks, ends, stamps, entries)
        start, stop = found * part // parts, found * (part + 1) // parts
        if gathers:
            block = -1
            for _ in range(start):
                block = _next_block(ends, block, blocks)
            _attend_gathered(
                ops, seq, head, ends, block, stop - start, block_size, scale, room, thread, place, state, slot
            )
            stop = 0
        block = _next_block(ends, -1, blocks)
        for number in range(stop):
            following = _next_block(ends, block, blocks)
            if number >= start:
                chosen = entries[ends[block - 1] if block else 0 : ends[block]]
                after = following if following < blocks else -1
                _attend_block(ops, seq, head, block, block_size, after, chosen, scale, room, thread, place, state, slot)
            block = following
        if parts == 1 or take_ticket(done, items[item, 6] * heads + head) == parts - 1:
            finish_range(ops, base, heads, parts, token, tokens, head, scale, v_scale, state)
            done[items[item, 6] * heads + head] = 0
    amx.release()


@njit(nogil=True, cache=True)
def launch_sparse_items(box, *args):  # type: ignore[no-untyped-def]
    """Run `sparse_items` on a team."""
    return share(box, sparse_items, args)


@njit
def pick_and_attend(  # type: ignore[no-untyped-def]
    box, scoring, frame, index_q, index_k, index_pages, index_scale, scores, picks, heads, topk, block_size,
    init_blocks, local_blocks, q, k, v, pages, sinks, out, lse, scale, v_scale,
):  # fmt: skip
    """`pick_blocks`, then `sparse_items`, on a team; all tensors by address."""
    failed = pick_blocks(
        box, scoring, index_q, index_k, index_pages, block_size, index_scale, scores, init_blocks, local_blocks, picks,
        topk,
    )  # fmt: skip
    return failed | share(
        box, sparse_items,
        (frame, q, k, v, pages, sinks, out, lse, scale, v_scale, picks, heads, topk, block_size),
    )  # fmt: skip


@njit(nogil=True, cache=True)
def launch_picked(box, *args):  # type: ignore[no-untyped-def]
    """Run `pick_and_attend`."""
    return pick_and_attend(box, *args)

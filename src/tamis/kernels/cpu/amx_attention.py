"""Paged attention on matrix tiles, dense and block-sparse, decode and prefill: bf16 planes, queries and outputs.

A work item is a range of query tokens of one sequence, one KV head, and a part of their context (all of it, unless
there would be too few items). Its rows, token by token and in a token query head by query head, own a slot of state
(weighted sums, peak, total), so that a block of keys and values is opened once for all rows of the range that see it.
Where a context is cut into parts, whoever finishes last joins them.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu import amx, simd
from tamis.kernels.cpu.amx_room import open_operands, open_room, open_work, room_places, slot_of, state_places
from tamis.kernels.cpu.amx_tiles import (
    CHUNK,
    LINE,
    ROWS,
    TABLE,
    chunk_logits,
    copy_row,
    find_ahead,
    find_tiles,
    hide_tokens,
    pack_queries,
    pack_values,
    plane_place,
    shrink_add,
    soften,
    tile_logits,
    weigh_values,
)
from tamis.kernels.cpu.lowfloat import to_float
from tamis.kernels.cpu.threads import share, take_ticket

NEG_INF = np.float32(-np.inf)
LOG2E = np.float32(np.log2(np.e))
LN2 = np.float32(np.log(2.0))
EVERYTHING = np.iinfo(np.int32).max


@njit
def _clean_values(v, page_table, seq, head, start, count, clean):  # type: ignore[no-untyped-def]
    """Copy values to `clean`, zeros for infinities and NaN; whether there were any."""
    page_size = v.shape[2]
    found = False
    for t in range(count):
        source = v[page_table[seq, (start + t) // page_size], head, (start + t) % page_size]
        target = clean[t]
        for d in range(v.shape[3]):
            bad = (source[d] & np.uint16(0x7F80)) == np.uint16(0x7F80)
            target[d] = np.uint16(0) if bad else source[d]
            found |= bad
    return found


@njit
def open_chunk(keys, values, pages, head, start, count, tables, place):  # type: ignore[no-untyped-def]
    """Find a chunk's keys and pack its values; tables: four TABLEs, as `Room.tiles`."""
    find_tiles(keys, pages, head, start, count, place[5], tables)
    find_tiles(values, pages, head, start, count, place[6], tables + TABLE)
    pack_values(tables + TABLE, count, values[3], place[7], place[4])


@njit
def open_partly(ops, keys, pages, seq, head, start, count, tables, place, clean):  # type: ignore[no-untyped-def]
    """As `open_chunk` where some row does not see all of the chunk: a hidden token's weight is 0, but 0 * NaN is not.

    Infinities and NaN among the values are left out; returns whether there were any, for `spoil` to make good.
    """
    row = keys[3]
    find_tiles(keys, pages, head, start, count, place[5], tables)
    spoiled = _clean_values(ops.v, ops.page_table, seq, head, start, count, clean)
    for i in range(CHUNK // ROWS):
        simd.poke(tables + TABLE + i * 8, clean.ctypes.data + i * ROWS * row)
    pack_values(tables + TABLE, count, row, place[7], place[4])
    return spoiled


@njit
def look_ahead(keys, values, pages, head, start, count, spare, tables):  # type: ignore[no-untyped-def]
    """Note where the next chunk lies, so that it is fetched while this one is worked on; count 0: there is none."""
    find_ahead(keys, pages, head, start, count, spare, tables + 2 * TABLE)
    find_ahead(values, pages, head, start, count, spare, tables + 3 * TABLE)


@njit
def spoil(ops, seq, head, start, count, marks, used, sums):  # type: ignore[no-untyped-def]
    """Add the infinities and NaN among a chunk's values to the rows that see them."""
    page_size = ops.v.shape[2]
    for t in range(count):
        source = ops.v[ops.page_table[seq, (start + t) // page_size], head, (start + t) % page_size]
        for d in range(source.shape[0]):
            if (source[d] & np.uint16(0x7F80)) != np.uint16(0x7F80):
                continue
            for i in range(used):
                if marks[0, i] >= start + t:
                    sums[marks[1, i], d] += to_float(source[d])


@njit
def attend_tile(place, queries, limits, peaks, totals, tables, start, seen, low, scale, row, fetch):  # type: ignore[no-untyped-def]
    """Let 16 rows see `seen` tokens of the open chunk: place[2] and place[3] become weights and their sums.

    limits, peaks and totals are the rows' own, in a row; place[11] receives the factors for what they had summed.
    """
    if fetch and seen == CHUNK:
        chunk_logits(queries, tables, row, place[0], tables + 2 * TABLE, place[11])
    else:
        tile_logits(queries, tables, seen, row, place[0])
    if low < start + seen - 1:
        hide_tokens(place[0], seen, start, limits)
    soften(place[0], seen, scale, peaks, totals, place[11], place[1], place[2], tables + 3 * TABLE, fetch)
    weigh_values(place[2], place[4], seen, row, place[3])


@njit
def attend_rows(  # type: ignore[no-untyped-def]
    place, queries, limits, apart, peaks, totals, sums, tables, start, count, first, used, scale, row, fetch
):
    """Let rows `first` to `first + used - 1` of a range see the open chunk; `first` is a multiple of 16, `used` <= 16.

    Limits, peaks, totals and sums are those of the range's row 0; `apart` rows on are the tiles' least limits, then the
    most.
    """
    low = simd.peek32(limits + (apart + first // ROWS) * 4)
    high = simd.peek32(limits + (2 * apart + first // ROWS) * 4)
    seen = min(count, high + 1 - start)
    if seen <= 0:
        return
    at = first * 4
    attend_tile(place, queries, limits + at, peaks + at, totals + at, tables, start, seen, low, scale, row, fetch)
    total = sums + first * 2 * row
    for i in range(used):
        shrink_add(total + i * 2 * row, place[3] + i * 2 * row, place[11] + i * 4, row)


@njit
def attend_scattered(  # type: ignore[no-untyped-def]
    place, queries, marks, lanes, limits, peaks, totals, sums, tables, start, count, used, scale, row, fetch
):
    """As `attend_rows` for up to 16 rows anywhere in the range, named in marks[1]; limits, peaks, totals: arrays."""
    low, high = EVERYTHING, -1
    for i in range(used):
        r = marks[1, i]
        lanes[0, i], lanes[1, i], marks[0, i] = peaks[r], totals[r], limits[r]
        low, high = min(low, limits[r]), max(high, limits[r])
    seen = min(count, high + 1 - start)
    if seen <= 0:
        return
    lane, limit = lanes.ctypes.data, marks.ctypes.data
    attend_tile(place, queries, limit, lane, lane + LINE, tables, start, seen, low, scale, row, fetch)
    for i in range(used):
        r = np.int64(marks[1, i])
        peaks[r], totals[r] = lanes[0, i], lanes[1, i]
        shrink_add(sums + r * 2 * row, place[3] + i * 2 * row, place[11] + i * 4, row)


@njit
def spoil_rows(ops, seq, head, start, count, first, used, marks, limits, sums):  # type: ignore[no-untyped-def]
    """`spoil` for rows in a row."""
    for i in range(used):
        marks[0, i], marks[1, i] = limits[first + i], first + i
    spoil(ops, seq, head, start, count, marks, used, sums)


@njit
def gather_rows(ops, token, head, marks, used, gathered):  # type: ignore[no-untyped-def]
    """Copy the query rows named in marks[1], of the range that begins at `token`, to 16 rows in a row; zeros after."""
    heads, dim = ops.q.shape[1], ops.q.shape[2]
    group = heads // ops.k.shape[1]
    row = dim * 2
    for i in range(used):
        r = marks[1, i]
        source = ops.q.ctypes.data + ((token + r // group) * heads + head * group + r % group) * row
        copy_row(source, gathered + i * row, row)
    for at in range(used * row, ROWS * row, LINE):
        simd.store(gathered + at, simd.splat(np.float32(0)))


@njit
def begin_range(ops, seq, token, tokens, head, packed, room, thread, place, state, slot):  # type: ignore[no-untyped-def]
    """Reset the state of a range's rows, set their limits and, if asked, pack their queries; the largest limit."""
    group = ops.q.shape[1] // ops.k.shape[1]
    rows, row = tokens * group, ops.k.shape[3] * 2
    padded = (rows + ROWS - 1) // ROWS * ROWS
    state.sums[slot, :padded], state.peaks[slot, :padded], state.totals[slot, :padded] = 0, NEG_INF, 0
    for at in range(0, row, LINE):
        simd.store(place[7] + at, simd.splat(np.float32(0)))
    marks = room.marks[thread]
    last = -1
    for first in range(0, rows, ROWS):
        low, high = EVERYTHING, -1
        for r in range(first, min(first + ROWS, rows)):
            limit = min(ops.positions[token + r // group], ops.seq_lens[seq] - 1)
            room.limits[thread, 0, r] = limit
            low, high = min(low, limit), max(high, limit)
        room.limits[thread, 1, first // ROWS], room.limits[thread, 2, first // ROWS] = low, high
        last = max(last, high)
        if packed:
            used = _name_rows(marks, first, rows)
            gather_rows(ops, token, head, marks, used, place[8])
            pack_queries(place[8], row, place[10] + first * row)
    return last


@njit
def _name_rows(marks, first, rows):  # type: ignore[no-untyped-def]
    used = min(ROWS, rows - first)
    for i in range(used):
        marks[1, i] = first + i
    return used


@njit
def finish_range(ops, slot, step, parts, token, tokens, head, scale, v_scale, state):  # type: ignore[no-untyped-def]
    """Join the parts of a range's rows (slots `slot`, `slot + step`, ...) with the sinks and write the output."""
    heads, dim = ops.q.shape[1], ops.q.shape[2]
    group = heads // ops.k.shape[1]
    for r in range(tokens * group):
        t, h = token + r // group, head * group + r % group
        sink = ops.sinks[h] * LOG2E if ops.sinks.shape[0] else NEG_INF
        peak = sink
        for part in range(parts):
            peak = max(peak, state.peaks[slot + part * step, r] * scale)
        base = peak if peak != NEG_INF else np.float32(0)
        total = np.float32(np.exp2(sink - base))
        for part in range(parts):
            at = slot + part * step
            weight = np.float32(np.exp2(state.peaks[at, r] * scale - base))
            state.peaks[at, r] = weight
            total += weight * state.totals[at, r]
        ops.lse[t, h] = (base + np.float32(np.log2(total))) * LN2 if total != 0 else NEG_INF
        share = v_scale / total if total != 0 else np.float32(0)
        target = ops.out[t, h].ctypes.data
        for d in range(0, dim, ROWS):
            line = simd.splat(np.float32(0))
            for part in range(parts):
                at = slot + part * step
                sums = state.sums[at, r].ctypes.data + d * 4
                line = simd.fma(simd.load(sums), simd.splat(np.float32(state.peaks[at, r] * share)), line)
            simd.store_bf16(target + d * 2, line)


@njit(nogil=True)
def dense_items(tickets, frame, q, k, v, pages, sinks, out, lse, scale, v_scale):  # type: ignore[no-untyped-def]
    """Causal attention over whole contexts; items as `plan_items` writes them, each times every KV head.

    Operands as for `open_operands`.
    """
    ops = open_operands(frame, q, k, v, pages, sinks, out, lse)
    config, items, done = open_work(frame)
    room, state = open_room(frame)
    heads, row = ops.k.shape[1], ops.k.shape[3] * 2
    group = ops.q.shape[1] // heads
    thread = take_ticket(tickets, 7)
    place = room_places(room.bytes[thread].ctypes.data, row)
    limits, apart = room.limits[thread].ctypes.data, room.limits.shape[2]
    tables, marks, clean = room.tiles[thread].ctypes.data, room.marks[thread], room.clean[thread]
    keys, values = plane_place(ops.k), plane_place(ops.v)
    amx.configure(config.ctypes.data)
    while True:
        ticket = take_ticket(tickets, 0)
        item, head = ticket // heads, ticket % heads
        if item >= items.shape[0]:
            break
        seq, token, tokens, part, parts = items[item, 0], items[item, 1], items[item, 2], items[item, 3], items[item, 4]
        slot, base = slot_of(items, item, head, heads, room.bytes.shape[0], thread)
        rows = tokens * group
        end = begin_range(ops, seq, token, tokens, head, True, room, thread, place, state, slot) + 1
        peaks, totals, sums = state_places(state, slot)
        table = ops.page_table[seq].ctypes.data
        chunks = (end + CHUNK - 1) // CHUNK
        low = EVERYTHING
        for tile in range((rows + ROWS - 1) // ROWS):
            low = min(low, room.limits[thread, 1, tile])
        for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
            start = chunk * CHUNK
            count = min(CHUNK, end - start)
            stop = min(end, chunks * (part + 1) // parts * CHUNK)
            look_ahead(keys, values, table, head, start + CHUNK, stop - start - CHUNK, place[6], tables)
            spoiled = False
            if low >= start + count - 1:
                open_chunk(keys, values, table, head, start, count, tables, place)
            else:
                spoiled = open_partly(ops, keys, table, seq, head, start, count, tables, place, clean)
            for first in range(0, rows, ROWS):
                used, fetch = min(ROWS, rows - first), row if first == 0 else 0
                attend_rows(
                    place, place[10] + first * row, limits, apart, peaks, totals, sums, tables, start, count, first,
                    used, scale, row, fetch,
                )  # fmt: skip
                if spoiled:
                    spoil_rows(
                        ops, seq, head, start, count, first, used, marks, room.limits[thread, 0], state.sums[slot]
                    )
        if parts == 1 or take_ticket(done, items[item, 6] * heads + head) == parts - 1:
            finish_range(ops, base, heads, parts, token, tokens, head, scale, v_scale, state)
            done[items[item, 6] * heads + head] = 0
    amx.release()


@njit(nogil=True, cache=True)
def launch_dense_items(box, *args):  # type: ignore[no-untyped-def]
    """Run `dense_items` on a team."""
    return share(box, dense_items, args)

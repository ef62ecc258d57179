"""Block scores and block selection (facts.md section 1)."""

import numpy as np
from numba import njit

from tamis.kernels.cpu.lowfloat import FAST, fast_exp2
from tamis.kernels.cpu.rows import TILE, load_tile, tile_logits
from tamis.kernels.cpu.threads import share, take_ticket

NEG_INF = np.float32(-np.inf)
LN2 = np.float32(np.log(2.0))
LOG2E = np.float32(1 / np.log(2.0))
STRIDE = 64
"""Block scores looked at together."""


@njit(fastmath=FAST)
def _largest(line, count):  # type: ignore[no-untyped-def]
    """The largest of count numbers; NaN counts as -inf."""
    best = NEG_INF
    for t in range(count):
        best = max(best, line[t]) if line[t] == line[t] else best
    return best


@njit(fastmath=FAST)
def _sum_exp(line, count, peak):  # type: ignore[no-untyped-def]
    """Sum of exp(line - peak) for a finite peak; NaN counts as -inf."""
    total = np.float32(0)
    for t in range(count):
        total += fast_exp2((line[t] - peak) * LOG2E) if line[t] == line[t] else np.float32(0)
    return total


@njit(fastmath=FAST)
def _any_above(line, start, stop, floor):  # type: ignore[no-untyped-def]
    """Whether one of line[start:stop] is larger than `floor`; NaN is not."""
    above = 0
    for i in range(start, stop):
        above += 1 if line[i] > floor else 0
    return above > 0


@njit(nogil=True, fastmath=FAST)
def score_tiles(tickets, items, q, k, page_table, positions, block_size, q_scale, k_scale, use_lse, scores):  # type: ignore[no-untyped-def]
    """Work items int32 [n, 5]: sequence, first query token, tokens, first block, end block. q [T, Hi, Di] fp32.

    Writes scores fp32 [Hi, T, NB] of blocks with a visible token; the caller has filled the rest with -inf.
    """
    heads, dim = q.shape[1], q.shape[2]
    most = 0
    for item in range(items.shape[0]):
        most = max(most, items[item, 2])
    queries, keys = np.empty((most * heads, dim), np.float32), np.empty((TILE, dim), np.float32)
    logits = np.empty((most * heads, TILE), np.float32)
    while True:
        ticket = take_ticket(tickets, 0)
        if ticket >= items.shape[0]:
            return
        seq, token, count, block, block_end = items[ticket]
        rows = count * heads
        for row in range(rows):
            for d in range(dim):
                queries[row, d] = q[token + row // heads, row % heads, d] * q_scale
        first = positions[token]
        end = min(block_end * block_size, first + count)
        for at in range(block * block_size, end, TILE):
            # A tile ends with its block, so that it counts for one block only.
            place = at
            while place < min(at + TILE, end):
                size = min(min(at + TILE, end), (place // block_size + 1) * block_size) - place
                load_tile(k, page_table, seq, 0, place, size, k_scale, keys)
                tile_logits(queries, rows, keys, size, logits)
                _merge(logits, rows, heads, token, first, place, size, place // block_size, use_lse, scores)
                place += size


@njit(nogil=True, cache=True)
def launch_score_tiles(box, *args):  # type: ignore[no-untyped-def]
    """Run `score_tiles` on a team."""
    return share(box, score_tiles, args)


@njit(fastmath=FAST)
def _merge(logits, rows, heads, token, first, start, count, block, use_lse, scores):  # type: ignore[no-untyped-def]
    """Join the logits of one tile into the scores of its block."""
    for row in range(rows):
        seen = min(count, first + row // heads + 1 - start)
        if seen <= 0:
            continue
        line = logits[row]
        t, h = token + row // heads, row % heads
        before = scores[h, t, block]
        best = _largest(line, seen)
        if not use_lse or not np.isfinite(best) or not (np.isfinite(before) or before == NEG_INF):
            scores[h, t, block] = max(before, best)
            continue
        peak = max(before, best)
        total = _sum_exp(line, seen, peak)
        if before != NEG_INF:
            total += fast_exp2((before - peak) * LOG2E)
        scores[h, t, block] = peak + np.float32(np.log(total))


@njit
def _keep_best(best, ids, order, count, room):  # type: ignore[no-untyped-def]
    """Keep the `room` best of `count` candidates, in their order and of equal ones the first; returns the least score.

    The score that is just good enough is found by halving the range of the scores' bits, which sort as scores do once
    those of negative ones are turned round: a few passes over numbers in a row, whatever `room` is.
    """
    bits = best.view(np.int32)
    low, high = np.int64(np.iinfo(np.int32).max), np.int64(np.iinfo(np.int32).min)
    for i in range(count):
        order[i] = bits[i] ^ ((bits[i] >> 31) & 0x7FFFFFFF)
        low, high = min(low, order[i]), max(high, order[i])
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = 0
        for i in range(count):
            reached += 1 if order[i] >= middle else 0
        if reached >= room:
            low = middle
        else:
            high = middle - 1
        if reached == room:
            break
    equal = room
    for i in range(count):
        equal -= 1 if order[i] > low else 0
    kept = 0
    least = np.float32(np.inf)
    for i in range(count):
        if order[i] < low or (order[i] == low and equal == 0):
            continue
        equal -= 1 if order[i] == low else 0
        best[kept], ids[kept] = best[i], ids[i]
        least = min(least, best[kept])
        kept += 1
    return least


@njit(nogil=True)
def select(tickets, scores, positions, block_size, init_blocks, local_blocks, picks):  # type: ignore[no-untyped-def]
    """picks int32 [Hi, T, topk] from scores fp32 [Hi, T, NB]; one work item a head and token.

    Candidates are collected in order; when there are twice as many as can be kept, the best are, and later ones must be
    better than all of these to come in. So ties stay with the lowest id.
    """
    heads, tokens, blocks = scores.shape
    most = 2 * picks.shape[2] + STRIDE
    best, ids, order = np.empty(most, np.float32), np.empty(most, np.int32), np.empty(most, np.int32)
    while True:
        ticket = take_ticket(tickets, 0)
        if ticket >= heads * tokens:
            return
        head, token = ticket // tokens, ticket % tokens
        own = positions[token] // block_size if positions[token] >= 0 else -1
        line, chosen = scores[head, token], picks[head, token]
        seen = min(blocks, own + 1)
        early, late = min(init_blocks, seen), max(own - local_blocks + 1, 0)
        room = picks.shape[2] - early - max(seen - max(late, early), 0)
        found, floor = 0, NEG_INF
        last = min(late, seen) if room > 0 else early
        for start in range(early, last, STRIDE):
            stop = min(start + STRIDE, last)
            # In a long context few blocks get in: whole strides are passed over at vector speed.
            if not _any_above(line, start, stop, floor):
                continue
            for block in range(start, stop):
                if line[block] > floor:
                    best[found], ids[found] = line[block] + np.float32(0), block  # -0 is 0
                    found += 1
            if found > most - STRIDE:
                floor, found = _keep_best(best, ids, order, found, room), room
        if found > room > 0:
            _keep_best(best, ids, order, found, room)
            found = room
        _write_picks(chosen, ids, found, early, max(late, early), seen)


@njit(nogil=True, cache=True)
def launch_select(box, *args):  # type: ignore[no-untyped-def]
    """Run `select` on a team."""
    return share(box, select, args)


@njit
def _write_picks(chosen, ids, found, early, late, seen):  # type: ignore[no-untyped-def]
    """Init blocks, the found ones (ascending), local blocks; then -1."""
    count = 0
    for block in range(early):
        chosen[count] = block
        count += 1
    for i in range(found):
        chosen[count] = ids[i]
        count += 1
    for block in range(late, seen):
        chosen[count] = block
        count += 1
    chosen[count:] = -1

"""Paged attention for any storage type: dense and block-sparse, decode and prefill, in fp32.

A work item is some query tokens of one sequence, one KV head and a part of the context. A part leaves its softmax
unfinished (weighted sum, peak, total) in a place of its own; `finish` joins the parts of each query. Logits are in base
2: the query is multiplied by log2(e) / sqrt(dim) beforehand.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu.lowfloat import FAST, fast_exp2
from tamis.kernels.cpu.rows import TILE, add_values, load_tile, tile_logits
from tamis.kernels.cpu.threads import share, take_ticket

NEG_INF = np.float32(-np.inf)
LN2 = np.float32(np.log(2.0))


@njit(fastmath=FAST)
def _attend_tile(q, rows, group, first, keys, values, start, count, work, logits, peaks, totals):  # type: ignore[no-untyped-def]
    """Let rows (tokens from position `first`, `group` rows each) see tokens start to start + count - 1."""
    tile_logits(q, rows, keys, count, logits)
    for row in range(rows):
        seen = min(count, first + row // group + 1 - start)
        if seen <= 0:
            continue
        line = logits[row]
        peak = peaks[row]
        for t in range(seen):
            peak = max(peak, line[t])
        base = peak if peak != NEG_INF else np.float32(0)
        if peak > peaks[row]:
            shrink = fast_exp2(peaks[row] - base)
            totals[row] *= shrink
            for d in range(work.shape[1]):
                work[row, d] *= shrink
            peaks[row] = peak
        total = np.float32(0)
        for t in range(seen):
            line[t] = fast_exp2(line[t] - base)
            total += line[t]
        totals[row] += total
        add_values(line, values, seen, work[row])


@njit(fastmath=FAST)
def _load_queries(q, token, count, head, group, scale, rows):  # type: ignore[no-untyped-def]
    """rows[i * group + g] = q[token + i, head * group + g] * scale."""
    for i in range(count):
        for g in range(group):
            for d in range(q.shape[2]):
                rows[i * group + g, d] = q[token + i, head * group + g, d] * scale


@njit(fastmath=FAST)
def _store(work, peaks, totals, token, count, head, group, part, sums, tops, masses):  # type: ignore[no-untyped-def]
    """Leave rows where `finish` looks for them: [T, Hq, parts(, D)]."""
    for row in range(count * group):
        t, h = token + row // group, head * group + row % group
        tops[t, h, part], masses[t, h, part] = peaks[row], totals[row]
        for d in range(work.shape[1]):
            sums[t, h, part, d] = work[row, d]


@njit(nogil=True, fastmath=FAST)
def dense_parts(  # type: ignore[no-untyped-def]
    tickets, items, q, k, v, page_table, positions, q_scale, k_scale, v_scale, sums, tops, masses
):
    """Work items int32 [n, 6]: sequence, first query token, tokens, first context token, its end, part; x Hkv heads."""
    heads, dim = k.shape[1], k.shape[3]
    group = q.shape[1] // heads
    most = 0
    for item in range(items.shape[0]):
        most = max(most, items[item, 2])
    rows = most * group
    queries, work = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    keys, values = np.empty((TILE, dim), np.float32), np.empty((TILE, dim), np.float32)
    logits = np.empty((rows, TILE), np.float32)
    peaks, totals = np.empty(rows, np.float32), np.empty(rows, np.float32)
    while True:
        ticket = take_ticket(tickets, 0)
        if ticket >= items.shape[0] * heads:
            return
        seq, token, count, start, end, part = items[ticket // heads]
        head = ticket % heads
        _load_queries(q, token, count, head, group, q_scale, queries)
        work[:], peaks[:], totals[:] = 0, NEG_INF, 0
        first = positions[token]
        end = min(end, first + count)
        for at in range(start, end, TILE):
            size = min(TILE, end - at)
            load_tile(k, page_table, seq, head, at, size, k_scale, keys)
            load_tile(v, page_table, seq, head, at, size, v_scale, values)
            _attend_tile(queries, count * group, group, first, keys, values, at, size, work, logits, peaks, totals)
        _store(work, peaks, totals, token, count, head, group, part, sums, tops, masses)


@njit(nogil=True, cache=True)
def launch_dense_parts(box, *args):  # type: ignore[no-untyped-def]
    """Run `dense_parts` on a team."""
    return share(box, dense_parts, args)


@njit(fastmath=FAST)
def picked_blocks(picks, token, head, share, last, blocks):  # type: ignore[no-untyped-def]
    """The union of what `share` index heads of a KV head picked, ascending, each once, none past `last`; its size."""
    count = 0
    for index_head in range(head * share, (head + 1) * share):
        for i in range(picks.shape[2]):
            block = picks[index_head, token, i]
            if block < 0 or block > last:
                continue
            at = count
            while at > 0 and blocks[at - 1] > block:
                at -= 1
            if at > 0 and blocks[at - 1] == block:
                continue
            for j in range(count, at, -1):
                blocks[j] = blocks[j - 1]
            blocks[at] = block
            count += 1
    return count


@njit(nogil=True, fastmath=FAST)
def sparse_parts(  # type: ignore[no-untyped-def]
    tickets, token_seq, q, k, v, picks, page_table, seq_lens, positions, block_size, parts,
    q_scale, k_scale, v_scale, sums, tops, masses,
):  # fmt: skip
    """Work items: query token x KV head x part of its picked blocks. token_seq int32 [T]: -1 where nothing is to do."""
    heads, dim = k.shape[1], k.shape[3]
    group, share = q.shape[1] // heads, picks.shape[0] // heads
    queries, work = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
    keys, values = np.empty((TILE, dim), np.float32), np.empty((TILE, dim), np.float32)
    logits = np.empty((group, TILE), np.float32)
    peaks, totals = np.empty(group, np.float32), np.empty(group, np.float32)
    blocks = np.empty(share * picks.shape[2] + 1, np.int32)
    while True:
        ticket = take_ticket(tickets, 0)
        if ticket >= q.shape[0] * heads * parts:
            return
        token, head, part = ticket // (heads * parts), ticket // parts % heads, ticket % parts
        seq = token_seq[token]
        work[:], peaks[:], totals[:] = 0, NEG_INF, 0
        if seq >= 0:
            _load_queries(q, token, 1, head, group, q_scale, queries)
            first = min(positions[token], seq_lens[seq] - 1)
            found = picked_blocks(picks, token, head, share, first // block_size, blocks)
            for place in range(found * part // parts, found * (part + 1) // parts):
                end = min((blocks[place] + 1) * block_size, first + 1)
                for at in range(blocks[place] * block_size, end, TILE):
                    size = min(TILE, end - at)
                    load_tile(k, page_table, seq, head, at, size, k_scale, keys)
                    load_tile(v, page_table, seq, head, at, size, v_scale, values)
                    _attend_tile(queries, group, group, first, keys, values, at, size, work, logits, peaks, totals)
        _store(work, peaks, totals, token, 1, head, group, part, sums, tops, masses)


@njit(nogil=True, cache=True)
def launch_sparse_parts(box, *args):  # type: ignore[no-untyped-def]
    """Run `sparse_parts` on a team."""
    return share(box, sparse_parts, args)


@njit(nogil=True, fastmath=FAST)
def finish(tickets, parts_of, sums, tops, masses, sinks, out, lse):  # type: ignore[no-untyped-def]
    """Join the parts of each query row: out [T, Hq, D], lse [T, Hq] (natural log). sinks [Hq], or [0] for none.

    parts_of int32 [T]: how many parts a token has; 0 gives zeros and -inf.
    """
    tokens, heads, dim = out.shape
    step = 4
    while True:
        first = take_ticket(tickets, 0) * step
        if first >= tokens:
            return
        for token in range(first, min(first + step, tokens)):
            for head in range(heads):
                peak = sinks[head] / LN2 if sinks.shape[0] else NEG_INF
                for part in range(parts_of[token]):
                    peak = max(peak, tops[token, head, part])
                base = peak if peak != NEG_INF else np.float32(0)
                total = fast_exp2(sinks[head] / LN2 - base) if sinks.shape[0] else np.float32(0)
                row = out[token, head]
                row[:] = 0
                for part in range(parts_of[token]):
                    weight = fast_exp2(tops[token, head, part] - base)
                    total += weight * masses[token, head, part]
                    if weight > 0 or weight != weight:
                        for d in range(dim):
                            row[d] += weight * sums[token, head, part, d]
                lse[token, head] = (base + np.log2(total)) * LN2 if total > 0 or total != total else NEG_INF
                if total != 0:
                    for d in range(dim):
                        row[d] /= total


@njit(nogil=True, cache=True)
def launch_finish(box, *args):  # type: ignore[no-untyped-def]
    """Run `finish` on a team."""
    return share(box, finish, args)

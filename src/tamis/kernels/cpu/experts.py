"""Gated MLPs of few rows, with routed experts or without, in two kernels: norm, router, gate and up; then down.

Kernels of a `ThreadTeam`. A token's experts are its *pairs* (token, slot), number token * topk + slot; pairs sorted by
expert let tokens that chose the same expert share its weights. Weights come as in `dots.py`, all experts in one matrix,
one below the other; the shared expert's are those of a plain MLP where there is no router.
"""

import math

import numpy as np
from numba import njit

from tamis.kernels.cpu.dots import ROWS, dot_rows, group_sums
from tamis.kernels.cpu.elements import gated, sigmoid
from tamis.kernels.cpu.lowfloat import FAST
from tamis.kernels.cpu.matvec import THREAD, WORK, carve, carve_tile, prepare
from tamis.kernels.cpu.threads import share, take_ticket
from tamis.kernels.quant import GROUP


@njit(fastmath=FAST)
def route(rows, router, bias, scaling, chosen, shares):  # type: ignore[no-untyped-def]
    """The experts of each row: ids in chosen [T, k], weights in shares [T, k]."""
    experts, width = router.shape
    scores, keys = np.empty(experts, np.float32), np.empty(experts, np.float32)
    for t in range(rows.shape[0]):
        for e in range(experts):
            total = np.float32(0)
            row, weights = rows[t], router[e]
            for i in range(width):
                total += row[i] * weights[i]
            scores[e] = sigmoid(total)
            keys[e] = scores[e] + bias[e]
        mass = np.float32(0)
        for slot in range(chosen.shape[1]):
            best = -1
            for e in range(experts):
                taken = False
                for earlier in range(slot):
                    taken = taken or chosen[t, earlier] == e
                # NaN goes first, so that every slot gets an expert and the NaN reaches the result.
                if not taken and (
                    best < 0 or keys[e] > keys[best] or (keys[e] != keys[e] and keys[best] == keys[best])
                ):
                    best = e
            chosen[t, slot] = best
            shares[t, slot] = scores[best]
            mass += scores[best]
        for slot in range(chosen.shape[1]):
            shares[t, slot] *= scaling / mass


@njit(fastmath=FAST)
def sort_pairs(chosen, pairs, starts, hit):  # type: ignore[no-untyped-def]
    """Sort pairs by expert; returns how many experts were hit, `hit` which, `starts` where the pairs of each begin."""
    tokens, topk = chosen.shape
    hits, placed = 0, 0
    # Few pairs: looking for the next larger expert again and again is cheaper than counting over all experts.
    last = -1
    while placed < tokens * topk:
        following = 1 << 62
        for t in range(tokens):
            for slot in range(topk):
                if last < chosen[t, slot] < following:
                    following = chosen[t, slot]
        starts[hits], hit[hits] = placed, following
        for t in range(tokens):
            for slot in range(topk):
                if chosen[t, slot] == following:
                    pairs[placed] = t * topk + slot
                    placed += 1
        hits, last = hits + 1, following
    starts[hits] = placed
    return hits


@njit(fastmath=FAST)
def gate_tile(  # type: ignore[no-untyped-def]
    weights, base, inter, start, stop, bias, inputs, x_rows, out_rows, first, count, tile, gate, out
):  # fmt: skip
    """out[out_rows[first + c], start:stop]: gates in rows base + i, ups in rows base + inter + i of the weights."""
    values, scales, offsets = weights
    rows, sums = inputs
    multipliers, shifts, gates, ups = tile
    clamped, alpha, limit = gate
    up = base + inter
    dot_rows(
        values, scales, offsets, base + start, base + stop, rows, sums, x_rows, first, count, multipliers, shifts, gates
    )
    dot_rows(values, scales, offsets, up + start, up + stop, rows, sums, x_rows, first, count, multipliers, shifts, ups)
    for c in range(count):
        target = out_rows[first + c]
        if bias.shape[0]:
            for i in range(stop - start):
                gates[c, i] += bias[start + i]
                ups[c, i] += bias[inter + start + i]
        for i in range(stop - start):
            out[target, start + i] = gated(gates[c, i], ups[c, i], clamped, alpha, limit)


@njit(nogil=True, fastmath=FAST)
def gate_up(  # type: ignore[no-untyped-def]
    tickets, x, weight, eps, router, router_bias, scaling, routed, shared, bias, gate, chosen, shares, inner,
    shared_inner, room, chunk,
):  # fmt: skip
    """Fill chosen, shares [T, k], inner [T * k, I] and shared_inner [T, Is] from norm(x).

    routed, shared: (values, scales, offsets) of gate and up. k = 0 or Is = 0 where there is none. A work item is
    `chunk` gates and their ups.
    """
    thread = take_ticket(tickets, THREAD)
    rows, sums, multipliers, shifts, rest = prepare(room[thread], x, weight, eps)
    tokens, topk = chosen.shape
    gates, at = carve(rest, 0, tokens, chunk)
    ups, _ = carve(rest, at, tokens, chunk)
    tile = (multipliers, shifts, gates, ups)
    # Every thread routes for itself: that is cheaper than to wait for one. The first leaves the result for `down`.
    mine, parts = np.empty((tokens, topk), np.int64), np.empty((tokens, topk), np.float32)
    pairs, starts = np.empty(tokens * topk, np.int64), np.empty(tokens * topk + 1, np.int64)
    hit, hits = np.empty(tokens * topk, np.int64), 0
    if topk:
        route(rows, router, router_bias, scaling, mine, parts)
        hits = sort_pairs(mine, pairs, starts, hit)
        if thread == 0:
            # Element by element: assigning to a slice compiles Numba's text of a shape error, for seconds.
            for t in range(tokens):
                for slot in range(topk):
                    chosen[t, slot], shares[t, slot] = mine[t, slot], parts[t, slot]
    token_of = pairs // max(topk, 1)
    everyone = np.arange(tokens)
    inter, shared_width = inner.shape[1], shared_inner.shape[1]
    tiles, shared_tiles = -(-inter // chunk), -(-shared_width // chunk)
    while True:
        item = take_ticket(tickets, WORK)
        if item >= hits * tiles + shared_tiles:
            return
        if item < hits * tiles:
            n, start = item // tiles, item % tiles * chunk
            gate_tile(
                routed, hit[n] * 2 * inter, inter, start, min(start + chunk, inter), bias[:0], (rows, sums), token_of,
                pairs, starts[n], starts[n + 1] - starts[n], tile, gate, inner,
            )  # fmt: skip
        else:
            start = (item - hits * tiles) * chunk
            gate_tile(
                shared, 0, shared_width, start, min(start + chunk, shared_width), bias, (rows, sums), everyone,
                everyone, 0, tokens, tile, gate, shared_inner,
            )  # fmt: skip


@njit(nogil=True, cache=True)
def launch_gate_up(box, *args):  # type: ignore[no-untyped-def]
    """Run `gate_up` on a team."""
    return share(box, gate_up, args)


@njit(fastmath=FAST)
def down_tile(  # type: ignore[no-untyped-def]
    weights, base, start, stop, inputs, rows, first, count, tile, shares, topk, bias, x
):  # fmt: skip
    """x[token, start:stop] += share * (weight rows base + i) . inputs, for inner rows rows[first]...

    Inner row p belongs to token p // topk and has its share in shares [T, topk]; topk 0: to token p, whole, with bias.
    """
    values, scales, offsets = weights
    inner, sums = inputs
    multipliers, shifts, dots = tile
    dot_rows(
        values, scales, offsets, base + start, base + stop, inner, sums, rows, first, count, multipliers, shifts, dots
    )
    for c in range(count):
        pair = rows[first + c]
        token, share = pair, np.float32(1)
        if topk:
            token = pair // topk
            share = shares[token, pair % topk]
        for i in range(stop - start):
            total = share * dots[c, i]
            if bias.shape[0]:
                total += bias[start + i]
            x[token, start + i] += total


def down_room_size(inner: tuple[int, ...], shared_inner: tuple[int, ...], tile: int) -> int:
    """Floats a thread of `down` needs: group sums, a tile's scales and shifts of either kind, and `tile` more.

    The shapes are those of its arguments.
    """
    rows = math.prod(inner) + math.prod(shared_inner)
    return (rows + 2 * ROWS * (inner[1] + shared_inner[1])) // GROUP + tile


@njit(nogil=True, fastmath=FAST)
def down(  # type: ignore[no-untyped-def]
    tickets, chosen, shares, inner, shared_inner, routed, shared, bias, x, room, chunk
):  # fmt: skip
    """x += what `gate_up` left, projected down: experts by their shares, the shared one as it is, plus bias.

    A work item is `chunk` of x's columns, for all tokens and experts.
    """
    tokens, topk = chosen.shape
    width = x.shape[1]
    groups, shared_groups = inner.shape[1] // GROUP, shared_inner.shape[1] // GROUP
    mine = room[take_ticket(tickets, THREAD)]
    sums, at = carve(mine, 0, tokens * topk, groups)
    shared_sums, at = carve(mine, at, tokens, shared_groups)
    multipliers, shifts, at = carve_tile(mine, at, groups)
    shared_multipliers, shared_shifts, at = carve_tile(mine, at, shared_groups)
    dots, _ = carve(mine, at, tokens, chunk)
    group_sums(inner, sums)
    group_sums(shared_inner, shared_sums)
    pairs, starts = np.empty(tokens * topk, np.int64), np.empty(tokens * topk + 1, np.int64)
    hit, everyone = np.empty(tokens * topk, np.int64), np.arange(tokens)
    hits = sort_pairs(chosen, pairs, starts, hit) if topk else 0
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= width:
            return
        stop = min(start + chunk, width)
        for n in range(hits):
            down_tile(
                routed, hit[n] * width, start, stop, (inner, sums), pairs, starts[n], starts[n + 1] - starts[n],
                (multipliers, shifts, dots), shares, topk, bias[:0], x,
            )  # fmt: skip
        if shared_groups:
            down_tile(
                shared, 0, start, stop, (shared_inner, shared_sums), everyone, 0, tokens,
                (shared_multipliers, shared_shifts, dots), shares, 0, bias, x,
            )  # fmt: skip


@njit(nogil=True, cache=True)
def launch_down(box, *args):  # type: ignore[no-untyped-def]
    """Run `down` on a team."""
    return share(box, down, args)

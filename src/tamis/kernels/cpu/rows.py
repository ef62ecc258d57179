"""Steps that the attention kernels share, on one tile of tokens in fp32 scratch.

A tile is at most TILE tokens of one page run. Rows are queries: `tokens x group` of them. What a row sees of a tile is
always its first tokens, because attention is causal, so hidden tokens are left out of the loops instead of masked.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu.lowfloat import FAST, to_float

TILE = 64
"""Tokens a tile: keys, values and logits of a few dozen rows stay in the first-level cache."""


@njit(fastmath=FAST)
def load_tile(plane, page_table, seq, head, start, count, scale, tile):  # type: ignore[no-untyped-def]
    """tile[i] = token start + i of a sequence as fp32 [dim], times scale, for i < count."""
    page_size, dim = plane.shape[2], plane.shape[3]
    at = 0
    while at < count:
        position = start + at
        page, offset = page_table[seq, position // page_size], position % page_size
        run = min(page_size - offset, count - at)
        for i in range(run):
            source, target = plane[page, head, offset + i], tile[at + i]
            for d in range(dim):
                target[d] = to_float(source[d]) * scale
        at += run


@njit(fastmath=FAST)
def tile_logits(q, rows, keys, count, logits):  # type: ignore[no-untyped-def]
    """logits[r, t] = q[r] . keys[t] for r < rows, t < count."""
    dim = q.shape[1]
    for t in range(count):
        key = keys[t]
        row = 0
        while row + 4 <= rows:
            a = b = c = e = np.float32(0)
            q0, q1, q2, q3 = q[row], q[row + 1], q[row + 2], q[row + 3]
            for d in range(dim):
                x = key[d]
                a += q0[d] * x
                b += q1[d] * x
                c += q2[d] * x
                e += q3[d] * x
            logits[row, t], logits[row + 1, t], logits[row + 2, t], logits[row + 3, t] = a, b, c, e
            row += 4
        while row < rows:
            a = np.float32(0)
            q0 = q[row]
            for d in range(dim):
                a += q0[d] * key[d]
            logits[row, t] = a
            row += 1


@njit(fastmath=FAST)
def add_values(weights, values, count, total):  # type: ignore[no-untyped-def]
    """total += sum over t < count of weights[t] * values[t], for one row."""
    dim = total.shape[0]
    t = 0
    while t + 4 <= count:
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
        for d in range(dim):
            total[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])
        t += 4
    while t < count:
        w0, v0 = weights[t], values[t]
        for d in range(dim):
            total[d] += w0 * v0[d]
        t += 1

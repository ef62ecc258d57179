"""Projections of few rows: weights are read once, at the speed of memory, whatever is fused around them.

Kernels of a `ThreadTeam`. Each thread loads (and norms) the activations into fp32 of its own, which costs less than
waiting for one that does it for all, then takes tiles of weight rows. Weights come as in `dots.py`. `room` is fp32
[threads, size]: working memory, see `room_size`.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu.dots import ROWS, dot_rows, group_sums
from tamis.kernels.cpu.elements import finish_head, load_rows, narrow
from tamis.kernels.cpu.lowfloat import FAST, to_float
from tamis.kernels.cpu.threads import NUM_TICKETS, share, take_ticket
from tamis.kernels.quant import GROUP

THREAD = NUM_TICKETS - 1
"""The ticket counter that numbers the threads."""
WORK = 0
"""The ticket counter of the work items."""


def room_size(tokens: int, width: int, tile: int) -> int:
    """Floats a thread needs: activations, their group sums, a tile's scales and shifts, and `tile` more."""
    groups = width // GROUP
    return tokens * (width + groups) + 2 * ROWS * groups + tile


@njit(fastmath=FAST)
def carve(room, start, rows, width):  # type: ignore[no-untyped-def]
    """The part [rows, width] of a thread's room that begins at `start`, and where the next part begins."""
    stop = start + rows * width
    return room[start:stop].reshape(rows, width), stop


@njit(fastmath=FAST)
def carve_tile(room, start, groups):  # type: ignore[no-untyped-def]
    """As `carve`: the multipliers and the shifts that `dot_rows` works with."""
    multipliers, middle = carve(room, start, ROWS, groups)
    shifts, stop = carve(room, middle, ROWS, groups)
    return multipliers, shifts, stop


@njit(fastmath=FAST)
def prepare(room, x, weight, eps):  # type: ignore[no-untyped-def]
    """Load x into a thread's room: activations, their sums, multipliers and shifts of a tile; the room that is left."""
    tokens, width = x.shape
    groups = width // GROUP
    rows, at = carve(room, 0, tokens, width)
    sums, at = carve(room, at, tokens, groups)
    scales, shifts, at = carve_tile(room, at, groups)
    load_rows(x, weight, eps, rows)
    group_sums(rows, sums)
    return rows, sums, scales, shifts, room[at:]


@njit(nogil=True, fastmath=FAST)
def project(tickets, x, weight, eps, values, scales, offsets, bias, out, add, room, chunk):  # type: ignore[no-untyped-def]
    """out [T, outputs] = W norm(x) + bias, or += where `add`; `chunk` weight rows a work item, a multiple of 4."""
    tokens, outputs = out.shape
    rows, sums, multipliers, shifts, rest = prepare(room[take_ticket(tickets, THREAD)], x, weight, eps)
    dots, _ = carve(rest, 0, tokens, chunk)
    order = np.arange(tokens)
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= outputs:
            return
        stop = min(start + chunk, outputs)
        dot_rows(values, scales, offsets, start, stop, rows, sums, order, 0, tokens, multipliers, shifts, dots)
        for t in range(tokens):
            for i in range(stop - start):
                total = dots[t, i]
                if bias.shape[0]:
                    total += bias[start + i]
                if add:
                    total += to_float(out[t, start + i])
                out[t, start + i] = narrow(out, total)


@njit(nogil=True, cache=True)
def launch_project(box, *args):  # type: ignore[no-untyped-def]
    """Run `project` on a team."""
    return share(box, project, args)


@njit(nogil=True, fastmath=FAST)
def project_heads(  # type: ignore[no-untyped-def]
    tickets, x, weight, eps, values, scales, offsets, bias, heads, norms, norm_eps, cos, sin, out, room
):  # fmt: skip
    """Project norm(x), finish each head and put it where it belongs; a work item is one head (see `put_head`)."""
    tokens = x.shape[0]
    rows, sums, multipliers, shifts, rest = prepare(room[take_ticket(tickets, THREAD)], x, weight, eps)
    order = np.arange(tokens)
    while True:
        item = take_ticket(tickets, WORK)
        if item >= heads.shape[0]:
            return
        start, dim = heads[item, 0], heads[item, 1]
        dots, _ = carve(rest, 0, tokens, dim)
        dot_rows(values, scales, offsets, start, start + dim, rows, sums, order, 0, tokens, multipliers, shifts, dots)
        if bias.shape[0]:
            for t in range(tokens):
                for i in range(dim):
                    dots[t, i] += bias[start + i]
        put_head(dots, heads[item], norms, norm_eps, cos, sin, 0, tokens, out)


@njit(nogil=True, cache=True)
def launch_project_heads(box, *args):  # type: ignore[no-untyped-def]
    """Run `project_heads` on a team."""
    return share(box, project_heads, args)


@njit(fastmath=FAST)
def put_head(values, head, norms, eps, cos, sin, first, tokens, out):  # type: ignore[no-untyped-def]
    """Finish one head of tokens first, first + 1... and write it; values fp32 [n, dim], `tokens` those of the step.

    head: its first output, its dim, where its norm begins in `norms` (or -1), whether it rotates, the first output of
    its group, the heads of the group, its number among them. out: [T, heads, dim] of each group, one after the other.
    """
    dim, norm = head[1], head[2]
    weight = norms[norm : norm + dim] if norm >= 0 else norms[:0]
    for t in range(values.shape[0]):
        finish_head(values[t], weight, eps, head[3] != 0, cos[first + t], sin[first + t])
        at = tokens * head[4] + ((first + t) * head[5] + head[6]) * dim
        for i in range(dim):
            out[at + i] = narrow(out, values[t, i])

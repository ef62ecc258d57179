"""Around matrix products of many rows: norms, heads, gates, experts' sums, and quantised weights made dense.

Kernels of a `ThreadTeam`, each one pass over memory where the same steps in torch are ten.
"""

import numpy as np
from numba import njit

from tamis.kernels.cpu.elements import gated, narrow, rms_scale
from tamis.kernels.cpu.lowfloat import FAST, to_float
from tamis.kernels.cpu.matvec import WORK, carve, put_head
from tamis.kernels.cpu.threads import share, take_ticket
from tamis.kernels.quant import GROUP


@njit(nogil=True, fastmath=FAST)
def finish_heads(tickets, projected, heads, norms, norm_eps, cos, sin, out, chunk):  # type: ignore[no-untyped-def]
    """What `project_heads` does after projecting, for many rows: a work item is `chunk` tokens of `projected`."""
    tokens = projected.shape[0]
    widest = 0
    for item in range(heads.shape[0]):
        widest = max(widest, heads[item, 1])
    room = np.empty(widest, np.float32)
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= tokens:
            return
        for t in range(start, min(start + chunk, tokens)):
            for item in range(heads.shape[0]):
                first, dim = heads[item, 0], heads[item, 1]
                values, _ = carve(room, 0, 1, dim)
                for i in range(dim):
                    values[0, i] = to_float(projected[t, first + i])
                put_head(values, heads[item], norms, norm_eps, cos, sin, t, tokens, out)


@njit(nogil=True, cache=True)
def launch_finish_heads(box, *args):  # type: ignore[no-untyped-def]
    """Run `finish_heads` on a team."""
    return share(box, finish_heads, args)


@njit(nogil=True, fastmath=FAST)
def norm_rows(tickets, x, weight, eps, out, chunk):  # type: ignore[no-untyped-def]
    """out[t] = norm(x[t]); a work item is `chunk` rows."""
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= x.shape[0]:
            return
        for t in range(start, min(start + chunk, x.shape[0])):
            source, target = x[t], out[t]
            scale = rms_scale(source, eps)
            for i in range(source.shape[0]):
                target[i] = narrow(out, source[i] * scale * weight[i])


@njit(nogil=True, cache=True)
def launch_norm_rows(box, *args):  # type: ignore[no-untyped-def]
    """Run `norm_rows` on a team."""
    return share(box, norm_rows, args)


@njit(nogil=True, fastmath=FAST)
def gate_rows(tickets, gate_up, clamped, alpha, limit, out, chunk):  # type: ignore[no-untyped-def]
    """out [n, I] from gate_up [n, 2 I] (gates, then ups); a work item is `chunk` rows."""
    inter = out.shape[1]
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= out.shape[0]:
            return
        for t in range(start, min(start + chunk, out.shape[0])):
            gates, ups, target = gate_up[t, :inter], gate_up[t, inter:], out[t]
            for i in range(inter):
                target[i] = narrow(out, gated(to_float(gates[i]), to_float(ups[i]), clamped, alpha, limit))


@njit(nogil=True, cache=True)
def launch_gate_rows(box, *args):  # type: ignore[no-untyped-def]
    """Run `gate_rows` on a team."""
    return share(box, gate_rows, args)


@njit(nogil=True, fastmath=FAST)
def add_rows(tickets, parts, places, shares, x, chunk):  # type: ignore[no-untyped-def]
    """x[t] += sum over j of shares[t, j] * parts[places[t, j]]; a work item is `chunk` tokens."""
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= x.shape[0]:
            return
        for t in range(start, min(start + chunk, x.shape[0])):
            target = x[t]
            for j in range(places.shape[1]):
                source, share = parts[places[t, j]], shares[t, j]
                for i in range(target.shape[0]):
                    target[i] += share * to_float(source[i])


@njit(nogil=True, cache=True)
def launch_add_rows(box, *args):  # type: ignore[no-untyped-def]
    """Run `add_rows` on a team."""
    return share(box, add_rows, args)


@njit(nogil=True, fastmath=FAST)
def expand_rows(tickets, values, scales, offsets, first, out, chunk):  # type: ignore[no-untyped-def]
    """out[r] = quantised weight row (first + r); a work item is `chunk` rows."""
    packed, groups = 2 * values.shape[1] == out.shape[1], out.shape[1] // GROUP
    while True:
        start = take_ticket(tickets, WORK) * chunk
        if start >= out.shape[0]:
            return
        for r in range(start, min(start + chunk, out.shape[0])):
            source, target = values[first + r], out[r]
            for g in range(groups):
                at = (first + r) * groups + g
                scale = to_float(scales[at])
                if packed:
                    shift = to_float(offsets[at]) if offsets.shape[0] else np.float32(-8) * scale
                    for i in range(GROUP // 2):
                        pair = source[g * GROUP // 2 + i]
                        low, high = np.float32(pair & 15), np.float32((pair >> 4) & 15)
                        target[g * GROUP + i] = narrow(out, scale * low + shift)
                        target[g * GROUP + GROUP // 2 + i] = narrow(out, scale * high + shift)
                else:
                    for i in range(g * GROUP, (g + 1) * GROUP):
                        target[i] = narrow(out, scale * np.float32(source[i]))


@njit(nogil=True, cache=True)
def launch_expand_rows(box, *args):  # type: ignore[no-untyped-def]
    """Run `expand_rows` on a team."""
    return share(box, expand_rows, args)

"""Products of many rows with weights on matrix tiles: for rows that chose different experts all in one call.

torch packs the weights anew at every call and wakes a sleeping thread for it; for the hundred rows of an expert that is
most of the time. Here the rows are packed once, as right operands; then a work item takes 32 weight rows, copies them
tile by tile as left operands (in place their rows would fall on a few cache sets), and multiplies them with all rows
of a group. Quantised weights become bf16 on the way, in the first-level cache: expanded in memory, a model is read and
written several times over for every step. Shapes: x [T, K], weights [N, K] or one such after the other, out [T, N].
"""

from collections.abc import Sequence

import numpy as np
from numba import njit
from torch import Tensor

from tamis.kernels.cpu import amx, simd
from tamis.kernels.cpu.amx_tiles import LINE, ROWS, copy_row, pack_queries
from tamis.kernels.cpu.frames import Frame, places, view1, view2
from tamis.kernels.cpu.scratch import Scratch
from tamis.kernels.cpu.threads import ThreadTeam, share, take_ticket
from tamis.kernels.quant import Format, Matrix

COLUMNS = 32
"""Weight rows of an item: two tiles."""
DEPTH = 1024
"""Bytes of a weight row multiplied at a time: the tiles of 32 rows stay in the first-level cache."""
SPAN_BYTES = 1 << 20
"""Rows of x that an item goes through, packed: they stay in the second-level cache."""

# What stands where in a call's frame: addresses of x, weights and out, bytes of their rows; arrays; how weights lie.
(
    _X, _WEIGHTS, _OUT, _ROW, _OUT_ROW, _CONFIG, _TILES, _ITEMS, _PACKED, _ROOM, _FORM, _SCALES, _OFFSETS, _STORED,
) = places(*[1] * 5, 2, 3, 3, 3, 3, *[1] * 4)  # fmt: skip

_TILE = amx.TILE_BYTES
_DENSE, _INT8, _INT4, _CENTRED = range(4)
_FORMS = {Format.BF16: _DENSE, Format.INT8: _INT8, Format.INT4: _INT4, Format.INT4_CENTRED: _CENTRED}


def supports(weights: Matrix) -> bool:
    """Whether these weights are taken, here."""
    outputs, width = weights.shape[-2:]
    return weights.format in _FORMS and outputs % COLUMNS == 0 and width % 32 == 0 and amx.available()


def multiply(
    team: ThreadTeam,
    scratch: Scratch,
    x: Tensor,
    weights: Matrix,
    out: Tensor,
    sizes: Sequence[int],
    first_row: int = 0,
) -> None:
    """out bf16 [T, N] = x bf16 [T, K] times weights [N, K] or [groups, N, K], from weight row `first_row` on: the first
    sizes[0] rows of x with the first N weight rows, the next with the next N, and so on; the sizes sum to T."""
    outputs, width = weights.shape[-2:]
    span = max(SPAN_BYTES // (2 * width) // ROWS, 1) * ROWS
    starts = np.cumsum([0, *sizes])
    tiles, items = [], []
    count = 0
    for group in range(len(sizes)):
        for first in range(starts[group], starts[group + 1], span):
            used = min(span, int(starts[group + 1]) - first)
            begins = np.arange(first, first + used, ROWS)
            tiles.append(np.stack([begins, np.minimum(ROWS, first + used - begins)], axis=1))
            columns = np.arange(0, outputs, COLUMNS)
            item = np.empty((len(columns), 4), np.int64)
            item[:, 0], item[:, 1] = count, len(begins)
            item[:, 2], item[:, 3] = first_row + group * outputs + columns, columns
            items.append(item)
            count += len(begins)
    if not count:
        return
    most = min(span, max(sizes))
    frame = Frame(
        x.data_ptr(), weights.values.data_ptr(), out.data_ptr(), width * 2, outputs * 2,
        amx.tile_config(), np.concatenate(tiles), np.concatenate(items),
        scratch.get("packed rows", (count, ROWS * width * 2), np.uint8),
        scratch.get("multiply room", (team.size, _room_bytes(width * 2, most)), np.uint8),
        _FORMS[weights.format], _address(weights.scales), _address(weights.offsets),
        weights.values.shape[-1] * weights.values.element_size(),
    )  # fmt: skip
    team.run(launch_multiply, frame.values)


def _address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()


def _room_bytes(row: int, rows: int) -> int:
    """Bytes a thread works in: a tile's rows, two weight tiles of each 32 numbers, sums of all rows, one tile more."""
    return ROWS * row + 2 * ROWS * DEPTH + -(-rows // ROWS) * 2 * _TILE + _TILE


@njit(nogil=True)
def pack_rows(tickets, frame):  # type: ignore[no-untyped-def]
    """Pack the rows of x by tiles of 16."""
    tiles, packed = view2(frame, _TILES, np.int64), view2(frame, _PACKED, np.uint8)
    room, row = view2(frame, _ROOM, np.uint8), frame[_ROW]
    spare = room[take_ticket(tickets, 7)].ctypes.data
    while True:
        tile = take_ticket(tickets, 0)
        if tile >= tiles.shape[0]:
            return
        source, used = frame[_X] + tiles[tile, 0] * row, tiles[tile, 1]
        if used < ROWS:
            copy_row(source, spare, used * row)
            for at in range(used * row, ROWS * row, LINE):
                simd.store(spare + at, simd.splat(np.float32(0)))
            source = spare
        pack_queries(source, row, packed[tile].ctypes.data)


@njit
def _copy_weights(weights, row, first, size, target):  # type: ignore[no-untyped-def]
    """`size` bytes from `first` on of 32 weight rows, as tiles: the first 16 rows' and the others' in turn."""
    for i in range(COLUMNS):
        source = weights + i * row + first
        place = target + i // ROWS * _TILE + i % ROWS * LINE
        for at in range(0, size, LINE):
            simd.store(place + at // LINE * 2 * _TILE, simd.load(source + at))


@njit
def _expand_weights(form, weights, stored, scales, offsets, groups, first, count, target):  # type: ignore[no-untyped-def]
    """`_copy_weights` of quantised rows: groups `first` to `first + count` of 32 numbers, each a row of a tile.

    weights, scales, offsets: addresses of the first row's; `stored`: bytes of a row; `groups` of it.
    """
    for i in range(COLUMNS):
        source, number = weights + i * stored, i * groups + first
        place = target + i // ROWS * _TILE + i % ROWS * LINE
        for g in range(count):
            scale = simd.spread_half(scales + (number + g) * 2)
            line = place + g * 2 * _TILE
            if form == _INT8:
                at = source + (first + g) * 32
                simd.store_bf16(line, simd.mul(simd.load_bytes(at), scale))
                simd.store_bf16(line + LINE // 2, simd.mul(simd.load_bytes(at + 16), scale))
                continue
            at = source + (first + g) * 16
            shift = simd.mul(scale, simd.splat(np.float32(-8)))
            if form == _INT4:
                shift = simd.spread_half(offsets + (number + g) * 2)
            simd.store_bf16(line, simd.fma(simd.low_nibbles(at), scale, shift))
            simd.store_bf16(line + LINE // 2, simd.fma(simd.high_nibbles(at), scale, shift))


@njit
def _add_products(weights, size, packed, stride, tiles, fresh, sums, ahead, row):  # type: ignore[no-untyped-def]
    """sums [tile][2][16 weight rows][16 rows of x] = or += products over `size` bytes of a weight row.

    Fetches meanwhile DEPTH bytes of each of the 32 weight rows at `ahead`, which are `row` bytes apart.
    """
    fetched = 0
    for tile in range(0, tiles - 1, 2):
        place, left = sums + tile * 2 * _TILE, packed + tile * stride
        right = left + stride
        if fresh:
            amx.zero(0)
            amx.zero(1)
            amx.zero(2)
            amx.zero(3)
        else:
            amx.load(0, place, LINE)
            amx.load(1, place + _TILE, LINE)
            amx.load(2, place + 2 * _TILE, LINE)
            amx.load(3, place + 3 * _TILE, LINE)
        for step in range(size // LINE):
            at = weights + step * 2 * _TILE
            amx.load(4, at, LINE)
            amx.load(6, left + step * _TILE, LINE)
            amx.dot(0, 4, 6)
            amx.load(5, at + _TILE, LINE)
            amx.dot(1, 5, 6)
            amx.load(7, right + step * _TILE, LINE)
            amx.dot(2, 4, 7)
            amx.dot(3, 5, 7)
            if fetched < COLUMNS:
                simd.prefetch_run(ahead + fetched * row)
                fetched += 1
        amx.store(0, place, LINE)
        amx.store(1, place + _TILE, LINE)
        amx.store(2, place + 2 * _TILE, LINE)
        amx.store(3, place + 3 * _TILE, LINE)
    if tiles % 2:
        place, left = sums + (tiles - 1) * 2 * _TILE, packed + (tiles - 1) * stride
        if fresh:
            amx.zero(0)
            amx.zero(1)
        else:
            amx.load(0, place, LINE)
            amx.load(1, place + _TILE, LINE)
        for step in range(size // LINE):
            at = weights + step * 2 * _TILE
            amx.load(4, at, LINE)
            amx.load(6, left + step * _TILE, LINE)
            amx.dot(0, 4, 6)
            amx.load(5, at + _TILE, LINE)
            amx.dot(1, 5, 6)
        amx.store(0, place, LINE)
        amx.store(1, place + _TILE, LINE)


@njit
def _write_sums(sums, tiles, first, count, turned, out, stride, column):  # type: ignore[no-untyped-def]
    """out[row, column : column + 32] = the sums of `count` tiles of rows."""
    for tile in range(count):
        start, used = tiles[first + tile, 0], tiles[first + tile, 1]
        for half in range(2):
            simd.transpose(sums + (tile * 2 + half) * _TILE, LINE, turned, LINE)
            target = out + start * stride + (column + half * ROWS) * 2
            for i in range(used):
                simd.store_bf16(target + i * stride, simd.load(turned + i * LINE))


@njit(nogil=True)
def multiply_items(tickets, frame):  # type: ignore[no-untyped-def]
    """Items int64 [n, 4]: first tile of rows, tiles, first weight row, first output."""
    config, tiles = view1(frame, _CONFIG, np.uint8), view2(frame, _TILES, np.int64)
    items, packed = view2(frame, _ITEMS, np.int64), view2(frame, _PACKED, np.uint8)
    room, row = view2(frame, _ROOM, np.uint8), frame[_ROW]
    weights = room[take_ticket(tickets, 7)].ctypes.data + ROWS * row
    sums = weights + 2 * ROWS * DEPTH
    form, scales, offsets, stored = frame[_FORM], frame[_SCALES], frame[_OFFSETS], frame[_STORED]
    groups = row // LINE
    amx.configure(config.ctypes.data)
    while True:
        item = take_ticket(tickets, 0)
        if item >= items.shape[0]:
            break
        first, count = items[item, 0], items[item, 1]
        rows, number = packed[first].ctypes.data, items[item, 2]
        source = frame[_WEIGHTS] + number * stored
        following = frame[_WEIGHTS] + items[min(item + room.shape[0], items.shape[0] - 1), 2] * stored
        for at in range(0, row, DEPTH):
            size = min(DEPTH, row - at)
            if form == _DENSE:
                _copy_weights(source, row, at, size, weights)
            else:
                _expand_weights(
                    form, source, stored, scales + number * groups * 2, offsets + number * groups * 2, groups,
                    at // LINE, size // LINE, weights,
                )  # fmt: skip
            ahead = source + (at + DEPTH) * stored // row if at + DEPTH < row else following
            _add_products(weights, size, rows + at * ROWS, ROWS * row, count, at == 0, sums, ahead, stored)
        turned = sums + count * 2 * _TILE
        _write_sums(sums, tiles, first, count, turned, frame[_OUT], frame[_OUT_ROW], items[item, 3])
    amx.release()


@njit(nogil=True, cache=True)
def launch_multiply(box, frame):  # type: ignore[no-untyped-def]
    """Pack, then multiply."""
    return share(box, pack_rows, (frame,)) | share(box, multiply_items, (frame,))

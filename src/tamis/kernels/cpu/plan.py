"""Cutting a ragged batch into work items. Small Numba functions: a long prefill has thousands of items a layer."""

import numpy as np
from numba import njit


@njit(cache=True)
def token_sequences(seq_lens, query_start, positions, out):  # type: ignore[no-untyped-def]
    """out int32 [T]: the sequence of each token; -1 where it sees nothing (no context, or a position below 0)."""
    for seq in range(seq_lens.shape[0]):
        for token in range(query_start[seq], query_start[seq + 1]):
            out[token] = seq if seq_lens[seq] > 0 and positions[token] >= 0 else -1


@njit(cache=True)
def query_tiles(token_seq, seq_lens, positions, most):  # type: ignore[no-untyped-def]
    """Runs of up to `most` tokens with consecutive positions: int32 [n, 4] of sequence, first token, tokens, context.

    The context of a tile is what its last token sees. Tokens that see nothing are in no tile.
    """
    tokens = token_seq.shape[0]
    tiles = np.empty((tokens, 4), np.int32)
    count = 0
    token = 0
    while token < tokens:
        seq = token_seq[token]
        if seq < 0:
            token += 1
            continue
        size = 1
        length = seq_lens[seq]
        while (
            size < most
            and token + size < tokens
            and token_seq[token + size] == seq
            and positions[token + size] == positions[token] + size
            and positions[token + size] < length
        ):
            size += 1
        tiles[count, 0], tiles[count, 1], tiles[count, 2] = seq, token, size
        tiles[count, 3] = min(positions[token] + size, length)
        count += 1
        token += size
    return tiles[:count]


@njit(cache=True)
def dense_items(tiles, parts, grain):  # type: ignore[no-untyped-def]
    """Each tile times `parts` stretches of its context, cut at multiples of `grain`: int32 [n, 6] for `dense_parts`."""
    items = np.empty((tiles.shape[0] * parts, 6), np.int32)
    count = 0
    for tile in range(tiles.shape[0]):
        seq, token, size, context = tiles[tile]
        grains = (context + grain - 1) // grain
        for part in range(parts):
            items[count, 0], items[count, 1], items[count, 2] = seq, token, size
            items[count, 3] = min(grains * part // parts * grain, context)
            items[count, 4] = min(grains * (part + 1) // parts * grain, context)
            items[count, 5] = part
            count += 1
    return items


@njit(cache=True)
def score_items(tiles, block_size, span):  # type: ignore[no-untyped-def]
    """Each tile times stretches of about `span` tokens of its context: int32 [n, 5], see `score_tiles`."""
    step = max(1, span // block_size)
    total = 0
    for tile in range(tiles.shape[0]):
        blocks = (tiles[tile, 3] + block_size - 1) // block_size
        total += (blocks + step - 1) // step
    items = np.empty((total, 5), np.int32)
    count = 0
    for tile in range(tiles.shape[0]):
        seq, token, size, context = tiles[tile]
        blocks = (context + block_size - 1) // block_size
        for first in range(0, blocks, step):
            items[count, 0], items[count, 1], items[count, 2] = seq, token, size
            items[count, 3], items[count, 4] = first, min(first + step, blocks)
            count += 1
    return items

"""What every backend refuses before it reads or writes: operands that do not fit together."""

import torch
from torch import Tensor

from tamis.errors import KernelInputError
from tamis.kernels.ops import AttentionBatch


def check_write(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """Raise KernelInputError unless values [n, heads, dim] can be written to slots [n] of `plane`.

    A negative slot must never reach torch, which would count it from the end: another sequence's memory.
    """
    check_ids("slots", slots)
    heads, page_size, dim = plane.shape[1:]
    if slots.dim() != 1 or tuple(values.shape) != (len(slots), heads, dim):
        raise KernelInputError(f"values {shape(values)} do not fit slots {shape(slots)} of a plane {shape(plane)}")
    last = plane.shape[0] * page_size - 1
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) > last):
        raise KernelInputError(f"slots {int(slots.min())} to {int(slots.max())} lie outside 0..{last}")


def check_ids(name: str, ids: Tensor) -> None:
    """Raise KernelInputError unless `ids` are int64 or int32: torch takes bool and uint8 for a mask."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise KernelInputError(f"{name} are {ids.dtype}, not torch.int64 or torch.int32")


def check_pages(pages: Tensor, plane: Tensor) -> None:
    """Raise KernelInputError where `pages` [P] names a page that `plane` does not have."""
    check_ids("page ids", pages)
    if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= plane.shape[0]):
        raise KernelInputError(f"page ids {int(pages.min())} to {int(pages.max())} lie outside 0..{plane.shape[0] - 1}")


def check_lengths(lengths: list[int]) -> None:
    """Raise KernelInputError where a sequence's length is negative."""
    if min(lengths, default=0) < 0:
        raise KernelInputError(f"seq_lens={lengths} holds a negative length")


def check_fits(row: int, length: int, columns: int, page_size: int) -> None:
    """Raise KernelInputError where a sequence is longer than the columns of its page table hold."""
    if length > columns * page_size:
        raise KernelInputError(f"row {row}: seq_len={length} does not fit {columns} pages of {page_size} tokens")


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, sinks: Tensor | None = None, *, kv_heads: int | None = None
) -> None:
    """Raise KernelInputError unless q [T, heads, dim] can attend to the planes k and v of the batch.

    `kv_heads`: how many heads the planes must have (index planes: 1). `sinks` is one logit a query head.
    """
    if q.dim() != 3 or k.dim() != 4 or k.shape != v.shape:
        raise KernelInputError(
            f"q {shape(q)}, k {shape(k)} and v {shape(v)} are not [T, heads, dim] and two equal planes"
        )
    tokens, q_heads, dim = q.shape
    plane_heads = k.shape[1]
    if kv_heads is not None and plane_heads != kv_heads:
        raise KernelInputError(f"an index plane has {kv_heads} head, not {plane_heads}: {shape(k)}")
    if dim != k.shape[3]:
        raise KernelInputError(f"q has head dim {dim}, the planes {k.shape[3]}")
    if q_heads % plane_heads:
        raise KernelInputError(f"{q_heads} query heads are not a multiple of {plane_heads} KV heads")
    if tokens != batch.num_tokens or batch.query_start.shape[0] != batch.num_seqs + 1:
        raise KernelInputError(
            f"q has {tokens} tokens, positions {batch.num_tokens}; "
            f"query_start has {batch.query_start.shape[0]} entries for {batch.num_seqs} sequences"
        )
    if batch.page_table.dim() != 2 or batch.page_table.shape[0] != batch.num_seqs:
        raise KernelInputError(
            f"page_table {shape(batch.page_table)} has no row for each of {batch.num_seqs} sequences"
        )
    if int(batch.query_start[-1]) != tokens:
        raise KernelInputError(f"query_start ends at {int(batch.query_start[-1])}, not at the {tokens} tokens of q")
    if sinks is not None and tuple(sinks.shape) != (q_heads,):
        raise KernelInputError(f"sinks {shape(sinks)} are not one logit for each of {q_heads} query heads")


def check_picks(picks: Tensor, q: Tensor, k: Tensor, block_size: int) -> None:
    """Raise KernelInputError unless `picks` [Hi, T, K] are whole numbers that fit q [T, Hq, D] and the plane k."""
    if picks.dim() != 3 or picks.is_floating_point() or picks.shape[1] != q.shape[0]:
        raise KernelInputError(f"picks {picks.dtype} {shape(picks)} are not block ids [Hi, {q.shape[0]}, K]")
    if picks.shape[0] == 0 or picks.shape[0] % k.shape[1]:
        raise KernelInputError(f"{picks.shape[0]} index heads are not a multiple of {k.shape[1]} KV heads")
    if block_size < 1:
        raise KernelInputError(f"block_size={block_size} must be at least 1")


def check_scores(scores: Tensor, positions: Tensor) -> None:
    """Raise KernelInputError unless `scores` [Hi, T, NB] and `positions` [T] belong together."""
    if scores.dim() != 3 or tuple(positions.shape) != tuple(scores.shape[1:2]):
        raise KernelInputError(f"positions {shape(positions)} do not fit block scores {shape(scores)}")


def shape(tensor: Tensor) -> list[int]:
    """The shape as errors print it."""
    return list(tensor.shape)

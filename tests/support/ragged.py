"""Random ragged batches on paged planes in which everything that belongs to no token is NaN."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.kernels import AttentionBatch, ReferenceOps


@dataclass(frozen=True)
class Ragged:
    """A step over several sequences: its batch, queries and planes."""

    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    index_v: Tensor
    slots: list[Tensor]
    """int64 [length] of each sequence."""


@dataclass(frozen=True)
class Heads:
    q: int = 4
    kv: int = 2
    index: int = 2
    dim: int = 6
    index_dim: int = 4


def nan_plane(pages: int, heads: int, page_size: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A plane of `pages` usable pages and page 0, every value NaN."""
    return torch.full((pages + 1, heads, page_size, dim), float("nan")).to(dtype)


def page_tables(lengths: Sequence[int], page_size: int, rng: random.Random) -> tuple[list[list[int]], int]:
    """Fragmented tables (ids from 1, interleaved over the sequences, some pages nobody's) and the pool's pages."""
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts) + 3
    ids = rng.sample(range(1, total + 1), sum(counts))
    return [[ids.pop() for _ in range(count)] for count in counts], total


def make_batch(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], queries: Sequence[int], spare_columns: int = 2
) -> AttentionBatch:
    """A batch whose row b computes the last `queries[b]` tokens of `lengths[b]` (fewer: negative positions)."""
    columns = max((len(table) for table in tables), default=0) + spare_columns
    positions = [p for length, n in zip(lengths, queries, strict=True) for p in range(length - n, length)]
    starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
    rows = [list(table) + [-1] * (columns - len(table)) for table in tables]
    return AttentionBatch(
        page_table=torch.tensor(rows, dtype=torch.int32).reshape(len(rows), columns),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
    )


def slots_of(table: Sequence[int], length: int, page_size: int) -> Tensor:
    """int64 [length]: slots of a sequence's tokens."""
    return torch.tensor([table[i // page_size] * page_size + i % page_size for i in range(length)], dtype=torch.int64)


def make_ragged(
    lengths: Sequence[int], queries: Sequence[int], page_size: int, seed: int, heads: Heads | None = None,
    dtype: torch.dtype = torch.float32, scale: float = 1.0,
) -> Ragged:  # fmt: skip
    """Random contents; each sequence's come from its own seed, so a row alone has the data it has in a batch."""
    heads = heads or Heads()
    tables, total = page_tables(lengths, page_size, random.Random(seed))
    planes = [nan_plane(total, n, page_size, dim, dtype) for n, dim in
              ((heads.kv, heads.dim), (heads.kv, heads.dim), (1, heads.index_dim), (1, heads.index_dim))]  # fmt: skip
    slots = [slots_of(table, length, page_size) for table, length in zip(tables, lengths, strict=True)]
    q, index_q = [], []
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed * 1000 + row)
        for plane in planes:
            values = torch.randn(length, plane.shape[1], plane.shape[3], generator=generator)
            ReferenceOps().write_pages(plane, slots[row], values, scale)
        rows = max(length, queries[row])
        q.append(torch.randn(rows, heads.q, heads.dim, generator=generator)[rows - queries[row] :])
        index_q.append(torch.randn(rows, heads.index, heads.index_dim, generator=generator)[rows - queries[row] :])
    batch = make_batch(tables, lengths, queries)
    if all(length >= new for length, new in zip(lengths, queries, strict=True)):
        batch.check(page_size, total)
    return Ragged(batch, torch.cat(q), planes[0], planes[1], torch.cat(index_q), planes[2], planes[3], slots)


def alone(case: Ragged, row: int) -> tuple[AttentionBatch, slice]:
    """Row `row` of the batch as a batch of its own, and its rows of the step."""
    batch = case.batch
    start, stop = batch.query_start[row : row + 2].tolist()
    one = AttentionBatch(
        batch.page_table[row : row + 1],
        batch.seq_lens[row : row + 1],
        torch.tensor([0, stop - start], dtype=torch.int32),
        batch.positions[start:stop],
    )
    return one, slice(start, stop)

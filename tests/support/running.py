"""Run a model on the pool step by step, without the engine: for tests of models and kernels."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tamis.config import ModelConfig
from tamis.kernels import AttentionBatch, Ops, ReferenceOps, choose_model_ops
from tamis.kernels.linear import LayerRunner
from tamis.kv import KVLayout, PageAllocator, PageTable, SparseKVPool
from tamis.models.attention import StepContext
from tamis.models.decoder import CausalLM


class PoolRun:
    """Sequences of one model on one pool; `feed` runs one ragged step. `layout`: further fields of the KVLayout."""

    def __init__(
        self, model: CausalLM, page_size: int, tokens: int, rows: int = 1, ops: Ops | None = None, **layout: Any
    ) -> None:
        self.model, self.ops = model, ops or ReferenceOps()
        self.model_ops = choose_model_ops(self.ops)
        self.layers: LayerRunner | None = None
        self.layout = KVLayout.from_model(model.config, page_size=page_size, **{"dtype": torch.float32, **layout})
        pages = rows * (-(-tokens // page_size))
        self.pool = SparseKVPool(self.layout, pages)
        self.allocator = PageAllocator(pages)
        self.tables = [PageTable(self.pool, self.allocator) for _ in range(rows)]

    @torch.inference_mode()
    def feed(self, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append a chunk (maybe empty) to each sequence; logits [len(chunk), vocab] of each."""
        positions: list[int] = []
        slots, starts, lens = [], [0], []
        for table, chunk in zip(self.tables, chunks, strict=True):
            positions += range(table.length, table.length + len(chunk))
            slots.append(table.append(len(chunk)))
            starts.append(starts[-1] + len(chunk))
            lens.append(table.length)
        width = max(len(table.pages) for table in self.tables)
        rows = [table.pages + [-1] * (width - len(table.pages)) for table in self.tables]
        batch = AttentionBatch(
            torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width), torch.tensor(lens, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32),
        )  # fmt: skip
        batch.check(self.layout.page_size, self.pool.num_pages)
        step = StepContext(self.pool, self.ops, batch, self.pool.check_loc(torch.cat(slots)), self.model_ops,
                           self.layers)  # fmt: skip
        ids = torch.tensor([token for chunk in chunks for token in chunk], dtype=torch.int64)
        logits = self.model(ids, step, torch.arange(len(ids)))
        return list(logits.split([len(chunk) for chunk in chunks]))


def chunked_logits(
    model: CausalLM, ids: list[int], chunks: Sequence[int], page_size: int, ops: Ops | None = None
) -> Tensor:
    """Logits [len(ids), vocab] of one sequence fed in these chunk sizes."""
    run, out, at = PoolRun(model, page_size, len(ids), ops=ops), [], 0
    for size in chunks:
        out.append(run.feed([ids[at : at + size]])[0])
        at += size
    assert at == len(ids)
    return torch.cat(out)


def greedy(model: CausalLM, ids: list[int], steps: int, page_size: int, chunk: int = 512) -> list[int]:
    """The next `steps` most probable tokens of one prompt."""
    return greedy_together(model, [ids], steps, page_size, chunk)[0]


def greedy_together(
    model: CausalLM, prompts: Sequence[list[int]], steps: int, page_size: int, chunk: int = 512, ops: Ops | None = None
) -> list[list[int]]:
    """`greedy` of several prompts, one row of the same batch each."""
    longest = max(len(ids) for ids in prompts)
    run = PoolRun(model, page_size, longest + steps, len(prompts), ops)
    out: list[list[int]] = [[] for _ in prompts]
    last = [0] * len(prompts)
    for at in range(0, longest, chunk):
        for row, logits in enumerate(run.feed([ids[at : at + chunk] for ids in prompts])):
            last[row] = int(logits[-1].argmax()) if len(logits) else last[row]
    for _ in range(steps):
        for row, token in enumerate(last):
            out[row].append(token)
        last = [int(logits[-1].argmax()) for logits in run.feed([[token] for token in last])]
    return out


def random_chunks(total: int, rng: random.Random) -> list[int]:
    """Sizes that add up to `total`, cut at random places."""
    cuts = sorted(rng.sample(range(1, total), min(total - 1, rng.randint(1, 6))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def random_ids(count: int, config: ModelConfig, seed: int) -> list[int]:
    """Token ids, none of them special (3 and above)."""
    rng = random.Random(seed)
    return [rng.randrange(3, config.vocab_size) for _ in range(count)]

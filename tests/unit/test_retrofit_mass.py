"""The meter of attention mass against plain loops, and what it must leave alone."""

from typing import cast

import pytest
import torch
from torch import Tensor

from tamis.config import LayerKind, SparseAttentionConfig
from tamis.kernels import AttentionBatch, Ops, ReferenceOps
from tamis.kv import KVLayout, PageAllocator, PageTable, SparseKVPool
from tamis.retrofit.mass import LayerMass, Mass, MassMeter

HEADS, GROUP, DIM, TOKENS = 2, 3, 8, 29
LAYER = 1


class Layer:
    """One sparse layer's operands for one sequence."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        kinds = (LayerKind.DENSE, LayerKind.SPARSE_K)
        layout = KVLayout(kinds, HEADS, DIM, index_head_dim=4, page_size=4, dtype=torch.float32)
        self.pool = SparseKVPool(layout, 10)
        table = PageTable(self.pool, PageAllocator(10))
        slots = self.pool.check_loc(table.append(TOKENS))
        self.k, v = (torch.randn(TOKENS, HEADS, DIM, generator=generator) * 2 for _ in range(2))
        self.index_k = torch.randn(TOKENS, 1, 4, generator=generator)
        self.pool.set_fused_kv_index_buffer(LAYER, slots, self.k, v, self.index_k)
        self.q = torch.randn(TOKENS, HEADS * GROUP, DIM, generator=generator) * 2
        self.index_q = torch.randn(TOKENS, HEADS, 4, generator=generator)
        self.batch = AttentionBatch(
            torch.tensor([table.pages], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32),
            torch.tensor([0, TOKENS], dtype=torch.int32), torch.arange(TOKENS, dtype=torch.int32),
        )  # fmt: skip

    def attend(self, ops: Ops, sparse: SparseAttentionConfig) -> Tensor:
        k, v = self.pool.get_kv_buffer(LAYER)
        index_k = self.pool.get_index_k_buffer(LAYER)
        return ops.picked_attention(self.q, k, v, self.index_q, index_k, self.batch, sparse)

    def block_mass(self, position: int, head: int, size: int) -> list[float]:
        """Attention of one query position, by block, mean over the group."""
        rows = self.q[position].view(HEADS, GROUP, DIM)[head]
        probabilities = (rows @ self.k[: position + 1, head].T / DIM**0.5).softmax(-1).mean(0)
        return [float(probabilities[at : at + size].sum()) for at in range(0, position + 1, size)]

    def best_by_index(self, position: int, head: int, size: int, forced: set[int], topk: int) -> set[int]:
        scores = self.index_q[position, head] @ self.index_k[: position + 1, 0].T
        by_block = [float(scores[at : at + size].max()) for at in range(0, position + 1, size)]
        return best_blocks(by_block, forced, topk)


def best_blocks(values: list[float], forced: set[int], topk: int) -> set[int]:
    others = sorted((block for block in range(len(values)) if block not in forced), key=lambda block: -values[block])
    return forced | set(others[: topk - len(forced)])


def test_mass_is_what_the_chosen_and_the_best_blocks_hold() -> None:
    layer, sparse = Layer(), SparseAttentionConfig(HEADS, 4, 4, 3, init_blocks=1)
    meter = MassMeter(ReferenceOps(), layer.pool, first=13, stride=3)
    attended = layer.attend(cast(Ops, meter), sparse)
    assert torch.equal(attended, layer.attend(ReferenceOps(), sparse))
    captured, oracle = 0.0, 0.0
    looked_at = range(15, TOKENS, 3)
    for position in looked_at:
        for head in range(HEADS):
            mass = layer.block_mass(position, head, 4)
            forced = {0, position // 4}
            captured += sum(mass[block] for block in layer.best_by_index(position, head, 4, forced, 3))
            oracle += sum(mass[block] for block in best_blocks(mass, forced, 3))
    seen = meter.layers[LAYER]
    assert seen.count == len(looked_at) * HEADS
    assert seen.captured == pytest.approx(captured, rel=1e-5)
    assert seen.oracle == pytest.approx(oracle, rel=1e-5)
    assert seen.captured < seen.oracle < seen.count


def test_all_blocks_hold_all_mass() -> None:
    layer = Layer(seed=1)
    meter = MassMeter(ReferenceOps(), layer.pool, first=0, stride=1)
    layer.attend(cast(Ops, meter), SparseAttentionConfig(HEADS, 4, 4, 8))
    seen = meter.layers[LAYER]
    assert seen.captured / seen.count == pytest.approx(1.0, abs=1e-6)
    assert seen.oracle / seen.count == pytest.approx(1.0, abs=1e-6)


def test_queries_before_the_first_position_are_not_looked_at() -> None:
    layer = Layer()
    meter = MassMeter(ReferenceOps(), layer.pool, first=TOKENS)
    layer.attend(cast(Ops, meter), SparseAttentionConfig(HEADS, 4, 4, 3))
    assert meter.layers == {LAYER: LayerMass()}


def test_layers_count_the_same_however_many_queries_were_seen() -> None:
    mass = Mass.of({3: LayerMass(0.5, 1.0, 1), 4: LayerMass(9.0, 9.0, 10)})
    assert mass.captured == pytest.approx(0.7)
    assert mass.oracle == pytest.approx(0.95)
    assert mass.by_layer == {3: (0.5, 1.0), 4: (0.9, 0.9)}

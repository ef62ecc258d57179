#!/usr/bin/env python3
"""A retrofitted model against its own dense base: attention of a layer, and the whole model, decoding at depth.

    python benchmarks/retrofit.py [MODEL] [--context 8192] [--threads 2] [--skip-model]

MODEL has an index branch (default: smollm2-135m-msa). Attention is timed over all its sparse layers in turn, each on
the planes of its own, once block-sparse (scores, selection, attention) and once dense, with our own kernels in bf16;
outputs are checked against the reference first. Of the whole model a decode step is timed, in turn with the dense
one's, in a context of random numbers. All ratios are from one run. `cpu` is the processor time of the calling thread:
with --threads 1 other processes hardly disturb it. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

from measure import interleaved, limits, table  # first: it settles how torch's threads wait

import torch
from torch import Tensor

from tamis.config import EngineConfig, LayerKind, ModelConfig
from tamis.engine.batch import Batch
from tamis.engine.build import build_engine
from tamis.engine.memory import resolve_page_size
from tamis.kernels import AttentionBatch, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kv import KVLayout, SparseKVPool
from tamis.models import load_config, resolve
from tamis.models.hub import ModelSource
from tamis.names import SPARSE_MODEL

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


class Layers:
    """The planes of a model's sparse layers, filled with random numbers, for one sequence."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        assert config.sparse is not None
        page_size = resolve_page_size(None, config)
        pages = -(-context // page_size)
        layout = KVLayout.from_model(config, page_size=page_size, dtype=torch.bfloat16)
        self.config, self.sparse = config, config.sparse
        self.pool = SparseKVPool(layout, pages)
        self.ids = layout.sparse_layers
        for layer in self.ids:
            for plane in (*self.pool.get_kv_buffer(layer), self.pool.get_index_k_buffer(layer)):
                plane.normal_()
        self.q = torch.randn(1, config.q_heads, config.head_dim).bfloat16()
        self.index_q = torch.randn(1, self.sparse.index_heads, self.sparse.index_head_dim).bfloat16()
        self.batch = AttentionBatch(
            torch.arange(1, pages + 1, dtype=torch.int32)[None], torch.tensor([context], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([context - 1], dtype=torch.int32),
        )  # fmt: skip

    def run_sparse(self, ops: CpuOps, layer: int) -> Tensor:
        """[1, Hq, D]"""
        k, v = self.pool.get_kv_buffer(layer)
        index_k = self.pool.get_index_k_buffer(layer)
        return ops.picked_attention(self.q, k, v, self.index_q, index_k, self.batch, self.sparse)

    def run_dense(self, ops: CpuOps, layer: int) -> Tensor:
        """[1, Hq, D]"""
        k, v = self.pool.get_kv_buffer(layer)
        return ops.dense_attention(self.q, k, v, self.batch)

    def check(self, ops: CpuOps) -> None:
        """Both ways against the reference, in the first layer."""
        reference, layer = ReferenceOps(), self.ids[0]
        k, v = self.pool.get_kv_buffer(layer)
        # The same picks for both: where two blocks score alike, rounding may choose either.
        picks = ops.pick_blocks(self.index_q, self.pool.get_index_k_buffer(layer), self.batch, self.sparse)
        wanted = reference.sparse_attention(self.q, k, v, picks, self.batch, self.sparse.block_size)
        check("sparse attention", self.run_sparse(ops, layer), wanted)
        check("dense attention", self.run_dense(ops, layer), reference.dense_attention(self.q, k, v, self.batch))


def check(name: str, got: Tensor, wanted: Tensor) -> None:
    """Stops the benchmark where outputs differ by more than 2% of their size."""
    error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not error <= 2e-2:
        raise SystemExit(f"{name}: wrong by {error:.2%}")


def time_attention(config: ModelConfig, context: int, threads: int, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of one layer's attention for one token at the end of the context, by either clock."""
    ops, layers = CpuOps(threads), Layers(config, context)
    layers.check(ops)

    def over_all(run: Callable[[CpuOps, int], Tensor]) -> Callable[[], object]:
        return lambda: [run(ops, layer) for layer in layers.ids]

    runs = {"sparse": over_all(layers.run_sparse), "dense": over_all(layers.run_dense)}
    found = {clock: interleaved(runs, seconds, now=read) for clock, read in CLOCKS.items()}
    ops.close()
    return {clock: {name: t / len(layers.ids) for name, t in times.items()} for clock, times in found.items()}


def load(source: ModelSource, context: int, threads: int) -> Callable[[], object]:
    """A step of one token at the end of a context that is filled with random numbers."""
    config = load_config(source)
    layout = KVLayout.from_model(config, page_size=resolve_page_size(None, config), dtype=torch.bfloat16)
    pages = -(-context // layout.page_size)
    settings = EngineConfig(dtype="bf16", threads=threads, kv_budget=pages * layout.bytes_per_page)
    runner = build_engine(source, settings, ()).runner
    for layer in layout.local_layers:
        for plane in runner.pool.get_kv_buffer(layer):
            plane.normal_()
    for layer in layout.sparse_layers:
        runner.pool.get_index_k_buffer(layer).normal_()
    last = context - 1
    slot = (last // layout.page_size + 1) * layout.page_size + last % layout.page_size
    batch = Batch()
    batch.add([5], last, [slot], range(1, pages + 1), 1)
    return lambda: runner.run(batch)


def time_model(source: ModelSource, context: int, threads: int, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a decode step by either clock."""
    steps = {"sparse": load(source, context, threads), "dense": load(replace(source, branch=None), context, threads)}
    return {clock: interleaved(steps, seconds, now=read) for clock, read in CLOCKS.items()}


def report(title: str, times: dict[str, float]) -> None:
    rows = [["", "ms", "over sparse"]]
    rows += [[name, f"{t * 1e3:.3f}", f"{t / times['sparse']:.2f}x"] for name, t in times.items()]
    table(title, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SPARSE_MODEL)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
    parser.add_argument("--skip-model", action="store_true", help="attention alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    source = resolve(args.model)
    config = load_config(source)
    if all(kind is LayerKind.DENSE for kind in config.layer_kinds):
        raise SystemExit(f"{args.model} has no sparse layers")
    found: dict[str, object] = {"benchmark": "retrofit", "model": args.model, "context": args.context}
    attention = time_attention(config, args.context, args.threads, args.seconds)
    for clock, times in attention.items():
        report(f"attention of one layer, one token at {args.context:,}, {clock}", times)
    found["attention"] = attention
    if not args.skip_model:
        model = time_model(source, args.context, args.threads, args.seconds)
        for clock, times in model.items():
            report(f"decode of the whole model at {args.context:,}, {clock}", times)
        found["decode"] = model
    print(json.dumps(found | {"limits": limits()}))


if __name__ == "__main__":
    main()

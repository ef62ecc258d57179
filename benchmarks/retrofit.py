#!/usr/bin/env python3
"""A retrofitted model against its own dense base: attention of a layer, and the whole model, decoding at depth.

    python benchmarks/retrofit.py [MODEL] [--context 8192] [--threads 2] [--skip-model]

MODEL has an index branch (default: smollm2-135m-msa). Attention is timed over all its sparse layers in turn, each on
the planes of its own, once block-sparse (scores, selection, attention) and once dense, with our own kernels in bf16;
outputs are checked against the reference first. For the whole model both engines hold the same text and take turns, a
token each. All ratios are from one run. `cpu` is the processor time of the calling thread: with --threads 1 it is
hardly disturbed by other processes. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

from measure import interleaved, limits, table  # first: it settles how torch's threads wait

import torch
from torch import Tensor

from tamis.config import EngineConfig, LayerKind, ModelConfig
from tamis.engine.build import build_engine
from tamis.engine.engine import Engine
from tamis.engine.memory import resolve_page_size
from tamis.engine.tokenizer import Tokenizer
from tamis.kernels import AttentionBatch, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kv import KVLayout, SparseKVPool
from tamis.models import load_config, resolve
from tamis.models.hub import ModelSource
from tamis.names import SPARSE_MODEL
from tamis.request import Request, SamplingParams

DECODED = 48
"""Tokens that each model decodes while it is timed."""
TEXT = "The tamis is a drum sieve: a net of wire or silk over a round frame; flour falls through, and bran does not. "


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
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time}
    found = {clock: interleaved(runs, seconds, now=read) for clock, read in clocks.items()}
    ops.close()
    return {clock: {name: t / len(layers.ids) for name, t in times.items()} for clock, times in found.items()}


def start(source: ModelSource, prompt: Sequence[int], threads: int) -> tuple[Engine, float]:
    """An engine that has read the prompt, and how long that took."""
    config = load_config(source)
    layout = KVLayout.from_model(config, page_size=resolve_page_size(None, config))
    bytes_needed = layout.bytes_per_token["total"] * (config.context_length + 2 * layout.page_size)
    engine = build_engine(source, EngineConfig(dtype="bf16", threads=threads, kv_budget=bytes_needed), ())
    sampling = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)
    began = time.perf_counter()
    engine.add_request(Request(tuple(prompt), sampling))
    while not any(event.token.token_id is not None for event in engine.step()):
        pass
    return engine, time.perf_counter() - began


def time_model(source: ModelSource, context: int, threads: int) -> dict[str, dict[str, float]]:
    """Seconds of prefill and, in turn, between tokens by either clock."""
    base = resolve(None if source.branch is None else str(source.path))
    prompt = long_prompt(base, context - DECODED)
    engines, prefill = {}, {}
    for name, which in (("sparse", source), ("dense", base)):
        engines[name], prefill[name] = start(which, prompt, threads)
    wall: dict[str, list[float]] = {name: [] for name in engines}
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(DECODED - 1):
        for name, engine in engines.items():
            began, used = time.perf_counter(), time.thread_time()
            engine.step()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.thread_time() - used)
    for engine in engines.values():
        engine.close()
    times = {"decode, wall": wall, "decode, cpu": cpu}
    medians = {part: {name: statistics.median(each[name]) for name in engines} for part, each in times.items()}
    return {"prefill, wall": prefill, **medians}


def long_prompt(source: ModelSource, tokens: int) -> list[int]:
    """A text of that many tokens."""
    ids = Tokenizer.from_source(source).encode(TEXT)
    return (ids * (tokens // len(ids) + 1))[:tokens]


def report(title: str, times: dict[str, float]) -> None:
    rows = [["", "ms", "over sparse"]]
    rows += [[name, f"{t * 1e3:.3f}", f"{t / times['sparse']:.2f}x"] for name, t in times.items()]
    table(title, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SPARSE_MODEL)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="for the attention measurement")
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
        model = time_model(source, args.context, args.threads)
        for part, times in model.items():
            report(f"whole model at {args.context:,}: {part}", times)
        found["times"] = model
    print(json.dumps(found | {"limits": limits()}))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Prefill and decode speed of a whole M3-shaped model by depth, against llama.cpp and transformers in one run.

    python benchmarks/model.py MODEL_DIR [--depths 0,4096,16384] [--gguf FILE --llama-bench PATH] [--no-transformers]

MODEL_DIR is what transformers writes, as with the benchmark model. Decode is timed between streamed tokens at that
depth; prefill is the time to the first token of a prompt of that many tokens. The peers take turns with tamis. A short
greedy continuation is checked against the reference kernels before anything is timed. The last line is JSON.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import limits, table  # first: it settles how torch's threads wait

import torch

from tamis import LLM, LayerKind, ModelConfig, SamplingParams
from tamis.config import EngineConfig
from tamis.engine.build import build_engine
from tamis.kv import SparseKVPool
from tamis.models import resolve
from tamis.models.decoder import CausalLM

DECODED = 24
"""Tokens whose distances are timed."""
CHUNK = 512
"""Tokens of a prefill step of transformers."""


def prompt(tokens: int, vocab: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(max(tokens, 1))]


def run_tamis(llm: LLM, depth: int) -> dict[str, float]:
    """Seconds of prefill, median seconds between tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=DECODED + 1, ignore_eos=True)
    marks = [time.perf_counter()]
    for _ in llm.stream(prompt(depth, llm.config.vocab_size), sampling):
        marks.append(time.perf_counter())
    gaps = [after - before for before, after in itertools.pairwise(marks[1:])]
    return {"prefill": marks[1] - marks[0], "decode": statistics.median(gaps)}


def memory(name: str) -> int:
    """Bytes, of what /proc/self/status calls VmRSS (now) or VmHWM (the most so far)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def occupied(pool: SparseKVPool) -> int:
    """Bytes in use with every page of the pool written; what the process takes beyond them is counted from here on."""
    for layer in pool.layout.local_layers:
        for plane in pool.get_kv_buffer(layer):
            plane.zero_()
    for layer in pool.layout.sparse_layers:
        pool.get_index_k_buffer(layer).zero_()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    return memory("VmRSS")


class LayerTimes:
    """Seconds that the dense and the sparse layers of a model take, from forward hooks."""

    def __init__(self, model: CausalLM) -> None:
        self.seconds = {"dense": 0.0, "sparse": 0.0}
        for layer in model.layers:
            name = "dense" if layer.attention.kind is LayerKind.DENSE else "sparse"
            layer.register_forward_pre_hook(lambda *_: self._start())
            layer.register_forward_hook(lambda *_, name=name: self._stop(name))

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self, name: str) -> None:
        self.seconds[name] += time.perf_counter() - self._began

    def take(self) -> dict[str, float]:
        """What was spent since the last call."""
        found, self.seconds = self.seconds, {"dense": 0.0, "sparse": 0.0}
        return found


def bytes_a_token(config: ModelConfig, depth: int) -> int:
    """What a decode step at this depth must read: the weights of one token, and its context, in bf16."""
    hidden, dim, moe, sparse = config.hidden_size, config.head_dim, config.moe, config.sparse
    numbers = config.vocab_size * hidden
    for layer, kind in enumerate(config.layer_kinds):
        numbers += hidden * dim * (2 * config.q_heads + 2 * config.kv_heads)
        seen = depth
        if sparse is not None and kind is not LayerKind.DENSE:
            numbers += hidden * sparse.index_head_dim * (sparse.index_heads + 1) + depth * sparse.index_head_dim
            seen = min(depth, sparse.topk * sparse.block_size)
        numbers += 2 * seen * config.kv_heads * dim
        if moe is not None and moe.layers[layer]:
            numbers += 3 * hidden * (moe.experts_per_token * moe.intermediate_size + moe.shared_intermediate_size)
        else:
            numbers += 3 * hidden * config.intermediate_size
    return 2 * numbers


def run_transformers(model: object, depth: int, vocab: int) -> dict[str, float]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt(depth, vocab)])
    with torch.inference_mode():
        start = time.perf_counter()
        for at in range(0, ids.shape[1], CHUNK):
            model(ids[:, at : at + CHUNK], cache=cache, logits_to_keep=1)
        prefill = time.perf_counter() - start
        gaps = []
        for _ in range(DECODED if depth < 8192 else 8):
            start = time.perf_counter()
            model(torch.tensor([[5]]), cache=cache)
            gaps.append(time.perf_counter() - start)
    return {"prefill": prefill, "decode": statistics.median(gaps)}


def run_llama(args: argparse.Namespace, depth: int) -> dict[str, float]:
    """llama-bench: a prompt of `depth` (NaN beyond the depth up to which that is timed), and generation there."""

    def speed(*options: str) -> float:
        command = [str(args.llama_bench), "-m", str(args.gguf), "-t", str(args.threads), "-fa", "1", "-o", "json",
                   "-r", "1", *options]  # fmt: skip
        (found,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return float(found["avg_ts"])

    prefill = math.nan
    if depth <= args.llama_prefill:
        prefill = max(depth, 1) / speed("-p", str(max(depth, 1)), "-n", "0")
    return {"prefill": prefill, "decode": 1 / speed("-p", "0", "-n", str(DECODED), "-d", str(depth))}


def check(directory: str, threads: int) -> None:
    """The same tokens with our kernels as with the reference, in fp32, past the point where blocks are left out."""
    ids = {}
    for kernels in ("reference", "cpu"):
        with LLM(directory, dtype="fp32", kernels=kernels, threads=threads, kv_budget="200MiB") as llm:
            sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            (completion,) = llm.generate([prompt(2600, llm.config.vocab_size)], sampling)
            ids[kernels] = completion.token_ids
    if ids["reference"] != ids["cpu"]:
        raise SystemExit(f"the kernels disagree with the reference: {ids}")


def rounds(llm: LLM, args: argparse.Namespace, depth: int) -> Iterator[tuple[str, dict[str, float]]]:
    for _ in range(args.samples(depth)):
        yield "tamis", run_tamis(llm, depth)
        if args.llama_bench and depth <= args.peer_depth:
            yield "llama.cpp", run_llama(args, depth)
        if args.peer is not None and depth <= args.peer_depth:
            yield "transformers", run_transformers(args.peer, depth, llm.config.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--depths", default="0,2048,8192,16384,32768,131072")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-depth", type=int, default=16384, help="peers are not run beyond this depth")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-prefill", type=int, default=8192, help="llama.cpp's prefill is timed up to this depth")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    args = parser.parse_args()
    args.samples = lambda depth: args.rounds if depth <= args.peer_depth else 1
    if args.llama_bench and not args.gguf:
        parser.error("--llama-bench needs --gguf")
    torch.set_num_threads(args.threads)
    check(args.model, args.threads)
    args.peer = None if args.no_transformers else load_transformers(args.model)
    found, results = limits(), []
    depths = [int(depth) for depth in args.depths.split(",")]
    budget = 2 * (max(depths) + 512) * 20_000
    settings = EngineConfig(
        dtype="bf16", threads=args.threads, kv_budget=budget, max_batch_tokens=args.max_batch_tokens
    )
    engine = build_engine(resolve(args.model), settings, [])
    layers = LayerTimes(engine.runner.model)
    with LLM.from_engine(engine) as llm:
        run_tamis(llm, 64)
        before = occupied(engine.pool)
        for depth in depths:
            samples: dict[str, list[dict[str, float]]] = {}
            for name, sample in rounds(llm, args, depth):
                samples.setdefault(name, []).append(sample)
            result = summarise(depth, samples)
            result["layers"] = {name: seconds / args.samples(depth) for name, seconds in layers.take().items()}
            speed = bytes_a_token(llm.config, depth) / result["seconds"]["tamis"]["decode"] / 1e9
            result["decode_share_of_read"] = speed / found["read_gb_s"]
            print(f"decode reads {speed:.1f} GB/s of what it must, {speed / found['read_gb_s']:.0%} of the bandwidth")
            spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result["layers"].items())
            print(f"prefill and {DECODED} tokens: layers {spent}")
            results.append(result)
        peak = memory("VmHWM") - before
    print(
        json.dumps(
            without_nan({"benchmark": "model", "limits": found, "peak_growth_mib": peak / 2**20, "results": results})
        )
    )


def without_nan(value: Any) -> Any:
    """`value` with None for every NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def load_transformers(path: str) -> object:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    return MiniMaxM3VLForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def summarise(depth: int, samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    medians = {
        name: {kind: statistics.median(sample[kind] for sample in found) for kind in ("prefill", "decode")}
        for name, found in samples.items()
    }
    ours = medians["tamis"]
    rows = [["", "prefill tok/s", "decode tok/s", "tamis over it", ""]]
    for name, found in medians.items():
        ratios = [f"{found[kind] / ours[kind]:.2f}x" for kind in ("prefill", "decode")]
        rows.append([name, f"{max(depth, 1) / found['prefill']:.0f}", f"{1 / found['decode']:.1f}", *ratios])
    table(f"depth {depth:,}", rows)
    return {"depth": depth, "seconds": medians}


if __name__ == "__main__":
    main()

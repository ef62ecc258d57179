#!/usr/bin/env python3
"""One attention layer of MiniMax-M3's shape: block-sparse against our dense kernel and torch's, by context.

    python benchmarks/attention.py [--contexts 8192,131072,1048576] [--prefill 512] [--threads 2] [--page-size 32]

64 query heads, 4 KV heads, dim 128, 4 index heads, 16 blocks of 128, all planes bf16. Decode is one token at the end of
the context; prefill is the last tokens of it. torch gets the fastest exact form of scaled_dot_product_attention: the
group folded into the query rows for decode, stride-0 heads and the causal mask it needs for prefill. Sparse times are
whole: scores, selection and attention. Outputs are checked before anything is timed. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

from measure import interleaved, limits, table  # first: it settles how torch's threads wait

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.config import LayerKind, SparseAttentionConfig
from tamis.kernels import AttentionBatch, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kv import KVLayout, SparseKVPool

Q_HEADS, KV_HEADS, DIM, INDEX_HEADS = 64, 4, 128, 4
SPARSE = SparseAttentionConfig(INDEX_HEADS, DIM, block_size=128, topk=16)
LAYERS = 6
"""Layers that a decode measurement goes through."""
CHECKED = 131_072
"""Contexts up to this long are checked against the reference, longer ones against torch."""


@dataclass(frozen=True)
class Layer:
    """Planes that hold one sequence, and the same K and V as torch wants them."""

    k: Tensor
    v: Tensor
    index_k: Tensor
    torch_k: Tensor
    torch_v: Tensor
    page_table: Tensor
    context: int

    def batch(self, tokens: int) -> AttentionBatch:
        """The last `tokens` of the sequence."""
        n = self.context
        return AttentionBatch(
            self.page_table, torch.tensor([n], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32),
            torch.arange(n - tokens, n, dtype=torch.int32),
        )  # fmt: skip


def make_layer(context: int, page_size: int) -> Layer:
    pages = -(-context // page_size)
    layout = KVLayout((LayerKind.SPARSE_K,), KV_HEADS, DIM, index_head_dim=DIM, page_size=page_size)
    pool = SparseKVPool(layout, pages)
    planes = [*pool.get_kv_buffer(0), pool.get_index_k_buffer(0)]
    for plane in planes:
        plane.normal_()
    # From numpy, as the pool's memory is: it asks for huge pages, which torch's own allocations do not.
    dense = [
        torch.from_numpy(np.empty((1, KV_HEADS, pages, page_size, DIM), np.uint16)).view(torch.bfloat16) for _ in "kv"
    ]
    for copy, plane in zip(dense, planes, strict=False):
        copy[0].copy_(plane[1:].transpose(0, 1))
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    return Layer(*planes, *(copy.flatten(2, 3)[:, :, :context] for copy in dense), table, context)


def sparse(ops: CpuOps, layer: Layer, q: Tensor, index_q: Tensor, batch: AttentionBatch) -> Tensor:
    return ops.picked_attention(q, layer.k, layer.v, index_q, layer.index_k, batch, SPARSE)


def sdpa_decode(layer: Layer, q: Tensor) -> Tensor:
    folded = q.view(1, KV_HEADS, Q_HEADS // KV_HEADS, DIM)
    return F.scaled_dot_product_attention(folded, layer.torch_k, layer.torch_v).reshape(1, Q_HEADS, DIM)


def sdpa_prefill(layer: Layer, q: Tensor, mask: Tensor) -> Tensor:
    if layer.context <= CHECKED:
        group = Q_HEADS // KV_HEADS
        heads = q.view(len(q), KV_HEADS, group, DIM).permute(1, 2, 0, 3)
        k, v = (x[0, :, None].expand(KV_HEADS, group, layer.context, DIM) for x in (layer.torch_k, layer.torch_v))
        return F.scaled_dot_product_attention(heads, k, v, attn_mask=mask).permute(2, 0, 1, 3).reshape(q.shape)
    out = torch.empty_like(q)
    for head in range(Q_HEADS):  # slower, but with all at once torch copies K and V for each of the group: 34 GB
        at = slice(head * KV_HEADS // Q_HEADS, head * KV_HEADS // Q_HEADS + 1)
        k, v = layer.torch_k[:, at], layer.torch_v[:, at]
        out[:, head] = F.scaled_dot_product_attention(q[None, None, :, head], k, v, attn_mask=mask)[0, 0]
    return out


def check(name: str, got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the size of the outputs; stops the benchmark above 2%."""
    error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not error <= 2e-2:
        raise SystemExit(f"{name}: wrong by {error:.2%}")
    return error


def check_layer(ops: CpuOps, layer: Layer, tokens: int) -> None:
    """A decode token and a few prefill tokens, sparse and dense."""
    reference = ReferenceOps()
    for rows in {1, min(max(tokens, 1), 4)}:
        q = torch.randn(rows, Q_HEADS, DIM).bfloat16()
        index_q = torch.randn(rows, INDEX_HEADS, DIM).bfloat16()
        batch = layer.batch(rows)
        # The same picks for both: where two blocks score alike, rounding may choose either.
        picks = reference.select_blocks(
            ops.score_blocks(index_q, layer.index_k, batch, SPARSE), batch.positions, SPARSE
        )
        wanted = reference.score_blocks(index_q, layer.index_k, batch, SPARSE)
        check("scores", ops.score_blocks(index_q, layer.index_k, batch, SPARSE)[wanted > -torch.inf],
              wanted[wanted > -torch.inf])  # fmt: skip
        check("sparse", ops.sparse_attention(q, layer.k, layer.v, picks, batch, SPARSE.block_size),
              reference.sparse_attention(q, layer.k, layer.v, picks, batch, SPARSE.block_size))  # fmt: skip
        if layer.context <= CHECKED:
            dense = reference.dense_attention(q, layer.k, layer.v, batch)
        elif rows == 1:
            dense = sdpa_decode(layer, q)
        else:
            continue
        check("dense", ops.dense_attention(q, layer.k, layer.v, batch), dense)


def decode(ops: CpuOps, layers: list[Layer], seconds: float) -> dict[str, float]:
    """Seconds of one token at the end of the context, one layer after the other as in a model."""
    q, index_q = torch.randn(1, Q_HEADS, DIM).bfloat16(), torch.randn(1, INDEX_HEADS, DIM).bfloat16()
    batch = layers[0].batch(1)
    runs: dict[str, Callable[[Layer], Tensor]] = {
        "sparse": lambda layer: sparse(ops, layer, q, index_q, batch),
        "dense": lambda layer: ops.dense_attention(q, layer.k, layer.v, batch),
        "sdpa": lambda layer: sdpa_decode(layer, q),
    }

    def over_all(run: Callable[[Layer], Tensor]) -> Callable[[], object]:
        return lambda: [run(layer) for layer in layers]

    found = interleaved({name: over_all(run) for name, run in runs.items()}, seconds)
    return {name: time / len(layers) for name, time in found.items()}


def prefill(ops: CpuOps, layer: Layer, tokens: int, seconds: float) -> dict[str, float]:
    """Seconds of the last `tokens` of the context."""
    q, index_q = torch.randn(tokens, Q_HEADS, DIM).bfloat16(), torch.randn(tokens, INDEX_HEADS, DIM).bfloat16()
    batch, places = layer.batch(tokens), torch.arange(layer.context)
    mask = places <= torch.arange(layer.context - tokens, layer.context)[:, None]
    ours = interleaved({"sparse": lambda: sparse(ops, layer, q, index_q, batch)}, seconds)
    return ours | interleaved({"sdpa": lambda: sdpa_prefill(layer, q, mask)}, seconds / 4, least=1)


def bytes_read(context: int) -> dict[str, int]:
    """What a decode step of this layer must read, sparse and dense."""
    row = 2 * KV_HEADS * DIM * 2
    return {"sparse": context * DIM * 2 + SPARSE.topk * SPARSE.block_size * row, "dense": context * row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="8192,32768,131072,1048576")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill part; 0: none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ops = CpuOps(args.threads)
    found = limits()
    results = []
    for context in map(int, args.contexts.split(",")):
        # Several layers where memory allows, so that no cache holds the index keys of the one that is timed.
        layers = [make_layer(context, args.page_size) for _ in range(LAYERS if context <= CHECKED else 1)]
        layer = layers[0]
        check_layer(ops, layer, args.prefill)
        result = {"context": context, "decode": decode(ops, layers, args.seconds), "bytes": bytes_read(context)}
        del layers
        if args.prefill:
            result["prefill"] = prefill(ops, layer, min(args.prefill, context), args.seconds)
        results.append(result)
        report(result, found)
    ops.close()
    print(json.dumps({"benchmark": "attention", "limits": found, "results": results}))


def report(result: dict[str, object], found: dict[str, float]) -> None:
    times, size = result["decode"], result["bytes"]
    assert isinstance(times, dict)
    assert isinstance(size, dict)
    rows = [["", "ms", "GB/s", "of read", "over sparse"]]
    for name, seconds in times.items():
        speed = size["sparse" if name == "sparse" else "dense"] / seconds / 1e9
        share, ratio = speed / found["read_gb_s"], seconds / times["sparse"]
        rows.append([name, f"{seconds * 1e3:.2f}", f"{speed:.1f}", f"{share:.0%}", f"{ratio:.1f}x"])
    table(f"decode at {result['context']:,}", rows)
    if isinstance(times := result.get("prefill"), dict):
        rows = [["", "ms", "over sparse"]]
        rows += [[name, f"{t * 1e3:.0f}", f"{t / times['sparse']:.1f}x"] for name, t in times.items()]
        table(f"prefill of the last tokens at {result['context']:,}", rows)


if __name__ == "__main__":
    main()

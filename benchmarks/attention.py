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
from dataclasses import dataclass

from measure import interleaved, limits, table  # first: it settles how torch's threads wait

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.config import SparseAttentionConfig
from tamis.kernels import AttentionBatch, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps

Q_HEADS, KV_HEADS, DIM, INDEX_HEADS = 64, 4, 128, 4
SPARSE = SparseAttentionConfig(INDEX_HEADS, DIM, block_size=128, topk=16)
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
    planes = [torch.randn(pages + 1, heads, page_size, DIM, dtype=torch.bfloat16) for heads in (KV_HEADS, KV_HEADS, 1)]
    dense = [p[1:].transpose(0, 1).reshape(1, KV_HEADS, pages * page_size, DIM)[:, :, :context] for p in planes[:2]]
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    return Layer(*planes, *(tensor.contiguous() for tensor in dense), table, context)


def sparse(ops: CpuOps | ReferenceOps, layer: Layer, q: Tensor, index_q: Tensor) -> Tensor:
    batch = layer.batch(len(q))
    scores = ops.score_blocks(index_q, layer.index_k, batch, SPARSE)
    picks = ops.select_blocks(scores, batch.positions, SPARSE)
    return ops.sparse_attention(q, layer.k, layer.v, picks, batch, SPARSE.block_size)


def sdpa_decode(layer: Layer, q: Tensor) -> Tensor:
    folded = q.view(1, KV_HEADS, Q_HEADS // KV_HEADS, DIM)
    return F.scaled_dot_product_attention(folded, layer.torch_k, layer.torch_v).reshape(1, Q_HEADS, DIM)


def sdpa_prefill(layer: Layer, q: Tensor, mask: Tensor) -> Tensor:
    group = Q_HEADS // KV_HEADS
    heads = q.view(len(q), KV_HEADS, group, DIM).permute(1, 2, 0, 3)
    k, v = (x[0, :, None].expand(KV_HEADS, group, layer.context, DIM) for x in (layer.torch_k, layer.torch_v))
    out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(len(q), Q_HEADS, DIM)


def check(name: str, got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the size of the outputs; stops the benchmark above 2%."""
    error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not error <= 2e-2:
        raise SystemExit(f"{name}: wrong by {error:.2%}")
    return error


def check_layer(ops: CpuOps, layer: Layer, tokens: int) -> None:
    """A decode token and a few prefill tokens, sparse and dense."""
    reference = ReferenceOps()
    for rows in (1, min(tokens, 4)):
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


def decode(ops: CpuOps, layer: Layer, seconds: float) -> dict[str, float]:
    """Seconds of one token at the end of the context."""
    q, index_q = torch.randn(1, Q_HEADS, DIM).bfloat16(), torch.randn(1, INDEX_HEADS, DIM).bfloat16()
    batch = layer.batch(1)
    return interleaved(
        {
            "sparse": lambda: sparse(ops, layer, q, index_q),
            "dense": lambda: ops.dense_attention(q, layer.k, layer.v, batch),
            "sdpa": lambda: sdpa_decode(layer, q),
        },
        seconds,
    )


def prefill(ops: CpuOps, layer: Layer, tokens: int, seconds: float) -> dict[str, float]:
    """Seconds of the last `tokens` of the context."""
    q, index_q = torch.randn(tokens, Q_HEADS, DIM).bfloat16(), torch.randn(tokens, INDEX_HEADS, DIM).bfloat16()
    places = torch.arange(layer.context)
    mask = places <= torch.arange(layer.context - tokens, layer.context)[:, None]
    ours = interleaved({"sparse": lambda: sparse(ops, layer, q, index_q)}, seconds)
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
        layer = make_layer(context, args.page_size)
        check_layer(ops, layer, args.prefill)
        result = {"context": context, "decode": decode(ops, layer, args.seconds), "bytes": bytes_read(context)}
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

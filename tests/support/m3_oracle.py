"""The whole M3 model written out once more, in double precision, over a checkpoint in the released spelling.

Everything is computed for the whole sequence at once: no pool, no pages, no batch, blocks chosen by sorting. Nothing is
shared with tamis. Where transformers has a setting too, parity tests hold it against transformers.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class M3Oracle:
    """Logits of a sequence. N tokens, Hq, Hk, Hi query, KV and index heads, D, Di their dims."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())["text_config"]
        self.sparse: dict[str, Any] = self.config["sparse_attention_config"]
        stored = load_file(directory / "model.safetensors")
        start = "language_model."
        self.weights = {name[len(start) :]: w.double() for name, w in stored.items() if name.startswith(start)}

    def logits(self, ids: list[int]) -> Tensor:
        """[N, vocab], double."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            start = f"model.layers.{layer}."
            y = self._norm(x, start + "input_layernorm")
            x = x + self._attention(y, layer, start + "self_attn.")
            y = self._norm(x, start + "post_attention_layernorm")
            experts = self.config["moe_layer_freq"][layer]
            x = x + (self._experts(y, start + "block_sparse_moe.") if experts else self._mlp(y, start + "mlp."))
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _attention(self, y: Tensor, layer: int, start: str) -> Tensor:
        dim, kv_heads = self.config["head_dim"], self.config["num_key_value_heads"]
        q = self._rope(self._norm(self._linear(y, start + "q_proj", dim), start + "q_norm"))
        k = self._rope(self._norm(self._linear(y, start + "k_proj", dim), start + "k_norm"))
        v = self._linear(y, start + "v_proj", dim)
        seen = torch.ones(len(y), len(y), dtype=torch.bool).tril().repeat(kv_heads, 1, 1)
        own = torch.zeros(())
        if self.sparse["sparse_attention_freq"][layer]:
            scores = self._index_scores(y, start)
            seen = self._seen(scores)
            if not self.sparse["sparse_disable_index_value"][layer]:
                index_v = self._linear(y, start + "index_v_proj")
                weights = _softmax(scores, torch.ones_like(scores, dtype=torch.bool).tril())
                own = self._linear((weights @ index_v).transpose(0, 1).flatten(1), start + "index_o_proj")
        group = q.shape[1] // kv_heads
        logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) / math.sqrt(dim)
        weights = _softmax(logits, seen.repeat_interleave(group, 0))
        out = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1))
        return self._linear(out.flatten(1), start + "o_proj") + own

    def _index_scores(self, y: Tensor, start: str) -> Tensor:
        """[Hi, N, N]"""
        dim = self.sparse["sparse_index_dim"]
        q = self._rope(self._norm(self._linear(y, start + "index_q_proj", dim), start + "index_q_norm"))
        k = self._rope(self._norm(self._linear(y, start + "index_k_proj", dim), start + "index_k_norm"))
        return torch.einsum("ihd,jd->hij", q, k[:, 0]) / math.sqrt(dim)

    def _seen(self, scores: Tensor) -> Tensor:
        """Which tokens each query of each KV head attends to, bool [Hk, N, N]: the union over its index heads."""
        size, kv_heads = self.sparse["sparse_block_size"], self.config["num_key_value_heads"]
        seen = torch.zeros(kv_heads, *scores.shape[1:], dtype=torch.bool)
        for head, rows in enumerate(scores):
            for place, row in enumerate(rows):
                for block in self._blocks(row[: place + 1], place // size):
                    seen[head * kv_heads // len(scores), place, block * size : min((block + 1) * size, place + 1)] = (
                        True
                    )
        return seen

    def _blocks(self, row: Tensor, own: int) -> list[int]:
        """The blocks of one query: forced ones first, then the best scores, ties to the lowest id."""
        tokens = [row[start : start + self.sparse["sparse_block_size"]] for start in self._starts(own)]
        best = self.sparse["sparse_score_type"] == "max"
        scores = [float(block.max() if best else block.logsumexp(0)) for block in tokens]
        init, local = self.sparse["sparse_init_block"], self.sparse["sparse_local_block"]
        forced = [block for block in range(own + 1) if block < init or block > own - local]
        others = sorted(set(range(own + 1)) - set(forced), key=lambda block: (-scores[block], block))
        return forced + others[: self.sparse["sparse_topk_blocks"] - len(forced)]

    def _starts(self, own: int) -> list[int]:
        return [block * self.sparse["sparse_block_size"] for block in range(own + 1)]

    def _experts(self, y: Tensor, start: str) -> Tensor:
        chances = torch.sigmoid(self._linear(y, start + "gate"))
        biased = chances + self.weights[start + "e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_tok"], -1).indices
        weights = chances.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        out = self._mlp(y, start + "shared_experts.")
        for expert in range(chances.shape[1]):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + share * self._mlp(y, f"{start}experts.{expert}.", ("w1", "w3", "w2"))
        return out

    def _mlp(
        self, y: Tensor, start: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Tensor:
        limit, alpha = self.config["swiglu_limit"], self.config["swiglu_alpha"]
        gate, up = (self._linear(y, start + name) for name in names[:2])
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self._linear((up + 1) * gate * torch.sigmoid(alpha * gate), start + names[2])

    def _linear(self, x: Tensor, name: str, dim: int | None = None) -> Tensor:
        """[N, out], or cut into heads [N, H, dim]."""
        out = x @ self.weights[f"{name}.weight"].T
        return out if dim is None else out.view(len(x), -1, dim)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * (1 + self.weights[f"{name}.weight"])

    def _rope(self, x: Tensor) -> Tensor:
        """[N, H, D], the first `rotary_dim` channels turned by position."""
        turned, half = self.config["rotary_dim"], self.config["rotary_dim"] // 2
        frequencies = self.config["rope_theta"] ** -(torch.arange(half).double() * 2 / turned)
        angles = (torch.arange(len(x)).double()[:, None] * frequencies)[:, None]
        a, b, rest = x[..., :half], x[..., half:turned], x[..., turned:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _softmax(logits: Tensor, seen: Tensor) -> Tensor:
    return logits.masked_fill(~seen, -math.inf).softmax(-1)

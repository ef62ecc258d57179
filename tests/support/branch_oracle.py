"""A Llama with an index branch written out once more, in double precision: transformers' model, own attention.

Everything is computed for the whole sequence at once: no pool, no pages, blocks chosen by sorting. Nothing is shared
with tamis; `tamis.models.index_branch` is not asked either: the JSON and the tensors are read here.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def retrofit_oracle(model: Any, directory: Path) -> Any:
    """`model`, a transformers Llama, whose layers attend as the branch in `directory` says; in double precision."""
    branch: dict[str, Any] = json.loads((directory / "index_branch.json").read_text())
    weights = {name: w.double() for name, w in load_file(directory / "index_branch.safetensors").items()}
    model = model.double()
    for layer_id, kind in enumerate(branch["layer_kinds"]):
        if kind != "dense":
            attention = model.model.layers[layer_id].self_attn
            attention.forward = _Attention(attention, branch, weights, f"layers.{layer_id}.self_attn.index_")
    return model


class _Attention:
    """Stands in for `LlamaAttention.forward`. N tokens, one sequence."""

    def __init__(self, module: Any, branch: dict[str, Any], weights: dict[str, Tensor], start: str) -> None:
        self.module, self.branch, self.weights, self.start = module, branch, weights, start

    def __call__(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Any:
        y, module = hidden_states[0], self.module
        config, dim = module.config, module.head_dim
        cos, sin = (table[0].double() for table in position_embeddings)
        q, k, v = (p(y).view(len(y), -1, dim) for p in (module.q_proj, module.k_proj, module.v_proj))
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        group = config.num_attention_heads // config.num_key_value_heads
        scores = self._scores(y)
        logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) / math.sqrt(dim)
        weights = _softmax(logits, self._seen(scores).repeat_interleave(group, 0))
        out = module.o_proj(torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1)).flatten(1))
        if f"{self.start}v_proj.weight" in self.weights:
            all_before = torch.ones_like(scores, dtype=torch.bool).tril()
            own = _softmax(scores, all_before) @ self._linear(y, "v_proj")
            out = out + self._linear(own.transpose(0, 1).flatten(1), "o_proj")
        return out[None], None

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{self.start}{name}.weight"].T

    def _heads(self, y: Tensor, name: str) -> Tensor:
        heads = self._linear(y, f"{name}_proj").view(len(y), -1, self.branch["index_head_dim"])
        scaled = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.branch["norm_eps"])
        return _turn(scaled * self.weights[f"{self.start}{name}_norm.weight"], *self._angles(len(y)))

    def _angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        turned = self.branch["index_rotary_dim"]
        theta = self.branch.get("rope_theta") or self.module.config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, turned, 2).double() / turned)
        angles = (torch.arange(tokens).double()[:, None] * frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _scores(self, y: Tensor) -> Tensor:
        """[Hi, N, N]"""
        q, k = self._heads(y, "q"), self._heads(y, "k")
        return torch.einsum("ihd,jd->hij", q, k[:, 0]) / math.sqrt(self.branch["index_head_dim"])

    def _seen(self, scores: Tensor) -> Tensor:
        """Which tokens each query of each KV head attends to, bool [Hi, N, N]."""
        size = self.branch["block_size"]
        seen = torch.zeros(scores.shape, dtype=torch.bool)
        for head, rows in enumerate(scores):
            for place, row in enumerate(rows):
                for block in self._blocks(row[: place + 1], place // size):
                    seen[head, place, block * size : min((block + 1) * size, place + 1)] = True
        return seen

    def _blocks(self, row: Tensor, own: int) -> list[int]:
        """The blocks of one query: forced ones first, then the best scores, ties to the lowest id."""
        size = self.branch["block_size"]
        scores = [float(row[block * size : (block + 1) * size].max()) for block in range(own + 1)]
        init, local = self.branch["init_blocks"], self.branch["local_blocks"]
        forced = [block for block in range(own + 1) if block < init or block > own - local]
        others = sorted(set(range(own + 1)) - set(forced), key=lambda block: (-scores[block], block))
        return forced + others[: self.branch["topk"] - len(forced)]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, H, D]: the first channels, as many as `cos` [N, R] has, turned: channel i with i + R / 2."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    other = torch.cat([-turned[..., rotary // 2 :], turned[..., : rotary // 2]], -1)
    return torch.cat([turned * cos[:, None] + other * sin[:, None], rest], -1)


def _softmax(logits: Tensor, seen: Tensor) -> Tensor:
    return logits.masked_fill(~seen, -math.inf).softmax(-1)

"""The dense model as a teacher: one text at a time through plain torch, every layer's attention open to a visitor.

What a layer needs is computed some rows at a time, so that the longest context takes a few hundred MB beside weights.
Shapes: T tokens, n queries of a strip, C hidden size, Hq/Hkv heads, D their dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.config import ModelConfig
from tamis.errors import ConfigError
from tamis.kernels.dense import TorchModelOps, apply_rope, project, rms_norm
from tamis.kernels.linear import HeadGroup, Rope
from tamis.models import ModelSource, load_config
from tamis.models.attention import Attention
from tamis.models.decoder import CausalLM, DecoderLayer
from tamis.models.loader import load_model
from tamis.progress import Progress

ROWS = 2048
"""Tokens an MLP takes at a time."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer's attention over a text, as the dense model computes it."""

    layer: int
    hidden: Tensor
    """[T, C]: what q, k and v are projected from, behind the norm."""
    q: Tensor
    """[T, Hq, D], rotated."""
    k: Tensor
    """[T, Hkv, D], rotated."""
    v: Tensor
    """[T, Hkv, D]."""
    attended: Tensor
    """[T, Hq, D]: what goes into the output projection."""
    residual: Tensor
    """fp32 [T, C]: what the layer's output is added to."""

    def probabilities(self, positions: Tensor) -> Tensor:
        """Attention of the queries at `positions` (ascending, [n]) to the keys they can see, fp32 [Hq, n, t].

        t = `reach`: keys beyond a query have no probability.
        """
        keys = self.k[: reach(positions, len(self.k))].permute(1, 2, 0)
        q = (self.q[positions] * self.q.shape[-1] ** -0.5).transpose(0, 1).reshape(len(keys), -1, self.q.shape[-1])
        scores = (q @ keys).float().reshape(self.q.shape[1], len(positions), -1)
        return hide_future(scores, positions).softmax(-1)

    def teaching(self, positions: Tensor) -> Tensor:
        """What an index head should attend to: the mean over its group's heads (facts.md section 2), [Hkv, n, t]."""
        return group_mean(self.probabilities(positions), self.k.shape[1])


def group_mean(probabilities: Tensor, groups: int) -> Tensor:
    """[Hq, n, t] -> [groups, n, t]: the mean over the heads of a group."""
    return probabilities.reshape(groups, -1, *probabilities.shape[1:]).mean(1)


def hide_future(scores: Tensor, positions: Tensor) -> Tensor:
    """`scores` [..., n, t] of queries at `positions` [n], ascending, -inf for keys after the query, in place."""
    first = int(positions[0])  # whatever all queries see needs no mask
    future = torch.arange(first, scores.shape[-1]) > positions[:, None]
    scores[..., first:].masked_fill_(future, -torch.inf)
    return scores


def reach(positions: Tensor, tokens: int) -> int:
    """How many of the keys the last of ascending `positions` sees, rounded up to whole blocks of common sizes."""
    return min(tokens, -(-(int(positions[-1]) + 1) // ALIGNED) * ALIGNED)


ALIGNED = 64
Visitor = Callable[[LayerView], None]


class Teacher:
    """The dense model `source`, in bf16 or `dtype`. Raises ConfigError unless it is of the Llama family and dense."""

    def __init__(self, source: ModelSource, *, dtype: torch.dtype = torch.bfloat16, progress: Progress | None = None):
        self.config = check_base(source, load_config(source))
        self.model = load_model(source, self.config, dtype=dtype, quant="none", progress=progress)
        self.dtype = dtype

    @property
    def layers(self) -> Iterator[DecoderLayer]:
        """The model's layers, first to last."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def attention(self, layer: int) -> Attention:
        """The attention of a layer, by its number."""
        found = self.model.layers[layer].attention
        assert isinstance(found, Attention)
        return found

    def rope(self, tokens: int) -> Rope:
        """Cos and sin of the first positions."""
        return self.model.rotary.table(torch.arange(tokens))

    @torch.no_grad()
    def visit(self, token_ids: Tensor, visitor: Visitor) -> Tensor:
        """Run a text, int64 [T], showing each layer to `visitor` on the way; returns the last hidden states [T, C]."""
        rope = self.rope(len(token_ids))
        x = TorchModelOps().embed(self.model.embed_tokens, token_ids)
        for number, layer in enumerate(self.layers):
            view = self._attend(number, layer, x, rope)
            with torch.enable_grad():
                visitor(view)
            x += project(view.attended.flatten(1), layer.attention.o_proj)
            for rows in torch.split(x, ROWS):
                layer.mlp(rows, layer.mlp_norm, TorchModelOps())
        return x

    def _attend(self, number: int, layer: DecoderLayer, x: Tensor, rope: Rope) -> LayerView:
        hidden = rms_norm(x, layer.input_norm).to(self.dtype)
        q, k, v = split_heads(hidden, layer.attention, rope)
        # Heads first, and a batch of one: what the flash kernel takes, which keeps no scores.
        q_, k_, v_ = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)
        return LayerView(number, hidden, q, k, v, attended[0].transpose(0, 1), x)


def split_heads(hidden: Tensor, attention: Attention, rope: Rope) -> list[Tensor]:
    """q, k and v of normed hidden states [T, C], each [T, heads, D], with their norms and rotation."""
    widths = [each.heads * each.dim for each in attention.groups]
    parts = torch.split(project(hidden, attention.qkv_proj), widths, dim=-1)
    return [_finish(part, group, rope) for part, group in zip(parts, attention.groups, strict=True)]


def _finish(part: Tensor, group: HeadGroup, rope: Rope) -> Tensor:
    heads = part.reshape(len(part), group.heads, group.dim)
    if group.norm is None and not group.rotates:
        return heads
    wide = heads.float() if group.norm is None else rms_norm(heads, group.norm)
    return (apply_rope(wide, rope) if group.rotates else wide).to(part.dtype)


def check_base(source: ModelSource, config: ModelConfig) -> ModelConfig:
    """`config`, where a branch can be trained for it. Raises ConfigError."""
    if config.family != "llama":
        raise ConfigError(f"{source.name} is a {config.model_type} model, not one of the Llama family")
    if config.sparse is not None:
        raise ConfigError(f"{source.name} has an index branch already; retrofit needs the dense model")
    return config


def next_token_losses(teacher: CausalLM, hidden: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """Negative log-likelihoods, fp32, of the tokens at `first` and after, from the last hidden states [T, C]."""
    losses = []
    for at in range(first - 1, len(token_ids) - 1, ROWS // 8):
        end = min(at + ROWS // 8, len(token_ids) - 1)
        logits = TorchModelOps().logits(hidden[at:end], teacher.norm, teacher.lm_head)
        losses.append(F.cross_entropy(logits, token_ids[at + 1 : end + 1], reduction="none"))
    return torch.cat(losses)

"""The decoder-only language model that both families share; they differ in configuration and in their weight plans."""

from functools import cached_property

import torch
from torch import Tensor, nn

from tamis.config import LayerKind, ModelConfig
from tamis.kernels.linear import LayerWeights, Linear, Ropes
from tamis.models.attention import Attention, StepContext
from tamis.models.layers import GatedMLP, MixtureOfExperts, RMSNorm, RotaryEmbedding

LAYERS_AT_ONCE = 16
"""Layers run in a piece; between pieces a step can be ended."""


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer_id, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module = (
            MixtureOfExperts(config, config.moe, dtype)
            if config.moe is not None and config.moe.layers[layer_id]
            else GatedMLP(config, config.intermediate_size, dtype)
        )

    @cached_property
    def weights(self) -> LayerWeights:
        """What the kernels need of this layer; asked for once its weights are loaded."""
        attention, mlp = self.attention, self.mlp
        assert isinstance(mlp, MixtureOfExperts | GatedMLP)
        return LayerWeights(
            self.input_norm, attention.projections, attention.o_proj, self.mlp_norm, mlp.weights,
            None if attention.kind is LayerKind.DENSE else attention.config.sparse,
        )  # fmt: skip

    def forward(self, x: Tensor, ropes: Ropes, step: StepContext) -> None:
        """Adds to the residual stream x, fp32 [T, C]."""
        self.attention(x, self.input_norm, ropes, step)
        self.mlp(x, self.mlp_norm, step.model_ops)


class CausalLM(nn.Module):
    """Token ids in, logits out, with all context in the pool. Built without storage; see `loader.load_model`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = (
            self.embed_tokens if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, dtype)
        )
        self.rotary = RotaryEmbedding(config.rope)
        own = config.index_branch is not None and config.index_branch.rope != config.rope
        self.index_rotary = RotaryEmbedding(config.index_branch.rope) if own and config.index_branch else self.rotary

    def forward(self, token_ids: Tensor, step: StepContext, logit_rows: Tensor) -> Tensor:
        """Run one step.

        token_ids int64 [T]; logit_rows int64 [R], the rows whose next token is wanted. Returns fp32 [R, vocab_size].
        """
        rope = self.rotary.table(step.batch.positions)
        index = rope if self.index_rotary is self.rotary else self.index_rotary.table(step.batch.positions)
        ropes = (rope, index)
        x = step.model_ops.embed(self.embed_tokens, token_ids)
        at = 0
        while at < len(self.layers):
            step.before_layer()
            done = self._run_in_one(at, x, ropes, step)
            if not done:
                self.layers[at](x, ropes, step)
            at += done or 1
        return step.model_ops.logits(x[logit_rows], self.norm, self.lm_head)

    def _run_in_one(self, first: int, x: Tensor, ropes: Ropes, step: StepContext) -> int:
        """Have backends that can run layers in a piece take some from `first` on; how many they took."""
        if step.layers is None:
            return 0
        # While layers are being loaded each is opened, and waited for, when its turn comes.
        most = 1 if step.pool.is_loading else LAYERS_AT_ONCE
        run: list[LayerWeights] = []
        for weights in self._weights[first : first + most]:
            if weights is None:
                break
            run.append(weights)
        if not run:
            return 0
        return step.layers.run(run, x, ropes, lambda place: step.pool.open_layer(first + place, step.slots), step.batch)

    @cached_property
    def _weights(self) -> list[LayerWeights | None]:
        """Of each layer that may run in a piece with others."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return [None if layer.attention.kind is LayerKind.SPARSE_KV else layer.weights for layer in layers]

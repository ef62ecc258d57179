"""The decoder-only language model that both families share; they differ in configuration and in their weight plans."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.config import ModelConfig
from tamis.models.attention import Attention, StepContext
from tamis.models.layers import GatedMLP, MixtureOfExperts, RMSNorm, RotaryEmbedding, linear


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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
        """[T, C] -> [T, C]."""
        x = x + self.attention(self.input_norm(x), rope, step)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class CausalLM(nn.Module):
    """Token ids in, logits out, with all context in the pool. Built without storage; see `loader.load_model`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device="meta")
        self.embed_tokens = nn.Parameter(table, requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else linear(config.hidden_size, config.vocab_size, dtype)
        self.rotary = RotaryEmbedding(config.rope)

    def forward(self, token_ids: Tensor, step: StepContext, logit_rows: Tensor) -> Tensor:
        """Run one step.

        token_ids int64 [T]; logit_rows int64 [R], the rows whose next token is wanted. Returns fp32 [R, vocab_size].
        """
        rope = self.rotary.table(step.batch.positions)
        x = F.embedding(token_ids, self.embed_tokens)
        for layer in self.layers:
            x = layer(x, rope, step)
        wanted = self.norm(x[logit_rows])
        head = self.embed_tokens if self.lm_head is None else self.lm_head.weight
        return F.linear(wanted, head).float()

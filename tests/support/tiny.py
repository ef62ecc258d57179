"""Small random models written by transformers, the oracle of the parity tests."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

VOCAB = 160
LLAMA_FAMILY = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def m3_config(
    layers: int = 3,
    q_heads: int = 4,
    kv_heads: int = 2,
    *,
    topk: int = 3,
    block: int = 4,
    local: int = 1,
    dense: int = 1,
) -> MiniMaxM3VLTextConfig:
    """An M3-shaped configuration: `dense` dense layers, then sparse ones with experts."""
    sparse = layers - dense
    return MiniMaxM3VLTextConfig(
        hidden_size=64, intermediate_size=32, dense_intermediate_size=96, shared_intermediate_size=32,
        num_hidden_layers=layers, num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=32,
        max_position_embeddings=2048, vocab_size=VOCAB, num_local_experts=4, num_experts_per_tok=2, rotary_dim=16,
        index_n_heads=kv_heads, index_head_dim=32, index_block_size=block, index_topk_blocks=topk,
        index_local_blocks=local, layer_types=["full_attention"] * dense + ["minimax_m3_sparse"] * sparse,
        mlp_layer_types=["dense"] * dense + ["sparse"] * sparse, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip


def llama_config(kind: str, **changes: Any) -> Any:
    """A configuration of the Llama family: "llama", "mistral", "qwen2" or "qwen3"."""
    fields: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "vocab_size": VOCAB,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "mistral":
        fields["sliding_window"] = None
    return LLAMA_FAMILY[kind](**(fields | changes))


def build(config: Any, seed: int = 0) -> Any:
    """A random fp32 model whose every tensor matters: norms and biases are not left at their neutral values."""
    torch.manual_seed(seed)
    make = MiniMaxM3VLForCausalLM if isinstance(config, MiniMaxM3VLTextConfig) else AutoModelForCausalLM.from_config
    model = make(config).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif name.endswith("bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.1)
            elif "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * (2 if "embed" in name else tensor.shape[-1] ** -0.5))
    return model


def save(model: Any, path: Path, **options: Any) -> Path:
    """Write config.json and safetensors as transformers does."""
    model.save_pretrained(path, **options)
    return path


@torch.inference_mode()
def oracle_logits(model: Any, ids: list[int]) -> Tensor:
    """fp32 [len(ids), vocab], the whole prompt at once."""
    logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


@torch.inference_mode()
def oracle_greedy(model: Any, ids: list[int], steps: int) -> list[int]:
    """The next `steps` most probable tokens, with transformers' own cache; end ids do not stop it."""
    cache = DynamicCache(config=model.config)
    # transformers is renaming this argument model by model.
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    feed, out = torch.tensor([ids]), []
    for _ in range(steps):
        logits = model(feed, **{keyword: cache}, use_cache=True).logits[0, -1]
        out.append(int(logits.argmax()))
        feed = torch.tensor([[out[-1]]])
    return out

"""The built-in model in transformers, on the weights that the `gguf` package dequantises."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEADS, KV_HEADS, DIM = 9, 3, 64


def smollm2_oracle(path: Path) -> Any:
    """LlamaForCausalLM in fp32. What SmolLM2-135M is shaped like stands in its published configuration."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    weights = {}
    for tensor in GGUFReader(path).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        weights[_name(tensor.name)] = _rows_in_order(tensor.name, values)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with no_init_weights():
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, rest = name.split(".", 2)
    kind, suffix = rest.split(".")
    return f"model.layers.{layer}.{NAMES[kind]}.{suffix}"


def _rows_in_order(name: str, values: Tensor) -> Tensor:
    """GGUF puts channel i of a rotary head's first half at row 2 i and of its second half at row 2 i + 1."""
    heads = HEADS if ".attn_q." in name else KV_HEADS if ".attn_k." in name else 0
    if not heads:
        return values
    order = [head * DIM + 2 * (i % (DIM // 2)) + i // (DIM // 2) for head in range(heads) for i in range(DIM)]
    return values[torch.tensor(order)]

"""Write a transformers-made Llama-family model as GGUF, the way llama.cpp's converter lays it out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def write_llama_gguf(model: Any, path: Path, *, half: bool = False) -> Path:
    """A GGUF without a tokenizer; `half`: matrices in fp16. Tied embeddings are stored once, llama3 RoPE as factors."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), config.model_type)
    _write_metadata(writer, config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _interleaved(name, tensor, config).float().contiguous().numpy()
        writer.add_tensor(_renamed(name), values.astype(np.float16) if half and values.ndim == 2 else values)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    if config.model_type != "llama":
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _renamed(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{suffix}"


def _interleaved(name: str, tensor: Tensor, config: Any) -> Tensor:
    """GGUF's `llama` rotates neighbouring channels: row i of a head's halves goes to 2 i and 2 i + 1."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return tensor
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(model: Any) -> Tensor:
    """What divides each plain RoPE frequency."""
    dim = _head_dim(model.config)
    plain: Tensor = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
    scaled: Tensor = model.model.rotary_emb.inv_freq
    return plain / scaled

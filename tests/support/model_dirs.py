"""A tiny Llama on disk, written without transformers: config, weights, tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from support.engines import END, VOCAB

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!:-'\u0120\u010a"
"""One token each, from id 3 on; the last two stand for space and line end in the byte-level alphabet."""
SPECIAL = ("<pad>", "<s>", "</s>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": END, "torch_dtype": "float32",
}  # fmt: skip


def write_tokenizer(directory: Path) -> Path:
    """tokenizer.json and tokenizer_config.json of a character tokenizer over the 50 ids of the test models."""
    vocab = {token: place for place, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_model(directory: Path, *, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A random two-layer Llama with the tokenizer that is there already, else a character tokenizer."""
    config = CONFIG | changes
    if not (directory / "tokenizer.json").exists():
        write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= {
            f"{start}input_layernorm.weight": (hidden,), f"{start}post_attention_layernorm.weight": (hidden,),
            f"{start}self_attn.q_proj.weight": (hidden, hidden), f"{start}self_attn.k_proj.weight": (kv, hidden),
            f"{start}self_attn.v_proj.weight": (kv, hidden), f"{start}self_attn.o_proj.weight": (hidden, hidden),
            f"{start}mlp.gate_proj.weight": (inner, hidden), f"{start}mlp.up_proj.weight": (inner, hidden),
            f"{start}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory

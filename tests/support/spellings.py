"""Write a transformers-made M3 model in its other spellings: as released, and as GGUF."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def released_config(config: Any, *, index_value: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    """config.json in the checkpoint's own spelling; `index_value` lists the layers that keep an index value."""
    sparse = [int(kind != "full_attention") for kind in config.layer_types]
    text = {
        name: getattr(config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "num_experts_per_tok",
            "num_local_experts", "dense_intermediate_size", "shared_intermediate_size", "routed_scaling_factor",
            "rotary_dim", "swiglu_alpha", "swiglu_limit", "bos_token_id", "eos_token_id", "tie_word_embeddings",
        )
    }  # fmt: skip
    text |= {
        "model_type": "minimax_m3_vl_text", "hidden_act": "swigluoai",
        "rope_theta": config.rope_parameters["rope_theta"],
        "partial_rotary_factor": config.rotary_dim / config.head_dim, "use_gemma_norm": True,
        "qk_norm_type": "per_head",
        "use_routing_bias": True, "scoring_func": "sigmoid", "use_qk_norm": True,
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": config.index_head_dim,
            "sparse_num_index_heads": config.index_n_heads, "sparse_topk_blocks": config.index_topk_blocks,
            "sparse_block_size": config.index_block_size, "sparse_score_type": "max", "sparse_init_block": 0,
            "sparse_local_block": config.index_local_blocks, "sparse_attention_freq": sparse,
            "sparse_disable_index_value": [int(i not in (index_value or ())) for i in range(len(sparse))],
        },
    }  # fmt: skip
    text["sparse_attention_config"] |= changes
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
        "text_config": text,
    }  # fmt: skip


def released_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the released checkpoint, with parts of other modalities beside them."""
    out: dict[str, Tensor] = {"vision_tower.vision_model.pre_layrnorm.weight": torch.zeros(4)}
    for name, tensor in weights.items():
        new = f"language_model.{name}".replace(".self_attn.indexer.", ".self_attn.index_")
        moe = f"{new.split('.mlp.')[0]}.block_sparse_moe."
        if new.endswith("mlp.experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                out[f"{moe}experts.{expert}.w1.weight"], out[f"{moe}experts.{expert}.w3.weight"] = both.chunk(2)
        elif new.endswith("mlp.experts.down_proj"):
            out |= {f"{moe}experts.{expert}.w2.weight": down for expert, down in enumerate(tensor)}
        elif new.endswith("gate_up_proj.weight"):
            new = new.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.")
            gate, up = tensor.chunk(2)
            out[new.replace("gate_up", "gate")], out[new.replace("gate_up", "up")] = gate, up
        else:
            new = new.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score").replace(
                ".mlp.gate.", ".block_sparse_moe.gate."
            )
            out[new.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.")] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in out.items()}


def write_released(model: Any, path: Path, **options: Any) -> Path:
    """A directory as the released checkpoint has it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(released_config(model.config, **options)))
    save_file(released_names(dict(model.state_dict())), path / "model.safetensors")
    return path


def write_m3_gguf(directory: Path, path: Path, kind: Callable[[str], gguf.GGMLQuantizationType] | None = None) -> Path:
    """A `minimax-m3` GGUF of a directory that transformers saved: in fp32, or each matrix but routers in its `kind`."""
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "minimax-m3")
    _write_m3_metadata(writer, config)
    for name, tensor in weights.items():
        for new, values in _gguf_tensors(name, tensor):
            norm = "norm" in new
            array = (values + 1 if norm else values).float().contiguous().numpy()
            if kind is None or array.ndim == 1 or "ffn_gate_inp" in new:
                writer.add_tensor(new, array)
            else:
                writer.add_tensor(new, gguf.quants.quantize(array, kind(new)), raw_dtype=kind(new))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_m3_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["dense_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["rotary_dim"])
    writer.add_leading_dense_block_count(config["layer_types"].count("full_attention"))
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for key, name in (("head_count", "n_heads"), ("key_length", "head_dim"), ("top_k", "topk_blocks"),
                      ("block_size", "block_size"), ("local_blocks", "local_blocks")):  # fmt: skip
        writer.add_uint32(f"minimax-m3.attention.indexer.{key}", config[f"index_{name}"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _gguf_tensors(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip
    if name in top:
        return [(top[name], tensor)]
    _, _, layer, rest = name.split(".", 3)
    block = f"blk.{layer}."
    renamed = {
        "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
        "mlp.down_proj.weight": "ffn_down.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    }  # fmt: skip
    if rest in renamed:
        return [(block + renamed[rest], tensor)]
    if ".indexer." in rest:
        return [(block + rest.removeprefix("self_attn."), tensor)]
    suffix = "_exps" if ".experts." in rest else "_shexp" if ".shared_experts." in rest else ""
    gate, up = tensor.chunk(2, 1 if suffix == "_exps" else 0)
    return [(f"{block}ffn_gate{suffix}.weight", gate), (f"{block}ffn_up{suffix}.weight", up)]


def add_index_value(model: Any, layers: list[int], seed: int = 0) -> None:
    """Give sparse layers of a transformers model an index value, which transformers itself lacks.

    The added output is softmax(q . k / sqrt(d)) v over the whole causal context, through its own projection.
    """
    torch.manual_seed(seed)
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        indexer, config = attention.indexer, model.config
        width = config.index_n_heads * config.index_head_dim
        indexer.v_proj = nn.Linear(config.hidden_size, config.index_head_dim, bias=False)
        indexer.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        attention.register_forward_hook(_index_value_hook, with_kwargs=True)


def _index_value_hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    indexer, x = module.indexer, kwargs["hidden_states"]
    cos, sin = kwargs["position_embeddings"]
    dim, rotary = indexer.head_dim, cos.shape[-1]

    def rotate(y: Tensor) -> Tensor:
        turned = torch.cat([-y[..., rotary // 2 : rotary], y[..., : rotary // 2]], -1)
        return torch.cat([y[..., :rotary] * cos[:, :, None] + turned * sin[:, :, None], y[..., rotary:]], -1)

    q = rotate(indexer.q_norm(indexer.q_proj(x).unflatten(-1, (-1, dim))))
    k = rotate(indexer.k_norm(indexer.k_proj(x).unflatten(-1, (1, dim))))[:, :, 0]
    scores = torch.einsum("bthd,bsd->bhts", q, k) / dim**0.5
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    own = torch.einsum("bhts,bsd->bthd", weights, indexer.v_proj(x)).flatten(2)
    return output[0] + indexer.o_proj(own), *output[1:]

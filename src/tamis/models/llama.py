"""Weight plans of the Llama family (Llama, Mistral, Qwen2, Qwen3), as safetensors and as GGUF."""

from collections.abc import Callable

from torch import Tensor

from tamis.config import LayerKind, ModelConfig
from tamis.models.weights import Piece, WeightPlan, half_split_rows, rows

SAFETENSORS = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "layer": "model.layers.{}.", "input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
GGUF = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
    "layer": "blk.{}.", "input_norm": "attn_norm", "mlp_norm": "ffn_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def weight_plan(config: ModelConfig, *, gguf: bool) -> WeightPlan:
    """The plan for a checkpoint of either form."""
    names = GGUF if gguf else SAFETENSORS
    hidden = (config.hidden_size,)
    table = (config.vocab_size, config.hidden_size)
    plan: dict[str, tuple[Piece, ...]] = {
        "embed_tokens.weight": (Piece(names["embed"], table),),
        "norm.weight": (Piece(names["norm"], hidden),),
    }
    ignored = [r".*rotary_emb\.inv_freq$", r"rope_freqs\.weight$"]
    if config.tie_embeddings:
        ignored.append(names["head"])
    else:
        plan["lm_head.weight"] = (Piece(names["head"], table),)
    # GGUF interleaves rotary rows for its "llama" architecture (Llama and Mistral), and for no other of the family.
    permuted = gguf and config.model_type in ("llama", "mistral")
    for layer in range(config.num_layers):
        plan |= _layer_plan(config, layer, names, permuted)
    return WeightPlan(plan, tuple(ignored))


def branch_plan(config: ModelConfig) -> WeightPlan:
    """The plan for the tensors of an index branch beside the model (`index_branch.branch_shapes` names them)."""
    assert config.sparse is not None
    dim, hidden = config.sparse.index_head_dim, config.hidden_size
    width = config.sparse.index_heads * dim
    plan: dict[str, tuple[Piece, ...]] = {}
    for layer, kind in enumerate(config.layer_kinds):
        if kind is LayerKind.DENSE:
            continue
        source, target = f"layers.{layer}.self_attn.index_", f"layers.{layer}.attention.index_"
        parts = [("q_proj", width), ("k_proj", dim)]
        if kind is LayerKind.SPARSE_KV:
            parts.append(("v_proj", dim))
            plan[f"{target}o_proj.weight"] = (Piece(f"{source}o_proj.weight", (hidden, width)),)
        plan |= {
            f"{target}proj.weight": rows([(f"{source}{name}.weight", (size, hidden), None) for name, size in parts]),
            f"{target}q_norm.weight": (Piece(f"{source}q_norm.weight", (dim,)),),
            f"{target}k_norm.weight": (Piece(f"{source}k_norm.weight", (dim,)),),
        }
    return WeightPlan(plan)


def _layer_plan(config: ModelConfig, layer: int, names: dict[str, str], permuted: bool) -> dict[str, tuple[Piece, ...]]:
    source, target = names["layer"].format(layer), f"layers.{layer}."
    hidden, dim = config.hidden_size, config.head_dim
    fixed: dict[str, Callable[[Tensor], Tensor]] = (
        {"q": half_split_rows(config.q_heads), "k": half_split_rows(config.kv_heads)} if permuted else {}
    )
    sizes = {"q": config.q_heads * dim, "k": config.kv_heads * dim, "v": config.kv_heads * dim,
             "gate": config.intermediate_size, "up": config.intermediate_size}  # fmt: skip

    def stacked(keys: str, kind: str) -> tuple[Piece, ...]:
        tail = (hidden,) if kind == "weight" else ()
        return rows([(f"{source}{names[k]}.{kind}", (sizes[k], *tail), fixed.get(k)) for k in keys.split()])

    def single(key: str, kind: str, *shape: int) -> tuple[Piece, ...]:
        return (Piece(f"{source}{names[key]}.{kind}", shape),)

    plan = {
        "input_norm.weight": single("input_norm", "weight", hidden),
        "mlp_norm.weight": single("mlp_norm", "weight", hidden),
        "attention.qkv_proj.weight": stacked("q k v", "weight"),
        "attention.o_proj.weight": single("o", "weight", hidden, config.q_heads * dim),
        "mlp.gate_up_proj.weight": stacked("gate up", "weight"),
        "mlp.down_proj.weight": single("down", "weight", hidden, config.intermediate_size),
    }
    if config.qk_norm:
        plan["attention.q_norm.weight"] = single("q_norm", "weight", dim)
        plan["attention.k_norm.weight"] = single("k_norm", "weight", dim)
    if config.qkv_bias:
        plan["attention.qkv_proj.bias"] = stacked("q k v", "bias")
    if config.o_bias:
        plan["attention.o_proj.bias"] = single("o", "bias", hidden)
    if config.mlp_bias:
        plan["mlp.gate_up_proj.bias"] = stacked("gate up", "bias")
        plan["mlp.down_proj.bias"] = single("down", "bias", hidden)
    return {target + name: pieces for name, pieces in plan.items()}

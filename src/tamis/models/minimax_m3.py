"""Weight plans of MiniMax-M3: as released, as transformers saves it, and as GGUF (names in facts.md section 3).

The three spellings differ in prefixes, in where the index branch and the experts are filed, in whether gate and up are
one tensor, and in whether the 1 of Gemma norms is already added. Each of these is looked up in the checkpoint's own
names, so that a mixed checkpoint loads as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tamis.config import LayerKind, ModelConfig, MoEConfig
from tamis.models.weights import Piece, WeightPlan, plus_one, rows

PREFIXES = ("language_model.model.", "model.language_model.", "model.")
IGNORED = (
    r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\.", r"(model\.)?patch_merge_mlp\.",
    r"(.*\.)?mtp\.", r".*rotary_emb\.inv_freq$", r"rope_freqs\.weight$",
)  # fmt: skip


@dataclass(frozen=True)
class Spelling:
    """How one checkpoint names things; `{}` stands for the layer id."""

    embed: str
    norm: str
    head: str
    layer: str
    input_norm: str
    mlp_norm: str
    qkv: tuple[str, str, str, str]
    """q, k, v, o."""
    qk_norm: tuple[str, str]
    index: str
    """Prefix of q_proj, k_proj, v_proj, o_proj, q_norm, k_norm of the index branch."""
    dense: tuple[str, ...]
    """gate, up, down; or gate_up, down."""
    shared: tuple[str, ...]
    router: str
    router_bias: str
    experts: tuple[str, ...]
    """Each with `{}` for the expert: gate, up, down. Without: 3-D tensors of gate, up, down or gate_up, down."""
    norm_fix: Callable[[Tensor], Tensor] | None


def gguf_spelling() -> Spelling:
    """Names of a `minimax-m3` GGUF."""
    return Spelling(
        embed="token_embd.weight", norm="output_norm.weight", head="output.weight", layer="blk.{}.",
        input_norm="attn_norm.weight", mlp_norm="ffn_norm.weight",
        qkv=("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
        qk_norm=("attn_q_norm.weight", "attn_k_norm.weight"), index="indexer.",
        dense=("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
        shared=("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"),
        router="ffn_gate_inp.weight", router_bias="exp_probs_b.bias",
        experts=("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"), norm_fix=None,
    )  # fmt: skip


def safetensors_spelling(config: ModelConfig, names: frozenset[str]) -> Spelling:
    """The spelling of a safetensors checkpoint, told by the names it holds; the released one where nothing tells."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in names), PREFIXES[0])

    def has(part: str) -> bool:
        return any(part in name for name in names)

    moe = "mlp." if has(".mlp.gate.weight") or has(".mlp.experts.") else "block_sparse_moe."
    bias = "gate.e_score_correction_bias" if has(".gate.e_score_correction_bias") else "e_score_correction_bias"

    def gated(path: str, fused: bool) -> tuple[str, ...]:
        parts = ("gate_up_proj", "down_proj") if fused else ("gate_proj", "up_proj", "down_proj")
        return tuple(f"{path}.{part}.weight" for part in parts)

    return Spelling(
        embed=f"{prefix}embed_tokens.weight", norm=f"{prefix}norm.weight",
        head="language_model.lm_head.weight" if "language_model.lm_head.weight" in names
        or (prefix == PREFIXES[0] and "lm_head.weight" not in names) else "lm_head.weight",
        layer=prefix + "layers.{}.",
        input_norm="input_layernorm.weight", mlp_norm="post_attention_layernorm.weight",
        qkv=tuple(f"self_attn.{part}_proj.weight" for part in "qkvo"),  # type: ignore[arg-type]
        qk_norm=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        index="self_attn.indexer." if has(".self_attn.indexer.") else "self_attn.index_",
        dense=gated("mlp", has(".mlp.gate_up_proj.")),
        shared=gated(f"{moe}shared_experts", has(".shared_experts.gate_up_proj.")),
        router=f"{moe}gate.weight", router_bias=moe + bias,
        experts=(f"{moe}experts.gate_up_proj", f"{moe}experts.down_proj") if has(".experts.gate_up_proj")
        else tuple(f"{moe}experts.{{}}.{part}.weight" for part in ("w1", "w3", "w2")),
        norm_fix=plus_one if config.unit_offset_norm else None,
    )  # fmt: skip


def weight_plan(config: ModelConfig, names: frozenset[str], *, gguf: bool) -> WeightPlan:
    """The plan for a checkpoint that holds `names`."""
    spelling = gguf_spelling() if gguf else safetensors_spelling(config, names)
    table = (config.vocab_size, config.hidden_size)
    plan: dict[str, tuple[Piece, ...]] = {
        "embed_tokens.weight": (Piece(spelling.embed, table),),
        "norm.weight": (Piece(spelling.norm, (config.hidden_size,), transform=spelling.norm_fix),),
    }
    ignored = list(IGNORED)
    if config.tie_embeddings:
        ignored.append(spelling.head)
    else:
        plan["lm_head.weight"] = (Piece(spelling.head, table),)
    for layer in range(config.num_layers):
        builder = _LayerPlan(config, spelling, layer)
        plan |= {f"layers.{layer}.{name}": pieces for name, pieces in builder.build().items()}
    return WeightPlan(plan, tuple(ignored))


class _LayerPlan:
    """The pieces of one layer, by parameter name within the layer."""

    def __init__(self, config: ModelConfig, spelling: Spelling, layer: int) -> None:
        self.config, self.spelling, self.layer = config, spelling, layer
        self.source = spelling.layer.format(layer)

    def build(self) -> dict[str, tuple[Piece, ...]]:
        config, hidden = self.config, self.config.hidden_size
        plan = {
            "input_norm.weight": self._norm(self.spelling.input_norm, hidden),
            "mlp_norm.weight": self._norm(self.spelling.mlp_norm, hidden),
            "attention.o_proj.weight": self._one(self.spelling.qkv[3], hidden, config.q_heads * config.head_dim),
        } | self._attention()
        if config.qk_norm:
            plan["attention.q_norm.weight"] = self._norm(self.spelling.qk_norm[0], config.head_dim)
            plan["attention.k_norm.weight"] = self._norm(self.spelling.qk_norm[1], config.head_dim)
        if config.moe is not None and config.moe.layers[self.layer]:
            return plan | self._experts(config.moe)
        return plan | self._gated("mlp", self.spelling.dense, config.intermediate_size)

    def _one(self, name: str, *shape: int) -> tuple[Piece, ...]:
        return (Piece(self.source + name, shape),)

    def _norm(self, name: str, size: int) -> tuple[Piece, ...]:
        return (Piece(self.source + name, (size,), transform=self.spelling.norm_fix),)

    def _stack(self, *parts: tuple[str, int]) -> tuple[Piece, ...]:
        return rows([(self.source + name, (size, self.config.hidden_size), None) for name, size in parts])

    def _attention(self) -> dict[str, tuple[Piece, ...]]:
        config, sparse, index = self.config, self.config.sparse, self.spelling.index
        q, k, v, _ = self.spelling.qkv
        kv = config.kv_heads * config.head_dim
        parts = [(q, config.q_heads * config.head_dim), (k, kv), (v, kv)]
        kind = config.layer_kinds[self.layer]
        if sparse is None or kind is LayerKind.DENSE:
            return {"attention.qkv_proj.weight": self._stack(*parts)}
        dim, width = sparse.index_head_dim, sparse.index_heads * sparse.index_head_dim
        parts += [(f"{index}q_proj.weight", width), (f"{index}k_proj.weight", dim)]
        plan = {
            "attention.index_q_norm.weight": self._norm(f"{index}q_norm.weight", dim),
            "attention.index_k_norm.weight": self._norm(f"{index}k_norm.weight", dim),
        }
        if kind is LayerKind.SPARSE_KV:
            parts.append((f"{index}v_proj.weight", dim))
            plan["attention.index_o_proj.weight"] = self._one(f"{index}o_proj.weight", config.hidden_size, width)
        return plan | {"attention.qkv_proj.weight": self._stack(*parts)}

    def _gated(self, path: str, names: tuple[str, ...], inter: int) -> dict[str, tuple[Piece, ...]]:
        *gate_up, down = names
        size = 2 * inter // len(gate_up)
        return {
            f"{path}.gate_up_proj.weight": self._stack(*((name, size) for name in gate_up)),
            f"{path}.down_proj.weight": self._one(down, self.config.hidden_size, inter),
        }

    def _experts(self, moe: MoEConfig) -> dict[str, tuple[Piece, ...]]:
        hidden, inter, spelling = self.config.hidden_size, moe.intermediate_size, self.spelling
        *gate_up, down = spelling.experts
        size = 2 * inter // len(gate_up)
        plan = {
            "mlp.router": self._one(spelling.router, moe.num_experts, hidden),
            "mlp.router_bias": self._one(spelling.router_bias, moe.num_experts),
            "mlp.gate_up_proj.weight": tuple(
                piece
                for at, name in enumerate(gate_up)
                for piece in self._expert_pieces(moe, name, (size, hidden), slice(at * size, (at + 1) * size))
            ),
            "mlp.down_proj.weight": self._expert_pieces(moe, down, (hidden, inter), slice(None)),
        }
        if moe.shared_intermediate_size:
            plan |= self._gated("mlp.shared_experts", spelling.shared, moe.shared_intermediate_size)
        return plan

    def _expert_pieces(self, moe: MoEConfig, name: str, shape: tuple[int, int], into: slice) -> tuple[Piece, ...]:
        """One 3-D tensor for all experts, or a 2-D one for each."""
        if "{}" not in name:
            return (Piece(self.source + name, (moe.num_experts, *shape), (slice(None), into)),)
        return tuple(Piece(self.source + name.format(e), shape, (e, into)) for e in range(moe.num_experts))

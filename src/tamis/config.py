"""What a model and an engine are: frozen dataclasses, resolved once and never changed."""

import enum
from dataclasses import dataclass, replace

import torch

from tamis.errors import ConfigError, PageSizeError
from tamis.units import MAX_SIZE, show

MAX_COUNT = 2**31 - 1
"""Positions, token ids and page tables are int32."""
MAX_HEAD_DIM = 1 << 16
"""Channels of a head; rotary tables have a column for each two before any weight is looked at."""
MAX_MATRIX = 1 << 48
"""Numbers in one matrix; the bytes of a larger one do not fit 64 bits once it is one of many."""
MAX_EXPERTS = 1 << 18
"""Experts of all layers together; each is planned for by name."""
MAX_THREADS = 1024
"""CPU threads of one process."""
MAX_STEP_SECONDS = 3600
"""What a step may aim to take."""


class LayerKind(enum.Enum):
    """What a layer keeps in the KV pool beside its main K and V."""

    DENSE = "dense"
    """Nothing: full attention."""
    SPARSE_K = "sparse_k"
    """An index key."""
    SPARSE_KV = "sparse_kv"
    """An index key and an index value."""


@dataclass(frozen=True)
class ParallelContext:
    """This process's place in a distributed run; every size is 1 today."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, half-split pairing (facts.md section 3)."""

    theta: float
    """Base of the frequencies."""
    rotary_dim: int
    """The first `rotary_dim` channels of a head rotate; the rest pass through."""
    scaling: str = "default"
    """"default", "linear", "llama3" or "yarn"."""
    factor: float = 1.0
    """How far the context was extended."""
    original_context: int = 0
    """llama3, yarn: context length before the extension."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / this are scaled by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / this stay as they are."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context above which a frequency stays as it is."""
    beta_slow: float = 1.0
    """yarn: rotations over the original context below which a frequency is divided by `factor`."""
    truncate: bool = True
    """yarn: round the two correction dimensions outwards to whole ones."""
    attention_factor: float = 1.0
    """yarn: cos and sin are multiplied by this."""
    frequency_factors: tuple[float, ...] | None = None
    """[rotary_dim / 2]: each frequency is divided by its factor (GGUF's precomputed llama3 scaling)."""

    def __post_init__(self) -> None:
        # Beyond these bounds, quotients and logarithms of them leave what a float can hold.
        for name, low, high in (
            ("theta", 1.0, 1e30), ("factor", 1e-3, 1e6), ("attention_factor", 1e-6, 1e6), ("beta_fast", 1e-3, 1e6),
            ("beta_slow", 1e-3, 1e6), ("low_freq_factor", 1e-3, 1e6), ("high_freq_factor", 1e-3, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"RoPE: {name}={value} is not between {low:g} and {high:g}")
        if self.theta == 1:
            raise ConfigError("RoPE: theta=1 must be above 1")
        least = 1 if self.scaling in ("llama3", "yarn") else 0
        if not least <= self.original_context <= MAX_COUNT:
            raise ConfigError(f"RoPE: original_context={self.original_context} is not between {least} and {MAX_COUNT}")


@dataclass(frozen=True)
class SparseAttentionConfig:
    """The index branch of sparse layers and how it selects blocks (facts.md section 1)."""

    index_heads: int
    index_head_dim: int
    block_size: int
    """Tokens a block, anchored at position 0 of the sequence."""
    topk: int
    """Blocks a query attends to, forced blocks included."""
    init_blocks: int = 0
    """The first blocks of a sequence, always selected."""
    local_blocks: int = 1
    """The last blocks up to the query's own, always selected."""
    score_type: str = "max"
    """How token scores of a block become one: "max" or "lse" (log-sum-exp)."""

    def __post_init__(self) -> None:
        for name in ("index_heads", "index_head_dim", "block_size", "topk"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"sparse attention: {name}={value} must be at least 1")
        for name in ("init_blocks", "local_blocks"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"sparse attention: {name}={value} must not be negative")
        if self.init_blocks + self.local_blocks > self.topk:
            raise ConfigError(
                f"sparse attention: topk={self.topk} is less than init_blocks={self.init_blocks} "
                f"+ local_blocks={self.local_blocks}, which are always selected"
            )
        if self.score_type not in ("max", "lse"):
            raise ConfigError(f"sparse attention: score_type={self.score_type!r} is not 'max' or 'lse'")

    def within(self, context: int) -> "SparseAttentionConfig":
        """The same selection, for sequences of at most `context` tokens, without room for blocks they do not have."""
        blocks = -(-context // self.block_size)
        init, local = min(self.init_blocks, blocks), min(self.local_blocks, blocks)
        return replace(
            self, init_blocks=init, local_blocks=local, topk=min(self.topk, max(blocks, init + local))
        )  # fmt: skip

    def check_page_size(self, page_size: int) -> None:
        """Raise PageSizeError unless `page_size` divides the block size, or the block size divides it."""
        if page_size < 1 or (self.block_size % page_size and page_size % self.block_size):
            raise PageSizeError(f"page_size={page_size} does not divide the sparse block_size={self.block_size}")


@dataclass(frozen=True)
class IndexBranchConfig:
    """What an index branch that was trained onto a dense model has of its own (`models/index_branch.py`).

    Its projections are kept apart from q, k and v, whose weights may be quantised and biased.
    """

    rope: RopeConfig
    """Of index queries and keys; frequencies and scaling are the model's unless the branch says otherwise."""
    norm_eps: float


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts MLPs: sigmoid router with a selection bias, one shared expert (facts.md section 3)."""

    layers: tuple[bool, ...]
    """By layer id: True where the MLP is a mixture of experts."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one routed expert."""
    shared_intermediate_size: int
    """Of the shared expert; 0: none."""
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"mixture of experts: experts_per_token={self.experts_per_token} is not between 1 and "
                f"num_experts={self.num_experts}"
            )
        if self.num_experts * sum(self.layers) > MAX_EXPERTS:
            raise ConfigError(
                f"mixture of experts: num_experts={self.num_experts} in {sum(self.layers)} layers are more than "
                f"{MAX_EXPERTS} in all"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A language model as tamis runs it, read from config.json or GGUF metadata."""

    family: str
    """"minimax_m3" or "llama": which module builds it."""
    model_type: str
    """As the checkpoint spells it: "minimax_m3_vl_text", "llama", "mistral", "qwen2", "qwen3"..."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of dense MLPs."""
    context_length: int
    norm_eps: float
    rope: RopeConfig
    layer_kinds: tuple[LayerKind, ...]
    sparse: SparseAttentionConfig | None = None
    """None where every layer is dense."""
    index_branch: IndexBranchConfig | None = None
    """None: index heads are stacked with q, k and v and share the model's RoPE and eps."""
    moe: MoEConfig | None = None
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    """"silu": silu(gate) * up. "swiglu_oai": clamped, (up + 1) * gate * sigmoid(alpha * gate)."""
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    unit_offset_norm: bool = False
    """The checkpoint stores RMSNorm weights w of x * (1 + w) (Gemma); the loader adds the 1."""
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """What the checkpoint says it is stored in; None: not said."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "q_heads", "kv_heads", "head_dim",
                     "intermediate_size", "context_length"):  # fmt: skip
            value = getattr(self, name)
            most = MAX_HEAD_DIM if name == "head_dim" else MAX_COUNT
            if not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most}"
                raise ConfigError(f"model config: {name}={value} must be {bound}")
        self._check_matrices()
        if self.q_heads % self.kv_heads:
            raise ConfigError(f"model config: q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}")
        if len(self.layer_kinds) != self.num_layers:
            raise ConfigError(
                f"model config: the list of layer kinds has {len(self.layer_kinds)} entries "
                f"for {self.num_layers} layers"
            )
        if self.moe is not None and len(self.moe.layers) != self.num_layers:
            raise ConfigError(
                f"model config: the list of MoE layers has {len(self.moe.layers)} entries for {self.num_layers} layers"
            )
        if self.rope.rotary_dim > self.head_dim or self.rope.rotary_dim % 2:
            raise ConfigError(
                f"model config: rotary_dim={self.rope.rotary_dim} must be even and at most head_dim={self.head_dim}"
            )
        if any(kind is not LayerKind.DENSE for kind in self.layer_kinds):
            self._check_sparse()

    def _check_matrices(self) -> None:
        experts = 1 if self.moe is None else self.moe.num_experts * self.moe.intermediate_size
        outputs = {
            "vocab_size": self.vocab_size,
            "intermediate_size": self.intermediate_size,
            "q_heads * head_dim": self.q_heads * self.head_dim,
            "num_experts * their intermediate_size": experts,
            "index_heads": 1 if self.sparse is None else self.sparse.index_heads * self.sparse.index_head_dim,
        }
        for name, value in outputs.items():
            if value * self.hidden_size > MAX_MATRIX:
                raise ConfigError(
                    f"model config: a matrix of {name}={value} by hidden_size={self.hidden_size} has more than "
                    f"{MAX_MATRIX} numbers"
                )

    def _check_sparse(self) -> None:
        if self.sparse is None:
            raise ConfigError("model config: there are sparse layers but no sparse attention settings")
        if self.sparse.index_head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"model config: index_head_dim={self.sparse.index_head_dim} must be at most {MAX_HEAD_DIM}"
            )
        if self.sparse.index_heads % self.kv_heads:
            raise ConfigError(
                f"model config: index_heads={self.sparse.index_heads} is not a multiple of kv_heads={self.kv_heads}"
            )
        if self.index_branch is not None:
            rotary, whose = self.index_branch.rope.rotary_dim, "of the index branch"
        else:
            rotary, whose = self.rope.rotary_dim, "which index heads share with the main heads"
        if rotary % 2:
            raise ConfigError(f"model config: rotary_dim={rotary} {whose} must be even")
        if self.sparse.index_head_dim < rotary:
            raise ConfigError(
                f"model config: index_head_dim={self.sparse.index_head_dim} is less than rotary_dim={rotary}, {whose}"
            )


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint (`generation_config.json`) or of the built-in model; None: nothing is said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model. `dtype`, `kv_dtype`, `page_size` and `kv_budget` may be left to be resolved."""

    dtype: str = "auto"
    """Weights and activations: "fp32", "bf16", or "auto"."""
    kv_dtype: str = "auto"
    """Main K and V: "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", or "auto" (as the weights)."""
    page_size: int | None = None
    """Tokens a page; None: 32, or gcd(32, block_size) where no block of that size fits 32."""
    kv_budget: int | None = None
    """Bytes for usable pages of the pool; None: a share of the memory that is free."""
    max_batch_tokens: int = 512
    """Tokens one step computes at most."""
    max_num_seqs: int = 64
    """Sequences that run at once at most."""
    device: str = "auto"
    quant: str = "auto"
    """Weights: "none": dense. "int8", "int4": in groups of 32 with a scale. "auto": as the checkpoint has them, where
    there are kernels for that (GGUF's Q8_0, Q4_0, Q4_1), else dense."""
    threads: int | None = None
    """CPU threads of torch and of our kernels, in the whole process; None: as many as torch takes."""
    kernels: str = "auto"
    """"cpu": Numba. "reference": plain torch. "auto": the fastest that the device has."""
    prefix_cache: bool = True
    """Keep K and V of finished requests for later ones that begin alike, for as long as nobody needs the room."""
    step_seconds: float | None = None
    """While replies are running, a step takes so many prompt tokens as fit into about this time; None: as many as
    `max_batch_tokens` allows, which gets most done in all and lets replies wait for long prompts."""
    kv_tiers: tuple[str, ...] = ()
    """Where pages are kept beside the pool, fastest first: "host:8GiB", "disk:/path?size=100GiB", "redis://...",
    "fsspec:s3://..."; see `kv/tiers/spec.py`."""
    kv_tiers_optional: bool = False
    """Go on without a tier that cannot be opened."""
    kv_write_through: bool = False
    """Write a page to the tiers as soon as it is computed; else when its request ends or gives it up."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"dtype={self.dtype!r} is not one of auto, fp32, bf16")
        if self.quant not in ("auto", "none", "int8", "int4"):
            raise ConfigError(f"quant={self.quant!r} is not one of auto, none, int8, int4")
        if self.kernels not in ("auto", "cpu", "reference"):
            raise ConfigError(f"kernels={self.kernels!r} is not one of auto, cpu, reference")
        if not isinstance(self.kv_dtype, str) or self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ConfigError(f"kv_dtype={self.kv_dtype!r} is not one of auto, {', '.join(KV_DTYPES)}")
        for name, most in (("page_size", MAX_COUNT), ("kv_budget", MAX_SIZE), ("max_batch_tokens", MAX_COUNT),
                           ("max_num_seqs", MAX_COUNT), ("threads", MAX_THREADS)):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("page_size", "kv_budget", "threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={show(value)} must be a whole number of at least 1")
            if value > most:
                raise ConfigError(f"{name}={show(value)} must be at most {most}")
        for name in ("prefix_cache", "kv_tiers_optional", "kv_write_through"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={show(getattr(self, name))} is not True or False")
        if not isinstance(self.kv_tiers, tuple) or not all(isinstance(tier, str) for tier in self.kv_tiers):
            raise ConfigError(f"kv_tiers={show(self.kv_tiers)} is not a list of texts such as host:8GiB")
        if self.kv_tiers and not self.prefix_cache:
            raise ConfigError("kv_tiers need prefix_cache=True: what they hold is read through the prefix cache")
        seconds = self.step_seconds
        known = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (known and 0 < seconds <= MAX_STEP_SECONDS):
            raise ConfigError(f"step_seconds={show(seconds)} must be above 0 and at most {MAX_STEP_SECONDS}")


KV_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Storage types of the KV pool, by the name users write."""

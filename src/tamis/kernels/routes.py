"""Which code an operation runs on, and why: what backends decide call by call, told beforehand."""

from dataclasses import dataclass

import torch

from tamis.kernels.ops import Ops

OPS = (
    "write_pages", "gather_pages", "score_blocks", "select_blocks", "pick_blocks", "sparse_attention",
    "picked_attention", "dense_attention", "index_value_attention",
)  # fmt: skip
"""What `Ops` offers."""
MODEL_OPS = ("embed", "heads", "add_projection", "add_gated", "add_experts", "logits")
"""What `ModelOps` offers."""
TORCH, VECTORS, TILES = "torch", "Numba", "Numba on matrix tiles"


@dataclass(frozen=True)
class Route:
    """Where calls of one operation go."""

    op: str
    runs_on: str
    why: str


def routes(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int = 128) -> list[Route]:
    """One route an operation: activations and weights in `dtype`, planes in `kv_dtype`, heads of `head_dim`."""
    if ops.name == "cpu":
        return [Route(op, *_cpu_route(op, dtype, kv_dtype, head_dim)) for op in (*OPS, *MODEL_OPS)]
    if ops.name == "reference":
        return [Route(op, TORCH, "plain torch, the specification") for op in (*OPS, *MODEL_OPS)]
    own = [Route(op, ops.name, "the backend that was chosen") for op in OPS]
    return own + [Route(op, TORCH, f"{ops.name} has attention alone") for op in MODEL_OPS]


def _cpu_route(op: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """What `CpuOps` and `CpuModelOps` run an operation on, and why."""
    from tamis.kernels.cpu.lowfloat import is_readable

    if op in ("write_pages", "gather_pages"):
        return TORCH, "it copies, and torch copies as fast"
    if op == "embed":
        return TORCH, "it takes rows out of a table"
    if op in MODEL_OPS:
        return _model_route(dtype)
    if op == "select_blocks":
        return VECTORS, "scores are fp32"
    if not is_readable(kv_dtype):
        return TORCH, f"the kernels do not read planes of {_name(kv_dtype)}"
    missing = _no_tiles(dtype, kv_dtype, head_dim)
    return (TILES, "bf16 queries over bf16 planes") if missing is None else (VECTORS, f"no tiles: {missing}")


def _model_route(dtype: torch.dtype) -> tuple[str, str]:
    from tamis.kernels.cpu import amx
    from tamis.kernels.cpu.model import FEW, FEW_QUANTISED

    has_tiles = dtype is torch.bfloat16 and amx.available()
    many = "torch; tiles where weights are quantised" if has_tiles else "torch"
    few = f"up to {FEW} rows, {FEW_QUANTISED} where weights are quantised, reading the weights is what takes time"
    return f"{VECTORS} for few rows, else {many}", few


def _no_tiles(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> str | None:
    """Why attention does not run on matrix tiles; None: it does."""
    from tamis.kernels.cpu import amx, prefill

    if not amx.available():
        return "this CPU or process has none (Intel AMX)"
    if dtype is not torch.bfloat16:
        return f"queries are {_name(dtype)}, not bf16"
    if kv_dtype is not torch.bfloat16:
        return f"planes are {_name(kv_dtype)}, not bf16"
    return None if prefill.supports(head_dim) else f"heads of {head_dim} are not a multiple of 32 up to 256"


def _name(dtype: torch.dtype) -> str:
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(str(dtype)[6:], str(dtype)[6:])

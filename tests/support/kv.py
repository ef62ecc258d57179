"""Small pools for tests: layouts of all layer kinds, contents of every plane, and what they hold."""

import torch
from torch import Tensor

from tamis.config import LayerKind
from tamis.kernels.paging import raw_view
from tamis.kv import KVLayout, LayerScales, SparseKVPool

DENSE, SPARSE_K, SPARSE_KV = LayerKind.DENSE, LayerKind.SPARSE_K, LayerKind.SPARSE_KV
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

Planes = dict[tuple[int, str], Tensor]


def small_layout(
    kinds: tuple[LayerKind, ...] = (DENSE, SPARSE_K, SPARSE_K, SPARSE_KV, DENSE, SPARSE_KV),
    *,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    start_layer: int = 0,
    end_layer: int | None = None,
    scales: tuple[LayerScales, ...] | None = None,
) -> KVLayout:
    """Two KV heads of 8 channels, index keys of 6; six layers of all kinds unless told otherwise."""
    return KVLayout(
        kinds, 2, 8, 6, page_size, dtype, start_layer=start_layer, end_layer=end_layer, scales=scales
    )  # fmt: skip


def plane(pool: SparseKVPool, layer: int, name: str) -> Tensor:
    """A plane through the public getters."""
    if name in ("k", "v"):
        return pool.get_kv_buffer(layer)[name == "v"]
    return pool.get_index_k_buffer(layer) if name == "index_k" else pool.get_index_kv_buffer(layer)[1]


def contents(pool: SparseKVPool) -> Planes:
    """A copy of the stored bytes of every plane."""
    return {
        (layer, name): raw_view(plane(pool, layer, name)).clone()
        for layer in pool.layout.local_layers
        for name in pool.layout.planes(layer)
    }


def same(a: Planes, b: Planes) -> bool:
    """Whether all planes hold the same bytes."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def rows(planes: Planes, slots: Tensor) -> Planes:
    """What every plane holds at these slots: [n, heads, dim] each."""
    return {key: raw[slots // raw.shape[2], :, slots % raw.shape[2]] for key, raw in planes.items()}


def write_random(pool: SparseKVPool, slots: Tensor, seed: int = 0) -> None:
    """Write different random rows to these slots, in every plane of every local layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.layout.local_layers:
        values = {
            name: torch.randn(len(slots), *pool.layout.row_shape(name), generator=generator)
            for name in pool.layout.planes(layer)
        }
        if "index_k" in values:
            pool.set_fused_kv_index_buffer(
                layer, slots, values["k"], values["v"], values["index_k"], values.get("index_v")
            )
        else:
            pool.set_kv_buffer(layer, slots, values["k"], values["v"])


def fill_random(pool: SparseKVPool, seed: int = 0) -> None:
    """Write different random rows to every slot, padding included."""
    write_random(pool, torch.arange((pool.num_pages + 1) * pool.layout.page_size), seed)

"""From a model's configuration and the words on the command line to a KVLayout: shared by `inspect` and `plan`."""

from typing import Any

import torch

from tamis.config import KV_DTYPES, ModelConfig, ParallelContext
from tamis.engine.memory import resolve_page_size
from tamis.errors import ConfigError
from tamis.kv import KVLayout


def build_layout(
    config: ModelConfig,
    *,
    kv_dtype: str,
    index_dtype: str | None = None,
    page_size: int | None = None,
    parallel: ParallelContext | None = None,
) -> KVLayout:
    """The pool layout of `config` on one rank; `page_size` None: what the engine would take.

    Raises ConfigError for a storage type or rank that does not exist, PageSizeError for a page size that does not
    divide the sparse block.
    """
    return KVLayout.from_model(
        config,
        page_size=resolve_page_size(page_size, config),
        dtype=_dtype("kv_dtype", kv_dtype),
        index_dtype=None if index_dtype is None else _dtype("index_dtype", index_dtype),
        parallel=parallel,
    )


def storage_facts(layout: KVLayout) -> dict[str, Any]:
    """How `layout` stores a token: types by the names users write, bytes by plane."""
    return {
        "kv_dtype": _dtype_name(layout.dtype),
        "index_dtype": _dtype_name(layout.index_storage),
        "bytes_per_token": dict(layout.bytes_per_token),
    }


def storage_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`storage_facts` for people: a row for each plane that is used, and one for all."""
    index = f" in {facts['index_dtype']}"
    names = {"main": f"main K and V in {facts['kv_dtype']}", "index_k": "index K" + index,
             "index_kv": "index K and V" + index, "total": "all planes"}  # fmt: skip
    sizes = facts["bytes_per_token"]
    return [(names[plane], f"{sizes[plane]:,} bytes a token") for plane in names if sizes[plane]]


def _dtype(option: str, name: str) -> torch.dtype:
    if name not in KV_DTYPES:
        raise ConfigError(f"{option}={name!r} is not one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in KV_DTYPES.items() if known is dtype)

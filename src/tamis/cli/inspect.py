"""`tamis inspect`: which layer is what, and what it keeps in the KV pool."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import AsJson, Debug, IndexDtype, KVDtype, ModelOrConfig, Quiet

if TYPE_CHECKING:
    from rich.table import Table

    from tamis.config import ModelConfig
    from tamis.kv import KVLayout


def inspect(
    model: ModelOrConfig = None,
    show_all: Annotated[bool, typer.Option("--all", help="A line for every layer, however alike.")] = False,
    kv_dtype: KVDtype = "bf16",
    index_dtype: IndexDtype = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Show a model's layers: kind, planes in the KV pool, bytes a token, MLP."""
    from tamis.cli.layouts import build_layout
    from tamis.cli.output import key_values, print_json, print_table
    from tamis.cli.progress import make_progress
    from tamis.models import load_config, resolve

    source = resolve(model, weights=False, progress=make_progress(quiet=quiet))
    config = load_config(source)
    layout = build_layout(config, kv_dtype=kv_dtype, index_dtype=index_dtype)
    layers = [describe_layer(config, layout, layer_id) for layer_id in range(config.num_layers)]
    facts = {"model": source.name, **_model_facts(config, layout), "layers": layers}
    if as_json:
        print_json(facts)
    else:
        print_table(_layer_table(source.name, layers, show_all=show_all))
        print_table(key_values("", _totals(config, facts)))


def describe_layer(config: "ModelConfig", layout: "KVLayout", layer_id: int) -> dict[str, Any]:
    """One layer: its kind, the shape a token has in each plane, the bytes it takes there, and the MLP."""
    planes = {plane: list(layout.row_shape(plane)) for plane in layout.planes(layer_id)}
    sizes = (math.prod(shape) * layout.plane_dtype(plane).itemsize for plane, shape in planes.items())
    return {
        "layer": layer_id,
        "kind": layout.kind(layer_id).value,
        "planes": planes,
        "bytes_per_token": sum(sizes),
        "mlp": _mlp(config, layer_id),
    }


def _mlp(config: "ModelConfig", layer_id: int) -> dict[str, Any]:
    moe = config.moe
    if moe is None or not moe.layers[layer_id]:
        return {"kind": "dense", "intermediate_size": config.intermediate_size}
    return {
        "kind": "moe",
        "num_experts": moe.num_experts,
        "experts_per_token": moe.experts_per_token,
        "intermediate_size": moe.intermediate_size,
        "shared_intermediate_size": moe.shared_intermediate_size,
    }


def _model_facts(config: "ModelConfig", layout: "KVLayout") -> dict[str, Any]:
    from tamis.cli.layouts import storage_facts

    return {
        "family": config.family,
        "model_type": config.model_type,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "rope": dataclasses.asdict(config.rope),
        "sparse_attention": None if config.sparse is None else dataclasses.asdict(config.sparse),
        **storage_facts(layout),
    }


def _layer_table(name: str, layers: list[dict[str, Any]], *, show_all: bool) -> "Table":
    from tamis.cli.output import new_table

    columns = (("layers", False), ("kind", False), ("main K, V", False), ("index K", False), ("index V", False),
               ("bytes a token", True), ("MLP", False))  # fmt: skip
    table = new_table(f"Layers of {name}", columns)
    for first, last, layer in _ranges(layers, fold=not show_all):
        planes = layer["planes"]
        shapes = ("x".join(map(str, planes[p])) if p in planes else "-" for p in ("k", "index_k", "index_v"))
        ids = str(first) if first == last else f"{first}-{last}"
        each = f"{layer['bytes_per_token']:,}" + ("" if first == last else " each")
        table.add_row(ids, layer["kind"], *shapes, each, _mlp_text(layer["mlp"]))
    return table


def _ranges(layers: list[dict[str, Any]], *, fold: bool) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Runs of consecutive layers that differ in nothing but their id: first id, last id, what they are."""
    if not fold:
        yield from ((layer["layer"], layer["layer"], layer) for layer in layers)
        return
    for _, run in groupby(layers, key=lambda layer: {**layer, "layer": None}):
        alike = list(run)
        yield alike[0]["layer"], alike[-1]["layer"], alike[0]


def _mlp_text(mlp: dict[str, Any]) -> str:
    if mlp["kind"] == "dense":
        return f"dense {mlp['intermediate_size']:,}"
    shared = f" + shared {mlp['shared_intermediate_size']:,}" if mlp["shared_intermediate_size"] else ""
    return f"{mlp['experts_per_token']} of {mlp['num_experts']} experts of {mlp['intermediate_size']:,}{shared}"


def _totals(config: "ModelConfig", facts: dict[str, Any]) -> list[tuple[str, str]]:
    from tamis.cli.layouts import storage_rows

    kinds = [layer["kind"] for layer in facts["layers"]]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    rows = [
        ("model", f"{config.model_type}, run as {config.family}"),
        ("layers", counted),
        ("hidden size", f"{config.hidden_size:,}"),
        ("heads", f"{config.q_heads} query, {config.kv_heads} KV, of {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.context_length:,} tokens"),
    ]
    if config.sparse is not None:
        sparse = config.sparse
        always = f"first {sparse.init_blocks} and last {sparse.local_blocks} always"
        rows.append(("blocks a query reads", f"{sparse.topk} of {sparse.block_size} tokens, {always}"))
        rows.append(("block score", f"{sparse.score_type} over its tokens, {sparse.index_heads} index heads"))
    return [*rows, *storage_rows(facts)]

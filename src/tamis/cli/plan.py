"""`tamis plan`: how many tokens fit."""

from typing import TYPE_CHECKING, Any

import typer

from tamis.cli import local
from tamis.cli.options import (
    AsJson,
    Debug,
    IndexDtype,
    KVDtype,
    Memory,
    ModelOrConfig,
    PageSize,
    Quiet,
    Stage,
    Stages,
    TensorRanks,
)

if TYPE_CHECKING:
    from tamis.kv import KVLayout

_NOTHING_FITS = 1
"""Exit code where the memory holds no page."""


def plan(
    model: ModelOrConfig = None,
    memory: Memory = None,
    page_size: PageSize = None,
    kv_dtype: KVDtype = "bf16",
    index_dtype: IndexDtype = None,
    tp_size: TensorRanks = 1,
    pp_size: Stages = 1,
    pp_rank: Stage = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Show what a token takes in the KV pool, and how many tokens fit into a memory budget.

    Exit code 1 where the budget holds no page.
    """
    from tamis.cli.layouts import build_layout, storage_facts
    from tamis.cli.output import key_values, print_json, print_table
    from tamis.cli.progress import make_progress
    from tamis.config import ParallelContext
    from tamis.models import load_config, resolve
    from tamis.units import parse_size

    budget = None if memory is None else parse_size(memory)
    source = resolve(model, weights=False, progress=make_progress(quiet=quiet))
    config = load_config(source)
    parallel = ParallelContext(tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)
    layout = build_layout(
        config, kv_dtype=kv_dtype, index_dtype=index_dtype, page_size=page_size, parallel=parallel
    )  # fmt: skip
    facts = {
        "model": source.name,
        "context_length": config.context_length,
        "layers": [layout.start_layer, layout.stop_layer],
        **storage_facts(layout),
        **_page_facts(layout, budget),
    }
    if as_json:
        print_json(facts)
    else:
        print_table(key_values(f"KV pool of {source.name}", _rows(facts)))
    if facts.get("pages") == 0:
        page = f"{layout.bytes_per_page:,} bytes ({layout.page_size:,} tokens)"
        local.say(f"error: --memory {memory} is {budget:,} bytes and holds no page: one takes {page}")
        raise typer.Exit(_NOTHING_FITS)


def _page_facts(layout: "KVLayout", budget: int | None) -> dict[str, Any]:
    """Sizes in bytes; pages and tokens that fit into `budget` bytes, where there is a budget."""
    facts: dict[str, Any] = {
        "page_size": layout.page_size,
        "bytes_per_page": layout.bytes_per_page,
        "padding_page_bytes": layout.bytes_per_page,
    }
    if budget is not None:
        pages = layout.pages_for(budget)
        facts |= {"memory_bytes": budget, "pages": pages, "tokens": pages * layout.page_size}
    return facts


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts for people, numbers with thousands separators."""
    from tamis.cli.layouts import storage_rows
    from tamis.units import format_size

    first, end = facts["layers"]
    rows = [
        ("layers", f"{first} to {end - 1}"),
        ("context", f"{facts['context_length']:,} tokens"),
        *storage_rows(facts),
        ("page", f"{facts['page_size']:,} tokens, {facts['bytes_per_page']:,} bytes"),
        ("padding page, extra", f"{facts['padding_page_bytes']:,} bytes"),
    ]
    if "memory_bytes" in facts:
        rows += [
            ("memory", f"{format_size(facts['memory_bytes'])}, {facts['memory_bytes']:,} bytes"),
            ("pages that fit", f"{facts['pages']:,}"),
            ("tokens that fit", f"{facts['tokens']:,}"),
        ]
    return rows

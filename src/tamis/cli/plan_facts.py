"""What `tamis plan` says: facts for scripts, a table for people, a Markdown table to paste."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from tamis.cli.layouts import storage_facts, storage_rows
from tamis.cli.output import key_values
from tamis.config import ModelConfig
from tamis.engine.planning import StagePlan
from tamis.kv.tiers.format import page_format
from tamis.kv.tiers.spec import parse_tier
from tamis.units import format_size

LENGTHS = (2048, 8192, 32768, 131072)
"""Tokens of a request that are planned for where none is given, beside a full context."""


def plan_facts(
    model: str, config: ModelConfig, plan: StagePlan, lengths: Sequence[int] | None, tiers: Sequence[str]
) -> dict[str, Any]:
    """The plan as plain data: sizes in bytes. Raises ConfigError for what names no tier."""
    layout, place = plan.layout, plan.place
    facts: dict[str, Any] = {
        "model": model,
        "context_length": config.context_length,
        "layers": [layout.start_layer, layout.stop_layer],
        "tp_size": place.tp_size,
        "pp_size": place.pp_size,
        "pp_rank": place.pp_rank,
        **storage_facts(layout),
        "page_size": layout.page_size,
        "bytes_per_page": layout.bytes_per_page,
        "padding_page_bytes": layout.bytes_per_page,
        "weights": plan.weights,
        "scratch_bytes": plan.scratch,
        "tiers": [_tier(plan, spec) for spec in tiers],
        "held_dense": _held_dense(config, plan),
    }
    if plan.pool_budget is not None:
        facts |= {
            "memory_bytes": plan.pool_budget,
            "pages": plan.pages,
            "tokens": plan.tokens,
            "total_bytes": plan.total,
            "requests": {str(length): plan.requests(length) for length in _lengths(config, lengths)},
        }
    return facts


def _lengths(config: ModelConfig, lengths: Sequence[int] | None) -> list[int]:
    if lengths is not None:
        return list(lengths)
    return [length for length in LENGTHS if length < config.context_length] + [config.context_length]


def _tier(plan: StagePlan, spec: str) -> dict[str, Any]:
    """How many tokens a tier of this rank holds; None where it has no limit."""
    tier, page = parse_tier(spec), page_format(plan.layout).blob_bytes
    pages = None if tier.capacity is None else tier.capacity // page
    return {
        "tier": tier.shown,
        "bytes": tier.capacity,
        "bytes_per_page": page,
        "tokens": None if pages is None else pages * plan.layout.page_size,
    }


def _held_dense(config: ModelConfig, plan: StagePlan) -> dict[str, Any] | None:
    """The same layers without index planes, every token attending to all; None where they are all dense anyway."""
    layout, context = plan.layout, config.context_length
    if config.sparse is None or not layout.sparse_layers:
        return None
    main = layout.bytes_per_token["main"]
    attended = config.sparse.topk * config.sparse.block_size
    facts: dict[str, Any] = {
        "bytes_per_token": main,
        "read_at_context": main * context,
        "sparse_read_at_context": layout.bytes_read(context, attended),
    }
    if plan.pool_budget is not None:
        facts["tokens"] = plan.pool_budget // (main * layout.page_size) * layout.page_size
    return facts


def plan_table(facts: dict[str, Any]) -> Table:
    """One plan for people, numbers with thousands separators."""
    first, end = facts["layers"]
    rows = [
        ("layers", f"{first} to {end - 1}"),
        ("context", f"{facts['context_length']:,} tokens"),
        *storage_rows(facts),
        ("page", f"{facts['page_size']:,} tokens, {facts['bytes_per_page']:,} bytes"),
        ("padding page, extra", f"{facts['padding_page_bytes']:,} bytes"),
        ("weights", _both(facts["weights"]["total"])),
        ("scratch, about", _both(facts["scratch_bytes"])),
        *_budget_rows(facts),
        *_tier_rows(facts),
        *_dense_rows(facts),
    ]
    if facts["tp_size"] * facts["pp_size"] > 1:
        ranks = f"one of {facts['tp_size']}, stage {facts['pp_rank']} of {facts['pp_size']}"
        rows.insert(0, ("rank", ranks))
    return key_values(f"KV pool of {facts['model']}", rows)


def _both(size: int) -> str:
    return f"{format_size(size)}, {size:,} bytes"


def _budget_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if "memory_bytes" not in facts:
        return []
    return [
        ("memory for pages", _both(facts["memory_bytes"])),
        ("pages that fit", f"{facts['pages']:,}"),
        ("tokens that fit", f"{facts['tokens']:,}"),
        *_request_rows(facts["requests"]),
        ("weights, scratch and pool", _both(facts["total_bytes"])),
    ]


def _request_rows(requests: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Lengths up to the first of which not one request fits."""
    for length, count in requests.items():
        yield f"requests of {int(length):,} tokens", f"{count:,} at once"
        if count == 0:
            return


def _tier_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"tier {tier['tier']}", "no limit" if tier["tokens"] is None else f"{tier['tokens']:,} tokens")
        for tier in facts["tiers"]
    ]


def _dense_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    dense = facts["held_dense"]
    if dense is None:
        return []
    tokens = f", {dense['tokens']:,} tokens" if "tokens" in dense else ""
    times = dense["read_at_context"] / dense["sparse_read_at_context"]
    return [
        ("held dense", f"{dense['bytes_per_token']:,} bytes a token{tokens}"),
        ("read for a token at full context", format_size(dense["sparse_read_at_context"])),
        ("held dense", f"{format_size(dense['read_at_context'])}, {times:.1f} times as much"),
    ]


def markdown(plans: Sequence[dict[str, Any]]) -> str:
    """A row for each plan, in Markdown."""
    columns = ["KV type", "TP", "PP", "page", "bytes a token", "weights"]
    budgeted = "memory_bytes" in plans[0]
    lengths = list(plans[0]["requests"]) if budgeted else []
    if budgeted:
        columns += ["tokens", *(f"requests of {int(length):,}" for length in lengths)]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for plan in plans:
        cells = [
            plan["kv_dtype"], str(plan["tp_size"]), str(plan["pp_size"]), str(plan["page_size"]),
            f"{plan['bytes_per_token']['total']:,}", format_size(plan["weights"]["total"]),
        ]  # fmt: skip
        if budgeted:
            cells += [f"{plan['tokens']:,}", *(f"{plan['requests'][length]:,}" for length in lengths)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)

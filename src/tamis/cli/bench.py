"""`tamis bench`: how fast a running server answers."""

import asyncio
import os
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from tamis.cli import EXIT_ERROR
from tamis.cli.options import (
    AsJson,
    BenchClients,
    BenchMaxTokens,
    BenchModel,
    BenchPrefix,
    BenchPrompt,
    BenchRequests,
    BenchSpread,
    BenchUrl,
    ClientKey,
    Debug,
    IgnoreEos,
    Quiet,
    RequestTimeout,
    Seed,
)
from tamis.cli.output import new_table, print_json, print_table

if TYPE_CHECKING:
    from tamis.cli.traffic import Outcome, Target

SHARES = (50, 90, 95, 99)
"""Percentiles that are reported."""


def bench(
    url: BenchUrl = "http://127.0.0.1:8000",
    clients: BenchClients = 16,
    requests: BenchRequests = 64,
    prompt_tokens: BenchPrompt = 256,
    max_tokens: BenchMaxTokens = 64,
    spread: BenchSpread = 0.5,
    prefix_tokens: BenchPrefix = 0,
    model: BenchModel = None,
    api_key: ClientKey = None,
    seed: Seed = 0,
    timeout: RequestTimeout = 600.0,
    ignore_eos: IgnoreEos = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Measure a server that speaks OpenAI's API: time to the first token, between tokens, and throughput."""
    from tamis.cli.traffic import Target, random_lengths

    rng = random.Random(seed)
    sizes = [random_lengths(mean, spread, requests, rng) for mean in (prompt_tokens, max_tokens)]
    key = api_key or os.environ.get("TAMIS_API_KEY")
    target = Target(url, model or "", key, timeout)
    options = {"temperature": 0, "ignore_eos": True} if ignore_eos else {"temperature": 0}
    outcomes, seconds = asyncio.run(_measure(target, sizes, prefix_tokens, options, rng, clients=clients, quiet=quiet))
    facts = {"url": url, "clients": clients, **summary(outcomes, seconds)}
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    if facts["failed"]:
        raise typer.Exit(EXIT_ERROR)


async def _measure(
    target: "Target",
    sizes: Sequence[Sequence[int]],
    prefix: int,
    options: dict[str, Any],
    rng: random.Random,
    *,
    clients: int,
    quiet: bool,
) -> "tuple[list[Outcome], float]":
    from tamis.cli.progress import make_progress
    from tamis.cli.traffic import Job, first_model, prompts, run, tokens_per_word

    target = target if target.model else replace(target, model=await first_model(target))
    per_word = await tokens_per_word(target, rng)
    texts = prompts(sizes[0], prefix, per_word, rng)
    jobs = [Job(text, length, options) for text, length in zip(texts, sizes[1], strict=True)]
    progress = make_progress(quiet=quiet)
    progress.start("requests", len(jobs), "steps")
    try:
        return await run(target, jobs, clients, lambda: progress.advance(1))
    finally:
        progress.finish()


def summary(outcomes: "Sequence[Outcome]", seconds: float) -> dict[str, Any]:
    """Counts, rates (a second) and distributions (seconds) of what was measured."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    output = sum(outcome.completion_tokens for outcome in good)
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common(5)),
        "seconds": seconds,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "first_token": distribution([outcome.first for outcome in good]),
        "between_tokens": distribution([gap for outcome in good for gap in outcome.gaps]),
        "request": distribution([outcome.ended - outcome.sent for outcome in good]),
    }


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None where there is nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": statistics.fmean(ordered)}
    return found | {f"p{share}": percentile(ordered, share) for share in SHARES} | {"max": ordered[-1]}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent of the ascending values lie; between two it is interpolated."""
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _print(facts: dict[str, Any]) -> None:
    heads = ("mean", *(f"p{share}" for share in SHARES), "max")
    table = new_table(f"{facts['url']}, {facts['clients']} clients", [("ms", False), *((head, True) for head in heads)])
    rows = {"to the first token": "first_token", "between tokens": "between_tokens", "a whole request": "request"}
    for name, key in rows.items():
        if facts[key] is not None:
            table.add_row(name, *(f"{facts[key][head] * 1000:,.1f}" for head in heads))
    print_table(table)
    print(
        f"{facts['requests'] - facts['failed']} of {facts['requests']} requests in {facts['seconds']:.1f} s: "
        f"{facts['requests_per_second']:.2f} requests/s, {facts['output_tokens_per_second']:,.1f} output tokens/s; "
        f"{facts['prompt_tokens']:,} prompt tokens ({facts['cached_tokens']:,} from the prefix cache), "
        f"{facts['output_tokens']:,} output tokens"
    )
    for message, count in facts["errors"].items():
        print(f"failed, {count} times: {message}")

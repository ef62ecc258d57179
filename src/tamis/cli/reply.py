"""One reply as it streams in, and what is said about it afterwards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tamis.request import FinishReason, TokenEvent, TokenLogprobs
from tamis.units import format_size

if TYPE_CHECKING:
    from tamis.engine.stats import EngineStats


@dataclass
class Reply:
    """Filled by `follow`, event by event; complete when `finish_reason` is set."""

    prompt_tokens: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    def follow(self, events: Iterable[TokenEvent], show: Callable[[str], None]) -> None:
        """Take in every event, handing each new piece of text to `show`. Interrupted, it ends as an abort."""
        try:
            for event in events:
                self._take(event)
                if event.text:
                    show(event.text)
        except KeyboardInterrupt:
            self.finish_reason = FinishReason.ABORT

    def _take(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason


def figures(reply: Reply, stats: "EngineStats", bytes_per_page: int) -> dict[str, Any]:
    """Counts, seconds, tokens a second and pool occupancy (bytes, pages, tokens) of a run that made one reply."""
    return {
        "finish_reason": reply.finish_reason,
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": len(reply.token_ids),
            "total_tokens": reply.prompt_tokens + len(reply.token_ids),
        },
        "prefill": _speed(stats.prefill_tokens, stats.prefill_seconds),
        "decode": _speed(stats.decode_tokens, stats.decode_seconds),
        "pool": {
            "page_size": stats.page_size,
            "pages_used": stats.pages_peak,
            "pages_total": stats.pages_total,
            "tokens_used": stats.prefill_tokens + stats.decode_tokens,
            "tokens_total": stats.pages_total * stats.page_size,
            "bytes_used": stats.pages_peak * bytes_per_page,
            "bytes_total": stats.pages_total * bytes_per_page,
        },
    }


def closing_lines(facts: dict[str, Any]) -> list[str]:
    """`figures` in three lines."""
    usage, pool = facts["usage"], facts["pool"]
    return [
        f"prompt:    {usage['prompt_tokens']:,} tokens{_rate(facts['prefill'])}",
        f"generated: {usage['completion_tokens']:,} tokens{_rate(facts['decode'])} ({facts['finish_reason']})",
        f"KV pool:   {pool['tokens_used']:,} of {pool['tokens_total']:,} tokens, "
        f"{format_size(pool['bytes_used'])} of {format_size(pool['bytes_total'])} "
        f"({pool['pages_used']:,} of {pool['pages_total']:,} pages)",
    ]


def _speed(tokens: int, seconds: float) -> dict[str, Any]:
    rate = round(tokens / seconds, 2) if seconds > 0 and tokens else None
    return {"tokens": tokens, "seconds": round(seconds, 4), "tokens_per_second": rate}


def _rate(speed: dict[str, Any]) -> str:
    rate = speed["tokens_per_second"]
    return "" if rate is None else f", {rate:,.1f} tokens/s"

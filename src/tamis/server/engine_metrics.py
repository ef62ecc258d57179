"""An engine's own figures as Prometheus metrics, read when they are asked for."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tamis.engine.async_engine import AsyncEngine
from tamis.engine.stats import EngineStats
from tamis.errors import EngineClosedError, EngineDeadError
from tamis.server.tier_metrics import tier_metrics


def engine_metrics(engine: AsyncEngine) -> Callable[[], Iterable[Metric]]:
    """A source for ServerMetrics. Empty once the engine is closed or dead: /health says so."""

    def read() -> Iterable[Metric]:
        try:
            stats, usage, tiers = engine.stats, engine.kv_usage(), engine.tier_stats
        except (EngineClosedError, EngineDeadError):
            return []
        moved = tier_metrics(stats, tiers)
        return [*_counters(stats), *_gauges(stats), _pages(usage["pages"]), _bytes(usage["bytes"]), *moved]

    return read


def _counters(stats: EngineStats) -> Iterable[Metric]:
    values = {
        "tamis_engine_steps": (stats.steps, "Batches computed."),
        "tamis_prompt_tokens": (stats.prompt_tokens, "Tokens of prompts, cached ones included."),
        "tamis_prefix_cache_hit_tokens": (stats.hit_tokens, "Tokens of prompts found in the prefix cache."),
        "tamis_prefill_tokens": (stats.prefill_tokens, "Tokens of prompts computed."),
        "tamis_prefill_seconds": (stats.prefill_seconds, "Time spent on prompts."),
        "tamis_generated_tokens": (stats.decode_tokens, "Tokens of replies."),
        "tamis_decode_seconds": (stats.decode_seconds, "Time spent on replies."),
        "tamis_retractions": (stats.retractions, "Running requests put back because pages ran out."),
    }
    return [CounterMetricFamily(name, text, value=value) for name, (value, text) in values.items()]


def _gauges(stats: EngineStats) -> Iterable[Metric]:
    rate = stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    values = {
        "tamis_requests_waiting": (stats.waiting, "Requests in the queue."),
        "tamis_requests_running": (stats.running, "Requests being computed."),
        "tamis_prefix_cache_hit_rate": (rate, "Share of prompt tokens found in the prefix cache, so far."),
        "tamis_kv_page_size_tokens": (stats.page_size, "Tokens of a page."),
        "tamis_kv_pages_peak": (stats.pages_peak, "The most pages in use at once so far."),
    }
    return [GaugeMetricFamily(name, text, value=value) for name, (value, text) in values.items()]


def _pages(pages: dict[str, int]) -> Metric:
    metric = GaugeMetricFamily("tamis_kv_pages", "Pages of the KV pool by owner.", labels=("owner",))
    for owner, count in pages.items():
        if owner != "total":
            metric.add_metric((owner,), count)
    return metric


def _bytes(planes: dict[str, int]) -> Metric:
    metric = GaugeMetricFamily("tamis_kv_bytes", "Memory of the KV pool by plane.", labels=("plane",))
    for plane, size in planes.items():
        if plane != "total":
            metric.add_metric((plane,), size)
    return metric

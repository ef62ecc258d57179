"""What an engine's KV tiers did, as Prometheus metrics."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tamis.engine.stats import EngineStats
from tamis.kv.offload import OffloadStats
from tamis.kv.tiers.base import TierStat

_KINDS = ("lookup", "load", "save", "delete", "pin")


def tier_metrics(stats: EngineStats, tiers: Sequence[TierStat]) -> Iterable[Metric]:
    """Transfers, failures, measured rates, and each tier's own figures; nothing where there are no tiers."""
    moved = stats.offload
    return [] if moved is None else [*_transfers(moved), _failures(moved), *_rates(moved, stats), *_tiers(tiers)]


def _transfers(moved: OffloadStats) -> Iterable[Metric]:
    values = {
        "tamis_kv_tier_lookups": (moved.lookups, "Requests that the tiers were asked about."),
        "tamis_kv_tier_lookup_hits": (moved.lookup_hits, "Of these, requests of which a page or more was found."),
        "tamis_kv_tier_loads": (moved.loads, "Loads that came in whole."),
        "tamis_kv_tier_loaded_tokens": (moved.loaded_tokens, "Tokens read from the tiers instead of computed."),
        "tamis_kv_tier_loaded_bytes": (moved.loaded_bytes, "Bytes of these."),
        "tamis_kv_tier_recomputed_tokens": (
            moved.recomputed_tokens, "Tokens that the tiers had and that were estimated to be computed faster."
        ),
        "tamis_kv_tier_saved_pages": (moved.saved_pages, "Pages given to the tiers, there already or not."),
        "tamis_kv_tier_saved_bytes": (moved.saved_bytes, "Bytes of these."),
        "tamis_kv_tier_dropped_pages": (moved.dropped_pages, "Pages not written: the tiers could not keep up."),
        "tamis_kv_tier_worker_deaths": (moved.worker_deaths, "Threads of transfers that died and were replaced."),
    }  # fmt: skip
    return [CounterMetricFamily(name, text, value=value) for name, (value, text) in values.items()]


def _failures(moved: OffloadStats) -> Metric:
    text = "Transfers that failed; each counts as a miss."
    metric = CounterMetricFamily("tamis_kv_tier_failures", text, labels=("operation",))
    for kind in _KINDS:
        metric.add_metric((kind,), moved.failures.get(kind, 0))
    return metric


def _rates(moved: OffloadStats, stats: EngineStats) -> Iterable[Metric]:
    prefill = stats.prefill_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    values = {
        "tamis_kv_tier_load_bytes_per_second": (moved.load_bytes_per_second, "As measured lately."),
        "tamis_kv_tier_save_bytes_per_second": (moved.save_bytes_per_second, "As measured lately."),
        "tamis_prefill_tokens_per_second": (prefill, "Of prompts, on average so far."),
        "tamis_kv_tier_waiting_pages": (moved.waiting_pages, "Pages that are still to be written."),
        "tamis_kv_tier_resting": (int(moved.resting), "1 while the tiers are left alone: they did not answer in time."),
    }
    return [GaugeMetricFamily(name, text, value=value) for name, (value, text) in values.items()]


def _tiers(tiers: Sequence[TierStat]) -> Iterable[Metric]:
    gauges = {"entries": "Pages in a tier.", "bytes": "Bytes of these.", "pinned": "Pages pinned by sessions."}
    counters = {
        "hits": "Pages read from a tier.", "misses": "Pages looked for in vain.", "errors": "Failures of its store.",
        "corrupt": "Blobs that were not as written.", "evictions": "Blobs that made room.",
    }  # fmt: skip
    for field, text in gauges.items():
        gauge = GaugeMetricFamily(f"tamis_kv_tier_{field}", text, labels=("tier",))
        for tier in tiers:
            gauge.add_metric((tier.name,), getattr(tier, field))
        yield gauge
    for field, text in counters.items():
        counter = CounterMetricFamily(f"tamis_kv_tier_{field}", text, labels=("tier",))
        for tier in tiers:
            counter.add_metric((tier.name,), getattr(tier, field))
        yield counter

"""What a server counts and measures, as Prometheus text. Every server has a registry of its own."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ServerMetrics:
    """Counters and histograms that requests fill in, beside figures that are read when they are asked for."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.http_requests = Counter(
            "tamis_http_requests",
            "HTTP requests answered, but for /health and /metrics.",
            ("path", "status"),
            registry=registry,
        )
        self.http_active = Gauge(
            "tamis_http_requests_active", "HTTP requests being answered, but for /health and /metrics.",
            registry=registry,
        )  # fmt: skip
        self.finished = Counter(
            "tamis_completions_finished", "Completions by how they ended.", ("reason",), registry=registry
        )
        self.first_token = Histogram(
            "tamis_time_to_first_token_seconds", "From a request's arrival to its first token.",
            buckets=_REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "tamis_time_between_tokens_seconds", "From one token of a completion to the next.",
            buckets=_TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "tamis_request_seconds", "From a request's arrival to the end of its last completion.",
            buckets=_REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip

    def add_source(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add figures that `read` gives each time the metrics are asked for."""
        self._registry.register(_Source(read))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _Source(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> Iterable[Metric]:
        """Names are not checked beforehand: that would read figures before there are any."""
        return []

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tamis.metrics import ServerMetrics


def test_counts_and_times_come_out_as_prometheus_text() -> None:
    metrics = ServerMetrics()
    metrics.finished.labels("stop").inc()
    metrics.first_token.observe(0.2)
    text = metrics.text().decode()
    assert 'tamis_completions_finished_total{reason="stop"} 1.0' in text
    assert 'tamis_time_to_first_token_seconds_bucket{le="0.25"} 1.0' in text
    assert 'tamis_time_to_first_token_seconds_bucket{le="0.1"} 0.0' in text


def test_two_servers_count_apart() -> None:
    one, two = ServerMetrics(), ServerMetrics()
    one.finished.labels("stop").inc()
    assert 'reason="stop"' not in two.text().decode()


def test_a_source_is_read_when_the_text_is_asked_for() -> None:
    metrics, values = ServerMetrics(), [1.0]

    def read() -> Iterable[Metric]:
        return [GaugeMetricFamily("example", "An example.", value=values[-1])]

    metrics.add_source(read)
    assert "\nexample 1.0\n" in metrics.text().decode()
    values.append(2.0)
    assert "\nexample 2.0\n" in metrics.text().decode()

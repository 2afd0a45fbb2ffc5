"""metrics_export: what reaches the server's metrics, and that nothing is sent twice."""

from fake_server import MetricFamily

from netra_backend.metrics import Metrics
from netra_backend.metrics_export import MetricsExporter

LABELS = {"model": "netra", "version": "1"}


def exporter_and_families(family=MetricFamily):
    families = {}

    def new_family(name, description, kind):
        assert name not in families, "one family per name, whatever its labels"
        families[name] = family(name, description, kind)
        return families[name]

    for kind in ("COUNTER", "GAUGE", "HISTOGRAM"):
        if hasattr(family, kind):
            setattr(new_family, kind, getattr(family, kind))
    metrics = Metrics(4096)
    return metrics, MetricsExporter(metrics, new_family, LABELS), families


def test_every_metric_of_the_engine_is_published():
    metrics, _, families = exporter_and_families()
    everything = (*metrics.counters, *metrics.gauges, *metrics.histograms)
    assert set(families) == {metric.name for metric in everything}


def test_counters_send_growth_and_gauges_send_changes():
    metrics, exporter, families = exporter_and_families()
    exporter.export()
    tokens, running = (
        families["vllm:generation_tokens_total"],
        families["vllm:num_requests_running"],
    )
    own = tuple(sorted(LABELS.items()))
    assert tokens.calls == []
    assert running.calls == [(own, "set", 0)]
    metrics.generation_tokens.value += 5
    metrics.running.value = 2
    exporter.export()
    metrics.generation_tokens.value += 3
    exporter.export()
    assert tokens.calls == [(own, "increment", 5), (own, "increment", 3)]
    assert running.calls[1:] == [(own, "set", 2)]


def test_labelled_gauges_share_a_family():
    metrics, exporter, families = exporter_and_families()
    metrics.set_capacity(100, 64, 8)
    exporter.export()
    calls = families["nv_trt_llm_kv_cache_block_metrics"].calls
    shown = {dict(labels)["kv_cache_block_type"]: value for labels, _, value in calls}
    assert shown["max"] == 100
    assert shown["tokens_per"] == 64
    assert all(dict(labels).items() >= LABELS.items() for labels, _, _ in calls)


def test_histograms_send_each_observation_once():
    metrics, exporter, families = exporter_and_families()
    metrics.time_to_first_token.observe(0.25)
    exporter.export()
    exporter.export()
    family = families["vllm:time_to_first_token_seconds"]
    assert [(what, value) for _, what, value in family.calls] == [("observe", 0.25)]
    assert family.buckets == sorted(family.buckets)


def test_a_server_without_histograms_still_gets_the_rest():
    class OldFamily(MetricFamily):
        HISTOGRAM = None

    metrics, exporter, families = exporter_and_families(OldFamily)
    metrics.time_to_first_token.observe(0.25)
    metrics.generation_tokens.value = 1
    exporter.export()
    assert "vllm:time_to_first_token_seconds" not in families
    assert families["vllm:generation_tokens_total"].calls

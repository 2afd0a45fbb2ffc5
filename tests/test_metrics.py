"""Metrics: vLLM's names, and a drain that reports each change once."""

from __future__ import annotations

import pytest
from simulated import simulate

from netra_backend.config import EngineConfig
from netra_backend.metrics import Histogram, Metrics, token_buckets

NAMES = {
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:request_params_n", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc", "netra:queued_prompt_tokens", "netra:pages_used",
    "netra:pages_total", "netra:slots_used", "netra:slots_total", "netra:preemptions_total",
    "netra:draft_tokens_total", "netra:accepted_tokens_total", "nv_trt_llm_request_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
}  # fmt: skip


def levels(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (gauge.name, gauge.labels[0][1] if gauge.labels else ""): value
        for gauge, value in metrics.drain().gauges
    }


def test_names_and_labels_are_unique() -> None:
    metrics = Metrics(1000)
    everything = (*metrics.counters, *metrics.gauges, *metrics.histograms)
    assert {each.name for each in everything} >= NAMES
    assert len({(each.name, each.labels) for each in everything}) == len(everything)
    assert all(each.help for each in everything)


def test_token_buckets_end_at_the_longest_request() -> None:
    assert token_buckets(120) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(5)[-1] == 5


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1, 0), (1.5, 1), (2, 1), (3, 2)])
def test_histogram_buckets_are_upper_bounds(value: float, bucket: int) -> None:
    histogram = Histogram("h", "", (1, 2))
    histogram.observe(value)
    assert histogram.counts == [int(i == bucket) for i in range(3)]
    assert histogram.sum == value


def test_pending_observations_are_bounded() -> None:
    histogram = Histogram("h", "", (1, 2))
    for number in range(100_000):
        histogram.observe(number)
    assert len(histogram.pending) < 10_000
    assert histogram.pending[-1] == 99_999
    assert sum(histogram.counts) == 100_000


def test_drain_reports_what_happened_once() -> None:
    simulated = simulate(EngineConfig(max_num_seqs=2), num_pages=100)
    for number in range(3):
        simulated.add(f"r{number}", 100, max_tokens=21, ignore_eos=True)
    simulated.step()
    simulated.step()
    seen = levels(simulated.engine.metrics)
    assert seen["vllm:num_requests_running", ""] == 2
    assert seen["nv_trt_llm_request_metrics", "active"] == 2
    assert seen["nv_trt_llm_request_metrics", "waiting"] == 1
    assert seen["netra:queued_prompt_tokens", ""] == 100
    assert seen["netra:pages_used", ""] == 2
    assert seen["netra:slots_total", ""] == 2
    assert seen["nv_trt_llm_kv_cache_block_metrics", "used"] == 2
    assert seen["nv_trt_llm_kv_cache_block_metrics", "max"] == 100
    assert seen["nv_trt_llm_kv_cache_block_metrics", "tokens_per"] == 64
    assert seen["vllm:gpu_cache_usage_perc", ""] == pytest.approx(0.02)
    simulated.run()
    rest = simulated.engine.metrics.drain()
    growth = {counter.name: value for counter, value in rest.counters}
    observed = {histogram.name: values for histogram, values in rest.observations}
    # Two steps and their six tokens were drained above.
    assert growth["vllm:prompt_tokens_total"] == 100
    assert growth["vllm:generation_tokens_total"] == 3 * 21 - 4
    assert observed["vllm:request_prompt_tokens"] == (100,) * 3
    assert observed["vllm:request_generation_tokens"] == (21,) * 3
    assert observed["vllm:request_params_n"] == (1,) * 3
    assert len(observed["vllm:e2e_request_latency_seconds"]) == 3
    assert len(observed["vllm:time_to_first_token_seconds"]) == 1
    # A decode step of the simulated machine with at most two rows.
    assert observed["vllm:time_per_output_token_seconds"] == pytest.approx([5.2e-3] * 3, rel=0.1)
    empty = simulated.engine.metrics.drain()
    assert not any(value for _, value in empty.counters)
    assert not any(values for _, values in empty.observations)


def test_aborted_requests_are_no_observations() -> None:
    simulated = simulate()
    simulated.add("r", 100, max_tokens=100, ignore_eos=True)
    simulated.step()
    simulated.scheduler.abort("r")
    observed = simulated.engine.metrics.drain().observations
    assert {h.name for h, values in observed if values} == {"vllm:time_to_first_token_seconds"}
    assert levels(simulated.engine.metrics)["netra:pages_used", ""] == 0

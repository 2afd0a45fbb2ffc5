"""Metrics: what the engine counts, with vLLM's names, in plain Python objects.

Knows no server. The engine thread writes; one other thread calls `drain` about once a second and
passes the result on. No lock: values are single ints or floats, observations go through bounded
deques, and counters only grow, so `drain` reports the growth since it last looked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

# Buckets of vllm_backend's metrics.py.
_TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10)  # fmt: skip
_TPOT_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5)  # fmt: skip
_E2E_BUCKETS = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_N_BUCKETS = (1, 2, 5, 10, 20)

MAX_DRAFT_POSITIONS = 16

_MAX_PENDING = 4096
"""Observations kept for the next `drain`; the oldest go first. One costs the server about 45 us to
take."""


@dataclass(slots=True)
class Counter:
    """A total that only grows."""

    name: str
    help: str
    labels: Labels = ()
    value: int = 0
    drained: int = 0


@dataclass(slots=True)
class Gauge:
    """A level right now."""

    name: str
    help: str
    labels: Labels = ()
    value: float = 0.0


@dataclass(slots=True)
class Histogram:
    """Counts per bucket (`buckets` are upper bounds, the last count is above all of them)."""

    name: str
    help: str
    buckets: tuple[float, ...]
    labels: Labels = ()
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)
    pending: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_PENDING))

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.buckets) + 1)

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.sum += value
        self.counts[bisect_left(self.buckets, value)] += 1
        self.pending.append(value)


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """What changed since the previous drain: growth of counters, levels, new observations."""

    counters: tuple[tuple[Counter, int], ...]
    gauges: tuple[tuple[Gauge, float], ...]
    observations: tuple[tuple[Histogram, tuple[float, ...]], ...]


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`, as vLLM builds them for token counts."""
    buckets: list[float] = []
    decade = 1
    while decade <= max_model_len:
        buckets += [step * decade for step in (1, 2, 5) if step * decade <= max_model_len]
        decade *= 10
    return tuple(buckets)


class Metrics:
    """Every metric of one engine, as attributes.

    Time per output token is one observation per finished request (its mean), not one per token: an
    observation costs the server an IPC round trip, and 256 users at 50 tokens/s would need 12,800 a
    second.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        self.prompt_tokens = Counter("vllm:prompt_tokens_total", "Prompt tokens processed.")
        self.generation_tokens = Counter("vllm:generation_tokens_total", "Tokens generated.")
        self.preemptions = Counter("netra:preemptions_total", "Sequences preempted.")
        self.moved_out = _resolved("host")
        self.recomputed = _resolved("recompute")
        self.host_pages_out = Counter("netra:host_pages_out_total", "Pages copied to the host.")
        self.host_pages_in = Counter("netra:host_pages_in_total", "Pages copied from the host.")
        self.prefix_queries = Counter(
            "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = Counter(
            "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."
        )
        self.draft_tokens = Counter("netra:draft_tokens_total", "Draft tokens verified.")
        self.accepted_tokens = Counter("netra:accepted_tokens_total", "Draft tokens accepted.")
        self.draft_resets = Counter("netra:draft_resets_total", "Draft caches found broken.")

        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            _TTFT_BUCKETS,
        )
        self.time_per_output_token = Histogram(
            "vllm:time_per_output_token_seconds",
            "Mean seconds per token after the first.",
            _TPOT_BUCKETS,
        )
        self.e2e_latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from arrival to the end.", _E2E_BUCKETS
        )
        self.request_prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", tokens
        )
        self.request_generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", tokens
        )
        self.request_params_n = Histogram(
            "vllm:request_params_n", "Parameter n per request.", _N_BUCKETS)  # fmt: skip

        self.draft_length = Gauge("netra:draft_length", "Mean drafts chosen per request now.")
        self.running = Gauge("vllm:num_requests_running", "Requests that own a slot.")
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests waiting to start or to resume.")
        self.cache_usage = Gauge("vllm:gpu_cache_usage_perc", "KV pages in use; 1 means all.")
        self.queued_prompt_tokens = Gauge(
            "netra:queued_prompt_tokens", "Tokens of waiting requests."
        )
        self.pages_used = Gauge("netra:pages_used", "KV pages in use.")
        self.pages_total = Gauge("netra:pages_total", "KV pages.")
        self.slots_used = Gauge("netra:slots_used", "Tail and state slots in use.")
        self.slots_total = Gauge("netra:slots_total", "Tail and state slots.")
        self.requests_active = _labelled("nv_trt_llm_request_metrics", "request_type", "active")
        self.requests_waiting = _labelled("nv_trt_llm_request_metrics", "request_type", "waiting")
        blocks = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"
        self.blocks_used = _labelled(*blocks, "used")
        self.blocks_max = _labelled(*blocks, "max")
        self.blocks_tokens_per = _labelled(*blocks, "tokens_per")
        self.blocks_fraction = _labelled(*blocks, "fraction")
        self._list_members()

    def _list_members(self) -> None:
        """The lists that an exporter walks, and the counters that exist once per draft position."""
        members = tuple(vars(self).values())
        positions = range(MAX_DRAFT_POSITIONS)
        self.drafts_at = [_at("netra:drafts_by_position_total", "verified", p) for p in positions]
        self.accepted_at = [
            _at("netra:accepted_by_position_total", "accepted", p) for p in positions
        ]
        counters = tuple(m for m in members if isinstance(m, Counter))
        self.counters = (*counters, *self.drafts_at, *self.accepted_at)
        self.gauges = tuple(m for m in members if isinstance(m, Gauge))
        self.histograms = tuple(m for m in members if isinstance(m, Histogram))

    def observe_request(
        self, num_prompt: int, num_output: int, latency_seconds: float, decode_seconds: float
    ) -> None:
        """A request is complete; `decode_seconds` lie between its first token and its last."""
        self.e2e_latency.observe(latency_seconds)
        self.request_prompt_tokens.observe(num_prompt)
        self.request_generation_tokens.observe(num_output)
        self.request_params_n.observe(1)
        if num_output > 1:
            self.time_per_output_token.observe(decode_seconds / (num_output - 1))

    def set_capacity(self, num_pages: int, page_size: int, num_slots: int) -> None:
        """Set the gauges that never change."""
        self.pages_total.value = self.blocks_max.value = num_pages
        self.slots_total.value = num_slots
        self.blocks_tokens_per.value = page_size

    def set_load(self, running: int, waiting: int, queued_tokens: int) -> None:
        """Set the gauges of requests."""
        self.running.value = self.requests_active.value = running
        self.waiting.value = self.requests_waiting.value = waiting
        self.queued_prompt_tokens.value = queued_tokens

    def set_usage(self, pages_used: int, slots_used: int) -> None:
        """Set the gauges of memory."""
        fraction = pages_used / max(1.0, self.pages_total.value)
        self.pages_used.value = self.blocks_used.value = pages_used
        self.cache_usage.value = self.blocks_fraction.value = fraction
        self.slots_used.value = slots_used

    def drain(self) -> MetricsDelta:
        """Everything new since the previous call. For one reading thread."""
        return MetricsDelta(
            counters=tuple((counter, _growth(counter)) for counter in self.counters),
            gauges=tuple((gauge, gauge.value) for gauge in self.gauges),
            observations=tuple((each, _take_pending(each)) for each in self.histograms),
        )


def _labelled(name: str, key: str, value: str) -> Gauge:
    return Gauge(name, f"{name} by {key}.", ((key, value),))


def _resolved(by: str) -> Counter:
    text = "Preempted sequences, by how they go on: moved to the host, or recomputed."
    return Counter("netra:preemptions_resolved_total", text, (("by", by),))


def _at(name: str, what: str, position: int) -> Counter:
    return Counter(name, f"Drafts {what}, by position.", (("position", str(position)),))


def _growth(counter: Counter) -> int:
    value = counter.value
    growth, counter.drained = value - counter.drained, value
    return growth


def _take_pending(histogram: Histogram) -> tuple[float, ...]:
    return tuple(histogram.pending.popleft() for _ in range(len(histogram.pending)))

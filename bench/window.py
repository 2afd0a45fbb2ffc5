"""What times and token counts say: latencies and rates of a burst, or of a steady window.

Pure arithmetic; knows no engine, no server and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from report import Metrics, percentile


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that were sent at once: per request the seconds from the start of the burst to its
    first and its last token, and its counts."""

    first: Sequence[float]
    last: Sequence[float]
    num_prompt_tokens: Sequence[int]
    num_output_tokens: Sequence[int]

    def metrics(self) -> Metrics:
        """Rates count from the arrival of the burst to its last token, prompts included.

        tpot is (last - first token) / (tokens - 1) of one answer. Prompt tokens per second end
        with the last first token, so with several users they include decoding that ran meanwhile.
        """
        answers = zip(self.first, self.last, self.num_output_tokens, strict=True)
        per_token = [(last - first) / (count - 1) for first, last, count in answers if count > 1]
        seconds = max(self.last)
        num_prompt, num_output = sum(self.num_prompt_tokens), sum(self.num_output_tokens)
        return {
            "ttft_ms": milliseconds(percentile(self.first, 0.5)),
            "ttft_ms_max": milliseconds(max(self.first)),
            "tpot_ms": milliseconds(percentile(per_token, 0.5)),
            "output_tokens_per_second": num_output / seconds,
            "prompt_tokens_per_second": num_prompt / max(self.first),
            "total_tokens_per_second": (num_prompt + num_output) / seconds,
            "wall_seconds": seconds,
        }


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds; None stays None."""
    return None if seconds is None else seconds * 1000


@dataclass(slots=True)
class Span:
    """One request as its client saw it; times on time.perf_counter, in seconds."""

    start: float
    input_len: int
    output_len: int
    chunks: list[tuple[float, int]] = field(default_factory=list)
    end: float = 0.0
    num_input_tokens: int = 0
    error: str = ""

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the server counted."""
        return sum(count for _, count in self.chunks)

    @property
    def first(self) -> float:
        """Time of the first token; the end if there was none."""
        return self.chunks[0][0] if self.chunks else self.end

    @property
    def last(self) -> float:
        """Time of the last token."""
        return self.chunks[-1][0] if self.chunks else self.end

    @property
    def max_gap(self) -> float:
        """Longest wait between two chunks that carry tokens."""
        times = [at for at, _ in self.chunks]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    def overlap(self, begin: float, end: float, window: tuple[float, float]) -> float:
        """Seconds of [begin, end] that lie in the window."""
        return max(min(end, window[1]) - max(begin, window[0]), 0.0)


def measure(spans: list[Span], window: tuple[float, float]) -> Metrics:
    """The numbers of one window: latencies of the requests that ended in it, rates of what arrived.

    Little's law: the mean number in flight equals completions per second times the mean time a
    request takes; in a steady window the two agree.
    """
    seconds = window[1] - window[0]
    ended = [span for span in spans if window[0] < span.end <= window[1]]
    done = [span for span in ended if not span.error]
    e2e = [span.end - span.start for span in done]
    chunks = [count for span in spans for at, count in span.chunks if window[0] < at <= window[1]]
    inputs = [
        span.num_input_tokens
        for span in spans
        if span.chunks and window[0] < span.first <= window[1]
    ]
    in_flight = sum(s.overlap(s.start, s.end or window[1], window) for s in spans) / seconds
    decoding = sum(s.overlap(s.first, s.last, window) for s in spans if s.chunks) / seconds
    by_little = len(done) / seconds * (sum(e2e) / len(e2e)) if e2e else 0.0
    return latencies(done) | {
        "output_tokens_per_second": sum(chunks) / seconds,
        "input_tokens_per_second": sum(inputs) / seconds,
        "total_tokens_per_second": (sum(chunks) + sum(inputs)) / seconds,
        "chunks_per_second": len(chunks) / seconds,
        "in_flight": in_flight,
        "active_decoders": decoding,
        "little_in_flight": by_little,
        "little_error": abs(by_little / in_flight - 1) if in_flight else None,
        "window_seconds": seconds,
        "num_completed": len(done),
        "num_failed": len(ended) - len(done),
        "num_wrong_output_len": sum(s.num_output_tokens != s.output_len for s in done),
        "num_wrong_input_len": sum(s.num_input_tokens != s.input_len for s in done),
    }


def latencies(done: list[Span]) -> Metrics:
    """Percentiles in milliseconds over the finished requests."""
    series = {
        "ttft_ms": [span.first - span.start for span in done],
        "tpot_ms": [
            (span.last - span.first) / (span.num_output_tokens - span.chunks[0][1])
            for span in done
            if len(span.chunks) > 1
        ],
        "e2e_ms": [span.end - span.start for span in done],
        "max_gap_ms": [span.max_gap for span in done],
    }
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    named: Metrics = {}
    for name, values in series.items():
        for label, share in shares.items():
            named[f"{name}_{label}"] = milliseconds(percentile(values, share))
        named[name] = named[f"{name}_p50"]
    return named


def summary(values: Metrics) -> str:
    """What a reader should check before using the numbers."""

    def number(name: str) -> float:
        return values.get(name) or 0.0

    lines = [
        f"window {number('window_seconds'):.1f} s, {number('num_completed'):.0f} answers, "
        f"{number('num_failed'):.0f} failed, "
        f"{number('num_wrong_output_len'):.0f} of a wrong length, "
        f"{number('num_wrong_input_len'):.0f} prompts counted otherwise",
        f"in flight {number('in_flight'):.2f}, decoding {number('active_decoders'):.2f}; "
        f"Little's law gives {number('little_in_flight'):.2f} "
        f"({number('little_error'):.1%} off; steady below 2 %)",
        f"gap between chunks, largest of a request: p50 {number('max_gap_ms_p50'):.0f} ms, "
        f"p90 {number('max_gap_ms_p90'):.0f}, p99 {number('max_gap_ms_p99'):.0f}, "
        f"max {number('max_gap_ms_max'):.0f}; {number('chunks_per_second'):.0f} chunks/s",
        f"this client used {number('client_cores'):.2f} cores and woke up to "
        f"{number('client_lag_ms_p99'):.1f} ms late (p99); server and all else: "
        f"{number('rest_of_machine_cores'):.2f} cores",
    ]
    return "\n".join(lines)

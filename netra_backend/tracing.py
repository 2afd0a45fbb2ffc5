"""Tracing: spans of steps and requests in a ring buffer, written as Chrome trace JSON.

Knows nothing about what it records. Without a file every call returns at once; with one, memory is
bounded and the newest spans win. Open the file in chrome://tracing or Perfetto.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

_MAX_SPANS = 200_000

Arguments = dict[str, int | float | str]

_STEPS, _REQUESTS = 1, 2
_TRACKS = {_STEPS: "steps", _REQUESTS: "requests"}


class Tracer:
    """Keeps the last spans; times are seconds on the engine's clock. `path=""` switches it off."""

    def __init__(self, path: str) -> None:
        self.enabled = bool(path)
        self._path = Path(path)
        self._spans: deque[tuple[int, int, str, float, float, Arguments]] = deque(maxlen=_MAX_SPANS)

    def step(
        self, begun: float, launched: float, computed: float, end: float, arguments: Arguments
    ) -> None:
        """Record a step: scheduled from `begun`, computed from `launched`, applied from
        `computed`."""
        self._add(_STEPS, 0, "schedule", begun, launched, {})
        self._add(_STEPS, 0, "run", launched, computed, arguments)
        self._add(_STEPS, 0, "update", computed, end, {})

    def request(
        self,
        seq_id: int,
        arrival: float,
        scheduled: float | None,
        first_token: float | None,
        end: float,
        arguments: Arguments,
    ) -> None:
        """Record a request on a line of its own: queued, prompt and decode, as far as it came."""
        scheduled = end if scheduled is None else scheduled
        first_token = end if first_token is None else first_token
        self._add(_REQUESTS, seq_id, "queued", arrival, scheduled, arguments)
        self._add(_REQUESTS, seq_id, "prompt", scheduled, first_token, arguments)
        self._add(_REQUESTS, seq_id, "decode", first_token, end, arguments)

    def _add(
        self, track: int, line: int, name: str, start: float, end: float, arguments: Arguments
    ) -> None:
        if self.enabled and end >= start:
            self._spans.append((track, line, name, start, end, arguments))

    def write(self) -> None:
        """Write all spans to the file, if there is one."""
        if not self.enabled:
            return
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": track, "name": "process_name", "args": {"name": name}}
            for track, name in _TRACKS.items()
        ]
        for track, line, name, start, end, arguments in self._spans:
            span = {"ph": "X", "pid": track, "tid": line, "name": name}
            events.append(span | {"ts": start * 1e6, "dur": (end - start) * 1e6, "args": arguments})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": events}))

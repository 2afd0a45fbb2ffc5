"""Responder: the one thread that answers clients, and the registry of who still waits for an
answer.

Knows outputs, sinks and time; not the server (a Sink is what it writes to) and not how tokens are
made. Invariant: every registered request gets exactly one final response, also when this thread or
the engine dies. A response costs a round trip to the server (170-380 us measured on tritonserver
2.51, and it takes the GIL), so a request's first text goes out at once and later text waits until
its interval has passed and the budget of responses per second allows. A second sending thread loses
events (measured: 5 of 15 bursts over HTTP with 8-64 threads, none of 7 with one), so nothing else
may send.
"""

from __future__ import annotations

import heapq
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from netra_backend.config import EngineConfig
from netra_backend.errors import EngineError, RequestError
from netra_backend.request import FinishReason, RequestOutput
from netra_backend.responses import merge_outputs

logger = logging.getLogger(__name__)

_POLL_COST_SECONDS = 55e-6
"""One is_cancelled() round trip, measured on tritonserver 2.51."""

_POLL_SHARE = 0.1
"""Most of this thread's time that may go into polling: the period grows with the number of live
requests."""

_POLL_BATCH_SECONDS = 0.01
_BURST_SECONDS = 0.02
_DEBT_SECONDS = 0.5
_UNHEALTHY_GRACE_SECONDS = 1.0
_RECEIVE_LIMIT = 1024


class Sink(Protocol):
    """Where one request's responses go. Raises EngineError if the server no longer takes them."""

    def send(self, output: RequestOutput, *, final: bool) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Live:
    """One request that still waits. `parts` is what was not sent yet; `queued` means it has a due
    time."""

    sink: Sink
    stream: bool
    early: bool
    parts: list[RequestOutput] = field(default_factory=list)
    last_sent: float = -math.inf
    queued: bool = False


class Responder:
    """Delivers `outputs` to the sinks of their requests. See the module docstring for when and how
    often.

    `abort(request_id, error)` tells the engine to give a request up; its last output then comes
    through `outputs` like any other. `tick` is called every `metrics_interval_seconds`.
    """

    def __init__(
        self,
        config: EngineConfig,
        outputs: queue.SimpleQueue[RequestOutput],
        *,
        abort: Callable[[str, RequestError], None],
        is_healthy: Callable[[], bool],
        tick: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._outputs = outputs
        self._abort = abort
        self._is_healthy = is_healthy
        self._tick = tick
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._poll_order: deque[str] = deque()
        self._due: list[tuple[float, str]] = []
        self._rate = config.max_responses_per_second
        self._budget = self._rate * _BURST_SECONDS
        now = clock()
        self._budget_time = self._last_poll = self._last_tick = self._last_output = now
        self._closing = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="netra-responder", daemon=True)

    @property
    def num_live(self) -> int:
        """Requests that have not got their final response."""
        return len(self._live)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self, request_id: str, sink: Sink, *, stream: bool) -> None:
        """From now on `sink` is owed a final response. EngineError if nobody could send it."""
        early = stream and self._config.early_response
        with self._lock:
            if self._dead:
                raise EngineError("the response thread is not running")
            self._live[request_id] = _Live(sink, stream, early)
        self._poll_order.append(request_id)
        if early:
            self._outputs.put(RequestOutput(request_id))

    def refuse(self, request_id: str, sink: Sink, error: Exception) -> None:
        """Answer a request that was not taken, whether it is registered already or not."""
        with self._lock:
            if not self._dead:
                self._live.setdefault(request_id, _Live(sink, stream=False, early=False))
                failure = RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
                self._outputs.put(failure)
                return
        self._fail(request_id, sink, error)

    def close(self, timeout_seconds: float) -> None:
        """Let live requests finish for up to `timeout_seconds`, fail the rest, join the thread."""
        self._closing = True
        self._outputs.put(RequestOutput(""))
        self._thread.join(timeout_seconds)
        self._fail_all(RequestError("shutting_down", "the model is being unloaded"))

    def _run(self) -> None:
        try:
            while self._live or not self._closing:
                self.run_once(self._wait_seconds())
        except Exception:
            logger.exception("the response thread died")
        finally:
            with self._lock:
                self._dead = True
            self._fail_all(EngineError("the response thread died"))

    def run_once(self, wait_seconds: float) -> None:
        """Wait for output up to `wait_seconds`, then do all that is due."""
        self._receive(wait_seconds)
        now = self._clock()
        self._send_due(now)
        self._poll_cancelled(now)
        self._check_engine(now)
        if now - self._last_tick >= self._config.metrics_interval_seconds:
            self._last_tick = now
            self._tick()

    def _wait_seconds(self) -> float:
        now = self._clock()
        next_time = self._last_tick + self._config.metrics_interval_seconds
        if self._due:
            self._refill(now)
            next_time = min(next_time, max(self._due[0][0], now + (1 - self._budget) / self._rate))
        if self._live:
            spacing = max(self._poll_period() / len(self._live), _POLL_BATCH_SECONDS)
            next_time = min(next_time, self._last_poll + spacing)
        return max(0.0, next_time - now)

    def _receive(self, wait_seconds: float) -> None:
        """Wait for one output, then take what else is there, but not for ever: responses are due
        too."""
        try:
            output = (
                self._outputs.get(timeout=wait_seconds)
                if wait_seconds > 0
                else self._outputs.get_nowait()
            )
            self._last_output = self._clock()
            self._accept(output)
            for _ in range(_RECEIVE_LIMIT):
                self._accept(self._outputs.get_nowait())
        except queue.Empty:
            return

    def _accept(self, output: RequestOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        if output.finished:
            self._finish(output, live)
            return
        if live.early:
            live.early = False
            self._send(output.request_id, live, output)
            return
        live.parts.append(output)
        if not live.stream or live.queued or not output.text:
            return
        if live.last_sent == -math.inf:
            self._send_parts(output.request_id, live)
        else:
            live.queued = True
            due = live.last_sent + self._config.response_interval_ms / 1000
            heapq.heappush(self._due, (due, output.request_id))

    def _finish(self, output: RequestOutput, live: _Live) -> None:
        with self._lock:
            self._live.pop(output.request_id, None)
        self._budget -= 1
        if output.error is not None:
            self._fail(output.request_id, live.sink, output.error)
            return
        try:
            live.sink.send(merge_outputs([*live.parts, output]), final=True)
        except EngineError as error:
            logger.warning(
                "request %s: the last response was not delivered: %s", output.request_id, error
            )

    def _send_due(self, now: float) -> None:
        self._refill(now)
        while self._due and self._due[0][0] <= now and self._budget >= 1:
            _, request_id = heapq.heappop(self._due)
            live = self._live.get(request_id)
            if live is not None and live.queued:
                live.queued = False
                self._send_parts(request_id, live)

    def _send_parts(self, request_id: str, live: _Live) -> None:
        merged = merge_outputs(live.parts)
        live.parts = []
        live.last_sent = self._clock()
        self._send(request_id, live, merged)

    def _send(self, request_id: str, live: _Live, output: RequestOutput) -> None:
        self._budget -= 1
        try:
            live.sink.send(output, final=False)
        except EngineError as error:
            logger.warning("request %s: a response was not delivered: %s", request_id, error)
            self._abort(request_id, RequestError("cancelled", str(error)))

    def _refill(self, now: float) -> None:
        """First and final responses may overdraw the budget, but only by half a second of it."""
        gained = (now - self._budget_time) * self._rate
        self._budget_time = now
        lowest, highest = -self._rate * _DEBT_SECONDS, max(1.0, self._rate * _BURST_SECONDS)
        self._budget = min(max(self._budget, lowest) + gained, highest)

    def _poll_period(self) -> float:
        cost = len(self._live) * _POLL_COST_SECONDS
        return max(self._config.cancel_poll_ms / 1000, cost / _POLL_SHARE)

    def _poll_cancelled(self, now: float) -> None:
        """Ask in turn, spread over the period, so that no burst of round trips delays responses."""
        if not self._live:
            self._last_poll = now
            return
        elapsed = now - self._last_poll
        spacing = self._poll_period() / len(self._live)
        count = min(int(elapsed / spacing), len(self._live))
        if count < 1 or elapsed < _POLL_BATCH_SECONDS:
            return
        self._last_poll = max(self._last_poll + count * spacing, now - spacing)
        for _ in range(count):
            self._poll_next()

    def _poll_next(self) -> None:
        while self._poll_order:
            request_id = self._poll_order.popleft()
            live = self._live.get(request_id)
            if live is None:
                continue
            if live.sink.is_cancelled():
                self._abort(
                    request_id, RequestError("cancelled", "the client cancelled the request")
                )
            else:
                self._poll_order.append(request_id)
            return

    def _check_engine(self, now: float) -> None:
        """The engine fails its requests itself; this catches one that died before it could."""
        if not self._live or self._is_healthy():
            return
        if now - self._last_output >= _UNHEALTHY_GRACE_SECONDS:
            self._fail_all(EngineError("the engine stopped"))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            lost, self._live = self._live, {}
        for request_id, live in lost.items():
            logger.error("request %s failed: %s", request_id, error)
            self._fail(request_id, live.sink, error)

    def _fail(self, request_id: str, sink: Sink, error: Exception) -> None:
        try:
            sink.fail(error)
        except EngineError as failure:
            logger.warning("request %s: the error was not delivered: %s", request_id, failure)

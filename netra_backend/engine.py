"""Engine: requests in, streamed text out. Owns the step loop, its thread, and the promise of one
final output.

Knows neither the server nor tensors: it drives a Scheduler and a Runner. Whatever happens (abort,
deadline, exception, wedge, shutdown), every accepted request gets exactly one output with a
finish_reason: whoever removes the request from `_live` sends it.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from netra_backend.batch import Batch, StepOutput
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel
from netra_backend.errors import EngineError, RequestError
from netra_backend.live_request import LiveRequest
from netra_backend.metrics import Metrics
from netra_backend.request import FinishReason, Request, RequestOutput, SamplingParams
from netra_backend.residence import make_storage
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import Sequence
from netra_backend.spec.controller import DraftController
from netra_backend.tracing import Arguments, Tracer

if TYPE_CHECKING:
    from netra_backend.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0
"""How long a thread may take to notice that it should end; a step that takes longer is left
behind."""


_COLLECTIONS_PER_FULL_ONE = 1000


def make_full_collections_rare() -> None:
    """Tell Python's garbage collector, for the whole process, to seldom walk all objects.

    It would visit every token id of every live sequence: 60 to 120 ms for 256 of 40K tokens
    (measured), once in 70 steps in a small process. Young objects are collected as before.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _COLLECTIONS_PER_FULL_ONE)


class PendingStep(Protocol):
    """A step in flight."""

    def wait(self) -> StepOutput:
        """Block until the step is done."""
        ...


class Runner(Protocol):
    """Computes steps: ModelRunner on a device, SimRunner in virtual time."""

    def launch(self, batch: Batch) -> PendingStep:
        """Begin a step. Sequences are read, never changed."""
        ...


class Engine:
    """Any thread may call `add` and `abort`; one thread steps, `start`'s or the caller's.

    Outputs of a step are detokenised and delivered while the next step runs. `healthy` turns False
    for good after an EngineError or when the watchdog fires. Times are seconds on `clock`.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        new_detokenizer: Callable[[SamplingParams], Detokenizer],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.max_model_len = scheduler.limits.max_model_len
        self.outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.healthy = True
        self._runner = runner
        self._scheduler = scheduler
        self._new_detokenizer = new_detokenizer
        self._clock = clock
        self._tracer = Tracer(config.trace_file)
        self._changed = threading.Condition()  # guards the five below
        self._live: dict[str, LiveRequest] = {}
        self._inbox: list[LiveRequest] = []
        self._num_inbox_tokens = 0
        self._aborts: list[tuple[LiveRequest, RequestError]] = []
        self._accepting = True
        self._undelivered: list[Sequence] = []
        self._stopped_ids: list[str] = []
        self._last_progress = time.monotonic()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @classmethod
    def build(cls, config: EngineConfig, model_directory: Path) -> Engine:
        """Load the checkpoint that `config` names. Raises ConfigError if it cannot be served."""
        checkpoint = config.checkpoint_path(model_directory)  # before torch takes its seconds

        from netra_backend.runners import make_runner
        from netra_backend.tokenizer import Detokenizer, Tokenizer

        tokenizer = Tokenizer(checkpoint)
        config = config.with_drafter_path(model_directory)
        # A thread that has used OpenMP keeps workers, and with more of them than cores none may spin: those
        # of loading end here, and the thread that steps will have the only ones.
        with ThreadPoolExecutor(1) as loader:
            eos = tokenizer.eos_token_ids
            runner = loader.submit(make_runner, config, checkpoint, eos).result()
        plan = runner.plan
        logger.info("%s", plan.describe())
        metrics = Metrics(plan.max_model_len)
        cost_model = CostModel.of(runner.model_config, runner.drafts_in_blocks)
        drafts = DraftController.of(
            config, runner.max_draft_tokens, cost_model, metrics, runner.has_draft_cache
        )
        blocks, prefixes, host = make_storage(config, runner.model_config, plan, checkpoint.name)
        scheduler = Scheduler(
            config,
            blocks,
            cost_model,
            eos_token_ids=tokenizer.eos_token_ids,
            max_model_len=plan.max_model_len,
            vocab_size=runner.model_config.vocab_size,
            clock=time.monotonic,
            metrics=metrics,
            drafts=drafts,
            prefixes=prefixes,
            host=host,
        )

        def new_detokenizer(params: SamplingParams) -> Detokenizer:
            return Detokenizer(
                tokenizer,
                params.stop,
                params.skip_special_tokens,
                params.include_stop_str_in_output,
            )

        return cls(config, runner, scheduler, tokenizer, new_detokenizer, metrics)

    # ---- any thread

    def start(self) -> None:
        """Start the engine thread and its watchdog."""
        make_full_collections_rare()
        for target in (self._run, self._watch):
            thread = threading.Thread(target=target, name=f"netra{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def add(self, request: Request) -> None:
        """Accept a request: its outputs will appear in `outputs`.

        Raises RequestError (`queue_full`, `shutting_down`, `prompt_too_long`, `invalid_request`) at
        once, and EngineError once the engine has failed. The queue is full when
        `max_queued_requests` wait beyond what free slots will take, or when waiting prompts would
        exceed `max_queued_tokens`.
        """
        self._scheduler.limits.validate(request)
        live = LiveRequest(request, self._new_detokenizer(request.params))
        with self._changed:
            if not self.healthy:
                raise EngineError("the engine has failed and accepts no requests")
            if not self._accepting:
                raise RequestError("shutting_down", "the engine is shutting down")
            if request.request_id in self._live:
                raise RequestError(
                    "invalid_request", f"request id {request.request_id!r} is in use"
                )
            self._check_queue(len(request.prompt_token_ids))
            if not self._live:
                self._last_progress = time.monotonic()
            self._live[request.request_id] = live
            self._inbox.append(live)
            self._num_inbox_tokens += len(request.prompt_token_ids)
            self._changed.notify_all()

    def _check_queue(self, num_tokens: int) -> None:
        scheduler, config = self._scheduler, self.config
        waiting = scheduler.num_waiting + len(self._inbox)
        tokens = scheduler.num_waiting_tokens + self._num_inbox_tokens
        free_slots = scheduler.max_num_seqs - scheduler.num_running
        if 0 < config.max_queued_requests <= waiting - free_slots:
            raise RequestError(
                "queue_full",
                f"{waiting} requests are waiting (max_queued_requests {config.max_queued_requests})",
            )
        if tokens and 0 < config.max_queued_tokens < tokens + num_tokens:
            raise RequestError(
                "queue_full",
                f"{tokens} prompt tokens are waiting and this request has {num_tokens} "
                f"(max_queued_tokens {config.max_queued_tokens})",
            )

    def abort(self, request_id: str, error: RequestError) -> None:
        """Cancel a request; it is freed before the next step. Unknown or finished ids are
        ignored."""
        with self._changed:
            live = self._live.get(request_id)
            if live is not None:
                self._aborts.append((live, error))
                self._changed.notify_all()

    def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, let live ones finish for up to `drain_seconds`, fail the rest, end
        the threads."""
        deadline = time.monotonic() + drain_seconds
        with self._changed:
            self._accepting = False
            if self._threads:
                self._changed.wait_for(lambda: not self._live, timeout=drain_seconds)
        while not self._threads and self._live and time.monotonic() < deadline:
            self.step()
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        if self.healthy and not any(thread.is_alive() for thread in self._threads):
            for request_id in list(self._live):
                self._scheduler.abort(request_id)
        error = RequestError("shutting_down", "the engine shut down before this request was done")
        self._fail_all(FinishReason.ABORT, error)
        self._tracer.write()

    # ---- the engine thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.step():
                    self._wait_for_work()
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(error)

    def _wait_for_work(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._aborts or self._stop.is_set())

    def step(self) -> bool:
        """Run one step; False if nothing was live, and then every output has been delivered."""
        self._take_inbox()
        self._take_aborts()
        for seq in self._scheduler.expire():
            error = RequestError("timeout", "the request's time is over")
            self._end(seq.request.request_id, FinishReason.ABORT, error)
        started = self._clock()
        batch = self._scheduler.schedule()
        if batch is None:
            self._deliver()
            return False
        launched = self._clock()
        pending = self._runner.launch(batch)
        self._deliver()
        output = pending.wait()
        computed = self._clock()
        self._undelivered = self._scheduler.update(batch, output)
        self._last_progress = time.monotonic()
        while self._stopped_ids:
            self._scheduler.finish(self._stopped_ids.pop(), FinishReason.STOP)
        if self._tracer.enabled:
            rows: Arguments = {"sequences": len(batch.scheduled), "rows": batch.num_tokens}
            self._tracer.step(started, launched, computed, self._clock(), rows)
        return True

    def _take_inbox(self) -> None:
        with self._changed:
            for live in self._inbox:
                if live.request.request_id in self._live:
                    live.seq = self._scheduler.add(live.request)
            self._inbox.clear()
            self._num_inbox_tokens = 0

    def _take_aborts(self) -> None:
        if not self._aborts:
            return
        with self._changed:
            aborts, self._aborts = self._aborts, []
        for live, error in aborts:
            request_id = live.request.request_id
            if self._live.get(request_id) is live:
                self._scheduler.abort(request_id)
                self._end(request_id, FinishReason.ABORT, error)

    def _deliver(self) -> None:
        """Turn the previous step's tokens into outputs."""
        sequences, self._undelivered = self._undelivered, []
        for seq in sequences:
            live = self._live.get(seq.request.request_id)
            if live is not None and live.seq is seq:
                self._deliver_one(live, seq)

    def _deliver_one(self, live: LiveRequest, seq: Sequence) -> None:
        output = live.next_output(seq)
        if output.finished and seq.finish_reason is None:
            self._stopped_ids.append(output.request_id)
        self._send(output)

    # ---- endings

    def _send(self, output: RequestOutput) -> None:
        """Hand over an output; nothing follows a request's final one."""
        with self._changed:
            live = self._live.get(output.request_id)
            if live is None:
                return
            self.outputs.put(output)
            if not output.finished:
                return
            del self._live[output.request_id]
            self._changed.notify_all()
        if self._tracer.enabled and live.seq is not None:
            self._trace_request(live.seq, output)

    def _end(self, request_id: str, reason: FinishReason, error: Exception) -> None:
        """End a request that did not end by itself."""
        live = self._live.get(request_id)
        if live is not None:
            self._send(live.ended(reason, error))

    def _fail_all(self, reason: FinishReason, error: Exception) -> None:
        with self._changed:
            request_ids = list(self._live)
        for request_id in request_ids:
            self._end(request_id, reason, error)

    def _fail(self, cause: Exception) -> None:
        """Turn unhealthy: every live request ends with an EngineError, later ones are refused."""
        error = (
            cause
            if isinstance(cause, EngineError)
            else EngineError(f"the engine failed: {cause!r}")
        )
        with self._changed:
            self.healthy = False
        self._stop.set()
        self._fail_all(FinishReason.ERROR, error)

    def _watch(self) -> None:
        limit = self.config.watchdog_seconds
        while not self._stop.wait(min(1.0, limit / 4)):
            stalled = time.monotonic() - self._last_progress
            if self._live and stalled > limit:
                logger.critical(
                    "no progress for %.1f s with %d live requests", stalled, len(self._live)
                )
                self._fail(EngineError(f"no progress for {stalled:.0f} s with live requests"))

    def _trace_request(self, seq: Sequence, output: RequestOutput) -> None:
        reason = output.finish_reason
        arguments: Arguments = {
            "request_id": output.request_id,
            "prompt_tokens": seq.num_prompt_tokens,
            "output_tokens": output.num_output_tokens,
            "preemptions": seq.num_preemptions,
            "finish_reason": reason.value if reason else "",
        }
        arrival, scheduled, first = (
            seq.request.arrival_time,
            seq.scheduled_time,
            seq.first_token_time,
        )
        self._tracer.request(seq.seq_id, arrival, scheduled, first, self._clock(), arguments)

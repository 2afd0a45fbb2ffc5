"""responder: when responses go out, and that every request gets exactly one final one."""

import queue
import threading
import time

import pytest

from netra_backend.config import EngineConfig
from netra_backend.errors import EngineError, RequestError
from netra_backend.request import FinishReason, RequestOutput
from netra_backend.responder import Responder


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class RecordingSink:
    """Keeps what it was sent; `cancelled` and `refuses` play the client and the server."""

    def __init__(self):
        self.sent = []
        self.errors = []
        self.finals = 0
        self.polls = 0
        self.cancelled = False
        self.refuses = False
        self.breaks = False

    def send(self, output, *, final):
        if self.breaks:
            raise ZeroDivisionError("a fault of ours")
        if self.refuses:
            raise EngineError("closed")
        self.sent.append(output.text)
        self.finals += final

    def fail(self, error):
        self.errors.append(error)
        self.finals += 1

    def is_cancelled(self):
        self.polls += 1
        return self.cancelled

    @property
    def text(self):
        return "".join(self.sent)


class Bench:
    """A responder without its thread: time moves only when the test says so."""

    def __init__(self, **knobs):
        self.clock = Clock()
        self.outputs = queue.SimpleQueue()
        self.aborted = []
        self.healthy = True
        self.ticks = 0
        knobs = {"response_interval_ms": 20.0, "max_responses_per_second": 1000.0} | knobs
        self.responder = Responder(
            EngineConfig(**knobs),
            self.outputs,
            abort=lambda request_id, error: self.aborted.append((request_id, error.code)),
            is_healthy=lambda: self.healthy,
            tick=self.tick,
            clock=self.clock,
        )

    def tick(self):
        self.ticks += 1

    def register(self, name="r", stream=True):
        sink = RecordingSink()
        self.responder.register(name, sink, stream=stream)
        return sink

    def put(self, text="", name="r", **fields):
        self.outputs.put(RequestOutput(name, text=text, **fields))

    def finish(self, text="", name="r", reason=FinishReason.STOP, **fields):
        self.put(text, name, finish_reason=reason, **fields)

    def run(self, seconds=0.0):
        self.clock.now += seconds
        self.responder.run_once(0.0)


def test_the_first_text_goes_out_at_once_and_later_text_waits_for_its_interval():
    bench = Bench()
    sink = bench.register()
    bench.put("a")
    bench.run()
    bench.put("b")
    bench.put("c")
    bench.run(0.01)
    assert sink.sent == ["a"]
    bench.run(0.01)
    assert sink.sent == ["a", "bc"]
    bench.put("d")
    bench.run(0.05)
    assert sink.sent == ["a", "bc", "d"]


def test_the_final_response_carries_what_is_left():
    bench = Bench()
    sink = bench.register()
    bench.put("a")
    bench.run()
    bench.put("b")
    bench.finish("c")
    bench.run()
    assert sink.sent == ["a", "bc"]
    assert sink.finals == 1
    assert bench.responder.num_live == 0


def test_without_streaming_there_is_exactly_one_response():
    bench = Bench()
    sink = bench.register(stream=False)
    for text in "abc":
        bench.put(text)
        bench.run(1.0)
    assert sink.sent == []
    bench.finish("d")
    bench.run()
    assert sink.sent == ["abcd"]
    assert sink.finals == 1


def test_tokens_without_text_send_nothing_until_there_is_text():
    bench = Bench()
    sink = bench.register()
    bench.put("", token_ids=(1,))
    bench.run(1.0)
    assert sink.sent == []
    bench.put("é", token_ids=(2,))
    bench.run()
    assert sink.sent == ["é"]


def test_all_requests_together_stay_under_the_budget_and_lose_no_text():
    bench = Bench(max_responses_per_second=100.0)
    sinks = [bench.register(f"r{i}") for i in range(50)]
    for i in range(50):
        bench.put("x", f"r{i}")
    bench.run()
    assert sum(len(sink.sent) for sink in sinks) == 50
    for _ in range(200):
        for i in range(50):
            bench.put("x", f"r{i}")
        bench.run(0.01)
    assert sum(len(sink.sent) for sink in sinks) <= 50 + 200
    for i in range(50):
        bench.finish("", f"r{i}")
    bench.run()
    assert [sink.text for sink in sinks] == ["x" * 201] * 50
    assert [sink.finals for sink in sinks] == [1] * 50


def test_the_budget_is_shared_fairly():
    bench = Bench(max_responses_per_second=100.0)
    sinks = [bench.register(f"r{i}") for i in range(10)]
    for _ in range(500):
        for i in range(10):
            bench.put("x", f"r{i}")
        bench.run(0.01)
    counts = [len(sink.sent) for sink in sinks]
    assert max(counts) - min(counts) <= 2
    assert min(counts) > 20


def test_an_early_response_is_empty_and_does_not_delay_the_first_text():
    bench = Bench(early_response=True)
    sink, single = bench.register(), bench.register("s", stream=False)
    bench.run()
    assert (sink.sent, single.sent) == ([""], [])
    bench.put("a")
    bench.run()
    assert sink.sent == ["", "a"]


def test_errors_are_final():
    bench = Bench()
    sink = bench.register()
    error = RequestError("timeout", "too slow")
    bench.finish(reason=FinishReason.ABORT, error=error)
    bench.run()
    assert (sink.errors, sink.finals, sink.sent) == ([error], 1, [])


@pytest.mark.parametrize("registered", [True, False])
def test_a_refused_request_is_answered_once(registered):
    bench = Bench()
    sink = bench.register() if registered else RecordingSink()
    error = RequestError("queue_full", "later")
    bench.responder.refuse("r", sink, error)
    bench.finish("late")
    bench.run()
    assert (sink.errors, sink.finals) == ([error], 1)


def test_outputs_of_unknown_requests_are_ignored():
    bench = Bench()
    bench.put("a", "ghost")
    bench.finish("a", "ghost")
    bench.run()
    assert bench.responder.num_live == 0


def test_a_cancelled_request_is_aborted_once_and_still_gets_its_final():
    bench = Bench(cancel_poll_ms=100.0)
    sink, other = bench.register(), bench.register("other")
    sink.cancelled = True
    for _ in range(50):
        bench.run(0.01)
    assert bench.aborted == [("r", "cancelled")]
    assert sink.polls == 1
    assert other.polls >= 4
    bench.finish(reason=FinishReason.ABORT, error=RequestError("cancelled", "gone"))
    bench.run()
    assert sink.finals == 1


def test_polling_takes_a_bounded_share_of_the_thread_however_many_are_live():
    bench = Bench(cancel_poll_ms=10.0)
    sinks = [bench.register(f"r{i}") for i in range(1000)]
    for _ in range(100):
        bench.run(0.01)
    assert sum(sink.polls for sink in sinks) * 55e-6 <= 0.11
    assert min(sink.polls for sink in sinks) >= 1


def test_each_live_request_is_polled_about_once_a_period():
    bench = Bench(cancel_poll_ms=100.0)
    sinks = [bench.register(f"r{i}") for i in range(8)]
    for _ in range(100):
        bench.run(0.01)
    assert all(7 <= sink.polls <= 11 for sink in sinks)


def test_a_refused_response_aborts_that_request_only():
    bench = Bench()
    sink, other = bench.register(), bench.register("other")
    sink.refuses = True
    bench.put("a")
    bench.put("a", "other")
    bench.run()
    assert bench.aborted == [("r", "cancelled")]
    assert other.sent == ["a"]


def test_requests_of_a_dead_engine_are_failed_after_a_grace_time():
    bench = Bench()
    sink = bench.register()
    bench.healthy = False
    bench.run(0.5)
    assert sink.finals == 0
    bench.run(0.6)
    assert sink.finals == 1
    assert isinstance(sink.errors[0], EngineError)


def test_ticks_come_at_their_interval():
    bench = Bench(metrics_interval_seconds=0.5)
    for _ in range(200):
        bench.run(0.05)
    assert 17 <= bench.ticks <= 20


def threaded(**knobs):
    bench = Bench(**knobs)
    bench.responder._clock = time.monotonic
    bench.responder.start()
    return bench


def test_the_thread_delivers_and_joins():
    bench = threaded()
    sink = bench.register()
    bench.put("a")
    bench.finish("b")
    bench.responder.close(10.0)
    assert (sink.text, sink.finals) == ("ab", 1)


def test_closing_fails_what_does_not_finish():
    bench = threaded()
    sink = bench.register()
    bench.responder.close(0.05)
    assert sink.finals == 1
    assert sink.errors[0].code == "shutting_down"


def test_everyone_gets_a_final_when_the_thread_dies_and_nobody_can_join_later():
    bench = threaded()
    sinks = [bench.register(f"r{i}") for i in range(3)]
    sinks[1].breaks = True
    bench.put("a", "r1")
    bench.responder._thread.join(10.0)
    assert [sink.finals for sink in sinks] == [1, 1, 1]
    with pytest.raises(EngineError):
        bench.register("late")
    late = RecordingSink()
    bench.responder.refuse("late", late, EngineError("no thread"))
    assert late.finals == 1


def test_many_threads_may_register():
    bench = threaded(max_responses_per_second=1e9, response_interval_ms=0.0)
    sinks = {}

    def client(index):
        for number in range(50):
            name = f"{index}-{number}"
            sinks[name] = bench.register(name)
            bench.put("a", name)
            bench.finish("b", name)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.responder.close(10.0)
    assert {(sink.text, sink.finals) for sink in sinks.values()} == {("ab", 1)}

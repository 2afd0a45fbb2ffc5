"""Engine: text out, and exactly one final output per request, whatever happens."""

from __future__ import annotations

import gc
import queue
import random
import threading
from collections.abc import Callable

import pytest
from simulated import Faulty, Simulated, simulate

from netra_backend.config import EngineConfig
from netra_backend.errors import EngineError, RequestError
from netra_backend.request import FinishReason, RequestOutput

PATIENCE = 60.0
"""Seconds that a test waits for a thread before it fails."""


def broken() -> None:
    raise RuntimeError("the device fell off")


def faulty(
    at: int,
    fault: Callable[[], None],
    config: EngineConfig | None = None,
    in_launch: bool = False,
) -> Simulated:
    return simulate(config, wrap=lambda runner: Faulty(runner, at, fault, in_launch))


def finals(simulated: Simulated, count: int) -> dict[str, RequestOutput]:
    """Wait for `count` final outputs from the engine's thread."""
    found: dict[str, RequestOutput] = {}
    while len(found) < count:
        output = simulated.engine.outputs.get(timeout=PATIENCE)
        assert output.request_id not in found
        if output.finished:
            found[output.request_id] = output
    return found


def no_more_outputs(simulated: Simulated) -> bool:
    try:
        simulated.engine.outputs.get_nowait()
    except queue.Empty:
        return True
    return False


# ---- delivery


def test_tokens_are_delivered_while_the_next_step_runs() -> None:
    simulated = simulate()
    simulated.add("r", 10, max_tokens=3)
    assert simulated.step()
    assert not simulated.outputs
    assert simulated.step()
    first = simulated.outputs["r"][0]
    assert (len(first.token_ids), first.num_output_tokens, first.num_prompt_tokens) == (1, 1, 10)
    assert simulated.step()
    assert not simulated.step()  # nothing is live: what was left has been delivered
    assert simulated.final("r").finish_reason is FinishReason.LENGTH
    assert simulated.text("r") == "".join(f"<{token}>" for token in simulated.tokens("r"))
    assert not simulated.step()


def test_delivery_precedes_the_end_of_the_next_step() -> None:
    seen: list[int] = []
    simulated = faulty(2, lambda: seen.append(simulated.engine.outputs.qsize()))
    simulated.add("r", 10, max_tokens=3)
    simulated.step()
    simulated.step()
    assert seen == [1]


def test_seeded_answers_do_not_depend_on_their_company() -> None:
    alone, crowded = simulate(), simulate(EngineConfig(max_num_seqs=4), num_pages=64)
    alone.add("r", 100, max_tokens=50, seed=5)
    alone.run()
    for number in range(10):
        crowded.add(f"other{number}", 50 * number + 1, max_tokens=300)
    crowded.add("r", 100, max_tokens=50, seed=5)
    crowded.run()
    assert crowded.tokens("r") == alone.tokens("r")


# ---- aborts and deadlines


def test_abort_frees_before_the_next_step_in_every_state() -> None:
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=128)
    simulated = simulate(config)
    simulated.add("decoding", 10, max_tokens=100)
    simulated.add("prompt", 1000)
    simulated.step()
    simulated.step()
    simulated.add("waiting", 4000)
    simulated.add("waiting too", 4000)
    simulated.step()
    simulated.add("inbox", 10)
    for request_id in ("decoding", "prompt", "waiting", "waiting too", "inbox"):
        simulated.engine.abort(request_id, RequestError("cancelled", "the client left"))
    assert not simulated.step()
    simulated.assert_nothing_held()
    for request_id in ("decoding", "prompt", "waiting", "waiting too", "inbox"):
        final = simulated.final(request_id)
        assert final.finish_reason is FinishReason.ABORT
        assert isinstance(final.error, RequestError)
        assert final.error.code == "cancelled"
    assert simulated.final("decoding").num_output_tokens == len(simulated.tokens("decoding")) > 0


@pytest.mark.parametrize("host", [None, (8, 2)])
def test_abort_of_a_preempted_request(host: tuple[int, int] | None) -> None:
    simulated = simulate(EngineConfig(max_num_seqs=4), num_pages=8, host=host)
    simulated.scheduler._forecast.fits = lambda seq, running: True  # type: ignore[method-assign]
    for number in range(3):
        simulated.add(f"r{number}", 130, max_tokens=300, ignore_eos=True)
    while simulated.engine.metrics.preemptions.value == 0:
        simulated.step()
    assert bool(simulated.host and simulated.host.num_used_pages) == bool(host)
    simulated.engine.abort("r2", RequestError("cancelled", ""))
    simulated.run()
    simulated.assert_nothing_held()
    assert simulated.final("r2").finish_reason is FinishReason.ABORT
    assert simulated.final("r1").num_output_tokens == 300


def test_abort_after_the_end_and_of_strangers_is_ignored() -> None:
    simulated = simulate()
    simulated.add("r", 10, max_tokens=2)
    simulated.run()
    for request_id in ("r", "stranger"):
        simulated.engine.abort(request_id, RequestError("cancelled", ""))
    assert not simulated.step()
    assert simulated.final("r").finish_reason is FinishReason.LENGTH
    simulated.add(
        "r", 10, max_tokens=2
    )  # the id may be used again, and the old abort does not hit it
    simulated.outputs.clear()
    simulated.run()
    assert simulated.final("r").finish_reason is FinishReason.LENGTH


def test_late_abort_does_not_hit_the_next_request_of_that_id() -> None:
    """The abort arrives while the last output is about to be sent; then the id is used again."""

    def late_abort() -> None:
        simulated.engine.abort("r", RequestError("cancelled", "too late"))

    simulated = faulty(3, late_abort, in_launch=True)
    simulated.add("other", 10, max_tokens=20)
    simulated.add("r", 10, max_tokens=2)
    while "r" not in simulated.outputs or not simulated.outputs["r"][-1].finished:
        simulated.step()
    assert simulated.outputs.pop("r")[-1].error is None
    simulated.add("r", 10, max_tokens=2)
    simulated.run()
    assert simulated.final("r").error is None


def test_deadline_cancels() -> None:
    simulated = simulate()
    simulated.add("late", 10, max_tokens=4000, deadline=1.0)
    simulated.add("in time", 10, max_tokens=20, deadline=1.0)
    simulated.run()
    final = simulated.final("late")
    assert final.finish_reason is FinishReason.ABORT
    assert isinstance(final.error, RequestError)
    assert final.error.code == "timeout"
    assert 1.0 <= simulated.clock() < 1.1
    assert simulated.final("in time").error is None
    simulated.assert_nothing_held()


# ---- refusals


def test_full_queue_refuses_at_once() -> None:
    simulated = simulate(EngineConfig(max_num_seqs=2, max_queued_requests=3))
    for number in range(5):  # two will find a slot, three may wait
        simulated.add(f"r{number}", 10, max_tokens=5)
    with pytest.raises(RequestError, match="5 requests are waiting") as refusal:
        simulated.add("sixth", 10)
    assert refusal.value.code == "queue_full"
    simulated.step()
    with pytest.raises(RequestError, match="3 requests are waiting"):
        simulated.add("sixth", 10)
    while simulated.scheduler.num_waiting == 3:
        simulated.step()
    simulated.add("sixth", 10, max_tokens=5)
    simulated.run()
    assert len(simulated.outputs) == 6


def test_too_many_queued_tokens_refuse_at_once() -> None:
    simulated = simulate(EngineConfig(max_queued_tokens=1000))
    simulated.add("larger than the limit, but first", 2000, max_tokens=2)
    with pytest.raises(
        RequestError, match="2000 prompt tokens are waiting and this request has 10"
    ):
        simulated.add("second", 10)
    simulated.run()
    simulated.add("second", 990, max_tokens=2)
    simulated.add("third", 10, max_tokens=2)
    simulated.run()
    assert simulated.final("third").finish_reason is FinishReason.LENGTH


def test_refused_requests_leave_nothing() -> None:
    simulated = simulate(max_model_len=100)
    with pytest.raises(RequestError, match="prompt has 100 tokens"):
        simulated.add("r", 100)
    simulated.add("r", 99, max_tokens=5)
    with pytest.raises(RequestError, match="'r' is in use"):
        simulated.add("r", 10)
    simulated.run()
    assert simulated.final("r").num_output_tokens == 1


# ---- failures


def test_exception_fails_live_requests_once_and_refuses_later_ones() -> None:
    simulated = faulty(3, broken)
    simulated.engine.start()
    for number in range(5):
        simulated.add(f"r{number}", 100, max_tokens=50)
    found = finals(simulated, 5)
    for output in found.values():
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, EngineError)
        assert "the device fell off" in str(output.error)
    assert not simulated.engine.healthy
    with pytest.raises(EngineError, match="accepts no requests"):
        simulated.add("later", 10)
    simulated.engine.shutdown(0.0)
    assert no_more_outputs(simulated)


def test_exception_in_delivery_fails_live_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = simulate()
    monkeypatch.setattr(simulated.engine, "_deliver_one", lambda live, seq: broken())
    simulated.engine.start()
    simulated.add("r", 100, max_tokens=50)
    assert finals(simulated, 1)["r"].finish_reason is FinishReason.ERROR
    simulated.engine.shutdown(0.0)


@pytest.mark.parametrize("in_launch", [False, True])
def test_watchdog_fails_a_wedged_engine(in_launch: bool) -> None:
    """A step that never ends; when it ends after all, nothing more comes out."""
    released = threading.Event()

    def wedge() -> None:
        assert released.wait(PATIENCE)

    config = EngineConfig(max_num_seqs=8, watchdog_seconds=0.2)
    simulated = faulty(3, wedge, config, in_launch)
    simulated.engine.start()
    for number in range(3):
        simulated.add(f"r{number}", 100, max_tokens=50)
    for output in finals(simulated, 3).values():
        assert output.finish_reason is FinishReason.ERROR
        assert "no progress" in str(output.error)
    assert not simulated.engine.healthy
    with pytest.raises(EngineError):
        simulated.add("later", 10)
    released.set()
    simulated.engine.shutdown(0.0)
    assert no_more_outputs(simulated)


def test_watchdog_counts_from_the_first_request_after_idle_time() -> None:
    """Idle for longer than the limit, then a step of two of the watchdog's looks: no alarm."""

    def pause() -> None:
        threading.Event().wait(2.5)

    simulated = faulty(1, pause, EngineConfig(max_num_seqs=8, watchdog_seconds=30.0))
    simulated.engine.start()
    simulated.engine._last_progress -= 1000.0
    simulated.add("r", 100, max_tokens=3)
    assert finals(simulated, 1)["r"].finish_reason is FinishReason.LENGTH
    assert simulated.engine.healthy
    simulated.engine._last_progress -= 1000.0
    pause()
    assert simulated.engine.healthy  # nothing is live
    simulated.engine.shutdown(0.0)


def test_full_collections_are_rare_once_started() -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        simulated = simulate()
        assert gc.get_threshold() == (700, 10, 10)
        simulated.engine.start()
        assert gc.get_threshold() == (700, 10, 1000)
        simulated.engine.shutdown(0.0)
    finally:
        gc.set_threshold(*thresholds)


# ---- shutdown


@pytest.mark.parametrize("threaded", [False, True])
def test_shutdown_drains(threaded: bool) -> None:
    simulated = simulate()
    if threaded:
        simulated.engine.start()
    for number in range(20):
        simulated.add(f"r{number}", 100, max_tokens=50)
    simulated.engine.shutdown(PATIENCE)
    simulated.collect()
    assert all(simulated.final(f"r{n}").finish_reason is FinishReason.LENGTH for n in range(20))
    with pytest.raises(RequestError, match="shutting down") as refusal:
        simulated.add("later", 10)
    assert refusal.value.code == "shutting_down"
    simulated.assert_nothing_held()
    simulated.engine.shutdown(0.0)


@pytest.mark.parametrize("threaded", [False, True])
def test_shutdown_without_time_fails_what_is_live(threaded: bool) -> None:
    entered, released = threading.Event(), threading.Event()

    def pause() -> None:
        entered.set()
        assert released.wait(PATIENCE)

    simulated = faulty(5, pause if threaded else lambda: None)
    for number in range(12):
        simulated.add(f"r{number}", 100, max_tokens=1000, ignore_eos=True)
    if threaded:
        simulated.engine.start()
        assert entered.wait(PATIENCE)
        threading.Timer(0.1, released.set).start()
    else:
        simulated.step()
    simulated.engine.shutdown(0.0)
    simulated.collect()
    for number in range(12):
        final = simulated.final(f"r{number}")
        assert final.finish_reason is FinishReason.ABORT
        assert isinstance(final.error, RequestError)
        assert final.error.code == "shutting_down"
    simulated.assert_nothing_held()


def test_many_threads_get_one_final_each() -> None:
    """Clients add and abort at any time while the engine runs: one final each, nothing leaks."""
    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=128)
    simulated = simulate(config, num_pages=40, max_model_len=1000)
    simulated.engine.start()
    num_clients, num_each = 6, 20

    def client(number: int) -> None:
        rng = random.Random(number)
        for index in range(num_each):
            request_id = f"{number}.{index}"
            simulated.add(request_id, rng.randint(1, 400), max_tokens=rng.randint(1, 60))
            if rng.random() < 0.5:
                threading.Event().wait(rng.random() * 0.01)
                simulated.engine.abort(request_id, RequestError("cancelled", ""))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    found = finals(simulated, num_clients * num_each)
    for thread in threads:
        thread.join()
    simulated.engine.shutdown(PATIENCE)
    assert no_more_outputs(simulated)
    assert {output.finish_reason for output in found.values()} <= {
        FinishReason.LENGTH,
        FinishReason.ABORT,
    }
    simulated.assert_nothing_held()

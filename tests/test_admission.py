"""Admission: who waits for whom, and whose memory will suffice."""

from __future__ import annotations

import random

import pytest
from scheduling import sequence
from simulated import simulate

from netra_backend.admission import MemoryForecast, WaitingQueue, peak_tokens
from netra_backend.config import EngineConfig


def test_peak_is_that_of_the_worst_moment() -> None:
    assert peak_tokens([]) == 0
    assert peak_tokens([(5, 100)]) == 105
    # When the short one ends, both have grown by 10; later the long one reaches 150 alone.
    assert peak_tokens([(10, 100), (50, 100)]) == 220
    assert peak_tokens([(1, 10), (200, 10)]) == 210


@pytest.mark.parametrize("seed", range(5))
def test_peak_equals_a_step_by_step_count(seed: int) -> None:
    rng = random.Random(seed)
    loads = [(rng.randint(1, 60), rng.randint(1, 500)) for _ in range(rng.randint(1, 20))]
    by_steps = max(
        sum(tokens + step for remaining, tokens in loads if remaining >= step) for step in range(61)
    )
    assert peak_tokens(loads) == by_steps


def test_forced_lengths_reserve_in_full_and_are_never_preempted() -> None:
    simulated = simulate(EngineConfig(max_num_seqs=8), num_pages=20)
    for number in range(40):
        simulated.add(
            f"short{number}", 10, max_tokens=500, min_tokens=3, stop_token_ids=tuple(range(900))
        )
    simulated.run()
    for number in range(12):
        simulated.add(f"r{number}", 100, max_tokens=400 + number, ignore_eos=True)
    most = 0
    while simulated.step():
        most = max(most, simulated.scheduler.num_running)
    assert most == 2  # 20 pages hold two answers of 500 tokens
    assert simulated.engine.metrics.preemptions.value == 0


def test_refused_request_starts_as_soon_as_memory_suffices() -> None:
    """Three do not fit; when the second ends, the third starts beside the first."""
    simulated = simulate(EngineConfig(max_num_seqs=8), num_pages=20)
    for name, length in (("first", 700), ("second", 400), ("third", 700)):
        simulated.add(name, 100, max_tokens=length, ignore_eos=True)
    while "third" not in simulated.outputs:
        simulated.step()
    assert simulated.final("second").num_output_tokens == 400
    assert not simulated.outputs["first"][-1].finished
    simulated.run()
    assert simulated.engine.metrics.preemptions.value == 0


def test_history_of_short_answers_admits_more() -> None:
    """Answers may have 500 tokens but have 3: after some of them, more run at the same time."""
    simulated = simulate(EngineConfig(max_num_seqs=8), num_pages=20)
    ends = tuple(range(1000))

    def most_running(prefix: str) -> int:
        for number in range(16):
            simulated.add(
                f"{prefix}{number}", 100, max_tokens=500, min_tokens=2, stop_token_ids=ends
            )
        most = 0
        while simulated.step():
            most = max(most, simulated.scheduler.num_running)
        return most

    assert most_running("first") <= 3
    assert most_running("second") == 8


def test_expectation_grows_with_what_was_produced() -> None:
    forecast = MemoryForecast(10_000)
    seq = sequence(10, max_tokens=1000)
    assert forecast.expected(seq, seq.num_output_tokens) == 1000  # nothing known: the limit
    for length in range(1, 101):
        done = sequence(10, max_tokens=1000, seq_id=length)
        done.token_ids += [9] * length
        forecast.record(done)
    forecast.forget(seq)
    assert forecast.expected(seq, seq.num_output_tokens) == pytest.approx(70, abs=2)
    seq.token_ids += [9] * 80
    assert 80 < forecast.expected(seq, seq.num_output_tokens) <= 100
    seq.token_ids += [9] * 100
    assert 180 < forecast.expected(seq, seq.num_output_tokens) <= 1000


def test_waiting_queue_removes_anywhere() -> None:
    waiting = WaitingQueue()
    sequences = [sequence(10 + i, seq_id=i) for i in range(5)]
    for seq in sequences:
        waiting.add(seq, key=float(seq.seq_id % 2))
    assert [seq.seq_id for seq in waiting] == [0, 2, 4, 1, 3]
    waiting.remove(sequences[4])
    waiting.remove(sequences[0])
    assert [seq.seq_id for seq in waiting] == [2, 1, 3]
    assert waiting.num_tokens == 12 + 11 + 13
    assert next(waiting.candidates()).seq_id == 2


def test_candidates_pass_a_refused_one_up_to_half_its_size() -> None:
    waiting = WaitingQueue()
    for seq_id, length in enumerate((1000, 200, 400, 100, 200, 10)):
        waiting.add(sequence(length, seq_id=seq_id, max_tokens=1), key=float(seq_id))
    passed = []
    for seq in waiting.candidates():
        if seq.seq_id:
            waiting.remove(seq)
            passed.append(seq.seq_id)
    assert passed == [
        1,
        3,
        5,
    ]  # 200 + 100 + 10 tokens; another 200 would be more than half of 1,000
    assert [seq.seq_id for seq in waiting.candidates()] == [0]
    waiting.remove(next(waiting.candidates()))
    assert [seq.seq_id for seq in waiting.candidates()] == [2]

"""Scheduler: what a step computes, in which order requests are served, and where answers end."""

from __future__ import annotations

import random

import pytest
from simulated import Simulated, simulate

from netra_backend.admission import MemoryForecast, WaitingQueue, peak_tokens
from netra_backend.batch import Batch, SequenceOutput, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.chunking import divide_rows
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel
from netra_backend.errors import RequestError
from netra_backend.limits import commit_tokens
from netra_backend.metrics import Metrics
from netra_backend.request import FinishReason, Request, SamplingParams, TokenLogprobs
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import PAGE_SIZE, Sequence, SequenceStatus
from netra_backend.simulator import SimModel, VirtualClock

EOS = 2


def scheduler(
    num_pages: int = 100, clock: VirtualClock | None = None, **knobs: object
) -> Scheduler:
    config = EngineConfig(**{"max_num_seqs": 8, **knobs})  # type: ignore[arg-type]
    return Scheduler(
        config,
        BlockManager(num_pages, config.max_num_seqs),
        CostModel(),
        eos_token_ids=frozenset({EOS}),
        max_model_len=5000,
        vocab_size=1000,
        clock=clock or VirtualClock(),
        metrics=Metrics(5000),
    )


def request(request_id: str, num_prompt: int, arrival: float = 0.0, priority: int = 0,
            **params: object) -> Request:  # fmt: skip
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(request_id, (7,) * num_prompt, sampling, arrival, priority=priority)


def sequence(num_prompt: int, num_computed: int = 0, seq_id: int = 0, **params: object) -> Sequence:
    made = request(str(seq_id), num_prompt, **params)
    seq = Sequence(seq_id, made, [7] * num_prompt, num_prompt, 0, num_computed_tokens=num_computed)
    seq.max_num_tokens = num_prompt + made.params.max_tokens
    seq.end_token_ids = frozenset({EOS})
    return seq


def rows(batch: Batch | None) -> dict[str, int]:
    assert batch is not None
    return {item.seq.request.request_id: item.num_scheduled_tokens for item in batch.scheduled}


def answer(sched: Scheduler, batch: Batch, token: int = 9) -> None:
    outputs = [SequenceOutput([token] if item.num_logits else []) for item in batch.scheduled]
    sched.update(batch, StepOutput(outputs, 0.01))
    sched.check()


def step(sched: Scheduler, token: int = 9) -> dict[str, int]:
    batch = sched.schedule()
    assert batch is not None
    answer(sched, batch, token)
    return rows(batch)


# ---- composition of a step


def test_decoding_comes_first_and_prompts_take_the_rest() -> None:
    sched = scheduler(max_num_batched_tokens=256)
    for number in range(3):
        sched.add(request(f"d{number}", 10, max_tokens=100))
    assert step(sched) == {"d0": 10, "d1": 10, "d2": 10}
    sched.add(request("long", 1000))
    # 256 - 3 rows, down to a multiple of a page; then from there on.
    assert step(sched) == {"d0": 1, "d1": 1, "d2": 1, "long": 192}
    assert step(sched)["long"] == 192


def test_chunks_end_on_pages_whatever_is_left() -> None:
    sched = scheduler(max_num_batched_tokens=200)
    seq = sched.add(request("long", 999))
    ends = []
    while seq.num_uncomputed_tokens > 1:
        step(sched)
        ends.append(seq.num_computed_tokens)
    assert ends[-1] == 999
    assert all(end % PAGE_SIZE == 0 for end in ends[:-1])


def test_prompt_advances_although_decoders_fill_the_step() -> None:
    """More decoders than rows: they take turns, and a page (or half) stays for prompts."""
    sched = scheduler(max_num_seqs=100, max_num_batched_tokens=64, num_pages=1000)
    decoders = [sched.add(request(f"d{number}", 3, max_tokens=200)) for number in range(50)]
    while any(seq.num_output_tokens == 0 for seq in decoders):
        step(sched)
    long = sched.add(request("long", 300))
    before = [seq.num_output_tokens for seq in decoders]
    num_steps = 0
    while long.num_output_tokens == 0:
        assert sum(step(sched).values()) <= 64
        num_steps += 1
    assert num_steps <= 1 + 300 // 32
    gained = [seq.num_output_tokens - b for seq, b in zip(decoders, before, strict=True)]
    assert max(gained) - min(gained) <= 1


def test_single_token_prompts_are_no_chunks() -> None:
    sched = scheduler()
    sched.add(request("one", 1))
    sched.add(request("two", 2))
    batch = sched.schedule()
    assert batch is not None
    flags = [(item.is_chunk, item.num_logits, item.seal_block_ids) for item in batch.scheduled]
    assert flags == [(False, 1, []), (True, 1, [])]


def test_pages_are_allocated_for_what_will_be_full() -> None:
    sched = scheduler(max_num_batched_tokens=64)
    seq = sched.add(request("r", 64, max_tokens=200))
    batch = sched.schedule()
    assert batch is not None
    assert len(batch.scheduled[0].seal_block_ids) == 1
    assert seq.block_table == []
    sched.check()
    answer(sched, batch)
    assert (len(seq.block_table), seq.num_tail_tokens) == (1, 0)
    for number in range(1, 65):
        step(sched)
        assert seq.num_tail_tokens == number
        assert seq.num_replay_tokens == 1
    assert len(seq.block_table) == 1
    step(sched)  # the tail was full: it is sealed before the 65th token
    assert (len(seq.block_table), seq.num_tail_tokens) == (2, 1)


def test_ended_sequences_are_named_once() -> None:
    sched = scheduler()
    first = sched.add(request("first", 10, max_tokens=1))
    queued = sched.add(request("queued", 10))
    sched.add(request("other", 10, max_tokens=5))
    sched.abort("queued")
    step(sched)
    batch = sched.schedule()
    assert batch is not None
    assert batch.freed_seq_ids == [first.seq_id]  # the queued one never reached the runner
    assert queued.status is SequenceStatus.FINISHED
    answer(sched, batch)
    batch = sched.schedule()
    assert batch is not None
    assert batch.freed_seq_ids == []


def test_nothing_to_do_is_none() -> None:
    sched = scheduler()
    assert sched.schedule() is None
    sched.add(request("r", 10))
    sched.abort("r")
    assert sched.schedule() is None
    assert sched.abort("r") is None
    assert sched.abort("unknown") is None


# ---- division of rows among prompts


def divide(budget: int, *remaining: int, max_partial: int = 3, num_running: int = 0) -> list[int]:
    sequences = [sequence(length, seq_id=i) for i, length in enumerate(remaining)]
    for seq in sequences[:num_running]:
        seq.status = SequenceStatus.RUNNING
    shares = divide_rows(sequences, budget, max_partial, lambda _: True, lambda seq: seq.seq_id)
    given = {seq.seq_id: count for seq, count in shares}
    assert sum(given.values()) <= budget
    return [given.get(i, 0) for i in range(len(remaining))]


@pytest.mark.parametrize(
    ("budget", "remaining", "num_running", "expected"),
    [
        (512, (128, 128, 128, 128, 128), 0, [128, 128, 128, 128, 0]),  # all that fit, whole
        (512, (1000,), 0, [512]),
        (512, (1000, 1000, 1000, 1000), 0, [384, 64, 64, 0]),  # three part-done, the first mostly
        (512, (9000, 20), 1, [448, 20]),  # a short newcomer is served whole
        (512, (9000, 256), 1, [256, 256]),  # from half of the rows
        (512, (9000, 257), 1, [256, 256]),  # one that takes two steps has half of them, too
        (512, (9000, 5000), 1, [448, 64]),  # but a long one waits
        (512, (9000, 9000, 9000, 8000), 3, [384, 64, 64, 0]),  # no place for a long newcomer
        (512, (9000, 9000, 9000, 4500), 3, [256, 64, 64, 128]),  # but for one half as long
        (512, (9000, 9000, 600), 3, [256, 64, 192]),  # age does not take all from a short one
        (64, (9000, 9000), 2, [64, 0]),
        (40, (9000,), 1, [40]),  # below a page: better than never
        (0, (9000,), 1, [0]),
    ],
)
def test_division(
    budget: int, remaining: tuple[int, ...], num_running: int, expected: list[int]
) -> None:
    assert divide(budget, *remaining, num_running=num_running) == expected


def test_refused_prompts_get_no_rows() -> None:
    sequences = [sequence(10, seq_id=i) for i in range(3)]
    shares = divide_rows(sequences, 512, 3, lambda seq: seq.seq_id != 1, lambda seq: 0.0)
    assert [(seq.seq_id, count) for seq, count in shares] == [(0, 10), (2, 10)]


# ---- order


def test_shortest_first_then_by_age() -> None:
    clock = VirtualClock()
    sched = scheduler(max_num_seqs=1, clock=clock)
    sched.add(request("running", 10, max_tokens=2))
    step(sched)
    sched.add(request("long", 4000, max_tokens=1))
    sched.add(request("short", 100, max_tokens=1))
    clock.advance(1000.0)
    sched.add(request("late and short", 10, arrival=1000.0, max_tokens=1))
    order = []
    while (batch := sched.schedule()) is not None:
        order += [name for name in rows(batch) if name not in order]
        answer(sched, batch)
    assert order == ["running", "short", "long", "late and short"]


def test_priority_before_arrival() -> None:
    sched = scheduler(max_num_seqs=1)
    for name, priority in (("c", 2), ("b", 1), ("a", 0), ("urgent", -1)):
        sched.add(request(name, 10, max_tokens=1, priority=priority))
    assert [next(iter(step(sched))) for _ in range(4)] == ["urgent", "a", "b", "c"]


def test_newest_is_preempted_and_resumes_with_its_tokens() -> None:
    sched = scheduler(num_pages=4, max_num_batched_tokens=300)
    old = sched.add(request("old", 130, max_tokens=150))
    new = sched.add(request("new", 130, arrival=1.0, max_tokens=80))
    sched._forecast.fits = lambda seq, running: True  # type: ignore[method-assign]
    while new.num_preemptions == 0:
        step(sched)
    assert old.num_preemptions == 0
    assert (new.slot, new.block_table, new.num_computed_tokens) == (-1, [], 0)
    produced = new.num_output_tokens
    assert produced > 0
    while _go_on(sched):
        assert old.num_preemptions == 0
    assert (old.num_output_tokens, new.num_output_tokens) == (150, 80)
    assert old.finish_reason is new.finish_reason is FinishReason.LENGTH


def _go_on(sched: Scheduler) -> bool:
    batch = sched.schedule()
    if batch is None:
        return False
    answer(sched, batch)
    return True


def test_part_done_prompts_without_pages_give_way_to_the_oldest() -> None:
    """Two prompts that only fit one after the other, both begun: the older one advances."""
    sched = scheduler(num_pages=10, max_num_batched_tokens=320)
    sched._forecast.fits = lambda seq, running: True  # type: ignore[method-assign]
    old = sched.add(request("old", 600, max_tokens=1))
    new = sched.add(request("new", 600, arrival=0.1, max_tokens=1))
    while _go_on(sched):
        pass
    assert new.num_preemptions == 1
    assert old.num_preemptions == 0
    assert old.finish_reason is new.finish_reason is FinishReason.LENGTH


# ---- admission


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
    assert forecast.expected(seq) == 1000  # nothing known: the limit
    for length in range(1, 101):
        done = sequence(10, max_tokens=1000, seq_id=length)
        done.token_ids += [9] * length
        forecast.record(done)
    forecast.forget(seq)
    assert forecast.expected(seq) == pytest.approx(70, abs=2)
    seq.token_ids += [9] * 80
    assert 80 < forecast.expected(seq) <= 100
    seq.token_ids += [9] * 100
    assert 180 < forecast.expected(seq) <= 1000


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


# ---- limits and endings


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (request("r", 5000), "5000 tokens.* 5000 \\(max_model_len\\)"),
        (
            request("r", 4000, max_tokens=1000),
            "4000 prompt tokens and up to 1000 .*78 pages.*has 70",
        ),
        (Request("r", (1, 1000), SamplingParams(), 0.0), "prompt: token ids.*1 to 1000"),
        (Request("r", (-1, 5), SamplingParams(), 0.0), "prompt: token ids.*-1 to 5"),
        (request("r", 5, logit_bias={1000: 1.0}), "logit_bias"),
        (request("r", 5, stop_token_ids=(-1,)), "stop_token_ids"),
        (Request("r", (1,), SamplingParams(), 0.0, bad_word_ids=((1,), (2, 1000))), "bad_words"),
    ],
)
def test_requests_that_can_never_be_served(made: Request, message: str) -> None:
    sched = scheduler(num_pages=70)
    with pytest.raises(RequestError, match=message):
        sched.add(made)
    assert sched.num_waiting == 0
    assert sched.schedule() is None


def commit(seq: Sequence, *tokens: int) -> int:
    return commit_tokens(seq, SequenceOutput(list(tokens), len(tokens) - 1))


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason"),
    [
        ({}, (9, 9, 9), 3, None),
        ({}, (9, EOS, 9), 2, FinishReason.STOP),
        ({"max_tokens": 3}, (9, 9, 9, 9), 3, FinishReason.LENGTH),
        ({"max_tokens": 3}, (9, 9, EOS), 3, FinishReason.STOP),
        ({"max_tokens": 2}, (9, 9, EOS), 2, FinishReason.LENGTH),
        ({"min_tokens": 2}, (EOS, EOS, EOS, 9), 3, FinishReason.STOP),
        ({"min_tokens": 3}, (9, EOS, 9), 3, None),
    ],
)
def test_where_an_answer_ends(
    params: dict[str, int], tokens: tuple[int, ...], kept: int, reason: FinishReason | None
) -> None:
    seq = sequence(5, **params)
    assert commit(seq, *tokens) == kept
    assert seq.token_ids[5:] == list(tokens[:kept])
    assert seq.finish_reason is reason


def test_stop_ids_and_ignored_end_of_text() -> None:
    sched = scheduler()
    stops = sched.add(request("stops", 5, stop_token_ids=(9,), ignore_eos=True))
    ignores = sched.add(request("ignores", 5, ignore_eos=True))
    step(sched, token=EOS)
    assert stops.finish_reason is ignores.finish_reason is None
    step(sched, token=9)
    assert stops.finish_reason is FinishReason.STOP
    assert ignores.finish_reason is None


def test_model_length_ends_an_answer() -> None:
    sched = scheduler(max_num_batched_tokens=5000)
    seq = sched.add(request("r", 4990, max_tokens=500))
    while _go_on(sched):
        pass
    assert (seq.num_tokens, seq.finish_reason) == (5000, FinishReason.LENGTH)


def test_logprobs_are_cut_with_the_tokens() -> None:
    seq = sequence(5)
    logprobs = [TokenLogprobs(token, -1.0 - i, 1) for i, token in enumerate((9, EOS, 9))]
    commit_tokens(seq, SequenceOutput([9, EOS, 9], 2, logprobs))
    assert seq.logprobs == logprobs[:2]
    assert seq.cumulative_logprob == -3.0


def test_rejected_and_cut_drafts_leave_exact_counters() -> None:
    sched = scheduler()
    seq = sched.add(request("r", 10, max_tokens=100))
    batch = sched.schedule()
    assert batch is not None
    sched.update(batch, StepOutput([SequenceOutput([9], 0, [], [1, 2, 3])], 0.01))
    batch = sched.schedule()
    assert batch is not None
    item = batch.scheduled[0]
    assert (item.draft_token_ids, item.num_scheduled_tokens, item.num_logits) == ([1, 2, 3], 4, 4)
    sched.update(batch, StepOutput([SequenceOutput([1, 5], 1, [], [4])], 0.01))
    assert (seq.num_computed_tokens, seq.num_replay_tokens, seq.num_tokens) == (12, 2, 13)
    assert (seq.num_draft_tokens, seq.num_accepted_tokens) == (3, 1)
    batch = sched.schedule()
    assert batch is not None
    sched.update(batch, StepOutput([SequenceOutput([4, EOS], 1, [], [])], 0.01))
    assert seq.finish_reason is FinishReason.STOP
    assert (seq.num_draft_tokens, seq.num_accepted_tokens) == (4, 2)


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, 0), (3, 1), (100, 9)])
def test_drafts_are_capped_by_the_tokens_left(max_tokens: int, expected: int) -> None:
    sched = scheduler()
    sched.add(request("r", 10, max_tokens=max_tokens))
    batch = sched.schedule()
    assert batch is not None
    sched.update(batch, StepOutput([SequenceOutput([9], 0, [], [1] * 9)], 0.01))
    batch = sched.schedule()
    assert batch is not None
    assert len(batch.scheduled[0].draft_token_ids) == expected


def test_drafts_are_capped_by_the_rows_left() -> None:
    sched = scheduler(max_num_batched_tokens=64)
    for number in range(8):
        sched.add(request(f"r{number}", 4, max_tokens=50))
    batch = sched.schedule()
    assert batch is not None
    outputs = [SequenceOutput([9], 0, [], [1] * 20) for _ in batch.scheduled]
    sched.update(batch, StepOutput(outputs, 0.01))
    batch = sched.schedule()
    assert batch is not None
    assert len(batch.scheduled) == 8
    assert batch.num_tokens == 64


def test_unseeded_requests_get_reproducible_seeds() -> None:
    def seeds() -> list[int]:
        sched = scheduler(seed=42)
        return [sched.add(request(f"r{i}", 5, seed=[None, 7, None][i])).seed for i in range(3)]

    assert seeds() == seeds() == [42, 7, 44]


def test_deadlines_end_requests_in_any_state() -> None:
    clock = VirtualClock()
    sched = scheduler(max_num_seqs=1, max_num_batched_tokens=64, clock=clock)

    def timed(name: str, num_prompt: int, deadline: float) -> Sequence:
        return sched.add(Request(name, (7,) * num_prompt, SamplingParams(), 0.0, deadline))

    running, waiting, patient = timed("a", 10, 5.0), timed("b", 300, 3.0), timed("c", 300, 100.0)
    step(sched)
    clock.advance(4.0)
    assert sched.expire() == [waiting]
    clock.advance(1.0)
    assert sched.expire() == [running]
    step(sched)
    assert patient.num_computed_tokens == 64
    clock.advance(95.0)
    assert sched.expire() == [patient]
    assert sched.schedule() is None
    sched.check()


def test_speculating_fuzz_counts_every_draft() -> None:
    """Totals over a run with perfect drafts: all accepted, but those cut at the end."""
    model = SimModel(num_drafts=3, acceptance=1.0)
    simulated: Simulated = simulate(model=model)
    simulated.add("r", 10, max_tokens=41, seed=0)
    num_steps = simulated.run()
    final = simulated.final("r")
    assert (final.num_output_tokens, final.num_draft_tokens, final.num_accepted_tokens) == (
        41,
        30,
        30,
    )
    assert num_steps == 1 + 10

"""Scheduler: what a step computes, in which order requests are served, what a step changes."""

from __future__ import annotations

import pytest
from scheduling import EOS, answer, go_on, request, rows, scheduler, step
from simulated import Simulated, simulate

from netra_backend.batch import SequenceOutput, StepOutput
from netra_backend.request import FinishReason, Request, SamplingParams
from netra_backend.sequence import PAGE_SIZE, Sequence, SequenceStatus
from netra_backend.simulator import SimModel, VirtualClock

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
    while go_on(sched):
        assert old.num_preemptions == 0
    assert (old.num_output_tokens, new.num_output_tokens) == (150, 80)
    assert old.finish_reason is new.finish_reason is FinishReason.LENGTH


def test_part_done_prompts_without_pages_give_way_to_the_oldest() -> None:
    """Two prompts that only fit one after the other, both begun: the older one advances."""
    sched = scheduler(num_pages=10, max_num_batched_tokens=320)
    sched._forecast.fits = lambda seq, running: True  # type: ignore[method-assign]
    old = sched.add(request("old", 600, max_tokens=1))
    new = sched.add(request("new", 600, arrival=0.1, max_tokens=1))
    while go_on(sched):
        pass
    assert new.num_preemptions == 1
    assert old.num_preemptions == 0
    assert old.finish_reason is new.finish_reason is FinishReason.LENGTH


# ---- what a step changes


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


def test_drafts_behind_the_end_do_not_count() -> None:
    """All four tokens were right, but the first of them ended the answer."""
    sched = scheduler()
    seq = sched.add(request("r", 10, max_tokens=100))
    for result in (SequenceOutput([9], 0, [], [EOS, 5, 6]), SequenceOutput([EOS, 5, 6, 7], 3)):
        batch = sched.schedule()
        assert batch is not None
        sched.update(batch, StepOutput([result], 0.01))
    assert seq.finish_reason is FinishReason.STOP
    assert seq.token_ids[10:] == [9, EOS]
    assert (seq.num_draft_tokens, seq.num_accepted_tokens) == (3, 1)
    assert (seq.num_computed_tokens, seq.num_replay_tokens) == (12, 2)


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


@pytest.mark.parametrize(("num_prompt", "num_drafts"), [(59, 67), (62, 64), (63, 90), (64, 90)])
def test_drafts_are_capped_by_the_tail(num_prompt: int, num_drafts: int) -> None:
    """128 rows: what is committed and unsealed, one token, and the drafts."""
    sched = scheduler()
    sched.add(request("r", num_prompt, max_tokens=1000))
    for drafts in ([], [1] * 90):
        batch = sched.schedule()
        assert batch is not None
        sched.update(batch, StepOutput([SequenceOutput([9], 0, [], drafts)], 0.01))
    batch = sched.schedule()
    assert batch is not None
    assert len(batch.scheduled[0].draft_token_ids) == num_drafts


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


def test_deadline_of_an_ended_request_does_not_hit_its_successor() -> None:
    clock = VirtualClock()
    sched = scheduler(clock=clock)
    for deadline in (5.0, 50.0):
        successor = sched.add(Request("r", (7,), SamplingParams(max_tokens=1), 0.0, deadline))
        if deadline == 5.0:
            step(sched)
    clock.advance(10.0)
    assert sched.expire() == []
    clock.advance(40.0)
    assert sched.expire() == [successor]


def test_perfect_drafts_are_all_counted() -> None:
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

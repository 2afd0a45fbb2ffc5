"""DraftController: takes drafts where they pay, none where they do not, and follows changes of both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from netra_backend.batch import Batch, ScheduledSequence, SequenceOutput, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel, StepCost, StepShape
from netra_backend.metrics import Metrics
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import Sequence
from netra_backend.spec.controller import DraftController

MAX_DRAFTS = 6
CHEAP_ROWS = StepCost(10e-3, 0.1e-3, 1e-3, 0.0, 0.0, 0.0, 0.1e-3, 0.0, 0.0)
DEAR_ROWS = StepCost(1e-3, 10e-3, 1e-3, 0.0, 0.0, 0.0, 0.1e-3, 0.0, 0.0)
Rate = Callable[[Sequence, int], float]


class Bench:
    """A scheduler on a virtual clock; a draft is right with the rate that `rate(seq, step)` gives."""

    def __init__(self, cost: StepCost, rate: Rate, num_seqs: int = 1, **options: bool) -> None:
        self.metrics = Metrics(100_000)
        self.cost = CostModel(cost)
        self.rate = rate
        self.now = 0.0
        self.num_tokens = 0
        self.lengths: list[list[int]] = []
        learned = CostModel()
        self.controller = DraftController(MAX_DRAFTS, learned, self.metrics, **options)
        self.scheduler = Scheduler(
            EngineConfig(max_num_seqs=num_seqs),
            BlockManager(4096, num_seqs),
            learned,
            eos_token_ids=frozenset(),
            max_model_len=100_000,
            vocab_size=2,
            clock=lambda: self.now,
            metrics=self.metrics,
            drafts=self.controller,
        )
        params = SamplingParams(max_tokens=20_000, ignore_eos=True)
        self.sequences = [
            self.scheduler.add(Request(f"{i}", (1, 1), params, arrival_time=0.0))
            for i in range(num_seqs)
        ]

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        outputs = [self._verify(item) for item in batch.scheduled]
        seconds = self.cost.seconds(StepShape.of(batch))
        self.now += seconds
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self.scheduler.update(batch, StepOutput(outputs, seconds))
        return batch

    def run(self, num_steps: int) -> float:
        """Tokens per second over the steps."""
        tokens, time = self.num_tokens, self.now
        for _ in range(num_steps):
            batch = self.step()
            self.lengths.append([len(item.draft_token_ids) for item in batch.scheduled])
        return (self.num_tokens - tokens) / (self.now - time)

    def _verify(self, item: ScheduledSequence) -> SequenceOutput:
        accepted = 0
        for _ in item.draft_token_ids:
            position = item.seq.num_tokens + accepted
            noise = random.Random(f"{item.seq.seq_id} {position}").random()
            if noise >= self.rate(item.seq, len(self.lengths)):
                break
            accepted += 1
        drafts = [1] * item.num_wanted_drafts
        return SequenceOutput([1] * (1 + accepted), accepted, draft_token_ids=drafts)


def mean_length(bench: Bench, last: int) -> float:
    lengths = list(itertools.chain.from_iterable(bench.lengths[-last:]))
    return sum(lengths) / len(lengths)


def test_drafts_are_long_where_rows_are_cheap_and_drafts_are_right() -> None:
    bench = Bench(CHEAP_ROWS, lambda _seq, _step: 0.9)
    bench.run(300)
    assert mean_length(bench, 100) > 0.9 * MAX_DRAFTS


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_wrong_drafts_cost_at_most_three_percent(num_seqs: int) -> None:
    bench = Bench(DEAR_ROWS, lambda _seq, _step: 0.05, num_seqs)
    bench.run(300)
    plain = num_seqs / (1e-3 + num_seqs * 10e-3)
    assert bench.run(500) > 0.97 * plain


def test_dear_rows_are_not_spent_on_mediocre_drafts() -> None:
    bench = Bench(DEAR_ROWS, lambda _seq, _step: 0.5)
    bench.run(300)
    assert bench.run(500) > 0.97 / 11e-3
    assert mean_length(bench, 500) < 0.2


def test_drafts_come_back_by_themselves_when_they_become_right() -> None:
    bench = Bench(CHEAP_ROWS, lambda _seq, step: 0.0 if step < 400 else 0.9)
    plain = 1 / bench.cost.seconds(StepShape(decode_rows=1))
    bench.run(300)
    assert bench.run(100) > 0.99 * plain
    bench.run(400)
    assert mean_length(bench, 100) > 0.8 * MAX_DRAFTS


def test_each_sequence_gets_what_its_own_drafts_earn() -> None:
    bench = Bench(
        StepCost(10e-3, 1e-3, 1e-3, 0.0, 0.0, 0.0, 0.1e-3, 0.0, 0.0),
        lambda seq, _step: 0.95 if seq.seq_id % 2 else 0.02,
        num_seqs=8,
    )
    bench.run(400)
    by_sequence = [sum(column) / 100 for column in zip(*bench.lengths[-100:], strict=True)]
    assert min(by_sequence[1::2]) > 3.0
    assert max(by_sequence[::2]) < 0.5


def test_rows_of_a_step_are_limited() -> None:
    bench = Bench(CHEAP_ROWS, lambda _seq, _step: 0.95, num_seqs=8, max_rows=20)
    bench.run(200)
    assert max(sum(lengths) for lengths in bench.lengths[-100:]) <= 12


def test_lengths_stop_at_the_end_of_the_answer() -> None:
    bench = Bench(CHEAP_ROWS, lambda _seq, _step: 1.0)
    seq = bench.sequences[0]
    seq.max_num_tokens = 40
    while bench.scheduler.num_running or bench.scheduler.num_waiting:
        left = seq.max_num_tokens - seq.num_tokens
        item = bench.step().scheduled[0]
        assert item.num_wanted_drafts <= max(0, left - 2)
    assert seq.num_tokens == 40


def test_a_collapse_is_noticed_once_counted_and_recomputed() -> None:
    broken = {0: False}

    def rate(seq: Sequence, _step: int) -> float:
        return 0.0 if broken[0] and not seq.num_preemptions else 0.8

    bench = Bench(CHEAP_ROWS, rate, has_cache=True)
    bench.run(100)
    broken[0] = True
    bench.run(600)
    assert bench.metrics.draft_resets.value == 1
    assert bench.sequences[0].num_preemptions == 1
    assert mean_length(bench, 50) > 0.5 * MAX_DRAFTS


def test_lookups_have_no_cache_to_recompute() -> None:
    bench = Bench(CHEAP_ROWS, lambda _seq, step: 0.8 if step < 100 else 0.0)
    bench.run(600)
    assert bench.metrics.draft_resets.value == 0
    assert bench.sequences[0].num_preemptions == 0


def test_positions_and_lengths_are_counted() -> None:
    bench = Bench(CHEAP_ROWS, lambda _seq, _step: 0.7)
    bench.run(200)
    metrics = bench.metrics
    bench.controller.assign(Batch([]))  # counts are entered when the next step is made
    assert metrics.draft_tokens.value == sum(counter.value for counter in metrics.drafts_at)
    assert metrics.accepted_tokens.value == sum(counter.value for counter in metrics.accepted_at)
    assert metrics.accepted_at[0].value > metrics.accepted_at[1].value > 0
    assert metrics.draft_length.value > 0


def test_fixed_lengths_need_no_cost_model() -> None:
    controller = DraftController(4)
    params = SamplingParams(max_tokens=5)
    seq = Sequence(0, Request("r", (1,), params, arrival_time=0.0), [1], 1, seed=0)
    seq.max_num_tokens = 6
    for produced, wanted in ((0, 3), (1, 2), (3, 0), (4, 0)):
        seq.token_ids = [1] * (1 + produced)
        item = ScheduledSequence(seq, 1, num_logits=1)
        controller.assign(Batch([item]))
        assert item.num_wanted_drafts == wanted

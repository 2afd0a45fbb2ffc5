"""Scheduler: chooses what the next step computes and applies what it gave.

Knows sequences, ids and predicted seconds; no tensors, no text, no threads. `schedule` and `update`
alternate. Work per step is O(running sequences), never O(context). Progress: whenever a sequence is
live, `schedule` returns a batch in which some sequence advances, and the most senior running one is
never preempted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import chain

from netra_backend.admission import MemoryForecast, WaitingQueue, rank, urgency
from netra_backend.batch import Batch, ScheduledSequence, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.chunking import aligned_rows, divide_rows
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel, StepShape
from netra_backend.limits import RequestLimits, commit_tokens
from netra_backend.metrics import Metrics
from netra_backend.prefix_reuse import PrefixReuse
from netra_backend.request import FinishReason, Request
from netra_backend.residence import Residence
from netra_backend.sequence import PAGE_SIZE, TAIL_ROWS, Sequence, SequenceStatus
from netra_backend.spec.controller import DraftController


class Scheduler:
    """Continuous batching: decode rows first, the rest of the step to prompt chunks.

    Times come from `clock` (seconds). `vocab_size` bounds the token ids that requests may name.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        cost_model: CostModel,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float],
        metrics: Metrics,
        drafts: DraftController | None = None,
        prefixes: PrefixReuse | None = None,
        host: BlockManager | None = None,
    ) -> None:
        self.limits = RequestLimits(
            max_model_len, block_manager.longest_table, vocab_size, eos_token_ids
        )
        self.max_num_seqs = min(config.max_num_seqs, block_manager.num_slots)
        self._config = config
        self._blocks = block_manager
        self._cost_model = cost_model
        self._clock = clock
        self._metrics = metrics
        self._drafts = drafts
        self._prefixes = prefixes
        self._residence = Residence(block_manager, metrics, prefixes, host)
        metrics.set_capacity(block_manager.num_pages, PAGE_SIZE, block_manager.num_slots)

        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # by seniority, the oldest first
        self._forecast = MemoryForecast(block_manager.num_pages * PAGE_SIZE)
        self._deadlines: list[tuple[float, int, str]] = []
        self._freed_seq_ids: list[int] = []
        self._in_flight: Batch | None = None
        self._next_seq_id = 0
        self._next_decoder = 0

    @property
    def num_running(self) -> int:
        """Sequences that own a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to start or to resume."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of waiting sequences that have to be computed before they produce any."""
        return self._waiting.num_tokens

    # ---- arrivals and departures

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises RequestError as `RequestLimits.validate` does."""
        self.limits.validate(request)
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        given = request.params.seed
        seed = given if given is not None else self._config.seed + seq_id
        tokens = list(request.prompt_token_ids)
        seq = Sequence(seq_id, request, tokens, len(tokens), seed)
        seq.max_num_tokens = len(tokens) + self.limits.max_output(request)
        seq.end_token_ids = self.limits.end_token_ids(request)
        self._sequences[request.request_id] = seq
        self._enqueue(seq)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, seq_id, request.request_id))
        self._publish_load()
        return seq

    def _enqueue(self, seq: Sequence) -> None:
        self._waiting.add(seq, self._urgency(seq))

    def abort(self, request_id: str) -> Sequence | None:
        """End a request wherever it is and free what it holds; None if it is not live."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a request between steps for a reason that the tokens do not show."""
        assert self._in_flight is None, "a sequence must not change while a step runs"
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.finish_reason = reason
            self._leave(seq, self._clock())
            self._publish_load()
        return seq

    def expire(self) -> list[Sequence]:
        """End every request whose deadline has passed, with reason ABORT."""
        now = self._clock()
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq_id, request_id = heappop(self._deadlines)
            seq = self._sequences.get(request_id)
            if seq is not None and seq.seq_id == seq_id:
                self.abort(request_id)
                expired.append(seq)
        return expired

    def _leave(self, seq: Sequence, now: float) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        self._residence.end(seq)
        seq.status = SequenceStatus.FINISHED
        seq.draft_token_ids = []
        self._forecast.forget(seq)
        if self._prefixes is not None:
            self._prefixes.forget(seq)
        del self._sequences[seq.request.request_id]
        if seq.scheduled_time is not None:
            self._freed_seq_ids.append(seq.seq_id)
        self._record_departure(seq, now)

    def _record_departure(self, seq: Sequence, now: float) -> None:
        if seq.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._forecast.record(seq)
        produced = seq.num_output_tokens
        seconds = 0.0
        if seq.first_token_time is not None and seq.last_token_time is not None:
            seconds = seq.last_token_time - seq.first_token_time
        self._metrics.observe_request(
            seq.num_prompt_tokens, produced, now - seq.request.arrival_time, seconds
        )

    # ---- what the next step computes

    def schedule(self) -> Batch | None:
        """The next step, or None if nothing is live. Its pages are taken; `update` must follow."""
        assert self._in_flight is None, "update the previous step first"
        if self._drafts is not None:
            for seq in self._drafts.take_collapsed():
                self._preempt(seq, is_intact=False)
        batch = Batch([])
        may_start = self._schedule_decodes(batch)
        self._schedule_prompts(batch, may_start)
        while not batch.scheduled and self._running:
            # Only part-done prompts and sequences from the host, and no page: the newest give way until the
            # oldest advances.
            self._preempt(self._running[-1])
            self._schedule_decodes(batch)
            self._schedule_prompts(batch, may_start=False)
        if not batch.scheduled:
            return None
        batch.freed_seq_ids, self._freed_seq_ids = self._freed_seq_ids, []
        self._residence.hand_over(batch)
        if self._prefixes is not None:
            for item in batch.scheduled:
                self._prefixes.plan(item)
        if self._drafts is not None:
            self._drafts.assign(batch)
        self._in_flight = batch
        self._publish_load()
        return batch

    def _schedule_decodes(self, batch: Batch) -> bool:
        """Add a row and drafts per decoding sequence, the oldest first; False if one was preempted."""
        decoding = [s for s in self._running if len(s.token_ids) - s.num_computed_tokens == 1]
        budget = self._config.max_num_batched_tokens
        if len(self._running) > len(decoding) or self._waiting:
            budget -= min(PAGE_SIZE, budget // 2)
        if len(decoding) > budget:
            decoding = self._rotate(decoding, budget)
        spare = budget - len(decoding)
        num_waiting = len(self._waiting)
        for seq in decoding:
            if seq.status is not SequenceStatus.RUNNING:
                continue
            tail = seq.num_computed_tokens - len(seq.block_table) * PAGE_SIZE
            seals: list[int] = []
            if tail >= PAGE_SIZE:
                if not self._make_room(seq):
                    continue
                seals = self._blocks.allocate_pages(1, seq.block_table)
                tail -= PAGE_SIZE
            drafts = seq.draft_token_ids
            if drafts:
                left = seq.max_num_tokens - len(seq.token_ids) - 1
                room = min(left, TAIL_ROWS - tail - 1, spare)
                if len(drafts) > room:
                    drafts = drafts[:room]
                spare -= len(drafts)
            count = 1 + len(drafts)
            batch.scheduled.append(ScheduledSequence(seq, count, False, drafts, seals, count))
        return len(self._waiting) == num_waiting

    def _rotate(self, decoding: list[Sequence], budget: int) -> list[Sequence]:
        """More decoders than rows: take turns, keeping the order of seniority."""
        start = self._next_decoder % len(decoding)
        self._next_decoder = start + budget
        turn = {(start + i) % len(decoding) for i in range(budget)}
        return [seq for i, seq in enumerate(decoding) if i in turn]

    def _make_room(self, seq: Sequence) -> bool:
        """Free a page by preempting the newest; False if that was `seq` itself."""
        while self._blocks.num_free_for(seq.block_table) == 0:
            newest = self._running[-1]
            self._preempt(newest)
            if newest is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, *, is_intact: bool = True) -> None:
        """Let `seq` wait, on the host if there is room and its caches are worth keeping."""
        self._running.remove(seq)
        self._residence.pause(seq, is_intact)
        self._forecast.forget(seq)
        seq.status = SequenceStatus.WAITING
        seq.draft_token_ids = []
        self._enqueue(seq)

    def _schedule_prompts(self, batch: Batch, may_start: bool) -> None:
        """Add chunks of part-done prompts and, if `may_start`, of new ones."""
        may_start = may_start and bool(self._waiting) and len(self._running) < self.max_num_seqs
        if not may_start and len(batch.scheduled) == len(self._running):
            return  # all of them decode
        parts = [s for s in self._running if len(s.token_ids) - s.num_computed_tokens > 1]
        parts.sort(key=self._urgency)
        budget = self._prompt_rows(batch, parts)
        prompts = chain(parts, self._waiting.candidates() if may_start else ())
        max_partial = self._config.max_partial_prompts
        for seq, rows in divide_rows(prompts, budget, max_partial, self._start, self._urgency):
            self._add_chunk(batch, seq, rows, budget)

    def _urgency(self, seq: Sequence) -> float:
        remaining = self._cost_model.prompt_seconds(
            seq.num_uncomputed_tokens, seq.num_computed_tokens
        )
        return urgency(seq.request, remaining)

    def _prompt_rows(self, batch: Batch, parts: list[Sequence]) -> int:
        """Rows for prompts: what is left, less if decoding would miss its time per token."""
        rows = self._config.max_num_batched_tokens - batch.num_tokens
        if self._config.target_tpot_ms == 0 or not batch.scheduled:
            return rows
        seconds = self._config.target_tpot_ms / 1e3 - self._cost_model.seconds(StepShape.of(batch))
        context = parts[0].num_computed_tokens if parts else 0
        affordable = self._cost_model.prompt_rows_within(seconds, context)
        return min(rows, max(PAGE_SIZE, affordable // PAGE_SIZE * PAGE_SIZE))

    def _start(self, seq: Sequence) -> bool:
        """Give `seq` a slot if one is free and the predicted peak of all outputs fits the pages."""
        if len(self._running) >= self.max_num_seqs or not self._residence.has_room(seq):
            return False
        if self._running and not self._forecast.fits(seq, self._running):
            return False
        self._waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        self._residence.start(seq)
        if seq.scheduled_time is None:
            seq.scheduled_time = self._clock()
        insort(self._running, seq, key=_seniority)
        return True

    def _add_chunk(self, batch: Batch, seq: Sequence, rows: int, budget: int) -> None:
        """Schedule up to `rows` tokens of `seq`: fewer if pages are short, none if none is free."""
        free = self._blocks.num_free_for(seq.block_table)
        if seq.num_uncomputed_tokens == 1:
            num_seals = int(seq.num_tail_tokens >= PAGE_SIZE)
            if rows and num_seals <= free:
                seals = self._blocks.allocate_pages(num_seals, seq.block_table)
                batch.scheduled.append(ScheduledSequence(seq, 1, False, [], seals, 1))
            return
        held = len(seq.block_table)
        room = (held + free + 1) * PAGE_SIZE - 1 - seq.num_computed_tokens
        if room < rows:
            rows = aligned_rows(seq, room, budget)
        end = seq.num_computed_tokens + rows
        if rows < 2:
            return
        seals = self._blocks.allocate_pages(end // PAGE_SIZE - held, seq.block_table)
        is_last = end == len(seq.token_ids)
        batch.scheduled.append(ScheduledSequence(seq, rows, True, [], seals, int(is_last)))

    # ---- what the step gave

    def update(self, batch: Batch, output: StepOutput) -> list[Sequence]:
        """Apply a step; returns the sequences that gained tokens, some of them for the last time."""
        assert batch is self._in_flight, "not the step in flight"
        self._in_flight = None
        now = self._clock()
        self._observe(batch, output.seconds)
        gained = []
        num_tokens = num_drafts = num_accepted = 0
        for item, result in zip(batch.scheduled, output.outputs, strict=True):
            seq = item.seq
            if item.seal_block_ids:
                seq.block_table.extend(item.seal_block_ids)
            if self._prefixes is not None:
                self._prefixes.commit(item)
            kept = commit_tokens(seq, result) if item.num_logits else 0
            if item.is_chunk:
                seq.num_computed_tokens += item.num_scheduled_tokens
                seq.num_replay_tokens = 0
            elif item.draft_token_ids:
                accepted = min(result.num_accepted_tokens, kept)
                seq.num_computed_tokens += 1 + accepted
                seq.num_replay_tokens = 1 + accepted
                seq.num_draft_tokens += len(item.draft_token_ids)
                seq.num_accepted_tokens += accepted
                num_drafts += len(item.draft_token_ids)
                num_accepted += accepted
                if self._drafts is not None:
                    self._drafts.observe(seq, len(item.draft_token_ids), accepted)
            else:
                seq.num_computed_tokens += 1
                seq.num_replay_tokens = 1
            if kept:
                seq.draft_token_ids = result.draft_token_ids
                num_tokens += kept
                gained.append(seq)
                if seq.first_token_time is None:
                    self._count_first_token(seq, now)
                seq.last_token_time = now
                if seq.finish_reason is not None:
                    self._leave(seq, now)
        self._metrics.generation_tokens.value += num_tokens
        self._metrics.draft_tokens.value += num_drafts
        self._metrics.accepted_tokens.value += num_accepted
        self._publish_load()
        return gained

    def _observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step, unless copies to or from the host are in its time."""
        if not batch.moves:
            self._cost_model.observe(StepShape.of(batch), seconds)

    def _count_first_token(self, seq: Sequence, now: float) -> None:
        seq.first_token_time = now
        self._metrics.prompt_tokens.value += seq.num_prompt_tokens
        self._metrics.time_to_first_token.observe(now - seq.request.arrival_time)

    def _publish_load(self) -> None:
        self._metrics.set_load(len(self._running), len(self._waiting), self._waiting.num_tokens)
        self._metrics.set_usage(self._blocks.num_used_pages, self._blocks.num_used_slots)

    def check(self) -> None:
        """Assert that pages, slots and queues agree. Costs O(pages in use): for tests."""
        batch = self._in_flight
        items = batch.scheduled if batch else []
        pending = [page for item in items for page in item.seal_block_ids]
        self._residence.check(self._running, self._waiting, pending)
        assert self._running == sorted(self._running, key=_seniority)
        assert all(seq.status is SequenceStatus.RUNNING for seq in self._running)
        assert all(seq.status is SequenceStatus.WAITING for seq in self._waiting)
        assert len(self._running) + len(self._waiting) == len(self._sequences)
        assert self._waiting.num_tokens == sum(seq.num_uncomputed_tokens for seq in self._waiting)


def _seniority(seq: Sequence) -> tuple[float, int]:
    return rank(seq.request), seq.seq_id

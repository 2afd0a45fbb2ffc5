"""DraftController: how many drafts each sequence gets, from what drafts earned and what rows cost.

No torch, no tokens: counts of accepted drafts and predicted seconds only. It maximises the expected tokens
per second of the next step over all sequences at once: a draft is worth its chance of being reached and
accepted, and drafts are taken in the order of their worth as long as the rate grows. Lengths are fixed before
tokens are drawn, so they cannot bias what is drawn.
"""

from __future__ import annotations

import logging

from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel, StepShape
from netra_backend.metrics import Metrics
from netra_backend.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)

_BINS = 32
"""Worths are told apart in steps of 1/32: sorting all of 256 x 8 drafts every step would cost more."""

_KEEP = 0.93
"""Of a sequence's own counts per verified step: 14 steps of memory follow a change of phase."""

_KEEP_ALL = 0.998
"""Of the counts over all sequences, which are the prior of each."""

_PRIOR_TRIALS = 3.0
_FIRST_RATE = 0.6

_PROBE_STEPS = (32, 256)
"""Steps without drafts before one is tried: first, and after failures. A probe in 256 steps costs 0.4 %."""

_VARIATION_STEPS = 64
"""Every so often all lengths are capped lower, or the cost of a row could never be told from that of a step."""

_COLLAPSE_MISSES = 16
_HEALTHY_RATE = 0.3
"""A first draft that was right this often and then misses so often in a row points to a broken draft cache."""


class Acceptance:
    """Chance of each draft position, given that the ones before were accepted, from decayed counts."""

    __slots__ = ("passed", "tried")

    def __init__(self, num_positions: int, trials: float = 0.0, rate: float = 0.0) -> None:
        self.tried = [trials] * num_positions
        self.passed = [trials * rate] * num_positions

    def add(self, num_drafts: int, num_accepted: int, keep: float) -> None:
        """Count a verification: positions behind the first wrong one were not tried."""
        for position in range(min(num_drafts, num_accepted + 1)):
            self.tried[position] = self.tried[position] * keep + 1.0
            self.passed[position] = self.passed[position] * keep + (position < num_accepted)

    def worths(self, prior: Acceptance) -> list[float]:
        """Chance that a draft at each position is reached and accepted."""
        worths = []
        survival = 1.0
        for passed, tried, all_passed, all_tried in zip(
            self.passed, self.tried, prior.passed, prior.tried, strict=True
        ):
            rate = (passed + _PRIOR_TRIALS * all_passed / all_tried) / (tried + _PRIOR_TRIALS)
            survival *= rate
            worths.append(survival)
        return worths


class _History:
    """What a sequence's drafts earned, and how long it has had none."""

    __slots__ = ("acceptance", "idle_steps", "misses", "probe_steps", "was_healthy", "was_reset")

    def __init__(self, num_positions: int) -> None:
        self.acceptance = Acceptance(num_positions)
        self.idle_steps = 0
        self.probe_steps = _PROBE_STEPS[0]
        self.misses = 0
        self.was_healthy = False
        self.was_reset = False


class DraftController:
    """Sets num_wanted_drafts of a batch's items, `max_drafts` at most.

    Without a cost model every sequence gets `max_drafts`. max_rows: rows that a step may have. With
    `has_cache` (a draft model with keys and values of its own) a collapse of acceptance is noticed: such
    a sequence should be computed afresh.
    """

    def __init__(
        self,
        max_drafts: int,
        cost_model: CostModel | None = None,
        metrics: Metrics | None = None,
        max_rows: int = 1 << 30,
        has_cache: bool = False,
    ) -> None:
        self.max_drafts = max_drafts
        self._collapsed: list[Sequence] = []
        self._cost_model = cost_model
        self._metrics = metrics
        self._max_rows = max_rows
        self._has_cache = has_cache
        self._all = Acceptance(max_drafts, _PRIOR_TRIALS, _FIRST_RATE)
        self._histories: dict[int, _History] = {}
        self._num_steps = 0

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        max_drafts: int,
        cost_model: CostModel,
        metrics: Metrics,
        has_cache: bool,
    ) -> DraftController | None:
        """One for a deployment; None if it does not draft."""
        if max_drafts == 0:
            return None
        used = cost_model if config.adaptive_drafts else None
        return cls(max_drafts, used, metrics, config.max_num_batched_tokens, has_cache)

    def take_collapsed(self) -> list[Sequence]:
        """Running sequences whose draft cache is broken, once each."""
        collapsed, self._collapsed = self._collapsed, []
        return [seq for seq in collapsed if seq.status is SequenceStatus.RUNNING]

    def assign(self, batch: Batch) -> None:
        """Choose what the step after `batch` will verify."""
        for seq_id in batch.freed_seq_ids:
            self._histories.pop(seq_id, None)
        items = [item for item in batch.scheduled if item.num_logits]
        if self._cost_model is None:
            for item in items:
                item.num_wanted_drafts = min(self.max_drafts, _useful_drafts(item.seq))
            return
        if not items:
            return
        self._num_steps += 1
        worths = [
            self._history(item.seq).acceptance.worths(self._all)[: _useful_drafts(item.seq)]
            for item in items
        ]
        longest, lowest_bin = self._best_cut(batch, items, worths, self._cost_model)
        if self._num_steps % _VARIATION_STEPS == 0:
            longest = (self._num_steps // _VARIATION_STEPS) % max(1, longest)
        for item, row in zip(items, worths, strict=True):
            count = sum(int(worth * _BINS) >= lowest_bin for worth in row[:longest])
            item.num_wanted_drafts = count or self._probe(item.seq, row)
        if self._metrics is not None:
            chosen = sum(item.num_wanted_drafts for item in items)
            self._metrics.draft_length.value = chosen / len(items)

    def _best_cut(
        self,
        batch: Batch,
        items: list[ScheduledSequence],
        worths: list[list[float]],
        cost_model: CostModel,
    ) -> tuple[int, int]:
        """Longest draft and least worth, as a bin, of the choice with the highest expected rate."""
        shape = StepShape.of(batch)
        num_items = len(items)
        room = self._max_rows - num_items
        shape.context_tokens = sum(item.seq.num_tokens for item in items)
        counts = [0] * (_BINS + 1)
        sums = [0.0] * (_BINS + 1)
        best_rate, best = 0.0, (0, _BINS + 1)
        for length in range(self.max_drafts + 1):
            if length:
                for row in worths:
                    if len(row) >= length:
                        worth = row[length - 1]
                        counts[int(worth * _BINS)] += 1
                        sums[int(worth * _BINS)] += worth
            num_rows, expected = num_items, float(num_items)
            for lowest in range(_BINS, -1, -1):
                if length and not counts[lowest]:
                    continue
                num_rows += counts[lowest]
                expected += sums[lowest]
                if num_rows - num_items > room:
                    break
                shape.decode_rows = shape.logits_rows = num_rows
                shape.draft_passes, shape.draft_rows = length, num_rows - num_items
                rate = expected / max(cost_model.seconds(shape), 1e-9)
                if rate > best_rate:
                    best_rate, best = rate, (length, lowest)
                if not length:
                    break
        return best

    def _probe(self, seq: Sequence, row: list[float]) -> int:
        history = self._history(seq)
        history.idle_steps += 1
        if not row or history.idle_steps < history.probe_steps:
            return 0
        history.idle_steps = 0
        return 1

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verification of at least one draft."""
        history = self._history(seq)
        history.acceptance.add(num_drafts, num_accepted, _KEEP)
        self._all.add(num_drafts, num_accepted, _KEEP_ALL)
        history.idle_steps = 0
        if num_accepted:
            history.misses = 0
            history.probe_steps = max(1, history.probe_steps // 8)
        else:
            history.misses += 1
            history.probe_steps = min(_PROBE_STEPS[1], 2 * history.probe_steps)
        if self._metrics is not None:
            self._metrics.count_positions(num_drafts, num_accepted)
        if self._has_cache:
            self._notice_collapse(seq, history)

    def _notice_collapse(self, seq: Sequence, history: _History) -> None:
        tried = history.acceptance.tried[0]
        if tried > 8 and history.acceptance.passed[0] > _HEALTHY_RATE * tried:
            history.was_healthy = True
        collapsed = history.was_healthy and history.misses >= _COLLAPSE_MISSES
        if not collapsed or history.was_reset or seq.status is not SequenceStatus.RUNNING:
            return
        logger.warning("drafts of request %s collapsed: it is recomputed", seq.request.request_id)
        history.was_reset = True
        history.was_healthy = False
        history.misses = 0
        self._collapsed.append(seq)
        if self._metrics is not None:
            self._metrics.draft_resets.value += 1

    def _history(self, seq: Sequence) -> _History:
        history = self._histories.get(seq.seq_id)
        if history is None:
            history = self._histories[seq.seq_id] = _History(self.max_drafts)
        return history


def _useful_drafts(seq: Sequence) -> int:
    """This step gains at least one token, and the next one beside its drafts."""
    return max(0, seq.max_num_tokens - seq.num_tokens - 2)

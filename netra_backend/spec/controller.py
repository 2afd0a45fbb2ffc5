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

_KEEP_ALL = 0.997
"""Of the counts over all sequences per verification."""

_KEEP = 0.95
"""Of a sequence's own counts per verification: it forgets a phase within some 20 steps."""

_KEEP_IDLE = 0.98
"""Of a sequence's own counts per step without drafts: what it earned long ago says little about now."""

_PRIOR_TRIALS = 2.0
"""Weight of what is believed before anything was tried: of a position, and of a sequence."""

_FIRST_RATE = 0.8
"""Belief in the first draft of all: too high is found out within a few steps, too low would not be."""

_EXPLORE_SHARE = 0.006
"""Share of the time that may be lost by trying other lengths than the best."""

_ITEMS_PER_CHOICE = 64
"""More sequences are given new lengths in every second, third, ... step."""

_COLLAPSE_MISSES = 16
_HEALTHY_RATE = 0.3
"""A first draft that was right this often and then misses so often in a row points to a broken draft cache."""


class Acceptance:
    """Over all sequences: how often a draft at each position was tried (those before were right), and failed."""

    def __init__(self, num_positions: int) -> None:
        self.tried = [0.0] * num_positions
        self.failed = [0.0] * num_positions

    def hazards(self) -> list[float]:
        """Chance that a tried draft is wrong; a position of which little is known takes after the one before."""
        hazard = 1.0 - _FIRST_RATE
        hazards = []
        for failed, tried in zip(self.failed, self.tried, strict=True):
            hazard = (failed + _PRIOR_TRIALS * hazard) / (tried + _PRIOR_TRIALS)
            hazards.append(hazard)
        return hazards


class _Tally:
    """Verifications by how many drafts they had, how many of these were tried, and how many accepted."""

    __slots__ = ("accepted", "drafted", "tried")

    def __init__(self, num_positions: int) -> None:
        self.drafted = [0] * (num_positions + 1)
        self.tried = [0] * (num_positions + 1)
        self.accepted = [0] * (num_positions + 1)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.drafted[num_drafts] += 1
        self.tried[min(num_drafts, num_accepted + 1)] += 1
        self.accepted[num_accepted] += 1

    def beyond(self, position: int) -> tuple[int, int, int]:
        """Drafts at a position: verified, tried (the ones before were right), accepted."""
        return (
            sum(self.drafted[position + 1 :]),
            sum(self.tried[position + 1 :]),
            sum(self.accepted[position + 1 :]),
        )


class _History:
    """What a sequence's drafts earned against what all sequences would have led to expect, and its length.

    tried, failed, expected: decayed counts of drafts, of failures, and of failures among so many of all
    sequences. health: decayed share of right first drafts. misses: verifications in a row that failed.
    """

    __slots__ = ("expected", "failed", "health", "length", "misses", "tried", "was_healthy",
                 "was_reset", "was_right")  # fmt: skip

    def __init__(self) -> None:
        self.tried = self.failed = self.expected = self.health = 0.0
        self.length = 1
        self.misses = 0
        self.was_right = self.was_healthy = self.was_reset = False

    def add(self, num_tried: int, has_failed: bool, expected: float) -> None:
        self.tried = self.tried * _KEEP + num_tried
        self.failed = self.failed * _KEEP + has_failed
        self.expected = self.expected * _KEEP + expected

    def fade(self, num_steps: int) -> None:
        """Forget a little for every step without drafts."""
        keep = _KEEP_IDLE**num_steps
        self.tried *= keep
        self.failed *= keep
        self.expected *= keep

    def worths(self, odds: list[float]) -> list[float]:
        """Chance that a draft at each position is reached and accepted, from the odds of failing over all.

        The sequence's own odds are those times one factor, which all its positions share.
        """
        factor = 1.0
        if self.tried:
            usual = self.expected / self.tried
            own = (self.failed + _PRIOR_TRIALS * usual) / (self.tried + _PRIOR_TRIALS)
            factor = own * (1.0 - usual) / (usual * (1.0 - own))
        worths = []
        survival = 1.0
        for odd in odds:
            survival /= 1.0 + factor * odd
            worths.append(survival)
        return worths


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
        self._all = Acceptance(max_drafts)
        self._expected = [0.0] * (max_drafts + 1)
        self._since = _Tally(max_drafts)
        self._histories: dict[int, _History] = {}
        self._num_steps = 0
        self._num_choices = 0
        self._changes = (1, -1, max_drafts, -max_drafts)
        self._credits = [0.0] * len(self._changes)

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
        self._take_tally()
        items = [item for item in batch.scheduled if item.num_logits]
        if self._cost_model is None:
            for item in items:
                item.num_wanted_drafts = min(self.max_drafts, _useful_drafts(item.seq))
            return
        if not items:
            return
        self._num_steps += 1
        # Choosing costs 2 ms for 256 sequences; between two choices each keeps its length.
        stride = -(-len(items) // _ITEMS_PER_CHOICE)
        changes = None
        if self._num_steps % stride == 0:
            changes = self._choose(batch, items, stride, self._cost_model)
        num_rows = len(items)
        for index, item in enumerate(items):
            history = self._history(item.seq)
            length = changes[index] if changes else history.length
            if not length and history.was_right:
                length, history.was_right = 1, False
            length = min(length, _useful_drafts(item.seq), self._max_rows - num_rows)
            item.num_wanted_drafts = length
            num_rows += length
        if self._metrics is not None:
            self._metrics.draft_length.value = num_rows / len(items) - 1.0

    def _take_tally(self) -> None:
        """Enter the verifications since the last call into the counts of all sequences and the metrics."""
        tally, self._since = self._since, _Tally(self.max_drafts)
        keep = _KEEP_ALL ** sum(tally.drafted)
        for position in range(self.max_drafts):
            drafted, tried, accepted = tally.beyond(position)
            if not drafted:
                break
            self._all.tried[position] = self._all.tried[position] * keep + tried
            self._all.failed[position] = self._all.failed[position] * keep + tried - accepted
            if self._metrics is not None:
                self._metrics.drafts_at[position].value += drafted
                self._metrics.accepted_at[position].value += accepted

    def _choose(
        self,
        batch: Batch,
        items: list[ScheduledSequence],
        num_steps: int,
        cost_model: CostModel,
    ) -> list[int] | None:
        """Set the length of every sequence for the next `num_steps` steps; other lengths to try for once."""
        hazards = self._all.hazards()
        for position, hazard in enumerate(hazards):
            self._expected[position + 1] = self._expected[position] + hazard
        odds = [hazard / (1.0 - hazard) for hazard in hazards]
        histories = [self._history(item.seq) for item in items]
        worths = [history.worths(odds) for history in histories]
        shape = StepShape.of(batch)
        shape.context_tokens = sum(item.seq.num_tokens for item in items)
        longest, lowest_bin = self._best_cut(shape, worths, cost_model)
        for history, row in zip(histories, worths, strict=True):
            history.length = sum(int(worth * _BINS) >= lowest_bin for worth in row[:longest])
            if not history.length:
                history.fade(num_steps)
        lengths = [history.length for history in histories]
        return self._explore(shape, worths, lengths, num_steps, cost_model)

    def _best_cut(
        self, shape: StepShape, worths: list[list[float]], cost_model: CostModel
    ) -> tuple[int, int]:
        """Longest draft and least worth, as a bin, of the choice with the highest expected rate."""
        num_items = len(worths)
        counts = [0] * (_BINS + 1)
        sums = [0.0] * (_BINS + 1)
        best_rate, best = 0.0, (0, _BINS + 1)
        for length in range(self.max_drafts + 1):
            if length:
                for row in worths:
                    worth = row[length - 1]
                    counts[int(worth * _BINS)] += 1
                    sums[int(worth * _BINS)] += worth
            num_rows, expected = num_items, float(num_items)
            for lowest in range(_BINS, -1, -1):
                if length and not counts[lowest]:
                    continue
                num_rows += counts[lowest]
                expected += sums[lowest]
                if num_rows > self._max_rows:
                    break
                rate = expected / _seconds(shape, num_items, num_rows, length, cost_model)
                if rate > best_rate:
                    best_rate, best = rate, (length, lowest)
                if not length:
                    break
        return best

    def _explore(
        self,
        shape: StepShape,
        worths: list[list[float]],
        lengths: list[int],
        num_steps: int,
        cost_model: CostModel,
    ) -> list[int] | None:
        """Other lengths for one step, when what that costs was saved up; None otherwise.

        Without it, costs of lengths that are not chosen and acceptance of drafts that are not made would
        stay what they were once believed to be.
        """
        turn = self._num_choices % len(self._changes)
        self._num_choices += 1
        change = self._changes[turn]
        others = [min(max(length + change, 0), self.max_drafts) for length in lengths]
        num_items = len(lengths)
        num_rows = num_items + sum(others)
        if others == lengths or num_rows > self._max_rows:
            return None
        usual_rows, usual_passes = num_items + sum(lengths), max(lengths)
        usual = _seconds(shape, num_items, usual_rows, usual_passes, cost_model)
        seconds = _seconds(shape, num_items, num_rows, max(others), cost_model)
        gain = num_items + sum(sum(row[:n]) for row, n in zip(worths, others, strict=True))
        usual_gain = num_items + sum(sum(row[:n]) for row, n in zip(worths, lengths, strict=True))
        loss = seconds / usual - gain / usual_gain
        # What is not known yet is worth more: some five steps in all.
        self._credits[turn] += _EXPLORE_SHARE * num_steps + 1.0 / self._num_choices
        if self._credits[turn] < loss:
            return None
        self._credits[turn] = 0.0
        return others

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verification of at least one draft."""
        history = self._history(seq)
        num_tried = min(num_drafts, num_accepted + 1)
        history.add(num_tried, num_accepted < num_drafts, self._expected[num_tried])
        self._since.add(num_drafts, num_accepted)
        history.was_right = num_accepted > 0
        history.misses = 0 if num_accepted else history.misses + 1
        if self._has_cache:
            self._notice_collapse(seq, history)

    def _notice_collapse(self, seq: Sequence, history: _History) -> None:
        history.health += 0.1 * (history.was_right - history.health)
        history.was_healthy |= history.health > _HEALTHY_RATE
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
            history = self._histories[seq.seq_id] = _History()
        return history


def _seconds(
    shape: StepShape, num_items: int, num_rows: int, longest: int, cost_model: CostModel
) -> float:
    """Of a step that verifies and drafts `num_rows - num_items` drafts; changes `shape`."""
    shape.decode_rows = shape.logits_rows = num_rows
    shape.draft_passes, shape.draft_rows = longest, num_rows - num_items
    return max(cost_model.decode_seconds(shape), 1e-9)


def _useful_drafts(seq: Sequence) -> int:
    """This step gains at least one token, and the next one beside its drafts."""
    return max(0, seq.max_num_tokens - seq.num_tokens - 2)

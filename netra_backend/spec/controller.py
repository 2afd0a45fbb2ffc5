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
"""Weight of what others earned at a position, and of the position before where nothing is known."""

_FIRST_RATE = 0.6

_FADE = 0.97
"""Of a sequence's own counts per step without drafts: what it earned long ago says little about now."""

_PROBE_SHARE = 0.008
"""Share of the time that trying one draft each on sequences without drafts may take."""

_PROBE_STEPS = (8, 256)
"""Fewest and most steps between two such tries."""

_ITEMS_PER_CHOICE = 64
"""More sequences are given new lengths in every second, third, ... step."""

_VARIATION_CHOICES = (4, 64)
_VARIATION_SHARE = 0.004
"""Choices between two at which every sequence gets one other length, at first and later, and the share of the time
that this may take later: or the cost of lengths that were never tried would stay a guess."""

_COLLAPSE_MISSES = 16
_HEALTHY_RATE = 0.3
"""A first draft that was right this often and then misses so often in a row points to a broken draft cache."""


class Acceptance:
    """Chance of each draft position, given that the ones before were accepted, from decayed counts."""

    __slots__ = ("passed", "tried")

    def __init__(self, num_positions: int) -> None:
        self.tried = [0.0] * num_positions
        self.passed = [0.0] * num_positions

    def add(self, num_drafts: int, num_accepted: int, keep: float) -> None:
        """Count a verification: positions behind the first wrong one were not tried."""
        for position in range(min(num_drafts, num_accepted + 1)):
            self.tried[position] = self.tried[position] * keep + 1.0
            self.passed[position] = self.passed[position] * keep + (position < num_accepted)

    def fade(self, num_steps: int) -> None:
        """Forget a little for every step without drafts."""
        keep = _FADE**num_steps
        self.tried = [count * keep for count in self.tried]
        self.passed = [count * keep for count in self.passed]

    def rates(self) -> list[float]:
        """The chances by themselves; a position of which little is known takes after the one before it."""
        rate = _FIRST_RATE
        rates = []
        for passed, tried in zip(self.passed, self.tried, strict=True):
            rate = (passed + _PRIOR_TRIALS * rate) / (tried + _PRIOR_TRIALS)
            rates.append(rate)
        return rates

    def worths(self, prior_rates: list[float]) -> list[float]:
        """Chance that a draft at each position is reached and accepted."""
        worths = []
        survival = 1.0
        for passed, tried, prior in zip(self.passed, self.tried, prior_rates, strict=True):
            survival *= (passed + _PRIOR_TRIALS * prior) / (tried + _PRIOR_TRIALS)
            worths.append(survival)
        return worths


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
    """What a sequence's drafts earned, and the length it has; `misses`: verifications in a row that failed."""

    __slots__ = ("acceptance", "length", "misses", "was_healthy", "was_reset", "was_right")

    def __init__(self, num_positions: int) -> None:
        self.acceptance = Acceptance(num_positions)
        self.length = 1
        self.misses = 0
        self.was_right = False
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
        self._all = Acceptance(max_drafts)
        self._since = _Tally(max_drafts)
        self._histories: dict[int, _History] = {}
        self._num_steps = 0
        self._num_choices = 0
        self._num_variations = 0
        self._next_variation = _VARIATION_CHOICES[0]
        self._next_probe = _PROBE_STEPS[0]

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
        stride = 1 + len(items) // _ITEMS_PER_CHOICE
        if self._num_steps % stride == 0:
            self._choose(batch, items, stride, self._cost_model)
        for item in items:
            length = self._history(item.seq).length
            item.num_wanted_drafts = min(length, _useful_drafts(item.seq))
        self._probe(batch, items, self._cost_model)
        if self._metrics is not None:
            chosen = sum(item.num_wanted_drafts for item in items)
            self._metrics.draft_length.value = chosen / len(items)

    def _take_tally(self) -> None:
        """Enter the verifications since the last call into the counts of all sequences and the metrics."""
        tally, self._since = self._since, _Tally(self.max_drafts)
        keep = _KEEP_ALL ** sum(tally.drafted)
        for position in range(self.max_drafts):
            drafted, tried, accepted = tally.beyond(position)
            if not drafted:
                break
            self._all.tried[position] = self._all.tried[position] * keep + tried
            self._all.passed[position] = self._all.passed[position] * keep + accepted
            if self._metrics is not None:
                self._metrics.drafts_at[position].value += drafted
                self._metrics.accepted_at[position].value += accepted

    def _choose(
        self,
        batch: Batch,
        items: list[ScheduledSequence],
        num_steps: int,
        cost_model: CostModel,
    ) -> None:
        """Set the length of every sequence for the next `num_steps` steps."""
        prior = self._all.rates()
        histories = [self._history(item.seq) for item in items]
        worths = [history.acceptance.worths(prior) for history in histories]
        longest, lowest_bin = self._best_cut(batch, items, worths, cost_model)
        self._num_choices += 1
        if self._num_choices >= self._next_variation:
            longest, lowest_bin = self._variation(batch, items, cost_model), 0
        for history, row in zip(histories, worths, strict=True):
            history.length = sum(int(worth * _BINS) >= lowest_bin for worth in row[:longest])
            if not history.length:
                history.acceptance.fade(num_steps)

    def _variation(
        self, batch: Batch, items: list[ScheduledSequence], cost_model: CostModel
    ) -> int:
        """A length to try for a change; the dearer it is, the longer until the next."""
        lengths = (self.max_drafts, 0, (self.max_drafts + 1) // 2, 1)
        length = lengths[self._num_variations % len(lengths)]
        length = min(length, (self._max_rows - len(items)) // len(items))
        shape = StepShape.of(batch)
        usual = cost_model.seconds(shape)
        shape.decode_rows = shape.logits_rows = len(items) * (1 + length)
        shape.draft_passes, shape.draft_rows = length, len(items) * length
        cost = cost_model.seconds(shape) / max(usual, 1e-9) - 1.0
        pause = max(_VARIATION_CHOICES[1], int(cost / _VARIATION_SHARE))
        first = _VARIATION_CHOICES[0] << min(self._num_variations, 20)
        self._next_variation = self._num_choices + min(pause, first)
        self._num_variations += 1
        return length

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

    def _probe(self, batch: Batch, items: list[ScheduledSequence], cost_model: CostModel) -> None:
        """Let sequences without drafts try one: those whose last one was right, now and then all."""
        is_due = self._num_steps >= self._next_probe
        without = StepShape.of(batch) if is_due else None
        num_rows = sum(item.num_wanted_drafts + 1 for item in items)
        num_tried = 0
        for item in items:
            if item.num_wanted_drafts or not (is_due or self._history(item.seq).was_right):
                continue
            if num_rows < self._max_rows and _useful_drafts(item.seq):
                item.num_wanted_drafts = 1
                self._history(item.seq).was_right = False
                num_rows += 1
                num_tried += 1
        if without is not None:
            tried = StepShape.of(batch)
            tried.decode_rows += num_tried
            tried.logits_rows += num_tried
            cost = cost_model.seconds(tried) / max(cost_model.seconds(without), 1e-9) - 1.0
            fewest, most = _PROBE_STEPS
            self._next_probe = self._num_steps + min(most, max(fewest, int(cost / _PROBE_SHARE)))

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verification of at least one draft."""
        history = self._history(seq)
        history.acceptance.add(num_drafts, num_accepted, _KEEP)
        self._since.add(num_drafts, num_accepted)
        history.was_right = num_accepted > 0
        history.misses = 0 if num_accepted else history.misses + 1
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

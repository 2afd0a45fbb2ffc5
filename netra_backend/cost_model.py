"""CostModel: how long a step would take, from what it computes and reads.

Knows no hardware: a linear model whose weights are learned from measured steps. Weights are never
negative, so more work never looks cheaper. Asked by the scheduler (chunk size, order of prompts)
and by the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from netra_backend.batch import Batch
from netra_backend.config import ModelConfig

_NUM_WEIGHTS = 9
_NO_LIMIT = 2**30

_BUCKETS_PER_OCTAVE = 8
_NUM_BUCKETS = 1 + 20 * _BUCKETS_PER_OCTAVE
"""Counts of rows, up to 2^20, whose prediction is corrected together."""

_LARGEST_CORRECTION = 1.3
_SLOWEST_CORRECTION = 0.05
"""One step that waited for something else must not make a length look dear for long."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Weights in seconds: per step, per row of decoding, per prompt row, per context token that
    decoding reads, per (query, key) pair of prompt attention, per row of logits, per pass and per
    row of drafting, and per expert (of one layer) that any row chose.

    The defaults only order prompts before the first steps are measured; they are those of
    SmolLM2-135M in float32 on two AVX2 cores, from the bounds in the project's CPU notes (21.5 ms a
    step, 575 prompt tokens/s).
    """

    step: float = 20e-3
    decode_row: float = 3e-3
    prompt_row: float = 1.6e-3
    context_token: float = 2e-6
    attention_pair: float = 4e-7
    logits_row: float = 0.4e-3
    draft_pass: float = 0.5e-3
    draft_row: float = 0.05e-3
    expert: float = 0.05e-3

    def weights(self) -> list[float]:
        """The weights in the order of the fields."""
        return [self.step, self.decode_row, self.prompt_row,
                self.context_token, self.attention_pair, self.logits_row,
                self.draft_pass, self.draft_row, self.expert]  # fmt: skip


@dataclass(slots=True)
class StepShape:
    """What a step does, in the units of StepCost."""

    decode_rows: int = 0
    prompt_rows: int = 0
    context_tokens: int = 0
    attention_pairs: int = 0
    logits_rows: int = 0
    draft_passes: int = 0
    draft_rows: int = 0

    @classmethod
    def of(cls, batch: Batch) -> StepShape:
        """The shape of `batch`, before its outputs are applied."""
        shape = cls()
        logits_rows = decode_rows = context_tokens = draft_rows = draft_passes = 0
        for item in batch.scheduled:
            rows, context = item.num_scheduled_tokens, item.seq.num_computed_tokens
            logits_rows += item.num_logits
            if item.num_wanted_drafts:
                draft_rows += item.num_wanted_drafts
                draft_passes = max(draft_passes, item.num_wanted_drafts)
            if item.is_chunk:
                shape.add_prompt(rows, context)
            else:
                decode_rows += rows
                context_tokens += context + rows
        shape.logits_rows, shape.decode_rows = logits_rows, decode_rows
        shape.context_tokens = context_tokens
        shape.draft_rows, shape.draft_passes = draft_rows, draft_passes
        return shape

    def add_prompt(self, rows: int, context: int) -> None:
        """Add a chunk of `rows` prompt tokens behind `context` computed ones."""
        self.prompt_rows += rows
        self.attention_pairs += rows * context + rows * (rows + 1) // 2

    def features(self, most_passes: int) -> tuple[int, int, int, int, int, int, int, int]:
        """What the weights multiply, but for experts; drafting takes `most_passes` at most."""
        return (1, self.decode_rows, self.prompt_rows,
                self.context_tokens, self.attention_pairs, self.logits_rows,
                min(self.draft_passes, most_passes), self.draft_rows)  # fmt: skip


class CostModel:
    """Least squares on relative errors with exponential forgetting, one sweep of coordinate descent
    per step.

    The normal equations are kept (9 x 9). Each sweep clamps weights at zero and is damped towards
    the weights of before, so what recent steps say nothing about keeps its value. Relative errors
    weigh a 5 ms step like a 500 ms one. A mixture of experts reads the more of `num_experts` the
    more rows there are, as if each row chose `experts_per_token` at random; 0 for a dense model. A drafter that
    `drafts_in_blocks` makes any number of drafts in one pass.
    """

    def __init__(
        self,
        cost: StepCost | None = None,
        memory_steps: int = 1000,
        num_experts: int = 0,
        experts_per_token: int = 0,
        drafts_in_blocks: bool = False,
    ) -> None:
        self._most_passes = 1 if drafts_in_blocks else _NO_LIMIT
        self._num_experts = num_experts
        self._unchosen = 1.0 - experts_per_token / num_experts if num_experts else 1.0
        self._weights = (cost or StepCost()).weights()
        self._keep = 1.0 - 1.0 / memory_steps
        self._gram = [[0.0] * _NUM_WEIGHTS for _ in range(_NUM_WEIGHTS)]
        self._moment = [0.0] * _NUM_WEIGHTS
        # As much as one measured step in which the weight makes a tenth of the time.
        self._damping = [0.01 / max(weight, 1e-9) ** 2 for weight in self._weights]
        self._ratios = [1.0] * _NUM_BUCKETS
        self._num_seen = [0] * _NUM_BUCKETS

    @classmethod
    def of(cls, model: ModelConfig, drafts_in_blocks: bool = False) -> CostModel:
        """One that knows the experts of `model`."""
        return cls(
            num_experts=model.num_experts,
            experts_per_token=model.num_experts_per_tok,
            drafts_in_blocks=drafts_in_blocks,
        )

    def seconds(self, shape: StepShape) -> float:
        """Predicted duration of a step."""
        return sum(w * x for w, x in zip(self._weights, self._features(shape), strict=True))

    def decode_seconds(self, shape: StepShape) -> float:
        """`seconds`, corrected by how far it was off for steps with about as many rows, all of decoding.

        What a line cannot follow is learned there: where products become bound by arithmetic, tiles.
        """
        return self.seconds(shape) * self._ratios[_bucket(shape.decode_rows)]

    def _features(self, shape: StepShape) -> tuple[float, ...]:
        num_rows = shape.decode_rows + shape.prompt_rows
        return (
            *shape.features(self._most_passes),
            self._num_experts * (1.0 - self._unchosen**num_rows),
        )

    def prompt_seconds(self, num_tokens: int, context: int = 0) -> float:
        """What computing `num_tokens` prompt tokens behind `context` adds to steps."""
        row, pair = self._weights[2], self._weights[4]
        return num_tokens * row + num_tokens * (context + num_tokens / 2) * pair

    def prompt_rows_within(self, seconds: float, context: int) -> int:
        """How many prompt rows behind `context` fit into `seconds`."""
        row, pair = self._weights[2], self._weights[4]
        per_row = row + context * pair
        # Root of per_row * n + pair / 2 * n^2 = seconds, in the form that is stable for a small
        # pair weight.
        root = (per_row * per_row + 2.0 * pair * max(seconds, 0.0)) ** 0.5
        return int(2.0 * max(seconds, 0.0) / max(per_row + root, 1e-12))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a measured step."""
        if seconds <= 0.0:
            return
        features = [x / seconds for x in self._features(shape)]
        for i, x in enumerate(features):
            row = self._gram[i]
            for j, y in enumerate(features):
                row[j] = self._keep * row[j] + x * y
            self._moment[i] = self._keep * self._moment[i] + x
        self._descend()
        if shape.decode_rows and not shape.prompt_rows:
            self._correct(shape, seconds)

    def _correct(self, shape: StepShape, seconds: float) -> None:
        bucket = _bucket(shape.decode_rows)
        self._num_seen[bucket] += 1
        share = max(_SLOWEST_CORRECTION, 1.0 / (1 + self._num_seen[bucket]))
        ratio = seconds / max(self.seconds(shape), 1e-9)
        ratio = min(max(ratio, 1.0 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
        self._ratios[bucket] += share * (ratio - self._ratios[bucket])

    def _descend(self) -> None:
        weights = self._weights
        for i, row in enumerate(self._gram):
            predicted = sum(a * w for a, w in zip(row, weights, strict=True))
            step = (self._moment[i] - predicted) / (row[i] + self._damping[i])
            weights[i] = max(0.0, weights[i] + step)


def _bucket(num_rows: int) -> int:
    return min(int(_BUCKETS_PER_OCTAVE * log2(num_rows)), _NUM_BUCKETS - 1)

"""Simulator: SimRunner, a Runner without a model, on a virtual clock.

The same Engine and Scheduler over a CostModel: a step lasts as long as the model says and its
tokens are a function of (seed, position), so any schedule must give the same tokens. Knows no
storage and no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netra_backend.batch import Batch, ScheduledSequence, SequenceOutput, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel, StepCost, StepShape
from netra_backend.engine import Engine
from netra_backend.metrics import Metrics
from netra_backend.request import SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import Sequence

if TYPE_CHECKING:
    from netra_backend.tokenizer import Detokenizer, Tokenizer

_MASK = 2**64 - 1


class VirtualClock:
    """Seconds that pass only when someone says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


@dataclass(frozen=True, slots=True)
class SimModel:
    """What the simulated model says. `num_drafts` are proposed per step, each right with
    `acceptance`."""

    vocab_size: int = 1000
    eos_token_ids: frozenset[int] = frozenset()
    num_drafts: int = 0
    acceptance: float = 0.0

    def token(self, seq: Sequence, position: int) -> int:
        """The token at an absolute position of `seq`: hashed, and no end before min_tokens."""
        params = seq.request.params
        token = _hash(seq.seed, position) % self.vocab_size
        may_end = position - seq.num_prompt_tokens >= params.min_tokens and not params.ignore_eos
        while token in self.eos_token_ids and not may_end:
            token = (token + 1) % self.vocab_size
        return token

    def drafts(self, seq: Sequence, position: int) -> list[int]:
        """Guesses for the positions from `position` on."""
        guesses = []
        for at in range(position, position + self.num_drafts):
            wrong = _hash(~seq.seed & _MASK, at) >= self.acceptance * 2**64
            guesses.append((self.token(seq, at) + wrong) % self.vocab_size)
        return guesses


@dataclass(frozen=True, slots=True)
class SimStep:
    """A step that ends when someone waits for it."""

    output: StepOutput
    sleep: Callable[[float], None]

    def wait(self) -> StepOutput:
        """Let the step's time pass."""
        self.sleep(self.output.seconds)
        return self.output


class SimRunner:
    """Runs steps in virtual time, or in real time with `sleep=time.sleep`."""

    def __init__(
        self, model: SimModel, cost_model: CostModel, sleep: Callable[[float], None]
    ) -> None:
        self._model = model
        self._cost_model = cost_model
        self._sleep = sleep

    def launch(self, batch: Batch) -> SimStep:
        """Compute what each sequence gains and how long that takes."""
        outputs = [self._run(item) for item in batch.scheduled]
        seconds = self._cost_model.seconds(StepShape.of(batch))
        return SimStep(StepOutput(outputs, seconds), self._sleep)

    def _run(self, item: ScheduledSequence) -> SequenceOutput:
        if item.num_logits == 0:
            return SequenceOutput()
        position = item.seq.num_tokens
        tokens = [self._model.token(item.seq, position)]
        for draft in item.draft_token_ids:
            if draft != tokens[-1]:
                break
            tokens.append(self._model.token(item.seq, position + len(tokens)))
        drafts = self._model.drafts(item.seq, position + len(tokens))
        return SequenceOutput(tokens, len(tokens) - 1, [], drafts)


def simulated_engine(
    config: EngineConfig,
    tokenizer: Tokenizer,
    new_detokenizer: Callable[[SamplingParams], Detokenizer],
    *,
    num_pages: int,
    max_model_len: int,
    model: SimModel,
    cost: StepCost,
    clock: VirtualClock | None = None,
) -> Engine:
    """An engine over a SimRunner; without a `clock` it runs in real time, so steps sleep."""
    now: Callable[[], float] = clock if clock is not None else time.monotonic
    sleep = clock.advance if clock is not None else time.sleep
    metrics = Metrics(max_model_len)
    scheduler = Scheduler(
        config,
        BlockManager(num_pages, config.max_num_seqs),
        CostModel(),
        eos_token_ids=model.eos_token_ids,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        clock=now,
        metrics=metrics,
    )
    runner = SimRunner(model, CostModel(cost), sleep)
    return Engine(config, runner, scheduler, tokenizer, new_detokenizer, metrics, now)


def _hash(seed: int, position: int) -> int:
    """splitmix64 of both: uniform in [0, 2^64)."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

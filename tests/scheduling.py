"""What the scheduler tests share: small schedulers, requests and sequences, and steps by hand."""

from __future__ import annotations

from netra_backend.batch import Batch, SequenceOutput, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel
from netra_backend.metrics import Metrics
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import Sequence
from netra_backend.simulator import VirtualClock

EOS = 2


def scheduler(
    num_pages: int = 100, clock: VirtualClock | None = None, **knobs: object
) -> Scheduler:
    """A scheduler without an engine: answers of up to 5,000 tokens, EOS ends them."""
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
    """A request for `num_prompt` tokens of prompt."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(request_id, (7,) * num_prompt, sampling, arrival, priority=priority)


def sequence(num_prompt: int, num_computed: int = 0, seq_id: int = 0, **params: object) -> Sequence:
    """A sequence that no scheduler has seen."""
    made = request(str(seq_id), num_prompt, **params)
    seq = Sequence(seq_id, made, [7] * num_prompt, num_prompt, 0, num_computed_tokens=num_computed)
    seq.max_num_tokens = num_prompt + made.params.max_tokens
    seq.end_token_ids = frozenset({EOS})
    return seq


def rows(batch: Batch | None) -> dict[str, int]:
    """How many rows each request has in a batch."""
    assert batch is not None
    return {item.seq.request.request_id: item.num_scheduled_tokens for item in batch.scheduled}


def answer(sched: Scheduler, batch: Batch, token: int = 9) -> None:
    """End a step: each sequence that has logits gains `token`."""
    outputs = [SequenceOutput([token] if item.num_logits else []) for item in batch.scheduled]
    sched.update(batch, StepOutput(outputs, 0.01))
    sched.check()


def step(sched: Scheduler, token: int = 9) -> dict[str, int]:
    """Run a step; returns its rows."""
    batch = sched.schedule()
    assert batch is not None
    answer(sched, batch, token)
    return rows(batch)


def go_on(sched: Scheduler) -> bool:
    """Run a step if there is one."""
    batch = sched.schedule()
    if batch is None:
        return False
    answer(sched, batch)
    return True

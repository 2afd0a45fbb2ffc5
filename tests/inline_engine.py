"""Runs requests through the real Scheduler and ModelRunner in the calling thread, and the references to hold
them to. Tests decide what is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from netra_backend.batch import Batch, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel
from netra_backend.metrics import Metrics
from netra_backend.model_runner import ModelRunner
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.spec.controller import DraftController


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly `num_tokens`, each the most likely one."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def make_runner(checkpoint: Path, **knobs: object) -> ModelRunner:
    """A runner on one CPU thread with a small cache."""
    defaults: dict[str, object] = {
        "device": "cpu", "num_threads": 1, "kv_cache_memory": "96MiB", "max_num_seqs": 16,
    }  # fmt: skip
    config = EngineConfig(checkpoint=str(checkpoint), **(defaults | knobs))  # type: ignore[arg-type]
    return ModelRunner(config, checkpoint, frozenset())


@dataclass
class Run:
    """What a schedule gave: output tokens per request, and what happened on the way."""

    token_ids: list[list[int]]
    num_steps: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    draft_lens: set[int] = field(default_factory=set)


def run(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    budget: int = 512,
    num_pages: int = 0,
    max_num_seqs: int = 16,
    overcommit: bool = False,
    num_drafts: int = 0,
    at_step: Callable[[int, Scheduler], None] = lambda _number, _scheduler: None,
    after: Callable[[Batch, StepOutput], None] = lambda _batch, _output: None,
    **knobs: object,
) -> Run:
    """Run all prompts at once to their ends. With few `num_pages` and `overcommit`, which admits without
    looking at the memory that answers will need, sequences are preempted.

    `at_step` may add and abort requests before each step; `after` sees each step's output before it is
    applied. Pages, slots and queues are checked after every step.
    """
    knobs = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, **knobs}
    metrics = Metrics(runner.plan.max_model_len)
    plan = runner.plan
    blocks = BlockManager(
        num_pages or plan.num_pages, max_num_seqs, num_opening_pages=plan.num_opening_pages
    )
    scheduler = Scheduler(
        EngineConfig(**knobs),  # type: ignore[arg-type]
        blocks,
        CostModel(),
        eos_token_ids=frozenset(),
        max_model_len=runner.plan.max_model_len,
        vocab_size=runner.model_config.vocab_size,
        clock=time.monotonic,
        metrics=metrics,
        drafts=DraftController(num_drafts) if num_drafts else None,
    )
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    sequences = [
        scheduler.add(Request(f"r{i}", tuple(prompt), param, arrival_time=0.0))
        for i, (prompt, param) in enumerate(zip(prompts, each, strict=True))
    ]
    if overcommit:
        scheduler._forecast.fits = lambda *_: True  # type: ignore[method-assign]
    result = Run([])
    stale = list(range(256))  # ids that an earlier run on the same runner may have used
    while True:
        at_step(result.num_steps, scheduler)
        batch = scheduler.schedule()
        if batch is None:
            break
        batch.freed_seq_ids += stale
        stale = []
        result.num_steps += 1
        result.batch_sizes.append(len(batch.scheduled))
        result.draft_lens |= {len(item.draft_token_ids) for item in batch.scheduled}
        output = runner.launch(batch).wait()
        after(batch, output)
        scheduler.update(batch, output)
        scheduler.check()
    result.token_ids = [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]
    result.num_preemptions = sum(seq.num_preemptions for seq in sequences)
    result.num_draft_tokens = metrics.draft_tokens.value
    result.num_accepted_tokens = metrics.accepted_tokens.value
    assert blocks.num_used_pages == 0
    assert blocks.num_used_slots == 0
    return result


class Reference:
    """transformers' own model in float32, greedy."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            use_cache=True,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths, none starting like another."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]

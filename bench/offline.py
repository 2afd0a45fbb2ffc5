"""Measures the engine alone, without a server: a burst of users, each with one prompt, one answer.

    python bench/offline.py --checkpoint DIR --users 8 --input-len 128 --output-len 64 --json FILE

All requests are added at once and the steps run inline, greedy, with forced answer lengths. Times
are taken where a client would see them: when an output leaves the engine. Each repeat has prompts
of its own, so a prefix cache finds nothing between them. Knows only the engine's public methods.
"""

from __future__ import annotations

import os

from netra_backend.openmp import SPIN_COUNT

# Read when OpenMP starts, which importing torch does.
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from tqdm import tqdm  # type: ignore[import-untyped]

import machine
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import NetraError
from netra_backend.request import Request, RequestOutput, SamplingParams
from report import Metrics, Result, Row, medians, rows_table
from window import Burst
from workload import Lengths, Prompt, PromptMaker, standard_library

_WARMUP_OUTPUT_LEN = 8
_IDLE_SECONDS = 30.0


class SteppedEngine(Protocol):
    """The part of Engine that is measured."""

    outputs: queue.SimpleQueue[RequestOutput]

    def add(self, request: Request) -> None: ...
    def step(self) -> bool: ...


@dataclass(slots=True)
class Answer:
    """What came back for one request; times on the clock of the run, in seconds."""

    first_time: float = 0.0
    last_time: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    final: RequestOutput | None = None


class Collector:
    """Takes outputs as they leave the engine, in a thread of its own, and notes when."""

    def __init__(
        self, outputs: queue.SimpleQueue[RequestOutput], request_ids: Sequence[str]
    ) -> None:
        self.answers = {request_id: Answer() for request_id in request_ids}
        self.num_tokens = 0
        self.finished = threading.Event()
        self._outputs = outputs
        threading.Thread(target=self._run, name="collector", daemon=True).start()

    def _run(self) -> None:
        num_open = len(self.answers)
        while num_open:
            output = self._outputs.get()
            now = time.perf_counter()
            answer = self.answers[output.request_id]
            if output.token_ids:
                answer.first_time = answer.first_time or now
                answer.last_time = now
                answer.token_ids += output.token_ids
                self.num_tokens += len(output.token_ids)
            if output.finished:
                answer.final = output
                num_open -= 1
        self.finished.set()


@dataclass(frozen=True, slots=True)
class Run:
    """One burst: its answers in the order of the prompts, its start and end, its steps, its CPU."""

    answers: list[Answer]
    start_time: float
    num_steps: int
    cpu: machine.CpuUse


def run_burst(
    engine: SteppedEngine,
    prompts: Sequence[Prompt],
    output_len: int,
    label: str,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Run:
    """Add all prompts at once and step until every answer is complete.

    Raises RuntimeError if a request fails or the engine stops producing.
    """
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    ids = [f"{label}-{index}" for index in range(len(prompts))]
    collector = Collector(engine.outputs, ids)
    meter = machine.CpuMeter()
    start = time.perf_counter()
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add(Request(request_id, prompt.token_ids, params, arrival_time=time.monotonic()))
    num_steps = reported = 0
    idle_since: float | None = None
    while not collector.finished.is_set():
        if engine.step():
            num_steps += 1
            idle_since = None
        elif collector.finished.wait(0.001):
            break
        else:
            idle_since = idle_since or time.perf_counter()
            if time.perf_counter() - idle_since > _IDLE_SECONDS:
                raise RuntimeError(f"the engine has nothing to do, but {label} is not finished")
        seen = collector.num_tokens  # the collector's thread goes on counting
        on_tokens(seen - reported)
        reported = seen
    on_tokens(collector.num_tokens - reported)
    run = Run([collector.answers[request_id] for request_id in ids], start, num_steps, meter.stop())
    check(run, output_len)
    return run


def check(run: Run, output_len: int) -> None:
    """Raises RuntimeError unless every request answered with exactly `output_len` tokens."""
    for answer in run.answers:
        assert answer.final is not None
        if answer.final.error is not None:
            raise RuntimeError(f"{answer.final.request_id} failed: {answer.final.error}")
        if len(answer.token_ids) != output_len:
            raise RuntimeError(f"{len(answer.token_ids)} tokens came back, expected {output_len}")


def metrics(run: Run, prompts: Sequence[Prompt]) -> Metrics:
    """The numbers of one burst."""
    num_prompt = [len(prompt.token_ids) for prompt in prompts]
    num_output = [len(answer.token_ids) for answer in run.answers]
    burst = Burst(
        [answer.first_time - run.start_time for answer in run.answers],
        [answer.last_time - run.start_time for answer in run.answers],
        num_prompt,
        num_output,
    )
    finals = [answer.final for answer in run.answers if answer.final is not None]
    num_drafts = sum(final.num_draft_tokens for final in finals)
    num_accepted = sum(final.num_accepted_tokens for final in finals)
    return burst.metrics() | {
        "num_steps": run.num_steps,
        "tokens_per_step": (sum(num_prompt) + sum(num_output) - len(prompts)) / run.num_steps,
        "num_draft_tokens": num_drafts,
        "acceptance": num_accepted / num_drafts if num_drafts else None,
        "num_cached_tokens": sum(final.num_cached_tokens for final in finals),
        "own_cores": run.cpu.own_cores,
        "other_cores": run.cpu.other_cores,
    }


def verifications(engine: Engine) -> tuple[int, int]:
    """How often drafts were verified so far, and how many were accepted."""
    return engine.metrics.drafts_at[0].value, engine.metrics.accepted_tokens.value


def acceptance(before: tuple[int, int], after: tuple[int, int]) -> Metrics:
    """Tokens per verification: the accepted drafts and one more; None without drafts."""
    count = after[0] - before[0]
    return {"acceptance_length": 1 + (after[1] - before[1]) / count if count else None}


def measure(engine: Engine, arguments: argparse.Namespace) -> tuple[list[Metrics], str, list[int]]:
    """Warm up, then run the repeats: their metrics, the text's source and a sample of tokens."""
    corpus = standard_library()
    maker = PromptMaker(engine.tokenizer, corpus, arguments.seed, arguments.shared_prefix_len)
    lengths = Lengths(arguments.input_len, arguments.input_len)
    warm_len = min(_WARMUP_OUTPUT_LEN, arguments.output_len)
    total = arguments.users * (
        arguments.warmup * warm_len + arguments.repeats * arguments.output_len
    )
    repeats: list[Metrics] = []
    sample: list[int] = []
    with tqdm(total=total, unit="tok", desc="warm-up", disable=None) as bar:
        for number in range(-arguments.warmup, arguments.repeats):
            prompts = [maker.make(lengths.high) for _ in range(arguments.users)]
            if number < 0:
                run_burst(engine, prompts, warm_len, f"warm-up{number}", bar.update)
                continue
            bar.set_description(f"repeat {number + 1}/{arguments.repeats}")
            before = verifications(engine)
            run = run_burst(engine, prompts, arguments.output_len, f"repeat{number}", bar.update)
            repeats.append(metrics(run, prompts) | acceptance(before, verifications(engine)))
            sample = sample or run.answers[0].token_ids[:16]
    return repeats, corpus.description, sample


def build(arguments: argparse.Namespace) -> Engine:
    """The engine with the knobs of the command line. Raises NetraError."""
    parameters = {
        "checkpoint": str(arguments.checkpoint.expanduser().resolve()),
        "num_threads": str(arguments.num_threads),
        "max_num_seqs": str(max(arguments.users, EngineConfig().max_num_seqs)),
    }
    if arguments.speculation:
        parameters["speculation"] = arguments.speculation
    if arguments.drafter:
        parameters["drafter_checkpoint"] = str(arguments.drafter.expanduser().resolve())
    if arguments.draft_len:
        parameters |= {"num_draft_tokens": str(arguments.draft_len), "adaptive_drafts": "false"}
    parameters |= dict(setting.split("=", 1) for setting in arguments.set)
    return Engine.build(EngineConfig.from_parameters(parameters), Path.cwd())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="bursts before the first repeat")
    parser.add_argument("--num-threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--shared-prefix-len", type=int, default=0, help="tokens all prompts share")
    parser.add_argument(
        "--speculation",
        help="none, ngram, mtp, eagle3, dflash, ngram+mtp ... or auto; default: the knob's",
    )
    parser.add_argument(
        "--drafter", type=Path, help="directory of an EAGLE-3 head or DFlash drafter"
    )
    parser.add_argument("--draft-len", type=int, default=0, help="fixed drafts; 0: the controller")
    parser.add_argument("--name", default="netra", help="name of the row")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a knob")
    arguments = parser.parse_args()
    if any("=" not in setting for setting in arguments.set):
        parser.error("--set takes KEY=VALUE")
    return arguments


def main() -> int:
    """Command line; returns the exit status."""
    arguments = parse_arguments()
    try:
        start = time.perf_counter()
        engine = build(arguments)
        load_seconds = time.perf_counter() - start
        repeats, source, sample = measure(engine, arguments)
        engine.shutdown(drain_seconds=0.0)
    except (NetraError, RuntimeError) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 1
    import torch

    workload = f"{arguments.users} x {arguments.input_len}+{arguments.output_len}"
    conditions = {
        "machine": asdict(machine.describe(torch.__version__)),
        "config": asdict(engine.config)
        | {
            "checkpoint": arguments.checkpoint.name,
            "drafter_checkpoint": arguments.drafter.name if arguments.drafter else "",
        },
        "text": source,
        "seed": arguments.seed,
        "load_seconds": load_seconds,
        "first_token_ids": sample,
    }
    result = Result(
        "offline", [Row(arguments.name, workload, medians(repeats), repeats)], conditions
    )
    print(rows_table(result.rows))
    if arguments.json:
        result.save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

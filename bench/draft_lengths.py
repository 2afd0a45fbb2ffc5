"""Draft lengths on a real checkpoint, in turns: tokens per second off, with fixed lengths, with the controller.

    python bench/draft_lengths.py --checkpoint DIR --users 1,32 --lengths 1,2,4,8 --rounds 3 --json FILE

So many users at any time: each asks again as soon as it is answered (in a burst, the last answers run alone and
their number says more than the step). One engine per mode stays loaded, so the controller keeps what it learned, as a
server does. In a round every mode answers the same prompts, in an order of the round's own, so that what else the machine
does meets all alike. Greedy, forced lengths, no prefix reuse. bench/simulate.py asks the same of a simulated GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

import machine
import offline  # before torch: it says how long OpenMP spins
from netra_backend.engine import Engine
from netra_backend.errors import NetraError
from netra_backend.request import Request, SamplingParams
from report import Metrics, Result, Row, format_value, medians, table
from workload import Prompt, PromptMaker, standard_library

CONTROLLER = "controller"
RATE = "output_tokens_per_second"


@dataclass(slots=True)
class Mode:
    """One way to choose lengths, its engine, and what it measured in the rounds of a number of users."""

    name: str
    engine: offline.SteppedEngine
    repeats: list[Metrics] = field(default_factory=list)


@dataclass(slots=True)
class Stream:
    """Requests of users who ask again once they are answered. First answers differ in length, so that they never
    all end at once.
    """

    engine: offline.SteppedEngine
    prompts: Sequence[Prompt]
    users: int
    output_len: int
    num_asked: int = 0
    num_answered: int = 0
    num_tokens: int = 0
    num_steps: int = 0

    def ask(self) -> None:
        """Add the next prompt. Raises IndexError when there is none."""
        index = self.num_asked
        length = self.output_len
        if index < self.users:
            length = max(1, length * (index + 1) // self.users)
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        ids = self.prompts[index].token_ids
        self.engine.add(Request(str(index), ids, params, arrival_time=time.monotonic()))
        self.num_asked += 1

    def run(self, num_answers: int) -> None:
        """Step until so many were answered, and ask anew for each but the last `users`."""
        while self.num_answered < num_answers:
            self.engine.step()
            self.num_steps += 1
            while not self.engine.outputs.empty():
                output = self.engine.outputs.get()
                self.num_tokens += len(output.token_ids)
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                if output.finished:
                    self.num_answered += 1
                    if self.num_asked < len(self.prompts):
                        self.ask()


def measure_stream(
    engine: offline.SteppedEngine, prompts: Sequence[Prompt], users: int, output_len: int
) -> Metrics:
    """Tokens per second while all users wait for answers: from `users` answers on until only `users` are left."""
    stream = Stream(engine, prompts, users, output_len)
    for _ in range(users):
        stream.ask()
    stream.run(users)
    tokens, steps, start = stream.num_tokens, stream.num_steps, time.perf_counter()
    meter = machine.CpuMeter()
    stream.run(len(prompts) - users)
    seconds = time.perf_counter() - start
    use = meter.stop()
    tokens, steps = stream.num_tokens - tokens, stream.num_steps - steps
    stream.run(len(prompts))
    return {
        RATE: tokens / seconds,
        "num_steps": steps,
        "tokens_per_step": tokens / steps / users,
        "step_ms": 1e3 * seconds / steps,
        "own_cores": use.own_cores,
        "other_cores": use.other_cores,
    }


def build(arguments: argparse.Namespace) -> dict[str, Engine]:
    """Off, every fixed length, and the controller with the longest of them as its limit. Raises NetraError."""
    lengths = [int(text) for text in arguments.lengths.split(",")]
    share = f"kv_cache_memory={0.2 / (len(lengths) + 2):.3f}"
    settings = ["enable_prefix_caching=false", share, *arguments.set]
    shared = vars(arguments) | {"users": max(_users(arguments)), "draft_len": 0, "set": settings}
    limit = f"num_draft_tokens={max(lengths)}"
    choices = {"off": {"speculation": "none", "drafter": None}}
    choices |= {f"k={length}": {"draft_len": length} for length in lengths}
    choices |= {CONTROLLER: {"set": [*settings, limit]}}
    return {
        name: offline.build(argparse.Namespace(**shared | choice))
        for name, choice in tqdm(choices.items(), unit="engine", desc="load", disable=None)
    }


def measure(
    modes: Sequence[Mode], make: Callable[[], Prompt], arguments: argparse.Namespace
) -> list[Row]:
    """A row per number of users and mode; `make` gives a new prompt. The first round warms up."""
    rng = random.Random(arguments.seed)
    rows: list[Row] = []
    total = len(_users(arguments)) * (1 + arguments.rounds) * len(modes)
    with tqdm(total=total, unit="run", disable=None) as bar:
        for users in _users(arguments):
            for number in range(1 + arguments.rounds):
                count = users * (2 + (arguments.answers if number else 1))
                prompts = [make() for _ in range(count)]
                for mode in rng.sample(modes, len(modes)):
                    bar.set_description(f"{users} users, round {number}, {mode.name}")
                    found = measure_stream(mode.engine, prompts, users, arguments.output_len)
                    if number:
                        mode.repeats.append(found)
                    bar.update()
            workload = f"{users} x {arguments.input_len}+{arguments.output_len}"
            for mode in modes:
                rows.append(Row(mode.name, workload, medians(mode.repeats), mode.repeats))
                mode.repeats = []
    return rows


def ratios(rows: list[Row]) -> str:
    """A line per workload: output tokens per second of every mode, and the controller against the best of the others."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    lines = []
    for workload in workloads:
        rates = {row.name: row.metrics[RATE] or 0.0 for row in rows if row.workload == workload}
        best = max(rate for name, rate in rates.items() if name != CONTROLLER)
        line = [workload, *(format_value(rates[name]) for name in names)]
        lines.append([*line, f"{rates[CONTROLLER] / best:.1%}"])
    return table(["users x tokens", *names, "of the best"], lines)


def _users(arguments: argparse.Namespace) -> list[int]:
    return [int(text) for text in arguments.users.split(",")]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--users", default="1,32")
    parser.add_argument("--lengths", default="1,2,4,8", help="fixed ones; the last is the limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=2, help="measured per user and round")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--speculation", default="mtp")
    parser.add_argument(
        "--drafter", type=Path, help="directory of an EAGLE-3 head or DFlash drafter"
    )
    parser.add_argument("--num-threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a knob")
    return parser.parse_args()


def main() -> int:
    """Command line; returns the exit status: 1 if something failed, whatever the figures are."""
    arguments = parse_arguments()
    try:
        engines = build(arguments)
        corpus = standard_library()
        maker = PromptMaker(engines["off"].tokenizer, corpus, arguments.seed)
        modes = [Mode(name, engine) for name, engine in engines.items()]
        rows = measure(modes, lambda: maker.make(arguments.input_len), arguments)
        for engine in engines.values():
            engine.shutdown(drain_seconds=0.0)
    except (NetraError, RuntimeError) as error:
        print(f"draft_lengths: {error}", file=sys.stderr)
        return 1
    import torch

    print(ratios(rows))
    if arguments.json:
        conditions = {
            "machine": asdict(machine.describe(torch.__version__)),
            "arguments": machine.without_paths(vars(arguments)),
            "text": corpus.description,
        }
        Result("draft_lengths", rows, conditions).save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

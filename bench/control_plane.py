"""Measures what a step costs the control plane: schedule + update, without a model and without
torch.

    python bench/control_plane.py [--sequences 256] [--context 40960] [--steps 1000] [--json FILE]

Sequences decode at a long context in virtual time. `decoding` is the plain case; `drafts` verifies
three per sequence; `queue` has 1,000 requests waiting that do not fit; `turnover` ends sequences
and starts new prompts all the time, in chunks. The garbage collector is set as the engine sets it.
CPU time is the thread's own; wall time also has what other processes on the machine took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import machine
from netra_backend.batch import StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel, StepCost
from netra_backend.engine import make_full_collections_rare
from netra_backend.metrics import Metrics
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import PAGE_SIZE
from netra_backend.simulator import SimModel, SimRunner, VirtualClock
from report import Metrics as RowMetrics
from report import Result, Row, format_value, percentile, table

_VOCAB_SIZE = 250_000
_NUM_DRAFTS = 3
_TURNOVER_LEN = 512


@dataclass(slots=True)
class Bench:
    """A scheduler over a simulated model, and the seconds that each of its calls took."""

    scheduler: Scheduler
    runner: SimRunner
    clock: VirtualClock
    schedule_cpu: list[float] = field(default_factory=list)
    update_cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    num_added: int = 0

    def add(self, prompt_len: int, output_len: int) -> None:
        """Queue a request whose answer has exactly `output_len` tokens."""
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        prompt = tuple(range(prompt_len))
        self.num_added += 1
        self.scheduler.add(Request(str(self.num_added), prompt, params, self.clock()))

    def step(self) -> int:
        """Run one step; returns how many sequences ended."""
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        batch = self.scheduler.schedule()
        scheduled, scheduled_cpu = time.perf_counter(), time.thread_time()
        assert batch is not None
        output: StepOutput = self.runner.launch(batch).wait()
        computed, computed_cpu = time.perf_counter(), time.thread_time()
        gained = self.scheduler.update(batch, output)
        self.update_cpu.append(time.thread_time() - computed_cpu)
        self.schedule_cpu.append(scheduled_cpu - begun_cpu)
        self.wall.append(time.perf_counter() - computed + scheduled - begun)
        return sum(seq.finish_reason is not None for seq in gained)


def build(num_sequences: int, num_tokens: int, num_drafts: int, batched_tokens: int) -> Bench:
    """A scheduler with room for `num_sequences` of `num_tokens` each."""
    config = EngineConfig(max_num_seqs=num_sequences, max_num_batched_tokens=batched_tokens)
    clock = VirtualClock()
    scheduler = Scheduler(
        config,
        BlockManager(num_sequences * (num_tokens // PAGE_SIZE), num_sequences),
        CostModel(),
        eos_token_ids=frozenset(),
        max_model_len=num_tokens,
        vocab_size=_VOCAB_SIZE,
        clock=clock,
        metrics=Metrics(num_tokens),
    )
    model = SimModel(_VOCAB_SIZE, num_drafts=num_drafts, acceptance=0.7)
    return Bench(scheduler, SimRunner(model, CostModel(StepCost()), clock.advance), clock)


def fill(bench: Bench, num_sequences: int, context: int, output_len: int) -> None:
    """Bring all sequences to decoding."""
    for _ in range(num_sequences):
        bench.add(context, output_len)
    while bench.step() == 0 and bench.scheduler.num_waiting:
        pass
    for _ in range(10):
        bench.step()


def decoding(arguments: argparse.Namespace, num_drafts: int = 0, num_waiting: int = 0) -> Bench:
    """All sequences decode."""
    output_len = (arguments.steps + 1000) * (1 + num_drafts)
    num_tokens = arguments.context + output_len
    batched_tokens = max(8192, 8 * arguments.sequences)
    bench = build(arguments.sequences, num_tokens, num_drafts, batched_tokens)
    fill(bench, arguments.sequences, arguments.context, output_len)
    for _ in range(num_waiting):
        bench.add(arguments.context, output_len)
    return bench


def turnover(arguments: argparse.Namespace) -> Bench:
    """Answers end at any time and a new prompt follows each."""
    bench = build(arguments.sequences, arguments.context + _TURNOVER_LEN, 0, 24576)
    for number in range(arguments.sequences):
        bench.add(arguments.context, 64 + number * (_TURNOVER_LEN - 64) // arguments.sequences)
    while bench.num_added < 2 * arguments.sequences:
        for _ in range(bench.step()):
            bench.add(arguments.context, _TURNOVER_LEN)
    return bench


def measure(name: str, bench: Bench, arguments: argparse.Namespace, *, refill: bool) -> Row:
    """Run the steps of one case."""
    for times in (bench.schedule_cpu, bench.update_cpu, bench.wall):
        times.clear()
    for _ in range(arguments.steps):
        num_ended = bench.step()
        for _ in range(num_ended if refill else 0):
            bench.add(arguments.context, _TURNOVER_LEN)
    both = [a + b for a, b in zip(bench.schedule_cpu, bench.update_cpu, strict=True)]
    metrics: RowMetrics = {}
    for part, seconds in (
        ("schedule_cpu", bench.schedule_cpu),
        ("update_cpu", bench.update_cpu),
        ("total_cpu", both),
        ("total_wall", bench.wall),
    ):
        for label, share in (("p5", 0.05), ("p50", 0.5), ("p99", 0.99)):
            value = percentile(seconds, share)
            metrics[f"{part}_us_{label}"] = None if value is None else value * 1e6
    workload = f"{arguments.sequences} at {arguments.context}"
    return Row(f"control plane, {name}", workload, metrics)


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Bench], bool]]:
    """Name, how to build it, and whether ended sequences are replaced."""
    yield "decoding", lambda: decoding(arguments), False
    yield "drafts", lambda: decoding(arguments, num_drafts=_NUM_DRAFTS), False
    yield "queue", lambda: decoding(arguments, num_waiting=1000), False
    yield "turnover", lambda: turnover(arguments), True


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=40960)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--case", action="append", help="only these")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    make_full_collections_rare()
    rows = []
    for name, make, refill in cases(arguments):
        if not arguments.case or name in arguments.case:
            rows.append(measure(name, make(), arguments, refill=refill))
    columns = list(rows[0].metrics)
    lines = [
        [row.name, row.workload, *(format_value(row.metrics[column]) for column in columns)]
        for row in rows
    ]
    print(table(["case", "sequences", *columns], lines))
    conditions = {"machine": asdict(machine.describe()), "torch": "torch" in sys.modules}
    if arguments.json:
        Result("control_plane", rows, conditions).save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draft lengths over a simulated target: tokens per second without drafts, with fixed lengths, with the controller.

    python bench/simulate.py --users 1,8,64,256 --context 40960 --json FILE [--plot FILE.svg]

The real Scheduler, BlockManager and DraftController run on a virtual clock; a step lasts as long as a roofline
of Qwen3.6-35B-A3B on one H200 says. The controller is told none of its constants: it learns the cost of steps
while they run, from defaults that are those of a laptop. Requests differ in how often drafts are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil, floor, log2
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from netra_backend.batch import Batch, ScheduledSequence, SequenceOutput, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel
from netra_backend.metrics import Metrics
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import PAGE_SIZE
from netra_backend.spec.controller import DraftController

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Machine:
    """One H200: bytes/s of a measured copy, FLOP/s measured for bf16 and assumed double for FP8, and the
    launch gaps of a step that are not hidden.
    """

    bytes_per_second: float = 4.3e12
    bf16_flops: float = 790e12
    fp8_flops: float = 1.5e15
    gap_seconds: float = 450 * 1.5e-6
    kv_bytes_available: float = 101.8e9


@dataclass(frozen=True, slots=True)
class Target:
    """Qwen3.6-35B-A3B: FP8 weights, 16-bit head, int8 keys and values, float32 states, one MTP layer."""

    num_layers: int = 40
    num_attention_layers: int = 10
    num_experts: int = 256
    experts_per_token: int = 8
    expert_bytes: float = 3 * 2048 * 512
    dense_bytes: float = 30 * 33.7e6 + 10 * 27.26e6 + 40 * 3.15e6
    head_bytes: float = 248320 * 2048 * 2
    attention_bytes: float = 27.26e6
    kv_bytes_per_layer_token: float = 1032
    state_bytes: float = 62.9e6
    query_rows_per_kv_head: int = 8
    flops_per_key_row: float = 4 * 256 * 2  # 2 KV heads

    def distinct_experts(self, num_rows: int) -> float:
        """Experts of a layer that `num_rows` rows choose, if each chooses at random."""
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_rows)


def step_seconds(batch: Batch, machine: Machine, target: Target) -> float:
    """Roofline of a step: each part takes its bytes or its FLOPs, whichever lasts longer; then the drafting."""
    rows = batch.num_tokens
    num_logits = sum(item.num_logits for item in batch.scheduled)
    bandwidth = machine.bytes_per_second
    seconds = machine.gap_seconds
    seconds += max(
        target.dense_bytes / bandwidth, 2 * target.dense_bytes * rows / machine.fp8_flops
    )
    experts = target.distinct_experts(rows)
    # A tile has at least 16 rows, however few of them an expert has.
    padded = max(rows * target.experts_per_token, 16 * experts)
    seconds += target.num_layers * max(
        experts * target.expert_bytes / bandwidth,
        2 * padded * target.expert_bytes / machine.fp8_flops,
    )
    seconds += max(
        target.head_bytes / bandwidth, target.head_bytes * num_logits / machine.bf16_flops
    )
    for item in batch.scheduled:
        seconds += _sequence_seconds(item, machine, target)
    return seconds + _draft_seconds(batch, machine, target)


def _sequence_seconds(item: ScheduledSequence, machine: Machine, target: Target) -> float:
    context = item.seq.num_computed_tokens
    query_rows = item.num_scheduled_tokens * target.query_rows_per_kv_head
    query_rows = -(-query_rows // 64) * 64 if query_rows > 32 else -(-query_rows // 16) * 16
    read = context * target.kv_bytes_per_layer_token / machine.bytes_per_second
    compute = context * query_rows * target.flops_per_key_row / machine.bf16_flops
    state = 2 * target.state_bytes / machine.bytes_per_second
    return target.num_attention_layers * max(read, compute) + state


def _draft_seconds(batch: Batch, machine: Machine, target: Target) -> float:
    """The MTP layer over the step's rows, then one pass per further draft; each with the output head."""
    seconds = 0.0
    bandwidth = machine.bytes_per_second
    wanted = [item for item in batch.scheduled if item.num_wanted_drafts]
    for position in range(max((item.num_wanted_drafts for item in wanted), default=0)):
        live = [item for item in wanted if item.num_wanted_drafts > position]
        read = target.attention_bytes + target.head_bytes + 2 * 2048 * 2048 * 2
        read += target.distinct_experts(len(live)) * target.expert_bytes
        read += sum(item.seq.num_computed_tokens for item in live) * target.kv_bytes_per_layer_token
        seconds += max(read / bandwidth, target.head_bytes * len(live) / machine.bf16_flops)
    return seconds


@dataclass(frozen=True, slots=True)
class Drafter:
    """Whether a draft is right: by chance, the same for every draft length, so that lengths can be compared.

    `rates` go round by request, and within a request every `phase_tokens` of output; each draft behind
    another is right `fade` times as often.
    """

    rates: tuple[float, ...]
    phase_tokens: int = 0
    fade: float = 1.0
    seed: int = 0

    def is_right(self, item: ScheduledSequence, depth: int) -> bool:
        """The draft `depth` behind the last committed token, if the ones before are right."""
        seq = item.seq
        position = seq.num_tokens + depth
        phase = (position - seq.num_prompt_tokens) // self.phase_tokens if self.phase_tokens else 0
        rate = self.rates[(seq.seq_id + phase) % len(self.rates)]
        return _hash(seq.seq_id + (self.seed << 20), position) < rate * self.fade**depth * 2**64

    def verify(self, item: ScheduledSequence) -> SequenceOutput:
        """Accepts the drafts up to the first wrong one; proposes as many as are wanted."""
        if not item.num_logits:
            return SequenceOutput()
        accepted = 0
        for _ in item.draft_token_ids:
            if not self.is_right(item, accepted):
                break
            accepted += 1
        drafts = [1] * item.num_wanted_drafts
        return SequenceOutput([1] * (accepted + 1), accepted, draft_token_ids=drafts)


@dataclass(frozen=True, slots=True)
class Result:
    """One row of one column of the table."""

    mode: str
    users: int
    running: int
    tokens_per_second: float
    tokens_per_second_and_user: float
    step_ms: float
    tokens_per_step: float
    mean_drafts: float


@dataclass(slots=True)
class Window:
    """What is measured, from the first step after the prompts and `settle` tokens of output on."""

    settle: int
    num_tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0

    def add(self, batch: Batch, outputs: list[SequenceOutput], seconds: float) -> None:
        """Count a step."""
        if any(item.is_chunk for item in batch.scheduled):
            return
        gained = sum(len(out.token_ids) for out in outputs)
        if self.settle > 0:
            self.settle -= gained
            return
        self.num_tokens += gained
        self.seconds += seconds
        self.num_steps += 1
        self.num_drafts += sum(len(item.draft_token_ids) for item in batch.scheduled)


def simulate(
    users: int,
    context: int,
    num_drafts: int,
    adaptive: bool,
    drafter: Drafter,
    num_tokens: int,
    settle: int = 0,
) -> Result:
    """Let `users` requests of `context` tokens decode until they have `num_tokens` more than `settle` in all.

    `num_drafts` is the length or the controller's limit. Any length gets the same tokens.
    """
    machine, target = Machine(), Target()
    per_user = context * 11 * target.kv_bytes_per_layer_token + 1.3 * target.state_bytes
    running = max(1, min(users, int(machine.kv_bytes_available / per_user)))
    output = num_tokens + settle + 4 * context * running // 8192 * (num_drafts + 1)
    config = EngineConfig(max_num_seqs=running, max_num_batched_tokens=8192)
    metrics = Metrics(context + output)
    cost_model = CostModel(
        num_experts=target.num_experts, experts_per_token=target.experts_per_token
    )
    now = 0.0
    controller = DraftController(
        num_drafts, cost_model if adaptive else None, metrics, config.max_num_batched_tokens
    )
    scheduler = Scheduler(
        config,
        BlockManager(running * ((context + output) // PAGE_SIZE + 1), running),
        cost_model,
        eos_token_ids=frozenset(),
        max_model_len=context + output,
        vocab_size=2,
        clock=lambda: now,
        metrics=metrics,
        drafts=controller if num_drafts else None,
    )
    prompt = (0,) * context
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    for user in range(running):
        scheduler.add(Request(str(user), prompt, params, arrival_time=0.0))
    window = Window(settle)
    while window.num_tokens < num_tokens:
        batch = scheduler.schedule()
        assert batch is not None, "an answer ended inside the window"
        outputs = [drafter.verify(item) for item in batch.scheduled]
        seconds = step_seconds(batch, machine, target)
        now += seconds
        window.add(batch, outputs, seconds)
        scheduler.update(batch, StepOutput(outputs, seconds))
    rate = window.num_tokens / window.seconds
    return Result(
        mode="controller" if adaptive else f"k={num_drafts}",
        users=users,
        running=running,
        tokens_per_second=rate,
        tokens_per_second_and_user=rate / running,
        step_ms=1e3 * window.seconds / window.num_steps,
        tokens_per_step=window.num_tokens / window.num_steps / running,
        mean_drafts=window.num_drafts / window.num_steps / running,
    )


def table(results: Iterable[Result]) -> str:
    """Tokens per second by users and mode, and the controller against the best of the others."""
    by_users: dict[int, list[Result]] = {}
    for result in results:
        by_users.setdefault(result.users, []).append(result)
    modes = [result.mode for result in next(iter(by_users.values()))]
    lines = [f"{'users':>6} {'running':>8} " + " ".join(f"{mode:>10}" for mode in modes)]
    lines[0] += f" {'drafts':>7} {'of best':>8}"
    for users, row in by_users.items():
        best = max(result.tokens_per_second for result in row if result.mode != "controller")
        chosen = row[-1]
        lines.append(
            f"{users:>6} {chosen.running:>8} "
            + " ".join(f"{result.tokens_per_second:>10,.0f}" for result in row)
            + f" {chosen.mean_drafts:>7.2f} {chosen.tokens_per_second / best:>8.1%}"
        )
    return "\n".join(lines)


def plot(results: list[Result], path: Path) -> None:
    """Tokens per second against users, both on logarithmic axes, one line per mode; writes an SVG."""
    width, height, left, bottom = 640, 400, 70, 40
    users = sorted({r.users for r in results})
    rates = [r.tokens_per_second for r in results]
    low, high = log2(min(rates)), log2(max(rates))

    def x(count: int) -> float:
        return left + (width - left - 110) * log2(count / users[0]) / (
            log2(users[-1] / users[0]) or 1
        )

    def y(rate: float) -> float:
        return 15 + (height - bottom - 15) * (high - log2(rate)) / ((high - low) or 1)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for count in users:
        parts.append(
            f'<text x="{x(count):.0f}" y="{height - 22}" text-anchor="middle">{count}</text>'
        )
    for power in range(ceil(low), floor(high) + 1):
        at = y(2.0**power)
        parts.append(f'<text x="{left - 12}" y="{at + 4:.0f}" text-anchor="end">{2**power}</text>')
        parts.append(f'<path d="M{left - 8} {at:.0f}H{width - 105}" stroke="#ddd"/>')
    parts.append(
        f'<text x="{width / 2 - 30}" y="{height - 5}">users (output tokens/s upwards)</text>'
    )
    for index, mode in enumerate(dict.fromkeys(r.mode for r in results)):
        row = [r for r in results if r.mode == mode]
        points = " ".join(f"{x(r.users):.1f},{y(r.tokens_per_second):.1f}" for r in row)
        colour, thick = (
            ("black", 2.5) if mode == "controller" else (f"hsl({60 * index},65%,48%)", 1.2)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
        )
        parts.append(f'<text x="{width - 90}" y="{40 + 18 * index}" fill="{colour}">{mode}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--users", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--context", type=int, default=40960)
    parser.add_argument(
        "--lengths", default="0,1,2,4,8", help="fixed draft lengths to compare with"
    )
    parser.add_argument("--rates", default="0.55,0.7,0.8,0.9", help="chance of a draft, by request")
    parser.add_argument(
        "--phase-tokens", type=int, default=0, help="a request's rate changes so often"
    )
    parser.add_argument("--fade", type=float, default=1.0, help="of the rate, per draft before")
    parser.add_argument("--tokens", type=int, default=200, help="measured per user, 4,000 at least")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG")
    return parser.parse_args()


def main() -> int:
    """Command line; returns the exit status: 1 if the controller loses more than 3 % anywhere."""
    arguments = parse_arguments()
    users = [int(text) for text in arguments.users.split(",")]
    lengths = [int(text) for text in arguments.lengths.split(",")]
    rates = tuple(float(text) for text in arguments.rates.split(","))
    runs = [
        (u, k, a) for u in users for k, a in [(k, False) for k in lengths] + [(max(lengths), True)]
    ]
    results = []
    for count, num_drafts, adaptive in tqdm(runs, unit="run", disable=None):
        drafter = Drafter(rates, arguments.phase_tokens, arguments.fade)
        num_tokens = max(4000, count * arguments.tokens)
        results.append(
            simulate(
                count, arguments.context, num_drafts, adaptive, drafter, num_tokens, num_tokens
            )
        )
    print(table(results))
    if arguments.json:
        conditions = {"machine": asdict(Machine()), "target": asdict(Target()), "rates": rates,
                      "context": arguments.context, "phase_tokens": arguments.phase_tokens, "fade": arguments.fade,
                      "tokens_per_user": arguments.tokens}  # fmt: skip
        rows = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps({"conditions": conditions, "results": rows}, indent=1))
    if arguments.plot:
        plot(results, arguments.plot)
    lost = [
        r
        for r in results
        if r.mode == "controller" and r.tokens_per_second < 0.97 * _best(results, r.users)
    ]
    return 1 if lost else 0


def _best(results: list[Result], users: int) -> float:
    return max(r.tokens_per_second for r in results if r.users == users and r.mode != "controller")


def _hash(seed: int, position: int) -> int:
    """splitmix64 of both: uniform in [0, 2^64)."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


if __name__ == "__main__":
    sys.exit(main())

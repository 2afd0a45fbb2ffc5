"""Trains the tiny checkpoint in the background: resumable, low priority, with an end that can move.

State (float32 weights, optimizer, counters) lives in one file in the cache folder and is saved
every few minutes and on SIGTERM.  plan.json beside it says when to end and how long the rows are;
it is read again while training, so the rate can be annealed to a deadline not known at the start.
"""

import argparse
import json
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny import moe
from tools.tiny.data import Batch, Corpus, Mix, load_corpus, make_batch
from tools.tiny.export import load_export
from tools.tiny.guidance import guidance_loss
from tools.tiny.layers import DTYPES, Config, Norm
from tools.tiny.model import Attention, GatedDeltaNet, TinyModel, parameter_counts
from tools.tiny.moe import SharedExpert
from tools.tiny.optimizer import Optimizer

MTP_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01
WARM_UP_STEPS = 30
FLOOR = 0.02  # learning-rate factor at the very end


@dataclass(slots=True)
class Progress:
    step: int = 0
    tokens: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    evaluations: list[dict[str, float]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Plan:
    """What may change while training: the end (UTC, none = go on) and what the rows are made of.

    The rate falls to nearly zero over the last `decay_minutes` before the end.
    """

    end: datetime | None = None
    decay_minutes: float = 20.0
    length: int = 256
    chat_share: float = 0.5
    prompt_weight: float = 0.3
    stretched: float = 0.2
    guidance: float = 0.0

    def seconds_left(self) -> float:
        if self.end is None:
            return float("inf")
        return (self.end - datetime.now(timezone.utc)).total_seconds()

    def factor(self, step: int) -> float:
        warm = min(1.0, (step + 1) / WARM_UP_STEPS)
        return max(FLOOR, min(1.0, self.seconds_left() / (60 * self.decay_minutes))) * warm

    def mix(self, step_tokens: int, limit: int) -> Mix:
        rows = max(2, step_tokens // self.length)
        return Mix(rows, self.length, self.chat_share, self.prompt_weight, self.stretched, limit)


def read_plan(path: Path, before: Plan) -> Plan:
    """plan.json as a Plan; a missing or half-written file leaves the plan as it was."""
    try:
        data = json.loads(path.read_text())
        if data.get("end"):
            data["end"] = datetime.fromisoformat(data["end"]).replace(tzinfo=timezone.utc)
        return Plan(**data)
    except (OSError, ValueError, TypeError):
        return before


def token_losses(model: TinyModel, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of hidden `[rows, tokens, hidden]` against targets."""
    logits = model.lm_head(hidden).float().flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    weights = weights.flatten()
    return (losses * weights).sum() / weights.sum()


@dataclass(slots=True, frozen=True)
class Losses:
    """Next token, MTP on the first rows, sum of the balance terms, guidance (see guidance.py)."""

    token: Tensor
    mtp: Tensor
    balance: Tensor
    guidance: Tensor
    attended: float

    def total(self, guidance_weight: float) -> Tensor:
        loss = self.token + MTP_WEIGHT * self.mtp + BALANCE_WEIGHT * self.balance
        return loss + guidance_weight * self.guidance if guidance_weight else loss


def training_losses(
    model: TinyModel, batch: Batch, guided: bool = False, loss_of=token_losses
) -> Losses:
    """MTP is trained on a third of the rows: it is one layer, but it costs a whole output head."""
    length = batch.positions.shape[1]
    table = model.table(batch.ids, batch.positions)
    hidden = model.model(batch.ids[:, :length], table)
    ids, weights = batch.ids[:, 1 : length + 1], batch.weights[:, 1 : length + 1]
    loss = loss_of(model, hidden, ids, weights)
    head = slice(0, max(1, len(ids) // 3))
    guidance, attended = torch.zeros(()), 0.0
    if guided:
        first = batch.ids[:, :length]
        guidance, attended = guidance_loss(model, first, table, max(1, len(ids) // 2))
    embedded = model.model.embed_tokens(ids[head])
    drafted = model.mtp(embedded, hidden[head], tuple(t[head] for t in table))
    mtp = loss_of(model, drafted, batch.ids[head, 2:], batch.weights[head, 2:])
    balance = torch.stack([m.balance for m in model.mixtures()]).sum()
    return Losses(loss, mtp, balance, guidance, attended)


def compile_parts(model: TinyModel) -> None:
    """Compiles what is elementwise-heavy; the expert dispatch stays eager.

    One graph per shape: rows of three lengths, whole and half batches, heads of two counts.
    """
    torch._dynamo.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, GatedDeltaNet | Attention | SharedExpert | Norm):
            module.compile(dynamic=False)
    moe.combine = torch.compile(moe.combine, dynamic=False)


@torch.no_grad()
def evaluate(
    model: TinyModel, held_out: Corpus, rows: int = 3, length: int = 512
) -> dict[str, float]:
    """Held-out loss per text source and for chat; accuracy on the answers of some tasks."""
    rng = np.random.default_rng(7)
    results: dict[str, float] = {}
    agree = []
    for source, tokens in held_out.texts.items():
        starts = rng.integers(0, len(tokens) - length - 2, rows)
        ids = torch.from_numpy(np.stack([tokens[s : s + length + 2] for s in starts]).astype(int))
        table = model.table(ids[:, :length])
        hidden = model.model(ids[:, :length], table)
        logits = model.lm_head(hidden).float()
        results[source] = F.cross_entropy(
            logits.flatten(0, 1), ids[:, 1 : length + 1].flatten()
        ).item()
        embedded = model.model.embed_tokens(ids[:, 1 : length + 1])
        drafted = model.lm_head(model.mtp(embedded, hidden, table)).argmax(-1)
        agree.append((drafted[:, :-1] == logits[:, 1:].argmax(-1)).float().mean().item())
    results["mtp_agree"] = float(np.mean(agree))
    results.update(evaluate_chat(model, held_out))
    return {key: round(value, 4) for key, value in results.items()}


def evaluate_chat(model: TinyModel, held_out: Corpus, per_task: int = 6) -> dict[str, float]:
    """Loss over whole items, and teacher-forced accuracy on their answers, per task."""
    chat, results, losses = held_out.chat, {}, []
    sizes = chat.rows[:, 2] - chat.rows[:, 0]
    for number, task in enumerate(chat.tasks):
        chosen = np.flatnonzero((chat.rows[:, 3] == number) & (sizes < 512))[:per_task]
        right = count = 0
        for index in chosen:
            tokens, prompt = chat.item(index)
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits = model(ids[:, :-1])[0]
            losses.append(F.cross_entropy(logits, ids[0, 1:]).item())
            answer = torch.arange(1, len(tokens)) >= prompt
            right += ((logits.argmax(-1) == ids[0, 1:]) & answer).sum().item()
            count += int(answer.sum())
        results[f"acc_{task}"] = right / max(count, 1)
    return {"chat": float(np.mean(losses)), **results}


class Trainer:
    def __init__(self, folder: Path, data: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.train, self.held_out = load_corpus(data, "train"), load_corpus(data, "val")
        torch.manual_seed(0)
        self.config = Config(matmul_dtype=args.matmul_dtype)
        self.model = TinyModel(self.config)
        self.optimizer = Optimizer(
            self.model.named_parameters(), args.adam_rate, args.muon_rate, DTYPES[args.matmul_dtype]
        )
        self.progress = Progress()
        self.stopping = False
        self.loss_of = token_losses
        if args.compile:
            compile_parts(self.model)
            self.loss_of = torch.compile(token_losses, dynamic=False)

    def resume(self) -> None:
        path = self.folder / "state.pt"
        if not path.exists():
            if self.args.start:
                self.model.load_state_dict(load_export(self.args.start).state_dict())
            return
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "config": asdict(self.config),
        }
        torch.save(state, self.folder / "state.tmp")
        os.replace(self.folder / "state.tmp", self.folder / "state.pt")

    def log(self, line: str) -> None:
        with (self.folder / "train.log").open("a") as file:
            file.write(f"{datetime.now(timezone.utc):%H:%M:%S} {line}\n")

    def one_step(self, plan: Plan) -> dict[str, float]:
        progress = self.progress
        mix = plan.mix(self.args.step_tokens, self.config.max_positions)
        batch = make_batch(self.train, mix, progress.step)
        losses = training_losses(self.model, batch, plan.guidance > 0, self.loss_of)
        losses.total(plan.guidance).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(plan.factor(progress.step))
        progress.step += 1
        progress.tokens += mix.rows * mix.length
        return {
            "loss": losses.token.item(), "mtp": losses.mtp.item(), "aux": losses.balance.item(),
            "norm": norm.item(), "attended": losses.attended,
        }  # fmt: skip

    def report(self, recent: list[dict[str, float]], speed: float, plan: Plan) -> None:
        mean = {key: float(np.mean([r[key] for r in recent])) for key in recent[0]}
        loads = torch.stack([m.load for m in self.model.mixtures()]) * self.config.experts
        left = plan.seconds_left()
        eta = "-" if left == float("inf") else f"{left / 60:.0f} min"
        p = self.progress
        self.log(
            f"step {p.step} tokens {p.tokens / 1e6:.2f}M cpu {p.cpu_seconds / 60:.1f} min "
            f"loss {mean['loss']:.3f} mtp {mean['mtp']:.3f} "
            f"aux {mean['aux'] / loads.shape[0]:.3f} load {loads.max():.2f}/{loads.min():.2f} "
            f"attended {mean['attended']:.2f} norm {mean['norm']:.2f} "
            f"rate {plan.factor(p.step):.2f} {speed:.0f} tok/s, left {eta}"
        )

    def evaluate_and_log(self) -> None:
        self.model.eval()
        stance = torch.compiler.set_stance("force_eager") if self.args.compile else nullcontext()
        with stance:
            results = evaluate(self.model, self.held_out)
        self.model.train()
        record = {"step": self.progress.step, "tokens": self.progress.tokens, **results}
        self.progress.evaluations.append(record)
        self.log(f"EVAL {json.dumps(record)}")

    def run(self) -> None:
        recent: list[dict[str, float]] = []
        now = time.monotonic()
        last_report = last_save = last_evaluation = last_tick = now
        cpu, tokens = time.process_time(), self.progress.tokens
        plan = read_plan(self.folder / "plan.json", Plan())
        while not self.stopping and plan.seconds_left() > 0:
            recent.append(self.one_step(plan))
            now, spent = time.monotonic(), time.process_time()
            self.progress.wall_seconds += now - last_tick
            self.progress.cpu_seconds += spent - cpu
            last_tick, cpu = now, spent
            if len(recent) == self.args.report_steps:
                plan = read_plan(self.folder / "plan.json", plan)
                speed = (self.progress.tokens - tokens) / (now - last_report)
                self.report(recent, speed, plan)
                recent, last_report, tokens = [], now, self.progress.tokens
            if now - last_save > 60 * self.args.save_minutes:
                self.save()
                last_save = now
            if now - last_evaluation > 60 * self.args.evaluate_minutes:
                self.evaluate_and_log()
                last_evaluation = now
        self.save()
        if not self.stopping:
            self.evaluate_and_log()
            self.save()
        self.log("ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".cache/tiny"))
    parser.add_argument("--data", type=Path, default=Path(".cache/tiny/data"))
    parser.add_argument("--start", type=Path, help="export directory with the first weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--matmul-dtype", choices=sorted(DTYPES), default="float32",
                        help="bfloat16 is far faster with AMX and far slower without")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile the elementwise parts")
    parser.add_argument("--step-tokens", type=int, default=3072)
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--report-steps", type=int, default=20)
    parser.add_argument("--save-minutes", type=float, default=5)
    parser.add_argument("--evaluate-minutes", type=float, default=12)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.folder, args.data, args)
    trainer.resume()
    (args.folder / "train.pid").write_text(str(os.getpid()))
    total, active = parameter_counts(trainer.config, trainer.model)
    trainer.log(
        f"start: {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M per token, {vars(args)}"
    )
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stopping", True))
    trainer.run()


if __name__ == "__main__":
    main()

"""Measures an exported checkpoint: loss, drafting, copying, expert load, decay, KV and FP8 cost.

Reads an export directory (bfloat16 or FP8) and the held-out files of prep.py; writes a JSON report.
Generation goes through transformers, everything else through model.py: each checks the other.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.data import Chat, load_corpus
from tools.tiny.export import load_export
from tools.tiny.generate import (
    Generator,
    Sample,
    chat_samples,
    free_samples,
    gold_match,
    ngram_tokens_per_step,
    text_samples,
)
from tools.tiny.model import Attention, GatedDeltaNet, TinyModel, parameter_counts

DRAFTS = 8
WINDOW = 512


def windows(tokens: np.ndarray, limit: int) -> Tensor:
    """`[rows, WINDOW + 2]` non-overlapping rows, evenly spread over the source."""
    rows = (len(tokens) - 2) // WINDOW
    chosen = np.unique(np.linspace(0, rows - 1, min(rows, limit)).astype(int))
    return torch.from_numpy(
        np.stack([tokens[r * WINDOW : r * WINDOW + WINDOW + 2] for r in chosen]).astype(np.int64)
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def text_losses(model: TinyModel, texts: dict[str, np.ndarray], limit: int) -> dict[str, object]:
    """Per source: loss, MTP loss, top-1 accuracy; `mixed` weighs sources by held-out tokens."""
    report: dict[str, object] = {}
    for source, tokens in texts.items():
        sums = np.zeros(3)
        rows = windows(tokens, limit)
        for ids in rows.split(4):
            hidden = model.model(ids[:, :WINDOW], model.table(ids[:, :WINDOW]))
            logits = model.lm_head(hidden)
            embedded = model.model.embed_tokens(ids[:, 1 : WINDOW + 1])
            drafted = model.lm_head(model.mtp(embedded, hidden, model.table(ids[:, :WINDOW])))
            right = (logits.argmax(-1) == ids[:, 1 : WINDOW + 1]).float().mean().item()
            loss = cross_entropy(logits, ids[:, 1 : WINDOW + 1])
            sums += len(ids) * np.array([loss, cross_entropy(drafted, ids[:, 2:]), right])
        loss, mtp, right = (sums / len(rows)).round(4).tolist()
        report[source] = {"loss": loss, "mtp_loss": mtp, "top1": right, "tokens": len(tokens)}
    return report


def chat_losses(model: TinyModel, chat: Chat, per_task: int) -> dict[str, object]:
    """Per task: loss over all tokens, loss and teacher-forced accuracy over the answer."""
    report: dict[str, object] = {}
    every: list[float] = []
    count = 0
    for number, task in enumerate(chat.tasks):
        sums, sizes = np.zeros(3), np.zeros(2)
        for index in np.flatnonzero(chat.rows[:, 3] == number)[:per_task]:
            tokens, prompt = chat.item(index)
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits = model(ids[:, :-1])[0]
            losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
            answer = torch.arange(1, len(tokens)) >= prompt
            right = (logits.argmax(-1) == ids[0, 1:])[answer].sum().item()
            sums += [losses.sum().item(), losses[answer].sum().item(), right]
            sizes += [len(losses), answer.sum().item()]
        report[task] = {
            "loss": round(sums[0] / sizes[0], 4),
            "answer_loss": round(sums[1] / sizes[1], 4),
            "answer_top1": round(sums[2] / sizes[1], 4),
        }
        every.append(sums[0])
        count += sizes[0]
    return {"loss": round(sum(every) / count, 4), "tasks": report}


def draft(
    model: TinyModel, tokens: list[int], places: list[int], forced: bool
) -> tuple[Tensor, Tensor]:
    """(drafts, targets) `[places, DRAFTS]`: the MTP layer chained on its own output.

    At place t the target's hidden states up to t and token t+1 are known; draft k guesses token
    t+2+k.
    `forced` feeds the text's own tokens between drafts instead of the drafts; targets are then the
    main model's greedy choices, otherwise the tokens themselves (which are greedy choices).
    """
    ids = torch.tensor(tokens)
    hidden = model.model(ids[None], model.table(ids[None]))[0]
    embedded = model.model.embed_tokens(ids)
    rows, size = torch.arange(len(places)), max(places) + 1 + DRAFTS
    start = torch.tensor(places)
    states = hidden.new_zeros(len(places), size, hidden.shape[-1])
    inputs = torch.zeros_like(states)
    for row, t in enumerate(places):
        states[row, : t + 1] = hidden[: t + 1]
        inputs[row, : t + 1] = embedded[1 : t + 2]
    table = model.table(ids[None].new_zeros(1, size))
    drafts = []
    for k in range(DRAFTS):
        last = model.mtp(inputs, states, table)[rows, start + k]
        drafts.append(model.lm_head(last).argmax(-1))
        if k + 1 < DRAFTS:
            states[rows, start + k + 1] = last
            taken = ids[start + 2 + k] if forced else drafts[-1]
            inputs[rows, start + k + 1] = model.model.embed_tokens(taken)
    ahead = start[:, None] + torch.arange(DRAFTS)
    targets = model.lm_head(hidden).argmax(-1)[ahead + 1] if forced else ids[ahead + 2]
    return torch.stack(drafts, 1), targets


def spread(first: int, last: int, count: int) -> list[int]:
    return np.unique(np.linspace(first, last, count).astype(int)).tolist()


def accepted(model: TinyModel, samples: list[Sample], per_sample: int = 8) -> np.ndarray:
    """On-policy: places whose first k drafts are all accepted, k = 1..DRAFTS; last, all places."""
    counts = np.zeros(DRAFTS + 1)
    for sample in samples:
        tokens = sample.prompt + sample.output
        first, last = len(sample.prompt) - 1, len(tokens) - 2 - DRAFTS
        if last < first:
            continue
        places = spread(first, last, per_sample)
        drafts, targets = draft(model, tokens, places, forced=False)
        counts[:DRAFTS] += (drafts == targets).int().cumprod(1).sum(0).numpy()
        counts[DRAFTS] += len(places)
    return counts


def acceptance(counts: np.ndarray) -> dict[str, object]:
    shares = (counts[:DRAFTS] / max(counts[DRAFTS], 1)).round(3).tolist()
    return {
        "places": int(counts[DRAFTS]),
        "first_k_accepted": shares,
        "mean_accepted": round(sum(shares), 3),
    }


def forced_agreement(model: TinyModel, tokens: np.ndarray, rows: int = 4) -> list[float]:
    """Teacher-forced: agreement of draft k with the main model's greedy choice, k = 1..DRAFTS."""
    hits, count = np.zeros(DRAFTS), 0
    for ids in windows(tokens, rows)[:, :256]:
        places = spread(32, 256 - 3 - DRAFTS, 10)
        drafts, targets = draft(model, ids.tolist(), places, forced=True)
        hits += (drafts == targets).sum(0).numpy()
        count += len(places)
    return (hits / count).round(3).tolist()


def quantiser(bits: int, group: int = 32):
    """Round to `bits` with a minimum and a step per group: the crudest per-token cache."""

    def stored(x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (-1, group))
        low = grouped.amin(-1, keepdim=True)
        step = ((grouped.amax(-1, keepdim=True) - low) / (2**bits - 1)).clamp_min(1e-8)
        return (((grouped - low) / step).round() * step + low).flatten(-2)

    return stored


def divergence(logits: Tensor, reference: Tensor) -> float:
    """Mean KL(reference || logits) per token, in nats."""
    ours, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    kl = F.kl_div(ours, theirs, log_target=True, reduction="sum")
    return kl.item() / (logits.shape[0] * logits.shape[1])


def kv_sensitivity(model: TinyModel, ids: Tensor) -> dict[str, object]:
    """KL, top-1 agreement and loss with keys and values rounded to 8, 4 and 2 bits."""
    reference = model(ids[:, :-1])
    report: dict[str, object] = {"loss": round(cross_entropy(reference, ids[:, 1:]), 4)}
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    for bits in (8, 4, 2):
        for attention in attentions:
            attention.stored = quantiser(bits)
        logits = model(ids[:, :-1])
        report[f"{bits} bit"] = {
            "kl": float(f"{divergence(logits, reference):.3e}"),
            "top1": round((logits.argmax(-1) == reference.argmax(-1)).float().mean().item(), 4),
            "loss": round(cross_entropy(logits, ids[:, 1:]), 4),
        }
    for attention in attentions:
        attention.stored = None
    return report


def load_and_decay(model: TinyModel, ids: Tensor) -> dict[str, object]:
    """Expert load (times uniform) and mean decay per token of each state, layer by layer."""
    decays: list[list[float]] = []

    def note(module: GatedDeltaNet, inputs: tuple[Tensor, ...]) -> None:
        decays.append(module.log_decay(inputs[0]).exp().mean((0, 1)).tolist())

    modules = [m for m in model.modules() if isinstance(m, GatedDeltaNet)]
    hooks = [m.register_forward_pre_hook(note) for m in modules]
    model(ids)
    for hook in hooks:
        hook.remove()
    loads = [m.load * model.config.experts for m in model.mixtures()[:-1]]
    return {
        "load_max": [round(x.max().item(), 2) for x in loads],
        "load_min": [round(x.min().item(), 2) for x in loads],
        "mean_decay": [[round(v, 3) for v in d] for d in decays],
    }


def long_context(model: TinyModel, tokens: np.ndarray, length: int = 8192) -> dict[str, float]:
    """Loss by position in one long row: a rotary embedding that fails shows as a rise."""
    ids = torch.from_numpy(tokens[: length + 1].astype(np.int64))[None]
    losses = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
    edges = [0, 512, 2048, 4096, len(losses)]
    return {f"{a}-{b}": round(losses[a:b].mean().item(), 3) for a, b in pairwise(edges) if b > a}


def fp8_cost(fp8: TinyModel, bf16: TinyModel, ids: Tensor) -> dict[str, float]:
    ours, theirs = fp8(ids[:, :-1]), bf16(ids[:, :-1])
    cost = cross_entropy(ours, ids[:, 1:]) - cross_entropy(theirs, ids[:, 1:])
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return {
        "nats": round(cost, 5),
        "kl": round(divergence(ours, theirs), 6),
        "top1": round(same, 4),
    }


def measure(args: argparse.Namespace) -> dict[str, object]:
    started = time.monotonic()

    def stage(name: str) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {name}", flush=True)

    model = load_export(args.directory)
    report: dict[str, object] = {"parameters": parameter_counts(model.config, model)}
    if args.only != "generated":
        report |= measured(model, args, stage)
    if args.only != "measured":
        stage("generation")
        report |= generated(model, args)
    stage("done")
    return report


def measured(
    model: TinyModel, args: argparse.Namespace, stage: Callable[[str], None]
) -> dict[str, object]:
    """Everything that needs no continuation of a prompt."""
    held_out = load_corpus(args.data, "val")
    stage("losses")
    report: dict[str, object] = {"text": text_losses(model, held_out.texts, args.rows)}
    report["chat"] = chat_losses(model, held_out.chat, args.chat_items)
    mixed = torch.cat([windows(t, 3) for t in held_out.texts.values()])[:, : WINDOW + 1]
    stage("sensitivity")
    report["kv"] = kv_sensitivity(model, mixed)
    items = [held_out.chat.item(i)[0] for i in range(200)]
    chat_ids = windows(np.concatenate(items), 12)[:, : WINDOW + 1]
    report["kv_chat"] = kv_sensitivity(model, chat_ids)
    report["inside"] = load_and_decay(model, mixed)
    report["long_context"] = long_context(model, held_out.texts["pydoc"])
    if args.bf16:
        report["fp8_cost"] = fp8_cost(model, load_export(args.bf16), mixed)
    stage("teacher-forced drafts")
    report["mtp_forced"] = {
        s: forced_agreement(model, held_out.texts[s]) for s in ("pydoc", "stdlib", "literature")
    }
    return report


def generated(model: TinyModel, args: argparse.Namespace) -> dict[str, object]:
    """Everything that needs continuations: copying, drafting on the model's own text, samples."""
    generator = Generator(args.directory)
    items = json.loads((args.data / "val-items.json").read_text())
    texts = json.loads((args.data / "val-texts.json").read_text())
    chats = chat_samples(generator, items, args.items, args.longest)
    plain = text_samples(generator, texts, max(2, args.items // 2), 64)
    both = plain | chats
    counts = {kind: accepted(model, samples) for kind, samples in both.items()}
    groups = {"all text": list(plain), "all chat": list(chats)}
    counts |= {name: sum(counts[kind] for kind in kinds) for name, kinds in groups.items()}
    return {
        "gold": {task: gold_match(samples) for task, samples in chats.items()},
        "mtp_on_policy": {kind: acceptance(c) for kind, c in counts.items()},
        "ngram_tokens_per_step": {kind: ngram_tokens_per_step(s) for kind, s in both.items()},
        "samples": free_samples(generator, args.data, 10, 80) if args.samples else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("checkpoints/netra-tiny"))
    parser.add_argument("--bf16", type=Path, help="bfloat16 export, to state the cost of FP8")
    parser.add_argument("--data", type=Path, default=Path(".cache/tiny/data"))
    parser.add_argument("--report", type=Path, default=Path(".cache/tiny/report.json"))
    parser.add_argument("--rows", type=int, default=24, help="windows of 512 tokens per source")
    parser.add_argument("--chat-items", type=int, default=24, help="items per task for the loss")
    parser.add_argument("--items", type=int, default=12, help="generated items per task")
    parser.add_argument("--only", choices=("measured", "generated"), help="half of the report")
    parser.add_argument("--longest", type=int, default=400, help="longest prompt to generate from")
    parser.add_argument("--samples", action="store_true", help="add ten unpicked samples")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        report = measure(args)
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1))


if __name__ == "__main__":
    main()

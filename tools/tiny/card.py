"""Writes the model card of an export from the report of evaluate.py, the manifest and the state.

No figure is typed by hand: what the card says is what the files say.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch

Report = dict[str, object]

HEAD = """# netra-tiny

A very small language model of the architecture Netra serves (Gated DeltaNet and gated attention,
mixture of experts, one multi-token-prediction layer, FP8 in 128x128 blocks, Hugging Face names).
It is a fixture: `make serve` needs no download, tests have peaked logits, speculation accepts and
rejects. **It knows nothing, and its figures are no statement about any other model.**

| | |
|---|---|
| layers | 8: six Gated DeltaNet, two gated attention (4 query, 2 key/value heads of 64) |
| hidden, vocabulary | 256, 4,096 (byte-level BPE) |
| experts | 8 of size 128, two per token, plus a shared one |
| parameters | {total:.1f} M, {active:.1f} M per token |
| file | {size:.2f} MB FP8 (e4m3, bfloat16 scales), sha256 `{digest}` |
| positions | {positions:,} (rotary base {theta:,.0f}) |
"""

HOW = """
Every figure below is from evaluate.py, on texts and items that were held out of training whole.
"""

NOT = """
## What it is not
Not a source of facts, not a coding assistant, not a measure of quality. Acceptance rates of an
under-trained model are flattered by its repetition; read them beside the teacher-forced agreement.
Context beyond the training rows is tested for numbers that stay finite and a loss that does not
jump, not for use of what stands there.
"""


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines) + "\n"


def data_section(manifest: Report) -> str:
    rows = [
        [name, s["licence"], f"{s['documents']:,}", f"{s['characters'] / 1e6:.1f} M"]
        for name, s in manifest["sources"].items()
    ]
    packages = "".join(
        f"- `{name}`, sha256 `{p['sha256']}`\n" for name, p in manifest["packages"].items()
    )
    python = manifest["python"]
    return (
        "\n## Data\n"
        + table(["source", "licence", "documents", "characters"], rows)
        + f"\nPackages:\n{packages}- Python {python['version']} standard library, "
        f"sha256 of the texts `{python['stdlib_sha256']}`\n"
        + f"\nOne document in {manifest['held_out_one_in']} is held out, and chat items are made "
        "from one side or the other. Tokenizer sha256 "
        f"`{manifest['tokenizer_sha256']}`.\n"
    )


def training_section(progress: Report, notes: str) -> str:
    rows = [
        [e["step"], f"{e['tokens'] / 1e6:.2f} M", e["pydoc"], e["stdlib"], e["literature"],
         e["chat"], e["acc_copy"], e["acc_rename"], e["mtp_agree"]]
        for e in progress["evaluations"]
    ]  # fmt: skip
    head = ["step", "tokens", "pydoc", "stdlib", "literature", "chat", "copy", "rename", "MTP"]
    return (
        f"\n## Training\n{notes}\n\n{progress['tokens'] / 1e6:.2f} M tokens in {progress['step']} "
        f"steps, {progress['cpu_seconds'] / 60:.0f} CPU minutes, "
        f"{progress['wall_seconds'] / 60:.0f} minutes by the clock.\n\n"
        "Losses while training (nats per token; copy and rename: teacher-forced accuracy on the "
        "answers; MTP: agreement with the main model):\n\n" + table(head, rows)
    )


def loss_section(report: Report) -> str:
    rows = [[s, v["loss"], v["mtp_loss"], v["top1"]] for s, v in report["text"].items()]
    chat = report["chat"]
    chats = [
        [task, v["loss"], v["answer_loss"], v["answer_top1"]] for task, v in chat["tasks"].items()
    ]
    text = "\n## Loss (nats per token, held out)\n"
    text += table(["text", "loss", "MTP loss", "top-1"], rows)
    text += f"\nAll text {report['text_mean']}, all chat tokens {chat['loss']}, half of each "
    text += f"{report['mixed']}.\n\n"
    text += table(["chat task", "loss", "loss of the answer", "top-1 of the answer"], chats)
    positions = ", ".join(f"{k}: {v}" for k, v in report["long_context"].items())
    return text + f"\nLoss by position in one row of 8,192 tokens of pydoc: {positions}.\n"


def copy_section(report: Report) -> str:
    gold = [[t, v["token_match"], v["exact"], v["items"]] for t, v in report["gold"].items()]
    drafts = [
        [kind, v["places"], *v["first_k_accepted"]] for kind, v in report["mtp_on_policy"].items()
    ]
    forced = [[kind, *v] for kind, v in report["mtp_forced"].items()]
    numbers = [f"k={k}" for k in range(1, 9)]
    grams = [[kind, v] for kind, v in report["ngram_tokens_per_step"].items()]
    return (
        "\n## Copying (greedy, share of the expected tokens at their place)\n"
        + table(["task", "tokens", "whole answers", "items"], gold)
        + "\n## MTP drafts, on the model's own greedy text: first k all accepted\n"
        + table(["kind", "places", *numbers], drafts)
        + "\nTeacher-forced agreement of draft k with the main model:\n\n"
        + table(["text", *numbers], forced)
        + "\nTokens per step with n-gram drafts (suffix 4..2, four drafts):\n\n"
        + table(["kind", "tokens per step"], grams)
    )


def precision_section(report: Report) -> str:
    bits = ("8 bit", "4 bit", "2 bit")
    rows = [
        [name, b, report[key][b]["kl"], report[key][b]["top1"], report[key][b]["loss"]]
        for name, key in (("text", "kv"), ("chat", "kv_chat"))
        for b in bits
    ]
    inside, fp8 = report["inside"], report["fp8_cost"]
    loads = zip(inside["load_max"], inside["load_min"], strict=True)
    return (
        "\n## Precision\n"
        f"FP8 against the bfloat16 export: {fp8['nats']:+} nats, KL {fp8['kl']}, same top-1 "
        f"{fp8['top1']}.\nKeys and values rounded crudely (minimum and step per 32 values):\n\n"
        + table(["rows", "cache", "KL", "same top-1", "loss"], rows)
        + "\nExpert load, most and least used, times uniform, per layer: "
        + ", ".join(f"{a}/{b}" for a, b in loads)
        + ".\nMean decay of each state per token, per layer: "
        + "; ".join(" ".join(map(str, d)) for d in inside["mean_decay"])
        + ".\n"
    )


def samples_section(report: Report) -> str:
    text = "\n## Ten samples, not picked\n"
    text += (
        "The first held-out text of each source and the first items; temperature 0.7, top-p 0.9.\n"
    )
    for sample in report["samples"]:
        tail = sample["prompt"][-300:]
        text += f"\n**{sample['kind']}**, prompt ends:\n\n````text\n{tail}\n````\n\ncontinues:\n\n"
        text += f"````text\n{sample['output']}\n````\n"
    return text


def add_means(report: Report) -> None:
    texts = list(report["text"].values())
    tokens = sum(t["tokens"] for t in texts)
    mean = sum(t["loss"] * t["tokens"] for t in texts) / tokens
    report["text_mean"] = round(mean, 3)
    report["mixed"] = round((mean + report["chat"]["loss"]) / 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("checkpoints/netra-tiny"))
    parser.add_argument("--report", type=Path, nargs="+", default=[Path(".cache/tiny/report.json")],
                        help="reports of evaluate.py, merged")  # fmt: skip
    parser.add_argument("--manifest", type=Path, default=Path(".cache/tiny/data/manifest.json"))
    parser.add_argument("--state", type=Path, default=Path(".cache/tiny/state.pt"))
    parser.add_argument("--notes", type=Path, required=True, help="how it was trained, in words")
    args = parser.parse_args()
    report: Report = {}
    for path in args.report:
        report |= json.loads(path.read_text())
    add_means(report)
    manifest = json.loads(args.manifest.read_text())
    progress = torch.load(args.state, weights_only=False)["progress"]
    config = json.loads((args.directory / "config.json").read_text())
    weights = args.directory / "model.safetensors"
    head = HEAD.format(
        total=report["parameters"][0] / 1e6,
        active=report["parameters"][1] / 1e6,
        size=weights.stat().st_size / 1e6,
        digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
        positions=config["max_position_embeddings"],
        theta=config["rope_parameters"]["rope_theta"],
    )
    card = head + HOW + NOT + data_section(manifest)
    card += training_section(progress, args.notes.read_text().strip())
    card += loss_section(report) + copy_section(report)
    card += precision_section(report) + samples_section(report)
    (args.directory / "README.md").write_text(card)
    print(f"{args.directory / 'README.md'}: {len(card.splitlines())} lines")


if __name__ == "__main__":
    main()

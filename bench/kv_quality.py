"""Measures what a KV codec does to a model's answers: perplexity, logit KL, agreement and far recall.

    python bench/kv_quality.py --checkpoint DIR [--codec int8 int4 ...] [--json FILE] [--plot FILE]

Runs the engine's own path (models, KVCache, StatePool, paged_attention) on real text, teacher-forced, with the
plain cache and every codec side by side over the same weights. Texts are read in chunks of one page, so that a
token sees older pages coded and its own page exact, as a decoding token does; the last --decode tokens are
computed one at a time. Far recall: a passage, other text, and the same passage again; its second copy is
scored. Knows no scheduler and no server.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import machine
from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.cache.codecs import choose_codec
from netra_backend.cache.kv_cache import KVCache
from netra_backend.cache.state_pool import StatePool
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.forward_context import build_context
from netra_backend.memory_plan import (
    PLAIN,
    KVLayout,
    bits_per_value,
    opening_codec,
    plan_memory,
    slot_layout,
)
from netra_backend.models.registry import Model, load_model
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import PAGE_SIZE, Sequence
from netra_backend.tokenizer import Tokenizer
from report import percentile, save, table
from workload import PromptMaker, standard_library

CODECS = (PLAIN, "int8", "k8v4", "int4", "fp8_e4m3")
_COMPUTE = torch.float32


@dataclass(slots=True)
class Score:
    """Sums over the scored positions of one codec, and the KL of each."""

    nll: float = 0.0
    num_tokens: int = 0
    num_agreeing: int = 0
    num_right: int = 0
    kl: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, base: torch.Tensor, targets: torch.Tensor) -> None:
        """Rows of logits [num_rows, vocab] against the plain cache's log-probabilities and the next tokens."""
        logp = logits.log_softmax(-1)
        self.nll -= logp.gather(1, targets[:, None]).sum().item()
        self.num_tokens += len(targets)
        choice = logits.argmax(-1)
        self.num_agreeing += int((choice == base.argmax(-1)).sum())
        self.num_right += int((choice == targets).sum())
        self.kl += (base.exp() * (base - logp)).sum(-1).clamp_min(0).tolist()


@dataclass(frozen=True, slots=True)
class Quality:
    """One codec's result. ppl_delta is relative (0.001 = 0.1 %); kl in nats, plain cache against this one."""

    codec: str
    bits_per_value: float
    ppl: float
    ppl_delta: float
    kl: float
    kl_p99: float
    top1: float
    copy_nll: float
    copy_top1: float
    num_tokens: int
    kept_pages: int


class Lane:
    """One codec's cache and states; the weights are shared."""

    def __init__(
        self,
        codec: str,
        opening: str,
        model: Model,
        config: ModelConfig,
        num_slots: int,
        num_tokens: int,
    ) -> None:
        self.codec = codec
        self._model = model
        element = _COMPUTE.itemsize
        layer_bytes = 2 * num_tokens * config.num_kv_heads * config.head_dim * element * num_slots
        plan = plan_memory(
            config,
            budget_bytes=4 * layer_bytes * config.num_attention_layers + 2**32,
            num_slots=num_slots,
            max_model_len=num_tokens + 1,
            element_bytes=element,
            state_element_bytes=4,
            max_draft_tokens=0,
            kv=KVLayout(codec, opening_codec=opening or opening_codec(codec) or codec),
        )
        device = torch.device("cpu")
        self._cache = KVCache(config, plan, _COMPUTE, device)
        layout = slot_layout(config, 0)
        self._states = StatePool(
            config, plan, layout, _COMPUTE, torch.float32, torch.float32, device
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the step's rows, [num_logits, vocab]."""
        items = batch.scheduled
        if fresh := [item.seq.slot for item in items if item.seq.num_computed_tokens == 0]:
            self._states.reset(fresh)
        if sealing := [item for item in items if not item.is_chunk and item.seal_block_ids]:
            pages = [item.seal_block_ids[0] for item in sealing]
            self._cache.seal_tails([item.seq.slot for item in sealing], pages)
        context, _ = build_context(batch, torch.device("cpu"))
        hidden = self._model.forward(context, self._cache, self._states)
        return self._model.logits(hidden[context.logit_rows])


def steps(texts: list[list[int]], num_decoded: int, kept_pages: int) -> Iterator[Batch]:
    """Teacher-forced steps over texts of one length; the caller runs a batch before it asks for the next.

    kept_pages: full pages that stay in the tail (0: seal at 64 committed tokens, 1: at 128).
    """
    seqs = [
        Sequence(i, Request(str(i), tuple(t), SamplingParams(), 0.0), list(t), len(t), 0, slot=i)
        for i, t in enumerate(texts)
    ]
    length = len(texts[0])
    plain_pages = length // PAGE_SIZE - 1
    position = 0
    while position < length:
        rows = (
            min(PAGE_SIZE, length - num_decoded - position)
            if position < length - num_decoded
            else 1
        )
        is_chunk = rows > 1
        end = position + rows if is_chunk else position
        items = []
        for index, seq in enumerate(seqs):
            held = len(seq.block_table)
            fresh = range(held, max(held, end // PAGE_SIZE - kept_pages))
            ids = [index * plain_pages + number - 1 if number else -1 - index for number in fresh]
            items.append(ScheduledSequence(seq, rows, is_chunk, [], ids, rows))
        yield Batch(items)
        for item in items:
            item.seq.block_table.extend(item.seal_block_ids)
            item.seq.num_computed_tokens += rows
            item.seq.num_replay_tokens = 0 if is_chunk else 1
        position += rows


def score(
    lanes: list[Lane], texts: list[list[int]], first: int, num_decoded: int, kept_pages: int
) -> list[Score]:
    """Scores of each lane over positions >= `first`; the first lane is the reference."""
    scores = [Score() for _ in lanes]
    for batch in steps(texts, num_decoded, kept_pages):
        seq = batch.scheduled[0].seq
        start, rows = seq.num_computed_tokens, batch.scheduled[0].num_scheduled_tokens
        keep = [j for j in range(rows) if start + j >= first and start + j + 1 < len(texts[0])]
        targets = torch.tensor([text[start + j + 1] for text in texts for j in keep])
        base = None
        for lane, total in zip(lanes, scores, strict=True):
            logits = lane.run(batch)
            if keep:
                logits = logits.unflatten(0, (len(texts), rows))[:, keep].flatten(0, 1)
                base = logits.log_softmax(-1) if base is None else base
                total.add(logits, base, targets)
    return scores


def measure(arguments: argparse.Namespace) -> tuple[list[Quality], str]:
    """All codecs on the same texts; the plain cache comes first."""
    config = ModelConfig.from_file(arguments.checkpoint / "config.json")
    tokenizer = Tokenizer(arguments.checkpoint)
    corpus = standard_library()
    maker = PromptMaker(tokenizer, corpus, arguments.seed)
    texts = [list(maker.make(arguments.length).token_ids) for _ in range(arguments.texts)]
    passages = [list(maker.make(arguments.passage).token_ids) for _ in range(arguments.texts)]
    fillers = [
        list(maker.make(arguments.length - 2 * arguments.passage).token_ids) for _ in passages
    ]
    copies = [p + f + p for p, f in zip(passages, fillers, strict=True)]
    device = torch.device("cpu")
    model = load_model(arguments.checkpoint, config, _COMPUTE, device)
    names = [PLAIN, *(codec for codec in arguments.codec if codec not in (PLAIN, "auto"))]
    knobs = [EngineConfig(kv_cache_dtype=name, allow_fp8_without_qk_norm=True) for name in names]
    chosen = [choose_codec(k, config, device) for k in knobs]
    openings = [arguments.opening_codec if name != PLAIN else "" for name in chosen]
    lanes = [
        Lane(name, opening, model, config, arguments.texts, arguments.length)
        for name, opening in zip(chosen, openings, strict=True)
    ]
    kept = arguments.kept_pages
    plain = score(lanes, texts, PAGE_SIZE, arguments.decode, kept)
    second = arguments.length - arguments.passage
    copied = score(lanes, copies, second, 0, kept)
    base = plain[0].nll / plain[0].num_tokens
    results = []
    for lane, total, copy in zip(lanes, plain, copied, strict=True):
        nll = total.nll / total.num_tokens
        loss = torch.tensor(nll - base, dtype=torch.float64)
        results.append(
            Quality(
                codec=lane.codec,
                bits_per_value=bits_per_value(lane.codec, config, _COMPUTE.itemsize),
                ppl=float(torch.tensor(nll).exp()),
                ppl_delta=float(loss.expm1()),
                kl=sum(total.kl) / len(total.kl),
                kl_p99=percentile(total.kl, 0.99) or 0.0,
                top1=total.num_agreeing / total.num_tokens,
                copy_nll=copy.nll / copy.num_tokens,
                copy_top1=copy.num_right / copy.num_tokens,
                num_tokens=total.num_tokens,
                kept_pages=kept,
            )
        )
    return results, corpus.description


def quality_table(results: list[Quality]) -> str:
    """The results as Markdown."""
    headers = [
        "codec",
        "bits/value",
        "ppl",
        "ppl delta",
        "KL",
        "KL p99",
        "same top-1",
        "copy NLL",
        "copy top-1",
    ]
    lines = (
        [
            r.codec,
            f"{r.bits_per_value:.2f}",
            f"{r.ppl:.3f}",
            f"{100 * r.ppl_delta:+.2f} %",
            f"{r.kl:.5f}",
            f"{r.kl_p99:.4f}",
            f"{100 * r.top1:.1f} %",
            f"{r.copy_nll:.4f}",
            f"{100 * r.copy_top1:.1f} %",
        ]
        for r in results
    )
    return table(headers, lines)


def plot(results: list[Quality], path: Path) -> bool:
    """KL over bits per value; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for result in results[1:]:
        axes.plot(result.bits_per_value, result.kl, "o", label=result.codec)
        axes.annotate(result.codec, (result.bits_per_value, result.kl))
    axes.set_yscale("log")
    axes.set_xlabel("bits per value, scales included")
    axes.set_ylabel("mean KL of the next token")
    figure.savefig(path, dpi=150)
    return True


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--codec", nargs="+", default=list(CODECS), choices=("auto", *CODECS))
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=1536, help="tokens of each text")
    parser.add_argument("--passage", type=int, default=384, help="tokens that are repeated")
    parser.add_argument("--decode", type=int, default=64, help="last tokens, one a step")
    parser.add_argument("--kept-pages", type=int, default=0, choices=(0, 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument(
        "--opening-codec", default="", choices=CODECS, help="of first pages; default: the engine's"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write a PNG; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.num_threads:
        torch.set_num_threads(arguments.num_threads)
    begun = time.perf_counter()
    with torch.inference_mode():
        results, source = measure(arguments)
    print(quality_table(results))
    if arguments.json:
        conditions = {
            "checkpoint": arguments.checkpoint.name,
            "text": source,
            "texts": arguments.texts,
            "length": arguments.length,
            "passage": arguments.passage,
            "decode": arguments.decode,
            "seed": arguments.seed,
            "seconds": round(time.perf_counter() - begun, 1),
            "machine": asdict(machine.describe(torch.__version__)),
        }
        save(arguments.json, "kv_quality", results, conditions)
    if arguments.plot and not plot(results, arguments.plot):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

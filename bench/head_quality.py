"""Measures what an FP8 output head (lm_head_dtype=fp8) does to a model's next-token distribution.

    python bench/head_quality.py [--checkpoint DIR] [--json FILE]

Teacher-forced over real text, the engine's own path on the CPU; the same final hidden states go through the exact head
and through OutputHead as the GPU's runner keeps it (FP8 blocks, rows rounded to FP8), computed by the kernels'
references. Knows no scheduler and no server.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import machine
from kv_quality import Lane, Score, score
from netra_backend.cache.kv_cache import KVCache
from netra_backend.cache.state_pool import StatePool
from netra_backend.config import ModelConfig
from netra_backend.forward_context import ForwardContext
from netra_backend.gpu.device_ops import REFERENCES
from netra_backend.gpu.projection import OutputHead, Setting
from netra_backend.memory_plan import PLAIN
from netra_backend.models.registry import Model, load_model
from netra_backend.models.weights import Weights
from netra_backend.sequence import PAGE_SIZE
from netra_backend.tokenizer import Tokenizer
from report import percentile, save, table
from workload import PromptMaker, standard_library

_COMPUTE = torch.float32


@dataclass(frozen=True, slots=True)
class Quality:
    """ppl_delta is relative; kl in nats, the exact head against FP8; top1: share of equal most likely tokens."""

    ppl: float
    ppl_delta: float
    kl: float
    kl_p99: float
    top1: float
    num_tokens: int


class Fp8HeadModel:
    """The model with its output head in FP8."""

    def __init__(self, model: Model, checkpoint: Path, config: ModelConfig) -> None:
        device = torch.device("cpu")
        weights = Weights(checkpoint, _COMPUTE, device, config.fp8_block)
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        setting = Setting.of(config, REFERENCES, _COMPUTE, device, fp8_head=True)
        self._model = model
        self.logits = OutputHead(
            weights.get(name, (config.vocab_size, config.hidden_size)), setting
        )

    def forward(self, context: ForwardContext, cache: KVCache, states: StatePool) -> torch.Tensor:
        """The model's own."""
        return self._model.forward(context, cache, states)


def measure(arguments: argparse.Namespace) -> tuple[Quality, str]:
    """Both heads on the same texts."""
    config = ModelConfig.from_file(arguments.checkpoint / "config.json")
    corpus = standard_library()
    maker = PromptMaker(Tokenizer(arguments.checkpoint), corpus, arguments.seed)
    texts = [list(maker.make(arguments.length).token_ids) for _ in range(arguments.texts)]
    model = load_model(arguments.checkpoint, config, _COMPUTE, torch.device("cpu"))
    lanes = [
        Lane(PLAIN, "", each, config, arguments.texts, arguments.length)  # type: ignore[arg-type]
        for each in (model, Fp8HeadModel(model, arguments.checkpoint, config))
    ]
    exact, fp8 = score(lanes, texts, PAGE_SIZE, 0, 0)
    return quality(exact, fp8), corpus.description


def quality(exact: Score, fp8: Score) -> Quality:
    """Of the FP8 head against the exact one."""
    nll, base = (total.nll / total.num_tokens for total in (fp8, exact))
    loss = torch.tensor(nll - base, dtype=torch.float64)
    return Quality(
        ppl=float(torch.tensor(nll).exp()),
        ppl_delta=float(loss.expm1()),
        kl=sum(fp8.kl) / len(fp8.kl),
        kl_p99=percentile(fp8.kl, 0.99) or 0.0,
        top1=fp8.num_agreeing / fp8.num_tokens,
        num_tokens=fp8.num_tokens,
    )


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = Path(__file__).parents[1] / "checkpoints" / "netra-tiny"
    parser.add_argument("--checkpoint", type=Path, default=default)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with torch.inference_mode():
        result, source = measure(arguments)
    headers = ["head", "ppl", "ppl delta", "KL", "KL p99", "same top-1"]
    row = ["fp8", f"{result.ppl:.3f}", f"{100 * result.ppl_delta:+.3f} %", f"{result.kl:.6f}",
           f"{result.kl_p99:.5f}", f"{100 * result.top1:.2f} %"]  # fmt: skip
    print(table(headers, [row]))
    if arguments.json:
        conditions = {
            "checkpoint": arguments.checkpoint.name, "text": source, "texts": arguments.texts,
            "length": arguments.length, "seed": arguments.seed, "machine": asdict(machine.describe(torch.__version__)),
        }  # fmt: skip
        save(arguments.json, "head_quality", [result], conditions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

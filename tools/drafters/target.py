"""What drafters share with their target, and the batches that collect.py's parts give.

Knows file layouts only; the target's weights are read and never trained.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from netra_backend.config import ModelConfig
from netra_backend.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Target:
    """Shapes, embedding and head `[vocab, hidden]` float32, and the factors of the norm before the head."""

    config: ModelConfig
    embedding: Tensor
    head: Tensor
    norm: Tensor

    @classmethod
    def load(cls, checkpoint: Path) -> "Target":
        config = ModelConfig.from_file(checkpoint / "config.json")
        weights = Weights(checkpoint, torch.float32, torch.device("cpu"), config.fp8_block)
        shape = (config.vocab_size, config.hidden_size)
        norm = weights.get("model.norm.weight", (config.hidden_size,))
        is_zero_centred = config.model_type.startswith("qwen3_5")
        return cls(
            config,
            weights.get("model.embed_tokens.weight", shape),
            weights.get("lm_head.weight", shape),
            norm + 1 if is_zero_centred else norm,
        )


@dataclass(frozen=True, slots=True)
class Data:
    """Conversations of equal length: tokens `[count, length]`, states `[count, length - 1, places * hidden]`."""

    tokens: Tensor
    states: Tensor

    @classmethod
    def load(cls, folder: Path) -> "Data":
        parts = [load_file(path) for path in sorted(folder.glob("part-*.safetensors"))]
        if not parts:
            raise SystemExit(f"no parts in {folder}: run tools.drafters.collect first")
        return cls(*(torch.cat([part[name] for part in parts]) for name in ("tokens", "states")))

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`size` random conversations, int64 and float32."""
        rows = torch.randint(len(self.tokens), (size,), generator=generator)
        return self.tokens[rows].long(), self.states[rows].float()

    def commonest(self, count: int) -> Tensor:
        """The `count` most frequent token ids, ascending."""
        counts = torch.bincount(self.tokens.flatten().long())
        return counts.argsort(descending=True, stable=True)[:count].sort().values

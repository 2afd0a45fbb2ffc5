"""Layers that EAGLE-3 heads and DFlash drafters share: rotary table, weights of plain attention, output head.

Knows tensors by name and no method. Norms are plain RMSNorm (not zero-centred), as in Llama and Qwen3.
"""

from __future__ import annotations

import math

import torch

from netra_backend.errors import ConfigError
from netra_backend.models.layers import pair_rotary
from netra_backend.models.registry import Model
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear, RmsNorm
from netra_backend.spec.drafter_config import DrafterConfig, Rope


class DrafterRotary:
    """cos + i sin of positions 0 .. max_len - 1 over the whole head, times YaRN's attention factor."""

    def __init__(self, rope: Rope, head_dim: int, max_len: int, device: torch.device) -> None:
        positions = torch.arange(max_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, _frequencies(rope, head_dim).to(device))
        self._table = torch.polar(torch.full_like(angles, rope.attention_factor), angles)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Complex [num_tokens, 1, head_dim / 2] of positions [num_tokens]."""
        return self._table[positions].unsqueeze(1)


def _frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]; YaRN as in transformers' _compute_yarn_parameters."""
    half = head_dim // 2
    plain = rope.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    if rope.factor == 1.0:
        return plain

    def dimension(num_rotations: float) -> float:
        wavelength = rope.original_len / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    span = high - low or 0.001
    interpolated = ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain * (1 - interpolated) + plain / rope.factor * interpolated


def plain_norm(weights: Weights, name: str, size: int, eps: float) -> RmsNorm:
    """RMSNorm over `size` elements with the tensor `name`.weight as it is."""
    return RmsNorm(weights.get(f"{name}.weight", (size,), torch.float32), eps)


def paired_norm(weights: Weights, name: str, size: int, eps: float) -> RmsNorm:
    """plain_norm of queries or keys whose dimensions are in rotary pairs (models/layers.py)."""
    weight = weights.get(f"{name}.weight", (size,), torch.float32)
    return RmsNorm(pair_rotary(weight[None], size)[0], eps)


def projections(
    weights: Weights, prefix: str, config: DrafterConfig, input_size: int
) -> list[torch.Tensor]:
    """q, k and v weights [heads * head_dim, input_size]; q and k in rotary pairs."""
    dim = config.head_dim
    counts = {"q": config.num_attention_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    q, k, v = (
        weights.get(f"{prefix}.{name}_proj.weight", (count * dim, input_size))
        for name, count in counts.items()
    )
    paired = [pair_rotary(x.view(-1, dim, input_size), dim).flatten(0, 1) for x in (q, k)]
    return [*paired, v]


class TokenHead:
    """Embeds tokens, and turns normed states into tokens: with the target's matrices, or with its own where the
    checkpoint brings them. A reduced vocabulary has a table: target id = id + d2t[id].
    """

    def __init__(self, weights: Weights, config: DrafterConfig, model: Model) -> None:
        hidden = config.hidden_size
        self._model = model
        self._config = config
        self._table: torch.Tensor | None = None
        if "embed_tokens.weight" in weights:
            self._table = weights.get("embed_tokens.weight", (config.vocab_size, hidden))
        self._head: Linear | None = None
        self._target_ids: torch.Tensor | None = None
        num_ids = config.draft_vocab_size or config.vocab_size
        if config.draft_vocab_size or "lm_head.weight" in weights:
            self._head = Linear(weights.get("lm_head.weight", (num_ids, hidden)))
        if num_ids < config.vocab_size or "d2t" in weights:
            self._target_ids = _target_ids(weights, num_ids, config.vocab_size)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]."""
        embedded = self._model.embed(token_ids) if self._table is None else self._table[token_ids]
        scale = self._config.embedding_scale
        return embedded if scale == 1.0 else embedded * scale

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, size of the drafter's vocabulary]."""
        head = self._head
        logits = self._model.logits(normed) if head is None else head(normed).float()
        config = self._config
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if config.logit_softcap:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def target_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target for ids of the drafter's vocabulary."""
        return token_ids if self._target_ids is None else self._target_ids[token_ids]


def _target_ids(weights: Weights, num_ids: int, vocab_size: int) -> torch.Tensor:
    """[num_ids] from `d2t`, which `t2d` [vocab_size] must agree with if it is there."""
    offsets = weights.get("d2t", (num_ids,), torch.int64)
    found = torch.arange(num_ids, device=offsets.device) + offsets
    if int(found.min()) < 0 or int(found.max()) >= vocab_size:
        raise ConfigError("drafter_checkpoint: d2t points outside the target's vocabulary")
    if "t2d" in weights:
        marked = weights.get("t2d", (vocab_size,), torch.bool)
        mine = torch.zeros_like(marked)
        mine[found] = True
        if not torch.equal(marked, mine):
            raise ConfigError("drafter_checkpoint: t2d and d2t name different tokens")
    return found

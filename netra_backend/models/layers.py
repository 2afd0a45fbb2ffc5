"""Layers that several architectures share. Plain classes over loaded tensors; no architecture lives here.

Every layer is built from Weights by name and called with the rows of a step; what a step needs besides its
rows comes from the ForwardContext.
"""

from __future__ import annotations

import torch

from netra_backend.config import ModelConfig
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear, silu_and_mul


class RotaryEmbedding:
    """cos + i sin of every position: angle = position * theta^(-2i / rotary_dim), float32."""

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device) -> None:
        half = config.rotary_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=device) / half
        angles = torch.outer(
            torch.arange(max_len, dtype=torch.float32, device=device), config.rope_theta**-exponents
        )
        self._table = torch.polar(torch.ones_like(angles), angles)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Complex [num_tokens, 1, rotary_dim / 2] of positions [num_tokens]."""
        return self._table[positions].unsqueeze(1)


def pair_rotary(heads: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Reorder the first rotary_dim of [.., head_dim, ..] (dimension 1) from halves to neighbouring pairs.

    Checkpoints pair dimension i with i + rotary_dim / 2. Queries and keys are permuted alike, so their
    products stay what they were.
    """
    half = rotary_dim // 2
    rotary = heads[:, :rotary_dim].unflatten(1, (2, half)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotary, heads[:, rotary_dim:]), 1)


class GatedMlp:
    """residual + down(silu(gate x) * up x), gate and up as one matrix product."""

    def __init__(self, weights: Weights, prefix: str, hidden_size: int, inner_size: int) -> None:
        shape = (inner_size, hidden_size)
        gate_up = [weights.get(f"{prefix}.{name}_proj.weight", shape) for name in ("gate", "up")]
        self._gate_up = Linear(torch.cat(gate_up))
        self._down = Linear(weights.get(f"{prefix}.down_proj.weight", (hidden_size, inner_size)))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._down(silu_and_mul(self._gate_up(x)), residual)


class Embedding:
    """Token embeddings and the output head, which may be the same matrix."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self._table = weights.get("model.embed_tokens.weight", shape)
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        self._head = Linear(self._table if tied else weights.get("lm_head.weight", shape))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]."""
        return self._table[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of rows that passed the final norm."""
        return self._head(hidden).float()

"""Trainable layers of drafters, with the names that published checkpoints have: attention with a mask, gated MLP.

Knows neither engine nor method. What they compute is what netra_backend/spec computes over caches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Plain RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half rotation of x `[rows, length, heads, dim]` at positions `[rows, length]`."""
    dim = x.shape[-1]
    inverse = theta ** (-torch.arange(0, dim, 2) / dim)
    angles = (positions[..., None] * inverse)[:, :, None]
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Projections of queries, keys and values, which are rotated; `has_norms` as in Qwen3."""

    def __init__(
        self, size: int, input_size: int, heads: int, kv_heads: int, dim: int, theta: float,
        has_norms: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.theta = dim, theta
        self.q_proj = nn.Linear(input_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)
        if has_norms:
            self.q_norm, self.k_norm = Norm(dim), Norm(dim)
        self.has_norms = has_norms
        nn.init.normal_(self.o_proj.weight, std=0.02)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.dim))
        return rotate(self.q_norm(q) if self.has_norms else q, positions, self.theta)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (p(x).unflatten(-1, (-1, self.dim)) for p in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k) if self.has_norms else k, positions, self.theta), v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """q, k, v `[rows, length, heads, dim]`; visible `[rows, 1, queries, keys]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.normal_(self.down_proj.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

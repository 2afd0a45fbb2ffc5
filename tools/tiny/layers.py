"""What every part of the tiny model shares: its sizes, a cast projection and the two norms."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Config:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    attention_interval: int = 4  # every 4th layer has softmax attention
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_share: float = 0.25
    rope_theta: float = 1e6
    max_positions: int = 32768
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 64
    conv_kernel: int = 4
    experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 128
    shared_size: int = 128
    eps: float = 1e-6
    chunk: int = 32
    matmul_dtype: str = "float32"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    @property
    def layer_types(self) -> list[str]:
        full = self.attention_interval
        return [
            "full_attention" if (i + 1) % full == 0 else "linear_attention"
            for i in range(self.layers)
        ]


class Linear(nn.Module):
    """Bias-free projection; input and weight are cast to the matmul dtype."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype))


class Norm(nn.Module):
    """Zero-centred RMSNorm in float32: the stored weight is added to one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight, self.eps)


class GatedNorm(nn.Module):
    """RMSNorm with a plain weight, then a SiLU gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * F.silu(gate.float())

"""The table of operations: which implementation a device runs. Models import operations from here only.

Knows no model. A CPU runs torch (torch_ops/); the Triton-language kernels of netra_kernels take their
places on a GPU. The choice is made once, when a model is constructed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from netra_backend.torch_ops.attention import paged_attention
from netra_backend.torch_ops.fused_moe import fused_moe
from netra_backend.torch_ops.gated_delta_rule import chunked, recurrent, recurrent_step

__all__ = [
    "Linear",
    "RmsNorm",
    "apply_rope",
    "chunked",
    "fused_moe",
    "paged_attention",
    "recurrent",
    "recurrent_step",
    "silu_and_mul",
]

# At fewer rows a matrix product is bound by reading the weights, and the plain layout reads them faster
# (bench/gemm.py: float32, 2 threads: 33 against 25 GB/s at 1 row; from 4 rows on the packed one wins 1.5-2.6x).
_MIN_PACKED_ROWS = 4


class Linear:
    """y = x W^T for W [out_features, in_features], x [num_tokens, in_features].

    On a CPU a second copy of W in oneDNN's blocked layout serves batches of more than a few rows.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._transposed = weight.t()
        self._packed: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T, plus `residual` [num_tokens, out_features] if it is given."""
        if self._packed is None or x.shape[0] < _MIN_PACKED_ROWS:
            if residual is None:
                return F.linear(x, self.weight)
            return torch.addmm(residual, x, self._transposed)
        mkldnn = torch.ops.mkldnn._linear_pointwise
        result: torch.Tensor = (
            mkldnn(x, self._packed, None, "none", [], "")
            if residual is None
            else mkldnn.binary(x, residual, self._packed, None, "add")
        )
        return result


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [.., size]; float32 inside.

    On float32 rows it is spelled in 5 operations: F.rms_norm does 7 on a CPU, and at one row an operation
    costs what its dispatch costs (15 against 21 us at 576 columns).
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = eps
        self._eps_tensor = torch.tensor(eps, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if x.dtype != torch.float32:
            return F.rms_norm(x.float(), (size,), self._weight, self._eps).to(x.dtype)
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, norm, norm, value=1 / size).rsqrt_()
        return torch.mul(x, scale).mul_(self._weight)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])


def apply_rope(x: torch.Tensor, rotation: torch.Tensor) -> None:
    """Rotate the first rotary_dim of x [num_tokens, num_heads, head_dim] in place.

    rotation [num_tokens, 1, rotary_dim / 2] complex: cos + i sin. Pairs are neighbours (2i, 2i + 1), so a
    rotation is one complex product; weights are permuted when they are loaded (models/layers.py).
    """
    rotary = x[..., : 2 * rotation.shape[-1]]
    pairs = rotary.view(*rotary.shape[:-1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))

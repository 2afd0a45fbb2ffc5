"""The table of operations: which implementation a device runs. Models import operations from here only.

Knows no model. A CPU runs torch (torch_ops/); the Triton-language kernels of netra_kernels take their
places on a GPU. The choice is made once, when a model is constructed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from netra_backend.torch_ops.attention import paged_attention
from netra_backend.torch_ops.fused_moe import fused_moe
from netra_backend.torch_ops.gated_delta_rule import by_token, chunked, recurrent, recurrent_step

__all__ = [
    "Linear",
    "RmsNorm",
    "apply_rope",
    "by_token",
    "chunked",
    "fused_moe",
    "paged_attention",
    "recurrent",
    "recurrent_step",
    "silu_and_mul",
]

# bench/gemm.py, 2 threads: up to here halves beat packed float32, 1.3 times at 8 rows and equal at 32.
_MAX_HALF_ROWS = 32

_PACKED_FOR_ROWS = 512
"""MKL may choose the layout by a number of rows; it computes any number with it. Long chunks gain the most."""


class Linear:
    """y = x W^T for W [out_features, in_features], x [num_tokens, in_features].

    On a CPU float32 weights are packed once: by MKL, and for few rows, where reading them is what takes time, as halves
    for FBGEMM if every weight is one exactly (the products and sums stay float32).
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._packed: torch.Tensor | None = None
        self._halves: torch.ScriptObject | None = None
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if torch.equal(weight.half().float(), weight):
            self._halves = torch.ops.quantized.linear_prepack_fp16(weight, None)
        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            pack = torch.ops.mkl._mkl_reorder_linear_weight
            self._packed = pack(weight.contiguous(), _PACKED_FOR_ROWS)
            self._weight = weight.new_empty(1).expand(weight.shape)  # only its shape is asked for

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T, plus `residual` [num_tokens, out_features] if it is given."""
        result: torch.Tensor
        num_rows = x.shape[0]
        if self._halves is not None and num_rows <= _MAX_HALF_ROWS:
            result = torch.ops.quantized.linear_dynamic_fp16(x, self._halves)
        elif self._packed is not None:
            mkl = torch.ops.mkl._mkl_linear
            result = mkl(x, self._packed, self._weight, None, num_rows)
        elif residual is not None:
            return torch.addmm(residual, x, self._weight.t())
        else:
            return F.linear(x, self._weight)
        return result if residual is None else result.add_(residual)


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
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def apply_rope(x: torch.Tensor, rotation: torch.Tensor) -> None:
    """Rotate the first rotary_dim of x [num_tokens, num_heads, head_dim] in place.

    rotation [num_tokens, 1, rotary_dim / 2] complex: cos + i sin. Pairs are neighbours (2i, 2i + 1), so a
    rotation is one complex product; weights are permuted when they are loaded (models/layers.py).
    """
    size = 2 * rotation.shape[-1]
    rotary = x if size == x.shape[-1] else x[..., :size]
    pairs = rotary.view(*rotary.shape[:-1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))

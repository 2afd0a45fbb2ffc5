"""Residual addition, RMSNorm and FP8 quantisation in one pass over a row; and the gated norm of GDN.

rms_norm:        x, residual [num_tokens, hidden] -> hidden, residual, fp8 [num_tokens, hidden] and
                 scales [num_tokens, hidden / 128] float32.
gated_rms_norm:  x, gate [num_tokens, num_heads, head_dim] -> out and its fp8 form, one scale per head.
quantize_rows:   x [num_rows, hidden] -> fp8 and scales alone.
h = x + residual in the model's dtype; y = h * rsqrt(mean(h^2) + eps) * (weight or 1 + weight) in float32,
rounded once; fp8 = round(y / scale) with scale = max|y| / 448 over groups of 128 channels.
x may be the outputs of a token's experts [num_tokens, slots, hidden] with slot_weights float32 [num_tokens, slots]: then
x stands for their weighted sum, rounded. Does not know which layers want which outputs: None in, None out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.operands import check_dense

FP8_MAX = 448.0
GROUP = 128
"""Channels per FP8 activation scale: the block of the checkpoint's weights (weight_block_size)."""

MIN_SCALE = 1e-12
"""Scale of a group of zeros, so that nothing divides by zero."""


@dataclass(frozen=True, slots=True)
class NormOutput:
    """hidden: the normalised rows; residual: x + residual; fp8, scales: `hidden` quantised (None if not asked)."""

    hidden: torch.Tensor
    residual: torch.Tensor
    fp8: torch.Tensor | None = None
    scales: torch.Tensor | None = None


def quantize_fp8_ref(x: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of x [..., n] and float32 scales [..., n / group]: x = codes * scale."""
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=MIN_SCALE * FP8_MAX) / FP8_MAX
    codes = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    fp8: bool = False,
    slot_weights: torch.Tensor | None = None,
) -> NormOutput:
    """Reference of `rms_norm`."""
    if slot_weights is not None:
        x = (x.float() * slot_weights[..., None]).sum(1).to(x.dtype)
    h = x if residual is None else x + residual
    h32 = h.float()
    y = h32 * torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    hidden = (y * (weight.float() + (1.0 if zero_centered else 0.0))).to(x.dtype)
    codes, scales = quantize_fp8_ref(hidden) if fp8 else (None, None)
    return NormOutput(hidden, h, codes, scales)


def gated_rms_norm_ref(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, fp8: bool = False
) -> NormOutput:
    """Reference of `gated_rms_norm`; the order of roundings is that of transformers' gated norm."""
    x32 = x.float()
    y = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    hidden = ((weight * y).float() * torch.nn.functional.silu(gate.float())).to(x.dtype)
    if not fp8:
        return NormOutput(hidden, x)
    codes, scales = quantize_fp8_ref(hidden, hidden.shape[-1])
    return NormOutput(hidden, x, codes, scales[..., 0])


def quantize_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `quantize_rows`."""
    return quantize_fp8_ref(x)


@triton.jit
def quantize_groups(b_y, NUM_GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """e4m3 codes and scales of b_y [NUM_GROUPS, WIDTH], one scale per row."""
    b_max = tl.max(tl.abs(b_y), 1)
    b_scale = tl.div_rn(tl.maximum(b_max, 448.0 * 1e-12), 448.0)
    b_code = tl.div_rn(b_y, tl.broadcast_to(b_scale[:, None], [NUM_GROUPS, WIDTH]))
    b_code = tl.minimum(tl.maximum(b_code, -448.0), 448.0)
    return b_code.to(tl.float8e4nv), b_scale


@triton.jit
def _rms_norm_kernel(
    p_x, p_slot_weights, p_residual, p_weight, p_hidden, p_sum, p_fp8, p_scale, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, FP8: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    mask = o < HIDDEN
    dtype: tl.constexpr = p_x.dtype.element_ty
    if SLOTS:
        b_sum = tl.zeros([BLOCK], tl.float32)
        for i_slot in tl.static_range(SLOTS):
            b_x = tl.load(p_x + (i_t * SLOTS + i_slot) * HIDDEN + o, mask=mask, other=0.0)
            b_sum += b_x.to(tl.float32) * tl.load(p_slot_weights + i_t * SLOTS + i_slot)
        b_h = b_sum.to(dtype)
        tl.store(p_sum + i_t * HIDDEN + o, b_h, mask=mask)
    else:
        b_h = tl.load(p_x + i_t * HIDDEN + o, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        b_r = tl.load(p_residual + i_t * HIDDEN + o, mask=mask, other=0.0)
        b_h = (b_h.to(tl.float32) + b_r.to(tl.float32)).to(dtype)
        tl.store(p_sum + i_t * HIDDEN + o, b_h, mask=mask)
    b_h32 = b_h.to(tl.float32)
    b_w = tl.load(p_weight + o, mask=mask, other=0.0).to(tl.float32) + OFFSET
    b_y = b_h32 * tl.rsqrt(tl.sum(b_h32 * b_h32, 0) / HIDDEN + eps) * b_w
    b_y = b_y.to(dtype)
    tl.store(p_hidden + i_t * HIDDEN + o, b_y, mask=mask)
    if FP8:
        NUM_GROUPS: tl.constexpr = BLOCK // 128
        b_groups = tl.reshape(b_y.to(tl.float32), [NUM_GROUPS, 128])
        b_code, b_scale = quantize_groups(b_groups, NUM_GROUPS, 128)
        tl.store(p_fp8 + i_t * HIDDEN + o, tl.reshape(b_code, [BLOCK]), mask=mask)
        o_g = tl.arange(0, NUM_GROUPS)
        tl.store(p_scale + i_t * (HIDDEN // 128) + o_g, b_scale, mask=o_g < HIDDEN // 128)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    fp8: bool = False,
    slot_weights: torch.Tensor | None = None,
) -> NormOutput:
    """Normalise the rows of x (+ residual); see the file's docstring for shapes."""
    num_tokens, hidden = x.shape[0], x.shape[-1]
    slots = 0 if slot_weights is None else x.shape[1]
    check_dense(x, residual, slot_weights)
    assert x.dim() == (3 if slots else 2)
    assert slot_weights is None or slot_weights.shape == x.shape[:2]
    assert weight.shape == (hidden,)
    assert residual is None or residual.shape == (num_tokens, hidden)
    assert not fp8 or hidden % GROUP == 0, f"hidden size {hidden} is no multiple of {GROUP}"
    out = x.new_empty((num_tokens, hidden))
    total = x.new_empty((num_tokens, hidden)) if residual is not None or slots else x
    codes = x.new_empty((num_tokens, hidden), dtype=torch.float8_e4m3fn) if fp8 else None
    scales = x.new_empty((num_tokens, hidden // GROUP), dtype=torch.float32) if fp8 else None
    block = max(GROUP, triton.next_power_of_2(hidden))
    _rms_norm_kernel[(num_tokens,)](
        x, slot_weights, residual, weight, out, total, codes, scales, eps,
        HIDDEN=hidden, BLOCK=block, OFFSET=1.0 if zero_centered else 0.0,
        HAS_RESIDUAL=residual is not None, FP8=fp8, SLOTS=slots, num_warps=8 if slots or block > 4096 else 4,
    )  # fmt: skip
    return NormOutput(out, total, codes, scales)


@triton.jit
def _gated_rms_norm_kernel(
    p_x, p_gate, p_weight, p_hidden, p_fp8, p_scale, eps, num_rows,
    stride_gate, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, DIM)
    mask = (o_r < num_rows)[:, None] & (o_d < DIM)[None, :]
    o = o_r[:, None] * DIM + o_d[None, :]
    b_x = tl.load(p_x + o, mask=mask, other=0.0)
    o_gate = (o_r // NUM_HEADS * stride_gate + o_r % NUM_HEADS * DIM)[:, None] + o_d[None, :]
    b_gate = tl.load(p_gate + o_gate, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(p_weight + o_d).to(tl.float32)
    b_x32 = b_x.to(tl.float32)
    b_y = (b_x32 * tl.rsqrt(tl.sum(b_x32 * b_x32, 1) / DIM + eps)[:, None]).to(b_x.dtype)
    b_y = (b_w[None, :] * b_y.to(tl.float32)).to(b_x.dtype).to(tl.float32)
    b_y = (b_y * b_gate * tl.sigmoid(b_gate)).to(b_x.dtype)
    tl.store(p_hidden + o, b_y, mask=mask)
    if FP8:
        b_code, b_scale = quantize_groups(b_y.to(tl.float32), ROWS, DIM)
        tl.store(p_fp8 + o, b_code, mask=mask)
        tl.store(p_scale + o_r, b_scale, mask=o_r < num_rows)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, fp8: bool = False
) -> NormOutput:
    """norm(x) * silu(gate) per head; gate may be a view of a wider projection. fp8 wants head_dim 128."""
    num_tokens, num_heads, dim = x.shape
    check_dense(x)
    assert gate.shape == x.shape
    assert gate.stride()[1:] == (dim, 1)
    assert weight.shape == (dim,)
    assert not fp8 or dim == GROUP, f"head_dim {dim}: one FP8 scale per head needs {GROUP}"
    rows = num_tokens * num_heads
    out = torch.empty_like(x)
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn) if fp8 else None
    scales = x.new_empty((num_tokens, num_heads), dtype=torch.float32) if fp8 else None
    _gated_rms_norm_kernel[(triton.cdiv(rows, 8),)](
        x, gate, weight, out, codes, scales, eps, rows, gate.stride(0),
        NUM_HEADS=num_heads, DIM=dim, ROWS=8, FP8=fp8, num_warps=4,
    )  # fmt: skip
    return NormOutput(out, x, codes, scales)


@triton.jit
def _quantize_rows_kernel(p_x, p_fp8, p_scale, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + i_t * HIDDEN + o, mask=o < HIDDEN, other=0.0).to(tl.float32)
    NUM_GROUPS: tl.constexpr = BLOCK // 128
    b_code, b_scale = quantize_groups(tl.reshape(b_x, [NUM_GROUPS, 128]), NUM_GROUPS, 128)
    tl.store(p_fp8 + i_t * HIDDEN + o, tl.reshape(b_code, [BLOCK]), mask=o < HIDDEN)
    o_g = tl.arange(0, NUM_GROUPS)
    tl.store(p_scale + i_t * (HIDDEN // 128) + o_g, b_scale, mask=o_g < HIDDEN // 128)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and scales per 128 channels of the rows of x."""
    num_rows, hidden = x.shape
    check_dense(x)
    assert hidden % GROUP == 0, f"hidden size {hidden} is no multiple of {GROUP}"
    codes = x.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn)
    scales = x.new_empty((num_rows, hidden // GROUP), dtype=torch.float32)
    _quantize_rows_kernel[(num_rows,)](
        x,
        codes,
        scales,
        HIDDEN=hidden,
        BLOCK=max(GROUP, triton.next_power_of_2(hidden)),
        num_warps=4,
    )
    return codes, scales

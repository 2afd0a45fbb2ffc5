"""Joins the parts of an attention by log-sum-exp; then output gate and FP8 quantisation, in the same pass.

parts float32 [num_splits + 1, num_tokens, num_heads, head_dim] and lse [num_splits + 1, num_tokens, num_heads]
(units of log 2): the splits over sealed history, each normalised, then the local part as the last one. Parts
with lse = -inf hold garbage and are not read. History of codecs that rotate values is turned back once, after
its splits are summed. Does not know where the parts come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.hadamard import hadamard, hadamard_ref
from netra_kernels.operands import check_dense, check_rows
from netra_kernels.rms_norm import GROUP, quantize_fp8_ref, quantize_groups


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """hidden [num_tokens, num_q_heads, head_dim]; fp8 and scales (per 128 channels) if asked."""

    hidden: torch.Tensor
    fp8: torch.Tensor | None = None
    scales: torch.Tensor | None = None


def gate_and_quantize_ref(
    hidden: torch.Tensor, gate: torch.Tensor | None, fp8: bool
) -> AttentionOutput:
    """hidden * sigmoid(gate), rounded, and its FP8 form per 128 channels of a token."""
    if gate is not None:
        hidden = (hidden.float() * gate.float().sigmoid()).to(hidden.dtype)
    codes, scales = quantize_fp8_ref(hidden.flatten(1)) if fp8 else (None, None)
    return AttentionOutput(hidden, codes, scales)


def merge_ref(
    parts: torch.Tensor,
    lse: torch.Tensor,
    dtype: torch.dtype,
    rotated: bool = False,
    gate: torch.Tensor | None = None,
    fp8: bool = False,
) -> AttentionOutput:
    """Reference of `merge`."""
    weights = (lse * 0.6931471805599453).softmax(0)
    parts = torch.where((lse > -torch.inf)[..., None], parts, 0.0) * weights[..., None]
    history = parts[:-1].sum(0)
    hidden = (hadamard_ref(history) if rotated else history) + parts[-1]
    return gate_and_quantize_ref(hidden.to(dtype), gate, fp8)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _merge_kernel(
    p_parts, p_lse, p_gate, p_out, p_fp8, p_scales, num_tokens, num_splits, stride_gate, stride_gate_head,
    NUM_Q: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    ROTATED: tl.constexpr, HAS_GATE: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_h, o_d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DIM)
    keep = o_h < NUM_Q
    o_row = i_t * NUM_Q + o_h
    o = o_row[:, None] * DIM + o_d[None, :]
    n_rows = num_tokens.to(tl.int64) * NUM_Q
    b_m = tl.full([HEADS], -float("inf"), tl.float32)
    b_l = tl.zeros([HEADS], tl.float32)
    b_acc = tl.zeros([HEADS, DIM], tl.float32)
    for i_p in range(num_splits):
        b_lse = tl.load(p_lse + i_p * n_rows + o_row, mask=keep, other=-float("inf"))
        there = b_lse > -float("inf")
        b_part = tl.load(p_parts + i_p * n_rows * DIM + o, mask=there[:, None], other=0.0)
        b_new = tl.maximum(b_m, b_lse)
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_old, b_weight = tl.exp2(b_m - b_safe), tl.exp2(b_lse - b_safe)
        b_acc = b_acc * b_old[:, None] + b_part * b_weight[:, None]
        b_l = b_l * b_old + b_weight
        b_m = b_new
    if ROTATED:
        b_acc = hadamard(b_acc, HEADS, DIM, STAGES, NORM)
    b_lse = tl.load(p_lse + num_splits * n_rows + o_row, mask=keep, other=0.0)
    b_part = tl.load(p_parts + num_splits * n_rows * DIM + o, mask=keep[:, None], other=0.0)
    b_new = tl.maximum(b_m, b_lse)
    b_old, b_weight = tl.exp2(b_m - b_new), tl.exp2(b_lse - b_new)
    b_acc = b_acc * b_old[:, None] + b_part * b_weight[:, None]
    b_out = (b_acc / (b_l * b_old + b_weight)[:, None]).to(p_out.dtype.element_ty)
    if HAS_GATE:
        o_gate = i_t * stride_gate + o_h[:, None] * stride_gate_head + o_d[None, :]
        b_gate = tl.load(p_gate + o_gate, mask=keep[:, None], other=0.0).to(tl.float32)
        b_out = (b_out.to(tl.float32) * tl.sigmoid(b_gate)).to(b_out.dtype)
    tl.store(p_out + o, b_out, mask=keep[:, None])
    if FP8:
        NUM_GROUPS: tl.constexpr = HEADS * DIM // 128
        b_groups = tl.reshape(b_out.to(tl.float32), [NUM_GROUPS, 128])
        b_code, b_scale = quantize_groups(b_groups, NUM_GROUPS, 128)
        tl.store(p_fp8 + o, tl.reshape(b_code, [HEADS, DIM]), mask=keep[:, None])
        o_g = tl.program_id(1) * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
        tl.store(
            p_scales + i_t * (NUM_Q * DIM // 128) + o_g, b_scale, mask=o_g < NUM_Q * DIM // 128
        )


def merge(
    parts: torch.Tensor,
    lse: torch.Tensor,
    dtype: torch.dtype,
    rotated: bool = False,
    gate: torch.Tensor | None = None,
    fp8: bool = False,
) -> AttentionOutput:
    """Joined parts in `dtype`; see the file's docstring. gate may be a view of a wider projection."""
    splits, (num_tokens, num_q, dim) = parts.shape[0] - 1, parts.shape[1:]
    check_dense(parts, lse)
    check_rows(gate)
    assert not fp8 or dim % GROUP == 0 or GROUP % dim == 0
    device = parts.device
    out = torch.empty((num_tokens, num_q, dim), dtype=dtype, device=device)
    codes = (
        torch.empty((num_tokens, num_q * dim), dtype=torch.float8_e4m3fn, device=device)
        if fp8
        else None
    )
    groups = num_q * dim // GROUP
    scales = torch.empty((num_tokens, groups), dtype=torch.float32, device=device) if fp8 else None
    heads = min(triton.next_power_of_2(num_q), max(4, 1024 // dim))
    _merge_kernel[(num_tokens, triton.cdiv(num_q, heads))](
        parts, lse, gate, out, codes, scales, num_tokens, splits,
        0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1),
        NUM_Q=num_q, DIM=dim, HEADS=heads, ROTATED=rotated,
        HAS_GATE=gate is not None, FP8=fp8, STAGES=dim.bit_length() - 1, NORM=dim**-0.5, num_warps=4,
    )  # fmt: skip
    return AttentionOutput(out, codes, scales)

"""Depthwise causal convolution with SiLU over ragged sequences, its past kept as columns in a ring.

x [num_tokens, channels] before the convolution, weight [channels, taps]; columns [num_slots, width, channels]: the
input of the token at position p lies in column p % width, so rejecting drafts moves nothing. width >= taps - 1 + the
most tokens of a verify step, and >= 2 * (taps - 1). Positions before 0 count as zero, whatever the slot holds.
One kernel serves decoding, verification and prompt chunks (a chunk leaves its last columns only). Does not know
what the channels are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from netra_kernels.gated_delta_rule import DeltaInputs
from netra_kernels.operands import check_dense, check_rows


def causal_conv1d_ref(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, inputs: DeltaInputs
) -> torch.Tensor:
    """Reference of `causal_conv1d`."""
    taps, width = weight.shape[1], columns.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for s, slot in enumerate(inputs.slots.tolist()):
        new = slice(int(inputs.cu_seqlens_q[s]), int(inputs.cu_seqlens_q[s + 1]))
        start, count = int(inputs.num_computed[s]), new.stop - new.start
        before = torch.arange(start - taps + 1, start, device=x.device)
        past = torch.where((before >= 0)[:, None], columns[slot, before % width], 0.0)
        padded = torch.cat([past.to(x.dtype), x[new]]).float()
        y = sum(padded[j : j + count] * weight[:, j].float() for j in range(taps))
        out[new] = torch.nn.functional.silu(torch.as_tensor(y)).to(x.dtype)
        kept = torch.arange(max(0, count - width + taps - 1), count, device=x.device)
        columns[slot, (start + kept) % width] = x[new][kept].to(columns.dtype)
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _causal_conv1d_kernel(
    p_x, p_weight, p_columns, p_slots, p_num_computed, p_cu, p_out, stride_x, num_blocks,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i_s, i_block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    i_first = tl.load(p_cu + i_s).to(tl.int64)
    n_new = (tl.load(p_cu + i_s + 1) - i_first).to(tl.int32)
    if i_block * BLOCK_T >= n_new:
        return
    i_start = tl.load(p_num_computed + i_s)
    p_slot = p_columns + tl.load(p_slots + i_s).to(tl.int64) * WIDTH * CHANNELS
    o_n = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = (o_c < CHANNELS)[None, :]
    p_new = p_x + i_first * stride_x + o_c[None, :]
    b_y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for i_tap in tl.static_range(TAPS):
        o_m = o_n + (i_tap + 1 - TAPS)
        fresh = ((o_m >= 0) & (o_m < n_new))[:, None] & in_channels
        b_x = tl.load(p_new + o_m[:, None].to(tl.int64) * stride_x, mask=fresh, other=0.0).to(
            tl.float32
        )
        if i_block == 0:
            old = ((o_m < 0) & (i_start + o_m >= 0))[:, None] & in_channels
            o_column = (i_start + o_m + WIDTH) % WIDTH
            b_old = tl.load(
                p_slot + o_column[:, None] * CHANNELS + o_c[None, :], mask=old, other=0.0
            )
            b_x += b_old.to(tl.float32)
        b_w = tl.load(p_weight + o_c * TAPS + i_tap, mask=o_c < CHANNELS, other=0.0).to(tl.float32)
        b_y += b_x * b_w[None, :]
    live = (o_n < n_new)[:, None] & in_channels
    p_o = p_out + (i_first + o_n)[:, None] * CHANNELS + o_c[None, :]
    tl.store(p_o, (b_y * tl.sigmoid(b_y)).to(p_out.dtype.element_ty), mask=live)
    if i_block == 0:  # the only program that read the ring, so the only one that may overwrite it
        tl.debug_barrier()
        KEPT: tl.constexpr = min(BLOCK_T, WIDTH - TAPS + 1)
        o_k = n_new - KEPT + tl.arange(0, BLOCK_T)
        kept = ((o_k >= 0) & (o_k < n_new))[:, None] & in_channels
        b_last = tl.load(p_new + o_k[:, None].to(tl.int64) * stride_x, mask=kept, other=0.0)
        o_column = (i_start + o_k + WIDTH) % WIDTH
        p_column = p_slot + o_column[:, None] * CHANNELS + o_c[None, :]
        tl.store(p_column, b_last.to(p_columns.dtype.element_ty), mask=kept)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, inputs: DeltaInputs
) -> torch.Tensor:
    """silu(conv(x)) [num_tokens, channels] contiguous; new columns go into the ring."""
    channels, taps = weight.shape
    width = columns.shape[1]
    assert x.shape[1] == channels == columns.shape[2]
    check_rows(x)
    check_dense(weight, columns)
    assert width >= 2 * (taps - 1), (
        f"{width} columns cannot hold {taps - 1} before a chunk and after it"
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_t = min(32, max(4, triton.next_power_of_2(inputs.max_query_len)))
    blocks = triton.cdiv(inputs.max_query_len, block_t)
    block_c = min(256, triton.next_power_of_2(channels))
    _causal_conv1d_kernel[(len(inputs.slots) * blocks, triton.cdiv(channels, block_c))](
        x, weight, columns, inputs.slots, inputs.num_computed, inputs.cu_seqlens_q, out, x.stride(0), blocks,
        CHANNELS=channels, TAPS=taps, WIDTH=width, BLOCK_T=block_t, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out

"""FP8 matrix product with 128 x 128 weight blocks and per-128 activation groups (the checkpoint's format).

x e4m3 [rows, depth] with scales float32 [rows, depth / 128]; weight e4m3 [columns, depth] with scales float32
[ceil(columns / 128), ceil(depth / 128)]; out [rows, columns]. Each step of 128 along the depth is one MMA chain from
zero, scaled into a float32 accumulator: that applies the block scales and avoids Hopper's low-precision FP8
accumulation. With few rows the weight is the left operand (SWAP), so that 16 rows waste no MMA rows; narrow outputs
are cut along the depth (SPLIT_K) and the last program to arrive adds the parts in a fixed order, so results do not
vary. Does not know layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from netra_kernels.operands import check_aligned, check_dense
from netra_kernels.rms_norm import GROUP
from netra_kernels.tuning import lookup


def dequantize_ref(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [columns, depth] of an FP8 weight with 128 x 128 block scales."""
    grown = scales.float().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return weight.float() * grown[: weight.shape[0], : weight.shape[1]]


def fp8_gemm_ref(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `fp8_gemm`; it has no use for counters."""
    left = x.float() * x_scales.repeat_interleave(GROUP, 1)[:, : x.shape[1]]
    return (left @ dequantize_ref(weight, weight_scales).T).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_gemm_kernel(
    p_x, p_x_scales, p_w, p_w_scales, p_out, p_parts, p_counters, num_rows,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (DEPTH + 127) // 128
    EACH: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    i_n, i_m, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, 128)
    in_rows, in_columns = o_m < num_rows, o_n < COLUMNS
    o_m64 = o_m.to(tl.int64)
    b_acc = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
    for i_step in range(i_split * EACH, tl.minimum((i_split + 1) * EACH, STEPS)):
        o_d = i_step * 128 + o_k
        in_depth = o_d < DEPTH
        b_xs = tl.load(p_x_scales + o_m64 * STEPS + i_step, mask=in_rows, other=0.0)
        b_ws = tl.load(p_w_scales + o_n // 128 * STEPS + i_step, mask=in_columns, other=0.0)
        b_w = tl.load(
            p_w + o_n[:, None].to(tl.int64) * DEPTH + o_d[None, :],
            mask=in_columns[:, None] & in_depth[None, :], other=0.0,
        )  # fmt: skip
        b_x = tl.load(
            p_x + o_m64[:, None] * DEPTH + o_d[None, :],
            mask=in_rows[:, None] & in_depth[None, :], other=0.0,
        )  # fmt: skip
        if SWAP:
            b_acc += tl.dot(b_w, tl.trans(b_x)) * b_ws[:, None] * b_xs[None, :]
        else:
            b_acc += tl.dot(b_x, tl.trans(b_w)) * b_xs[:, None] * b_ws[None, :]
    if SWAP:
        o_out = o_n[:, None] + o_m64[None, :] * COLUMNS
        live = in_columns[:, None] & in_rows[None, :]
    else:
        o_out = o_m64[:, None] * COLUMNS + o_n[None, :]
        live = in_rows[:, None] & in_columns[None, :]
    if SPLIT_K == 1:
        tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=live)
    else:
        n_part = num_rows.to(tl.int64) * COLUMNS
        tl.store(p_parts + i_split * n_part + o_out, b_acc, mask=live)
        tl.debug_barrier()  # every thread's part is written before the arrival is announced
        p_counter = p_counters + i_m * tl.num_programs(0) + i_n
        if tl.atomic_add(p_counter, 1, sem="acq_rel") == SPLIT_K - 1:
            b_sum = tl.zeros_like(b_acc)
            for i_part in tl.static_range(SPLIT_K):
                b_sum += tl.load(
                    p_parts + i_part * n_part + o_out, mask=live, other=0.0, cache_modifier=".cg"
                )
            tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=live)
            tl.store(p_counter, 0)  # ready for the next launch


def split_k_of(columns: int, depth: int, rows: int, block_n: int) -> int:
    """Cuts along the depth that bring the programs near the number of multiprocessors (132)."""
    programs = triton.cdiv(columns, block_n) * triton.cdiv(rows, 64)
    split = 1
    while split < 8 and programs * split * 2 <= 132 and depth // (split * 2) >= 512:
        split *= 2
    return split


def fp8_gemm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """x weight^T [rows, columns]. counters int32 zeros [>= programs]: allows SPLIT_K; left zero for the next call.

    Calls that share counters must be ordered on one stream.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    steps = triton.cdiv(depth, GROUP)
    assert weight.shape == (columns, depth)
    assert depth % 16 == 0, "rows are read 16 bytes at a time"
    check_aligned(x, weight)
    check_dense(x_scales, weight_scales)
    assert x_scales.shape == (rows, steps)
    assert weight_scales.shape == (triton.cdiv(columns, GROUP), steps)
    config = lookup("fp8_gemm", "rows16" if rows <= 16 else "rows32" if rows <= 32 else "rows64")
    tiles = (triton.cdiv(columns, config.columns), triton.cdiv(rows, config.rows))
    split = split_k_of(columns, depth, rows, config.columns) if counters is not None else 1
    assert counters is None or counters.numel() >= tiles[0] * tiles[1]
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    parts = (
        torch.empty((split, rows, columns), dtype=torch.float32, device=x.device)
        if split > 1
        else None
    )
    _fp8_gemm_kernel[(*tiles, split)](
        x, x_scales, weight, weight_scales, out, parts, counters, rows,
        COLUMNS=columns, DEPTH=depth, SPLIT_K=split, BM=config.rows, BN=config.columns,
        SWAP=config.swapped, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out

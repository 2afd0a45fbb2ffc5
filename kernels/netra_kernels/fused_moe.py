"""Mixture-of-experts MLP: gate_up with SiLU and requantisation in its epilogue, down, weighted sum.

x [num_tokens, hidden] (e4m3 with scales [num_tokens, hidden / 128], or the model's dtype); gate_up [E, 2 * inter,
hidden] (gate rows first) and down [E, hidden, inter], FP8 with float32 scales per 128 x 128 block, or the model's
dtype; a Routing from router.py. A shared expert is simply the last of the E, in every token's last slot. Each block of
rows is one expert's: gate_up finds its block from the experts' counts and lists. With few rows per expert the weight is
the left MMA operand (SWAP), so 16 rows waste none. The activation between the two products is FP8 per 64 channels: the
columns of one program. Does not know how tokens were routed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.fp8_gemm import dequantize_ref
from netra_kernels.operands import check_aligned, check_dense
from netra_kernels.router import Routing
from netra_kernels.tuning import lookup

ACT_GROUP = 64
"""Channels per scale of the inner activation = columns per gate_up program."""

MANY_ROWS = 32
"""Mean rows per expert from which blocks of 64 rows are used instead of 16 (weights are then read less often)."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked weights of one layer; scales None unless the weights are FP8."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None


def expert_outputs_ref(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    routing: Routing,
    layer: ExpertWeights,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Reference of `expert_outputs`, without the inner requantisation."""
    experts = routing.experts
    inputs = x.float() if x_scales is None else x.float() * x_scales.repeat_interleave(128, 1)
    out = torch.empty((*experts.shape, layer.down.shape[1]), dtype=dtype, device=x.device)
    for expert in experts.unique().tolist():
        gate_up, down = layer.gate_up[expert].float(), layer.down[expert].float()
        if layer.gate_up_scales is not None and layer.down_scales is not None:
            gate_up = dequantize_ref(layer.gate_up[expert], layer.gate_up_scales[expert])
            down = dequantize_ref(layer.down[expert], layer.down_scales[expert])
        tokens, slots = (experts == expert).nonzero(as_tuple=True)
        gate, up = (inputs[tokens] @ gate_up.T).chunk(2, -1)
        out[tokens, slots] = ((torch.nn.functional.silu(gate) * up) @ down.T).to(dtype)
    return out


def fused_moe_ref(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    routing: Routing,
    layer: ExpertWeights,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Reference of `fused_moe`, without the inner requantisation."""
    y = expert_outputs_ref(x, x_scales, routing, layer, torch.float32)
    return (y * routing.weights[..., None]).sum(1).to(dtype)


@triton.jit
def _product(b_x, b_w, SWAP: tl.constexpr):
    """x w^T of tiles [BM, depth] and [BN, depth]; transposed with SWAP."""
    if SWAP:
        b_out = tl.dot(b_w, tl.trans(b_x), input_precision="ieee")
    else:
        b_out = tl.dot(b_x, tl.trans(b_w), input_precision="ieee")
    return b_out


def capacity_of(num_rows: int, num_experts: int, block: int) -> int:
    """Rows that blocks of one expert each can need: every expert in use may waste block - 1."""
    padded = num_rows + min(num_experts, num_rows) * (block - 1)
    return -(-padded // block) * block


@triton.jit
def _find_block(
    p_members, p_counts, i_b, num_rows, SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Block i_b of all experts' rows: its expert, its rows [BM] (num_rows: none), and how many blocks there are."""
    o_e = tl.arange(0, EXPERTS)
    b_count = tl.load(p_counts + o_e, mask=o_e < NUM_EXPERTS, other=0)
    b_blocks = (b_count + BM - 1) // BM
    i_e = tl.sum((tl.cumsum(b_blocks, 0) <= i_b).to(tl.int32), 0)
    i_first = tl.sum(tl.where(o_e < i_e, b_blocks, 0), 0)
    o_place = (i_b - i_first) * BM + tl.arange(0, BM)
    there = o_place < tl.sum(tl.where(o_e == i_e, b_count, 0), 0)
    p_mine = p_members + i_e.to(tl.int64) * (num_rows // SLOTS)
    return i_e, tl.load(p_mine + o_place, mask=there, other=num_rows), tl.sum(b_blocks, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    p_x, p_x_scales, p_w, p_w_scales, p_members, p_counts, p_rows, p_block_experts, p_num_blocks, p_act,
    p_act_scales, num_rows, SLOTS: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, FP8: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    i_n, i_b = tl.program_id(0), tl.program_id(1)
    o_m = i_b * BM + tl.arange(0, BM)
    i_expert, o_row, n_blocks = _find_block(
        p_members, p_counts, i_b, num_rows, SLOTS, NUM_EXPERTS, EXPERTS, BM
    )
    if i_n == 0 and i_b == 0:
        tl.store(p_num_blocks, n_blocks)  # none if all tokens are padding
    if i_b >= n_blocks:
        return
    AXIS: tl.constexpr = 0 if SWAP else 1
    STEPS: tl.constexpr = (HIDDEN + 127) // 128
    WIDE: tl.constexpr = (2 * INTER + 127) // 128
    if i_n == 0:  # for the down launch
        tl.store(p_rows + o_m, o_row)
        tl.store(p_block_experts + i_b, i_expert)
    i_e = i_expert.to(tl.int64)
    o_n, o_k = i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    live = o_row < num_rows
    o_token = (o_row // SLOTS).to(tl.int64)
    p_gate = p_w + (i_e * 2 * INTER + o_n[:, None]) * HIDDEN
    if SWAP:
        b_gate, b_up = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    else:
        b_gate, b_up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for i_step in range((HIDDEN + BK - 1) // BK):
        o_d = i_step * BK + o_k
        deep = (o_d < HIDDEN)[None, :]
        b_x = tl.load(
            p_x + o_token[:, None] * HIDDEN + o_d[None, :], mask=live[:, None] & deep, other=0.0
        )
        b_w = tl.load(p_gate + o_d[None, :], mask=deep, other=0.0)
        b_part = _product(b_x, b_w, SWAP)
        b_w = tl.load(p_gate + INTER * HIDDEN + o_d[None, :], mask=deep, other=0.0)
        b_part_up = _product(b_x, b_w, SWAP)
        if FP8:
            b_xs = tl.load(p_x_scales + o_token * STEPS + i_step * BK // 128, mask=live, other=0.0)
            b_xs = tl.expand_dims(b_xs, AXIS)
            p_ws = p_w_scales + (i_e * WIDE + o_n // 128) * STEPS + i_step * BK // 128
            b_part = b_part * (tl.expand_dims(tl.load(p_ws), 1 - AXIS) * b_xs)
            p_ws = p_w_scales + (i_e * WIDE + (o_n + INTER) // 128) * STEPS + i_step * BK // 128
            b_part_up = b_part_up * (tl.expand_dims(tl.load(p_ws), 1 - AXIS) * b_xs)
        b_gate += b_part
        b_up += b_part_up
    b_act = b_gate * tl.sigmoid(b_gate) * b_up
    o_out = o_m.to(tl.int64) * INTER
    o_out = o_out[None, :] + o_n[:, None] if SWAP else o_out[:, None] + o_n[None, :]
    if FP8:
        b_scale = tl.maximum(tl.max(tl.abs(b_act), AXIS), 448.0 * 1e-12) / 448.0
        b_act = b_act / tl.expand_dims(b_scale, AXIS)
        b_act = tl.minimum(tl.maximum(b_act, -448.0), 448.0)
        tl.store(p_act_scales + o_m * (INTER // BN) + i_n, b_scale)
    tl.store(p_act + o_out, b_act.to(p_act.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    p_act, p_act_scales, p_w, p_w_scales, p_counts, p_rows, p_block_experts, p_num_blocks, p_out, num_rows,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, FP8: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    i_n, i_b = tl.program_id(0), tl.program_id(1)
    if i_n == 0 and i_b == 0:  # read by gate_up alone; ready for the next routing
        o_e = tl.arange(0, EXPERTS)
        tl.store(p_counts + o_e, tl.zeros([EXPERTS], tl.int32), mask=o_e < NUM_EXPERTS)
    if i_b >= tl.load(p_num_blocks):
        return
    AXIS: tl.constexpr = 0 if SWAP else 1
    STEPS: tl.constexpr = (INTER + 127) // 128
    HIGH: tl.constexpr = (HIDDEN + 127) // 128
    i_e = tl.load(p_block_experts + i_b).to(tl.int64)
    o_m, o_n, o_k = i_b * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    o_row = tl.load(p_rows + o_m)
    live, inside = o_row < num_rows, o_n < HIDDEN
    b_acc = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
    for i_step in range(INTER // BK):
        o_d = i_step * BK + o_k
        b_act = tl.load(p_act + o_m[:, None].to(tl.int64) * INTER + o_d[None, :])
        p_weight = p_w + (i_e * HIDDEN + o_n[:, None]) * INTER + o_d[None, :]
        b_part = _product(b_act, tl.load(p_weight, mask=inside[:, None], other=0.0), SWAP)
        if FP8:
            b_as = tl.load(p_act_scales + o_m * (INTER // BK) + i_step)
            p_ws = p_w_scales + (i_e * HIGH + o_n // 128) * STEPS + i_step * BK // 128
            b_ws = tl.load(p_ws, mask=inside, other=0.0)
            b_part = b_part * (tl.expand_dims(b_ws, 1 - AXIS) * tl.expand_dims(b_as, AXIS))
        b_acc += b_part
    b_out = b_acc.to(p_out.dtype.element_ty)
    o_row64 = o_row.to(tl.int64) * HIDDEN
    if SWAP:
        tl.store(
            p_out + o_row64[None, :] + o_n[:, None], b_out, mask=inside[:, None] & live[None, :]
        )
    else:
        tl.store(
            p_out + o_row64[:, None] + o_n[None, :], b_out, mask=live[:, None] & inside[None, :]
        )


@triton.jit
def _combine_kernel(
    p_y, p_weights, p_out, HIDDEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_slot in tl.static_range(SLOTS):
        i_row = i_t * SLOTS + i_slot
        b_y = tl.load(p_y + i_row * HIDDEN + o, mask=o < HIDDEN, other=0.0).to(tl.float32)
        b_sum += tl.load(p_weights + i_row) * b_y
    tl.store(p_out + i_t * HIDDEN + o, b_sum.to(p_out.dtype.element_ty), mask=o < HIDDEN)


def expert_outputs(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    routing: Routing,
    layer: ExpertWeights,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """[num_tokens, slots, hidden]: what each chosen expert makes of its token (rms_norm can take the weighted sum).

    routing.counts are zero afterwards.
    """
    num_tokens, slots = routing.experts.shape
    num_experts, hidden, inter = layer.down.shape
    fp8 = layer.gate_up_scales is not None
    check_aligned(x, layer.gate_up, layer.down)
    assert layer.gate_up.shape == (num_experts, 2 * inter, hidden)
    assert fp8 == (x_scales is not None) == (layer.down_scales is not None)
    assert routing.members.shape == (num_experts, num_tokens)
    assert inter % ACT_GROUP == 0
    rows = num_tokens * slots
    bucket = "rows16" if rows <= MANY_ROWS * num_experts else "rows64"
    first, second = lookup("moe_gate_up", bucket), lookup("moe_down", bucket)
    capacity = capacity_of(rows, num_experts, first.rows)
    blocks = capacity // first.rows
    act = x.new_empty((capacity, inter), dtype=x.dtype if fp8 else dtype)
    act_scales = x.new_empty((capacity, inter // ACT_GROUP), dtype=torch.float32) if fp8 else None
    block_rows = x.new_empty(capacity, dtype=torch.int32)
    order = (block_rows, x.new_empty(blocks, dtype=torch.int32), x.new_empty(1, dtype=torch.int32))
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS": triton.next_power_of_2(num_experts)}
    _gate_up_kernel[(inter // ACT_GROUP, blocks)](
        x, x_scales, layer.gate_up, layer.gate_up_scales, routing.members, routing.counts, *order, act,
        act_scales, rows, SLOTS=slots, HIDDEN=hidden, INTER=inter, BM=first.rows, BN=first.columns,
        BK=first.depth if fp8 else 64, SWAP=first.swapped, FP8=fp8, **sizes,
        num_warps=first.num_warps, num_stages=first.num_stages,
    )  # fmt: skip
    y = x.new_empty((num_tokens, slots, hidden), dtype=dtype)
    _down_kernel[(triton.cdiv(hidden, second.columns), blocks)](
        act, act_scales, layer.down, layer.down_scales, routing.counts, *order, y, rows,
        HIDDEN=hidden, INTER=inter, BM=second.rows, BN=second.columns, BK=second.depth,
        SWAP=second.swapped, FP8=fp8, **sizes, num_warps=second.num_warps, num_stages=second.num_stages,
    )  # fmt: skip
    return y


def fused_moe(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    routing: Routing,
    layer: ExpertWeights,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """sum over slots of weight * expert(x) [num_tokens, hidden]; see the file's docstring."""
    y, weights = expert_outputs(x, x_scales, routing, layer, dtype), routing.weights
    num_tokens, slots, hidden = y.shape
    assert weights.shape == (num_tokens, slots)
    check_dense(weights)
    out = x.new_empty((num_tokens, hidden), dtype=dtype)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        y, weights, out, HIDDEN=hidden, SLOTS=slots, BLOCK=block, num_warps=4
    )
    return out

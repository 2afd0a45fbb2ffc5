"""Gated DeltaNet over prompt chunks: 64 tokens at a time, from an initial state to a committed one.

Inputs as in gated_delta_rule.py. Blocks of 64 start at multiples of 64 of the *sequence's* positions, so a state at
a page boundary does not depend on how the prompt was cut, and can be handed out as a checkpoint. Within a block,
with G the running sum of g and k, q normalised (arXiv 2412.06464, section 3.3):
  A_ij = beta_i exp(G_i - G_j) k_i.k_j (j < i);  T = (I + A)^-1;  P_ij = exp(G_i - G_j) q_i.k_j (j <= i)
  d = T beta (v - exp(G) k S);  o = exp(G) q S + P d;  S <- exp(G_63) S + k^T exp(G_63 - G) d
T comes from substitution row by row: the product form (I - A)(I + A^2).. is exact on paper and loses every digit on
correlated keys. Launch 1 makes T and P of all blocks at once, launch 2 walks the blocks. Does not know records:
tokens still in them are absorbed before (gated_delta_rule without new tokens).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

from netra_kernels.gated_delta_rule import (
    L2_EPS,
    DeltaInputs,
    delta_rule_ref,
    gates,
    gates_ref,
    split_heads,
)
from netra_kernels.operands import check_dense, check_rows

BLOCK = 64
"""Tokens per block: the page size, so that checkpoints fall on page boundaries."""


def num_boundaries(max_query_len: int) -> int:
    """Blocks, and so multiples of 64, that a chunk of max_query_len tokens can touch, wherever it starts."""
    return -(-(max_query_len + BLOCK - 1) // BLOCK)


def gated_delta_chunk_ref(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    inputs: DeltaInputs,
    checkpoint_ids: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `gated_delta_chunk`: token by token, in float64 if `state` is, else float32."""
    value_heads, key_dim, value_dim = state.shape[1:]
    key_heads = (mixed.shape[1] - value_heads * value_dim) // (2 * key_dim)
    kind = torch.promote_types(state.dtype, torch.float32)
    q, k, v = split_heads(mixed, key_heads, key_dim, value_heads)
    g, beta = gates_ref(a.to(kind), b.to(kind), a_log, dt_bias)
    out = torch.empty((len(mixed), value_heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    for s, slot in enumerate(inputs.slots.tolist()):
        start, end = int(inputs.cu_seqlens_q[s]), int(inputs.cu_seqlens_q[s + 1])
        first = int(inputs.num_computed[s])
        stored = state[slot].to(kind)
        current = stored if first > 0 else torch.zeros_like(stored)
        cuts = range(start + BLOCK - first % BLOCK, end + 1, BLOCK)
        for i_block, (begin, stop) in enumerate(pairwise([start, *cuts, end])):
            new = slice(begin, stop)
            y, current = delta_rule_ref(q[new], k[new], v[new], g[new], beta[new], current)
            out[new] = y.to(out.dtype)
            if checkpoint_ids is not None and checkpoints is not None and i_block < len(cuts):
                target = int(checkpoint_ids[s, i_block])
                if target >= 0:
                    checkpoints[target] = current.to(checkpoints.dtype)
        if end > start:
            state[slot] = current.to(state.dtype)
    return out


@triton.jit
def _block_tokens(p_cu, i_s, i_start, i_block):
    """Row of each of the block's 64 tokens, and whether it is one of the chunk's."""
    i_first = tl.load(p_cu + i_s)
    n_new = tl.load(p_cu + i_s + 1) - i_first
    o_n = i_block * 64 - i_start % 64 + tl.arange(0, 64)
    return (i_first + o_n).to(tl.int64), (o_n >= 0) & (o_n < n_new)


@triton.jit
def _split(b_x, dtype: tl.constexpr):
    """float32 as the sum of two numbers of the model's dtype: 16 bits of mantissa from two bfloat16 MMAs."""
    b_high = b_x.to(dtype)
    return b_high, (b_x - b_high.to(tl.float32)).to(dtype)


@triton.jit
def _dot(b_a, b_high, b_low, PRECISION: tl.constexpr):
    b_out = tl.dot(b_a, b_high, input_precision=PRECISION)
    if b_a.dtype != tl.float32:
        b_out = tl.dot(b_a, b_low, b_out)
    return b_out


@triton.jit
def _norms(b_x, EPS: tl.constexpr):
    b_x32 = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x32 * b_x32, 1) + EPS)


@triton.jit
def _store_split(p_squares, b_x, i_square, num_squares):
    """[64, 64] number i_square of the high halves, and of the low ones num_squares further on."""
    b_high, b_low = _split(b_x, p_squares.dtype.element_ty)
    o_i = tl.arange(0, 64)
    o = o_i[:, None] * 64 + o_i[None, :]
    tl.store(p_squares + i_square * 4096 + o, b_high)
    if b_high.dtype != tl.float32:
        tl.store(p_squares + (num_squares + i_square) * 4096 + o, b_low)


@triton.jit(do_not_specialize=["num_blocks", "num_squares"])
def _prepare_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_num_computed, p_cu, p_inverse, p_scores, p_factors,
    stride_mixed, stride_a, stride_b, num_blocks, num_squares,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    i_s, i_block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    i_hv = tl.program_id(1)
    i_hk = i_hv // (HV // HK)
    o_t, live = _block_tokens(p_cu, i_s, tl.load(p_num_computed + i_s), i_block)
    if tl.sum(live.to(tl.int32), 0) == 0:
        return
    o_i, o_k = tl.arange(0, 64), tl.arange(0, K)
    b_a = tl.load(p_a + o_t * stride_a + i_hv, mask=live, other=0.0)
    b_b = tl.load(p_b + o_t * stride_b + i_hv, mask=live, other=0.0)
    b_g, b_beta = gates(b_a, b_b, tl.load(p_a_log + i_hv), tl.load(p_dt_bias + i_hv))
    b_g, b_beta = tl.cumsum(tl.where(live, b_g, 0.0), 0), tl.where(live, b_beta, 0.0)
    p_row = p_mixed + o_t[:, None] * stride_mixed + i_hk * K + o_k[None, :]
    b_k = tl.load(p_row + HK * K, mask=live[:, None], other=0.0)
    b_kt = tl.trans(b_k)
    b_norm = _norms(b_k, EPS)
    lower = o_i[:, None] >= o_i[None, :]
    b_decay = tl.exp(tl.where(lower, b_g[:, None] - b_g[None, :], 0.0)) * b_norm[None, :]
    i_out = tl.program_id(0).to(tl.int64) * HV + i_hv
    b_t = tl.dot(b_k, b_kt, input_precision="ieee") * (b_norm * b_beta)[:, None] * b_decay
    b_q = tl.load(p_row, mask=live[:, None], other=0.0)
    b_scale = _norms(b_q, EPS) * SCALE
    b_p = tl.dot(b_q, b_kt, input_precision="ieee") * b_scale[:, None] * b_decay
    _store_split(p_scores, tl.where(lower, b_p, 0.0), i_out, num_squares)
    b_last = tl.sum(tl.where(o_i == 63, b_g, 0.0), 0)
    p_factor = p_factors + i_out * 320 + o_i
    tl.store(p_factor, b_beta)
    tl.store(p_factor + 64, b_norm * tl.exp(b_g))
    tl.store(p_factor + 128, b_scale * tl.exp(b_g))
    tl.store(p_factor + 192, b_norm * tl.exp(b_last - b_g))
    tl.store(p_factor + 256, b_g * 0.0 + tl.exp(b_last))
    b_t = tl.where(o_i[:, None] > o_i[None, :], -b_t, 0.0)
    for i_r in range(1, 64):  # row i of (I + A)^-1 - I from the rows above it
        this = (o_i == i_r)[:, None]
        b_row = tl.sum(tl.where(this, b_t, 0.0), 0)
        b_row += tl.sum(b_row[:, None] * b_t, 0)
        b_t = tl.where(this, b_row[None, :], b_t)
    b_t = tl.where(o_i[:, None] == o_i[None, :], 1.0, b_t)
    _store_split(p_inverse, b_t, i_out, num_squares)


@triton.jit(do_not_specialize=["num_blocks", "num_squares"])
def _scan_kernel(
    p_mixed, p_state, p_slots, p_num_computed, p_cu, p_inverse, p_scores, p_factors,
    p_checkpoint_ids, p_checkpoints, p_out, stride_mixed, num_blocks, num_squares,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, CHECKPOINT: tl.constexpr,
):  # fmt: skip
    i_s, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_hk = i_hv // (HV // HK)
    i_start = tl.load(p_num_computed + i_s)
    n_new = tl.load(p_cu + i_s + 1) - tl.load(p_cu + i_s)
    if n_new == 0:
        return
    o_i, o_k = tl.arange(0, 64), tl.arange(0, K)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    o_head = o_k[:, None] * V + o_v[None, :]
    p_head = p_state + (tl.load(p_slots + i_s).to(tl.int64) * HV + i_hv) * K * V + o_head
    b_h = tl.load(p_head, mask=(o_k * 0 + i_start > 0)[:, None], other=0.0).to(tl.float32)
    dtype: tl.constexpr = p_mixed.dtype.element_ty
    o_square = o_i[:, None] * 64 + o_i[None, :]
    for i_block in range((i_start % 64 + n_new + 63) // 64):
        o_t, live = _block_tokens(p_cu, i_s, i_start, i_block)
        i_in = (i_s.to(tl.int64) * num_blocks + i_block) * HV + i_hv
        p_factor = p_factors + i_in * 320 + o_i
        p_row = p_mixed + o_t[:, None] * stride_mixed
        p_key = p_row + i_hk * K + o_k[None, :]
        b_h_high, b_h_low = _split(b_h, dtype)
        b_k = tl.load(p_key + HK * K, mask=live[:, None], other=0.0)
        b_d = _dot(b_k, b_h_high, b_h_low, PRECISION) * tl.load(p_factor + 64)[:, None]
        p_value = p_row + 2 * HK * K + i_hv * V + o_v[None, :]
        b_v = tl.load(p_value, mask=live[:, None], other=0.0).to(tl.float32)
        b_high, b_low = _split((b_v - b_d) * tl.load(p_factor)[:, None], dtype)
        b_t = tl.load(p_inverse + i_in * 4096 + o_square)
        b_d = _dot(b_t, b_high, b_low, PRECISION)
        if dtype != tl.float32:
            b_d = tl.dot(tl.load(p_inverse + (num_squares + i_in) * 4096 + o_square), b_high, b_d)
        b_high, b_low = _split(b_d, dtype)
        b_q = tl.load(p_key, mask=live[:, None], other=0.0)
        b_o = _dot(b_q, b_h_high, b_h_low, PRECISION) * tl.load(p_factor + 128)[:, None]
        b_p = tl.load(p_scores + i_in * 4096 + o_square)
        b_o += _dot(b_p, b_high, b_low, PRECISION)
        if dtype != tl.float32:
            b_o = tl.dot(tl.load(p_scores + (num_squares + i_in) * 4096 + o_square), b_high, b_o)
        p_o = p_out + (o_t[:, None] * HV + i_hv) * V + o_v[None, :]
        tl.store(p_o, b_o.to(p_out.dtype.element_ty), mask=live[:, None])
        b_high, b_low = _split(b_d * tl.load(p_factor + 192)[:, None], dtype)
        b_h = b_h * tl.load(p_factors + i_in * 320 + 256) + _dot(
            tl.trans(b_k), b_high, b_low, PRECISION
        )
        if CHECKPOINT:  # noqa: SIM102 (what follows must not be compiled without checkpoints)
            if i_block * 64 + 64 <= i_start % 64 + n_new:
                i_copy = tl.load(p_checkpoint_ids + i_s * num_blocks + i_block).to(tl.int64)
                if i_copy >= 0:
                    p_copy = p_checkpoints + (i_copy * HV + i_hv) * K * V + o_head
                    tl.store(p_copy, b_h.to(p_checkpoints.dtype.element_ty))
    tl.store(p_head, b_h.to(p_state.dtype.element_ty))


def gated_delta_chunk(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    inputs: DeltaInputs,
    checkpoint_ids: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs [num_tokens, HV, V] of prompt chunks; `state` becomes that after the chunk (num_replay is 0).

    checkpoint_ids int32 [num_seqs, num_boundaries(max_query_len)]: where in `checkpoints` [num_checkpoints, HV, K, V]
    the state at the i-th multiple of 64 after num_computed goes, negative: nowhere.
    """
    num_tokens, num_seqs = len(mixed), len(inputs.slots)
    value_heads, key_dim, value_dim = state.shape[1:]
    key_heads = (mixed.shape[1] - value_heads * value_dim) // (2 * key_dim)
    check_rows(mixed, a, b)
    check_dense(state, checkpoints)
    assert (checkpoint_ids is None) == (checkpoints is None)
    blocks = num_boundaries(inputs.max_query_len)
    assert checkpoint_ids is None or checkpoint_ids.shape == (num_seqs, blocks)
    shape = (2, num_seqs * blocks, value_heads, BLOCK, BLOCK)  # high and low halves
    inverse = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    scores = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    factors = torch.empty((*shape[1:3], 5, BLOCK), dtype=torch.float32, device=mixed.device)
    out = torch.empty((num_tokens, value_heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    _prepare_kernel[(num_seqs * blocks, value_heads)](
        mixed, a, b, a_log, dt_bias, inputs.num_computed, inputs.cu_seqlens_q, inverse, scores, factors,
        mixed.stride(0), a.stride(0), b.stride(0), blocks, num_seqs * blocks * value_heads,
        HK=key_heads, HV=value_heads, K=key_dim, EPS=L2_EPS, SCALE=key_dim**-0.5, num_warps=4,
    )  # fmt: skip
    block_v = min(32, value_dim)
    _scan_kernel[(num_seqs * value_heads, value_dim // block_v)](
        mixed, state, inputs.slots, inputs.num_computed, inputs.cu_seqlens_q, inverse, scores, factors,
        checkpoint_ids, checkpoints, out, mixed.stride(0), blocks, num_seqs * blocks * value_heads,
        HK=key_heads, HV=value_heads, K=key_dim, V=value_dim, BV=block_v,
        PRECISION="ieee", CHECKPOINT=checkpoint_ids is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out

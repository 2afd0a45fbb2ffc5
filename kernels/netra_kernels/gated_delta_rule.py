"""Gated DeltaNet, token by token: absorb the tokens accepted last time, then compute the new ones uncommitted.

mixed [num_tokens, 2 * HK * K + HV * V]: q | k | v after convolution and SiLU; a, b [num_tokens, HV] projections;
a_log, dt_bias [HV]. Per value head (key head hv // (HV / HK)), with l2-normalised q (times K ** -0.5) and k:
  beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias)
  S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q         (Gated Delta Networks, arXiv 2412.06464)
state [num_slots, HV, K, V]. Records of tokens not yet in the state: k [num_slots, R, HK, K], v [num_slots, R, HV, V],
g, beta float32 [num_slots, R, HV]; the token at position p lies in row p % R, so R >= 2 * (most new tokens): the rows
being absorbed and those being written differ. Replaying is the same operations in the same order: bit-exact.
Does not know which drafts were accepted; a step without new tokens only absorbs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.operands import check_dense, check_rows

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaRecords:
    """Ring of uncommitted tokens of one layer; see the file's docstring."""

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The step's tensors that every recurrent layer shares (int32 [num_seqs], cu_seqlens_q one more).

    num_computed: position of the first new token; num_replay: accepted tokens still in the records. A sequence
    with num_computed == num_replay starts from a zero state, whatever its slot holds.
    """

    slots: torch.Tensor
    num_computed: torch.Tensor
    num_replay: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_query_len: int


def split_heads(
    mixed: torch.Tensor, key_heads: int, key_dim: int, value_heads: int
) -> tuple[torch.Tensor, ...]:
    """q, k [num_tokens, HK, K] and v [num_tokens, HV, V] of the convolution's output."""
    width = key_heads * key_dim
    q, k = mixed[:, :width], mixed[:, width : 2 * width]
    return (
        q.unflatten(-1, (key_heads, key_dim)),
        k.unflatten(-1, (key_heads, key_dim)),
        mixed[:, 2 * width :].unflatten(-1, (value_heads, -1)),
    )


def gates_ref(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, in the precision of a (at least float32)."""
    kind = torch.promote_types(a.dtype, torch.float32)
    decay = torch.nn.functional.softplus(a.to(kind) + dt_bias.to(kind))
    return -a_log.to(kind).exp() * decay, b.to(kind).sigmoid()


def delta_rule_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [n, HV, V] and final state [HV, K, V] of n tokens, in the precision of `state`; q, k raw."""
    kind, group = state.dtype, v.shape[1] // k.shape[1]
    q, k = (
        x.to(kind) * torch.rsqrt(x.to(kind).pow(2).sum(-1, keepdim=True) + L2_EPS) for x in (q, k)
    )
    q, k = ((x).repeat_interleave(group, 1) for x in (q * q.shape[-1] ** -0.5, k))
    outputs = []
    for t in range(len(v)):
        state = state * g[t].to(kind).exp()[:, None, None]
        error = v[t].to(kind) - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (beta[t].to(kind)[:, None] * error)[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs) if outputs else v.new_zeros(v.shape, dtype=kind), state


def gated_delta_rule_ref(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    records: DeltaRecords,
    inputs: DeltaInputs,
) -> torch.Tensor:
    """Reference of `gated_delta_rule`."""
    value_heads, key_dim, value_dim = state.shape[1:]
    rows, key_heads = records.k.shape[1:3]
    q, k, v = split_heads(mixed, key_heads, key_dim, value_heads)
    g, beta = gates_ref(a, b, a_log, dt_bias)
    out = torch.empty((len(mixed), value_heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    for s, slot in enumerate(inputs.slots.tolist()):
        start, count = int(inputs.num_computed[s]), int(inputs.num_replay[s])
        old = torch.arange(start - count, start) % rows
        stored = state[slot].float()
        current = stored if start > count else torch.zeros_like(stored)
        past = (records.k[slot, old], records.k[slot, old], records.v[slot, old])
        _, current = delta_rule_ref(*past, records.g[slot, old], records.beta[slot, old], current)
        if count:
            state[slot] = current.to(state.dtype)
        new = slice(int(inputs.cu_seqlens_q[s]), int(inputs.cu_seqlens_q[s + 1]))
        fresh = (start + torch.arange(new.stop - new.start)) % rows
        y, _ = delta_rule_ref(q[new], k[new], v[new], g[new], beta[new], current)
        out[new] = y.to(out.dtype)
        records.k[slot, fresh], records.v[slot, fresh] = k[new], v[new]
        records.g[slot, fresh], records.beta[slot, fresh] = g[new].float(), beta[new].float()
    return out


@triton.jit
def gates(b_a, b_b, b_a_log, b_dt_bias):
    """g and beta of the file's docstring, float32."""
    b_x = b_a.to(tl.float32) + b_dt_bias.to(tl.float32)
    b_soft = tl.where(b_x > 20.0, b_x, tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0))))
    return -tl.exp(b_a_log.to(tl.float32)) * b_soft, tl.sigmoid(b_b.to(tl.float32))


@triton.jit
def _delta_step(b_h, b_k, b_v, b_g, b_beta, EPS: tl.constexpr):
    """The state after one token; b_k [K] and b_v [BV] raw."""
    b_k = b_k.to(tl.float32)
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
    b_h = b_h * tl.exp(b_g)
    b_d = b_beta * (b_v.to(tl.float32) - tl.sum(b_h * b_k[:, None], 0))
    return b_h + b_k[:, None] * b_d[None, :]


@triton.jit
def _gated_delta_rule_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_state, p_rec_k, p_rec_v, p_rec_g, p_rec_beta,
    p_slots, p_num_computed, p_num_replay, p_cu, p_out, stride_mixed, stride_a, stride_b,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    R: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    i_s, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    i_v = tl.program_id(1)
    i_hk = i_hv // (HV // HK)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    i_slot = tl.load(p_slots + i_s).to(tl.int64)
    i_start, n_replay = tl.load(p_num_computed + i_s), tl.load(p_num_replay + i_s)
    i_first = tl.load(p_cu + i_s)
    n_new = tl.load(p_cu + i_s + 1) - i_first
    o_state = (i_slot * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
    there = (o_k * 0 + i_start > n_replay)[:, None]  # a vector: the mask of a block
    b_h = tl.load(p_state + o_state, mask=there, other=0.0).to(tl.float32)
    for i_r in range(n_replay):
        i_row = i_slot * R + (i_start - n_replay + i_r) % R
        b_h = _delta_step(
            b_h, tl.load(p_rec_k + (i_row * HK + i_hk) * K + o_k),
            tl.load(p_rec_v + (i_row * HV + i_hv) * V + o_v),
            tl.load(p_rec_g + i_row * HV + i_hv), tl.load(p_rec_beta + i_row * HV + i_hv), EPS,
        )  # fmt: skip
    if n_replay > 0:
        tl.store(p_state + o_state, b_h.to(p_state.dtype.element_ty))
    b_a_log, b_dt_bias = tl.load(p_a_log + i_hv), tl.load(p_dt_bias + i_hv)
    for i_n in range(n_new):
        i_t = (i_first + i_n).to(tl.int64)
        p_row = p_mixed + i_t * stride_mixed
        b_q = tl.load(p_row + i_hk * K + o_k).to(tl.float32)
        b_k = tl.load(p_row + HK * K + i_hk * K + o_k)
        b_v = tl.load(p_row + 2 * HK * K + i_hv * V + o_v)
        b_g, b_beta = gates(
            tl.load(p_a + i_t * stride_a + i_hv),
            tl.load(p_b + i_t * stride_b + i_hv),
            b_a_log,
            b_dt_bias,
        )
        b_h = _delta_step(b_h, b_k, b_v, b_g, b_beta, EPS)
        b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * SCALE)
        b_o = tl.sum(b_h * b_q[:, None], 0)
        tl.store(p_out + (i_t * HV + i_hv) * V + o_v, b_o.to(p_out.dtype.element_ty))
        i_row = i_slot * R + (i_start + i_n) % R
        tl.store(p_rec_v + (i_row * HV + i_hv) * V + o_v, b_v)
        if i_v == 0:
            tl.store(p_rec_g + i_row * HV + i_hv, b_g)
            tl.store(p_rec_beta + i_row * HV + i_hv, b_beta)
            if i_hv % (HV // HK) == 0:
                tl.store(p_rec_k + (i_row * HK + i_hk) * K + o_k, b_k)


def gated_delta_rule(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    records: DeltaRecords,
    inputs: DeltaInputs,
) -> torch.Tensor:
    """Outputs [num_tokens, HV, V]; absorbs the replayed tokens into `state`, leaves records of the new ones."""
    num_tokens, num_seqs = len(mixed), len(inputs.slots)
    value_heads, key_dim, value_dim = state.shape[1:]
    rows, key_heads = records.k.shape[1:3]
    assert rows >= 2 * inputs.max_query_len, (
        f"{rows} record rows for {inputs.max_query_len} new tokens"
    )
    assert mixed.shape[1] == 2 * key_heads * key_dim + value_heads * value_dim
    check_rows(mixed, a, b)
    check_dense(state, records.k, records.v, records.g, records.beta)
    out = torch.empty((num_tokens, value_heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    block_v = min(32, value_dim)
    _gated_delta_rule_kernel[(num_seqs * value_heads, value_dim // block_v)](
        mixed, a, b, a_log, dt_bias, state, records.k, records.v, records.g, records.beta,
        inputs.slots, inputs.num_computed, inputs.num_replay, inputs.cu_seqlens_q, out,
        mixed.stride(0), a.stride(0), b.stride(0),
        HK=key_heads, HV=value_heads, K=key_dim, V=value_dim, BV=block_v, R=rows,
        EPS=L2_EPS, SCALE=key_dim**-0.5, num_warps=4,
    )  # fmt: skip
    return out

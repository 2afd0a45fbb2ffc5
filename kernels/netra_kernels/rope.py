"""Query/key norm, rotary embedding, codec rotation of the queries, write into the tail and seal: one launch.

q [num_tokens, num_q_heads, head_dim] and k, v [num_tokens, num_kv_heads, head_dim], each a view whose heads
are contiguous rows; positions int32 [num_tokens]; cos_sin float32 [max_position, rotary_dim], cosines then
sines. The first rotary_dim channels turn, the others pass; the pairs that turn together are (i, i + rotary_dim / 2), or
(2 i, 2 i + 1) if interleaved. Everything is float32 between the
load and one rounding. tail [num_slots, 2, num_kv_heads, tail_rows, head_dim]; slot_mapping int32 [num_tokens] =
slot * tail_rows + row, negative: not into the tail (a prompt chunk still reads the rows it would overwrite).
With a Sealing, more programs of the launch seal full tails; the rows that are written must not be those that are sealed.
Does not know what is in a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.hadamard import hadamard, hadamard_ref
from netra_kernels.kv_codec import LIMIT, MIN_SCALE, PAGE, page_layout
from netra_kernels.operands import check_pages, check_rows, check_tail
from netra_kernels.seal import TOKENS, Sealing, fill_page, seal_ref, sizes_of

_NO_PAGES = sizes_of(page_layout("plain", 1, 1))


@dataclass(frozen=True, slots=True)
class RopeOutput:
    """q, k after norm and rotary embedding, contiguous; q_rotated = q H for codecs that rotate keys."""

    q: torch.Tensor
    k: torch.Tensor
    q_rotated: torch.Tensor | None


def rotary_table(
    max_position: int, rotary_dim: int, theta: float, device: torch.device
) -> torch.Tensor:
    """cos_sin [max_position, rotary_dim] float32, computed in float64."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angles = (
        torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * theta**-exponents
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def _norm_rope_ref(
    x: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> torch.Tensor:
    y = x.float()
    if weight is not None:
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        y = y * (weight.float() + (1.0 if zero_centered else 0.0))
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    rotary, rest = y[..., : 2 * half], y[..., 2 * half :]
    pairs = rotary.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack(
        [first * cos - second * sin, second * cos + first * sin], -1 if interleaved else -2
    )
    return torch.cat([turned.flatten(-2), rest], dim=-1).to(x.dtype)


def rope_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    rotate: bool = False,
    tail: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    interleaved: bool = False,
    sealing: Sealing | None = None,
) -> RopeOutput:
    """Reference of `rope`."""
    table = cos_sin[positions.long()]
    q_out = _norm_rope_ref(q, table, q_weight, eps, zero_centered, interleaved)
    k_out = _norm_rope_ref(k, table, k_weight, eps, zero_centered, interleaved)
    if sealing is not None:
        assert tail is not None
        of = sealing
        seal_ref(of.pages, tail, of.seal_pages, of.slots, of.num_sealed, of.num_tail, of.layout)
    if tail is not None and slot_mapping is not None:
        rows = tail.shape[3]
        kept = slot_mapping >= 0
        slots, row = slot_mapping[kept].long() // rows, slot_mapping[kept].long() % rows
        tail[slots, 0, :, row] = k_out[kept]
        tail[slots, 1, :, row] = v[kept]
    return RopeOutput(q_out, k_out, hadamard_ref(q_out).to(q.dtype) if rotate else None)


@triton.jit
def _norm_rope(
    p_x, stride_head, p_weight, p_cos_sin, i_position, eps, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    o_h, o_d = tl.arange(0, HEADS), tl.arange(0, DIM)
    mask = (o_h < NUM_HEADS)[:, None] & (o_d < DIM)[None, :]
    if INTERLEAVED:
        o_partner, o_angle, is_first = o_d ^ 1, o_d // 2, o_d % 2 == 0
    else:
        o_partner = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)
        o_angle, is_first = o_d % HALF, o_d < HALF
    o_partner = tl.where(o_d < ROTARY, o_partner, o_d)
    p_head = p_x + o_h[:, None] * stride_head
    b_x = tl.load(p_head + o_d[None, :], mask=mask, other=0.0)
    b_y = b_x.to(tl.float32)
    b_p = tl.load(p_head + o_partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        b_rstd = tl.rsqrt(tl.sum(b_y * b_y, 1) / DIM + eps)[:, None]
        b_y = b_y * b_rstd * (tl.load(p_weight + o_d).to(tl.float32) + OFFSET)[None, :]
        b_p = b_p * b_rstd * (tl.load(p_weight + o_partner).to(tl.float32) + OFFSET)[None, :]
    p_row = p_cos_sin + i_position.to(tl.int64) * ROTARY
    b_cos = tl.load(p_row + o_angle, mask=o_d < ROTARY, other=1.0)
    b_sin = tl.load(p_row + HALF + o_angle, mask=o_d < ROTARY, other=0.0)
    b_sin = tl.where(is_first, -b_sin, b_sin)
    return (b_y * b_cos[None, :] + b_p * b_sin[None, :]).to(b_x.dtype)


@triton.jit(do_not_specialize=["num_tokens", "max_seals"])
def _rope_kernel(
    p_q, p_k, p_v, p_positions, p_cos_sin, p_q_weight, p_k_weight, p_q_out, p_k_out, p_q_rotated,
    p_tail, p_slot_mapping, p_pages, p_seal_pages, p_slots, p_num_sealed, p_num_tail, eps, num_tokens, max_seals,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, TAIL_ROWS: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, ROTATE: tl.constexpr, HAS_TAIL: tl.constexpr,
    STAGES: tl.constexpr, SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, SEAL: tl.constexpr,
    TOKENS: tl.constexpr, LIMIT: tl.constexpr, MIN: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    V_CODES: tl.constexpr, K_SCALES: tl.constexpr, K_ZEROS: tl.constexpr, V_SCALES: tl.constexpr,
    V_ZEROS: tl.constexpr, HEAD_BYTES: tl.constexpr,
):  # fmt: skip
    if SEAL:
        i_seal = 2 * (tl.program_id(0) - num_tokens) + tl.program_id(1)
        if i_seal >= 0:
            i_tokens = i_seal // (2 * NUM_KV)
            i_job = i_tokens // (64 // TOKENS)
            i_page = tl.load(p_seal_pages + i_job).to(tl.int64)
            if i_page >= 0:
                fill_page(
                    i_page, i_job, i_tokens % (64 // TOKENS), i_seal % (2 * NUM_KV), p_pages, p_tail, p_slots,
                    p_num_sealed, p_num_tail, p_k, p_v, p_slots, 1.0, 1.0, 0, 0, 0, 0, max_seals, NUM_KV, DIM,
                    TAIL_ROWS, TOKENS, KEY, VALUE, V_CODES, K_SCALES, K_ZEROS, V_SCALES, V_ZEROS, HEAD_BYTES,
                    False, LIMIT, MIN, STAGES, SCALE,
                )  # fmt: skip
            return
    i_t = tl.program_id(0).to(tl.int64)
    i_position = tl.load(p_positions + i_t)
    o_d = tl.arange(0, DIM)
    if tl.program_id(1) == 0:
        b_q = _norm_rope(
            p_q + i_t * stride_q, stride_q_head, p_q_weight, p_cos_sin, i_position, eps,
            NUM_Q, Q_HEADS, DIM, ROTARY, NORM, OFFSET, INTERLEAVED,
        )  # fmt: skip
        o_q = tl.arange(0, Q_HEADS)
        o_out = (i_t * NUM_Q + o_q)[:, None] * DIM + o_d[None, :]
        mask_q = (o_q < NUM_Q)[:, None] & (o_d < DIM)[None, :]
        tl.store(p_q_out + o_out, b_q, mask=mask_q)
        if ROTATE:
            b_turned = hadamard(b_q.to(tl.float32), Q_HEADS, DIM, STAGES, SCALE)
            tl.store(p_q_rotated + o_out, b_turned.to(b_q.dtype), mask=mask_q)
    else:
        b_k = _norm_rope(
            p_k + i_t * stride_k, stride_k_head, p_k_weight, p_cos_sin, i_position, eps,
            NUM_KV, KV_HEADS, DIM, ROTARY, NORM, OFFSET, INTERLEAVED,
        )  # fmt: skip
        o_h = tl.arange(0, KV_HEADS)
        mask_k = (o_h < NUM_KV)[:, None] & (o_d < DIM)[None, :]
        tl.store(p_k_out + (i_t * NUM_KV + o_h)[:, None] * DIM + o_d[None, :], b_k, mask=mask_k)
        if HAS_TAIL:
            i_row = tl.load(p_slot_mapping + i_t).to(tl.int64)
            if i_row >= 0:
                o_v = i_t * stride_v + o_h[:, None] * stride_v_head + o_d[None, :]
                b_v = tl.load(p_v + o_v, mask=mask_k, other=0.0)
                i_slot = i_row // TAIL_ROWS
                o_tail = ((i_slot * 2 * NUM_KV + o_h) * TAIL_ROWS + i_row % TAIL_ROWS)[
                    :, None
                ] * DIM
                o_tail = o_tail + o_d[None, :]
                tl.store(p_tail + o_tail, b_k, mask=mask_k)
                tl.store(p_tail + o_tail + NUM_KV * TAIL_ROWS * DIM, b_v, mask=mask_k)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    rotate: bool = False,
    tail: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    interleaved: bool = False,
    sealing: Sealing | None = None,
) -> RopeOutput:
    """Norm (with weights), rotary embedding, optional rotation and tail write; see the file's docstring."""
    num_tokens, num_q, dim = q.shape
    num_kv, rotary = k.shape[1], cos_sin.shape[1]
    assert k.shape == v.shape == (num_tokens, num_kv, dim)
    assert dim & (dim - 1) == 0, f"head_dim {dim} is no power of two"
    check_rows(q, k, v)
    assert (q_weight is None) == (k_weight is None)
    assert (tail is None) == (slot_mapping is None)
    if tail is not None:
        check_tail(tail, num_kv, dim)
    num_seals, max_seals = 0, 1
    if sealing is not None:
        assert tail is not None, "pages are sealed from the tail"
        check_pages(sealing.pages, sealing.layout)
        num_seals, max_seals = sealing.seal_pages.numel(), sealing.seal_pages.shape[1]
    q_out = torch.empty((num_tokens, num_q, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((num_tokens, num_kv, dim), dtype=k.dtype, device=k.device)
    q_rotated = torch.empty_like(q_out) if rotate else None
    sealed = [None] * 5 if sealing is None else [
        sealing.pages, sealing.seal_pages, sealing.slots, sealing.num_sealed, sealing.num_tail
    ]  # fmt: skip
    _rope_kernel[(num_tokens + num_seals * (PAGE // TOKENS) * num_kv, 2)](
        q, k, v, positions, cos_sin, q_weight, k_weight, q_out, k_out, q_rotated, tail, slot_mapping, *sealed,
        eps, num_tokens, max_seals, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        NUM_Q=num_q, NUM_KV=num_kv,
        Q_HEADS=triton.next_power_of_2(num_q), KV_HEADS=triton.next_power_of_2(num_kv),
        DIM=dim, ROTARY=rotary, TAIL_ROWS=1 if tail is None else tail.shape[3],
        NORM=q_weight is not None, OFFSET=1.0 if zero_centered else 0.0, ROTATE=rotate,
        HAS_TAIL=tail is not None, STAGES=dim.bit_length() - 1, SCALE=dim**-0.5, INTERLEAVED=interleaved,
        SEAL=sealing is not None, TOKENS=TOKENS, LIMIT=LIMIT, MIN=MIN_SCALE,
        **(_NO_PAGES if sealing is None else sizes_of(sealing.layout)), num_warps=4,
    )  # fmt: skip
    return RopeOutput(q_out, k_out, q_rotated)

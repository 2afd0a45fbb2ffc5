"""The kernel that fills sealed pages from 64 tokens each.

tail [num_slots, 2, num_kv_heads, tail_rows, head_dim] is a ring: the token at position p lies in row p % tail_rows. Pages
are those of kv_codec.py. Short sequences have their full tails sealed by rope.py's launch, which calls `fill_page`.
Does not know who owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.hadamard import hadamard
from netra_kernels.kv_codec import LIMIT, MIN_SCALE, PAGE, PageLayout, encode_page_ref
from netra_kernels.operands import check_pages, check_rows, check_tail

TOKENS = 16
"""Tokens per program: a quarter of a page's keys or values of a head fits into registers with any codec."""


@dataclass(frozen=True, slots=True)
class Sealing:
    """What another launch must know to seal full tails on its way: see `seal`."""

    pages: torch.Tensor
    seal_pages: torch.Tensor
    slots: torch.Tensor
    num_sealed: torch.Tensor
    num_tail: torch.Tensor
    layout: PageLayout


def sizes_of(layout: PageLayout) -> dict[str, int]:
    """The layout as constants of a kernel."""
    return {
        "KEY": layout.key_kind, "VALUE": layout.value_kind, "V_CODES": layout.v_codes, "K_SCALES": layout.k_scales,
        "K_ZEROS": layout.k_zeros, "V_SCALES": layout.v_scales, "V_ZEROS": layout.v_zeros, "HEAD_BYTES": layout.head_bytes,
    }  # fmt: skip


def seal_ref(
    pages: torch.Tensor,
    tail: torch.Tensor,
    seal_pages: torch.Tensor,
    slots: torch.Tensor,
    num_sealed: torch.Tensor,
    num_tail: torch.Tensor,
    layout: PageLayout,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Reference of `seal`."""
    for i_s, row in enumerate(seal_pages.tolist()):
        rows = (
            num_sealed[i_s] + torch.arange(int(num_tail[i_s]), device=tail.device)
        ) % tail.shape[3]
        sources = [tail[slots[i_s], 0][:, rows], tail[slots[i_s], 1][:, rows]]
        if k is not None and v is not None and cu_seqlens_q is not None:
            new = slice(int(cu_seqlens_q[i_s]), int(cu_seqlens_q[i_s + 1]))
            fresh = (k[new].transpose(0, 1), v[new].transpose(0, 1))
            sources = [torch.cat([old, x], 1) for old, x in zip(sources, fresh, strict=True)]
        for j, page in enumerate(row):
            if page >= 0:
                keys, values = (x[:, j * PAGE : (j + 1) * PAGE] for x in sources)
                if layout.codec == "plain":
                    pages[page, 0], pages[page, 1] = keys, values
                else:
                    pages[page] = encode_page_ref(keys, values, layout, k_scale, v_scale)


@triton.jit
def _load_tokens(
    p_tail_head, p_new, stride_new, o_token, i_first_row, n_tail, i_new,
    DIM: tl.constexpr, TAIL_ROWS: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Unsealed tokens o_token of one head: from the tail's ring, past it from the chunk's new rows."""
    o_d = tl.arange(0, DIM)
    o_row = (i_first_row + o_token) % TAIL_ROWS
    in_tail = (o_token < n_tail)[:, None]
    b_x = tl.load(p_tail_head + o_row[:, None] * DIM + o_d[None, :], mask=in_tail, other=0.0)
    if HAS_NEW:
        o_new = (i_new + o_token - n_tail).to(tl.int64)[:, None] * stride_new + o_d[None, :]
        in_new = (o_token >= n_tail)[:, None]
        b_x = tl.where(in_new, tl.load(p_new + o_new, mask=in_new, other=0.0), b_x)
    return b_x


@triton.jit
def _clean(b_x, LIMIT: tl.constexpr):
    b_y = b_x.to(tl.float32)
    return tl.where(b_y == b_y, tl.minimum(tl.maximum(b_y, -LIMIT), LIMIT), 0.0)


@triton.jit
def _store_symmetric(p_codes, p_scales, b_x, o_t, DIM: tl.constexpr, MIN: tl.constexpr):
    o_d = tl.arange(0, DIM)
    b_scale = tl.maximum(tl.div_rn(tl.max(tl.abs(b_x), 1), 127.0), MIN).to(tl.float16)
    b_inverse = tl.div_rn(tl.full(b_scale.shape, 1.0, tl.float32), b_scale.to(tl.float32))
    b_code = tl.floor(b_x * b_inverse[:, None] + 0.5)
    b_code = tl.minimum(tl.maximum(b_code, -127.0), 127.0).to(tl.int8)
    tl.store(p_codes.to(tl.pointer_type(tl.int8)) + o_t[:, None] * DIM + o_d[None, :], b_code)
    tl.store(p_scales.to(tl.pointer_type(tl.float16)) + o_t, b_scale)


@triton.jit
def _scale_and_zero(b_low, b_high, MIN: tl.constexpr):
    b_scale = tl.maximum(tl.div_rn(b_high - b_low, 15.0), MIN).to(tl.float16)
    b_inverse = tl.div_rn(tl.full(b_scale.shape, 1.0, tl.float32), b_scale.to(tl.float32))
    return b_scale, b_inverse, b_low.to(tl.float16)


@triton.jit
def _store_words(p_codes, b_scaled, o_t, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """b_scaled = (x - zero) / scale, packed eight codes to a word."""
    WORDS: tl.constexpr = DIM // 8
    b_code = tl.minimum(tl.maximum(tl.floor(b_scaled + 0.5), 0.0), 15.0).to(tl.int32)
    b_planes = tl.reshape(b_code, [TOKENS, 8, WORDS]) << (4 * tl.arange(0, 8))[None, :, None]
    o = o_t[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(p_codes.to(tl.pointer_type(tl.int32)) + o, tl.sum(b_planes, 1))


@triton.jit
def fill_page(  # noqa: C901
    i_page, i_job, i_part, i_part_of_head, p_pages, p_tail, p_slots, p_num_sealed, p_num_tail, p_k, p_v, p_cu,
    inverse_k, inverse_v, stride_k, stride_k_head, stride_v, stride_v_head, max_seals, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, TAIL_ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, V_CODES: tl.constexpr, K_SCALES: tl.constexpr, K_ZEROS: tl.constexpr,
    V_SCALES: tl.constexpr, V_ZEROS: tl.constexpr, HEAD_BYTES: tl.constexpr, HAS_NEW: tl.constexpr,
    LIMIT: tl.constexpr, MIN: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of page i_page, job i_job of the call; i_part_of_head: head * 2, + 1 for values."""
    i_s, i_j = i_job // max_seals, i_job % max_seals
    i_h, i_kv = i_part_of_head // 2, i_part_of_head % 2
    o_d = tl.arange(0, DIM)
    i_slot = tl.load(p_slots + i_s).to(tl.int64)
    p_tail_head = p_tail + ((i_slot * 2 + i_kv) * NUM_HEADS + i_h) * TAIL_ROWS * DIM
    i_first, n_tail, i_new = tl.load(p_num_sealed + i_s), tl.load(p_num_tail + i_s), 0
    p_new, stride_new = p_tail, stride_k
    if HAS_NEW:
        i_new = tl.load(p_cu + i_s)
        stride_new = tl.where(i_kv == 0, stride_k, stride_v)
        p_new = p_k + i_h * stride_k_head
        if i_kv == 1:
            p_new = p_v + i_h * stride_v_head
    p_block = p_pages + (i_page * NUM_HEADS + i_h) * HEAD_BYTES
    o_t = i_part * TOKENS + tl.arange(0, TOKENS)
    if KEY == 2 and i_kv == 0:  # one scale per channel: the first program takes the whole page
        if i_part == 0:
            b_low = tl.full([DIM], LIMIT, tl.float32)
            b_high = tl.full([DIM], -LIMIT, tl.float32)
            for i_t in range(0, 64, TOKENS):
                o_block = i_t + tl.arange(0, TOKENS)
                b_x = _load_tokens(
                    p_tail_head, p_new, stride_new, i_j * 64 + o_block, i_first, n_tail, i_new,
                    DIM, TAIL_ROWS, HAS_NEW,
                )  # fmt: skip
                b_y = _clean(b_x, LIMIT)
                b_low, b_high = (
                    tl.minimum(b_low, tl.min(b_y, 0)),
                    tl.maximum(b_high, tl.max(b_y, 0)),
                )
            b_scale, b_inverse, b_zero = _scale_and_zero(b_low, b_high, MIN)
            tl.store((p_block + K_SCALES).to(tl.pointer_type(tl.float16)) + o_d, b_scale)
            tl.store((p_block + K_ZEROS).to(tl.pointer_type(tl.float16)) + o_d, b_zero)
            for i_t in range(0, 64, TOKENS):
                o_block = i_t + tl.arange(0, TOKENS)
                b_x = _load_tokens(
                    p_tail_head, p_new, stride_new, i_j * 64 + o_block, i_first, n_tail, i_new,
                    DIM, TAIL_ROWS, HAS_NEW,
                )  # fmt: skip
                b_y = (_clean(b_x, LIMIT) - b_zero.to(tl.float32)[None, :]) * b_inverse[None, :]
                _store_words(p_block, b_y, o_block, TOKENS, DIM)
    else:
        b_x = _load_tokens(
            p_tail_head, p_new, stride_new, i_j * 64 + o_t, i_first, n_tail, i_new,
            DIM, TAIL_ROWS, HAS_NEW,
        )  # fmt: skip
        if KEY == 0:
            o_page = ((i_page * 2 + i_kv) * NUM_HEADS + i_h) * 64 * DIM
            tl.store(p_pages + o_page + o_t[:, None] * DIM + o_d[None, :], b_x)
        elif KEY == 3:
            b_y = _clean(b_x, LIMIT) * tl.where(i_kv == 0, inverse_k, inverse_v)
            b_y = tl.minimum(tl.maximum(b_y, -448.0), 448.0).to(tl.float8e4nv)
            p_codes = (p_block + i_kv * V_CODES).to(tl.pointer_type(tl.float8e4nv))
            tl.store(p_codes + o_t[:, None] * DIM + o_d[None, :], b_y)
        else:
            b_y = hadamard(_clean(b_x, LIMIT), TOKENS, DIM, STAGES, NORM)
            if VALUE == 1:
                p_scales = p_block + tl.where(i_kv == 0, K_SCALES, V_SCALES)
                _store_symmetric(p_block + i_kv * V_CODES, p_scales, b_y, o_t, DIM, MIN)
            elif i_kv == 0:
                _store_symmetric(p_block, p_block + K_SCALES, b_y, o_t, DIM, MIN)
            else:
                b_scale, b_inverse, b_zero = _scale_and_zero(tl.min(b_y, 1), tl.max(b_y, 1), MIN)
                b_y = (b_y - b_zero.to(tl.float32)[:, None]) * b_inverse[:, None]
                _store_words(p_block + V_CODES, b_y, o_t, TOKENS, DIM)
                tl.store((p_block + V_SCALES).to(tl.pointer_type(tl.float16)) + o_t, b_scale)
                tl.store((p_block + V_ZEROS).to(tl.pointer_type(tl.float16)) + o_t, b_zero)


@triton.jit(do_not_specialize=["max_seals"])
def _seal_kernel(
    p_pages, p_tail, p_seal_pages, p_slots, p_num_sealed, p_num_tail, p_k, p_v, p_cu, inverse_k, inverse_v,
    stride_k, stride_k_head, stride_v, stride_v_head, max_seals, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, TAIL_ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, V_CODES: tl.constexpr, K_SCALES: tl.constexpr, K_ZEROS: tl.constexpr,
    V_SCALES: tl.constexpr, V_ZEROS: tl.constexpr, HEAD_BYTES: tl.constexpr, HAS_NEW: tl.constexpr,
    LIMIT: tl.constexpr, MIN: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    i_job, i_part = tl.program_id(0) // (64 // TOKENS), tl.program_id(0) % (64 // TOKENS)
    i_page = tl.load(p_seal_pages + i_job).to(tl.int64)
    if i_page >= 0:
        fill_page(
            i_page, i_job, i_part, tl.program_id(1), p_pages, p_tail, p_slots, p_num_sealed, p_num_tail,
            p_k, p_v, p_cu, inverse_k, inverse_v, stride_k, stride_k_head, stride_v, stride_v_head,
            max_seals, NUM_HEADS, DIM, TAIL_ROWS, TOKENS, KEY, VALUE, V_CODES, K_SCALES, K_ZEROS,
            V_SCALES, V_ZEROS, HEAD_BYTES, HAS_NEW, LIMIT, MIN, STAGES, NORM,
        )  # fmt: skip


def seal(
    pages: torch.Tensor,
    tail: torch.Tensor,
    seal_pages: torch.Tensor,
    slots: torch.Tensor,
    num_sealed: torch.Tensor,
    num_tail: torch.Tensor,
    layout: PageLayout,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Fill pages seal_pages[s, j] (negative: none) with tokens 64 j .. 64 j + 63 of sequence s's unsealed ones.

    seal_pages int32 [num_seqs, max_seals]; slots, num_sealed, num_tail int32 [num_seqs], tokens before this
    seal. Unsealed tokens are the num_tail ones of the tail, then k, v [num_tokens, num_kv_heads, head_dim] of a
    prompt chunk (rows cu_seqlens_q[s] and on). A caller asks only for pages that are full.
    """
    num_seqs, max_seals = seal_pages.shape
    heads, tail_rows, dim = tail.shape[2:]
    check_pages(pages, layout)
    check_tail(tail, layout.num_kv_heads, layout.head_dim)
    check_rows(k, v)
    has_new = k is not None and v is not None
    assert has_new == (cu_seqlens_q is not None)
    strides = (0, 0, 0, 0)
    if k is not None and v is not None:
        strides = (*k.stride()[:2], *v.stride()[:2])
    _seal_kernel[(num_seqs * max_seals * (PAGE // TOKENS), heads * 2)](
        pages, tail, seal_pages, slots, num_sealed, num_tail, k, v, cu_seqlens_q, 1.0 / k_scale, 1.0 / v_scale,
        *strides, max_seals, NUM_HEADS=heads, DIM=dim, TAIL_ROWS=tail_rows, TOKENS=TOKENS, **sizes_of(layout),
        HAS_NEW=has_new, LIMIT=LIMIT, MIN=MIN_SCALE, STAGES=dim.bit_length() - 1, NORM=dim**-0.5, num_warps=4,
    )  # fmt: skip

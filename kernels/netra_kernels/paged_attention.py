"""Attention of new tokens over sealed pages, the tail and themselves; the same for prompts, decoding, drafts.

q [num_tokens, num_q_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim] are the new tokens' own (rows
cu_seqlens_q[s] .. cu_seqlens_q[s + 1] belong to sequence s). Sequence s has num_sealed[s] tokens in the pages
block_tables[s] and num_tail[s] tokens in the ring of tail slot slots[s] (kv_codec.py has the formats).
Three launches: history (no mask: every sealed token precedes every query; split over the pages), local (tail and
new tokens, causal), merge by log-sum-exp (with the output gate and FP8). Scales never touch single codes: they
multiply scores, probabilities or queries. With SWAP the keys are the left MMA operand, so that 16 query rows
suffice. Does not know what a draft is. lse is in units of log 2; a split without pages has lse = -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from netra_kernels.attention_merge import AttentionOutput, gate_and_quantize_ref, merge
from netra_kernels.kv_codec import PAGE, PageLayout, decode_page_ref
from netra_kernels.operands import check_aligned, check_pages, check_rows, check_tail
from netra_kernels.tuning import tiling

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The step's tensors that every attention layer shares (int32): see the file's docstring.

    max_query_len: most new tokens of any sequence; num_splits: programs per sequence over the history, 0 if no
    sequence has any.
    """

    block_tables: torch.Tensor
    slots: torch.Tensor
    num_sealed: torch.Tensor
    num_tail: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_query_len: int
    num_splits: int


def paged_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    tail: torch.Tensor,
    inputs: AttentionInputs,
    layout: PageLayout,
    scale: float,
    q_rotated: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    fp8: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> AttentionOutput:
    """Reference of `paged_attention`: pages decoded to float32, one softmax over everything visible."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    for s in range(len(inputs.slots)):
        new = slice(int(inputs.cu_seqlens_q[s]), int(inputs.cu_seqlens_q[s + 1]))
        sealed, kept = int(inputs.num_sealed[s]), int(inputs.num_tail[s])
        table = inputs.block_tables[s, : sealed // PAGE].tolist()
        parts = [decode_page_ref(pages[i], layout, k_scale, v_scale) for i in table]
        ring = tail[int(inputs.slots[s])][
            :, :, (sealed + torch.arange(kept)) % tail.shape[3]
        ].float()
        parts += [
            (ring[0], ring[1]),
            (k[new].transpose(0, 1).float(), v[new].transpose(0, 1).float()),
        ]
        keys = torch.cat([p[0] for p in parts], 1).repeat_interleave(group, 0)
        values = torch.cat([p[1] for p in parts], 1).repeat_interleave(group, 0)
        scores = q[new].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
        count = new.stop - new.start
        hidden_keys = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, keys.shape[1] - count :].masked_fill_(hidden_keys, -torch.inf)
        out[new] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return gate_and_quantize_ref(out, gate, fp8)


@triton.jit
def _rows_of_tile(p_cu, q_tiles, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr):
    """This program's sequence, its first token and count, and per query row: token index, head, liveness."""
    i_s, i_tile = tl.program_id(0) // q_tiles, tl.program_id(0) % q_tiles
    i_first = tl.load(p_cu + i_s)
    n_new = tl.load(p_cu + i_s + 1) - i_first
    o_r = tl.arange(0, ROWS)
    o_q = i_tile * BLOCK_Q + o_r // GROUP
    o_head = tl.program_id(1) * GROUP + o_r % GROUP
    live = (o_r < BLOCK_Q * GROUP) & (o_q < n_new)
    return i_s, i_tile, i_first, n_new, o_q, o_head, live


@triton.jit
def _load_rows(p_q, o_row, live, NUM_Q: tl.constexpr, DIM: tl.constexpr, SWAP: tl.constexpr):
    o_d = tl.arange(0, DIM)
    if SWAP:
        b_q = tl.load(
            p_q + o_row[None, :].to(tl.int64) * DIM + o_d[:, None], mask=live[None, :], other=0.0
        )
    else:
        b_q = tl.load(
            p_q + o_row[:, None].to(tl.int64) * DIM + o_d[None, :], mask=live[:, None], other=0.0
        )
    return b_q


@triton.jit
def _nibbles(b_words, SHAPE: tl.constexpr, dtype: tl.constexpr):
    """Codes minus 8 of words that hold one code each in their low four bits."""
    b_bits = ((b_words & 15) | 0x4300).to(tl.int16)  # 0x4300 | n is the bfloat16 128 + n
    return (tl.reshape(b_bits, SHAPE).to(tl.bfloat16, bitcast=True) - 136.0).to(dtype)


@triton.jit
def _load_keys(p_block, KIND: tl.constexpr, DIM: tl.constexpr, dtype: tl.constexpr):
    """Codes of a page's keys [64, DIM] as `dtype`."""
    o_t, o_d = tl.arange(0, 64), tl.arange(0, DIM)
    if KIND == 2:
        WORDS: tl.constexpr = DIM // 8
        p_words = p_block.to(tl.pointer_type(tl.int32))
        b_words = tl.load(p_words + o_t[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
        b_planes = b_words[:, None, :] >> (4 * tl.arange(0, 8))[None, :, None]
        b_k = _nibbles(b_planes, [64, DIM], dtype)
    else:
        b_k = _load_codes(p_block, o_t[:, None] * DIM + o_d[None, :], KIND, dtype)
    return b_k


@triton.jit
def _load_codes(p_codes, o, KIND: tl.constexpr, dtype: tl.constexpr):
    if KIND == 1:
        b = tl.load(p_codes.to(tl.pointer_type(tl.int8)) + o).to(dtype)
    elif KIND == 3:
        b = tl.load(p_codes.to(tl.pointer_type(tl.float8e4nv)) + o).to(dtype)
    else:
        b = tl.load(p_codes + o)
    return b


@triton.jit
def _load_values(
    p_codes, KIND: tl.constexpr, DIM: tl.constexpr, SWAP: tl.constexpr, dtype: tl.constexpr
):
    """Codes of a page's values as `dtype`: [64, DIM], or [DIM, 64] with SWAP."""
    o_t, o_d = tl.arange(0, 64), tl.arange(0, DIM)
    if KIND == 2:
        WORDS: tl.constexpr = DIM // 8
        o_w = tl.arange(0, WORDS)
        p_words = p_codes.to(tl.pointer_type(tl.int32))
        if SWAP:
            b_words = tl.load(p_words + o_t[None, :] * WORDS + o_w[:, None])
            b_planes = b_words[None, :, :] >> (4 * tl.arange(0, 8))[:, None, None]
            b_v = _nibbles(b_planes, [DIM, 64], dtype)
        else:
            b_words = tl.load(p_words + o_t[:, None] * WORDS + o_w[None, :])
            b_planes = b_words[:, None, :] >> (4 * tl.arange(0, 8))[None, :, None]
            b_v = _nibbles(b_planes, [64, DIM], dtype)
    elif SWAP:
        b_v = _load_codes(p_codes, o_t[None, :] * DIM + o_d[:, None], KIND, dtype)
    else:
        b_v = _load_codes(p_codes, o_t[:, None] * DIM + o_d[None, :], KIND, dtype)
    return b_v


@triton.jit
def _softmax_step(b_s, b_m, b_l, AXIS: tl.constexpr):
    """Probabilities of the scores b_s (log2 units), new maximum and sum, and the old sum's factor."""
    b_new = tl.maximum(b_m, tl.max(b_s, AXIS))
    b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
    b_factor = tl.exp2(b_m - b_safe)
    b_p = tl.exp2(b_s - tl.expand_dims(b_safe, AXIS))
    return b_p, b_new, b_l * b_factor + tl.sum(b_p, AXIS), b_factor


@triton.jit
def _store_part(p_out, p_lse, b_acc, b_m, b_l, o_row, live, DIM: tl.constexpr, AXIS: tl.constexpr):
    o_d = tl.arange(0, DIM)
    b_sum = tl.where(b_l > 0, b_l, 1.0)
    b_out = b_acc / tl.expand_dims(b_sum, AXIS)
    if AXIS == 0:
        tl.store(
            p_out + o_row[None, :].to(tl.int64) * DIM + o_d[:, None], b_out, mask=live[None, :]
        )
    else:
        tl.store(
            p_out + o_row[:, None].to(tl.int64) * DIM + o_d[None, :], b_out, mask=live[:, None]
        )
    tl.store(p_lse + o_row, b_m + tl.log2(b_sum), mask=live)


@triton.jit(do_not_specialize=["num_tokens", "stride_table", "q_tiles", "num_splits"])
def _history_kernel(  # noqa: C901
    p_q, p_pages, p_table, p_num_sealed, p_cu, p_out, p_lse, scale, scale_v, num_tokens, stride_table,
    q_tiles, num_splits, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, V_CODES: tl.constexpr, K_SCALES: tl.constexpr, K_ZEROS: tl.constexpr,
    V_SCALES: tl.constexpr, V_ZEROS: tl.constexpr, HEAD_BYTES: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if SWAP else 1
    i_h, i_split = tl.program_id(1), tl.program_id(2)
    i_s, i_tile, i_first, n_new, o_q, o_head, live = _rows_of_tile(
        p_cu, q_tiles, NUM_Q // NUM_KV, BLOCK_Q, ROWS
    )
    if i_tile * BLOCK_Q >= n_new:
        return
    o_row = (i_first + o_q) * NUM_Q + o_head
    b_q = _load_rows(p_q, o_row, live, NUM_Q, DIM, SWAP)
    dtype: tl.constexpr = b_q.dtype
    n_pages = tl.load(p_num_sealed + i_s) // 64
    n_each = (n_pages + num_splits - 1) // num_splits
    i_begin = i_split * n_each
    i_end = tl.minimum(i_begin + n_each, n_pages)
    p_row = p_table + i_s.to(tl.int64) * stride_table
    b_m = tl.full([ROWS], -float("inf"), tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_shift = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([DIM, ROWS], tl.float32) if SWAP else tl.zeros([ROWS, DIM], tl.float32)
    o_t, o_d = tl.arange(0, 64), tl.arange(0, DIM)
    for i_p in range(i_begin, i_end):
        i_page = tl.load(p_row + i_p).to(tl.int64)
        if KEY == 0:
            p_block = p_pages + (i_page * 2 * NUM_KV + i_h) * 64 * DIM
            p_values = p_block + NUM_KV * 64 * DIM
        else:
            p_block = p_pages + (i_page * NUM_KV + i_h) * HEAD_BYTES
            p_values = p_block + V_CODES
        b_k = _load_keys(p_block, KEY, DIM, dtype)
        b_left = b_q
        if KEY == 2:  # per-channel scales go onto the queries
            p_half = (p_block + K_SCALES).to(tl.pointer_type(tl.float16))
            b_step = tl.load(p_half + o_d).to(tl.float32)
            p_half = (p_block + K_ZEROS).to(tl.pointer_type(tl.float16))
            b_centre = tl.load(p_half + o_d).to(tl.float32) + 8.0 * b_step
            b_left = (b_q.to(tl.float32) * tl.expand_dims(b_step, 1 - AXIS)).to(dtype)
            b_bias = tl.sum(b_q.to(tl.float32) * tl.expand_dims(b_centre, 1 - AXIS), AXIS)
        b_s = tl.dot(b_k, b_left) if SWAP else tl.dot(b_left, tl.trans(b_k))
        if KEY == 2:
            b_s += tl.expand_dims(b_bias, AXIS)
        if KEY == 1:
            p_half = (p_block + K_SCALES).to(tl.pointer_type(tl.float16))
            b_s = b_s * tl.expand_dims(tl.load(p_half + o_t).to(tl.float32), 1 - AXIS)
        b_p, b_m, b_l, b_factor = _softmax_step(b_s * scale, b_m, b_l, AXIS)
        if VALUE == 1 or VALUE == 2:
            p_half = (p_block + V_SCALES).to(tl.pointer_type(tl.float16))
            b_step_v = tl.load(p_half + o_t).to(tl.float32)
        if VALUE == 2:
            p_half = (p_block + V_ZEROS).to(tl.pointer_type(tl.float16))
            b_centre_v = tl.load(p_half + o_t).to(tl.float32) + 8.0 * b_step_v
            b_add = tl.sum(b_p * tl.expand_dims(b_centre_v, 1 - AXIS), AXIS)
            b_shift = b_shift * b_factor + b_add
        if VALUE == 1 or VALUE == 2:
            b_p = b_p * tl.expand_dims(b_step_v, 1 - AXIS)
        b_v = _load_values(p_values, VALUE, DIM, SWAP, dtype)
        b_acc = b_acc * tl.expand_dims(b_factor, AXIS)
        b_acc = tl.dot(b_v, b_p.to(dtype), b_acc) if SWAP else tl.dot(b_p.to(dtype), b_v, b_acc)
    if VALUE == 2:
        b_acc += tl.expand_dims(b_shift, AXIS)
    if VALUE == 3:
        b_acc = b_acc * scale_v
    o_part = i_split.to(tl.int64) * num_tokens * NUM_Q
    _store_part(p_out + o_part * DIM, p_lse + o_part, b_acc, b_m, b_l, o_row, live, DIM, AXIS)


@triton.jit
def _local_step(
    b_q, p_k, p_v, o_k, o_v, keep, seen, scale, b_m, b_l, b_acc,
    DIM: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """64 keys at row offsets o_k, o_v: `keep` [64] exist, `seen` is the mask of the scores."""
    AXIS: tl.constexpr = 0 if SWAP else 1
    o_d = tl.arange(0, DIM)
    b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=keep[:, None], other=0.0)
    b_s = tl.dot(b_k, b_q) if SWAP else tl.dot(b_q, tl.trans(b_k))
    b_s = tl.where(seen, b_s * scale, -float("inf"))
    b_p, b_m, b_l, b_factor = _softmax_step(b_s, b_m, b_l, AXIS)
    b_acc = b_acc * tl.expand_dims(b_factor, AXIS)
    if SWAP:
        b_v = tl.load(p_v + o_v[None, :] + o_d[:, None], mask=keep[None, :], other=0.0)
        b_acc = tl.dot(b_v, b_p.to(b_q.dtype), b_acc)
    else:
        b_v = tl.load(p_v + o_v[:, None] + o_d[None, :], mask=keep[:, None], other=0.0)
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc)
    return b_m, b_l, b_acc


@triton.jit(do_not_specialize=["num_tokens", "part", "q_tiles"])
def _local_kernel(
    p_q, p_k, p_v, p_tail, p_slots, p_num_sealed, p_num_tail, p_cu, p_out, p_lse, scale, num_tokens,
    stride_k, stride_k_head, stride_v, stride_v_head, part,
    q_tiles, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if SWAP else 1
    i_h = tl.program_id(1)
    i_s, i_tile, i_first, n_new, o_q, o_head, live = _rows_of_tile(
        p_cu, q_tiles, NUM_Q // NUM_KV, BLOCK_Q, ROWS
    )
    if i_tile * BLOCK_Q >= n_new:
        return
    o_row = (i_first + o_q) * NUM_Q + o_head
    b_q = _load_rows(p_q, o_row, live, NUM_Q, DIM, SWAP)
    b_m = tl.full([ROWS], -float("inf"), tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([DIM, ROWS], tl.float32) if SWAP else tl.zeros([ROWS, DIM], tl.float32)
    o_t = tl.arange(0, 64)
    i_start, n_tail = tl.load(p_num_sealed + i_s), tl.load(p_num_tail + i_s)
    p_ring = p_tail + (tl.load(p_slots + i_s).to(tl.int64) * 2 * NUM_KV + i_h) * TAIL_ROWS * DIM
    for i_t in range(0, n_tail, 64):
        keep = i_t + o_t < n_tail
        o_ring = (i_start + i_t + o_t) % TAIL_ROWS * DIM
        seen = tl.expand_dims(keep, 1 - AXIS) & tl.expand_dims(live, AXIS)
        b_m, b_l, b_acc = _local_step(
            b_q, p_ring, p_ring + NUM_KV * TAIL_ROWS * DIM, o_ring, o_ring, keep, seen, scale,
            b_m, b_l, b_acc, DIM, SWAP,
        )  # fmt: skip
    n_visible = tl.minimum(n_new, (i_tile + 1) * BLOCK_Q)
    for i_t in range(0, n_visible, 64):
        o_key = i_t + o_t
        o_new = (i_first + o_key).to(tl.int64)
        seen = tl.expand_dims(o_key, 1 - AXIS) <= tl.expand_dims(o_q, AXIS)
        b_m, b_l, b_acc = _local_step(
            b_q, p_k + i_h * stride_k_head, p_v + i_h * stride_v_head, o_new * stride_k,
            o_new * stride_v, o_key < n_visible, seen, scale, b_m, b_l, b_acc, DIM, SWAP,
        )  # fmt: skip
    o_part = part.to(tl.int64) * num_tokens * NUM_Q
    _store_part(p_out + o_part * DIM, p_lse + o_part, b_acc, b_m, b_l, o_row, live, DIM, AXIS)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    tail: torch.Tensor,
    inputs: AttentionInputs,
    layout: PageLayout,
    scale: float,
    q_rotated: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    fp8: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> AttentionOutput:
    """softmax(q k^T scale) v of every new token over all that its sequence has before it, itself included.

    q_rotated = q H is needed by codecs that rotate keys; gate [num_tokens, num_q_heads, head_dim] (a view is
    fine) multiplies the output by its sigmoid.
    """
    num_tokens, num_q, dim = q.shape
    num_kv, tail_rows = k.shape[1], tail.shape[3]
    check_aligned(q, q_rotated)
    check_rows(k, v)
    check_pages(pages, layout)
    check_tail(tail, num_kv, dim)
    assert not layout.rotates_keys or q_rotated is not None, f"{layout.codec} pages need q_rotated"
    assert (layout.num_kv_heads, layout.head_dim) == (num_kv, dim)
    splits, num_seqs, group = inputs.num_splits, len(inputs.slots), num_q // num_kv
    parts = torch.empty((splits + 1, num_tokens, num_q, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((splits + 1, num_tokens, num_q), dtype=torch.float32, device=q.device)
    if splits:
        tile = tiling(inputs.max_query_len, group, layout.value_kind)
        _history_kernel[(num_seqs * tile.tiles, num_kv, splits)](
            q_rotated if layout.rotates_keys else q, pages, inputs.block_tables, inputs.num_sealed,
            inputs.cu_seqlens_q, parts, lse, scale * LOG2_E * (k_scale if layout.key_kind == 3 else 1.0),
            v_scale, num_tokens, inputs.block_tables.stride(0), tile.tiles, splits, NUM_Q=num_q,
            NUM_KV=num_kv, DIM=dim, BLOCK_Q=tile.block_q, ROWS=tile.rows,
            KEY=layout.key_kind, VALUE=layout.value_kind, V_CODES=layout.v_codes, K_SCALES=layout.k_scales,
            K_ZEROS=layout.k_zeros, V_SCALES=layout.v_scales, V_ZEROS=layout.v_zeros,
            HEAD_BYTES=layout.head_bytes, SWAP=tile.config.swapped,
            num_warps=tile.config.num_warps, num_stages=tile.config.num_stages,
        )  # fmt: skip
    tile = tiling(inputs.max_query_len, group)
    _local_kernel[(num_seqs * tile.tiles, num_kv)](
        q, k, v, tail, inputs.slots, inputs.num_sealed, inputs.num_tail, inputs.cu_seqlens_q, parts, lse,
        scale * LOG2_E, num_tokens, *k.stride()[:2], *v.stride()[:2], splits,
        tile.tiles, NUM_Q=num_q, NUM_KV=num_kv, DIM=dim, BLOCK_Q=tile.block_q, ROWS=tile.rows,
        TAIL_ROWS=tail_rows, SWAP=tile.config.swapped,
        num_warps=tile.config.num_warps, num_stages=tile.config.num_stages,
    )  # fmt: skip
    return merge(parts, lse, q.dtype, layout.rotates_values, gate, fp8)

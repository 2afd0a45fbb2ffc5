"""Copies new keys and values into the tails' rings: what is left of a prompt chunk once its pages are sealed.

k, v [num_tokens, num_kv_heads, head_dim] (views with contiguous heads); tail [num_slots, 2, num_kv_heads, tail_rows,
head_dim]; slot_mapping int32 [num_tokens] = slot * tail_rows + row, negative: leave the token out. Decoding steps
do not need this: rope.py writes their rows. Must follow the chunk's attention and seal, which read the old rows.
Does not know positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from netra_kernels.operands import check_rows, check_tail


def store_tail_ref(
    k: torch.Tensor, v: torch.Tensor, tail: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Reference of `store_tail`."""
    kept = slot_mapping >= 0
    rows = slot_mapping[kept].long()
    slots, rows = rows // tail.shape[3], rows % tail.shape[3]
    tail[slots, 0, :, rows] = k[kept]
    tail[slots, 1, :, rows] = v[kept]


@triton.jit
def _store_tail_kernel(
    p_k, p_v, p_tail, p_slot_mapping, stride_k, stride_k_head, stride_v, stride_v_head,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TAIL_ROWS: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    i_row = tl.load(p_slot_mapping + i_t).to(tl.int64)
    if i_row < 0:
        return
    o_h, o_d = tl.arange(0, HEADS), tl.arange(0, DIM)
    mask = (o_h < NUM_HEADS)[:, None] & (o_d < DIM)[None, :]
    b_k = tl.load(p_k + i_t * stride_k + o_h[:, None] * stride_k_head + o_d[None, :], mask=mask)
    b_v = tl.load(p_v + i_t * stride_v + o_h[:, None] * stride_v_head + o_d[None, :], mask=mask)
    i_slot = i_row // TAIL_ROWS
    o_tail = ((i_slot * 2 * NUM_HEADS + o_h) * TAIL_ROWS + i_row % TAIL_ROWS)[:, None] * DIM
    tl.store(p_tail + o_tail + o_d[None, :], b_k, mask=mask)
    tl.store(p_tail + o_tail + NUM_HEADS * TAIL_ROWS * DIM + o_d[None, :], b_v, mask=mask)


def store_tail(
    k: torch.Tensor, v: torch.Tensor, tail: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Copy the rows that slot_mapping names; see the file's docstring."""
    num_tokens, heads, dim = k.shape
    assert v.shape == k.shape
    check_rows(k, v)
    check_tail(tail, heads, dim)
    _store_tail_kernel[(num_tokens,)](
        k, v, tail, slot_mapping, *k.stride()[:2], *v.stride()[:2],
        NUM_HEADS=heads, HEADS=triton.next_power_of_2(heads), DIM=dim, TAIL_ROWS=tail.shape[3], num_warps=2,
    )  # fmt: skip

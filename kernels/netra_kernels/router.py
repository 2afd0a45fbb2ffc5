"""Which experts a token goes to, and the order in which the expert GEMMs read the tokens.

route:  logits [num_tokens, num_experts] -> experts int32 and weights float32 [num_tokens, top_k (+ 1)]: softmax
        in float32, the top_k largest (equal ones: lower id first), renormalised. With shared_logits
        [num_tokens] a last column holds expert num_experts (the shared one) with weight sigmoid(logit). Tokens from
        num_live int32 [1] on are padding: they go where token 0 goes, so that they ask for no other expert.
align:  experts [num_tokens, slots] -> Alignment: rows sorted by expert, each expert padded to whole blocks.
One program per expert does the counting sort on its own: no atomics, so the order never varies.
Does not know what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Alignment:
    """rows int32 [capacity]: token * slots + slot, or num_rows for padding; block_experts int32
    [capacity / block]: expert of each block; num_blocks int32 [1]: blocks in use; block: rows per block."""

    rows: torch.Tensor
    block_experts: torch.Tensor
    num_blocks: torch.Tensor
    block: int


def route_ref(
    logits: torch.Tensor,
    top_k: int,
    shared_logits: torch.Tensor | None = None,
    num_live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `route`."""
    if num_live is not None:
        source = torch.arange(len(logits), device=logits.device)
        source = torch.where(source < num_live, source, 0)
        logits = logits[source]
        shared_logits = None if shared_logits is None else shared_logits[source]
    probabilities = logits.float().softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, order)
    weights = weights / weights.sum(-1, keepdim=True)
    if shared_logits is not None:
        shared = torch.full_like(order[:, :1], logits.shape[1])
        order = torch.cat([order, shared], dim=1)
        weights = torch.cat([weights, shared_logits.float().sigmoid()[:, None]], dim=1)
    return order.int(), weights


def capacity_of(num_rows: int, num_experts: int, block: int) -> int:
    """Rows that the sorted order can need: every expert in use may waste block - 1."""
    padded = num_rows + min(num_experts, num_rows) * (block - 1)
    return -(-padded // block) * block


def align_ref(experts: torch.Tensor, num_experts: int, block: int) -> Alignment:
    """Reference of `align` (entries past num_blocks: padding and expert 0)."""
    flat = experts.flatten()
    capacity = capacity_of(flat.numel(), num_experts, block)
    rows = torch.full((capacity,), flat.numel(), dtype=torch.int32)
    block_experts = torch.zeros(capacity // block, dtype=torch.int32)
    at = 0
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten().int()
        blocks = -(-len(mine) // block)
        rows[at * block : at * block + len(mine)] = mine
        block_experts[at : at + blocks] = expert
        at += blocks
    return Alignment(rows, block_experts, torch.tensor([at], dtype=torch.int32), block)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    p_logits, p_shared, p_num_live, p_experts, p_weights, num_tokens, stride_logits, stride_shared,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, EXPERTS)
    live = o_t < num_tokens
    mask = live[:, None] & (o_e < NUM_EXPERTS)[None, :]
    o_source = o_t
    if HAS_LIVE:
        o_source = tl.where(o_t < tl.load(p_num_live), o_t, 0)
    o_logit = o_source[:, None] * stride_logits + o_e[None, :]
    b_logit = tl.load(p_logits + o_logit, mask=mask, other=-float("inf")).to(tl.float32)
    # -0.0 and 0.0 must tie; then order as unsigned integers, ties to the lower expert
    b_bits = (b_logit + 0.0).to(tl.int32, bitcast=True)
    b_key = (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    b_key = (b_key << 16) | (65535 - o_e)[None, :].to(tl.int64)
    LOWEST: tl.constexpr = -(1 << 62)
    b_key = tl.where((o_e < NUM_EXPERTS)[None, :], b_key, LOWEST)
    o_s = tl.arange(0, COLUMNS)
    b_expert = tl.full([ROWS, COLUMNS], NUM_EXPERTS, tl.int32)
    b_value = tl.full([ROWS, COLUMNS], -float("inf"), tl.float32)
    for i_k in tl.static_range(TOP_K):
        b_best = tl.max(b_key, 1)
        b_key = tl.where(b_key == b_best[:, None], LOWEST, b_key)
        b_high = (b_best >> 16).to(tl.int32)
        b_float = (b_high ^ ((b_high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        b_id = 65535 - (b_best & 65535).to(tl.int32)
        b_expert = tl.where((o_s == i_k)[None, :], b_id[:, None], b_expert)
        b_value = tl.where((o_s == i_k)[None, :], b_float[:, None], b_value)
    b_weight = tl.exp(b_value - tl.max(b_value, 1)[:, None])
    b_weight = b_weight / tl.sum(b_weight, 1)[:, None]
    if HAS_SHARED:
        b_gate = tl.load(p_shared + o_source * stride_shared, mask=live, other=0.0).to(tl.float32)
        b_weight = tl.where((o_s == TOP_K)[None, :], tl.sigmoid(b_gate)[:, None], b_weight)
    o_out = o_t[:, None] * SLOTS + o_s[None, :]
    kept = live[:, None] & (o_s < SLOTS)[None, :]
    tl.store(p_experts + o_out, b_expert, mask=kept)
    tl.store(p_weights + o_out, b_weight, mask=kept)


def route(
    logits: torch.Tensor,
    top_k: int,
    shared_logits: torch.Tensor | None = None,
    num_live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of every token; see the file's docstring."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    assert top_k <= num_experts < 65536
    slots = top_k + (shared_logits is not None)
    experts = torch.empty((num_tokens, slots), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, slots), dtype=torch.float32, device=logits.device)
    _route_kernel[(triton.cdiv(num_tokens, 4),)](
        logits, shared_logits, num_live, experts, weights, num_tokens, logits.stride(0),
        0 if shared_logits is None else shared_logits.stride(0),
        NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), TOP_K=top_k, SLOTS=slots,
        COLUMNS=triton.next_power_of_2(slots), ROWS=4, HAS_SHARED=shared_logits is not None,
        HAS_LIVE=num_live is not None, num_warps=4,
    )  # fmt: skip
    return experts, weights


@triton.jit(do_not_specialize=["num_rows"])
def _align_kernel(
    p_experts, p_rows, p_block_experts, p_num_blocks, num_rows,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    i_e = tl.program_id(0)
    o_c, o_e = tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    b_count = tl.zeros([EXPERTS], tl.int32)
    for i_c in range(0, num_rows, CHUNK):
        mask = i_c + o_c < num_rows
        b_id = tl.load(p_experts + i_c + o_c, mask=mask, other=0)
        b_count += tl.histogram(b_id, EXPERTS, mask=mask)
    b_blocks = (b_count + BLOCK - 1) // BLOCK
    i_first = tl.sum(tl.where(o_e < i_e, b_blocks, 0), 0)
    n_mine = tl.sum(tl.where(o_e == i_e, b_count, 0), 0)
    n_blocks = (n_mine + BLOCK - 1) // BLOCK
    if i_e == NUM_EXPERTS - 1:
        tl.store(p_num_blocks, i_first + n_blocks)
    n_before = 0
    for i_c in range(0, num_rows, CHUNK):
        b_id = tl.load(p_experts + i_c + o_c, mask=i_c + o_c < num_rows, other=-1)
        b_mine = (b_id == i_e).to(tl.int32)
        b_rank = n_before + tl.cumsum(b_mine, 0) - 1
        tl.store(p_rows + i_first * BLOCK + b_rank, i_c + o_c, mask=b_mine > 0)
        n_before += tl.sum(b_mine, 0)
    for i_b in range(n_blocks):
        tl.store(p_block_experts + i_first + i_b, i_e)
    o_pad = n_mine + tl.arange(0, BLOCK)
    tl.store(p_rows + i_first * BLOCK + o_pad, num_rows, mask=o_pad < n_blocks * BLOCK)


def unaligned(experts: torch.Tensor, num_experts: int, block: int) -> Alignment:
    """Room for the alignment of `experts`, for a kernel that works it out itself."""
    assert experts.is_contiguous()
    assert block & (block - 1) == 0
    capacity = capacity_of(experts.numel(), num_experts, block)
    rows = torch.empty(capacity, dtype=torch.int32, device=experts.device)
    block_experts = torch.empty(capacity // block, dtype=torch.int32, device=experts.device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=experts.device)
    return Alignment(rows, block_experts, num_blocks, block)


def align(experts: torch.Tensor, num_experts: int, block: int) -> Alignment:
    """Sort the rows of `experts` [num_tokens, slots] (ids below num_experts) by expert; see above."""
    order, num_rows = unaligned(experts, num_experts, block), experts.numel()
    chunk = min(2048, max(64, triton.next_power_of_2(num_rows)))
    _align_kernel[(num_experts,)](
        experts, order.rows, order.block_experts, order.num_blocks, num_rows,
        NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), BLOCK=block, CHUNK=chunk,
        num_warps=4,
    )  # fmt: skip
    return order

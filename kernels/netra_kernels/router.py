"""Which experts a token goes to, and which rows an expert gets.

logits [num_tokens, num_experts] -> Routing: softmax in float32, the top_k largest (equal ones: lower id first),
renormalised. With shared_logits [num_tokens] a last column holds expert num_experts (the shared one) with weight
sigmoid(logit). A row is token * slots + slot. Rows take their places in their expert's list by an atomic count: their
order may vary, what an expert makes of a row does not depend on it. Tokens from num_live int32 [1] on are padding: their
rows are in no list, their experts and weights mean nothing. Does not know what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Routing:
    """experts int32 and weights float32 [num_tokens, slots]; members int32 [num_experts (+ 1), num_tokens]: the first
    counts[e] of row e are the rows that expert e gets, in any order.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    members: torch.Tensor
    counts: torch.Tensor


def route_ref(
    logits: torch.Tensor,
    top_k: int,
    shared_logits: torch.Tensor | None = None,
    num_live: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Routing:
    """Reference of `route`; it has no use for counts. members past an expert's count: -1."""
    probabilities = logits.float().softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, order)
    weights = weights / weights.sum(-1, keepdim=True)
    num_experts = logits.shape[1] + (shared_logits is not None)
    if shared_logits is not None:
        shared = torch.full_like(order[:, :1], logits.shape[1])
        order = torch.cat([order, shared], dim=1)
        weights = torch.cat([weights, shared_logits.float().sigmoid()[:, None]], dim=1)
    live = len(logits) if num_live is None else int(num_live)
    return Routing(order.int(), weights, *_members_ref(order, num_experts, live))


def _members_ref(
    experts: torch.Tensor, num_experts: int, num_live: int
) -> tuple[torch.Tensor, torch.Tensor]:
    owners, rows = experts[:num_live].flatten().sort(stable=True)
    counts = torch.bincount(owners, minlength=num_experts)
    ranks = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners]
    members = torch.full((num_experts, len(experts)), -1, dtype=torch.int32, device=owners.device)
    members[owners, ranks] = rows.int()
    return members, counts.int()


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    p_logits, p_shared, p_num_live, p_experts, p_weights, p_members, p_counts, num_tokens, stride_logits, stride_shared,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, EXPERTS)
    live = o_t < num_tokens
    mask = live[:, None] & (o_e < NUM_EXPERTS)[None, :]
    o_logit = o_t[:, None] * stride_logits + o_e[None, :]
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
        b_gate = tl.load(p_shared + o_t * stride_shared, mask=live, other=0.0).to(tl.float32)
        b_weight = tl.where((o_s == TOP_K)[None, :], tl.sigmoid(b_gate)[:, None], b_weight)
    o_row = o_t[:, None] * SLOTS + o_s[None, :]
    kept = live[:, None] & (o_s < SLOTS)[None, :]
    tl.store(p_experts + o_row, b_expert, mask=kept)
    tl.store(p_weights + o_row, b_weight, mask=kept)
    n_live = num_tokens
    if HAS_LIVE:
        n_live = tl.load(p_num_live)
    listed = (o_t < n_live)[:, None] & kept
    drawn = listed & (o_s < TOP_K)[None, :]
    b_one = tl.full([ROWS, COLUMNS], 1, tl.int32)
    b_place = tl.atomic_add(p_counts + b_expert, b_one, mask=drawn, sem="relaxed").to(tl.int64)
    if HAS_SHARED:  # every token's
        b_place = tl.where((o_s == TOP_K)[None, :], o_t[:, None], b_place)
        if tl.program_id(0) == 0:
            tl.store(p_counts + NUM_EXPERTS, n_live)
    o_member = b_expert.to(tl.int64) * num_tokens + b_place
    tl.store(p_members + o_member, o_row.to(tl.int32), mask=listed)


def route(
    logits: torch.Tensor,
    top_k: int,
    shared_logits: torch.Tensor | None = None,
    num_live: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Routing:
    """Experts and weights of every token; see the file's docstring.

    counts int32 zeros [num_experts (+ 1)], made here if not given, become those of the result; expert_outputs leaves
    them zero for the next call. Calls that share them must be ordered on one stream.
    """
    num_tokens, num_experts = logits.shape
    has_shared = shared_logits is not None
    assert logits.stride(1) == 1
    assert top_k <= num_experts < 65536
    slots, device = top_k + has_shared, logits.device
    if counts is None:
        counts = torch.zeros(num_experts + has_shared, dtype=torch.int32, device=device)
    assert counts.shape == (num_experts + has_shared,)
    experts = torch.empty((num_tokens, slots), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, slots), dtype=torch.float32, device=device)
    members = torch.empty((len(counts), num_tokens), dtype=torch.int32, device=device)
    _route_kernel[(triton.cdiv(num_tokens, 4),)](
        logits, shared_logits, num_live, experts, weights, members, counts, num_tokens, logits.stride(0),
        0 if shared_logits is None else shared_logits.stride(0),
        NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), TOP_K=top_k, SLOTS=slots,
        COLUMNS=triton.next_power_of_2(slots), ROWS=4, HAS_SHARED=has_shared, HAS_LIVE=num_live is not None, num_warps=4,
    )  # fmt: skip
    return Routing(experts, weights, members, counts)

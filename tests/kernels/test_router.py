"""route and align against their references: ids equal, ties, padding, empty experts; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.router import align, align_ref, route, route_ref


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison_empty(monkeypatch)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (6, 256, 8), (5, 40, 8), (4, 8, 8)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_route_matches_reference(num_tokens, num_experts, top_k, shared):
    logits = torch.randn(num_tokens, num_experts)
    gate = torch.randn(num_tokens) if shared else None
    experts, weights = route(logits, top_k, gate)
    expected_experts, expected_weights = route_ref(logits, top_k, gate)
    assert torch.equal(experts, expected_experts)
    assert_close(weights, expected_weights, 1e-6)


@pytest.mark.parametrize("num_live", [0, 1, 5, 7])
def test_padding_goes_where_the_first_token_goes(num_live):
    logits, gate = torch.randn(7, 16), torch.randn(7)
    logits[num_live or 1 :], gate[num_live or 1 :] = float("nan"), float("nan")
    live = torch.tensor([num_live], dtype=torch.int32)
    experts, weights = route(logits, 4, gate, live)
    expected_experts, expected_weights = route_ref(logits, 4, gate, live)
    assert torch.equal(experts, expected_experts)
    assert_close(weights, expected_weights, 1e-6)
    alone, _ = route(logits[: num_live or 1], 4, gate[: num_live or 1])
    assert torch.equal(experts[: num_live or 1], alone)
    assert (experts[num_live:] == experts[0]).all()


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(3, 16)
    logits[1, 3::4] = -0.0
    logits[2] = -2.5
    logits[2, 9:12] = 1.0
    experts, weights = route(logits.bfloat16(), 4)
    assert experts.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [9, 10, 11, 0]]
    assert_close(weights.sum(-1), torch.ones(3), 1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "slots", "num_experts", "block"), [(1, 2, 8, 16), (13, 3, 7, 16), (40, 2, 5, 64)]
)
def test_align_matches_reference(num_tokens, slots, num_experts, block):
    experts = torch.randint(0, num_experts - 1, (num_tokens, slots), dtype=torch.int32)
    experts[experts == 2] = 1  # an expert without rows in the middle, and one at the end
    out, expected = align(experts, num_experts, block), align_ref(experts, num_experts, block)
    blocks = expected.num_blocks.item()
    assert out.num_blocks.item() == blocks
    assert torch.equal(out.block_experts[:blocks], expected.block_experts[:blocks])
    assert torch.equal(out.rows[: blocks * block], expected.rows[: blocks * block])


def test_align_one_expert_takes_every_row():
    experts = torch.full((50, 2), 3, dtype=torch.int32)
    out = align(experts, 4, 16)
    assert out.num_blocks.item() == 7
    assert torch.equal(out.rows[:100], torch.arange(100, dtype=torch.int32))
    assert (out.rows[100:112] == 100).all()

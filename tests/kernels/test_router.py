"""route against its reference: ids equal, ties, the rows that each expert gets, empty experts; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.router import route, route_ref


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
    out, expected = route(logits, top_k, gate), route_ref(logits, top_k, gate)
    assert torch.equal(out.experts, expected.experts)
    assert_close(out.weights, expected.weights, 1e-6)
    assert torch.equal(out.counts, expected.counts)
    assert members_of(out) == members_of(expected)


def members_of(routing):
    """Rows of each expert, whatever their order."""
    counts = routing.counts.tolist()
    return [sorted(row[:n].tolist()) for row, n in zip(routing.members, counts, strict=True)]


@pytest.mark.parametrize("num_live", [0, 1, 5, 7])
def test_padding_is_in_no_list(num_live):
    logits, gate = torch.randn(7, 16), torch.randn(7)
    logits[num_live:], gate[num_live:] = float("nan"), float("nan")
    live = torch.tensor([num_live], dtype=torch.int32)
    out, expected = route(logits, 4, gate, live), route_ref(logits, 4, gate, live)
    assert torch.equal(out.experts[:num_live], expected.experts[:num_live])
    assert torch.equal(out.counts, expected.counts)
    assert out.counts.sum() == 5 * num_live
    assert members_of(out) == members_of(expected)
    assert ((out.experts >= 0) & (out.experts <= 16)).all()


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(3, 16)
    logits[1, 3::4] = -0.0
    logits[2] = -2.5
    logits[2, 9:12] = 1.0
    routing = route(logits.bfloat16(), 4)
    assert routing.experts.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [9, 10, 11, 0]]
    assert_close(routing.weights.sum(-1), torch.ones(3), 1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_one_expert_takes_every_row_and_others_none(top_k):
    logits = torch.zeros(50, 5)
    logits[:, 3] = 9.0
    counts = torch.zeros(6, dtype=torch.int32)
    routing = route(logits, top_k, torch.zeros(50), counts=counts)
    assert routing.counts is counts
    rows = members_of(routing)
    assert rows[3] == [t * (top_k + 1) for t in range(50)]
    assert rows[5] == [t * (top_k + 1) + top_k for t in range(50)]
    assert rows[4] == rows[1] == []
    assert len(rows[0]) == 50 * (top_k - 1)

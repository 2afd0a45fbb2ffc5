"""fused_moe against its reference: FP8 and bfloat16 weights, shared expert, both row buckets; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.fused_moe import ExpertWeights, fused_moe, fused_moe_ref
from netra_kernels.rms_norm import quantize_fp8_ref
from netra_kernels.router import route


def fp8_layer(experts, hidden, inter):
    gate_up = (60 * torch.randn(experts, 2 * inter, hidden)).to(torch.float8_e4m3fn)
    down = (60 * torch.randn(experts, hidden, inter)).to(torch.float8_e4m3fn)
    return ExpertWeights(
        gate_up,
        down,
        1e-3 * (torch.rand(experts, -(-2 * inter // 128), -(-hidden // 128)) + 0.5),
        1e-3 * (torch.rand(experts, -(-hidden // 128), -(-inter // 128)) + 0.5),
    )


@pytest.mark.parametrize(("num_tokens", "experts", "top_k"), [(1, 4, 2), (12, 4, 2), (50, 2, 1)])
def test_fp8_matches_reference(monkeypatch, num_tokens, experts, top_k):
    """One token, a decode batch (16-row blocks, swapped), a batch large enough for 64-row blocks."""
    hidden, inter = 256, 128
    layer = fp8_layer(experts + 1, hidden, inter)
    x, scales = quantize_fp8_ref(torch.randn(num_tokens, hidden))
    logits = torch.randn(num_tokens, experts)
    routing = route(logits, top_k, torch.randn(num_tokens))
    assert (num_tokens * (top_k + 1) > 32 * (experts + 1)) == (num_tokens == 50)
    expected = fused_moe_ref(x, scales, routing, layer, torch.float32)
    poison_empty(monkeypatch)
    out = fused_moe(x, scales, routing, layer, torch.float32)
    assert_close(out, expected, 0.03)  # the inner activation has 3 mantissa bits


@pytest.mark.parametrize(("num_tokens", "hidden"), [(5, 192), (70, 64)])
def test_bfloat16_matches_reference(monkeypatch, num_tokens, hidden):
    layer = ExpertWeights(
        torch.randn(2, 128, hidden).bfloat16(), torch.randn(2, hidden, 64).bfloat16()
    )
    x = torch.randn(num_tokens, hidden).bfloat16()
    routing = route(torch.randn(num_tokens, 2), 1)
    expected = fused_moe_ref(x, None, routing, layer)
    poison_empty(monkeypatch)
    assert_close(fused_moe(x, None, routing, layer), expected, 6e-3)


@pytest.mark.parametrize("num_tokens", [1, 7, 60])
def test_the_order_of_an_experts_rows_does_not_matter(monkeypatch, num_tokens):
    """Several blocks of an expert, experts without rows, lists in another order: the same bits; counts are left zero."""
    layer = fp8_layer(6, 128, 64)
    x, scales = quantize_fp8_ref(torch.randn(num_tokens, 128))
    logits = torch.randn(num_tokens, 6) + torch.tensor([3.0, 0, -9, 0, 0, 1])
    poison_empty(monkeypatch)
    routing = route(logits, 2)
    turned = route(logits, 2)
    for row, count in zip(turned.members, turned.counts.tolist(), strict=True):
        row[:count] = row[:count].flip(0).clone()
    first = fused_moe(x, scales, routing, layer)
    assert not first.isnan().any()
    assert torch.equal(first, fused_moe(x, scales, turned, layer))
    assert not routing.counts.any()
    again = fused_moe(x, scales, route(logits, 2, counts=routing.counts), layer)
    assert torch.equal(first, again)


@pytest.mark.parametrize("num_live", [0, 3])
def test_padding_is_not_computed(num_live):
    """The rows in use are those of a batch without padding; with nothing but padding counts are left zero too."""
    layer = fp8_layer(5, 128, 64)
    x, scales = quantize_fp8_ref(torch.randn(9, 128))
    logits, gate = torch.randn(9, 4), torch.randn(9)
    routing = route(logits, 2, gate, torch.tensor([num_live], dtype=torch.int32))
    padded = fused_moe(x, scales, routing, layer)
    assert not routing.counts.any()
    if num_live:
        alone = route(logits[:num_live], 2, gate[:num_live])
        assert torch.equal(
            padded[:num_live], fused_moe(x[:num_live], scales[:num_live], alone, layer)
        )


def test_result_of_a_token_does_not_depend_on_its_neighbours():
    layer = fp8_layer(3, 128, 64)
    x, scales = quantize_fp8_ref(torch.randn(9, 128))
    logits = torch.randn(9, 3)
    together = fused_moe(x, scales, route(logits, 2), layer)
    alone = fused_moe(x[4:5], scales[4:5], route(logits[4:5], 2), layer)
    assert torch.equal(together[4], alone[0])

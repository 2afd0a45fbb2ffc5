"""rms_norm and gated_rms_norm against their references, interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.rms_norm import (
    gated_rms_norm,
    gated_rms_norm_ref,
    quantize_rows,
    quantize_rows_ref,
    rms_norm,
    rms_norm_ref,
)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison_empty(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "fp8"), [(384, True), (200, False), (64, False)])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_matches_reference(dtype, hidden, fp8, zero_centered, with_residual):
    x = (3 * torch.randn(3, hidden)).to(dtype)
    residual = torch.randn(3, hidden).to(dtype) if with_residual else None
    weight = torch.randn(hidden).to(dtype)
    arguments = (x, weight, 1e-6, residual, zero_centered, fp8)
    out, expected = rms_norm(*arguments), rms_norm_ref(*arguments)
    assert torch.equal(out.residual, expected.residual)
    assert_close(out.hidden, expected.hidden, 2e-3 if dtype == torch.bfloat16 else 1e-6)
    if fp8:
        assert_close(out.scales, expected.scales, 1e-3)
        restored = out.fp8.float().unflatten(-1, (-1, 128)) * out.scales[..., None]
        assert_close(restored.flatten(-2), out.hidden.float(), 0.03)


def test_fp8_codes_equal_the_reference_on_equal_rows():
    x = torch.randn(4, 256).bfloat16()
    x[1, :128] = 0
    x[2, 5] = 3e4
    out = rms_norm(x, torch.zeros(256).bfloat16(), 1e-6, None, True, True)
    expected = rms_norm_ref(x, torch.zeros(256).bfloat16(), 1e-6, None, True, True)
    assert torch.equal(out.hidden, expected.hidden)
    assert torch.equal(out.fp8.view(torch.uint8), expected.fp8.view(torch.uint8))
    assert torch.equal(out.scales, expected.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantised_as_the_reference_does(dtype):
    x = (5 * torch.randn(3, 384)).to(dtype)
    x[1, 128:256] = 0
    codes, scales = quantize_rows(x)
    expected_codes, expected_scales = quantize_rows_ref(x)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "fp8"), [(3, 128, True), (2, 64, False)])
def test_gated_rms_norm_matches_reference(dtype, heads, dim, fp8):
    x, weight = torch.randn(5, heads, dim).to(dtype), torch.randn(dim).to(dtype)
    wide = torch.randn(5, 2 * heads * dim).to(dtype)
    gate = wide[:, heads * dim :].unflatten(-1, (heads, dim))
    out = gated_rms_norm(x, gate, weight, 1e-6, fp8)
    expected = gated_rms_norm_ref(x, gate, weight, 1e-6, fp8)
    assert_close(out.hidden, expected.hidden, 2e-3 if dtype == torch.bfloat16 else 1e-6)
    if fp8:
        assert_close(out.fp8.float() * out.scales[..., None], expected.hidden, 0.03)


@pytest.mark.parametrize("with_residual", [False, True])
def test_weighted_sum_of_expert_outputs_is_normalised(with_residual):
    outputs, slot_weights = torch.randn(5, 3, 256).bfloat16(), torch.rand(5, 3)
    residual = torch.randn(5, 256).bfloat16() if with_residual else None
    arguments = (outputs, torch.randn(256).bfloat16(), 1e-6, residual, True, True, slot_weights)
    out, expected = rms_norm(*arguments), rms_norm_ref(*arguments)
    assert_close(out.residual, expected.residual, 2e-3)
    assert_close(out.hidden, expected.hidden, 3e-3)

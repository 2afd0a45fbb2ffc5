"""fp8_gemm against float32, all row buckets, edges of blocks, split along the depth; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.fp8_gemm import fp8_gemm, fp8_gemm_ref, split_k_of
from netra_kernels.rms_norm import quantize_fp8_ref


def operands(rows, columns, depth):
    x, x_scales = quantize_fp8_ref(torch.randn(rows, depth))
    weight = (100 * torch.randn(columns, depth)).to(torch.float8_e4m3fn)
    return x, x_scales, weight, torch.rand(-(-columns // 128), depth // 128) + 0.1


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (16, 192), (17, 64), (33, 200), (70, 256)])
def test_matches_reference(monkeypatch, rows, columns):
    arguments = operands(rows, columns, 384)
    expected = fp8_gemm_ref(*arguments, torch.float32)
    poison_empty(monkeypatch)
    assert_close(fp8_gemm(*arguments, torch.float32), expected, 1e-5)
    assert_close(fp8_gemm(*arguments), expected.bfloat16(), 3e-3)


@pytest.mark.parametrize("rows", [3, 40])
def test_split_along_the_depth_leaves_the_counters_zero(monkeypatch, rows):
    arguments, counters = operands(rows, 128, 2048), torch.zeros(8, dtype=torch.int32)
    assert split_k_of(128, 2048, rows, 64) > 1
    expected = fp8_gemm_ref(*arguments, torch.float32)
    poison_empty(monkeypatch)
    for _ in range(2):
        assert_close(fp8_gemm(*arguments, torch.float32, counters), expected, 1e-5)
        assert (counters == 0).all()

"""The repaired interpreter itself: every cast bit-equal to torch, bf16 and fp8 arithmetic rounded once."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn


@triton.jit
def _cast_kernel(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, tl.load(p_x + o).to(p_y.dtype.element_ty))


@triton.jit
def _add_kernel(p_x, p_y, p_z, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x = tl.load(p_x + o)
    tl.store(p_z + o, tl.where(b_x > 0, b_x * 1.5, b_x) + tl.load(p_y + o))


@triton.jit
def _dot_kernel(p_x, p_y, p_z, M: tl.constexpr, K: tl.constexpr, n_rounds):
    o_m, o_k = tl.arange(0, M), tl.arange(0, K)
    b_x = tl.load(p_x + o_m[:, None] * K + o_k[None, :])
    b_y = tl.load(p_y + o_k[:, None] * M + o_m[None, :])
    b_acc = tl.zeros([M, M], tl.float32)
    for _ in range(n_rounds):
        b_acc += tl.dot(b_x, b_y)
    tl.store(p_z + o_m[:, None] * M + o_m[None, :], b_acc)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _all_fp8() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FP8)


def test_fp8_decodes_every_code():
    out = torch.empty(256)
    _cast_kernel[(1,)](_all_fp8(), out, N=256)
    assert torch.equal(out.nan_to_num(7e7), _all_fp8().float().nan_to_num(7e7))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.bfloat16, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0, 300.0])
def test_casts_round_to_nearest_even_and_saturate(source, target, scale):
    x = (torch.randn(8192) * scale).to(source)
    out = torch.empty(8192, dtype=target)
    _cast_kernel[(1,)](x, out, N=8192)
    limit = torch.finfo(target).max
    expected = (
        x.float().clamp(-limit, limit).to(target) if target != torch.bfloat16 else x.to(target)
    )
    assert torch.equal(_bits(out), _bits(expected))


def test_bf16_arithmetic_rounds_once_per_operation():
    x, y = torch.randn(1024).bfloat16(), torch.randn(1024).bfloat16()
    out = torch.empty(1024, dtype=torch.bfloat16)
    _add_kernel[(1,)](x, y, out, N=1024)
    assert torch.equal(out, torch.where(x > 0, x * 1.5, x) + y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_dot_multiplies_values_not_bits(dtype):
    x, y = torch.randn(16, 32).to(dtype), torch.randn(32, 16).to(dtype)
    out = torch.full((16, 16), float("nan"))
    _dot_kernel[(1,)](x, y, out, M=16, K=32, n_rounds=2)
    expected = 2 * (x.double() @ y.double())
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()

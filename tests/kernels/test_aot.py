"""The machine-code gate itself: it must catch spills, too much shared memory, a missing MMA, narrow loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from netra_kernels.aot import (
    MAX_SHARED_BYTES,
    MachineCode,
    capture,
    inspect,
    replace_section,
    violations,
)
from netra_kernels.aot_cases import meta


@triton.jit
def _matmul_kernel(
    p_x, p_y, p_z, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, n_steps
):
    o_m, o_k, o_n = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    b_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(n_steps):
        b_x = tl.load(p_x + (i * ROWS + o_m)[:, None] * DEPTH + o_k[None, :])
        b_y = tl.load(p_y + (i * COLUMNS + o_n)[:, None] * DEPTH + o_k[None, :])
        b_acc += tl.dot(b_x, tl.trans(b_y))
    tl.store(p_z + o_m[:, None] * COLUMNS + o_n[None, :], b_acc)


def _compile(rows, columns, dtype, stages=2, warps=4):
    x, y = meta(9 * rows, 128, dtype=dtype), meta(9 * columns, 128, dtype=dtype)
    with capture() as launches:
        _matmul_kernel[(3, 2)](x, y, meta(rows, columns, dtype=torch.float32), ROWS=rows, DEPTH=128,
                               COLUMNS=columns, n_steps=9, num_warps=warps, num_stages=stages)  # fmt: skip
    return launches


def test_launches_are_recorded_and_none_runs():
    (launch,) = _compile(64, 64, torch.bfloat16)
    assert launch.name == "_matmul_kernel"
    assert launch.grid == (3, 2)


def test_healthy_kernels_pass():
    code = inspect(_compile(64, 64, torch.bfloat16)[0])
    assert violations(code, "HGMMA", 0) == []
    assert 32 < code.registers <= 255
    assert 0 < code.shared_bytes <= MAX_SHARED_BYTES
    assert violations(inspect(_compile(64, 64, torch.float8_e4m3fn)[0]), "QGMMA", 0) == []


def test_too_few_rows_for_the_wide_mma_are_caught():
    assert any(
        "no HGMMA" in reason
        for reason in violations(inspect(_compile(16, 64, torch.bfloat16)[0]), "HGMMA")
    )


def test_spills_are_caught():
    code = inspect(_compile(256, 128, torch.bfloat16, stages=1)[0])
    assert any("spills" in reason for reason in violations(code))


def test_shared_memory_over_the_limit_is_caught():
    code = MachineCode("k", 4, 2, registers=64, stack_bytes=0, shared_bytes=MAX_SHARED_BYTES + 1)
    assert any("shared memory" in reason for reason in violations(code))


@triton.jit
def _narrow_kernel(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, tl.load(p_x + o * 3).to(tl.float32))


def test_narrow_loads_are_caught():
    with capture() as launches:
        _narrow_kernel[(1,)](meta(4096), meta(1024, dtype=torch.float32), N=1024)
    assert any(
        "8 or 16 bits" in reason for reason in violations(inspect(launches[0]), max_narrow_loads=0)
    )


def test_a_section_is_replaced_and_others_stay():
    first = replace_section("# Kernels\n", "old")
    assert first.count("<!-- triton") == 1
    again = replace_section(first + "\nafter\n", "new")
    assert "old" not in again
    assert again.count("<!-- triton") == 1
    assert again.endswith("after\n")

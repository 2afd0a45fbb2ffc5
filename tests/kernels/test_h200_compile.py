"""bench/h200_compile.py: what workers compile must be what the device then finds in triton's cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import h200_compile
from netra_kernels.aot_cases import CASES


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_job_leaves_machine_code_and_names_what_failed(cache):
    index = next(i for i, case in enumerate(CASES) if case.name.startswith("convolution"))
    assert h200_compile.compile_job(("case", index)) == ""
    assert h200_compile.compile_job(("case", 10**6)).startswith("('case', 1000000): IndexError")


def test_the_first_step_finds_every_kernel(cache):
    assert h200_compile.compile_job(("step", 0)) == ""
    found = {path.stem for path in cache.rglob("*.cubin")}
    assert {"_history_kernel", "_gate_up_kernel", "_gated_delta_rule_kernel"} <= found

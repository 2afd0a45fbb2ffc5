"""Every shipped configuration compiled for sm_90: no spills, shared memory that fits, the MMA that was meant."""

from __future__ import annotations

import pytest

from netra_kernels.aot import capture, inspect, violations
from netra_kernels.aot_cases import CASES


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in CASES],
)
def test_machine_code(case):
    with capture() as launches:
        case.launch()
    assert launches
    names = {launch.name for launch in launches}
    assert set(case.opcodes) <= names, f"launched {names}"
    for launch in launches:
        bad = violations(inspect(launch), case.opcodes.get(launch.name), case.max_narrow_loads)
        assert not bad, f"{launch.name}: {'; '.join(bad)}"

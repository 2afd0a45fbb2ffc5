"""bench/h200_check.py in its dry run: the script must work the day a GPU is there; interpreted, tiny shapes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest


def load():
    path = Path(__file__).parents[2] / "bench" / "h200_check.py"
    spec = importlib.util.spec_from_file_location("h200_check", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["h200_check"] = module
    spec.loader.exec_module(module)
    return module


def test_a_wrong_or_unrepeatable_kernel_is_counted():
    script = load()
    one, two = script.torch.ones(3), script.torch.full((3,), 2.0)
    good = script.Work("good", lambda: (one,), reference=lambda: (one,))
    wrong = script.Work("wrong", lambda: (two,), reference=lambda: (one,))
    lost = script.Work("nan", lambda: (one * float("nan"),), reference=lambda: (one,))
    flaky = script.Work(
        "flaky", lambda: (one + 1e-4 * script.torch.rand(3),), reference=lambda: (one,)
    )
    assert [script.check(w).ok for w in (good, wrong, lost, flaky)] == [True, False, False, False]


def test_numerics_section_of_the_dry_run(tmp_path):
    script = load()
    output = tmp_path / "report.json"
    assert script.main(["--dry-run", "--sections", "numerics", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) > 12
    assert all(row["error"] < row["limit"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("section", ["timing", "layers"])
def test_timed_sections_of_the_dry_run(tmp_path, section):
    script = load()
    output = tmp_path / "report.json"
    assert script.main(["--dry-run", "--sections", section, "--output", str(output)]) == 0
    assert all(
        row["ms"] > 0 and row["floor_ms"] > 0 for row in json.loads(output.read_text())["rows"]
    )

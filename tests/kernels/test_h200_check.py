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


def test_whole_steps_of_the_dry_run(tmp_path):
    """The engine's runner on random weights: decoding with a draft, and a chunk that seals a page."""
    script = load()
    output = tmp_path / "report.json"
    assert script.main(["--dry-run", "--sections", "steps", "--output", str(output)]) == 0
    built, *steps = json.loads(output.read_text())["rows"]
    assert built["failure"] == ""
    assert [row["name"].split()[0] for row in steps] == ["decode", "prompt"]
    for row in steps:
        assert min(row["ms"], row["wall_ms"], row["floor_ms"], row["rows_per_s"]) > 0
        assert row["in_graph"] is False


def test_what_fails_is_a_row_and_the_others_run(tmp_path, monkeypatch):
    script = load()
    one = script.torch.ones(3)

    def unbuildable(_):
        raise MemoryError("too large\nin detail")

    makes = [
        script.partial(unbuildable, 7),
        script.partial(script.Work, "good", lambda: (one,), reference=lambda: (one,)),
    ]
    monkeypatch.setattr(script, "numerics", lambda _: makes)
    output = tmp_path / "report.json"
    assert script.main(["--dry-run", "--sections", "numerics", "--output", str(output)]) == 1
    bad, good = json.loads(output.read_text())["rows"]
    assert (bad["name"], bad["failure"]) == ("unbuildable(7,)", "MemoryError: too large")
    assert (good["failure"], good["error"]) == ("", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("section", ["timing", "layers"])
def test_timed_sections_of_the_dry_run(tmp_path, section):
    script = load()
    output = tmp_path / "report.json"
    assert script.main(["--dry-run", "--sections", section, "--output", str(output)]) == 0
    assert all(
        row["ms"] > 0 and row["floor_ms"] > 0 for row in json.loads(output.read_text())["rows"]
    )

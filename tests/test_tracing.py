"""Tracing: Chrome trace JSON at shutdown, nothing without a file, bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import simulate

from netra_backend import tracing
from netra_backend.config import EngineConfig
from netra_backend.tracing import Tracer


def test_engine_writes_steps_and_requests(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "trace.json"
    simulated = simulate(EngineConfig(trace_file=str(path), max_num_seqs=1))
    simulated.add("first", 100, max_tokens=5, ignore_eos=True)
    simulated.add("second", 100, max_tokens=5, ignore_eos=True)
    num_steps = simulated.run()
    simulated.engine.shutdown(0.0)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["dur"] >= 0 for span in spans)
    runs = [span for span in spans if span["name"] == "run"]
    assert len(runs) == num_steps
    assert runs[0]["args"] == {"sequences": 1, "rows": 100}
    assert sum(run["dur"] for run in runs) == pytest.approx(simulated.clock() * 1e6)
    lines = {span["args"]["request_id"]: span["tid"] for span in spans if span["name"] == "decode"}
    assert lines == {"first": 0, "second": 1}
    queued = {span["tid"]: span["dur"] for span in spans if span["name"] == "queued"}
    assert queued[0] == 0 < queued[1]
    decode = next(span for span in spans if span["name"] == "decode")
    assert decode["args"]["output_tokens"] == 5
    assert decode["args"]["finish_reason"] == "length"


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracer = Tracer("")
    tracer.step(0.0, 1.0, 2.0, 3.0, {})
    tracer.write()
    assert not tracer.enabled
    assert not list(tmp_path.iterdir())


def test_newest_spans_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MAX_SPANS", 30)
    path = tmp_path / "trace.json"
    tracer = Tracer(str(path))
    for number in range(100):
        tracer.step(number, number, number + 1, number + 1, {"number": number})
    tracer.write()
    events = json.loads(path.read_text())["traceEvents"]
    numbers = [event["args"]["number"] for event in events if event["name"] == "run"]
    assert numbers == list(range(90, 100))

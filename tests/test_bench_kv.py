"""bench/capacity.py, kv_quality.py, head_quality.py and second_turn.py run as their users run them, and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import make_random_llama, make_random_qwen

BENCH = Path(__file__).parents[1] / "bench"


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_capacity_gives_a_row_per_codec_and_explains_it(tmp_path: Path) -> None:
    config = make_random_qwen(tmp_path / "qwen") / "config.json"
    arguments = ("--model-config", str(config), "--memory-bytes", "1e9", "--context-len", "4096")
    done = _run("capacity.py", *arguments, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["codec"] for row in rows] == ["bf16", "int8", "k8v4", "int4", "fp8_e4m3"]
    for row in rows:
        each = row["kv_bytes"] + row["tail_bytes"] + row["state_bytes"]
        assert row["conversations"] == int(1e9) // each
        assert f"{row['conversations']} conversations of 4,096 tokens fit" in row["explanation"]
    assert rows[0]["conversations"] < rows[1]["conversations"] < rows[3]["conversations"]


def test_capacity_says_what_does_not_fit(tmp_path: Path) -> None:
    config = make_random_qwen(tmp_path / "qwen") / "config.json"
    arguments = ("--model-config", str(config), "--memory-bytes", "1e5", "--context-len", "4096")
    done = _run("capacity.py", *arguments)
    assert done.returncode == 1
    assert "do not fit into the rest" in done.stderr


def test_second_turn_finds_its_history(tmp_path: Path) -> None:
    checkpoint, out = make_random_qwen(tmp_path / "qwen"), tmp_path / "out.json"
    done = _run(
        "second_turn.py", "--checkpoint", str(checkpoint), "--history-len", "300", "--output-len", "30",
        "--question-len", "10", "--repeats", "1", "--num-threads", "1", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["workload"] == "300+10"
    assert row["metrics"]["num_cached_tokens"] == 256
    assert row["metrics"]["same_tokens"] == 1
    assert row["metrics"]["times_sooner"] == pytest.approx(
        row["metrics"]["cold_ttft_ms"] / row["metrics"]["warm_ttft_ms"]
    )


def test_the_fp8_head_is_scored_against_the_exact_one(tmp_path: Path) -> None:
    checkpoint, out = make_random_qwen(tmp_path / "qwen"), tmp_path / "out.json"
    done = _run(
        "head_quality.py",
        "--checkpoint",
        str(checkpoint),
        "--texts",
        "1",
        "--length",
        "100",
        "--json",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["num_tokens"] == 100 - 64 - 1
    assert row["kl"] > 0
    assert 0.5 < row["top1"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kept_pages", [0, 1])
def test_quality_scores_codecs_against_the_plain_cache(tmp_path: Path, kept_pages: int) -> None:
    checkpoint = make_random_llama(tmp_path / "llama")
    out = tmp_path / "out.json"
    done = _run(
        "kv_quality.py", "--checkpoint", str(checkpoint), "--codec", "int8", "int4", "--texts", "2",
        "--length", "300", "--passage", "70", "--decode", "20", "--num-threads", "1",
        "--kept-pages", str(kept_pages), "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, int8, int4 = json.loads(out.read_text())["rows"]
    assert [plain["codec"], int8["codec"], int4["codec"]] == ["plain", "int8", "int4"]
    assert plain["kl"] == plain["ppl_delta"] == 0
    assert plain["top1"] == 1
    assert 0 < int8["kl"] < int4["kl"]
    assert int8["top1"] > int4["top1"] > 0.5
    # Every position after the first page has a next token but the last one.
    assert int8["num_tokens"] == 2 * (300 - 64 - 1)
    assert plain["bits_per_value"] == 32

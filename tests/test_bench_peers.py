"""bench/peers.py: turns, dropped repeats, environments, the processes behind them, GGUF variants."""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gguf_variant
import peer_worker
import peers
import report
import workload

WORKLOAD = peers.Workload("b", 2, 20, 8)


class CountingMaker:
    """Prompts of numbers that go on."""

    def __init__(self) -> None:
        self._next = 0

    def make(self, num_tokens: int) -> workload.Prompt:
        self._next += 1
        return workload.Prompt("", (self._next,) * num_tokens, "")


class FakeWorker:
    """A peer that answers with fixed times and notes in which order it was asked."""

    def __init__(self, name: str, log: list[str], others: list[float], token: int = 7) -> None:
        self._name, self._log, self._others, self._token = name, log, others, token

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        self._log.append(self._name)
        others = 0.0
        if output_len > peers._WARMUP_OUTPUT_LEN and self._others:
            others = self._others.pop(0)
        return {
            "first": [0.5] * len(prompts),
            "last": [1.0] * len(prompts),
            "token_ids": [[self._token] * output_len for _ in prompts],
            "cpu": {"wall_seconds": 1.0, "own_cores": 1.9, "other_cores": others},
        }


class TestPeers:
    """Turns, dropped repeats, and the processes behind them."""

    def compare(self, others: list[float], rounds: int) -> tuple[list[report.Row], list[str], int]:
        log: list[str] = []
        workers: dict[str, Any] = {
            "netra": FakeWorker("netra", log, others),
            "transformers": FakeWorker("transformers", log, [], token=7),
            "other": FakeWorker("other", log, [], token=8),
        }
        kept: dict[tuple[str, str], list[report.Metrics]] = {(name, "b"): [] for name in workers}
        maker: Any = CountingMaker()
        comparison = peers.Comparison(workers, maker, 0.15, kept)
        rows = peers.compare(comparison, [WORKLOAD], 2, rounds)
        return rows, log, comparison.num_dropped

    def test_repeats_take_turns_and_disturbed_ones_are_run_again(self) -> None:
        rows, log, num_dropped = self.compare([0.0, 0.5], rounds=5)
        assert log[3:6] == log[6:9] == ["transformers", "netra", "other"]
        assert num_dropped == 1
        assert [row.metrics["num_repeats"] for row in rows] == [2, 3, 3]
        assert [row.metrics["same_tokens"] for row in rows] == [1.0, 1.0, 0.0]

    def test_a_busy_machine_gives_rows_without_numbers(self) -> None:
        rows, _, num_dropped = self.compare([1.0] * 9, rounds=3)
        assert num_dropped == 3
        assert rows[0].metrics == {"num_repeats": 0}
        assert "netra" in report.rows_table(rows)

    def test_names_are_checked(self) -> None:
        assert peers.chosen("b,a", ["a", "b"]) == ["b", "a"]
        with pytest.raises(ValueError, match="'x'; known: a, b"):
            peers.chosen("a,x", ["a", "b"])

    def test_an_environment_is_made_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands: list[list[str]] = []
        monkeypatch.setattr(venv, "create", lambda path, **_: path.mkdir(parents=True))
        monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
        environment = peers.Environment("e", ("one==1",), ("two",))
        python = peers.ensure(environment, tmp_path)
        assert peers.ensure(environment, tmp_path) == python == tmp_path / "e" / "bin" / "python"
        assert [command[3:] for command in commands] == [
            ["install", "one==1"],
            ["uninstall", "--yes", "two"],
        ]

    def test_worker_talks_beside_what_an_engine_prints(self, tmp_path: Path) -> None:
        script = tmp_path / "worker.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(Path(peers.__file__).parent)!r})\n"
            "import peer_worker as w\n"
            "def make(arguments):\n"
            "    print('noise', arguments.set)\n"
            "    def run(prompts, n):\n"
            "        print('noise')\n"
            "        if n == 9: raise SystemExit('broken')\n"
            "        return w.Answers([.1], [.2], [[1] * n])\n"
            "    return run\n"
            "w.ENGINES['netra'] = make\n"
            "sys.exit(w.main())\n"
        )
        command = [sys.executable, str(script), "netra", "--model", "m", "--num-threads", "1"]
        worker = peers.Worker(command, {}, tmp_path / "log")
        try:
            assert worker.run([[1, 2]], 3)["token_ids"] == [[1, 1, 1]]
            with pytest.raises(RuntimeError, match="broken"):
                worker.run([[1, 2]], 9)
        finally:
            worker.close()

    @pytest.mark.slow
    def test_netra_and_transformers_answer_alike(self, tmp_path: Path) -> None:
        from checkpoints import make_random_llama

        checkpoint = make_random_llama(tmp_path / "llama")
        arguments = argparse.Namespace(
            model=str(checkpoint), num_threads=1, max_seqs=4, set=["kv_cache_memory=64MiB"]
        )
        prompts = [[5, 6, 7, 8, 9, 10, 11, 12] * 9, [20, 21, 22, 23, 24, 25, 26, 27] * 9]
        answers = [
            peer_worker.ENGINES[name](arguments)(prompts, 12) for name in ("netra", "transformers")
        ]
        assert answers[0].token_ids == answers[1].token_ids
        for answer in answers:
            assert all(0 < a < b for a, b in zip(answer.first, answer.last, strict=True))

    def test_small_scale(self) -> None:
        small = peers.Workload("c", 32, 4096, 16).scaled(8)
        assert (small.users, small.input_len, small.output_len) == (4, 512, 4)


def test_gguf_variant_holds_the_same_model(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((4, 64), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(3)
    writer.add_file_type(3)
    writer.add_token_list(["x", "yz"])
    writer.add_tensor("m", gguf.quantize(matrix, gguf.GGMLQuantizationType.Q4_1),
                      raw_dtype=gguf.GGMLQuantizationType.Q4_1)  # fmt: skip
    writer.add_tensor("v", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_variant.write_variant(tmp_path / "a.gguf", tmp_path / "b.gguf", "F16")
    old, new = (gguf.GGUFReader(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert before.name == after.name
        expected = gguf.dequantize(before.data, before.tensor_type)
        np.testing.assert_allclose(
            gguf.dequantize(after.data, after.tensor_type), expected, rtol=1e-3, atol=1e-6
        )
    assert [str(tensor.tensor_type.name) for tensor in new.tensors] == ["F16", "F32"]
    assert new.get_field("tokenizer.ggml.tokens").contents() == ["x", "yz"]
    assert new.get_field("general.file_type").contents() == 1
    assert not list(tmp_path.glob("*.partial"))

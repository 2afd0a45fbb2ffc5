"""bench/: prompts, CPU accounting, arithmetic of windows, bursts on the engine, reports.

The engine is the real one over the simulated model. Nothing here depends on how fast anything is.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from simulated import simulate

from netra_backend.config import EngineConfig
from netra_backend.request import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import machine
import offline
import report
import window
import workload


class PairTokenizer:
    """Two letters of a word are a token where they can be; a begin token comes first."""

    def encode_plain(self, text: str) -> list[int]:
        token_ids: list[int] = []
        at = 0
        while at < len(text):
            step = 2 if text[at : at + 2].isalpha() and len(text) > at + 1 else 1
            token_ids.append(int.from_bytes(text[at : at + step].encode("utf-16-be"), "big"))
            at += step
        return token_ids

    def encode(self, text: str) -> list[int]:
        return [0xFFFFFF, *self.encode_plain(text)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        sizes = (2 if token < 1 << 16 else 4 for token in token_ids)
        pairs = zip(token_ids, sizes, strict=True)
        return b"".join(token.to_bytes(size, "big") for token, size in pairs).decode("utf-16-be")


TEXTS = tuple("\n".join(f"line {i} of {name} says odd words" for i in range(99)) for name in "abc")
CORPUS = workload.Corpus(("a", "b", "c"), TEXTS, "three texts")


class TestWorkload:
    """Prompts, lengths and arrivals."""

    def test_a_prompt_encodes_to_its_tokens_and_has_the_wanted_count(self) -> None:
        tokenizer = PairTokenizer()
        maker = workload.PromptMaker(tokenizer, CORPUS, seed=1)
        for count in (2, 3, 50, 3000):
            prompt = maker.make(count)
            assert len(prompt.token_ids) == count
            assert tuple(tokenizer.encode(prompt.text)) == prompt.token_ids
            assert prompt.source in CORPUS.names

    def test_the_seed_decides_and_no_two_prompts_begin_alike(self) -> None:
        made = [
            [workload.PromptMaker(PairTokenizer(), CORPUS, seed).make(40).text for _ in range(1)]
            for seed in (1, 1, 2)
        ]
        assert made[0] == made[1] != made[2]
        maker = workload.PromptMaker(PairTokenizer(), CORPUS, 1)
        assert len({maker.make(90).token_ids[:65] for _ in range(50)}) == 50

    def test_prompts_share_exactly_the_prefix_that_was_asked_for(self) -> None:
        maker = workload.PromptMaker(PairTokenizer(), CORPUS, 1, shared_prefix_len=20)
        prompts = [maker.make(100).token_ids for _ in range(8)]
        assert len({prompt[:21] for prompt in prompts}) == 1
        assert len({prompt[:80] for prompt in prompts}) == 8
        with pytest.raises(ValueError, match="no room"):
            maker.make(21)

    def test_a_corpus_without_enough_texts_is_an_error_and_no_endless_search(self) -> None:
        maker = workload.PromptMaker(PairTokenizer(), workload.Corpus(("a",), ("one\n",), ""), 1)
        maker.make(3)
        with pytest.raises(ValueError, match="no text of exactly 3 tokens"):
            maker.make(3)

    def test_the_standard_library_is_prose_and_code_and_is_named_by_its_hash(self) -> None:
        corpus = workload.standard_library()
        assert "argparse.py" in corpus.names
        assert "topic operator-summary" in corpus.names
        assert not any("site-packages" in name or "/test/" in f"/{name}" for name in corpus.names)
        assert corpus.description == workload.standard_library().description

    def test_lengths(self) -> None:
        rng = random.Random(0)
        assert workload.Lengths.parse("512").draw(rng) == 512
        uniform = {workload.Lengths.parse("3-5").draw(rng) for _ in range(99)}
        assert uniform == {3, 4, 5}
        skewed = workload.Lengths.parse("lognormal:100:1:400")
        drawn = [skewed.draw(rng) for _ in range(999)]
        assert 80 < sorted(drawn)[500] < 125
        assert max(drawn) == 400
        for bad in ("0", "5-3", "x", "lognormal:1:2"):
            with pytest.raises(ValueError, match=r".+"):
                workload.Lengths.parse(bad)

    def test_arrivals_keep_their_rate(self) -> None:
        times = workload.poisson_arrivals(10.0, 2000, random.Random(0))
        assert times == sorted(times)
        assert 170 < times[-1] < 230


class TestMachine:
    """CPU accounting."""

    def test_own_and_other_time_add_up_to_what_the_kernel_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stat = tmp_path / "stat"
        own, wall = iter([10.0, 12.0]), iter([100.0, 104.0])
        monkeypatch.setattr(machine, "_STAT", stat)
        monkeypatch.setattr(machine, "_own_seconds", lambda: next(own))
        monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
        tick = os.sysconf("SC_CLK_TCK")
        stat.write_text(f"cpu  {5 * tick} 0 0 777 0 0 0 0 0 0\ncpu0 1\n")
        meter = machine.CpuMeter()
        stat.write_text(f"cpu  {6 * tick} {tick} {tick} 999 99 0 0 {tick} 0 0\ncpu0 1\n")
        assert meter.stop() == machine.CpuUse(4.0, 0.5, 0.5)

    def test_without_proc_the_share_of_others_is_unknown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "_STAT", tmp_path / "none")
        assert machine.CpuMeter().stop().other_cores is None

    def test_description(self) -> None:
        here = machine.describe("9.9")
        assert here.num_cpus >= 1
        assert here.torch == "9.9"


class TestWindow:
    """Arithmetic against numbers worked out by hand."""

    def test_burst(self) -> None:
        burst = window.Burst([0.5, 1.0], [2.5, 2.0], [100, 300], [5, 11])
        metrics = burst.metrics()
        assert metrics["ttft_ms"] == pytest.approx(750)
        assert metrics["ttft_ms_max"] == pytest.approx(1000)
        assert metrics["tpot_ms"] == pytest.approx((500 + 100) / 2)
        assert metrics["output_tokens_per_second"] == pytest.approx(16 / 2.5)
        assert metrics["prompt_tokens_per_second"] == pytest.approx(400)
        assert metrics["total_tokens_per_second"] == pytest.approx(416 / 2.5)

    def test_a_single_token_has_no_time_per_token(self) -> None:
        assert window.Burst([0.5], [0.5], [8], [1]).metrics()["tpot_ms"] is None

    @staticmethod
    def loop(users: int, answers: int) -> list[window.Span]:
        """Each user: 1 s to the first of 5 tokens, 0.5 s between tokens, no pause."""
        spans = []
        for user in range(users):
            for number in range(answers):
                start = user * 3.0 / users + 3.0 * number
                times = [start + 1.0 + 0.5 * token for token in range(5)]
                span = window.Span(start, 10, 5, [(at, 1) for at in times], times[-1])
                span.num_input_tokens = 10
                spans.append(span)
        return spans

    def test_a_steady_window_obeys_littles_law(self) -> None:
        metrics = window.measure(self.loop(users=6, answers=10), (6.0, 24.0))
        assert metrics["in_flight"] == pytest.approx(6.0)
        assert metrics["little_error"] == pytest.approx(0.0, abs=1e-9)
        assert metrics["active_decoders"] == pytest.approx(4.0)
        assert metrics["num_completed"] == 36
        assert metrics["output_tokens_per_second"] == pytest.approx(10.0)
        assert metrics["input_tokens_per_second"] == pytest.approx(20.0)
        assert metrics["ttft_ms"] == pytest.approx(1000)
        assert metrics["tpot_ms"] == pytest.approx(500)
        assert metrics["e2e_ms_p99"] == pytest.approx(3000)
        assert metrics["max_gap_ms_max"] == pytest.approx(500)
        assert metrics["num_failed"] == metrics["num_wrong_output_len"] == 0

    def test_what_disturbs_shows(self) -> None:
        spans = self.loop(users=6, answers=10)
        spans[3].error = "boom"
        spans[4].chunks.pop()
        spans[5].num_input_tokens = 9
        spans[14].chunks[2] = (spans[14].chunks[1][0] + 0.9, 1)
        metrics = window.measure(spans, (6.0, 24.0))
        assert metrics["num_failed"] == 1
        assert metrics["num_wrong_output_len"] == 1
        assert metrics["num_wrong_input_len"] == 1
        assert metrics["max_gap_ms_max"] == pytest.approx(900)
        assert metrics["num_completed"] == 35
        assert "1 failed, 1 of a wrong length, 1 prompts counted otherwise" in window.summary(
            metrics
        )

    def test_a_ramp_does_not(self) -> None:
        metrics = window.measure(self.loop(users=6, answers=1), (-20.0, 6.0))
        assert metrics["active_decoders"] == pytest.approx(12 / 26)

    def test_chunks_of_several_tokens_count_by_tokens(self) -> None:
        span = window.Span(0.0, 1, 7, [(1.0, 3), (2.0, 4)], 2.0)
        assert window.latencies([span])["tpot_ms"] == pytest.approx(250)

    def test_nothing_finished(self) -> None:
        metrics = window.measure([window.Span(0.0, 1, 1)], (1.0, 2.0))
        assert metrics["num_completed"] == 0
        assert metrics["in_flight"] == pytest.approx(1.0)
        assert metrics["ttft_ms"] is None


class TestOffline:
    """A burst on the engine over the simulated model."""

    def test_every_answer_is_complete_and_counted(self) -> None:
        simulated = simulate(EngineConfig(max_num_seqs=4))
        prompts = [workload.Prompt("", tuple(range(1, 131 + i)), "a") for i in range(6)]
        seen: list[int] = []
        run = offline.run_burst(simulated.engine, prompts, 20, "run", seen.append)
        metrics = offline.metrics(run, prompts)
        assert [len(answer.token_ids) for answer in run.answers] == [20] * 6
        assert sum(seen) == 120
        assert all(run.start_time <= a.first_time < a.last_time for a in run.answers)
        total = sum(len(prompt.token_ids) for prompt in prompts)
        assert metrics["tokens_per_step"] == pytest.approx((total + 120 - 6) / run.num_steps)
        assert metrics["acceptance"] is None
        simulated.assert_nothing_held()

    def test_drafts_show_as_acceptance(self) -> None:
        from netra_backend.simulator import SimModel

        simulated = simulate(model=SimModel(num_drafts=2, acceptance=0.7))
        prompts = [workload.Prompt("", (1, 2, 3), "a")]
        metrics = offline.metrics(offline.run_burst(simulated.engine, prompts, 50, "run"), prompts)
        assert metrics["acceptance"] is not None
        assert 0.3 < metrics["acceptance"] < 0.9

    def test_a_refused_request_ends_the_run(self) -> None:
        simulated = simulate(max_model_len=64)
        prompts = [workload.Prompt("", tuple(range(100)), "a")]
        with pytest.raises(Exception, match="prompt_too_long"):
            offline.run_burst(simulated.engine, prompts, 20, "run")

    def test_an_answer_that_ends_early_is_an_error(self) -> None:
        simulated = simulate(max_model_len=64)
        prompts = [workload.Prompt("", tuple(range(60)), "a")]
        with pytest.raises(RuntimeError, match="4 tokens came back, expected 20"):
            offline.run_burst(simulated.engine, prompts, 20, "run")

    def test_an_engine_that_stalls_ends_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stalled:
            outputs = simulate().engine.outputs

            def add(self, request: Request) -> None:
                pass

            def step(self) -> bool:
                return False

        monkeypatch.setattr(offline, "_IDLE_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match="nothing to do"):
            offline.run_burst(Stalled(), [workload.Prompt("", (1,), "a")], 1, "run")

    @pytest.mark.slow
    def test_command_line_on_a_checkpoint(self, tmp_path: Path) -> None:
        from checkpoints import make_random_llama

        checkpoint = make_random_llama(tmp_path / "llama")
        command = [sys.executable, offline.__file__, "--checkpoint", str(checkpoint)]
        command += ["--users", "2", "--input-len", "70", "--output-len", "6", "--repeats", "2"]
        command += ["--json", str(tmp_path / "out" / "r.json"), "--num-threads", "1"]
        command += ["--set", "kv_cache_memory=64MiB"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "out tok/s" in done.stdout
        result = report.Result.load(tmp_path / "out" / "r.json")
        assert len(result.rows[0].repeats) == 2
        assert len(result.conditions["first_token_ids"]) == 6
        assert result.conditions["config"]["kv_cache_memory"] == "64MiB"
        assert str(tmp_path) not in (tmp_path / "out" / "r.json").read_text()


def cells(line: str) -> list[str]:
    """The cells of one line of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


class TestReport:
    """Tables, ratios and files."""

    ROWS = (
        report.Row("netra", "a", {"ttft_ms": 100.0, "tpot_ms": 20.0, "num_steps": 12}),
        report.Row("peer", "a", {"ttft_ms": 150.0, "tpot_ms": 10.0, "num_steps": None}),
        report.Row("peer", "z", {"ttft_ms": 150.0}),
    )

    def test_table_shows_what_is_there(self) -> None:
        lines = report.rows_table(self.ROWS).splitlines()
        assert len({len(line) for line in lines}) == 1
        assert cells(lines[0]) == ["engine", "workload", "TTFT ms", "ms/token", "steps"]
        assert cells(lines[3]) == ["peer", "a", "150", "10.0", "-"]

    def test_ratios_say_how_much_better(self) -> None:
        lines = report.ratios_table(self.ROWS, "netra").splitlines()
        assert len(lines) == 3
        assert cells(lines[2]) == ["peer", "a", "1.50", "0.50", "-", "-"]

    def test_numbers(self) -> None:
        values = [None, 0.0, 0.1234, 12.34, 1234.5, 3]
        assert [*map(report.format_value, values)] == ["-", "0", "0.12", "12.3", "1234", "3"]
        assert report.percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
        assert report.percentile([], 0.5) is None
        merged = report.medians([{"x": 1.0, "y": None}, {"x": 3.0, "y": None}, {"x": 9.0}])
        assert merged == {"x": 3.0, "y": None}

    def test_files_come_back_and_compare(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        paths = [tmp_path / "new" / "one.json", tmp_path / "two.json"]
        for path, row in zip(paths, self.ROWS, strict=False):
            result = report.Result("offline", [row], {"where": path})
            result.save(path)
            assert report.Result.load(path).rows == [row]
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, paths)])
        assert report.main() == 0
        shown = capsys.readouterr().out
        assert "netra (one) is better by this factor" in shown
        assert "peer (two)" in shown

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("[1]")
        with pytest.raises(ValueError, match="no result file"):
            report.Result.load(tmp_path / "x.json")

    def test_without_matplotlib_there_is_no_plot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert not report.plot(self.ROWS, tmp_path / "x.png")

"""Recorded steps: the tokens of steps without graphs, inert padding, and which steps are recorded at all.

A StrictRecorder takes the place of CUDA graphs: it repeats operations on the tensors of the recording.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from decoding import decoding, fill_with_noise, pools
from inline_engine import Run, greedy, make_runner, random_prompts, run
from recording import StrictRecorder

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_mtp
from netra_backend.batch import Batch, ScheduledSequence, StepOutput
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.gpu import graphs
from netra_backend.gpu.device_ops import REFERENCES
from netra_backend.gpu.graphs import Bucket, make_buckets, reserved_bytes, seq_counts
from netra_backend.gpu.runner import KernelRunner, recorder_of
from netra_backend.model_runner import ModelRunner
from netra_kernels.router import Routing

LENGTHS = (1, 40, 62, 64, 127)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mtp(tmp_path_factory.mktemp("graphs") / "mtp")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("graphs") / "llama")


def make_graphed(checkpoint: Path, **knobs: object) -> tuple[KernelRunner, StrictRecorder]:
    defaults: dict[str, object] = {
        "kv_cache_memory": "2GiB", "max_num_seqs": 7, "dtype": "float32", "kv_cache_dtype": "plain",
        "max_num_batched_tokens": 64, "max_model_len": 512,
    }  # fmt: skip
    config = EngineConfig(checkpoint=str(checkpoint), **(defaults | knobs))  # type: ignore[arg-type]
    recorder = StrictRecorder(REFERENCES)
    device = torch.device("cpu")
    runner = KernelRunner(config, checkpoint, frozenset(), device, recorder.ops, recorder=recorder)
    return runner, recorder


@pytest.fixture(scope="module")
def drafting(qwen: Path) -> tuple[KernelRunner, StrictRecorder]:
    return make_graphed(qwen, speculation="mtp", num_draft_tokens=3)


def test_a_replay_reads_tensors_and_no_python_value() -> None:
    """The recorder itself: what a graph would not see, it does not see."""
    recorder = StrictRecorder(REFERENCES)
    step = {"rows": 2, "factor": torch.ones(1)}
    x = torch.arange(4.0)
    replay = recorder.record(lambda: (x[: step["rows"]] * step["factor"]).cumsum(0) + step["rows"])
    step["rows"] = 4
    x += 1
    step["factor"].mul_(10)
    first = replay()
    assert first.tolist() == [12.0, 32.0]
    step["factor"] = torch.zeros(1)
    assert replay() is first
    assert first.tolist() == [12.0, 32.0]


@pytest.mark.parametrize("architecture", ["qwen", "llama"])
def test_tokens_are_those_of_torch(architecture: str, qwen: Path, llama: Path) -> None:
    checkpoint = {"qwen": qwen, "llama": llama}[architecture]
    prompts, params = random_prompts(LENGTHS, VOCAB_SIZE), greedy(40)
    expected = run(make_runner(checkpoint), prompts, params, budget=64)
    runner, recorder = make_graphed(checkpoint)
    before = recorder.num_replays
    result = run(runner, prompts, params, budget=64)
    assert result.token_ids == expected.token_ids
    assert recorder.num_replays - before > result.num_steps // 2
    tight = run(runner, prompts, params, budget=64, num_pages=4, overcommit=True)
    assert tight.num_preemptions > 0
    assert tight.token_ids == expected.token_ids


def drafted(runner: KernelRunner | ModelRunner, num_drafts: int) -> tuple[Run, list[object]]:
    """A run, and each step's drafts by sequence."""
    seen: list[object] = []

    def note(batch: Batch, output: StepOutput) -> None:
        pairs = zip(batch.scheduled, output.outputs, strict=True)
        seen.append([(item.seq.seq_id, tuple(out.draft_token_ids)) for item, out in pairs])

    prompts = [p * 3 for p in random_prompts([2, 20, 21, 33, 40], VOCAB_SIZE)]
    result = run(runner, prompts, greedy(40), budget=64, num_drafts=num_drafts, after=note)  # type: ignore[arg-type]
    return result, seen


@pytest.mark.parametrize("speculation", ["mtp", "ngram+mtp"])
def test_drafts_of_ragged_steps_are_those_of_torch(speculation: str, qwen: Path) -> None:
    knobs = {"speculation": speculation, "num_draft_tokens": 3}
    expected, drafts = drafted(make_runner(qwen, **knobs), 3)
    runner, recorder = make_graphed(qwen, **knobs)
    before = recorder.num_replays
    result, mine = drafted(runner, 3)
    assert (result.token_ids, mine) == (expected.token_ids, drafts)
    assert recorder.num_replays - before > 2 * result.num_steps  # the model, the layer, its chain
    assert len(result.draft_lens) > 2, "no step was ragged"


def test_a_step_beyond_every_bucket_is_launched_one_by_one(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = random_prompts(LENGTHS, VOCAB_SIZE), greedy(30)
    expected = run(make_runner(qwen), prompts, params, budget=64)
    monkeypatch.setattr(graphs, "_MAX_ROWS", 4)
    runner, _ = make_graphed(qwen)
    found: set[tuple[int, bool]] = set()
    find = runner._graphs.find

    def note(items: list[ScheduledSequence]) -> graphs.StepGraph | None:
        graph = find(items)
        if Bucket.of(items) is not None:
            found.add((len(items), graph is not None))
        return graph

    monkeypatch.setattr(runner._graphs, "find", note)
    assert run(runner, prompts, params, budget=64).token_ids == expected.token_ids
    assert (5, False) in found
    two = run(runner, prompts[:2], params)
    assert two.token_ids == expected.token_ids[:2]
    assert (2, True) in found


# ---- padding


def test_recordings_and_warm_up_leave_every_pool_as_it_was(qwen: Path) -> None:
    runner, recorder = make_graphed(qwen, speculation="mtp", num_draft_tokens=3, max_num_seqs=2)
    before = fill_with_noise(runner)
    runner._record(recorder, make_buckets(2, 3, 64), 2)
    runner._run_chunks(130)
    assert all(map(torch.equal, before, pools(runner)))


def test_padding_touches_nothing_of_others(drafting: tuple[KernelRunner, StrictRecorder]) -> None:
    """Slot 0 and page 0 belong to sequences that are not in the step; a page is sealed in it."""
    runner, _ = drafting
    before = fill_with_noise(runner)
    items = [
        decoding(900, 3, [4, 2], 30, 2),
        decoding(901, 5, [], 64, 0),
        decoding(902, 6, [3], 9, 0),
    ]
    items[1].seal_block_ids = [6]
    graph = runner._graphs.find(items)
    assert graph is not None
    assert graph.step.groups[0].shape.num_seqs == 4
    assert graph.step.groups[0].shape.num_rows == 8
    runner.launch(Batch(items, freed_seq_ids=[900, 901, 902])).wait()
    num_slots, num_pages = runner.plan.num_slots, runner.plan.num_pages
    changed: set[str] = set()
    for old, new in zip(before, pools(runner), strict=True):
        rows = [i for i in range(len(old)) if not torch.equal(old[i], new[i])]
        if len(old) == num_pages:
            assert rows == [6]
            changed.add("pages")
        elif len(old) == num_slots:
            assert set(rows) <= {3, 5, 6}
            changed |= {"slots"} if rows == [3, 5, 6] else set()
        else:
            assert rows == []
    assert changed == {"pages", "slots"}


def test_padding_asks_no_expert(qwen: Path) -> None:
    seen: list[Routing] = []

    def note(x: torch.Tensor, scales: None, routing: Routing, *rest: object) -> torch.Tensor:
        seen.append(routing)
        return REFERENCES.expert_outputs(x, scales, routing, *rest)  # type: ignore[arg-type]

    config = EngineConfig(
        checkpoint=str(qwen), dtype="float32", kv_cache_memory="64MiB", max_num_seqs=7,
        max_model_len=512, speculation="ngram", num_draft_tokens=3,
    )  # fmt: skip
    ops = dataclasses.replace(REFERENCES, expert_outputs=note)
    runner = KernelRunner(config, qwen, frozenset(), torch.device("cpu"), ops)
    fill_with_noise(runner)
    step = Bucket(4, 4, 8).step(runner.model_config.num_kv_heads, 7, torch.device("cpu"))
    step.groups[0].fill([decoding(900, 3, [4, 2], 30, 2)], runner.plan.kv.tail_rows, {})
    step.groups[0].upload()
    with torch.inference_mode():
        runner._model.forward(step, runner._caches, runner._states.layers)
    assert len(seen) == len(runner.model_config.layer_types)
    slots = runner.model_config.num_experts_per_tok + 1
    for routing in seen:
        assert routing.experts.shape == (8, slots)
        assert routing.counts.sum() == 3 * slots


def test_the_device_begins_at_launch_and_samples_at_wait(
    drafting: tuple[KernelRunner, StrictRecorder],
) -> None:
    runner, recorder = drafting
    fill_with_noise(runner)
    before = recorder.num_replays
    pending = runner.launch(Batch([decoding(903, 3, [4, 2], 30, 2)], freed_seq_ids=[903]))
    assert recorder.num_replays == before + 1
    assert 903 not in runner._sampler._states
    pending.wait()
    assert 903 in runner._sampler._states


# ---- start


def test_all_buckets_are_recorded_before_the_runner_is_there(
    qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner, recorder = make_graphed(qwen, max_num_seqs=3, speculation="mtp", num_draft_tokens=2)
    buckets = make_buckets(3, 2, 64)
    assert list(runner._graphs._graphs) == buckets
    expected = 2 * len(buckets) + len(seq_counts(3))
    assert recorder.num_recordings == expected
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("graph ")]
    first = f"graph 1 of {len(buckets)}: 3 sequences of up to 3 rows, 9 rows in all"
    assert lines[0].startswith(first), "not the largest first"
    assert len(lines) == len(buckets)
    assert any("prompt chunks of 64 rows of up to 64" in r.getMessage() for r in caplog.records)
    run(runner, random_prompts([5, 70, 9], VOCAB_SIZE), greedy(9), num_drafts=2, max_num_seqs=3)  # type: ignore[arg-type]
    assert recorder.num_recordings == expected


def test_memory_for_steps_is_in_the_plan(qwen: Path) -> None:
    runner, _ = make_graphed(qwen, max_num_seqs=2)
    plan, model = runner.plan, ModelConfig.from_file(qwen / "config.json")
    assert plan.reserved_bytes == reserved_bytes(model, make_buckets(2, 0, 64), 7, 4, 1) > 0
    assert plan.total_bytes == plan.reserved_bytes + sum(p.nbytes for p in pools(runner))
    assert f"steps and their graphs ({plan.reserved_bytes / 2**20:,.0f} MiB)" in plan.describe()


def test_the_knob_and_the_device_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netra_backend.gpu.runner.CudaRecorder", lambda device: f"on {device}")
    on, off = EngineConfig(), EngineConfig(enable_cuda_graphs=False)
    assert recorder_of(on, torch.device("cuda:0")) == "on cuda:0"
    assert recorder_of(off, torch.device("cuda:0")) is None
    assert recorder_of(on, torch.device("cpu")) is None


def test_without_a_device_nothing_is_recorded(qwen: Path) -> None:
    config = EngineConfig(
        checkpoint=str(qwen), dtype="float32", kv_cache_memory="64MiB", max_num_seqs=2
    )
    runner = KernelRunner(config, qwen, frozenset(), torch.device("cpu"), REFERENCES)
    assert runner._graphs.find(step_of([1])) is None
    assert runner.plan.reserved_bytes == 0


# ---- buckets


def step_of(counts: list[int]) -> list[ScheduledSequence]:
    return [decoding(i, i, [], 5, count - 1) for i, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("num_seqs", "num_drafts", "max_rows"),
    [(1, 0, 512), (3, 16, 512), (32, 4, 512), (100, 3, 150), (40, 1, 16)],
)
def test_every_step_within_the_limits_has_a_bucket_and_every_bucket_a_step(
    num_seqs: int, num_drafts: int, max_rows: int
) -> None:
    buckets = make_buckets(num_seqs, num_drafts, max_rows)
    assert buckets == sorted(set(buckets))
    assert max(b.num_rows for b in buckets) == min(max_rows, num_seqs * (1 + num_drafts))
    used = set()
    for count in range(1, num_seqs + 1):
        for most in range(1, num_drafts + 2):
            for total in range(count + most - 1, min(max_rows, count * most) + 1):
                sizes = Bucket(count, most, total)
                held = [b for b in buckets if b.holds(sizes)]
                assert held, sizes
                assert held[0].num_seqs == min(b.num_seqs for b in held)
                used.add(held[0])
    assert used == set(buckets), "some bucket is never used"


def test_the_largest_bucket_has_a_bound() -> None:
    assert max(b.num_rows for b in make_buckets(256, 8, 4096)) == 1024


def test_chunks_and_double_seals_fit_no_bucket() -> None:
    assert Bucket.of(step_of([1, 4, 2])) == Bucket(3, 4, 7)
    chunk = step_of([1, 8])
    chunk[1].is_chunk = True
    assert Bucket.of(chunk) is None
    double = step_of([1])
    double[0].seal_block_ids = [3, 4]
    assert Bucket.of(double) is None


def test_numbers_of_sequences() -> None:
    assert seq_counts(1) == [1]
    assert seq_counts(5) == [1, 2, 4, 5]
    assert seq_counts(100) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100]


# ---- what a device adds


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.record, self.synchronize = (
            lambda: log.append("recorded"), lambda: log.append("waited")
        )  # fmt: skip


def test_inputs_are_not_changed_before_they_are_copied() -> None:
    log: list[str] = []
    group = Bucket(2, 1, 2).step(1, 4, torch.device("cpu")).groups[0]
    group._copied = FakeEvent(log)  # type: ignore[assignment]
    host = group._host = GuardedHost(group._host, log)  # type: ignore[assignment]
    group.fill(step_of([1]), 64, {})
    assert log[:2] == ["waited", "changed"]
    log.clear()
    group._host = host.tensor  # type: ignore[attr-defined]
    group.upload()
    assert log == ["recorded"]


class GuardedHost:
    """Notes when the buffer behind it is cleared."""

    def __init__(self, tensor: torch.Tensor, log: list[str]) -> None:
        self.tensor, self._log = tensor, log

    def __getitem__(self, rows: slice) -> torch.Tensor:
        self._log.append("changed")
        return self.tensor[rows]


def test_cuda_graphs_are_recorded_after_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls to torch.cuda, and that torch would take their arguments."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = str(name)

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def named(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append(f"{name} ends")

    signature = inspect.signature(torch.cuda.graph.__init__)

    def capture(*args: object, **kwargs: object) -> AbstractContextManager[None]:
        bound = signature.bind(None, *args, **kwargs)
        assert bound.arguments["pool"] == "pool"
        assert bound.arguments["stream"].name == "cuda:0"
        return named("capture")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    fakes = {
        "graph": capture, "graph_pool_handle": lambda: "pool", "Stream": Stream, "CUDAGraph": Graph,
        "current_stream": lambda: Stream("main"), "stream": lambda s: named(f"on {s.name}"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    output = torch.zeros(1)

    def work() -> torch.Tensor:
        log.append("work")
        return output

    replay = graphs.CudaRecorder(torch.device("cuda:0")).record(work)
    assert log == [
        "cuda:0 waits for main", "on cuda:0", "work", "on cuda:0 ends", "main waits for cuda:0",
        "capture", "work", "capture ends",
    ]  # fmt: skip
    assert replay() is output
    assert log[-1] == "replay"

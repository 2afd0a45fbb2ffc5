"""KernelRunner over the kernels' torch references: rings, chunks, replay, checkpoints and drafts give torch's tokens.

The kernels themselves take the references' place in tests/kernels/test_execution.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from inline_engine import greedy, make_runner, random_prompts, run
from recording import StrictRecorder

from checkpoints import VOCAB_SIZE, make_fp8, make_random_llama, make_random_mtp
from netra_backend import runners
from netra_backend.batch import Batch, StepOutput
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import ConfigError
from netra_backend.gpu.device_ops import KERNELS, REFERENCES
from netra_backend.gpu.projection import quantize_blocks
from netra_backend.gpu.runner import KernelRunner
from netra_backend.model_runner import ModelRunner
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import PAGE_SIZE
from netra_kernels.fp8_gemm import dequantize_ref

LENGTHS = (1, 2, 3, 5, 40, 62, 63, 64, 65, 100, 127, 129, 200)
NUM_TOKENS = 12


def make_kernel_runner(checkpoint: Path, **knobs: object) -> KernelRunner:
    defaults: dict[str, object] = {
        "kv_cache_memory": "96MiB", "max_num_seqs": 16, "dtype": "float32", "kv_cache_dtype": "plain",
    }  # fmt: skip
    config = EngineConfig(checkpoint=str(checkpoint), **(defaults | knobs))  # type: ignore[arg-type]
    return KernelRunner(config, checkpoint, frozenset(), torch.device("cpu"), REFERENCES)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mtp(tmp_path_factory.mktemp("qwen") / "mtp")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("llama") / "plain")


def test_both_tables_have_the_same_signatures() -> None:
    for field in dataclasses.fields(KERNELS):
        kernel, reference = getattr(KERNELS, field.name), getattr(REFERENCES, field.name)
        assert kernel is not reference
        assert inspect.signature(kernel) == inspect.signature(reference), field.name


@pytest.mark.parametrize("budget", [64, 300])
@pytest.mark.parametrize("architecture", ["qwen", "llama"])
def test_prompts_of_many_lengths_give_the_tokens_of_torch(
    architecture: str, budget: int, qwen: Path, llama: Path
) -> None:
    checkpoint = {"qwen": qwen, "llama": llama}[architecture]
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    params = greedy(NUM_TOKENS)
    expected = run(make_runner(checkpoint), prompts, params, budget=budget)
    result = run(make_kernel_runner(checkpoint), prompts, params, budget=budget)
    assert result.token_ids == expected.token_ids
    assert max(result.batch_sizes) > 4, "the requests did not run together"


def test_an_answer_crosses_pages_and_survives_preemption(qwen: Path) -> None:
    prompts, params = random_prompts([60, 63, 120], VOCAB_SIZE, seed=3), greedy(80)
    expected = run(make_runner(qwen), prompts, params)
    runner = make_kernel_runner(qwen)
    assert run(runner, prompts, params).token_ids == expected.token_ids
    tight = run(runner, prompts, params, num_pages=4, overcommit=True)
    assert tight.num_preemptions > 0
    assert tight.token_ids == expected.token_ids


def _drafts(
    runner: ModelRunner | KernelRunner, num_drafts: int
) -> tuple[list[list[int]], list[object]]:
    """Tokens of a run, and each step's drafts by sequence."""
    seen: list[object] = []

    def note(batch: Batch, output: StepOutput) -> None:
        pairs = zip(batch.scheduled, output.outputs, strict=True)
        seen.append([(item.seq.seq_id, tuple(out.draft_token_ids)) for item, out in pairs])

    prompts = random_prompts([2, 61, 64, 100], VOCAB_SIZE)
    result = run(runner, prompts, greedy(20), budget=100, num_drafts=num_drafts, after=note)  # type: ignore[arg-type]
    assert result.num_draft_tokens > 50
    return result.token_ids, seen


def test_mtp_drafts_are_those_of_torch(qwen: Path) -> None:
    knobs = {"speculation": "mtp", "num_draft_tokens": 3}
    expected = _drafts(make_runner(qwen, **knobs), 3)
    assert _drafts(make_kernel_runner(qwen, **knobs), 3) == expected


def test_seeded_requests_draw_what_they_draw_on_a_cpu(qwen: Path) -> None:
    """Each filter, all at once, and a greedy one, verified with drafts."""
    filters: list[dict[str, float]] = [
        {}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0},
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=3 * index, **({"temperature": 0.9} | options))  # type: ignore[arg-type]
        for index, options in enumerate(filters)
    ]  # fmt: skip
    prompts = random_prompts([2, 61, 64, 100, 7, 30], VOCAB_SIZE)
    expected = run(make_runner(qwen), prompts, params).token_ids
    runner = make_kernel_runner(qwen, speculation="mtp", num_draft_tokens=2)
    assert run(runner, prompts, params, num_drafts=2).token_ids == expected
    assert len(set(map(tuple, expected))) == len(expected)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantised_pages_give_the_same_tokens_alone_and_in_company(codec: str, qwen: Path) -> None:
    runner = make_kernel_runner(qwen, kv_cache_dtype=codec)
    prompts = random_prompts([70, 129], VOCAB_SIZE)
    together = run(runner, prompts, greedy(70), budget=512).token_ids
    assert together == [run(runner, [p], greedy(70), budget=512).token_ids[0] for p in prompts]


def test_an_fp8_head_stays_near_the_exact_one(qwen: Path) -> None:
    """Logits of the same hidden states differ by the rounding of FP8, 2 to 3 % a side; the CPU's runner refuses it."""
    hidden = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    exact = make_kernel_runner(qwen)._model.logits(hidden)
    logits = make_kernel_runner(qwen, lm_head_dtype="fp8")._model.logits(hidden)
    assert logits.dtype == torch.float32
    error = (logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.01 < error < 0.05
    with pytest.raises(ConfigError, match="lm_head_dtype='fp8': a CPU"):
        runners.make_runner(
            EngineConfig(checkpoint=str(qwen), device="cpu", lm_head_dtype="fp8"), qwen, frozenset()
        )


def test_blocks_of_a_ragged_head_are_those_of_a_checkpoint() -> None:
    weight = torch.randn(300, 256)
    weight[128:256, :128] = 0
    codes, scales = quantize_blocks(weight)
    assert scales.shape == (3, 2)
    restored = dequantize_ref(codes, scales)
    assert (restored - weight).square().mean().sqrt() < 0.03
    assert not restored[128:256, :128].any()


def test_fp8_shapes_that_the_kernels_cannot_take_are_refused(qwen: Path, tmp_path: Path) -> None:
    checkpoint = make_fp8(qwen, tmp_path / "fp8")
    with pytest.raises(ConfigError, match="linear_value_head_dim 32"):
        make_kernel_runner(checkpoint)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"speculation": "dflash"}, "on a GPU use one of"),
        ({"host_cache_memory": "1GiB"}, "do not move to the host"),
        ({"host_cache_memory": "0.5"}, "do not move to the host"),
    ],
)
def test_what_only_a_cpu_does_is_refused(
    qwen: Path, knobs: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_kernel_runner(qwen, **knobs)


def _engine(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kernels: bool,
    recorder: StrictRecorder | None = None,
    **knobs: object,
) -> Engine:
    defaults: dict[str, object] = {
        "checkpoint": str(checkpoint), "device": "cpu", "num_threads": 1, "max_num_seqs": 4, "dtype": "float32",
        "kv_cache_memory": "64MiB", "max_num_batched_tokens": 192, "prefix_checkpoint_interval": 128,
    }  # fmt: skip
    config = EngineConfig(**(defaults | knobs))  # type: ignore[arg-type]
    ops = recorder.ops if recorder else REFERENCES
    with monkeypatch.context() as patch:
        if kernels:
            patch.setattr(
                runners,
                "make_runner",
                lambda c, path, eos: KernelRunner(
                    c, path, eos, torch.device("cpu"), ops, recorder=recorder
                ),
            )
        return Engine.build(config, Path("/"))


def _ask(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt came from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add(Request(name, tuple(prompt), params, 0.0))
    tokens: list[int] = []
    cached = 0
    while engine.step():
        engine._scheduler.check()
    while not engine.outputs.empty():
        output = engine.outputs.get()
        tokens += output.token_ids
        cached = max(cached, output.num_cached_tokens)
    return tokens, cached


@pytest.mark.parametrize("graphs", [False, True])
def test_prefix_hits_start_from_checkpoints_of_chunks_and_of_answers(
    graphs: bool, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = _engine(qwen, monkeypatch, kernels=False, enable_prefix_caching=False)
    recorder = StrictRecorder(REFERENCES) if graphs else None
    warm = _engine(qwen, monkeypatch, kernels=True, recorder=recorder, kv_cache_memory="1GiB")
    assert isinstance(warm._runner, KernelRunner)
    prompt = random_prompts([300], VOCAB_SIZE, seed=7)[0]
    answer, cached = _ask(warm, "a", prompt, 100)
    assert (answer, cached) == (_ask(cold, "a", prompt, 100)[0], 0)
    for name, length, hit in (("b", 300, 256), ("c", 200, 128), ("d", 257, 256), ("e", 129, 128)):
        tokens, cached = _ask(warm, name, prompt[:length], 8)
        assert (tokens, cached) == (_ask(cold, name, prompt[:length], 8)[0], hit), length
    longer = prompt + answer  # its last checkpoint was taken while decoding
    tokens, cached = _ask(warm, "f", longer, 8)
    assert (tokens, cached) == (_ask(cold, "f", longer, 8)[0], 384)
    assert cached % PAGE_SIZE == 0


def test_the_device_decides(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(checkpoint=str(qwen), kv_cache_memory="64MiB", num_threads=1)
    assert isinstance(runners.make_runner(config, qwen, frozenset()), ModelRunner)
    with pytest.raises(ConfigError, match="no CUDA device"):
        runners.make_runner(dataclasses.replace(config, device="cuda"), qwen, frozenset())
    built: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runners, "KernelRunner", lambda *args: built.append(args))
    runners.make_runner(config, qwen, frozenset())
    assert built[0][3] == torch.device("cuda")

"""EAGLE-3 and DFlash are lossless: greedy tokens are transformers', seeded ones those of plain decoding, for any number
of drafts, batch, chunking, preemption, prefix hits and aborts; and what does not fit is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inline_engine import Reference, greedy, make_runner, random_prompts, run
from random_drafters import Recorder, make_dflash, make_eagle3
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_qwen
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import ConfigError
from netra_backend.model_runner import ModelRunner
from netra_backend.request import Request, SamplingParams
from netra_backend.scheduler import Scheduler

NUM_TOKENS = 12
LENGTHS = (1, 3, 17, 40, 60, 62, 63, 64, 65, 70, 100, 121, 127, 128, 129, 130)
MOST = {"eagle3": 8, "dflash": 15}
LENGTHS_OF = [("eagle3", k) for k in range(9)] + [("dflash", k) for k in (*range(9), 15)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen(tmp_path_factory.mktemp("qwen") / "stacked")


@pytest.fixture(scope="module")
def drafters(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "eagle3": make_eagle3(folder / "eagle3", qwen),
        "dflash": make_dflash(folder / "dflash", qwen, 16),
    }


@pytest.fixture(scope="module")
def runners(qwen: Path, drafters: dict[str, Path]) -> dict[str, ModelRunner]:
    return {
        method: make_runner(
            qwen, speculation=method, drafter_checkpoint=str(path), num_draft_tokens=MOST[method]
        )
        for method, path in drafters.items()
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, VOCAB_SIZE, seed=1)


@pytest.fixture(scope="module")
def answers(qwen: Path, prompts: list[list[int]]) -> list[list[int]]:
    reference = Reference(qwen)
    return [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


def recorded(
    runner: ModelRunner, prompts: list[list[int]], answers: list[list[int]], most: int
) -> Recorder:
    """The runner's proposer, behind which drafts are right up to a changing position."""
    known = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
    assert runner.proposer is not None
    return Recorder(runner.proposer, known, most, VOCAB_SIZE)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("method", "num_drafts"), LENGTHS_OF)
def test_greedy_tokens_are_the_references_for_any_number_of_drafts(
    method: str,
    num_drafts: int,
    batch: int,
    runners: dict[str, ModelRunner],
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    """Random drafters are junk: this is the plain case of a bad drafter."""
    mine, right = prompts[-batch:], answers[-batch:]
    result = run(runners[method], mine, greedy(NUM_TOKENS), budget=100, num_drafts=num_drafts)
    assert result.token_ids == right
    assert (result.num_draft_tokens > 0) == (num_drafts > 0)
    assert max(result.draft_lens) == min(num_drafts, NUM_TOKENS - 2)


@pytest.mark.parametrize("method", MOST)
def test_accepted_drafts_preemption_and_aborts_change_nothing(
    method: str,
    runners: dict[str, ModelRunner],
    prompts: list[list[int]],
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, most = runners[method], MOST[method]
    monkeypatch.setattr(runner, "proposer", recorded(runner, prompts, answers, most))
    chosen = [5, 6, 12, 13]
    few = run(
        runner, [prompts[i] for i in chosen], greedy(NUM_TOKENS), num_pages=3, overcommit=True,
        num_drafts=most,
    )  # fmt: skip
    assert few.token_ids == [answers[i] for i in chosen]
    assert few.num_preemptions > 0
    assert few.num_accepted_tokens > 0

    def at_step(number: int, scheduler: Scheduler) -> None:
        if number in (2, 4):
            scheduler.abort(f"r{number}")

    many = run(
        runner, prompts, greedy(NUM_TOKENS), at_step=at_step, num_drafts=most, max_num_seqs=6
    )
    for index, (found, right) in enumerate(zip(many.token_ids, answers, strict=True)):
        assert found == (right[: len(found)] if index in (2, 4) else right)


SEEDED = [
    SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.6, logit_bias={7: 3.0, 9: -4.0}, seed=7, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.5, min_tokens=6, stop_token_ids=tuple(range(VOCAB_SIZE)), seed=8,
                   max_tokens=NUM_TOKENS),
]  # fmt: skip


@pytest.mark.parametrize("method", MOST)
def test_seeded_sampling_is_the_same_with_and_without_drafts(
    method: str,
    runners: dict[str, ModelRunner],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, most, mine = runners[method], MOST[method], prompts[4 : 4 + len(SEEDED)]
    plain = run(runner, mine, SEEDED)
    assert run(runner, mine, SEEDED, num_drafts=most).token_ids == plain.token_ids
    padded = [tokens + [5] * most for tokens in plain.token_ids]
    monkeypatch.setattr(runner, "proposer", recorded(runner, mine, padded, most))
    drafted = run(runner, mine, SEEDED, num_drafts=most)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted_tokens > 0


@pytest.mark.parametrize("method", MOST)
def test_a_llama_target_is_served_alike(method: str, tmp_path: Path) -> None:
    llama = make_random_llama(tmp_path / "llama")
    make = {"eagle3": make_eagle3, "dflash": make_dflash}[method]
    runner = make_runner(
        llama, speculation=method, drafter_checkpoint=str(make(tmp_path / "drafter", llama))
    )
    prompts = random_prompts((40, 63, 128), VOCAB_SIZE)
    plain = run(make_runner(llama), prompts, greedy(NUM_TOKENS)).token_ids
    drafted = run(runner, prompts, greedy(NUM_TOKENS), num_drafts=4, budget=64)
    assert drafted.token_ids == plain
    assert drafted.num_draft_tokens > 0


def engine_answers(
    qwen: Path, prompts: list[list[int]], **knobs: object
) -> tuple[list[list[int]], int, int]:
    """Answers of an engine that is asked one after the other; prompt tokens found in its cache; drafts."""
    config = EngineConfig(
        checkpoint=str(qwen), num_threads=1, kv_cache_memory="64MiB", max_num_seqs=4,
        max_num_batched_tokens=192, prefix_checkpoint_interval=64, **knobs,  # type: ignore[arg-type]
    )  # fmt: skip
    engine = Engine.build(config, qwen)
    answers: list[list[int]] = []
    cached = drafted = 0
    for index, prompt in enumerate(prompts):
        params = replace(greedy(30), temperature=0.5 * (index % 2), seed=index)
        engine.add(Request(str(index), tuple(prompt), params, arrival_time=0.0))
        while engine.step():
            pass
        answers.append([])
        while not engine.outputs.empty():
            output = engine.outputs.get()
            assert output.error is None
            answers[-1] += output.token_ids
            if output.finished:
                cached += output.num_cached_tokens
                drafted += output.num_draft_tokens
    engine.shutdown(0.0)
    return answers, cached, drafted


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("speculation", ["eagle3", "dflash", "ngram+eagle3", "ngram+dflash"])
def test_an_engine_with_prefix_hits_gives_the_tokens_of_one_without(
    speculation: str, adaptive: bool, qwen: Path, drafters: dict[str, Path]
) -> None:
    long = random_prompts([150, 64], VOCAB_SIZE, seed=8)
    prompts = [long[0], long[1], long[0], [*long[0][:130], 7, 8], [5, 6, 7] * 20, long[0]]
    plain, _, _ = engine_answers(qwen, prompts, enable_prefix_caching=False)
    found, cached, drafted = engine_answers(
        qwen, prompts, speculation=speculation, adaptive_drafts=adaptive,
        drafter_checkpoint=str(drafters[speculation.removeprefix("ngram+")]),
    )  # fmt: skip
    assert found == plain
    assert cached > 0
    assert adaptive or drafted > 0


def test_auto_takes_the_drafter_that_is_given(qwen: Path, drafters: dict[str, Path]) -> None:
    for method, path in drafters.items():
        runner = make_runner(qwen, speculation="auto", drafter_checkpoint=str(path))
        assert runner.max_draft_tokens == {"eagle3": 4, "dflash": 15}[method]
        assert runner.tap_places == {"eagle3": (1, 2, 4), "dflash": (1, 3, 4)}[method]


def test_memory_counts_the_drafters_layers(qwen: Path, drafters: dict[str, Path]) -> None:
    plain = make_runner(qwen).plan
    for method, num_layers in (("eagle3", 1), ("dflash", 2)):
        path = str(drafters[method])
        plan = make_runner(
            qwen, speculation=method, drafter_checkpoint=path, num_draft_tokens=4
        ).plan
        assert plan.page_bytes - plain.page_bytes == num_layers * 2 * 64 * 32 * 4
        assert plan.total_bytes <= plan.budget_bytes
        assert plan.tail_bytes > plain.tail_bytes


def refusal(qwen: Path, **knobs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make_runner(qwen, **knobs)
    return str(caught.value)


def test_a_drafter_that_is_missing_or_another_is_refused(
    qwen: Path, drafters: dict[str, Path], tmp_path: Path
) -> None:
    assert "it is not set" in refusal(qwen, speculation="ngram+dflash")
    assert "no config.json there" in refusal(
        qwen, speculation="eagle3", drafter_checkpoint=str(tmp_path)
    )
    eagle3 = str(drafters["eagle3"])
    assert "a drafter for eagle3" in refusal(qwen, speculation="dflash", drafter_checkpoint=eagle3)
    assert "is not used by" in refusal(qwen, speculation="ngram", drafter_checkpoint=eagle3)
    assert "name neither" in refusal(qwen, speculation="auto", drafter_checkpoint=str(qwen))
    dflash = make_dflash(tmp_path / "small", qwen, 4)
    assert "hold 3 drafts" in refusal(
        qwen, speculation="dflash", drafter_checkpoint=str(dflash), num_draft_tokens=4
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hidden_size": 64}, "hidden_size 64 is not the target's 128"),
        ({"vocab_size": 500}, "vocab_size 500 is not the target's 512"),
        ({"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": 3}}, "after layers [5]"),
        ({"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 512}}, "no token of"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "'mask_token_id' is missing"),
        ({"block_size": 32}, "supported are 2 to 16"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3'"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_a_drafter_of_other_shapes_is_refused_by_name(
    changed: dict[str, object], named: str, qwen: Path, drafters: dict[str, Path], tmp_path: Path
) -> None:
    source = drafters["dflash"]
    config = json.loads((source / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors"), tmp_path / "model.safetensors")
    assert named in refusal(qwen, speculation="dflash", drafter_checkpoint=str(tmp_path))


@pytest.mark.parametrize("method", MOST)
def test_missing_and_surplus_tensors_are_named(
    method: str, qwen: Path, drafters: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(drafters[method] / "model.safetensors")
    lost = {"eagle3": "midlayer.mlp.up_proj.weight", "dflash": "layers.1.self_attn.k_norm.weight"}
    del tensors[lost[method]]
    tensors["layers.7.extra"] = torch.ones(1)
    (tmp_path / "config.json").write_text((drafters[method] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(qwen, speculation=method, drafter_checkpoint=str(tmp_path))
    assert f"{lost[method]} is missing" in message
    assert "layers.7.extra is not part" in message


def test_a_vocabulary_table_that_contradicts_itself_is_refused(
    qwen: Path, drafters: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(drafters["eagle3"] / "model.safetensors")
    (tmp_path / "config.json").write_text((drafters["eagle3"] / "config.json").read_text())
    save_file(tensors | {"t2d": ~tensors["t2d"]}, tmp_path / "model.safetensors")
    assert "t2d and d2t" in refusal(qwen, speculation="eagle3", drafter_checkpoint=str(tmp_path))
    save_file(tensors | {"d2t": tensors["d2t"] + 400}, tmp_path / "model.safetensors")
    assert "outside" in refusal(qwen, speculation="eagle3", drafter_checkpoint=str(tmp_path))


def test_a_relative_drafter_starts_at_the_models_directory(tmp_path: Path) -> None:
    config = EngineConfig(drafter_checkpoint="../drafter").with_drafter_path(tmp_path / "netra")
    assert config.drafter_checkpoint == str(tmp_path / "drafter")
    assert EngineConfig().with_drafter_path(tmp_path) == EngineConfig()

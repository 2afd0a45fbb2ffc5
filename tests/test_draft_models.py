"""EAGLE-3 and DFlash drafts against references that recompute everything: a wrong drafter shows in no output, only
in speed. Both targets, whatever was accepted, over page edges, chunks, preemption and prefix hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drafter_references import DflashReference, EagleReference
from inline_engine import greedy, make_runner, random_prompts, run
from random_drafters import Recorder, TappedTarget, make_dflash, make_eagle3

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_qwen
from netra_backend.batch import Batch, ScheduledSequence, SequenceOutput, StepOutput
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.model_runner import ModelRunner
from netra_backend.request import Request
from netra_backend.spec.drafter_config import Rope
from netra_backend.spec.drafter_layers import DrafterRotary

LENGTHS = (2, 30, 61, 64, 100, 129)
DFLASH2 = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4,
    "input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 20.0,
}  # fmt: skip
CASES = {
    "eagle3 qwen": 4,
    "eagle3 llama": 4,
    "eagle3 norms": 4,
    "eagle3 tap norms": 4,
    "dflash qwen": 7,
    "dflash llama": 15,
    "dflash2 qwen": 7,
}
"""Name -> drafts a step."""

NORMS = {
    "eagle3 norms": ("norm_before_residual", "norm_before_fc"),
    "eagle3 tap norms": ("fc_norm", "norm_output"),
}


@dataclass
class Case:
    """A runner whose proposer drafts, and the reference of what it should draft."""

    runner: ModelRunner
    reference: EagleReference | DflashReference
    num_drafts: int


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {"qwen": make_random_qwen(folder / "qwen"), "llama": make_random_llama(folder / "llama")}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    targets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    name, num_drafts = request.param, CASES[request.param]
    target = targets["llama" if "llama" in name else "qwen"]
    folder = tmp_path_factory.mktemp("drafter")
    if name.startswith("eagle3"):
        make_eagle3(folder, target, **dict.fromkeys(NORMS.get(name, ()), True))
    else:
        options = DFLASH2 if name.startswith("dflash2") else {}
        make_dflash(folder, target, num_drafts + 1, **options)
    method = "eagle3" if name.startswith("eagle3") else "dflash"
    runner = make_runner(
        target, speculation=method, drafter_checkpoint=str(folder), num_draft_tokens=num_drafts
    )
    reference = EagleReference if method == "eagle3" else DflashReference
    return Case(runner, reference(folder, TappedTarget(target)), num_drafts)


@pytest.mark.parametrize(("budget", "batch"), [(64, 6), (512, 1), (512, 6)])
def test_drafts_equal_the_reference_whatever_was_accepted(
    budget: int, batch: int, case: Case
) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)[-batch:]
    plain = run(case.runner, prompts, greedy(20)).token_ids
    real = case.runner.proposer
    assert real is not None
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    recorder = Recorder(real, answers, case.num_drafts, VOCAB_SIZE)
    case.runner.proposer = recorder
    try:
        result = run(case.runner, prompts, greedy(20), budget=budget, num_drafts=case.num_drafts)
    finally:
        case.runner.proposer = real
    assert result.token_ids == plain
    assert result.num_accepted_tokens > 3 * batch
    assert len(recorder.seen) > 2 * batch
    for tokens, drafts in recorder.seen:
        assert drafts == case.reference.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


def test_drafts_cross_page_edges_and_say_different_things(case: Case) -> None:
    prompt = random_prompts([57], VOCAB_SIZE, seed=2)[0]
    seen: list[tuple[list[int], list[int]]] = []

    def after(batch: Batch, output: StepOutput) -> None:
        out = output.outputs[0]
        seen.append((batch.scheduled[0].seq.token_ids + out.token_ids, out.draft_token_ids))

    run(case.runner, [prompt], greedy(80), after=after, num_drafts=3)
    for tokens, drafts in seen[::5]:
        assert drafts == case.reference.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"
    assert len({tuple(drafts) for _, drafts in seen}) > len(seen) // 4, "a constant drafter"


def test_preempted_sequences_draft_as_before(case: Case) -> None:
    prompts = random_prompts([62, 63, 127, 128], VOCAB_SIZE)
    plain = run(case.runner, prompts, greedy(12)).token_ids
    seen: list[tuple[list[int], list[int]]] = []

    def after(batch: Batch, output: StepOutput) -> None:
        for item, out in zip(batch.scheduled, output.outputs, strict=True):
            if item.seq.num_preemptions and out.draft_token_ids:
                seen.append((item.seq.token_ids + out.token_ids, out.draft_token_ids))

    result = run(
        case.runner, prompts, greedy(12), num_pages=3, overcommit=True, after=after, num_drafts=2
    )
    assert result.token_ids == plain
    assert seen
    for tokens, drafts in seen[:8]:
        assert drafts == case.reference.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


def test_a_prefix_hit_brings_the_drafters_keys_along(
    targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets["qwen"]
    make_dflash(tmp_path, target)
    config = EngineConfig(
        checkpoint=str(target), num_threads=1, kv_cache_memory="64MiB", max_num_seqs=4,
        prefix_checkpoint_interval=64, speculation="dflash", drafter_checkpoint=str(tmp_path),
        adaptive_drafts=False,
    )  # fmt: skip
    engine = Engine.build(config, target)
    proposer = engine._runner.proposer  # type: ignore[attr-defined]
    propose = proposer.propose
    seen: list[tuple[list[int], list[int]]] = []

    def noted(
        items: list[ScheduledSequence], outputs: list[SequenceOutput], *rest: object
    ) -> list[list[int]]:
        found: list[list[int]] = propose(items, outputs, *rest)
        seen.append((items[0].seq.token_ids + outputs[0].token_ids, found[0]))
        return found

    monkeypatch.setattr(proposer, "propose", noted)
    prompt = random_prompts([150], VOCAB_SIZE, seed=6)[0]
    cached = []
    for name in ("cold", "warm"):
        seen.clear()
        engine.add(Request(name, tuple(prompt), greedy(12), arrival_time=0.0))
        while engine.step():
            pass
        while not engine.outputs.empty():
            output = engine.outputs.get()
        cached.append(output.num_cached_tokens)
    engine.shutdown(0.0)
    assert cached == [0, 128]
    reference = DflashReference(tmp_path, TappedTarget(target))
    drafted = [(tokens, drafts) for tokens, drafts in seen if drafts]
    assert len(drafted) > 3
    for tokens, drafts in drafted:
        assert drafts == reference.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
def test_a_quantised_draft_cache_drafts_nearly_the_same(
    codec: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    make_dflash(tmp_path, targets["qwen"])
    runner = make_runner(
        targets["qwen"],
        speculation="dflash",
        drafter_checkpoint=str(tmp_path),
        kv_cache_dtype=codec,
    )
    reference = DflashReference(tmp_path, TappedTarget(targets["qwen"]))
    right = count = 0

    def after(batch: Batch, output: StepOutput) -> None:
        nonlocal right, count
        tokens = batch.scheduled[0].seq.token_ids + output.outputs[0].token_ids
        drafts = output.outputs[0].draft_token_ids
        right += sum(
            a == b for a, b in zip(drafts, reference.drafts(tokens, len(drafts)), strict=True)
        )
        count += len(drafts)

    prompt = random_prompts([200], VOCAB_SIZE)[0]
    run(runner, [prompt], greedy(16), after=after, num_drafts=7)
    assert right > 0.8 * count > 0


def test_yarn_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn", "rope_theta": 1e7, "factor": 64.0,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = LlamaConfig(
        head_dim=128, max_position_embeddings=262144, rope_parameters=dict(parameters)
    )
    inverse, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = Rope(1e7, factor=64.0, original_len=4096, attention_factor=factor)
    table = DrafterRotary(rope, 128, 300, torch.device("cpu"))(torch.tensor([0, 1, 299]))[:, 0]
    angles = torch.outer(torch.tensor([0.0, 1.0, 299.0]), inverse)
    torch.testing.assert_close(table.real, angles.cos() * factor, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(table.imag, angles.sin() * factor, atol=1e-4, rtol=1e-4)

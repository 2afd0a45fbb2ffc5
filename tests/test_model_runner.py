"""ModelRunner through the real Scheduler: greedy tokens equal transformers' in float32, however the work is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inline_engine import Reference, greedy, make_runner, random_prompts, run
from safetensors.torch import load_file, save_file

from checkpoints import (
    VOCAB_SIZE,
    make_fp8,
    make_random_llama,
    make_random_qwen,
    quantize_fp8,
)
from netra_backend.errors import ConfigError
from netra_backend.model_runner import ModelRunner
from netra_backend.models.weights import dequantize_fp8

BLOCK = 128
LENGTHS = (1, 2, 3, 5, 17, 40, 62, 63, 64, 65, 66, 100, 127, 128, 129, 200)
NUM_TOKENS = 10
PARAMS = greedy(NUM_TOKENS)
TINY = Path(__file__).parents[1] / "checkpoints" / "netra-tiny"


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen(tmp_path_factory.mktemp("qwen") / "stacked")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("llama") / "plain")


@pytest.fixture(scope="module")
def runners(stacked: Path, llama: Path) -> dict[str, ModelRunner]:
    return {"qwen": make_runner(stacked), "llama": make_runner(llama)}


@pytest.fixture(scope="module")
def expected(stacked: Path, llama: Path) -> dict[str, list[list[int]]]:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    return {
        name: [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
        for name, reference in (("qwen", Reference(stacked)), ("llama", Reference(llama)))
    }


@pytest.mark.parametrize("architecture", ["qwen", "llama"])
@pytest.mark.parametrize("budget", [64, 100, 512])
def test_sixteen_requests_of_different_lengths_equal_transformers(
    architecture: str,
    budget: int,
    runners: dict[str, ModelRunner],
    expected: dict[str, list[list[int]]],
) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    result = run(runners[architecture], prompts, PARAMS, budget=budget)
    assert result.token_ids == expected[architecture]
    assert max(result.batch_sizes) > 4, "the requests did not run together"


@pytest.mark.parametrize("architecture", ["qwen", "llama"])
def test_one_request_at_a_time_equals_transformers(
    architecture: str, runners: dict[str, ModelRunner], expected: dict[str, list[list[int]]]
) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    for index in (0, 4, 8, 15):
        result = run(runners[architecture], [prompts[index]], PARAMS, budget=100)
        assert result.token_ids == [expected[architecture][index]], f"prompt {index}"


@pytest.mark.parametrize("architecture", ["qwen", "llama"])
def test_preemption_and_recomputation_change_no_token(
    architecture: str, runners: dict[str, ModelRunner], expected: dict[str, list[list[int]]]
) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    chosen = [6, 7, 12, 13]
    result = run(
        runners[architecture],
        [prompts[i] for i in chosen],
        PARAMS,
        budget=100,
        num_pages=3,
        overcommit=True,
    )
    assert result.num_preemptions > 0, "the pool was large enough for all"
    assert result.token_ids == [expected[architecture][i] for i in chosen]


def test_a_long_answer_crosses_pages_and_equals_transformers(
    stacked: Path, runners: dict[str, ModelRunner]
) -> None:
    prompt = random_prompts([60], VOCAB_SIZE, seed=5)[0]
    params = greedy(140)
    result = run(runners["qwen"], [prompt], params)
    assert result.token_ids == [Reference(stacked).generate(prompt, 140)]


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_fp8_checkpoints_equal_transformers_on_the_dequantised_weights(
    stacked: Path, tmp_path: Path, scale_dtype: torch.dtype, prefix: str
) -> None:
    make_fp8(stacked, tmp_path / "fp8", scale_dtype)
    _rename(tmp_path / "fp8", "model.language_model.", prefix)
    reference = Reference(_round_to_fp8(stacked, tmp_path / "rounded"))
    prompts = random_prompts([3, 64, 70], VOCAB_SIZE)
    result = run(make_runner(tmp_path / "fp8", max_num_seqs=4), prompts, PARAMS, max_num_seqs=4)
    assert result.token_ids == [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


def test_multimodal_names_and_vision_and_mtp_tensors_are_accepted(
    stacked: Path, tmp_path: Path, expected: dict[str, list[list[int]]]
) -> None:
    tensors = load_file(stacked / "model.safetensors")
    extra = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)}
    _copy(stacked, tmp_path, tensors | extra)
    _rename(tmp_path, "model.", "model.language_model.", but=("model.visual.",))
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)[:6]
    result = run(make_runner(tmp_path), prompts, PARAMS)
    assert result.token_ids == expected["qwen"][:6]


def test_the_shipped_checkpoint_answers_alike_alone_and_in_company() -> None:
    if not (TINY / "model.safetensors").is_file():
        pytest.skip("no shipped checkpoint")
    runner = make_runner(TINY)
    prompts = random_prompts([9, 70, 130], runner.model_config.vocab_size)
    result = run(runner, prompts, PARAMS, budget=100)
    one_by_one = [run(runner, [prompt], PARAMS, budget=512).token_ids[0] for prompt in prompts]
    assert result.token_ids == one_by_one


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.linear_attn.conv1d.weight", "model.layers.3.self_attn.k_norm.weight"],
)
def test_a_missing_tensor_is_named(stacked: Path, tmp_path: Path, name: str) -> None:
    tensors = load_file(stacked / "model.safetensors")
    del tensors[name]
    _copy(stacked, tmp_path, tensors)
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        make_runner(tmp_path)


def test_a_surplus_tensor_and_a_wrong_shape_are_named_together(
    stacked: Path, tmp_path: Path
) -> None:
    tensors = load_file(stacked / "model.safetensors")
    tensors["model.layers.0.linear_attn.extra.weight"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(7)
    _copy(stacked, tmp_path, tensors)
    with pytest.raises(ConfigError) as caught:
        make_runner(tmp_path)
    assert "model.layers.0.linear_attn.extra.weight is not part" in str(caught.value)
    assert "model.norm.weight has shape (7,)" in str(caught.value)


def _copy(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    for path in source.glob("*.json"):
        (target / path.name).write_text(path.read_text())
    save_file(tensors, target / "model.safetensors")


def _rename(directory: Path, old: str, new: str, but: tuple[str, ...] = ()) -> None:
    path = directory / "model.safetensors"
    tensors = {
        name if but and name.startswith(but) else name.replace(old, new, 1): tensor.clone()
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)


def _round_to_fp8(source: Path, target: Path) -> Path:
    """`source` with every weight that the FP8 layout quantises rounded as it would be."""
    target.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("experts.gate_up_proj"):
            parts = [torch.cat([_rounded(half) for half in expert.chunk(2)]) for expert in tensor]
            tensor = torch.stack(parts)
        elif name.endswith("experts.down_proj"):
            tensor = torch.stack([_rounded(expert) for expert in tensor])
        elif name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")):
            tensor = _rounded(tensor)
        tensors[name] = tensor.contiguous()
    _copy(source, target, tensors)
    return target


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return dequantize_fp8(*quantize_fp8(weight), BLOCK)

"""The two models that are served by name, on real text: greedy tokens equal transformers' in float32.

A token is compared until transformers' own choice is closer than rounding can tell (two best logits less than
`MARGIN` apart); from there on an answer may go its own way.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import pytest
import torch
from inline_engine import Reference, greedy, make_runner, run
from safetensors.torch import load_file, save_file

from netra_backend import serve
from netra_backend.tokenizer import Tokenizer

NUM_TOKENS = 16
LENGTHS = (1, 2, 3, 9, 17, 30, 47, 63, 64, 65, 80, 100, 127, 128, 129, 190)
MARGIN = 1e-3
TINY = Path(__file__).parents[1] / "checkpoints" / "netra-tiny"
BLOCK = 128

Expected = list[list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """The shipped FP8 checkpoint, and what transformers says on its weights in float32."""
    directory = tmp_path_factory.mktemp("tiny") / "float32"
    directory.mkdir()
    tensors = load_file(TINY / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    plain = {}
    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            continue
        weight = tensor.float()
        if f"{name}_scale_inv" in scales:
            scale = scales[f"{name}_scale_inv"].float()
            scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            weight = weight * scale[: weight.shape[0], : weight.shape[1]]
        plain[name.replace("model.language_model.", "model.")] = weight.contiguous()
    save_file(plain, directory / "model.safetensors")
    config = json.loads((TINY / "config.json").read_text())
    config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    return TINY, _expected(directory, _prompts(TINY))


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, Expected]:
    """SmolLM2-135M-Instruct as `make serve MODEL=smollm2` fetches it, once."""
    directory = serve._fetch_smollm2()
    return directory, _expected(directory, _prompts(directory))


def _prompts(checkpoint: Path) -> Expected:
    """Real code of as many lengths, cut in the middle of a line or not."""
    tokenizer = Tokenizer(checkpoint)
    token_ids = tokenizer.encode(inspect.getsource(textwrap))
    return [token_ids[40 * i :][:length] for i, length in enumerate(LENGTHS)]


def _expected(checkpoint: Path, prompts: Expected) -> Expected:
    """The greedy continuation of each prompt while it is certain."""
    reference = Reference(checkpoint)
    answers = []
    for prompt in prompts:
        answer = reference.generate(prompt, NUM_TOKENS)
        with torch.inference_mode():
            logits = reference.model(torch.tensor([prompt + answer])).logits[
                0, len(prompt) - 1 : -1
            ]
        best = logits.topk(2).values
        unsure = (best[:, 0] - best[:, 1] < MARGIN).nonzero()
        certain = int(unsure[0]) if len(unsure) else NUM_TOKENS
        answers.append(answer[:certain])
    assert sum(map(len, answers)) > 0.9 * NUM_TOKENS * len(prompts), "hardly anything to compare"
    return answers


def _check(token_ids: Expected, expected: Expected) -> None:
    for index, (ids, certain) in enumerate(zip(token_ids, expected, strict=True)):
        assert ids[: len(certain)] == certain, f"prompt {index}"


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["none", "mtp"])
def test_netra_tiny_equals_transformers(tiny: tuple[Path, Expected], speculation: str) -> None:
    checkpoint, expected = tiny
    runner = make_runner(checkpoint, speculation=speculation)
    prompts, params = _prompts(checkpoint), greedy(NUM_TOKENS)
    together = run(runner, prompts, params, budget=100, num_drafts=runner.max_draft_tokens)
    _check(together.token_ids, expected)
    assert max(together.batch_sizes) > 4, "the requests did not run together"
    assert (together.num_accepted_tokens > 0) == (speculation != "none")
    for index in (0, 8, 15):
        alone = run(runner, [prompts[index]], params, num_drafts=runner.max_draft_tokens)
        _check(alone.token_ids, [expected[index]])


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_smollm2_equals_transformers(smollm2: tuple[Path, Expected], speculation: str) -> None:
    checkpoint, expected = smollm2
    runner = make_runner(checkpoint, speculation=speculation, kv_cache_memory="1GiB")
    prompts, params = _prompts(checkpoint), greedy(NUM_TOKENS)
    together = run(runner, prompts, params, budget=200, num_drafts=runner.max_draft_tokens)
    _check(together.token_ids, expected)
    assert max(together.batch_sizes) > 4, "the requests did not run together"
    for index in (0, 8, 15):
        alone = run(runner, [prompts[index]], params, num_drafts=runner.max_draft_tokens)
        _check(alone.token_ids, [expected[index]])

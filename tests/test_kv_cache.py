"""The KV cache under the real Scheduler and models: exact when plain, close when coded, at every page edge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inline_engine import Reference, greedy, make_runner, random_prompts, run

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_qwen
from netra_backend.cache.codecs import Codec, QuantizedCodec
from netra_backend.errors import ConfigError

EDGES = [*range(1, 4), *range(60, 68), 100, *range(125, 131)]
ARCHITECTURES = ("qwen", "llama")
AGREEMENT = {"int8": 0.95, "k8v4": 0.75, "int4": 0.7, "fp8_e4m3": 0.7}
"""Least share of greedy tokens equal to the plain cache's; random weights amplify every difference."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kv")
    return {"qwen": make_random_qwen(root / "qwen"), "llama": make_random_llama(root / "llama")}


@pytest.fixture(scope="module")
def plain(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Six tokens after each prompt with the plain cache."""
    prompts = random_prompts(EDGES, VOCAB_SIZE)
    return {
        name: run(make_runner(path), prompts, greedy(6)).token_ids
        for name, path in checkpoints.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_every_length_to_130_equal_transformers(
    architecture: str, checkpoints: dict[str, Path]
) -> None:
    prompts = random_prompts(range(1, 131), VOCAB_SIZE, seed=2)
    reference = Reference(checkpoints[architecture])
    expected = [reference.generate(prompt, 2) for prompt in prompts]
    assert run(make_runner(checkpoints[architecture]), prompts, greedy(2)).token_ids == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("codec", list(AGREEMENT))
def test_coded_caches_answer_like_the_plain_one(
    architecture: str,
    codec: str,
    checkpoints: dict[str, Path],
    plain: dict[str, list[list[int]]],
) -> None:
    runner = make_runner(
        checkpoints[architecture], kv_cache_dtype=codec, allow_fp8_without_qk_norm=True
    )
    assert isinstance(runner._cache.layers[0].codec, QuantizedCodec)
    result = run(runner, random_prompts(EDGES, VOCAB_SIZE), greedy(6), budget=100)
    pairs = [
        (mine, theirs)
        for answer, other in zip(result.token_ids, plain[architecture], strict=True)
        for mine, theirs in zip(answer, other, strict=True)
    ]
    equal = sum(mine == theirs for mine, theirs in pairs) / len(pairs)
    assert equal >= AGREEMENT[codec]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_coded_caches_answer_alike_alone_and_in_company(
    codec: str, checkpoints: dict[str, Path]
) -> None:
    """Pages do not depend on the batch; a prompt that fits one chunk is cut alike in both."""
    runner = make_runner(checkpoints["llama"], kv_cache_dtype=codec, max_num_seqs=4)
    prompts = random_prompts([30, 64, 90, 129], VOCAB_SIZE, seed=4)
    together = run(runner, prompts, greedy(40), max_num_seqs=4)
    alone = [run(runner, [prompt], greedy(40), max_num_seqs=4).token_ids[0] for prompt in prompts]
    assert together.token_ids == alone


@pytest.mark.parametrize("codec", ["plain", "int8", "int4"])
def test_preempted_sequences_go_on_with_any_codec(codec: str, checkpoints: dict[str, Path]) -> None:
    runner = make_runner(checkpoints["qwen"], kv_cache_dtype=codec)
    prompts = random_prompts([100, 120, 127, 60, 126], VOCAB_SIZE)
    result = run(runner, prompts, greedy(40), budget=100, num_pages=3, overcommit=True)
    assert result.num_preemptions > 0, "the pool was large enough for all"
    assert [len(answer) for answer in result.token_ids] == [40] * 5


@pytest.mark.parametrize("budget", [64, 512])
def test_the_first_page_of_int4_is_coded_finer(budget: int, checkpoints: dict[str, Path]) -> None:
    """In the first layer, whose keys depend on the tokens alone: its bytes are those of the finer codec, whether a
    prompt or decoding filled the page."""
    for length, num_output in ((130, 3), (30, 60)):
        prompt = random_prompts([length], VOCAB_SIZE)[0]
        plain, coded = (
            make_runner(checkpoints["llama"], kv_cache_dtype=codec) for codec in ("plain", "int4")
        )
        answer = run(coded, [prompt], greedy(num_output), budget=budget).token_ids[0]
        run(plain, [prompt + answer], greedy(1), budget=512)
        opening, layer = coded._cache.layers[0].opening, plain._cache.layers[0]
        assert opening is not None
        expected = opening.codec.seal(layer.pages[0, 0], layer.pages[0, 1])
        rows, stored = (_rows(opening.codec, page) for page in (expected, opening.pages[0]))
        assert (rows - stored).abs().max() < 0.02 * rows.abs().max()


def _rows(codec: Codec, page: torch.Tensor) -> torch.Tensor:
    assert isinstance(codec, QuantizedCodec)
    return torch.cat(codec.expand(page[None, None]), -1)


def test_a_smaller_codec_gives_more_pages_from_the_same_memory(
    checkpoints: dict[str, Path],
) -> None:
    pages = {
        codec: make_runner(
            checkpoints["llama"], kv_cache_dtype=codec, kv_cache_memory="1MiB", max_num_seqs=2
        ).plan.num_pages
        for codec in ("plain", "int8", "int4")
    }
    assert pages["int8"] > 3 * pages["plain"]
    assert pages["int4"] > 5 * pages["plain"]


def test_fp8_on_a_model_without_normalised_keys_fails_at_load(
    checkpoints: dict[str, Path],
) -> None:
    make_runner(checkpoints["qwen"], kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="allow_fp8_without_qk_norm"):
        make_runner(checkpoints["llama"], kv_cache_dtype="fp8_e4m3")

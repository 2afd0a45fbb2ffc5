"""Prefix reuse through the whole engine: a hit gives the tokens of a cold run, and nothing is leaked.

The engine is stepped inline on small random checkpoints, hybrid and dense; the cold reference is the same
engine with reuse turned off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_qwen
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import RequestError
from netra_backend.request import Request, RequestOutput, SamplingParams
from netra_backend.sequence import PAGE_SIZE

NUM_OUTPUT = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    make = make_random_qwen if request.param == "hybrid" else make_random_llama
    return make(directory)


def build(checkpoint: Path, **knobs: object) -> Engine:
    defaults: dict[str, object] = {
        "checkpoint": str(checkpoint), "device": "cpu", "num_threads": 1, "max_num_seqs": 4,
        "kv_cache_memory": "64MiB", "max_num_batched_tokens": 192, "prefix_checkpoint_interval": 128,
    }  # fmt: skip
    config = EngineConfig(**(defaults | knobs))  # type: ignore[arg-type]
    return Engine.build(config, Path("/"))


class Client:
    """Runs prompts on an engine, one after the other or together."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def run(
        self, *prompts: list[int], params: SamplingParams = PARAMS, salt: str = ""
    ) -> list[RequestOutput]:
        names = [self.submit(prompt, params, salt) for prompt in prompts]
        totals: dict[str, RequestOutput] = {}
        for output in self.drain():
            before = totals.get(output.request_id)
            tokens = (before.token_ids if before else ()) + output.token_ids
            totals[output.request_id] = replace(output, token_ids=tokens)
        assert all(totals[name].finished for name in names)
        return [totals[name] for name in names]

    def submit(self, prompt: list[int], params: SamplingParams = PARAMS, salt: str = "") -> str:
        self._count += 1
        name = str(self._count)
        self.engine.add(Request(name, tuple(prompt), params, float(self._count), cache_salt=salt))
        return name

    def drain(self) -> Iterator[RequestOutput]:
        while self.engine.step():
            self.engine._scheduler.check()
        while not self.engine.outputs.empty():
            yield self.engine.outputs.get()


@pytest.fixture(scope="module")
def cold(checkpoint: Path) -> Client:
    return Client(build(checkpoint, enable_prefix_caching=False))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 100, 127, 128, 129, 130, 191, 192, 193, 260])
def test_the_second_run_of_a_prompt_equals_a_cold_one(
    checkpoint: Path, cold: Client, length: int
) -> None:
    client, prompt = Client(build(checkpoint)), prompt_of(length)
    expected = tokens(cold.run(prompt))
    first, second = client.run(prompt)[0], client.run(prompt)[0]
    assert [first.token_ids, second.token_ids] == [expected[0], expected[0]]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize("shared", [64, 100, 128, 130, 200])
@pytest.mark.parametrize("more", [1, 30, 64, 90])
def test_prompts_that_share_a_beginning(
    checkpoint: Path, cold: Client, shared: int, more: int
) -> None:
    client = Client(build(checkpoint))
    beginning = prompt_of(shared)
    prompts = [beginning + prompt_of(more, seed) for seed in (1, 2, 1)]
    assert [tokens(client.run(prompt)) for prompt in prompts] == [
        tokens(cold.run(prompt)) for prompt in prompts
    ]


@pytest.mark.parametrize("num_output", [1, 40, 70, 140])
def test_a_second_turn_reuses_the_first_answer(
    checkpoint: Path, cold: Client, num_output: int
) -> None:
    client = Client(build(checkpoint))
    params = replace(PARAMS, max_tokens=num_output)
    prompt = prompt_of(90)
    answer = client.run(prompt, params=params)[0]
    turn = prompt + list(answer.token_ids) + prompt_of(20, seed=5)
    second = client.run(turn)[0]
    assert second.token_ids == cold.run(turn)[0].token_ids
    # The last token of the answer is never computed, so its page may lack one token.
    sealed = (len(prompt) + num_output - 2) // PAGE_SIZE * PAGE_SIZE
    assert second.num_cached_tokens == max(sealed, PAGE_SIZE)


def test_a_prompt_reuses_one_that_is_still_running(checkpoint: Path, cold: Client) -> None:
    client, prompt = Client(build(checkpoint)), prompt_of(300)
    first = client.submit(prompt, replace(PARAMS, max_tokens=30))
    for _ in range(5):
        client.engine.step()
    second = client.submit([*prompt, 7, 8])
    outputs = list(client.drain())
    cached = [output.num_cached_tokens for output in outputs if output.request_id == second]
    assert set(cached) == {256}
    got = [t for output in outputs if output.request_id == second for t in output.token_ids]
    assert tuple(got) == cold.run([*prompt, 7, 8])[0].token_ids
    assert any(output.request_id == first and output.finished for output in outputs)


def test_a_first_page_with_a_codec_of_its_own_is_shared(checkpoint: Path) -> None:
    client, prompt = Client(build(checkpoint, kv_cache_dtype="int4")), prompt_of(200)
    client.run(prompt)
    names = [client.submit(prompt, replace(PARAMS, max_tokens=30)) for _ in range(2)]
    for _ in range(3):
        client.engine.step()
    first, second = (seq.block_table for seq in client.engine._scheduler._running)
    assert first[0] == second[0] < 0
    assert first[:3] == second[:3]
    outputs = list(client.drain())
    answers = [[t for o in outputs if o.request_id == name for t in o.token_ids] for name in names]
    assert answers[0] == answers[1]
    assert {output.num_cached_tokens for output in outputs} == {192}


def test_other_tenants_share_nothing(checkpoint: Path) -> None:
    client, prompt = Client(build(checkpoint)), prompt_of(200)
    client.run(prompt, salt="a")
    assert client.run(prompt, salt="b")[0].num_cached_tokens == 0
    assert client.run(prompt, salt="a")[0].num_cached_tokens > 0


def test_turned_off_nothing_is_reused(cold: Client) -> None:
    prompt = prompt_of(200)
    cold.run(prompt)
    assert cold.run(prompt)[0].num_cached_tokens == 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_evictions_preemptions_and_aborts_change_no_token(
    checkpoint: Path, cold: Client, drafts: int
) -> None:
    """A cache of a few pages, conversations that overlap, requests that come and go in random order."""
    speculation = {"speculation": "ngram", "num_draft_tokens": drafts} if drafts else {}
    engine = build(
        checkpoint, kv_cache_memory="3MiB", max_num_seqs=3, num_prefix_checkpoints=4, **speculation
    )
    client, rng = Client(engine), random.Random(drafts)
    bases = [prompt_of(rng.randrange(40, 200), seed) for seed in range(3)]
    prompts = [
        rng.choice(bases)[: rng.randrange(30, 200)] + prompt_of(rng.randrange(1, 50), 100 + i)
        for i in range(24)
    ]
    expected = [cold.run(prompt)[0].token_ids for prompt in prompts]
    got: dict[str, tuple[int, ...]] = {}
    names = {}
    for index, prompt in enumerate(prompts):
        names[client.submit(prompt)] = index
        if index % 6 == 5:
            client.engine.abort(client.submit(prompt), _cancelled())
        for _ in range(rng.randrange(4)):
            client.engine.step()
            client.engine._scheduler.check()
    for output in client.drain():
        got[output.request_id] = got.get(output.request_id, ()) + output.token_ids
    assert [got[name] for name in names] == [expected[index] for index in names.values()]
    assert engine._scheduler.num_running == 0
    assert engine._scheduler._blocks.num_used_pages == 0


def _cancelled() -> RequestError:
    return RequestError("cancelled", "by the test")

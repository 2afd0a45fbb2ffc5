"""The host tier through the whole engine: preempted sequences come back and go on as if nothing had happened.

A pool of a few pages and admission that is always wrong force preemptions; the cold reference is the same engine
with enough memory, one request at a time. Prompts fit a page, so that a coded cache is read alike in both.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_prefix_reuse import Client, build, prompt_of

from checkpoints import make_random_llama, make_random_mtp
from netra_backend.engine import Engine
from netra_backend.errors import RequestError
from netra_backend.request import SamplingParams

NUM_REQUESTS = 9
NUM_PAGES = 5
NUM_SEQS = 4
CASES = [
    ("hybrid", "plain", "none"), ("hybrid", "int8", "ngram"), ("hybrid", "int8", "mtp"),
    ("dense", "plain", "ngram"), ("dense", "int8", "none"), ("dense", "int4", "ngram"),
    pytest.param("hybrid", "int4", "mtp", marks=pytest.mark.slow),
    pytest.param("hybrid", "plain", "mtp", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("host")
    return {
        "hybrid": make_random_mtp(root / "hybrid"),
        "dense": make_random_llama(root / "dense"),
    }


def small_engine(checkpoint: Path, host: str, **knobs: object) -> Engine:
    """An engine of NUM_PAGES pages, first ones of int4 besides, that admits anything. host: how many sequences its host tier takes."""
    checkpoints = {"num_prefix_checkpoints": 2, "max_num_seqs": NUM_SEQS, "max_model_len": 300}
    plan = build(checkpoint, **checkpoints, **knobs)._runner.plan  # type: ignore[attr-defined]
    slots = NUM_SEQS * plan.slot_bytes + plan.num_checkpoints * plan.checkpoint_bytes
    slots += plan.num_opening_pages * plan.opening_bytes
    sizes = {"none": 0, "one": 1, "all": 2 * NUM_REQUESTS}
    num_pages = NUM_PAGES - 2 * (plan.num_opening_pages > 0)
    each = plan.slot_bytes + num_pages * plan.page_bytes + plan.opening_bytes
    engine = build(
        checkpoint,
        kv_cache_memory=str(slots + num_pages * plan.page_bytes),
        host_cache_memory=str(sizes[host] * each),
        **checkpoints,
        **knobs,
    )
    engine._scheduler._forecast.fits = lambda *_: True  # type: ignore[method-assign]
    return engine


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Half greedy, half sampled with a seed; answers of up to four pages, some prompts equal."""
    rng = random.Random(3)
    made = []
    for number in range(NUM_REQUESTS):
        length = rng.choice((1, 30, 62, 63))
        num_output = rng.randrange(60, 236 - length)
        temperature = 0.0 if number % 2 else 1.0
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=num_output, ignore_eos=True
        )
        made.append((prompt_of(length, seed=number % 5), params))
    return made


def assert_nothing_held(engine: Engine) -> None:
    residence = engine._scheduler._residence
    for blocks in filter(None, (residence._device, residence._host)):
        assert blocks.num_used_pages == blocks.num_used_slots == 0
    residence.check([], [], [])


def run_all(engine: Engine, aborts: random.Random | None = None) -> dict[int, tuple[int, ...]]:
    """Answers by request, those that were aborted left out."""
    client, names = Client(engine), {}
    aborted: set[str] = set()
    got: dict[str, tuple[int, ...]] = {}
    for index, (prompt, params) in enumerate(requests()):
        names[client.submit(prompt, params)] = index
        for _ in range(3):  # each prompt is computed alone and whole
            engine.step()
    while engine.step():
        engine._scheduler.check()
        if aborts is not None and aborts.random() < 0.02:
            victim = aborts.choice(list(names))
            aborted.add(victim)
            engine.abort(victim, RequestError("cancelled", "by the test"))
    while not engine.outputs.empty():
        output = engine.outputs.get()
        got[output.request_id] = got.get(output.request_id, ()) + output.token_ids
    assert_nothing_held(engine)
    return {index: got[name] for name, index in names.items() if name not in aborted}


@pytest.mark.parametrize(("architecture", "codec", "speculation"), CASES)
def test_moved_sequences_answer_like_undisturbed_ones(
    checkpoints: dict[str, Path], architecture: str, codec: str, speculation: str
) -> None:
    checkpoint = checkpoints[architecture]
    cold = Client(build(checkpoint, kv_cache_dtype=codec, enable_prefix_caching=False))
    expected = [cold.run(prompt, params=params)[0].token_ids for prompt, params in requests()]
    knobs = {"speculation": speculation, "num_draft_tokens": 3, "adaptive_drafts": False}
    engine = small_engine(checkpoint, "all", kv_cache_dtype=codec, **knobs)
    for number in range(2):  # the second time with the leftovers of the first on device and host
        answers = run_all(engine)
        assert [answers[index] for index in range(NUM_REQUESTS)] == expected, f"run {number}"
    assert engine.metrics.moved_out.value > (1 if codec == "int4" else NUM_REQUESTS)
    assert engine.metrics.recomputed.value == 0
    assert engine.metrics.host_pages_in.value > 0


@pytest.mark.parametrize("architecture", ["hybrid", "dense"])
@pytest.mark.parametrize("host", ["none", "one", "all"])
@pytest.mark.parametrize("is_reusing", [True, False])
def test_aborts_and_a_small_host_leave_the_others_right(
    checkpoints: dict[str, Path], architecture: str, host: str, is_reusing: bool
) -> None:
    checkpoint = checkpoints[architecture]
    cold = Client(build(checkpoint, enable_prefix_caching=False))
    knobs = {"speculation": "ngram", "num_draft_tokens": 3, "enable_prefix_caching": is_reusing}
    engine = small_engine(checkpoint, host, **knobs)
    answers = run_all(engine, aborts=random.Random(11))
    assert 0 < len(answers) < NUM_REQUESTS
    for index, answer in answers.items():
        prompt, params = requests()[index]
        assert answer == cold.run(prompt, params=params)[0].token_ids
    metrics = engine.metrics
    assert metrics.preemptions.value == metrics.moved_out.value + metrics.recomputed.value > 0
    assert (metrics.moved_out.value > 0) == (host != "none")
    if host == "one":
        assert metrics.recomputed.value > 0

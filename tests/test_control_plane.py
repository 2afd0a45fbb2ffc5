"""The whole control plane without torch: seeded fuzz, and the failures that other engines are known
for."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from simulated import COST, Simulated, simulate

from netra_backend.config import EngineConfig
from netra_backend.errors import RequestError
from netra_backend.request import FinishReason
from netra_backend.simulator import SimModel

_CONTROL_PLANE = (
    "admission", "batch", "block_manager", "chunking", "config", "cost_model", "engine", "errors", "limits",
    "metrics", "prefix_reuse", "request", "residence", "scheduler", "sequence", "simulator", "tokenizer", "tracing",
)  # fmt: skip


def test_imports_no_torch() -> None:
    imports = ";".join(f"import netra_backend.{name}" for name in _CONTROL_PLANE)
    check = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def random_engine(rng: random.Random) -> Simulated:
    config = EngineConfig(
        max_num_seqs=rng.choice((1, 2, 5, 12)),
        max_num_batched_tokens=rng.choice((64, 65, 100, 256, 700)),
        max_partial_prompts=rng.choice((1, 2, 3)),
        target_tpot_ms=rng.choice((0.0, 0.0, 20.0)),
    )
    model = SimModel(
        vocab_size=1000,
        eos_token_ids=frozenset(rng.sample(range(1000), rng.choice((0, 1, 10)))),
        num_drafts=rng.choice((0, 0, 1, 3, 9, 80)),
        acceptance=rng.choice((0.0, 0.5, 0.9, 1.0)),
    )
    return simulate(
        config,
        num_pages=rng.randint(11, 40),
        max_model_len=11 * 64,
        model=model,
        host=rng.choice((None, (rng.randint(1, 12), rng.randint(1, 3)), (200, 12))),
        num_checkpoints=rng.choice((None, 3, 20)),
        has_openings=rng.random() < 0.5,
    )


def admit_anything(simulated: Simulated) -> None:
    """Admission that is always wrong, so that pages run out all the time."""
    simulated.scheduler._forecast.fits = lambda seq, running: True  # type: ignore[method-assign]


def random_request(rng: random.Random, simulated: Simulated, request_id: str) -> None:
    num_prompt = rng.choice((1, 2, rng.randint(1, 130), rng.randint(1, 600), 64, 128, 129, 703))
    max_tokens = rng.choice((1, 2, rng.randint(1, 90), rng.randint(1, 400), 64))
    simulated.add(
        request_id,
        num_prompt,
        deadline=simulated.clock() + rng.random() * 20 if rng.random() < 0.1 else None,
        priority=rng.choice((0, 0, 0, 1, 5)),
        num_shared=rng.choice((0, 0, 64, 200, 300)),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(1000), 5)) if rng.random() < 0.2 else (),
        seed=int(request_id[1:]),
    )


def seeds(count: int, fast: int) -> list[object]:
    """The first `fast` always, the others only in the full run."""
    return [*range(fast), *(pytest.param(s, marks=pytest.mark.slow) for s in range(fast, count))]


@pytest.mark.parametrize("seed", seeds(60, fast=16))
def test_fuzz(seed: int) -> None:
    """Add, abort, expire, preempt, draft, finish: one final each, the scripted tokens, nothing
    leaked."""
    rng = random.Random(seed)
    simulated = random_engine(rng)
    if seed % 2:
        admit_anything(simulated)
    num_requests = 25
    added: list[str] = []
    aborted: set[str] = set()
    while len(added) < num_requests or simulated.step():
        for _ in range(rng.choice((0, 0, 1, 1, 4))):
            if len(added) < num_requests:
                added.append(f"r{len(added)}")
                random_request(rng, simulated, added[-1])
        if added and rng.random() < 0.05:
            victim = rng.choice(added)
            aborted.add(victim)
            simulated.engine.abort(victim, RequestError("cancelled", "by the test"))
        if len(added) < num_requests:
            simulated.step()
    for request_id in added:
        check_answer(simulated, request_id, aborted)
    simulated.assert_nothing_held()
    assert simulated.scheduler.num_running == simulated.scheduler.num_waiting == 0
    metrics = simulated.engine.metrics
    assert metrics.preemptions.value == metrics.moved_out.value + metrics.recomputed.value
    assert metrics.generation_tokens.value >= sum(len(simulated.tokens(r)) for r in added)


def check_answer(simulated: Simulated, request_id: str, aborted: set[str]) -> None:
    final, tokens = simulated.final(request_id), simulated.tokens(request_id)
    script = simulated.script(request_id, seed=int(request_id[1:]))
    assert final.num_output_tokens == len(tokens)
    assert simulated.text(request_id).startswith("".join(f"<{t}>" for t in tokens[:-1]))
    if final.finish_reason is FinishReason.ABORT:
        assert isinstance(final.error, RequestError)
        expected = "cancelled" if request_id in aborted else "timeout"
        assert final.error.code == expected or final.error.code == "timeout"
        assert tokens == script[: len(tokens)]
        return
    assert final.error is None
    assert tokens == script
    num_allowed = simulated.scheduler.limits.max_output(simulated.requests[request_id])
    ended_by_token = final.finish_reason is FinishReason.STOP
    assert ended_by_token or len(tokens) == num_allowed


HOSTS = (None, (6, 2), (400, 30))
"""Pages and slots of the host tier: none, less than is wanted, enough for all."""


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("seed", seeds(4, fast=1))
def test_preempted_again_and_again(
    seed: int, num_drafts: int, host: tuple[int, int] | None
) -> None:
    """Twelve users in a pool that holds two: everyone is preempted often, and everyone
    completes."""
    rng = random.Random(seed)
    config = EngineConfig(max_num_seqs=12, max_num_batched_tokens=256)
    model = SimModel(num_drafts=num_drafts, acceptance=0.6)
    simulated = simulate(config, num_pages=14, max_model_len=11 * 64, model=model, host=host)
    admit_anything(simulated)
    for number in range(30):
        simulated.add(f"r{number}", rng.randint(1, 300), max_tokens=400, seed=number)
    simulated.run()
    for number in range(30):
        check_answer(simulated, f"r{number}", set())
    simulated.assert_nothing_held()
    metrics = simulated.engine.metrics
    assert metrics.preemptions.value > 30
    assert (metrics.moved_out.value > 0) == (metrics.host_pages_in.value > 0) == bool(host)
    if host == HOSTS[-1]:
        computed = sum(rows for batch in simulated.runner.batches for _, _, rows in batch)
        assert num_drafts or computed == sum(map(len, answers_and_prompts(simulated)))


def answers_and_prompts(simulated: Simulated) -> list[list[int]]:
    """The tokens of each request that had to be computed, if none was computed twice."""
    requests = simulated.requests.items()
    return [
        [*request.prompt_token_ids, *simulated.tokens(request_id)][:-1]
        for request_id, request in requests
    ]


@pytest.mark.parametrize(
    ("num_checkpoints", "has_openings"), [(None, False), (12, False), (12, True)]
)
@pytest.mark.parametrize("host", HOSTS)
def test_hundreds_of_requests_in_a_full_pool(
    host: tuple[int, int] | None, num_checkpoints: int | None, has_openings: bool
) -> None:
    """Admission that is always wrong keeps every page in use; some share prefixes, some are aborted: each step
    advances, each answer is right, and nothing is leaked."""
    rng = random.Random(7)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=128)
    model = SimModel(num_drafts=3, acceptance=0.6)
    simulated = simulate(
        config, num_pages=12 - 2 * has_openings, max_model_len=11 * 64, model=model, host=host,
        num_checkpoints=num_checkpoints, has_openings=has_openings,
    )  # fmt: skip
    admit_anything(simulated)
    requests, aborted = [f"r{number}" for number in range(250)], set()
    waiting = list(requests)
    num_steps = num_full = 0
    while waiting or simulated.engine._live:
        while waiting and simulated.scheduler.num_waiting < 12:
            random_request(rng, simulated, waiting.pop())
            simulated.engine._take_inbox()
        if rng.random() < 0.02:
            victim = rng.choice(requests)
            aborted.add(victim)
            simulated.engine.abort(victim, RequestError("cancelled", "by the test"))
        assert simulated.step() or not simulated.engine._live
        num_steps += 1
        num_full += simulated.blocks.num_free_pages <= 1
    for request_id in requests:
        check_answer(simulated, request_id, aborted)
    simulated.assert_nothing_held()
    assert num_full > num_steps // 2
    metrics = simulated.engine.metrics
    assert metrics.preemptions.value > 60
    assert bool(metrics.host_pages_out.value) == bool(metrics.host_pages_in.value) == bool(host)


@pytest.mark.parametrize("host", HOSTS)
def test_pool_pinned_at_its_limit(host: tuple[int, int] | None) -> None:
    """Answers far longer than predicted, so that the pool is full nearly all the time: all
    complete."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=128)
    simulated = simulate(config, num_pages=16, max_model_len=15 * 64, host=host)
    for number in range(20):  # a history of short answers
        simulated.add(f"short{number}", 10, max_tokens=8, seed=number)
    simulated.run()
    for number in range(8):
        simulated.add(f"long{number}", 60, max_tokens=800, seed=number)
    fullest = 0
    while simulated.step():
        fullest = max(fullest, simulated.blocks.num_used_pages)
    assert fullest >= 15
    assert simulated.engine.metrics.preemptions.value > 0
    for number in range(8):
        assert simulated.tokens(f"long{number}") == simulated.script(f"long{number}", number)
    simulated.assert_nothing_held()


@pytest.mark.parametrize("num_drafts", [0, 5, 70])
@pytest.mark.parametrize("num_prompt", [1, 63, 64, 65, 639, 640, 641, 700, 702, 703])
def test_request_that_just_fits_completes_alone(num_prompt: int, num_drafts: int) -> None:
    """A request that needs the last page of the pool: it finishes or is refused, and never
    loops."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
    model = SimModel(num_drafts=num_drafts, acceptance=1.0)
    simulated = simulate(config, num_pages=10, max_model_len=704, model=model)
    simulated.add("full", num_prompt, max_tokens=704 - num_prompt, seed=1, ignore_eos=True)
    simulated.add("other", 200, max_tokens=300, seed=2)
    simulated.run(max_steps=3000)
    assert simulated.tokens("full") == simulated.script("full", 1)
    assert simulated.tokens("other") == simulated.script("other", 2)


def test_one_token_more_than_the_pool_is_refused_with_the_numbers() -> None:
    simulated = simulate(num_pages=10, max_model_len=10_000)
    simulated.add("fits", 600, max_tokens=104)
    with pytest.raises(
        RequestError, match=r"600 prompt tokens.* 105 output .*11 pages.* 704 tokens"
    ):
        simulated.add("too long", 600, max_tokens=105)
    simulated.run()
    assert simulated.final("fits").num_output_tokens == 104


def run_decoders_beside_giants(config: EngineConfig) -> tuple[Simulated, list[float]]:
    """4 decoding users, then 3 giant prompts at once; returns every gap between tokens of a
    decoder."""
    simulated = simulate(config, num_pages=20_000, max_model_len=200_001, check=False)
    for number in range(4):
        simulated.add(f"decoder{number}", 100, max_tokens=800, ignore_eos=True)
    for _ in range(10):
        simulated.step()
    for number in range(3):
        simulated.add(f"giant{number}", 200_000, max_tokens=1)
    gaps, last, seen = [], simulated.clock(), len(simulated.tokens("decoder0"))
    while not simulated.outputs["decoder0"][-1].finished:
        simulated.step()
        if len(simulated.tokens("decoder0")) > seen:
            gaps.append(simulated.clock() - last)
            last, seen = simulated.clock(), len(simulated.tokens("decoder0"))
    return simulated, gaps


def test_giant_prompts_do_not_starve_decoding() -> None:
    """4 decoders and 3 prompts of 200K tokens: a token each step, and no step longer than its rows
    say."""
    simulated, gaps = run_decoders_beside_giants(EngineConfig(max_num_batched_tokens=1024))
    assert len(gaps) > 700
    longest_step = 5e-3 + 1024 * 1e-4 + 1024 * 200_000 * 1e-9 + 1e-3
    assert max(gaps) < longest_step
    simulated.run()
    assert all(simulated.final(f"giant{number}").num_output_tokens == 1 for number in range(3))


@pytest.mark.slow
def test_time_per_token_target_shrinks_chunks() -> None:
    """With a target, decoders keep it while the same giants are computed beside them."""
    config = EngineConfig(max_num_batched_tokens=4096, target_tpot_ms=60.0)
    _, gaps = run_decoders_beside_giants(config)
    late = sorted(gaps[200:])  # after the cost model has seen some steps
    assert late[int(0.95 * len(late))] < 0.075
    _, free_gaps = run_decoders_beside_giants(EngineConfig(max_num_batched_tokens=4096))
    assert sorted(free_gaps)[-50] > 0.2


@pytest.mark.parametrize("budget", [512, 8192])
@pytest.mark.parametrize("num_prompt", [10, 2000])
@pytest.mark.parametrize("num_giants", [1, 3, 6])
def test_short_newcomer_overtakes_giants(num_giants: int, num_prompt: int, budget: int) -> None:
    """Giants are under way, however long already: a short prompt has its token within a few
    steps."""
    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=16)
    simulated = simulate(config, num_pages=60_000, max_model_len=100_001, check=False)
    for number in range(num_giants):
        simulated.add(f"giant{number}", 100_000, max_tokens=1)
    for delay in range(5):
        for _ in range(30):
            simulated.step()
        request_id = f"newcomer{delay}"
        simulated.add(request_id, num_prompt, max_tokens=1)
        num_steps = 0
        while request_id not in simulated.outputs:
            simulated.step()
            num_steps += 1
        # One step after the one that computed it, from half of the rows but a page for each giant
        # besides the oldest.
        share = budget // 2 - 64 * (min(num_giants, 3) - 1)
        assert num_steps <= 2 + -(-num_prompt // share)


def test_short_newcomers_pass_a_giant_that_waits_for_memory() -> None:
    """Decoders hold most pages for long and a giant waits for them: short requests go on
    meanwhile."""
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=16)
    simulated = simulate(config, num_pages=400, max_model_len=24_000, check=False)
    for number in range(4):
        simulated.add(f"decoder{number}", 3000, max_tokens=2500, ignore_eos=True)
    simulated.step()
    simulated.add("giant", 15_000, max_tokens=10, ignore_eos=True)
    for number in range(20):
        for _ in range(60):
            simulated.step()
        simulated.add(f"short{number}", 100, max_tokens=5, ignore_eos=True)
    assert "giant" not in simulated.outputs
    assert sum(f"short{number}" in simulated.outputs for number in range(20)) >= 19
    simulated.run()
    assert simulated.final("giant").num_output_tokens == 10


def test_giant_that_waits_for_memory_is_not_starved() -> None:
    """Short requests that keep the pool full arrive for ever: the giant still gets its pages."""
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=16)
    simulated = simulate(config, num_pages=100, max_model_len=7000, check=False)
    number = 0

    def keep_full() -> None:
        nonlocal number
        while simulated.scheduler.num_waiting < 8:
            simulated.add(f"short{number}", 400, max_tokens=200, ignore_eos=True)
            simulated.engine._take_inbox()
            number += 1

    keep_full()
    simulated.step()
    simulated.add("giant", 6000, max_tokens=10, ignore_eos=True)
    num_steps = 0
    while "giant" not in simulated.outputs:
        keep_full()
        simulated.step()
        num_steps += 1
        assert num_steps < 3000
    assert simulated.engine.metrics.preemptions.value == 0


def test_giant_is_not_starved_by_short_prompts() -> None:
    """Short prompts arrive faster than they can be computed: the giant still completes, by
    ageing."""
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=64)
    simulated = simulate(config, num_pages=5000, max_model_len=30_000, check=False)
    simulated.add("giant", 20_000, max_tokens=1)
    num_steps = 0
    while not simulated.outputs.get("giant"):
        for number in range(2):
            simulated.add(f"short{num_steps}.{number}", 400, max_tokens=1)
        simulated.step()
        num_steps += 1
        assert num_steps < 500
    alone = 20_000 / 512
    assert num_steps < 6 * alone


def test_low_priority_is_served_in_the_end() -> None:
    """An endless stream of urgent requests delays one of low priority, but not for ever."""
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=1)
    simulated = simulate(config, num_pages=50, cost=replace(COST, step=0.1))
    simulated.add("low", 60, max_tokens=10, priority=2)
    number = 0
    while not simulated.outputs.get("low"):
        if simulated.scheduler.num_waiting < 3:
            simulated.add(f"urgent{number}", 60, max_tokens=10)
            number += 1
        simulated.step()
        assert simulated.clock() < 200
    assert number > 20

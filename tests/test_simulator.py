"""Simulator: deterministic tokens, virtual time, drafts that are right as often as asked."""

from __future__ import annotations

import time

import pytest
from simulated import COST, WordTokenizer, simulate

from netra_backend.config import EngineConfig
from netra_backend.cost_model import StepCost
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import Sequence
from netra_backend.simulator import SimModel, VirtualClock, simulated_engine
from netra_backend.tokenizer import Detokenizer


def sequence(seed: int, num_prompt: int = 5, **params: object) -> Sequence:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request("r", (1,) * num_prompt, sampling, 0.0)
    return Sequence(0, request, [1] * num_prompt, num_prompt, seed)


def test_tokens_depend_on_seed_and_position_alone() -> None:
    model = SimModel(vocab_size=50)
    tokens = [model.token(sequence(1), position) for position in range(1000)]
    assert tokens == [model.token(sequence(1), position) for position in range(1000)]
    assert tokens != [model.token(sequence(2), position) for position in range(1000)]
    assert set(tokens) == set(range(50))


def test_end_of_text_respects_min_tokens_and_ignore_eos() -> None:
    model = SimModel(vocab_size=4, eos_token_ids=frozenset({1, 2}))

    def tokens(**params: object) -> list[int]:
        seq = sequence(0, max_tokens=100, **params)
        return [model.token(seq, 5 + index) for index in range(100)]

    assert {1, 2} & set(tokens()[:10])
    assert not {1, 2} & set(tokens(min_tokens=40)[:40])
    assert tokens(min_tokens=40)[40:] == tokens()[40:]
    assert not {1, 2} & set(tokens(ignore_eos=True))


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_drafts_are_right_as_often_as_asked(acceptance: float) -> None:
    model = SimModel(num_drafts=4, acceptance=acceptance)
    seq = sequence(3)
    right = [
        draft == model.token(seq, position + offset)
        for position in range(0, 4000, 4)
        for offset, draft in enumerate(model.drafts(seq, position))
    ]
    assert len(right) == 4000
    assert sum(right) / len(right) == pytest.approx(acceptance, abs=0.03)


def test_virtual_time_is_that_of_the_cost_model() -> None:
    simulated = simulate()
    simulated.add("r", 100, max_tokens=11, ignore_eos=True)
    simulated.run()
    prompt = COST.step + 100 * COST.prompt_row + COST.logits_row
    decode = 10 * (COST.step + COST.decode_row + COST.logits_row)
    assert simulated.clock() == pytest.approx(prompt + decode, rel=1e-3)


def test_without_a_clock_steps_take_real_time() -> None:
    engine = simulated_engine(
        EngineConfig(),
        WordTokenizer(),  # type: ignore[arg-type]
        lambda params: Detokenizer(WordTokenizer()),  # type: ignore[arg-type]
        num_pages=10,
        max_model_len=100,
        model=SimModel(),
        cost=StepCost(0.05, 0.0, 0.0, 0.0, 0.0, 0.0),
    )
    began = time.monotonic()
    engine.add(Request("r", (1, 2), SamplingParams(max_tokens=4), began))
    while engine.step():
        pass
    assert time.monotonic() - began >= 4 * 0.05
    assert engine.metrics.time_to_first_token.sum >= 0.05


def test_same_arrivals_give_the_same_run() -> None:
    def run() -> tuple[float, list[list[tuple[str, int, int]]], list[int]]:
        simulated = simulate(model=SimModel(num_drafts=2, acceptance=0.5))
        for number in range(12):
            simulated.add(f"r{number}", 40 * number + 1, max_tokens=100)
        simulated.run()
        return simulated.clock(), simulated.runner.batches, simulated.tokens("r7")

    assert run() == run()


def test_clock_only_moves_when_told() -> None:
    clock = VirtualClock()
    assert clock() == clock() == 0.0
    clock.advance(1.5)
    assert clock() == 1.5

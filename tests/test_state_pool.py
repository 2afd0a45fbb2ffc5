"""State pool: float32 and bfloat16 states, both with float32 arithmetic, and slots that start from nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inline_engine import greedy, make_runner, random_prompts, run

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_qwen

LENGTHS = [1, 5, 63, 64, 65, 130]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen(tmp_path_factory.mktemp("states") / "qwen")


def test_bfloat16_states_are_half_as_large_and_answer_alike(checkpoint: Path) -> None:
    exact, rounded = make_runner(checkpoint), make_runner(checkpoint, state_dtype="bfloat16")
    layer = rounded._states.layers[0]
    assert layer.states.dtype == torch.bfloat16
    assert layer.gates.dtype == torch.float32
    saved = exact.plan.state_bytes - rounded.plan.state_bytes
    assert saved == 2 * sum(state.states[0].numel() for state in rounded._states.layers)
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    answers = [run(runner, prompts, greedy(8)).token_ids for runner in (exact, rounded)]
    pairs = [(a, b) for x, y in zip(*answers, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.8


def test_the_rounded_state_stays_close_to_the_exact_one(checkpoint: Path) -> None:
    """The same tokens through both: rounding once a step must not compound."""
    states = []
    prompt = random_prompts([100], VOCAB_SIZE)[0]
    for state_dtype in ("float32", "bfloat16"):
        runner = make_runner(checkpoint, state_dtype=state_dtype, max_num_seqs=1)
        run(runner, [prompt], greedy(1), max_num_seqs=1)
        states.append([layer.states[0].float() for layer in runner._states.layers])
    for exact, rounded in zip(*states, strict=True):
        assert (exact - rounded).norm() / exact.norm() < 0.01


def test_reset_leaves_other_slots_alone(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, max_num_seqs=3)
    pool = runner._states
    for layer in pool.layers:
        layer.states.fill_(1.0)
        layer.columns.fill_(2.0)
    pool.reset([1])
    for layer in pool.layers:
        assert layer.states[1].abs().sum() == 0
        assert layer.columns[1].abs().sum() == 0
        assert (layer.states[[0, 2]] == 1).all()
        assert (layer.columns[[0, 2]] == 2).all()


def test_a_model_without_recurrent_layers_has_an_empty_pool(tmp_path: Path) -> None:
    runner = make_runner(make_random_llama(tmp_path / "llama"))
    assert runner._states.layers == []
    assert runner.plan.state_bytes == 0

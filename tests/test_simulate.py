"""bench/simulate.py: the roofline behaves, and the controller is never much below the better of off and fixed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "simulate.py"
    spec = importlib.util.spec_from_file_location("bench_simulate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_simulate"] = module
    spec.loader.exec_module(module)
    return module


def worst_share(
    bench: ModuleType,
    users: int,
    context: int,
    rates: tuple[float, ...],
    phase: int = 0,
    fade: float = 1.0,
) -> float:
    """Controller against the best of off and fixed lengths; the same tokens for all, over two seeds.

    With phases, what is measured are two whole rounds of them, or lengths would differ in what they meet.
    """
    lengths = (0, 1, 2, 4, 8)
    num_tokens, settle = max(1500, 150 * users), max(600, 100 * users)
    if phase:
        settle = len(rates) * phase * users
        num_tokens = 2 * settle

    def seconds(num_drafts: int, adaptive: bool = False) -> float:
        total = 0.0
        for seed in range(2):
            drafter = bench.Drafter(rates, phase, fade, seed)
            result = bench.simulate(
                users, context, num_drafts, adaptive, drafter, num_tokens, settle
            )
            assert result.running == users
            total += 1.0 / result.tokens_per_second
        return total

    return min(seconds(length) for length in lengths) / seconds(8, adaptive=True)


@pytest.mark.parametrize("rates", [(0.05,), (0.6,), (0.9,), (0.55, 0.7, 0.8, 0.9)])
@pytest.mark.parametrize("users", [1, 4, 16])
def test_the_controller_is_within_three_percent_of_the_best(
    bench: ModuleType, users: int, rates: tuple[float, ...]
) -> None:
    assert worst_share(bench, users, 4096, rates) >= 0.97


@pytest.mark.parametrize("users", [1, 8])
def test_it_is_at_long_contexts_where_later_drafts_are_worse(bench: ModuleType, users: int) -> None:
    assert worst_share(bench, users, 40960, (0.9,), fade=0.93) >= 0.97


@pytest.mark.parametrize("users", [1, 4])
def test_it_follows_drafts_that_turn_bad_and_good_again_within_an_answer(
    bench: ModuleType, users: int
) -> None:
    """Any fixed length is wrong half of the time, so here the controller must win."""
    assert worst_share(bench, users, 4096, (0.05, 0.9), phase=200) >= 1.0


def test_more_users_share_the_weights_and_memory_limits_how_many_run(bench: ModuleType) -> None:
    drafter = bench.Drafter((0.5,))
    one, four = (bench.simulate(n, 4096, 0, False, drafter, 5 * n) for n in (1, 4))
    assert four.tokens_per_second > one.tokens_per_second
    assert four.step_ms > one.step_ms
    many = bench.simulate(400, 40960, 0, False, drafter, 1)
    assert many.running < 400

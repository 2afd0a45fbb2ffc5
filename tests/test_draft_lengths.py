"""bench/draft_lengths.py: so many users at any time, every answer complete, and the table's ratio."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from simulated import simulate

from netra_backend.config import EngineConfig
from netra_backend.errors import RequestError
from netra_backend.simulator import SimModel

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import draft_lengths
from report import Row
from workload import Prompt

PROMPT = Prompt("", (1, 2, 3), "a")


def test_users_ask_again_until_the_prompts_are_used_up() -> None:
    simulated = simulate(EngineConfig(max_num_seqs=4), model=SimModel(num_drafts=2, acceptance=0.7))
    running: list[int] = []

    class Watched:
        outputs = simulated.engine.outputs
        add = staticmethod(simulated.engine.add)

        @staticmethod
        def step() -> bool:
            running.append(len(simulated.engine._live))
            return simulated.engine.step()

    stream = draft_lengths.Stream(Watched(), [PROMPT] * 12, users=3, output_len=10)
    for _ in range(3):
        stream.ask()
    stream.run(9)
    assert set(running) == {3}
    stream.run(12)
    assert stream.num_tokens == 3 + 6 + 10 * 10
    simulated.assert_nothing_held()


def test_a_failed_request_ends_the_run() -> None:
    simulated = simulate(max_model_len=64)
    stream = draft_lengths.Stream(simulated.engine, [PROMPT], users=1, output_len=50)
    stream.ask()
    simulated.engine.abort("0", RequestError("timeout", "gone"))
    with pytest.raises(RuntimeError, match=r"request 0 failed: .*gone"):
        stream.run(1)


def test_all_modes_answer_the_same_prompts_and_the_first_round_is_not_counted() -> None:
    made: list[Prompt] = []

    def make() -> Prompt:
        made.append(PROMPT)
        return PROMPT

    engines = {name: simulate(EngineConfig(max_num_seqs=2)).engine for name in ("off", "k=2")}
    modes = [draft_lengths.Mode(name, engine) for name, engine in engines.items()]
    arguments = Namespace(seed=0, users="1,2", rounds=2, answers=2, input_len=3, output_len=6)
    rows = draft_lengths.measure(modes, make, arguments)
    assert [(row.name, row.workload) for row in rows] == [
        (name, f"{users} x 3+6") for users in (1, 2) for name in ("off", "k=2")
    ]
    assert all(len(row.repeats) == 2 for row in rows)
    assert len(made) == (1 + 2) * (3 + 2 * 4)


def test_the_controller_is_compared_with_the_best_of_the_others() -> None:
    rates = {"off": 100.0, "k=2": 200.0, draft_lengths.CONTROLLER: 190.0}
    rows = [Row(name, "w", {draft_lengths.RATE: rate}) for name, rate in rates.items()]
    assert "95.0%" in draft_lengths.ratios(rows)

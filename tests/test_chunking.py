"""Chunking: who gets how many rows of a step."""

from __future__ import annotations

import pytest
from scheduling import sequence

from netra_backend.chunking import divide_rows
from netra_backend.sequence import SequenceStatus


def divide(budget: int, *remaining: int, max_partial: int = 3, num_running: int = 0) -> list[int]:
    sequences = [sequence(length, seq_id=i) for i, length in enumerate(remaining)]
    for seq in sequences[:num_running]:
        seq.status = SequenceStatus.RUNNING
    shares = divide_rows(sequences, budget, max_partial, lambda _: True, lambda seq: seq.seq_id)
    given = {seq.seq_id: count for seq, count in shares}
    assert sum(given.values()) <= budget
    return [given.get(i, 0) for i in range(len(remaining))]


@pytest.mark.parametrize(
    ("budget", "remaining", "num_running", "expected"),
    [
        (512, (128, 128, 128, 128, 128), 0, [128, 128, 128, 128, 0]),  # all that fit, whole
        (512, (1000,), 0, [512]),
        (512, (1000, 1000, 1000, 1000), 0, [384, 64, 64, 0]),  # three part-done, the first mostly
        (512, (9000, 20), 1, [448, 20]),  # a short newcomer is served whole
        (512, (9000, 256), 1, [256, 256]),  # from half of the rows
        (512, (9000, 257), 1, [256, 256]),  # one that takes two steps has half of them, too
        (512, (9000, 5000), 1, [448, 64]),  # but a long one waits
        (512, (9000, 9000, 9000, 8000), 3, [384, 64, 64, 0]),  # no place for a long newcomer
        (512, (9000, 9000, 9000, 4500), 3, [256, 64, 64, 128]),  # but for one half as long
        (512, (9000, 9000, 600), 3, [256, 64, 192]),  # age does not take all from a short one
        (64, (9000, 9000), 2, [64, 0]),
        (100, (9000, 9000), 2, [64, 0]),  # less than a page is left: nothing rather than a part
        (40, (9000,), 1, [40]),  # below a page: better than never
        (0, (9000,), 1, [0]),
    ],
)
def test_division(
    budget: int, remaining: tuple[int, ...], num_running: int, expected: list[int]
) -> None:
    assert divide(budget, *remaining, num_running=num_running) == expected


def test_most_urgent_gets_most_whether_it_runs_or_waits() -> None:
    running, waiting = sequence(9000, seq_id=1), sequence(9000, seq_id=0)
    running.status = SequenceStatus.RUNNING
    shares = divide_rows([running, waiting], 512, 3, lambda _: True, lambda seq: seq.seq_id)
    assert {seq.seq_id: count for seq, count in shares} == {0: 448, 1: 64}


def test_refused_prompts_get_no_rows() -> None:
    sequences = [sequence(10, seq_id=i) for i in range(3)]
    shares = divide_rows(sequences, 512, 3, lambda seq: seq.seq_id != 1, lambda seq: 0.0)
    assert [(seq.seq_id, count) for seq, count in shares] == [(0, 10), (2, 10)]

"""sample and penalize against their references; the rule itself against the distribution it must have; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close

from netra_backend.draw import DrawParams, draw, tile_max
from netra_backend.gpu.kernel_draw import KernelDraw
from netra_backend.request import SamplingParams
from netra_kernels.sampling import (
    IN_PROMPT,
    Penalties,
    SamplingRows,
    edges_ref,
    penalize,
    penalize_ref,
    sample,
    sample_ref,
)


def rows_of(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, first_position=0):
    return SamplingRows(
        torch.full((count,), 1.0 / temperature if temperature else 0.0),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.arange(count, dtype=torch.int64) * 7919 - 3,
        torch.arange(first_position, first_position + count, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2},
     {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"top_k": 1}, {"top_k": 5000}],
)  # fmt: skip
@pytest.mark.parametrize("vocab", [300, 128])
def test_sample_matches_reference(options, vocab):
    logits = 2 * torch.randn(4, vocab)
    logits[1, 200 % vocab :] = -torch.inf
    rows = rows_of(4, **options)
    assert torch.equal(sample(logits, rows), sample_ref(logits, rows))


def test_equal_logits_at_the_edge_stay():
    logits = torch.zeros(3, 256)
    logits[:, 17] = 1.0
    assert edges_ref((logits[0] - 1).exp(), 2, 1.0, 0.0) == pytest.approx(
        torch.tensor(-1.0).exp().item()
    )
    rows = rows_of(3, top_k=2)
    assert torch.equal(sample(logits, rows), sample_ref(logits, rows))


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(1, 9000)
    logits[0, [8999, 4097, 300]] = 2.0
    assert sample(logits, rows_of(1, temperature=0.0)).tolist() == [300]


def test_rule_has_the_right_distribution():
    """4,000 draws of the reference, two tiles, filters on: frequencies within 5 standard errors."""
    logits = torch.cat(
        [torch.tensor([2.0, 1.0, 0.5]), torch.full((130,), -9.0), torch.tensor([1.5, 0.0])]
    )
    count = 4000
    drawn = sample_ref(logits.expand(count, -1), rows_of(count, top_k=4))
    expected = torch.zeros(len(logits))
    kept = torch.tensor([0, 1, 2, 133])
    expected[kept] = logits[kept].softmax(0)
    frequencies = torch.bincount(drawn.long(), minlength=len(logits)) / count
    error = (frequencies - expected).abs()
    assert (error <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_a_row_does_not_depend_on_its_neighbours():
    logits, rows = torch.randn(3, 300), rows_of(3, top_p=0.9)
    alone = SamplingRows(*(getattr(rows, name)[1:2] for name in SamplingRows.__dataclass_fields__))
    assert sample(logits, rows)[1] == sample(logits[1:2].contiguous(), alone)[0]


@pytest.mark.parametrize("with_mask", [False, True])
def test_penalize_matches_reference(with_mask):
    vocab = 300
    counts = torch.randint(0, 3, (4, vocab)).short() * (torch.rand(4, vocab) < 0.2)
    counts = counts + (IN_PROMPT * (torch.rand(4, vocab) < 0.1)).short()
    penalties = Penalties(
        counts,
        torch.tensor([3, 0, 0], dtype=torch.int32),
        torch.tensor([[-1, -1], [5, -1], [5, 5]], dtype=torch.int32),
        torch.tensor([1.0, 1.3, 0.8]),
        torch.tensor([0.0, 0.5, -0.1]),
        torch.tensor([0.0, 0.2, 0.4]),
        torch.randint(-(2**31), 2**31 - 1, (3, 10), dtype=torch.int32) if with_mask else None,
    )
    logits = torch.randn(3, vocab)
    expected = penalize_ref(logits, penalties)
    penalize(logits, penalties)
    assert torch.equal(logits == -torch.inf, expected == -torch.inf)
    assert_close(logits.nan_to_num(neginf=0), expected.nan_to_num(neginf=0), 1e-6)


def test_some_rows_of_a_step_are_drawn_as_on_a_cpu():
    """Every filter of a request, and rows that are not drawn between those that are."""
    options = [{}, {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3},
               {"top_k": 20, "top_p": 0.9, "min_p": 0.02}]  # fmt: skip
    logits = 3 * torch.randn(3 * len(options), 300)
    params = [DrawParams.of(SamplingParams(**chosen), 300, seed) for seed, chosen in enumerate(options)]  # fmt: skip
    rows = list(range(1, len(logits), 3))
    positions = [70 * row for row in rows]
    arguments = (logits, tile_max(logits), rows, positions, params)
    assert KernelDraw(sample)(*arguments).tolist() == draw(*arguments).tolist()

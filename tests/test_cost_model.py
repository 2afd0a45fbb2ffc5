"""CostModel: learns a machine from its steps, never predicts that more work is cheaper."""

from __future__ import annotations

import random

import pytest

from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.cost_model import CostModel, StepCost, StepShape
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import Sequence

GPU = StepCost(4e-3, 2e-6, 2e-5, 3e-9, 1e-11, 1e-6)


def random_shape(rng: random.Random) -> StepShape:
    decoding = rng.randint(0, 256)
    shape = StepShape(decode_rows=decoding, logits_rows=decoding)
    shape.context_tokens = sum(rng.randint(10, 40_000) for _ in range(decoding))
    if rng.random() < 0.5 or not decoding:
        shape.add_prompt(rng.randint(1, 8192), rng.randint(0, 100_000))
    return shape


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_learns_a_machine_far_from_the_defaults(noise: float) -> None:
    rng = random.Random(0)
    truth, model = CostModel(GPU), CostModel()
    for _ in range(400):
        shape = random_shape(rng)
        model.observe(shape, truth.seconds(shape) * (1 + noise * rng.uniform(-1, 1)))
    errors = []
    for _ in range(200):
        shape = random_shape(rng)
        errors.append(abs(model.seconds(shape) / truth.seconds(shape) - 1))
    assert sorted(errors)[180] < 0.05 + noise


def test_follows_a_machine_that_becomes_slower() -> None:
    rng = random.Random(1)
    model = CostModel(GPU, memory_steps=100)
    slow = CostModel(StepCost(*(2 * weight for weight in GPU.weights())))
    for _ in range(500):
        shape = random_shape(rng)
        model.observe(shape, slow.seconds(shape))
    shape = random_shape(rng)
    assert model.seconds(shape) == pytest.approx(slow.seconds(shape), rel=0.05)


def test_weights_are_never_negative_whatever_is_measured() -> None:
    rng = random.Random(2)
    model = CostModel()
    for _ in range(500):
        model.observe(random_shape(rng), rng.choice((1e-6, 1e-3, 10.0)))
        small, large = StepShape(1, 64, 100, 64 * 100, 1), StepShape(2, 128, 200, 128 * 200, 2)
        assert 0 <= model.seconds(small) <= model.seconds(large)
    before = model.seconds(small)
    model.observe(small, 0.0)  # a clock too coarse to see the step says nothing
    assert model.seconds(small) == before


def test_long_decoding_does_not_forget_what_prompts_cost() -> None:
    rng = random.Random(3)
    truth, model = CostModel(GPU), CostModel(memory_steps=50)
    for _ in range(300):
        shape = random_shape(rng)
        model.observe(shape, truth.seconds(shape))
    learned = model.prompt_seconds(1000)
    decoding = StepShape(decode_rows=8, context_tokens=8000, logits_rows=8)
    for _ in range(3000):
        model.observe(decoding, truth.seconds(decoding))
    assert model.prompt_seconds(1000) == pytest.approx(learned, rel=0.01)


@pytest.mark.parametrize("context", [0, 1000, 200_000])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.5])
def test_prompt_rows_within_is_the_largest_that_fits(context: int, seconds: float) -> None:
    model = CostModel(GPU)
    rows = model.prompt_rows_within(seconds, context)
    assert model.prompt_seconds(rows, context) <= seconds + 1e-9
    assert model.prompt_seconds(rows + 2, context) > seconds
    assert model.prompt_rows_within(-1.0, context) == 0


def test_shape_of_a_mixed_batch() -> None:
    def sequence(seq_id: int, num_computed: int) -> Sequence:
        request = Request(str(seq_id), (1,), SamplingParams(), 0.0)
        return Sequence(seq_id, request, [1] * 300, 300, 0, num_computed_tokens=num_computed)

    batch = Batch(
        [
            ScheduledSequence(sequence(0, 299), 1, num_logits=1),
            ScheduledSequence(sequence(1, 199), 3, draft_token_ids=[5, 6], num_logits=3),
            ScheduledSequence(sequence(2, 64), 128, is_chunk=True, seal_block_ids=[0, 1]),
        ]
    )
    pairs = sum(64 + row for row in range(1, 129))
    assert StepShape.of(batch) == StepShape(4, 128, 300 + 202, pairs, 4)


def test_a_cost_that_is_no_line_is_learned_where_it_is_visited() -> None:
    """Free up to 64 rows, then in proportion: the line is off by more than a tenth, the corrected one is not."""
    model = CostModel()

    def truth(rows: int) -> float:
        return 1e-2 * max(1.0, rows / 64)

    for step in range(600):
        rows = (16, 32, 64, 128)[step % 4]
        model.observe(StepShape(decode_rows=rows, logits_rows=rows), truth(rows))
    shapes = [StepShape(decode_rows=rows, logits_rows=rows) for rows in (16, 32, 64, 128)]
    straight = [model.seconds(s) / truth(s.decode_rows) - 1 for s in shapes]
    corrected = [model.decode_seconds(s) / truth(s.decode_rows) - 1 for s in shapes]
    assert max(map(abs, straight)) > 0.1
    assert max(map(abs, corrected)) < 0.03


def test_one_step_that_waited_changes_a_correction_little() -> None:
    model = CostModel()
    shape = StepShape(decode_rows=8, logits_rows=8)
    for _ in range(300):
        model.observe(shape, 1e-2)
    model.observe(shape, 10.0)
    assert model.decode_seconds(shape) == pytest.approx(1e-2, rel=0.05)


def test_a_block_drafter_pays_for_one_pass_however_many_drafts() -> None:
    cost = StepCost(draft_pass=1.0, draft_row=0.0)
    chain, block = CostModel(cost), CostModel(cost, drafts_in_blocks=True)
    none, one, eight = (StepShape(decode_rows=1, draft_passes=k, draft_rows=k) for k in (0, 1, 8))
    assert chain.seconds(eight) - chain.seconds(none) == pytest.approx(8.0)
    assert block.seconds(eight) == block.seconds(one)
    assert block.seconds(one) - block.seconds(none) == pytest.approx(1.0)

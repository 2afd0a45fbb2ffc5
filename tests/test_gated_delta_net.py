"""The gated delta rule against its definition in float64, and replay against computation, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from netra_backend.forward_context import Falling
from netra_backend.torch_ops.gated_delta_rule import (
    CHUNK,
    by_token,
    chunked,
    recurrent,
    recurrent_step,
)

HEADS, KEY_DIM, VALUE_DIM = 2, 32, 16


def make_inputs(
    num_tokens: int, correlation: float, decay: float, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta [num_tokens, heads, ..]; keys share a direction with the given correlation."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shared = randn(1, HEADS, KEY_DIM)
    own = randn(num_tokens, HEADS, KEY_DIM)
    k = torch.nn.functional.normalize(
        correlation**0.5 * shared + (1 - correlation) ** 0.5 * own, dim=-1
    )
    q = torch.nn.functional.normalize(randn(num_tokens, HEADS, KEY_DIM), dim=-1) * KEY_DIM**-0.5
    v = randn(num_tokens, HEADS, VALUE_DIM)
    g = -decay * torch.rand(num_tokens, HEADS, generator=generator)
    beta = randn(num_tokens, HEADS).mul(2).sigmoid()
    return q, k, v, g, beta


def definition(
    state: torch.Tensor, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q, in float64, token by token."""
    q, k, v, g, beta = (x.double() for x in inputs)
    state = state.double()
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], delta)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out), state


def error_ratio(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01, 2.0])
def test_chunks_and_steps_equal_the_definition(correlation: float, decay: float) -> None:
    inputs = make_inputs(200, correlation, decay)
    start = torch.randn(HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(1))
    expected_out, expected_state = definition(start, inputs)
    state = start.clone()
    assert error_ratio(chunked(state, *inputs), expected_out) < 2e-5
    assert error_ratio(state, expected_state) < 2e-5
    state = start[None].clone()
    assert (
        error_ratio(recurrent(state, *(x[None] for x in inputs), [1] * 200)[0], expected_out) < 2e-5
    )
    assert error_ratio(state[0], expected_state) < 2e-5


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_long_memory_stays_exact_over_many_chunks(correlation: float) -> None:
    inputs = make_inputs(2048, correlation, decay=1e-3)
    start = torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
    expected_out, expected_state = definition(start, inputs)
    assert error_ratio(chunked(start, *inputs), expected_out) < 5e-5
    assert error_ratio(start, expected_state) < 5e-5


def test_strong_decay_does_not_overflow() -> None:
    inputs = make_inputs(130, 0.5, decay=200.0)
    state = torch.ones(HEADS, KEY_DIM, VALUE_DIM)
    expected_out, expected_state = definition(state, inputs)
    assert error_ratio(chunked(state, *inputs), expected_out) < 2e-5
    assert error_ratio(state, expected_state) < 2e-5


@pytest.mark.parametrize(
    "cuts", [(1,), (20,), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (7, 64, 65, 130)]
)
def test_any_cut_of_a_prompt_gives_the_same(cuts: tuple[int, ...]) -> None:
    inputs = make_inputs(150, 0.5, 0.05)
    whole_state = torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
    whole = chunked(whole_state, *inputs)
    state = torch.zeros_like(whole_state)
    edges = (0, *cuts, 150)
    parts = [chunked(state, *(x[a:b] for x in inputs)) for a, b in pairwise(edges)]
    assert error_ratio(torch.cat(parts), whole.double()) < 2e-5
    assert error_ratio(state, whole_state.double()) < 2e-5


def test_replaying_equals_computing_bit_for_bit() -> None:
    q, k, v, g, beta = (x[None] for x in make_inputs(9, 0.5, 0.05))
    computed = torch.randn(1, HEADS, KEY_DIM, VALUE_DIM)
    replayed = computed.clone()
    recurrent(computed, q, k, v, g, beta, [1] * 9)
    for token in by_token([1] * 9, replayed, k, v, g.exp().unsqueeze(-1), beta.unsqueeze(-1)):
        recurrent_step(*token)
    assert torch.equal(computed, replayed)


def test_sequences_of_fewer_tokens_are_left_alone_bit_for_bit() -> None:
    """Together, by falling counts, each gets the state and the outputs that it gets alone."""
    counts = (5, 2, 2, 1)
    inputs = [make_inputs(5, 0.5, 0.05, seed) for seed in range(len(counts))]
    together = [torch.stack(parts) for parts in zip(*inputs, strict=True)]
    state = torch.randn(len(counts), HEADS, KEY_DIM, VALUE_DIM)
    alone = state.clone()
    out = recurrent(state, *together, [4, 3, 1, 1, 1])
    for index, count in enumerate(counts):
        parts = (part[index : index + 1, :count] for part in together)
        expected = recurrent(alone[index : index + 1], *parts, [1] * count)
        assert torch.equal(out[index, :count], expected[0])
    assert torch.equal(state, alone)


def test_sequences_fall_by_count_and_equal_counts_stay() -> None:
    falling = Falling.of([1, 3, 0, 3], torch.device("cpu"))
    assert falling.order is not None
    assert falling.order.tolist() == [1, 3, 0, 2]
    assert falling.live == [3, 2, 2]
    even = Falling.of([2, 2], torch.device("cpu"))
    assert even.order is None
    assert even.live == [2, 2]
    assert Falling.of([0, 0], torch.device("cpu")).live == []

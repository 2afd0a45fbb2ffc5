"""gated_delta_rule: ragged steps with replay against the reference, replay bit-exact; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.gated_delta_rule import (
    DeltaInputs,
    DeltaRecords,
    gated_delta_rule,
    gated_delta_rule_ref,
)

HK, HV, K, V, R = 1, 2, 32, 32, 8


def layer(dtype):
    return {"a_log": torch.rand(HV).log(), "dt_bias": torch.randn(HV).to(dtype)}


def storage(slots, dtype, rows=R, state_dtype=torch.float32):
    records = DeltaRecords(
        torch.randn(slots, rows, HK, K).to(dtype),
        torch.randn(slots, rows, HV, V).to(dtype),
        -torch.rand(slots, rows, HV),
        torch.rand(slots, rows, HV),
    )
    return torch.randn(slots, HV, K, V).to(state_dtype), records


def copy_of(records):
    return DeltaRecords(*(x.clone() for x in (records.k, records.v, records.g, records.beta)))


def projections(num_tokens, dtype):
    """mixed, a, b as views of wider projections, as the model has them."""
    wide = torch.randn(num_tokens, 2 * HK * K + HV * V + 3).to(dtype)
    ba = torch.randn(num_tokens, 2 * HV).to(dtype)
    return wide[:, : 2 * HK * K + HV * V], ba[:, HV:], ba[:, :HV]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_ragged_step_matches_reference(monkeypatch, dtype, state_dtype):
    """Replays 0..3 tokens, computes 0..3; one sequence is at its very first token, one only absorbs."""
    query_lens, replays, starts = [1, 3, 2, 0], [0, 3, 1, 2], [0, 90, 1, 31]
    inputs = DeltaInputs(
        torch.tensor([4, 0, 2, 1], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(replays, dtype=torch.int32),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        3,
    )
    state, records = storage(5, dtype, state_dtype=state_dtype)
    state[4] = float("nan")  # a fresh sequence must not read what its slot held
    mixed, a, b = projections(sum(query_lens), dtype)
    weights = layer(dtype)
    state_ref, records_ref = state.clone(), copy_of(records)
    expected = gated_delta_rule_ref(
        mixed, a, b, **weights, state=state_ref, records=records_ref, inputs=inputs
    )
    poison_empty(monkeypatch)
    out = gated_delta_rule(mixed, a, b, **weights, state=state, records=records, inputs=inputs)
    assert_close(out, expected, 3e-3 if dtype == torch.bfloat16 else 1e-5)
    assert_close(
        state[:4].float(), state_ref[:4].float(), 3e-3 if state_dtype == torch.bfloat16 else 1e-5
    )
    assert state[4].isnan().all()
    for name in ("k", "v"):
        assert torch.equal(getattr(records, name), getattr(records_ref, name))
    assert_close(records.g, records_ref.g, 1e-6)
    assert_close(records.beta, records_ref.beta, 1e-6)


@pytest.mark.parametrize("accepted", [0, 2])
def test_replay_is_bit_exact(accepted):
    """A verify step then a step that absorbs = the same tokens one step at a time, bit by bit."""
    weights, (state, records) = layer(torch.bfloat16), storage(1, torch.bfloat16)
    mixed, a, b = projections(4, torch.bfloat16)
    extra = projections(1, torch.bfloat16)
    single_state, single_records = state.clone(), copy_of(records)

    def step(rows, start, replay, state, records):
        inputs = DeltaInputs(*(torch.tensor([x], dtype=torch.int32) for x in (0, start, replay)),
                             torch.tensor([0, len(rows[0])], dtype=torch.int32), 4)  # fmt: skip
        return gated_delta_rule(*rows, **weights, state=state, records=records, inputs=inputs)

    verified = step((mixed, a, b), 10, 0, state, records)
    last = step(extra, 11 + accepted, 1 + accepted, state, records)
    for t in range(accepted + 1):
        rows = tuple(x[t : t + 1] for x in (mixed, a, b))
        alone = step(rows, 10 + t, int(t > 0), single_state, single_records)
        assert torch.equal(alone[0], verified[t])
    again = step(extra, 11 + accepted, 1, single_state, single_records)
    assert torch.equal(again, last)
    assert torch.equal(single_state, state)


def test_too_few_record_rows_are_refused():
    state, records = storage(1, torch.float32, rows=4)
    one = torch.zeros(1, dtype=torch.int32)
    inputs = DeltaInputs(one, one, one, torch.tensor([0, 3], dtype=torch.int32), 3)
    with pytest.raises(AssertionError, match="4 record rows for 3"):
        gated_delta_rule(*projections(3, torch.float32), **layer(torch.float32), state=state, records=records,
                         inputs=inputs)  # fmt: skip

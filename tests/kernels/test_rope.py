"""rope against its reference, and the Hadamard rotation against the matrix, interpreted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_checks import assert_close, poison_empty
from scipy.linalg import hadamard as hadamard_matrix

from netra_kernels.hadamard import hadamard_ref
from netra_kernels.kv_codec import page_layout
from netra_kernels.rope import rope, rope_ref, rotary_table
from netra_kernels.seal import Sealing


@pytest.mark.parametrize("size", [64, 128, 256])
def test_hadamard_ref_is_the_orthonormal_matrix(size):
    matrix = torch.tensor(hadamard_matrix(size), dtype=torch.float64) * size**-0.5
    x = torch.randn(5, size)
    assert_close(hadamard_ref(x), x.double() @ matrix, 1e-6)
    assert_close(hadamard_ref(hadamard_ref(x)), x, 1e-6)


def test_hadamard_refuses_other_sizes():
    with pytest.raises(ValueError, match="96"):
        hadamard_ref(torch.zeros(2, 96))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "dim", "rotary", "norm"),
    [(4, 2, 64, 16, True), (3, 1, 64, 64, False), (2, 1, 256, 64, True), (3, 3, 128, 128, True)],
)
@pytest.mark.parametrize("with_tail", [False, True])
def test_rope_matches_reference(monkeypatch, dtype, num_q, num_kv, dim, rotary, norm, with_tail):
    q = torch.randn(5, num_q, 2 * dim).to(dtype)[
        ..., :dim
    ]  # query and gate of a head lie side by side
    kv = torch.randn(5, 2 * num_kv, dim).to(dtype)
    k, v = kv[:, :num_kv], kv[:, num_kv:]
    positions = torch.tensor([0, 1, 63, 64, 1000], dtype=torch.int32)
    table = rotary_table(1001, rotary, 1e7, torch.device("cpu"))
    weights = [torch.randn(dim).to(dtype) for _ in range(2)] if norm else [None, None]
    tail = torch.full((3, 2, num_kv, 128, dim), 7.0).to(dtype) if with_tail else None
    slots = torch.tensor([128 + 5, -1, 0, 3 * 128 - 1, 6], dtype=torch.int32) if with_tail else None
    tail_ref = None if tail is None else tail.clone()
    expected = rope_ref(q, k, v, positions, table, *weights, 1e-6, True, True, tail_ref, slots)
    poison_empty(monkeypatch)
    out = rope(q, k, v, positions, table, *weights, 1e-6, True, True, tail, slots)
    limit = 2e-3 if dtype == torch.bfloat16 else 1e-6
    assert_close(out.q, expected.q, limit)
    assert_close(out.k, expected.k, limit)
    assert_close(out.q_rotated, hadamard_ref(out.q), limit)
    if tail is not None:
        assert_close(tail, tail_ref, limit)
        assert torch.equal(tail[1, 0, :, 5], out.k[0])
        assert torch.equal(tail[2, 1, :, 127], v[3])
        assert (tail == 7).all(-1).sum() == (3 * 128 - 4) * 2 * num_kv


@pytest.mark.parametrize("codec", ["plain", "int8", "int4"])
def test_full_tails_are_sealed_by_the_same_launch(monkeypatch, codec):
    """Of three sequences the first and the last seal the page before their new rows; the ring has just room for both."""
    layout = page_layout(codec, 2, 64)
    q, kv = torch.randn(6, 4, 64).bfloat16(), torch.randn(6, 4, 64).bfloat16()
    tail = torch.randn(5, 2, 2, 72, 64).bfloat16()
    pages = torch.zeros(
        4, *layout.page_shape, dtype=torch.bfloat16 if codec == "plain" else torch.uint8
    )
    sealed, slots = torch.tensor([64, 0, 192]), torch.tensor([3, 0, 1])
    counts, starts = torch.tensor([2, 1, 3]), torch.tensor([64 + 69, 20, 192 + 64])
    which = torch.repeat_interleave(torch.arange(3), counts)
    positions = starts[which] + torch.tensor([0, 1, 0, 0, 1, 2])
    mapping = (slots[which] * 72 + positions % 72).int()
    sealing = Sealing(
        pages, torch.tensor([[2], [-1], [0]], dtype=torch.int32), slots.int(), sealed.int(),
        (starts - sealed).int(), layout,
    )  # fmt: skip
    expected_pages, expected_tail = pages.clone(), tail.clone()
    table = rotary_table(300, 16, 1e4, torch.device("cpu"))
    arguments = (
        q,
        kv[:, :2],
        kv[:, 2:],
        positions.int(),
        table,
        None,
        None,
        1e-6,
        False,
        layout.rotates_keys,
    )
    expected = rope_ref(
        *arguments,
        expected_tail,
        mapping,
        sealing=dataclasses.replace(sealing, pages=expected_pages),
    )
    poison_empty(monkeypatch)
    out = rope(*arguments, tail, mapping, sealing=sealing)
    assert_close(out.q, expected.q, 2e-3)
    assert_close(tail, expected_tail, 2e-3)
    assert torch.equal(pages, expected_pages)
    assert pages[2].any()
    assert not pages[1].any()


def test_rotary_table_keeps_precision_at_long_positions():
    table = rotary_table(262144, 64, 1e7, torch.device("cpu"))
    angle = 262143 * 1e7 ** (-2 * 3 / 64)
    assert (
        abs(table[262143, 3].item() - torch.tensor(angle, dtype=torch.float64).cos().item()) < 1e-6
    )


def test_interleaved_pairs_are_a_permutation_of_the_halves(monkeypatch):
    """Channels 2 i and 2 i + 1 instead of i and i + half: same numbers in another order."""
    order = torch.cat([torch.arange(16).view(2, 8).t().flatten(), torch.arange(16, 64)])
    q, kv = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    positions, table = (
        torch.tensor([3, 70, 9], dtype=torch.int32),
        rotary_table(80, 16, 1e4, torch.device("cpu")),
    )
    poison_empty(monkeypatch)
    halves = rope(q, kv[:, :1], kv[:, 1:], positions, table)
    arguments = (q[..., order], kv[:, :1][..., order], kv[:, 1:], positions, table)
    pairs, expected = rope(*arguments, interleaved=True), rope_ref(*arguments, interleaved=True)
    assert_close(pairs.q, expected.q, 1e-6)
    assert_close(pairs.q, halves.q[..., order], 1e-6)
    assert_close(pairs.k, halves.k[..., order], 1e-6)

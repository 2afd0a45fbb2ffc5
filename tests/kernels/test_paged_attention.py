"""paged_attention over every codec against one float32 softmax; ragged batches, page edges; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.hadamard import hadamard_ref
from netra_kernels.kv_codec import CODECS, PAGE, encode_page_ref, page_layout
from netra_kernels.paged_attention import AttentionInputs, paged_attention, paged_attention_ref


def make_case(codec, query_lens, sealed_pages, tail_lens, num_q=4, num_kv=2, dim=64, splits=2,
              dtype=torch.bfloat16):  # fmt: skip
    layout = page_layout(codec, num_kv, dim)
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    q_and_gate = torch.randn(num_tokens, num_q, 2 * dim).to(dtype)
    q, gate = q_and_gate[..., :dim].contiguous(), q_and_gate[..., dim:]
    kv = torch.randn(num_tokens, 2 * num_kv, dim).to(dtype)
    num_pages = sum(sealed_pages) + 2
    if codec == "plain":
        pages = torch.randn(num_pages, 2, num_kv, PAGE, dim).to(dtype)
    else:
        encoded = [
            encode_page_ref(*torch.randn(2, num_kv, PAGE, dim), layout) for _ in range(num_pages)
        ]
        pages = torch.stack(encoded)
    table = torch.full((num_seqs, max(sealed_pages) + 1), 10**6, dtype=torch.int32)
    order = torch.randperm(num_pages).tolist()
    for s, count in enumerate(sealed_pages):
        table[s, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    inputs = AttentionInputs(
        block_tables=table,
        slots=torch.randperm(num_seqs).int(),
        num_sealed=PAGE * torch.tensor(sealed_pages, dtype=torch.int32),
        num_tail=torch.tensor(tail_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        max_query_len=max(query_lens),
        num_splits=splits,
    )
    tail = torch.full((num_seqs, 2, num_kv, 128, dim), float("nan"), dtype=dtype)
    for s, count in enumerate(tail_lens):  # rows outside the ring's live part stay NaN
        rows = (int(inputs.num_sealed[s]) + torch.arange(count)) % 128
        tail[inputs.slots[s], :, :, rows] = torch.randn(2, num_kv, count, dim).to(dtype)
    rotated = hadamard_ref(q).to(dtype) if layout.rotates_keys else None
    return {"q": q, "k": kv[:, :num_kv], "v": kv[:, num_kv:], "pages": pages, "tail": tail, "inputs": inputs,
            "layout": layout, "scale": dim**-0.5, "q_rotated": rotated, "gate": gate}  # fmt: skip


def check(monkeypatch, case, limit=6e-3, **options):
    expected = paged_attention_ref(**case, **options)
    poison_empty(monkeypatch)
    out = paged_attention(**case, **options)
    assert_close(out.hidden, expected.hidden, limit)
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("query_lens", [(1, 1), (2, 3)])
def test_decode_and_verify_match_reference(monkeypatch, codec, query_lens):
    case = make_case(codec, query_lens, sealed_pages=(3, 0), tail_lens=(70, 5))
    check(monkeypatch, case, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("codec", CODECS)
def test_prompt_chunk_over_sealed_history_matches_reference(monkeypatch, codec):
    case = make_case(codec, (80, 17), sealed_pages=(2, 1), tail_lens=(9, 0), splits=1)
    check(monkeypatch, case, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "dim", "query_len"), [(8, 1, 256, 4), (3, 1, 64, 5), (2, 2, 128, 16)]
)
def test_head_shapes_and_row_buckets(monkeypatch, codec, num_q, num_kv, dim, query_len):
    case = make_case(codec, (query_len,), (2,), (1,), num_q, num_kv, dim, splits=1)
    check(monkeypatch, case)


@pytest.mark.parametrize(
    ("sealed", "tail", "query"),
    [(0, 0, 1), (0, 0, 2), (1, 0, 1), (1, 63, 1), (1, 64, 2), (2, 127, 1)],
)
def test_page_edges(monkeypatch, sealed, tail, query):
    case = make_case("int8", (query,), (sealed,), (tail,), splits=1 if sealed else 0)
    check(monkeypatch, case)


def test_more_splits_than_pages_and_empty_sequences(monkeypatch):
    case = make_case("plain", (1, 0, 2), (1, 2, 5), (3, 4, 0), splits=4, dtype=torch.float32)
    check(monkeypatch, case, limit=1e-5)


def test_fp8_output_is_the_quantised_hidden(monkeypatch):
    case = make_case("plain", (2,), (1,), (3,), splits=1)
    out = check(monkeypatch, case, fp8=True)
    restored = out.fp8.float().unflatten(-1, (-1, 128)) * out.scales[..., None]
    assert_close(restored.flatten(1), out.hidden.flatten(1).float(), 0.04)


def test_rejected_drafts_leave_no_trace():
    """Rows past the accepted ones change nothing: same output bit by bit with other drafts behind."""
    case = make_case("int8", (3,), (1,), (20,), splits=1)
    first = paged_attention(**case).hidden[0].clone()
    case["k"][1:], case["v"][1:] = 5.0, -5.0
    assert torch.equal(paged_attention(**case).hidden[0], first)

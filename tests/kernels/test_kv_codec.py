"""Page codecs: round trips, byte layouts, and the seal kernel equal to its reference byte by byte; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import Guarded, assert_close, relative_error

from netra_backend import memory_plan
from netra_backend.cache.codecs import QuantizedCodec
from netra_kernels.kv_codec import (
    CODECS,
    PAGE,
    decode_page_ref,
    encode_page_ref,
    page_layout,
)
from netra_kernels.seal import seal, seal_ref

QUANTISED = [codec for codec in CODECS if codec != "plain"]


@pytest.mark.parametrize(
    ("codec", "heads", "dim", "page_bytes"),
    [("int8", 2, 256, 66_048), ("int4", 1, 256, 17_664), ("k8v4", 1, 256, 390 * 64), ("fp8_e4m3", 2, 256, 1024 * 64),
     ("int8", 3, 64, 3 * 132 * 64), ("int4", 3, 64, 3 * 72 * 64)],
)  # fmt: skip
def test_page_bytes_are_those_of_the_design(codec, heads, dim, page_bytes):
    assert page_layout(codec, heads, dim).page_bytes == page_bytes


@pytest.mark.parametrize(("codec", "k_limit", "v_limit"), [("int8", 0.012, 0.012), ("k8v4", 0.012, 0.12),
                                                            ("int4", 0.12, 0.12), ("fp8_e4m3", 0.04, 0.04)])  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_round_trip_error(codec, k_limit, v_limit, dim):
    layout = page_layout(codec, 2, dim)
    k, v = torch.randn(2, PAGE, dim), torch.randn(2, PAGE, dim)
    k_out, v_out = decode_page_ref(encode_page_ref(k, v, layout), layout)
    assert relative_error(k_out, k) < k_limit
    assert relative_error(v_out, v) < v_limit


def test_channel_offsets_cost_the_page_codec_nothing():
    """Keys with constant channel offsets are why int4 scales keys per channel."""
    layout = page_layout("int4", 1, 256)
    noise, v = torch.randn(1, PAGE, 256), torch.randn(1, PAGE, 256)
    offsets = torch.zeros(256)
    offsets[::31] = 40.0
    k_out, _ = decode_page_ref(encode_page_ref(noise + offsets, v, layout), layout)
    assert relative_error(k_out - offsets, noise) < 0.15


def _sequences(heads, dim, dtype):
    """Three sequences: a chunk that fills two pages from tail and chunk, nothing, one page from the tail."""
    tail = torch.randn(4, 2, heads, 128, dim).to(dtype)
    k, v = (torch.randn(150, heads, 2 * dim).to(dtype)[..., :dim] for _ in range(2))
    return {
        "tail": tail,
        "seal_pages": torch.tensor([[5, 2], [-1, -1], [3, -1]], dtype=torch.int32),
        "slots": torch.tensor([2, 0, 1], dtype=torch.int32),
        "num_sealed": torch.tensor([64, 0, 192], dtype=torch.int32),
        "num_tail": torch.tensor([50, 3, 70], dtype=torch.int32),
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, 100, 149, 150], dtype=torch.int32),
    }


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (256, torch.bfloat16)])
def test_seal_writes_the_bytes_of_the_reference(codec, dim, dtype):
    layout = page_layout(codec, 2, dim)
    arguments = _sequences(2, dim, dtype)
    guarded = Guarded(7, layout.page_bytes, dtype=torch.uint8)
    guarded.view.fill_(170)
    expected = guarded.view.clone()
    seal(guarded.view, layout=layout, k_scale=0.5, v_scale=0.25, **arguments)
    seal_ref(expected, layout=layout, k_scale=0.5, v_scale=0.25, **arguments)
    guarded.assert_margins_untouched()
    assert (expected[[0, 1, 4, 6]] == 170).all()
    assert torch.equal(guarded.view, expected)


@pytest.mark.parametrize("dim", [64, 128])
def test_seal_plain_copies_rows(dim):
    layout, arguments = page_layout("plain", 2, dim), _sequences(2, dim, torch.bfloat16)
    guarded = Guarded(7, 2, 2, PAGE, dim, dtype=torch.bfloat16)
    expected = guarded.view.clone()
    seal(guarded.view, layout=layout, **arguments)
    seal_ref(expected, layout=layout, **arguments)
    guarded.assert_margins_untouched()
    assert torch.equal(guarded.view.view(torch.int16), expected.view(torch.int16))
    tail_row = arguments["tail"][1, 0, 1, (192 + 7) % 128]
    assert torch.equal(guarded.view[3, 0, 1, 7], tail_row)


def test_seal_from_the_tail_alone_needs_no_new_rows():
    layout, arguments = page_layout("int8", 2, 64), _sequences(2, 64, torch.float32)
    for name in ("k", "v", "cu_seqlens_q"):
        del arguments[name]
    arguments["seal_pages"] = torch.tensor([[-1], [-1], [0]], dtype=torch.int32)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    seal(pages, layout=layout, **arguments)
    k_out, v_out = decode_page_ref(pages[0], layout)
    rows = (192 + torch.arange(PAGE)) % 128
    assert_close(k_out, arguments["tail"][1, 0][:, rows], 0.012)
    assert_close(v_out, arguments["tail"][1, 1][:, rows], 0.012)


@pytest.mark.parametrize("codec", QUANTISED)
def test_seal_keeps_nan_and_infinity_out_of_the_scales(codec):
    layout, arguments = page_layout(codec, 2, 64), _sequences(2, 64, torch.float32)
    arguments["tail"][1, :, :, 70, 3] = float("nan")
    arguments["tail"][1, :, :, 71, 5] = float("inf")
    pages = torch.zeros(7, layout.page_bytes, dtype=torch.uint8)
    seal(pages, layout=layout, **arguments)
    k_out, v_out = decode_page_ref(pages[3], layout)
    assert k_out.isfinite().all()
    assert v_out.isfinite().all()


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("dim", [64, 256])
def test_pages_are_those_of_the_engines_codec(codec, dim):
    """A page sealed by torch and one sealed by a kernel are the same bytes."""
    engine = QuantizedCodec(memory_plan.page_layout(codec, 2, dim), torch.device("cpu"))
    k, v = 3 * torch.randn(2, PAGE, dim), torch.randn(2, PAGE, dim)
    page = encode_page_ref(k, v, page_layout(codec, 2, dim))
    assert torch.equal(page, engine.seal(k, v).flatten())

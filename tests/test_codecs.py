"""Codecs against an independent decoder: bytes, round trips, attention, and what must not depend on what."""

from __future__ import annotations

import pytest
import torch

from netra_backend.cache.codecs import (
    PlainCodec,
    QuantizedCodec,
    choose_codec,
    hadamard,
    make_codec,
)
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.sequence import PAGE_SIZE
from netra_backend.torch_ops.attention import attend_groups
from netra_kernels.kv_codec import decode_page_ref, encode_page_ref, page_layout

QUANTIZED = ("int8", "k8v4", "int4", "fp8_e4m3")
DIMS = (16, 64, 128, 256)
HEADS = 2
CPU = torch.device("cpu")


def quantized(name: str, dim: int) -> QuantizedCodec:
    codec = make_codec(name, HEADS, dim, torch.float32, CPU)
    assert isinstance(codec, QuantizedCodec)
    return codec


def rows(count: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with channel offsets, as models have them, and values: [count, HEADS, PAGE_SIZE, dim] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, HEADS, PAGE_SIZE, dim)
    offsets = 3 * torch.randn(HEADS, 1, dim, generator=generator)
    keys = torch.randn(shape, generator=generator) + offsets
    return keys, torch.randn(shape, generator=generator)


def decoded(name: str, dim: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [HEADS, tokens, dim] of pages, by the kernels' reference."""
    layout = page_layout(name, HEADS, dim)
    parts = [decode_page_ref(page, layout) for page in pages]
    return torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)


def dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention and its log-sum-exp."""
    scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dim", DIMS)
def test_pages_are_the_kernels_byte_for_byte(name: str, dim: int) -> None:
    keys, values = rows(3, dim)
    layout = page_layout(name, HEADS, dim)
    expected = [encode_page_ref(k, v, layout) for k, v in zip(keys, values, strict=True)]
    assert torch.equal(quantized(name, dim).seal(keys, values), torch.stack(expected))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_rows", [1, 3, 40, 100])
def test_attention_over_joined_pages_equals_dense_attention(
    name: str, dim: int, num_rows: int
) -> None:
    """Few rows fold the scales, many expand the pages; five pages are no multiple of a scratch group."""
    codec = quantized(name, dim)
    codec._group = 2
    pages = codec.seal(*rows(5, dim))
    q = torch.randn(1, HEADS, num_rows, dim)
    out, lse = codec.attend(codec.queries(q), pages.unsqueeze(0))
    expected, expected_lse = dense(q, *decoded(name, dim, pages))
    torch.testing.assert_close(codec.restore(out), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dim", [16, 256])
@pytest.mark.parametrize("num_rows", [3, 100])
def test_each_item_reads_its_own_page(name: str, dim: int, num_rows: int) -> None:
    codec = quantized(name, dim)
    codec._group = 2
    pages = codec.seal(*rows(5, dim))
    q = torch.randn(5, HEADS, num_rows, dim)
    out, lse = codec.attend(codec.queries(q), pages.unsqueeze(1))
    out = codec.restore(out)
    for index in range(5):
        expected, expected_lse = dense(q[index], *decoded(name, dim, pages[index : index + 1]))
        torch.testing.assert_close(out[index], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse[index], expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["plain", *QUANTIZED])
@pytest.mark.parametrize("num_rows", [3, 100])
def test_groups_of_any_size_give_the_same_answer(name: str, num_rows: int) -> None:
    codec = make_codec(name, HEADS, 64, torch.float32, CPU)
    pages = codec.seal(*rows(7, 64))
    queries = codec.queries(torch.randn(1, HEADS, num_rows, 64))
    whole, lse = attend_groups(codec, queries, [pages])
    for size in (1, 2, 3):
        out, part_lse = attend_groups(codec, queries, pages.split(size))
        torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(part_lse, lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "limit"), [("int8", 0.03), ("k8v4", 0.14), ("int4", 0.18), ("fp8_e4m3", 0.12)]
)
@pytest.mark.parametrize("dim", DIMS)
def test_the_answer_stays_close_to_that_of_exact_rows(name: str, limit: float, dim: int) -> None:
    codec = quantized(name, dim)
    keys, values = rows(4, dim)
    q = torch.randn(1, HEADS, 8, dim)
    out, _ = codec.attend(codec.queries(q), codec.seal(keys, values).unsqueeze(0))
    exact, _ = dense(q, keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2))
    assert (codec.restore(out) - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("name", ["plain", *QUANTIZED])
def test_a_page_depends_on_its_own_tokens_only(name: str) -> None:
    codec = make_codec(name, HEADS, 64, torch.float32, CPU)
    keys, values = rows(6, 64)
    together = codec.seal(keys, values)
    for index in range(6):
        assert torch.equal(codec.seal(keys[index], values[index]), together[index])
    in_layers = codec.seal(keys.unflatten(0, (2, 3)), values.unflatten(0, (2, 3)))
    assert torch.equal(in_layers.flatten(0, 1), together)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dim", [16, 256])
def test_nan_and_infinity_stay_out_of_pages(name: str, dim: int) -> None:
    codec = quantized(name, dim)
    keys, values = rows(1, dim)
    for x in (keys, values):
        x[0, 0, 3, 5] = float("nan")
        x[0, 0, 9] = float("inf")
        x[0, 1, 11] = float("-inf")
        x[0, 1, 12, 0] = 1e30
    expanded = codec.expand(codec.seal(keys, values).unsqueeze(0))
    assert all(x.isfinite().all() for x in expanded)
    q = torch.randn(1, HEADS, 3, dim)
    out, lse = codec.attend(codec.queries(q), codec.seal(keys, values).unsqueeze(0))
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_constant_rows_survive(name: str) -> None:
    codec = quantized(name, 64)
    keys = torch.full((1, HEADS, PAGE_SIZE, 64), 2.0)
    values = torch.zeros_like(keys)
    q = torch.ones(1, HEADS, 1, 64)
    out, lse = codec.attend(codec.queries(q), codec.seal(keys, values).unsqueeze(0))
    assert codec.restore(out).abs().max() < 1e-4
    expected = dense(q, keys[0], values[0])[1]
    torch.testing.assert_close(lse, expected, atol=0.1, rtol=1e-3)


def test_every_e4m3_code_is_read_as_torch_reads_it() -> None:
    codes = torch.tensor([c for c in range(256) if c not in (0x7F, 0xFF)], dtype=torch.uint8)
    halves = quantized("fp8_e4m3", 16)._halves(codes.clone())
    assert torch.equal(halves.float() * 256, codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("size", [16, 64, 256])
def test_hadamard_is_its_own_inverse_and_spreads_an_outlier(size: int) -> None:
    x = torch.zeros(size)
    x[3] = 1.0
    rotated = hadamard(x)
    torch.testing.assert_close(rotated.abs(), torch.full((size,), size**-0.5))
    torch.testing.assert_close(hadamard(rotated), x)


def _model(has_qk_norm: bool) -> ModelConfig:
    return ModelConfig(
        "llama", 512, 96, ("full_attention",), 6, 2, 16, 1e-5, 4096, 1e4, 16, True,
        has_qk_norm=has_qk_norm,
    )  # fmt: skip


def test_auto_is_plain_on_a_cpu_and_int8_on_a_gpu() -> None:
    config = EngineConfig()
    assert choose_codec(config, _model(False), CPU) == "plain"
    assert choose_codec(config, _model(False), torch.device("cuda")) == "int8"


def test_fp8_without_normalised_keys_is_refused_unless_asked_for() -> None:
    config = EngineConfig(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match=r"int8 .*allow_fp8_without_qk_norm"):
        choose_codec(config, _model(False), CPU)
    assert choose_codec(config, _model(True), CPU) == "fp8_e4m3"
    forced = EngineConfig(kv_cache_dtype="fp8_e4m3", allow_fp8_without_qk_norm=True)
    assert choose_codec(forced, _model(False), CPU) == "fp8_e4m3"


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int3'.*int8, k8v4"):
        EngineConfig(kv_cache_dtype="int3")


def test_plain_pages_hold_the_rows_themselves() -> None:
    codec = make_codec("plain", HEADS, 16, torch.bfloat16, CPU)
    assert isinstance(codec, PlainCodec)
    keys, values = (x.bfloat16() for x in rows(2, 16))
    assert torch.equal(codec.seal(keys, values), torch.stack((keys, values), 1))

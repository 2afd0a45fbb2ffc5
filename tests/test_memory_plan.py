"""The solver's arithmetic: bytes of the design, bytes that are really allocated, and words when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from netra_backend.cache.host_cache import HostCache
from netra_backend.cache.kv_cache import KVCache
from netra_backend.cache.state_pool import StatePool
from netra_backend.config import ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.memory_plan import (
    FORMATS,
    KVLayout,
    MemoryPlan,
    bits_per_value,
    checkpoint_bytes,
    draft_codec,
    layer_page_bytes,
    opening_codec,
    page_layout,
    pages_for,
    plan_host,
    plan_memory,
    ring_tail_rows,
    slot_layout,
    tail_rows,
)
from netra_backend.sequence import PAGE_SIZE, TAIL_ROWS

SMALL = ModelConfig(
    model_type="qwen3_5_moe",
    vocab_size=512,
    hidden_size=128,
    layer_types=("linear_attention", "linear_attention", "full_attention") * 2,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope_theta=1e7,
    rotary_dim=16,
    tie_word_embeddings=False,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=16,
    conv_kernel=4,
    num_mtp_layers=1,
    has_qk_norm=True,
)
TARGET = replace(
    SMALL,
    layer_types=("linear_attention",) * 30 + ("full_attention",) * 10,
    num_attention_heads=16,
    head_dim=256,
    max_position_embeddings=262_144,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)


def plan(
    model: ModelConfig = SMALL,
    budget: int = 2**26,
    slots: int = 3,
    max_model_len: int = 0,
    element: int = 4,
    state: int = 4,
    drafts: int = 0,
    kv: KVLayout | None = None,
    checkpoints: int = 0,
) -> MemoryPlan:
    return plan_memory(
        model,
        budget_bytes=budget,
        num_slots=slots,
        max_model_len=max_model_len,
        element_bytes=element,
        state_element_bytes=state,
        max_draft_tokens=drafts,
        kv=kv or KVLayout(),
        num_checkpoints=checkpoints,
        checkpoint_element_bytes=2,
    )


@pytest.mark.parametrize(
    ("codec", "heads", "dim", "page_bytes"),
    [
        ("int8", 2, 256, 66_048),
        ("int4", 1, 256, 17_664),
        ("k8v4", 1, 256, 390 * 64),
        ("fp8_e4m3", 2, 256, 1024 * 64),
        ("int8", 3, 64, 3 * 132 * 64),
        ("int4", 3, 64, 3 * 72 * 64),
    ],
)
def test_page_bytes_are_those_of_the_design(
    codec: str, heads: int, dim: int, page_bytes: int
) -> None:
    assert page_layout(codec, heads, dim).page_bytes == page_bytes


@pytest.mark.parametrize("dim", [8, 80, 96])
def test_a_head_size_that_cannot_be_rotated_is_refused(dim: int) -> None:
    with pytest.raises(ConfigError, match=f"head size {dim}"):
        page_layout("int8", 2, dim)


@pytest.mark.parametrize("codec", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [0, 3])
def test_planned_bytes_are_the_allocated_ones(
    codec: str, dtype: torch.dtype, state_dtype: torch.dtype, drafts: int
) -> None:
    opening = opening_codec(codec)
    kv = KVLayout(codec, tail_rows(drafts), 1, draft_codec(codec), opening, openings_per_slot=2)
    made = plan(element=dtype.itemsize, state=state_dtype.itemsize, drafts=drafts, kv=kv)
    device = torch.device("cpu")
    cache = KVCache(SMALL, made, dtype, device)
    layout = slot_layout(SMALL, drafts)
    states = StatePool(SMALL, made, layout, dtype, state_dtype, torch.bfloat16, device)
    layers = cache.layers + cache.draft_layers
    assert len(cache.layers) == 2
    assert len(cache.draft_layers) == 1
    assert sum(layer.pages.nbytes for layer in layers) == made.num_pages * made.page_bytes
    assert sum(layer.tails.nbytes for layer in layers) == made.num_slots * made.tail_bytes
    openings = [layer.opening.pages.nbytes for layer in layers if layer.opening is not None]
    assert len(openings) == (3 if codec == "int4" else 0)
    assert sum(openings) == made.num_opening_pages * made.opening_bytes
    pools = [
        pool
        for layer in states.layers
        for pool in (layer.states, layer.columns, layer.keys, layer.values, layer.gates)
    ]
    assert sum(pool.nbytes for pool in pools) == made.num_slots * made.state_bytes
    assert made.total_bytes <= made.budget_bytes


def test_checkpoints_take_the_planned_bytes_too() -> None:
    made = plan(checkpoints=3)
    layout, device = slot_layout(SMALL, 0), torch.device("cpu")
    states = StatePool(SMALL, made, layout, torch.float32, torch.float32, torch.bfloat16, device)
    saved = [pool for layer in states.layers for pool in (layer.saved_states, layer.saved_columns)]
    assert sum(pool.nbytes for pool in saved) == 3 * made.checkpoint_bytes
    assert made.checkpoint_bytes == checkpoint_bytes(SMALL, 4, 2)


def test_checkpoints_are_taken_from_the_budget_and_named() -> None:
    without, with_them = plan(budget=2**24, slots=8), plan(budget=2**24, slots=8, checkpoints=5)
    lost = without.num_pages - with_them.num_pages
    assert lost == -(-5 * with_them.checkpoint_bytes // with_them.page_bytes)
    assert "5 state checkpoints" in with_them.describe()


@pytest.mark.parametrize(
    ("codec", "opening", "at_least"),
    [
        ("plain", "", 86),
        ("int8", "", 163),
        ("k8v4", "", 203),
        ("int4", "", 262),
        ("int4", "int8", 261),
    ],
)
def test_conversations_of_48k_on_the_target(codec: str, opening: str, at_least: int) -> None:
    """KV of 10 layers and of the MTP layer, float32 states and tails: everything that a conversation holds."""
    kv = KVLayout(codec, tail_rows(0), 1, draft_codec(codec), opening)
    made = plan(TARGET, 101_800_000_000, at_least, 49_152, element=2, kv=kv)
    assert made.num_full_conversations == at_least
    assert f"{at_least} conversations of 49,152 tokens fit" in made.describe()


def test_pages_beyond_what_the_slots_can_use_are_not_made() -> None:
    made = plan(budget=2**28, slots=2, max_model_len=1000)
    assert made.num_pages == 2 * pages_for(1000)
    assert made.num_full_conversations == 2


@pytest.mark.parametrize(("num_tokens", "pages"), [(1, 1), (64, 1), (129, 2), (192, 2), (193, 3)])
def test_the_last_token_of_a_conversation_needs_no_page(num_tokens: int, pages: int) -> None:
    assert pages_for(num_tokens) == pages


def test_max_model_len_0_is_lowered_to_what_fits() -> None:
    made = plan(budget=2_000_000, slots=1)
    assert 0 < made.max_model_len < SMALL.max_position_embeddings
    assert made.num_full_conversations == 1


def test_what_does_not_fit_is_explained_with_numbers_and_remedies() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(budget=1_000_000, slots=4, max_model_len=4096, kv=KVLayout("int8"))
    message = str(caught.value)
    for part in ("1,000,000 bytes", "4 slots", "63 int8 pages", "max_num_seqs", "kv_cache_dtype"):
        assert part in message


def test_a_longer_model_len_than_the_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="4096 positions"):
        plan(max_model_len=5000)


def test_tails_hold_a_page_and_the_drafts() -> None:
    assert tail_rows(0) == PAGE_SIZE
    assert tail_rows(3) == PAGE_SIZE + 8
    for drafts in range(17):  # a page and what waits behind it, then a token and its drafts
        assert PAGE_SIZE + drafts + 1 + drafts <= ring_tail_rows(drafts) <= TAIL_ROWS
    assert tail_rows(1000) == TAIL_ROWS


def test_bits_per_value_include_scales() -> None:
    assert bits_per_value("int8", SMALL, 4) == 8.25
    assert bits_per_value("int4", SMALL, 4) == 4.5
    assert bits_per_value("plain", SMALL, 4) == 32


def test_first_pages_of_int4_are_counted() -> None:
    """Each slot brings its own; a conversation then needs a page less of the others."""
    kv = KVLayout("int4", opening_codec=opening_codec("int4"))
    made = plan(budget=2**24, slots=4, max_model_len=1000, kv=kv)
    assert made.num_opening_pages == 4
    assert made.opening_bytes == 2 * layer_page_bytes(opening_codec("int4"), SMALL, 4)
    assert made.num_pages == 4 * (pages_for(1000) - 1)
    assert made.num_full_conversations == 4
    assert made.kv_bytes(1000) == (pages_for(1000) - 1) * made.page_bytes + made.opening_bytes
    assert made.total_bytes == 4 * (made.kv_bytes(1000) + made.slot_bytes)
    assert f"4 {opening_codec('int4')} first pages" in made.describe()


@pytest.mark.parametrize("codec", ["plain", "int8", "int4"])
def test_the_host_tier_takes_the_planned_bytes(codec: str) -> None:
    kv = KVLayout(codec, opening_codec=opening_codec(codec))
    made = plan_host(plan(budget=2**24, drafts=2, kv=kv), 5_000_000)
    device = torch.device("cpu")
    cache = KVCache(SMALL, made, torch.float32, device)
    layout = slot_layout(SMALL, 2)
    states = StatePool(SMALL, made, layout, *[torch.float32] * 3, device)
    slot_pools = cache.slot_pools + states.slot_pools
    host = HostCache(cache.page_pools, cache.opening_pools, slot_pools, made)
    pools = host._pages + host._openings + host._slots
    assert sum(pool.nbytes for pool in pools) == made.host_bytes
    assert 5_000_000 - made.page_bytes < made.host_bytes <= 5_000_000
    assert made.num_host_slots == {"plain": 1, "int8": 2, "int4": 3}[codec]
    assert (
        f"host: 5 MiB: {made.num_host_pages} pages and {made.num_host_slots} slots"
        in made.describe()
    )


def test_a_host_tier_that_is_too_small_is_explained_and_none_is_none() -> None:
    made = plan(budget=2**24)
    assert plan_host(made, 0) is made
    assert "host" not in made.describe()
    with pytest.raises(
        ConfigError, match=r"host_cache_memory gives 1,000 bytes.* raise it, or set it to 0"
    ):
        plan_host(made, 1000)

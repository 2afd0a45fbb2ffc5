"""paged_attention equals dense attention over what pages stand for, however tokens are cut into steps."""

from __future__ import annotations

import random

import pytest
import torch
from attention_driver import AttentionDriver

CODECS = ("plain", "int8", "k8v4", "int4", "fp8_e4m3", "int4/int8", "plain/int8")
LIMIT = 2e-4
EDGES = [*range(1, 12), *range(58, 72), *range(122, 136), 191, 192, 193, 256]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("in_order", [True, False])
def test_prompts_of_every_length_around_page_edges_and_what_follows(
    codec: str, in_order: bool
) -> None:
    """All prompts in one step, then five tokens each in batches, over pages in order and scattered."""
    driver = AttentionDriver(codec, 64, [length + 5 for length in EDGES])
    if in_order:
        driver.pages_in_order()
    work = [(rows, length, 0) for rows, length in zip(driver.sequences, EDGES, strict=True)]
    assert driver.step(work) < LIMIT
    for _ in range(5):
        assert driver.step([(rows, 1, 0) for rows in driver.sequences]) < LIMIT


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_any_mixture_of_chunks_tokens_and_drafts(codec: str, dim: int) -> None:
    lengths = [130, 64, 200, 129, 90, 300]
    driver = AttentionDriver(codec, dim, lengths, max_drafts=4)
    rng = random.Random(7)
    while True:
        work = []
        for rows in driver.sequences:
            left = rows.seq.num_tokens - rows.seq.num_computed_tokens
            if left > 5 and rng.random() < 0.8:
                chunk = rng.choice([1, 1, 1, 2, 7, 63, 64, 65, 100])
                count = min(chunk, left - 5)
                work.append((rows, count, rng.randrange(5) if count == 1 else 0))
        if all(r.seq.num_tokens - r.seq.num_computed_tokens <= 5 for r in driver.sequences):
            break
        if work:
            assert driver.step(work, accepted=rng.randrange(3)) < LIMIT


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_drafts", [0, 3, 30])
def test_long_sequences_are_read_in_groups(
    codec: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two long sequences and a short one, with groups of so few pages that each has several; 30 drafts make
    so many rows that pages are expanded.
    """
    monkeypatch.setattr("netra_backend.cache.codecs._TEMPORARY_ELEMENTS", 3 * 2 * 64 * 128)
    driver = AttentionDriver(codec, 64, [1400, 1800, 40], max_drafts=num_drafts)
    driver.step([(rows, rows.seq.num_tokens - 8, 0) for rows in driver.sequences])
    for _ in range(3):
        assert driver.step([(rows, 1, num_drafts) for rows in driver.sequences]) < LIMIT


@pytest.mark.parametrize("codec", CODECS)
def test_a_long_prompt_in_chunks_reads_its_history_in_groups(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netra_backend.cache.codecs._TEMPORARY_ELEMENTS", 3 * 2 * 64 * 128)
    driver = AttentionDriver(codec, 64, [1000])
    for count in (500, 100, 37, 200):
        assert driver.step([(driver.sequences[0], count, 0)]) < LIMIT


@pytest.mark.parametrize("codec", CODECS)
def test_pages_do_not_depend_on_drafts_or_on_how_tokens_were_cut(codec: str) -> None:
    """Rejected drafts, chunk sizes and steps leave no trace in sealed bytes."""
    cuts = [[200], [64, 64, 72], [1, 63, 130, 6], [50, *[1] * 20, 130]]
    pages = []
    for number, cut in enumerate(cuts):
        driver = AttentionDriver(codec, 64, [260], max_drafts=3)
        rows = driver.sequences[0]
        rows.kv[:] = torch.randn(rows.kv.shape, generator=torch.Generator().manual_seed(3))
        for count in cut:
            driver.step([(rows, count, 3 if count == 1 and number else 0)])
        driver.step([(rows, 1, 0)])
        assert len(rows.seq.block_table) == 3
        pages.append(driver.stored(rows.seq.block_table))
    for other in pages[1:]:
        assert all(map(torch.equal, other, pages[0]))


@pytest.mark.parametrize("codec", CODECS)
def test_a_sealed_page_is_never_written_again(codec: str) -> None:
    driver = AttentionDriver(codec, 64, [330, 330], max_drafts=3)
    first, second = driver.sequences
    driver.step([(first, 130, 0)])
    kept = list(first.seq.block_table)
    before = driver.stored(kept)
    for _ in range(70):
        driver.step([(first, 1, 3), (second, 1, 0)])
    driver.step([(first, 100, 0), (second, 200, 0)])
    assert all(map(torch.equal, driver.stored(kept), before))


def test_more_drafts_than_the_tail_was_made_for_are_an_error() -> None:
    driver = AttentionDriver("plain", 64, [200])
    driver.step([(driver.sequences[0], 60, 0)])
    with pytest.raises(AssertionError, match="more drafts"):
        driver.step([(driver.sequences[0], 1, 5)])


@pytest.mark.parametrize("codec", CODECS)
def test_bfloat16_rows_stay_within_bfloat16_of_float32(codec: str) -> None:
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        driver = AttentionDriver(codec, 64, [200, 30, 700], dtype=dtype)
        driver.step([(rows, rows.seq.num_tokens - 20, 0) for rows in driver.sequences])
        errors += [driver.step([(rows, count, 0) for rows in driver.sequences]) for count in (1, 9)]
    assert max(errors[:2]) < LIMIT
    assert max(errors[2:]) < 0.05

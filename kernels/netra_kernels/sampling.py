"""Draws one token per row of logits, and applies penalties and masks on the way, without sorting the vocabulary.

logits float32 [num_rows, vocab]. A row's noise depends on (seed, position) alone: key = mix(mix(seed) + position *
GOLDEN), bits of contestant c = mix(key + c * GOLDEN) with SplitMix64's finaliser, time = -log(uniform) / weight, the
smallest time wins. Two rounds, exact since p(i) = p(tile) p(i | tile): first a tile of 128 ids (contestant
2^40 + tile, weight = sum of its w), then an id in it. w = exp((logit - max) / temperature), 0 below the edge.
The edge of top-k, then top-p on what that kept, then min-p (ties with the last one stay) is found by bisection over
the bits of the float: counting and summing passes over the row, none if no filter is on. Penalties, in place, in
vLLM's order: repetition on tokens of prompt or output, frequency, presence; mask bits say what is allowed.
Does not know sequences: a row of a draft gets its own counts through `drafts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 128
GOLDEN = -0x61C8864680B583EB
MIX_1 = -0x40A7B892E31B1A47
MIX_2 = -0x6B2FB644ECCEEE15
TILE_STREAM = 1 << 40
IN_PROMPT = 1 << 14
"""Bit of a count (int16) that says the prompt holds the token; the lower bits count the output."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per row: inverse_temperature float32 (0: greedy), top_k int32 (0: off), top_p float32 (>= 1: off), min_p
    float32, seeds int64, positions int64 (absolute position of the token drawn)."""

    inverse_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """counts int16 [num_slots, vocab] (IN_PROMPT bit and output count), slots int32 [num_rows]; drafts int32
    [num_rows, max_drafts]: tokens assumed emitted before the row, -1 unused; repetition, frequency, presence
    float32 [num_rows]; mask int32 [num_rows, ceil(vocab / 32)], bit set = allowed, or None."""

    counts: torch.Tensor
    slots: torch.Tensor
    drafts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    mask: torch.Tensor | None = None


def mix_ref(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 (Steele, Lea, Flood 2014), shifts logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _times_ref(
    keys: torch.Tensor, contestants: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    bits = (mix_ref(keys + contestants * GOLDEN) >> 41) & ((1 << 23) - 1)
    return -torch.log((bits.float() + 0.5) * 2.0**-23) / weights


def edges_ref(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """Smallest weight that the filters keep of weights [vocab]."""
    ordered = weights.sort(descending=True).values
    edge = min_p
    if 0 < top_k < len(ordered):
        edge = max(edge, float(ordered[top_k - 1]))
        ordered = ordered[ordered >= ordered[top_k - 1]]
    if top_p < 1:
        before = ordered.double().cumsum(0) - ordered.double()
        kept = max(1, int((before < float(ordered.double().sum()) * top_p).sum()))
        edge = max(edge, float(ordered[kept - 1]))
    return edge


def sample_ref(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Reference of `sample` without penalties."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    tiles = -(-vocab // TILE)
    for r in range(num_rows):
        if rows.inverse_temperature[r] == 0:
            out[r] = logits[r].argmax()
            continue
        weights = ((logits[r] - logits[r].max()) * rows.inverse_temperature[r]).exp()
        edge = edges_ref(weights, int(rows.top_k[r]), float(rows.top_p[r]), float(rows.min_p[r]))
        weights = torch.where(weights < edge, 0.0, weights)
        padded = torch.zeros(tiles * TILE, device=logits.device)
        padded[:vocab] = weights
        key = mix_ref(mix_ref(rows.seeds[r]) + rows.positions[r] * GOLDEN)
        contestants = torch.arange(tiles, device=logits.device) + TILE_STREAM
        tile = int(_times_ref(key, contestants, padded.view(-1, TILE).sum(-1)).argmin())
        ids = torch.arange(tile * TILE, (tile + 1) * TILE, device=logits.device)
        out[r] = ids[_times_ref(key, ids, padded[ids]).argmin()]
    return out


def penalize_ref(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Logits after penalties and mask."""
    out = logits.clone()
    for r in range(len(logits)):
        counts = penalties.counts[penalties.slots[r]].int()
        drafts = penalties.drafts[r][penalties.drafts[r] >= 0].long()
        emitted = (counts & (IN_PROMPT - 1)) + torch.bincount(
            drafts, minlength=logits.shape[1]
        ).int()
        seen = (emitted > 0) | (counts >= IN_PROMPT)
        scaled = torch.where(
            out[r] > 0, out[r] / penalties.repetition[r], out[r] * penalties.repetition[r]
        )
        out[r] = torch.where(seen, scaled, out[r])
        out[r] -= penalties.frequency[r] * emitted + penalties.presence[r] * (emitted > 0)
        if penalties.mask is not None:
            ids = torch.arange(logits.shape[1], device=logits.device)
            out[r][(penalties.mask[r][ids // 32] >> (ids % 32)) & 1 == 0] = -torch.inf
    return out


@triton.jit(do_not_specialize=["max_drafts"])
def _penalize_kernel(
    p_logits, p_counts, p_slots, p_drafts, p_repetition, p_frequency, p_presence, p_mask, max_drafts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, PROMPT_BIT: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < VOCAB
    b_z = tl.load(p_logits + i_r * VOCAB + o, mask=inside, other=0.0)
    i_slot = tl.load(p_slots + i_r).to(tl.int64)
    b_count = tl.load(p_counts + i_slot * VOCAB + o, mask=inside, other=0).to(tl.int32)
    b_emitted = b_count & (PROMPT_BIT - 1)
    for i_d in range(max_drafts):
        b_emitted += (o == tl.load(p_drafts + i_r * max_drafts + i_d)).to(tl.int32)
    seen = (b_emitted > 0) | (b_count >= PROMPT_BIT)
    b_repetition = tl.load(p_repetition + i_r)
    b_scaled = tl.where(b_z > 0, b_z / b_repetition, b_z * b_repetition)
    b_z = tl.where(seen, b_scaled, b_z) - tl.load(p_frequency + i_r) * b_emitted.to(tl.float32)
    b_z = b_z - tl.where(b_emitted > 0, tl.load(p_presence + i_r), 0.0)
    if HAS_MASK:
        p_word = p_mask + i_r * ((VOCAB + 31) // 32) + o // 32
        b_bit = (tl.load(p_word, mask=inside, other=0) >> (o % 32)) & 1
        b_z = tl.where(b_bit != 0, b_z, -float("inf"))
    tl.store(p_logits + i_r * VOCAB + o, b_z, mask=inside)


@triton.jit
def _mix(b_z, MIX_A: tl.constexpr, MIX_B: tl.constexpr):
    b_z = (b_z ^ ((b_z >> 30) & 0x3FFFFFFFF)) * MIX_A
    b_z = (b_z ^ ((b_z >> 27) & 0x1FFFFFFFFF)) * MIX_B
    return b_z ^ ((b_z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _times(b_key, b_contestant, b_w, GOLD: tl.constexpr, MIX_A: tl.constexpr, MIX_B: tl.constexpr):
    b_bits = (_mix(b_key + b_contestant * GOLD, MIX_A, MIX_B) >> 41) & 0x7FFFFF
    b_time = -tl.log((b_bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07)
    return tl.where(b_w > 0, b_time / b_w, float("inf"))


@triton.jit
def _above(p_row, i_peak, i_inverse, i_floor, i_edge, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many weights are >= i_floor and > i_edge, and their sum."""
    b_count, b_mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for i in range(0, VOCAB, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_z = tl.load(p_row + o, mask=o < VOCAB, other=-float("inf"))
        b_w = tl.exp((b_z - i_peak) * i_inverse)
        chosen = (b_w > i_edge) & (b_w >= i_floor)
        b_count += chosen.to(tl.int32)
        b_mass += tl.where(chosen, b_w, 0.0)
    return tl.sum(b_count, 0), tl.sum(b_mass, 0)


@triton.jit
def _sample_kernel(
    p_logits, p_inverse, p_top_k, p_top_p, p_min_p, p_seeds, p_positions, p_out,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GOLD: tl.constexpr, MIX_A: tl.constexpr,
    MIX_B: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_r * VOCAB
    TILES: tl.constexpr = BLOCK // 128
    b_best = tl.full([BLOCK], -float("inf"), tl.float32)
    b_id = tl.zeros([BLOCK], tl.int32)
    for i in range(0, VOCAB, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_z = tl.load(p_row + o, mask=o < VOCAB, other=-float("inf"))
        b_id = tl.where(b_z > b_best, o, b_id)
        b_best = tl.maximum(b_best, b_z)
    i_peak = tl.max(b_best, 0)
    i_inverse = tl.load(p_inverse + i_r)
    if i_inverse == 0.0:
        tl.store(p_out + i_r, tl.min(tl.where(b_best == i_peak, b_id, 2147483647), 0))
        return
    # the edge: the largest weight x such that fewer than top_k (or less than the goal) lie above it
    i_floor = tl.load(p_min_p + i_r)
    n_top = tl.load(p_top_k + i_r)
    i_top_p = tl.load(p_top_p + i_r)
    i_kept = 0.0
    if (n_top > 0) & (n_top < VOCAB):
        i_low, i_high = 0, 0x3F800000  # bits of 0.0 and of 1.0, the largest weight
        for _ in range(30):
            i_middle = (i_low + i_high) // 2
            n_above, i_mass = _above(
                p_row, i_peak, i_inverse, 0.0, i_middle.to(tl.float32, bitcast=True), VOCAB, BLOCK
            )
            i_low = tl.where(n_above >= n_top, i_middle + 1, i_low)
            i_high = tl.where(n_above >= n_top, i_high, i_middle)
        i_kept = i_low.to(tl.float32, bitcast=True)
        i_floor = tl.maximum(i_floor, i_kept)
    if i_top_p < 1.0:
        n_above, i_total = _above(p_row, i_peak, i_inverse, i_kept, -1.0, VOCAB, BLOCK)
        i_low, i_high = 0, 0x3F800000
        for _ in range(30):
            i_middle = (i_low + i_high) // 2
            i_edge = i_middle.to(tl.float32, bitcast=True)
            n_above, i_mass = _above(p_row, i_peak, i_inverse, i_kept, i_edge, VOCAB, BLOCK)
            i_low = tl.where(i_mass >= i_top_p * i_total, i_middle + 1, i_low)
            i_high = tl.where(i_mass >= i_top_p * i_total, i_high, i_middle)
        i_floor = tl.maximum(i_floor, i_low.to(tl.float32, bitcast=True))
    i_key = _mix(tl.load(p_seeds + i_r), MIX_A, MIX_B) + tl.load(p_positions + i_r) * GOLD
    i_key = _mix(i_key, MIX_A, MIX_B)
    i_first, i_tile = float("inf"), 0
    for i in range(0, VOCAB, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_z = tl.load(p_row + o, mask=o < VOCAB, other=-float("inf"))
        b_w = tl.exp((b_z - i_peak) * i_inverse)
        b_w = tl.reshape(tl.where(b_w >= i_floor, b_w, 0.0), [TILES, 128])
        o_tile = i // 128 + tl.arange(0, TILES)
        b_time = _times(i_key, o_tile.to(tl.int64) + STREAM, tl.sum(b_w, 1), GOLD, MIX_A, MIX_B)
        i_time = tl.min(b_time, 0)
        i_winner = tl.min(tl.where(b_time == i_time, o_tile, 2147483647), 0)
        i_tile = tl.where(i_time < i_first, i_winner, i_tile)
        i_first = tl.minimum(i_first, i_time)
    o = i_tile * 128 + tl.arange(0, 128)
    b_z = tl.load(p_row + o, mask=o < VOCAB, other=-float("inf"))
    b_w = tl.exp((b_z - i_peak) * i_inverse)
    b_w = tl.where(b_w >= i_floor, b_w, 0.0)
    b_time = _times(i_key, o.to(tl.int64), b_w, GOLD, MIX_A, MIX_B)
    tl.store(p_out + i_r, tl.min(tl.where(b_time == tl.min(b_time, 0), o, 2147483647), 0))


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply penalties and mask to `logits` in place."""
    num_rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert penalties.counts.is_contiguous()
    assert penalties.counts.shape[1] == vocab
    block = min(4096, triton.next_power_of_2(vocab))
    _penalize_kernel[(num_rows, triton.cdiv(vocab, block))](
        logits, penalties.counts, penalties.slots, penalties.drafts, penalties.repetition,
        penalties.frequency, penalties.presence, penalties.mask, penalties.drafts.shape[1],
        VOCAB=vocab, BLOCK=block, HAS_MASK=penalties.mask is not None, PROMPT_BIT=IN_PROMPT, num_warps=8,
    )  # fmt: skip


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids int32 [num_rows]; every row needs a finite maximum."""
    num_rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    block = min(8192, max(TILE, triton.next_power_of_2(vocab)))
    _sample_kernel[(num_rows,)](
        logits, rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions, out,
        VOCAB=vocab, BLOCK=block, GOLD=GOLDEN, MIX_A=MIX_1, MIX_B=MIX_2, STREAM=TILE_STREAM, num_warps=16,
    )  # fmt: skip
    return out

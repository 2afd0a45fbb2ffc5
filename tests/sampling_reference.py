"""Slow, obvious sampling in plain Python, sequences and logits for the tests of the sampler.

One token at a time, one feature after the other; no torch but for the tensors that tests hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from netra_backend.batch import ScheduledSequence
from netra_backend.request import Request, SamplingParams
from netra_backend.sampler import Sampler
from netra_backend.sequence import Sequence

EOS = frozenset((2, 7))
MASK64 = (1 << 64) - 1

Model = Callable[[list[int]], np.ndarray]


def random_model(vocab_size: int, scale: float = 3.0, step: float = 0.0) -> Model:
    """Logits as a pure function of the tokens so far; `step` > 0 rounds them, which makes ties."""

    def logits(tokens: list[int]) -> np.ndarray:
        rng = np.random.default_rng([len(tokens), *tokens[-3:], 99])
        row = rng.normal(size=vocab_size).astype(np.float32) * np.float32(scale)
        return np.round(row / step).astype(np.float32) * np.float32(step) if step else row

    return logits


def make_sequence(
    params: SamplingParams,
    prompt: list[int],
    output: list[int] | None = None,
    *,
    seq_id: int = 0,
    seed: int = 1234,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
) -> Sequence:
    request = Request(str(seq_id), tuple(prompt), params, 0.0, bad_word_ids=bad_word_ids)
    return Sequence(seq_id, request, prompt + (output or []), len(prompt), seed)


def make_item(seq: Sequence, drafts: list[int] | None = None) -> ScheduledSequence:
    drafts = drafts or []
    return ScheduledSequence(
        seq, 1 + len(drafts), draft_token_ids=drafts, num_logits=1 + len(drafts)
    )


def make_logits(model: Model, items: list[ScheduledSequence]) -> torch.Tensor:
    rows = [
        model(item.seq.token_ids + item.draft_token_ids[:j])
        for item in items
        for j in range(item.num_logits)
    ]
    return torch.from_numpy(np.stack(rows))


def make_sampler(vocab_size: int) -> Sampler:
    return Sampler(vocab_size, EOS, torch.device("cpu"))


def edited_logits(seq: Sequence, tokens: list[int], raw: np.ndarray) -> np.ndarray:
    """What is left to choose from after `tokens`, before temperature; float32 throughout."""
    params = seq.request.params
    output = tokens[seq.num_prompt_tokens :]
    row = raw.copy()
    for token_id, value in params.logit_bias.items():
        if 0 <= token_id < len(row):
            row[token_id] += np.float32(value)
    if len(output) < params.min_tokens:
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
        for token_id in stops:
            if token_id < len(row):
                row[token_id] = -np.inf
    for word in seq.request.bad_word_ids:
        prefix = list(word[:-1])
        if not prefix or (len(output) >= len(prefix) and output[-len(prefix) :] == prefix):
            row[word[-1]] = -np.inf
    penalise(params, row, tokens, output)
    return raw.copy() if row.max() == -np.inf else row


def penalise(params: SamplingParams, row: np.ndarray, tokens: list[int], output: list[int]) -> None:
    for token_id in range(len(row)):
        if token_id in tokens and params.repetition_penalty != 1:
            factor = np.float32(params.repetition_penalty)
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
        count = output.count(token_id)
        if count:
            row[token_id] -= np.float32(params.frequency_penalty * count + params.presence_penalty)


def filtered_weights(params: SamplingParams, row: np.ndarray) -> np.ndarray:
    """Unnormalised probabilities after temperature, top-k, top-p and min-p; ties stay."""
    weights = np.exp((row.astype(np.float64) - float(row.max())) / params.temperature)
    if 0 < params.top_k < len(row):
        weights[row < np.sort(row)[-params.top_k]] = 0
    if params.top_p < 1:
        total, mass, edge = weights.sum(), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if mass >= params.top_p * total:
                break
            mass, edge = mass + weight, weight
        weights[weights < edge * (1 - 1e-9)] = 0
    weights[weights < params.min_p] = 0
    return weights


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def exponential(seed: int, position: int, counter: int) -> float:
    key = mix((mix(seed & MASK64) + position * 0x9E3779B97F4A7C15) & MASK64)
    bits = mix((key + counter * 0x9E3779B97F4A7C15) & MASK64) >> 11
    return -math.log((bits + 0.5) * 2.0**-53)


def race(seed: int, position: int, weights: dict[int, float]) -> int:
    times = {i: exponential(seed, position, i) / w for i, w in weights.items() if w > 0}
    return min(times, key=lambda i: times[i])


def reference_token(seq: Sequence, tokens: list[int], raw: np.ndarray) -> int:
    params = seq.request.params
    row = edited_logits(seq, tokens, raw)
    if params.greedy:
        return int(np.argmax(row))
    weights = filtered_weights(params, row)
    kept = [int(i) for i in weights.nonzero()[0]]
    tiles: dict[int, float] = {}
    for i in kept:
        tiles[(1 << 40) + i // 128] = tiles.get((1 << 40) + i // 128, 0.0) + float(weights[i])
    tile = race(seq.seed, len(tokens), tiles) - (1 << 40)
    inside = {i: float(weights[i]) for i in kept if i // 128 == tile}
    return race(seq.seed, len(tokens), inside)


def reference_tokens(seq: Sequence, model: Model, count: int) -> list[int]:
    """Plain decoding: the next `count` tokens."""
    tokens = list(seq.token_ids)
    for _ in range(count):
        tokens.append(reference_token(seq, tokens, model(tokens)))
    return tokens[len(seq.token_ids) :]


GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 9, 9, 14, 30, 31, 5]
BAD_WORDS = ((11,), (3, 4), (9, 14, 30), (31, 5, 8), (40, 41, 42, 43))

FEATURES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 9.0, 4: -50.0, 10**9: 5.0, -1: 5.0}),
    "min_tokens": SamplingParams(
        temperature=0.0, min_tokens=5, stop_token_ids=(3, 10**9), logit_bias=dict.fromkeys((2, 3, 7), 30.0)
    ),
    "min_tokens_ignore_eos": SamplingParams(
        temperature=0.0, min_tokens=5, ignore_eos=True, logit_bias={2: 30.0, 7: 30.0}
    ),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "repetition_below_1": SamplingParams(temperature=0.0, repetition_penalty=0.6),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.9),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=1.3),
    "negative_penalties": SamplingParams(
        temperature=0.0, frequency_penalty=-1.0, presence_penalty=-0.5
    ),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.7, presence_penalty=0.4
    ),
    "temperature": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=5.0),
    "top_k": SamplingParams(temperature=1.5, top_k=7),
    "top_k_1": SamplingParams(temperature=1.5, top_k=1),
    "top_k_100": SamplingParams(temperature=4.0, top_k=100),
    "top_k_beyond": SamplingParams(temperature=1.5, top_k=10**6),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "top_p_wide": SamplingParams(temperature=6.0, top_p=0.97),
    "top_p_tiny": SamplingParams(temperature=1.0, top_p=1e-300),
    "min_p": SamplingParams(temperature=2.0, min_p=0.1),
    "min_p_wide": SamplingParams(temperature=9.0, min_p=0.05),
    "min_p_1": SamplingParams(temperature=2.0, min_p=1.0),
    "filters": SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.02),
    "filters_wide": SamplingParams(temperature=8.0, top_p=0.9, min_p=0.08),
    "everything": SamplingParams(
        temperature=1.1,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.3,
        frequency_penalty=0.6,
        logit_bias={1: 2.0, 6: -3.0},
        min_tokens=6,
        stop_token_ids=(12,),
    ),
}  # fmt: skip

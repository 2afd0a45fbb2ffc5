"""Training batches from the token files of prep.py: rows of plain text, rows of packed chat items.

A row of chat starts at the start of an item, so every answer in it can see its whole prompt.
Batches are a function of the step alone: a resumed run sees what an uninterrupted one would have.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Shares of the text rows; literature is hard and large, so it gets less than its size.
TEXT_SHARES = {"pydoc": 0.42, "stdlib": 0.36, "literature": 0.16, "jargon": 0.06}
AHEAD = 2  # a row holds two tokens more than its length: next-token and MTP targets


@dataclass(slots=True, frozen=True)
class Batch:
    """ids and weights `[rows, length + 2]`, positions `[rows, length]`."""

    ids: Tensor
    weights: Tensor
    positions: Tensor


@dataclass(slots=True, frozen=True)
class Chat:
    """Tokens of all items and `[items, 4]` rows of (start, answer, end, task)."""

    tokens: np.ndarray
    rows: np.ndarray
    tasks: list[str]

    def item(self, index: int) -> tuple[np.ndarray, int]:
        """Token ids of one item, and how many of them are the prompt."""
        start, answer, end, _ = self.rows[index]
        return self.tokens[start:end], int(answer - start)


@dataclass(slots=True, frozen=True)
class Corpus:
    texts: dict[str, np.ndarray]
    chat: Chat


def load_corpus(folder: Path, split: str) -> Corpus:
    texts = {s: np.fromfile(folder / f"{split}-{s}.bin", dtype=np.uint16) for s in TEXT_SHARES}
    tokens = np.fromfile(folder / f"{split}-chat.bin", dtype=np.uint16)
    rows = np.load(folder / f"{split}-chat-rows.npy")
    tasks = json.loads((folder / f"{split}-chat-tasks.json").read_text())
    return Corpus(texts, Chat(tokens, rows, tasks))


@dataclass(slots=True, frozen=True)
class Mix:
    """Rows per batch and their length, and what they are made of.

    `chat_share` of the rows are packed chat items, the others text; a prompt's tokens weigh
    `prompt_weight` in the loss, all others 1; `stretched` of the rows get stretched positions.
    """

    rows: int
    length: int
    chat_share: float = 0.5
    prompt_weight: float = 0.3
    stretched: float = 0.2
    limit: int = 32768


def text_row(corpus: Corpus, length: int, rng: np.random.Generator) -> np.ndarray:
    source = rng.choice(list(TEXT_SHARES), p=list(TEXT_SHARES.values()))
    tokens = corpus.texts[source]
    start = rng.integers(0, len(tokens) - length - AHEAD)
    return tokens[start : start + length + AHEAD]


def chat_row(
    chat: Chat, fitting: np.ndarray, mix: Mix, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Whole items one after the other; only the last may be cut."""
    tokens, weights, size, end = [], [], 0, mix.length + AHEAD
    while size < end:
        ids, prompt = chat.item(rng.choice(fitting))
        item_weights = np.ones(len(ids), dtype=np.float32)
        item_weights[:prompt] = mix.prompt_weight
        tokens.append(ids)
        weights.append(item_weights)
        size += len(ids)
    return np.concatenate(tokens)[:end], np.concatenate(weights)[:end]


def stretched_positions(length: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Positions with one to three jumps that reach up to `limit`.

    Short rows then show every relative distance of the rotary embedding that a long context will.
    """
    steps = np.ones(length, dtype=np.int64)
    jumps = rng.integers(1, 4)
    span = int(np.exp(rng.uniform(np.log(length), np.log(limit - length))))
    places = rng.integers(1, length, jumps)
    steps[places] += span // jumps
    steps[0] = rng.integers(0, 64)
    return np.minimum(np.cumsum(steps), limit - 1)


def make_batch(corpus: Corpus, mix: Mix, step: int) -> Batch:
    rng = np.random.default_rng([17, step])
    sizes = corpus.chat.rows[:, 2] - corpus.chat.rows[:, 0]
    fitting = np.flatnonzero(sizes <= mix.length)
    ids = np.empty((mix.rows, mix.length + AHEAD), dtype=np.int64)
    weights = np.ones((mix.rows, mix.length + AHEAD), dtype=np.float32)
    positions = np.tile(np.arange(mix.length), (mix.rows, 1))
    for row in range(mix.rows):
        if rng.random() < mix.chat_share:
            ids[row], weights[row] = chat_row(corpus.chat, fitting, mix, rng)
        else:
            ids[row] = text_row(corpus, mix.length, rng)
        if rng.random() < mix.stretched:
            positions[row] = stretched_positions(mix.length, mix.limit, rng)
    return Batch(torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(positions))

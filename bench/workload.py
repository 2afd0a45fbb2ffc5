"""Workloads: prompts of real text with an exact token count, lengths and arrivals, all from a seed.

The text is what the running interpreter carries: the standard library's sources and pydoc's topics
(PSF licence), so nothing is fetched and a Python version names it. Knows neither engine nor server.
Invariant: the same interpreter, tokenizer and seed give the same prompts, and no two prompts share
their first page of tokens unless a shared prefix is asked for.
"""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Protocol

_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
_DISTINCT_TOKENS = 64
_MAX_TRIES = 1000


class TextTokenizer(Protocol):
    """The part of netra_backend.tokenizer.Tokenizer that a workload needs."""

    def encode(self, text: str) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Corpus:
    """Named documents in a fixed order; `description` says where they are from, with their hash."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    description: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, `tokenizer.encode(text) == token_ids`; `source` names its first document."""

    text: str
    token_ids: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: fixed, uniform or log-normal, cut to [low, high]."""

    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, `64-512` (uniform) or `lognormal:MEDIAN:SIGMA:MAX`. Raises ValueError."""
        if text.startswith("lognormal:"):
            _, median, sigma, high = text.split(":")
            lengths = cls(1, int(high), float(median), float(sigma))
        else:
            low, _, upper = text.partition("-")
            lengths = cls(int(low), int(upper or low))
        if not 1 <= lengths.low <= lengths.high or lengths.median < 0 or lengths.sigma < 0:
            raise ValueError(f"not a length distribution: {text!r}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.median == 0:
            return rng.randint(self.low, self.high)
        value = self.median * rng.lognormvariate(0.0, self.sigma)
        return min(max(round(value), self.low), self.high)


def poisson_arrivals(rate: float, count: int, rng: random.Random) -> list[float]:
    """Arrival times in seconds of `count` independent requests, `rate` a second on average."""
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def standard_library() -> Corpus:
    """The interpreter's own sources and documentation topics, without tests and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = {f"topic {name}": text for name, text in topics.items()}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED.isdisjoint(relative.parts) and not relative.name.startswith("_sysconfigdata"):
            documents[str(relative)] = path.read_text(encoding="utf-8", errors="replace")
    names = tuple(sorted(name for name, text in documents.items() if len(text) > 1000))
    texts = tuple(documents[name] for name in names)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    size = sum(map(len, texts)) / 1e6
    python = platform.python_version()
    description = (
        f"CPython {python} standard library and pydoc topics (PSF), {size:.1f} MB, {digest[:16]}"
    )
    return Corpus(names, texts, description)


class PromptMaker:
    """Makes prompts from a corpus with one tokenizer.

    Prompts differ in their first tokens from all others of the same maker; with
    `shared_prefix_len`, all start with the same tokens and differ after them.
    """

    def __init__(
        self, tokenizer: TextTokenizer, corpus: Corpus, seed: int, shared_prefix_len: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._corpus = corpus
        self._rng = random.Random(seed)
        self._heads: set[tuple[int, ...]] = set()
        self._num_special = len(tokenizer.encode("x")) - len(tokenizer.encode_plain("x"))
        self._prefix: list[int] = []
        if shared_prefix_len:
            self._prefix = self._tokens(shared_prefix_len, self._start())

    def make(self, num_tokens: int) -> Prompt:
        """A prompt that encodes to exactly `num_tokens`. Raises ValueError if none can be found."""
        own_len = num_tokens - self._num_special - len(self._prefix)
        if own_len < 1:
            raise ValueError(f"{num_tokens} tokens leave no room beside the shared prefix")
        for _ in range(_MAX_TRIES):
            start = self._start()
            own = self._tokens(own_len, start)
            head = tuple(own[:_DISTINCT_TOKENS])
            if head in self._heads:
                continue
            text = self._tokenizer.decode(self._prefix + own, skip_special_tokens=False)
            token_ids = self._tokenizer.encode(text)
            # A cut inside a word may encode otherwise than it was cut; then start elsewhere.
            if len(token_ids) == num_tokens and "\ufffd" not in text:
                self._heads.add(head)
                return Prompt(text, tuple(token_ids), self._corpus.names[start[0]])
        raise ValueError(f"no text of exactly {num_tokens} tokens found in {_MAX_TRIES} tries")

    def _start(self) -> tuple[int, int]:
        """Document and offset of a random line."""
        index = self._rng.randrange(len(self._corpus.texts))
        text = self._corpus.texts[index]
        return index, text.rfind("\n", 0, self._rng.randrange(len(text))) + 1

    def _tokens(self, count: int, start: tuple[int, int]) -> list[int]:
        """`count` tokens from `start` on, running into the following documents."""
        index, offset = start
        token_ids: list[int] = []
        text = ""
        while len(token_ids) < count:
            while len(text) < 6 * count:
                text += self._corpus.texts[index][offset:]
                index, offset = (index + 1) % len(self._corpus.texts), 0
            token_ids += self._tokenizer.encode_plain(text[: 6 * count])
            text = text[6 * count :]
        return token_ids[:count]


def make_prompts(
    tokenizer: TextTokenizer,
    count: int,
    lengths: Lengths,
    seed: int,
    shared_prefix_len: int = 0,
) -> tuple[list[Prompt], str]:
    """`count` distinct prompts from the standard library, and the description of their source."""
    corpus = standard_library()
    maker = PromptMaker(tokenizer, corpus, seed, shared_prefix_len)
    rng = random.Random(seed)
    return [maker.make(lengths.draw(rng)) for _ in range(count)], corpus.description

"""What a client asks for and what it gets: Request, SamplingParams, RequestOutput, FinishReason.

Knows neither the server nor torch. A Request is immutable and already validated against everything
that does not need the model; limits that need the engine (context length, vocabulary) are checked by
the scheduler when the request is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum

from netra_backend.errors import RequestError


class FinishReason(Enum):
    """Why a request ended; the value is what the client reads."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, with the names and the meaning that vLLM gives them.

    `seed=None` draws a seed per request. `logprobs=n` returns the chosen token and the n most likely ones.
    Raises RequestError (`invalid_request`) for values outside their range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature < math.inf, "0 (greedy) or positive"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off) or positive"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "positive"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("stop", all(self.stop), "free of empty strings"),
            ("bad_words", all(self.bad_words), "free of empty strings"),
            ("logit_bias", all(math.isfinite(v) for v in self.logit_bias.values()), "finite"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("n", self.n == 1, "1: several answers per request are not supported yet"),
        )
        for name, valid, expected in checks:
            if not valid:
                value = getattr(self, name)
                raise RequestError("invalid_request", f"{name}={value!r} must be {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no randomness."""
        return self.temperature < 1e-5

    @staticmethod
    def names() -> tuple[str, ...]:
        """All parameter names, for error messages and coercion."""
        return tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt in token ids and what to do with it.

    `deadline` is on the engine's clock in seconds (None: no limit). `priority`: lower is served first.
    `bad_word_ids` are `params.bad_words` in tokens, each possible spelling a tuple.
    Only requests with equal `cache_salt` share prefixes.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    deadline: float | None = None
    priority: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("invalid_request", "the prompt is empty")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the distribution before temperature.

    `token_id`, `logprob`, `rank` (1 = most likely) describe the chosen token; `top` the n most likely
    as (token_id, logprob) in descending order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What happened to one request since its previous output.

    `text`, `token_ids` and `logprobs` are deltas (a token's text may come later than its id while bytes
    or a possible stop string are held back); the counters are totals. The last output of a request, and
    only that one, has a `finish_reason`; `error` is set when that is ERROR or ABORT.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    cumulative_logprob: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None

"""RequestLimits: what a request may ask of this deployment, and at which token its answer ends.

Constants only, so any thread may ask. Knows no other request and no memory in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from netra_backend.batch import SequenceOutput
from netra_backend.errors import RequestError
from netra_backend.request import FinishReason, Request
from netra_backend.sequence import PAGE_SIZE, Sequence


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`max_model_len` tokens of prompt and answer; `num_pages` in the whole cache; ids below
    `vocab_size`."""

    max_model_len: int
    num_pages: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def max_output(self, request: Request) -> int:
        """Most tokens that the answer may have."""
        return min(request.params.max_tokens, self.max_model_len - len(request.prompt_token_ids))

    def validate(self, request: Request) -> None:
        """Raise RequestError if `request` can never be served."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt >= self.max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {num_prompt} tokens; with at least one token of output the limit is "
                f"{self.max_model_len} (max_model_len)",
            )
        num_output = self.max_output(request)
        # The last token of an answer is never computed.
        pages = (num_prompt + num_output - 1) // PAGE_SIZE
        if pages > self.num_pages:
            raise RequestError(
                "prompt_too_long",
                f"{num_prompt} prompt tokens and up to {num_output} output tokens need {pages} pages of "
                f"{PAGE_SIZE} tokens, the whole cache has {self.num_pages}: at most "
                f"{(self.num_pages + 1) * PAGE_SIZE} tokens in all can fit",
            )
        self._validate_token_ids(request)

    def _validate_token_ids(self, request: Request) -> None:
        params = request.params
        for name, token_ids in (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("bad_words", [token_id for word in request.bad_word_ids for token_id in word]),
        ):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
                raise RequestError(
                    "invalid_request",
                    f"{name}: token ids must be in [0, {self.vocab_size}), "
                    f"got {min(token_ids)} to {max(token_ids)}",
                )

    def end_token_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end the answer: end-of-text unless it is ignored, and the request's own."""
        params = request.params
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        return ends.union(params.stop_token_ids) if params.stop_token_ids else ends


def commit_tokens(seq: Sequence, result: SequenceOutput) -> int:
    """Append a step's tokens to `seq` up to the one that ends it (finish_reason is then set).

    Returns how many were kept. A token of `end_token_ids` counts once min_tokens others precede it.
    """
    new, committed = result.token_ids, seq.token_ids
    assert new, "the runner returned no token where one was due"
    room = seq.max_num_tokens - len(committed)
    if len(new) >= room:
        new = new[:room]
        seq.finish_reason = FinishReason.LENGTH
    if not seq.end_token_ids.isdisjoint(new):
        num_protected = seq.request.params.min_tokens - seq.num_output_tokens
        for index in range(max(0, num_protected), len(new)):
            if new[index] in seq.end_token_ids:
                new = new[: index + 1]
                seq.finish_reason = FinishReason.STOP
                break
    committed.extend(new)
    if result.logprobs:
        seq.logprobs.extend(result.logprobs[: len(new)])
        seq.cumulative_logprob += sum(each.logprob for each in result.logprobs[: len(new)])
    return len(new)

"""LiveRequest: what the client of one request has received, and what it receives next.

Turns the tokens that a sequence gained into RequestOutputs: deltas of ids, text and logprobs. Knows no
scheduling and no threads. The same tokens give the same outputs in sum, however many come at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from netra_backend.request import FinishReason, Request, RequestOutput
from netra_backend.sequence import Sequence

if TYPE_CHECKING:
    from netra_backend.tokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between its arrival and its final output; `seq` is None until the scheduler has it."""

    request: Request
    detokenizer: Detokenizer
    seq: Sequence | None = None
    num_sent_tokens: int = 0
    cumulative_logprob: float = 0.0

    def next_output(self, seq: Sequence) -> RequestOutput:
        """What is new. The last one has the sequence's finish_reason, or STOP at a stop string."""
        reason = seq.finish_reason
        token_ids = seq.token_ids[seq.num_prompt_tokens + self.num_sent_tokens :]
        ends_by_token = reason is FinishReason.STOP
        shows_end = self.request.params.include_stop_str_in_output
        num_shown = len(token_ids) - (ends_by_token and not shows_end)
        text, num_read = self._read(token_ids[:num_shown])
        if self.detokenizer.stopped:
            reason = FinishReason.STOP
            token_ids = token_ids[:num_read]
        elif reason is not None:
            text += self.detokenizer.finish()
        logprobs = seq.logprobs[self.num_sent_tokens :][: len(token_ids)]
        self.num_sent_tokens += len(token_ids)
        self.cumulative_logprob += sum(each.logprob for each in logprobs)
        return RequestOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=self.num_sent_tokens,
            cumulative_logprob=self.cumulative_logprob if seq.logprobs else None,
            num_draft_tokens=seq.num_draft_tokens,
            num_accepted_tokens=seq.num_accepted_tokens,
            finish_reason=reason,
        )

    def _read(self, token_ids: list[int]) -> tuple[str, int]:
        """Text of the tokens up to the one that completes a stop string, and how many those are."""
        if not self.request.params.stop:
            return self.detokenizer.push(token_ids), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self.detokenizer.push((token_id,))
            if self.detokenizer.stopped:
                return text, count
        return text, len(token_ids)

    def ended(self, reason: FinishReason, error: Exception) -> RequestOutput:
        """The final output of a request that did not end by itself."""
        seq = self.seq
        return RequestOutput(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=seq.num_cached_tokens if seq else 0,
            num_output_tokens=self.num_sent_tokens,
            num_draft_tokens=seq.num_draft_tokens if seq else 0,
            num_accepted_tokens=seq.num_accepted_tokens if seq else 0,
            finish_reason=reason,
            error=error,
        )

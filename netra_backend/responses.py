"""One RequestOutput, or several merged, to the arrays of one response.

Knows the output tensors of the dialect (names, types, which flag asks for which); neither the
server's objects nor when a response is sent. `text_output` is in every response, any other one only
if asked for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np

from netra_backend.request import RequestOutput, TokenLogprobs
from netra_backend.request_parser import Array, ResponseOptions

OUTPUTS: tuple[tuple[str, str, int], ...] = (
    ("text_output", "TYPE_STRING", -1),
    ("finish_reason", "TYPE_STRING", -1),
    ("cumulative_logprob", "TYPE_FP32", -1),
    ("logprobs", "TYPE_STRING", -1),
    ("num_input_tokens", "TYPE_UINT32", 1),
    ("num_output_tokens", "TYPE_UINT32", -1),
    ("num_cached_tokens", "TYPE_UINT32", 1),
    ("acceptance_rate", "TYPE_FP32", 1),
    ("total_draft_tokens", "TYPE_INT32", 1),
    ("total_accepted_draft_tokens", "TYPE_INT32", 1),
)
"""Name, type and length (-1: any) of every output tensor."""

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write (the value that vLLM sends)."""

NamedArray = tuple[str, Array]


def merge_outputs(parts: Sequence[RequestOutput]) -> RequestOutput:
    """One output with the deltas of all `parts` (at least one) and the totals of the last."""
    if len(parts) == 1:
        return parts[0]
    return dataclasses.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
    )


def response_arrays(
    output: RequestOutput, options: ResponseOptions, token_text: Callable[[int], str]
) -> list[NamedArray]:
    """The tensors of one response. `num_output_tokens` and `logprobs` are deltas, the others
    totals."""
    arrays = [_strings("text_output", options.echo + output.text)]
    if options.finish_reason:
        reason = output.finish_reason
        arrays.append(_strings("finish_reason", "None" if reason is None else reason.value))
    if options.cumulative_logprob:
        total = output.cumulative_logprob
        arrays.append(
            ("cumulative_logprob", np.array([0.0 if total is None else total], np.float32))
        )
    if options.logprobs:
        arrays.append(_strings("logprobs", _logprobs_json(output.logprobs, token_text)))
    if options.num_input_tokens:
        arrays.append(_count("num_input_tokens", output.num_prompt_tokens))
    if options.num_output_tokens:
        arrays.append(_count("num_output_tokens", len(output.token_ids)))
    if options.num_cached_tokens:
        arrays.append(_count("num_cached_tokens", output.num_cached_tokens))
    if options.perf_metrics:
        arrays += _draft_arrays(output)
    return arrays


def _draft_arrays(output: RequestOutput) -> list[NamedArray]:
    drafts, accepted = output.num_draft_tokens, output.num_accepted_tokens
    return [
        ("acceptance_rate", np.array([accepted / drafts if drafts else 0.0], np.float32)),
        ("total_draft_tokens", np.array([drafts], np.int32)),
        ("total_accepted_draft_tokens", np.array([accepted], np.int32)),
    ]


def _strings(name: str, text: str) -> NamedArray:
    return name, np.array([text.encode("utf-8")], dtype=np.object_)


def _count(name: str, value: int) -> NamedArray:
    return name, np.array([value], np.uint32)


def _logprobs_json(entries: Sequence[TokenLogprobs], token_text: Callable[[int], str]) -> str:
    """One object per new token: token id -> logprob, rank, decoded_token; the chosen token comes
    first."""
    if not entries:
        return "null"
    return json.dumps([_position(entry, token_text) for entry in entries])


def _position(
    entry: TokenLogprobs, token_text: Callable[[int], str]
) -> dict[str, dict[str, object]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    position: dict[str, dict[str, object]] = {}
    for token_id, logprob, rank in ranked:
        described = {
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": token_text(token_id),
        }
        position.setdefault(str(token_id), described)
    return position

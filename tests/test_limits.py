"""RequestLimits: what is refused, and at which token an answer ends."""

from __future__ import annotations

import pytest
from scheduling import EOS, go_on, request, scheduler, sequence, step

from netra_backend.batch import SequenceOutput
from netra_backend.errors import RequestError
from netra_backend.limits import commit_tokens
from netra_backend.request import FinishReason, Request, SamplingParams, TokenLogprobs
from netra_backend.sequence import Sequence


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (request("r", 5000), "5000 tokens.* 5000 \\(max_model_len\\)"),
        (
            request("r", 4000, max_tokens=1000),
            "4000 prompt tokens and up to 1000 .*78 pages.*has 70",
        ),
        (Request("r", (1, 1000), SamplingParams(), 0.0), "prompt: token ids.*1 to 1000"),
        (Request("r", (-1, 5), SamplingParams(), 0.0), "prompt: token ids.*-1 to 5"),
        (request("r", 5, logit_bias={1000: 1.0}), "logit_bias"),
        (request("r", 5, stop_token_ids=(-1,)), "stop_token_ids"),
        (Request("r", (1,), SamplingParams(), 0.0, bad_word_ids=((1,), (2, 1000))), "bad_words"),
    ],
)
def test_requests_that_can_never_be_served(made: Request, message: str) -> None:
    sched = scheduler(num_pages=70)
    with pytest.raises(RequestError, match=message):
        sched.add(made)
    assert sched.num_waiting == 0
    assert sched.schedule() is None


def commit(seq: Sequence, *tokens: int) -> int:
    return commit_tokens(seq, SequenceOutput(list(tokens), len(tokens) - 1))


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason"),
    [
        ({}, (9, 9, 9), 3, None),
        ({}, (9, EOS, 9), 2, FinishReason.STOP),
        ({"max_tokens": 3}, (9, 9, 9, 9), 3, FinishReason.LENGTH),
        ({"max_tokens": 3}, (9, 9, EOS), 3, FinishReason.STOP),
        ({"max_tokens": 2}, (9, 9, EOS), 2, FinishReason.LENGTH),
        ({"min_tokens": 2}, (EOS, EOS, EOS, 9), 3, FinishReason.STOP),
        ({"min_tokens": 3}, (9, EOS, 9), 3, None),
    ],
)
def test_where_an_answer_ends(
    params: dict[str, int], tokens: tuple[int, ...], kept: int, reason: FinishReason | None
) -> None:
    seq = sequence(5, **params)
    assert commit(seq, *tokens) == kept
    assert seq.token_ids[5:] == list(tokens[:kept])
    assert seq.finish_reason is reason


def test_stop_ids_and_ignored_end_of_text() -> None:
    sched = scheduler()
    stops = sched.add(request("stops", 5, stop_token_ids=(9,), ignore_eos=True))
    ignores = sched.add(request("ignores", 5, ignore_eos=True))
    step(sched, token=EOS)
    assert stops.finish_reason is ignores.finish_reason is None
    step(sched, token=9)
    assert stops.finish_reason is FinishReason.STOP
    assert ignores.finish_reason is None


def test_model_length_ends_an_answer() -> None:
    sched = scheduler(max_num_batched_tokens=5000)
    seq = sched.add(request("r", 4990, max_tokens=500))
    while go_on(sched):
        pass
    assert (seq.num_tokens, seq.finish_reason) == (5000, FinishReason.LENGTH)


def test_logprobs_are_cut_with_the_tokens() -> None:
    seq = sequence(5)
    logprobs = [TokenLogprobs(token, -1.0 - i, 1) for i, token in enumerate((9, EOS, 9))]
    commit_tokens(seq, SequenceOutput([9, EOS, 9], 2, logprobs))
    assert seq.logprobs == logprobs[:2]
    assert seq.cumulative_logprob == -3.0

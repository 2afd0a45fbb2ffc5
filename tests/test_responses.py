"""responses: what one response holds."""

import json
import math

import numpy as np

from netra_backend.request import FinishReason, RequestOutput, TokenLogprobs
from netra_backend.request_parser import ResponseOptions
from netra_backend.responses import OUTPUTS, merge_outputs, response_arrays

EVERYTHING = ResponseOptions(
    stream=True,
    finish_reason=True,
    cumulative_logprob=True,
    logprobs=True,
    num_input_tokens=True,
    num_output_tokens=True,
    num_cached_tokens=True,
    perf_metrics=True,
)


def arrays_of(output, options=EVERYTHING):
    return dict(response_arrays(output, options, lambda token_id: f"t{token_id}"))


def output(**fields):
    return RequestOutput("r", **fields)


def test_merging_adds_deltas_and_keeps_the_last_totals():
    parts = [
        output(text="a", token_ids=(1, 2), num_output_tokens=2, num_cached_tokens=64),
        output(text="", token_ids=(3,), num_output_tokens=3, num_cached_tokens=64),
        output(
            text="b",
            token_ids=(4,),
            num_output_tokens=4,
            logprobs=(TokenLogprobs(4, -1.0, 1),),
            finish_reason=FinishReason.STOP,
        ),
    ]
    merged = merge_outputs(parts)
    assert (merged.text, merged.token_ids, merged.num_output_tokens) == ("ab", (1, 2, 3, 4), 4)
    assert merged.logprobs == parts[2].logprobs
    assert merged.finish_reason is FinishReason.STOP
    assert merge_outputs(parts[:1]) is parts[0]


def test_only_text_comes_unasked():
    assert list(arrays_of(output(text="é"), ResponseOptions())) == ["text_output"]
    assert arrays_of(output(text="é"), ResponseOptions())["text_output"][0] == "é".encode()


def test_the_echo_precedes_the_text():
    assert arrays_of(output(text="b"), ResponseOptions(echo="a"))["text_output"][0] == b"ab"


def test_every_output_has_its_declared_type_and_one_element():
    arrays = arrays_of(output(text="x", token_ids=(1,), cumulative_logprob=-2.0))
    kinds = {"TYPE_STRING": np.object_, "TYPE_FP32": np.float32}
    kinds |= {"TYPE_UINT32": np.uint32, "TYPE_INT32": np.int32}
    assert list(arrays) == [name for name, _, _ in OUTPUTS]
    for name, data_type, _ in OUTPUTS:
        assert arrays[name].dtype == kinds[data_type], name
        assert arrays[name].shape == (1,), name


def test_counts_are_deltas_or_totals_as_the_dialect_says():
    arrays = arrays_of(
        output(
            token_ids=(7, 8),
            num_prompt_tokens=30,
            num_output_tokens=12,
            num_cached_tokens=64,
            cumulative_logprob=-1.5,
            num_draft_tokens=8,
            num_accepted_tokens=6,
        )
    )
    shown = {name: arrays[name][0] for name, _, _ in OUTPUTS}
    assert shown["num_output_tokens"] == 2
    assert shown["num_input_tokens"] == 30
    assert shown["num_cached_tokens"] == 64
    assert shown["cumulative_logprob"] == -1.5
    assert shown["acceptance_rate"] == 0.75
    assert (shown["total_draft_tokens"], shown["total_accepted_draft_tokens"]) == (8, 6)


def test_finish_reason_is_none_in_words_until_the_end():
    assert arrays_of(output())["finish_reason"][0] == b"None"
    ended = output(finish_reason=FinishReason.LENGTH)
    assert arrays_of(ended)["finish_reason"][0] == b"length"


def test_logprobs_are_json_with_the_chosen_token_first():
    entry = TokenLogprobs(5, -3.0, 4, top=((1, -0.5), (2, -math.inf)))
    text = arrays_of(output(logprobs=(entry, TokenLogprobs(1, -0.5, 1, top=((1, -0.5),)))))
    first, second = json.loads(text["logprobs"][0])
    assert list(first) == ["5", "1", "2"]
    assert first["5"] == {"logprob": -3.0, "rank": 4, "decoded_token": "t5"}
    assert first["2"] == {"logprob": -9999.0, "rank": 2, "decoded_token": "t2"}
    assert list(second) == ["1"]
    assert arrays_of(output())["logprobs"][0] == b"null"

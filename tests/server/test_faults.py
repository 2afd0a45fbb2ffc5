"""What a client can get wrong: one clear answer each, nothing leaked, the server alive."""

import json

import numpy as np
import pytest
from server_tools import Server

pytestmark = pytest.mark.server

PROMPT = "the rain in spain"


@pytest.fixture(autouse=True)
def _still_serving(idle: Server):
    """Every fault leaves a server that answers the next request."""
    yield
    assert idle.ask("netra", text_input=PROMPT, parameters={"max_tokens": 2}).last.final


def ask_both_ways(server: Server, parameters=None, **tensors) -> str:
    """The error over gRPC; over HTTP it must be the same text, streamed or not."""
    error = server.ask("netra", parameters=parameters, **tensors).last.error
    body = tensors | (parameters or {})
    assert server.generate("netra", **body)["error"] == error
    events = list(server.generate_stream("netra", **body))
    assert [event["error"] for event in events] == [error]
    return error


@pytest.mark.parametrize(
    ("parameters", "tensors", "code", "words"),
    [
        (
            {"max_tokenz": 3},
            {"text_input": PROMPT},
            "unknown_parameter",
            ["max_tokenz", "max_tokens"],
        ),
        ({"max_tokens": 0}, {"text_input": PROMPT}, "invalid_request", ["max_tokens=0"]),
        ({"max_tokens": True}, {"text_input": PROMPT}, "invalid_request", ["max_tokens=True"]),
        ({"max_tokens": "a lot"}, {"text_input": PROMPT}, "invalid_request", ["max_tokens"]),
        ({"temperature": -1}, {"text_input": PROMPT}, "invalid_request", ["temperature"]),
        ({"top_p": 7}, {"text_input": PROMPT}, "invalid_request", ["top_p"]),
        ({"n": 2}, {"text_input": PROMPT}, "invalid_request", ["n=2", "not supported"]),
        ({"guided_json": "{}"}, {"text_input": PROMPT}, "invalid_request", ["structured output"]),
        ({"lora_name": "x"}, {"text_input": PROMPT}, "invalid_request", ["LoRA"]),
        ({}, {"text_input": ""}, "invalid_request", ["empty"]),
        ({}, {}, "invalid_request", ["text_input, messages and input_ids"]),
        ({}, {"text_input": PROMPT, "messages": "[]"}, "invalid_request", ["not text_input and"]),
        ({}, {"messages": "[{"}, "invalid_request", ["messages is not valid JSON"]),
        ({}, {"messages": "[]"}, "invalid_request", ["messages"]),
        ({}, {"messages": '[{"role": 1}]'}, "invalid_request", ["role"]),
        (
            {},
            {"messages": '[{"role": "user", "content": "\\ud800"}]'},
            "invalid_request",
            ["Unicode"],
        ),
        ({}, {"text_input": PROMPT, "sampling_parameters": "{"}, "invalid_request", ["JSON"]),
        ({}, {"text_input": PROMPT, "sampling_parameters": "[]"}, "invalid_request", ["object"]),
        ({}, {"input_ids": [-1]}, "invalid_request", ["token ids"]),
        ({}, {"input_ids": [2**31 - 1]}, "invalid_request", ["token ids"]),
        ({}, {"input_ids": [5] * 4096}, "prompt_too_long", ["4096"]),
        ({}, {"text_input": PROMPT, "image": ["AAAA"]}, "invalid_request", ["text only"]),
    ],
)
def test_the_error_names_a_code_and_the_cause(idle: Server, parameters, tensors, code, words):
    error = ask_both_ways(idle, parameters, **tensors)
    assert f"[{code}] " in error
    assert all(word in error for word in words)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"99999999": 1}},
        {"stop_token_ids": [99999999]},
        {"max_tokens": 10**30},
        {"top_k": 2**63},
        {"seed": 2**64},
        {"temperature": "NaN"},
        {"stop": [""]},
        {"bad_words": [1]},
        {"logit_bias": {"1": None}},
    ],
)
def test_absurd_sampling_values_are_refused(idle: Server, options):
    answer = idle.ask("netra", text_input=PROMPT, sampling_parameters=json.dumps(options))
    assert "[invalid_request] " in answer.last.error
    assert next(iter(options)) in answer.last.error


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e300, "top_k": 2**62, "seed": 2**64 - 1},
        {"temperature": 1e-300},
        {"top_p": 1e-300, "temperature": 1},
        {"repetition_penalty": 1e-300, "temperature": 1},
        {"repetition_penalty": 1e300, "temperature": 1},
        {"logit_bias": {"5": 1e300}},
        {"logit_bias": {"5": -1e300}, "min_p": 1, "temperature": 1},
        {"min_tokens": 3, "max_tokens": 3},
        {"stop": ["x" * 100_000]},
        {"bad_words": ["x" * 1000]},
    ],
)
def test_extreme_but_legal_values_are_served(idle: Server, options):
    tokens = {"max_tokens": 4}
    answer = idle.ask("netra", text_input=PROMPT, sampling_parameters=json.dumps(tokens | options))
    assert not answer.last.error
    assert answer.last.final


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("text_input", np.array([5], np.int32)),
        ("stream", np.array([1], np.int32)),
        ("input_ids", np.array([1.5], np.float32)),
        ("input_ids", np.array([1], np.int64)),
        ("text_input", np.array([[b"a"]], np.object_)),
        ("text_input", np.array([b"a", b"b"], np.object_)),
        ("max_tokens", np.array([5], np.int32)),
    ],
)
def test_wrong_types_shapes_and_names_are_refused_by_the_server(idle: Server, name, array):
    answer = idle.ask("netra", **{name: array})
    assert name in answer.last.error


def test_bytes_that_are_no_text_are_refused(idle: Server):
    answer = idle.ask("netra", text_input=np.array([b"\xff\xfe"], np.object_))
    assert "UTF-8" in answer.last.error


def test_http_bodies_that_are_no_json_are_refused(idle: Server):
    assert "error" in idle.generate("netra", text_input=["a", "b"])
    assert "error" in idle.generate("netra", text_input=PROMPT, stream="perhaps")
    assert "error" in idle.generate("netra", text_input=PROMPT, sampling_parameters={"a": 1})

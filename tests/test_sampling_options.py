"""sampling_options: names, coercion, refusals."""

import pytest

from netra_backend.errors import RequestError
from netra_backend.request import SamplingParams
from netra_backend.sampling_options import known_options, parse_json, parse_options


def fail(options: dict[str, object]) -> RequestError:
    with pytest.raises(RequestError) as info:
        parse_options(options, {})
    return info.value


def test_every_field_of_sampling_params_can_be_set():
    assert set(SamplingParams.names()) <= set(known_options())
    for name in SamplingParams.names():
        value = {"logit_bias": {"3": 1.5}, "stop": ["a"], "bad_words": ["b"], "n": 1}.get(name)
        parsed = parse_options({name: value if value is not None else "1"}, {"max_tokens": 5})
        assert getattr(parsed.params, name) is not None


def test_strings_that_hold_numbers_are_coerced():
    parsed = parse_options(
        {
            "max_tokens": "128",
            "temperature": "0.5",
            "ignore_eos": "true",
            "seed": "7",
            "top_k": 4.0,
            "stop_token_ids": "[3, 4]",
            "logit_bias": '{"5": "-1.5"}',
        },
        {},
    )
    assert parsed.params == SamplingParams(
        max_tokens=128,
        temperature=0.5,
        ignore_eos=True,
        seed=7,
        top_k=4,
        stop_token_ids=(3, 4),
        logit_bias={5: -1.5},
    )


def test_absent_and_null_values_take_the_defaults():
    parsed = parse_options({"temperature": None}, {"temperature": 0.25, "max_tokens": 9})
    assert (parsed.params.temperature, parsed.params.max_tokens) == (0.25, 9)
    assert parse_options({"temperature": 1}, {"temperature": 0.25}).params.temperature == 1.0


def test_one_stop_string_may_come_without_a_list():
    assert parse_options({"stop": "END", "stop_token_ids": 3}, {}).params.stop == ("END",)
    assert parse_options({"stop": [], "bad_words": []}, {}).params.stop == ()


def test_unknown_name_lists_the_known_ones():
    error = fail({"temprature": 1})
    assert error.code == "unknown_parameter"
    assert "temprature" in error.message
    assert all(name in error.message for name in known_options())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("max_tokens", "many"),
        ("max_tokens", [5]),
        ("max_tokens", 10**30),
        ("max_tokens", float("inf")),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("top_k", 2**63),
        ("top_k", -2),
        ("temperature", False),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", {}),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("ignore_eos", 1),
        ("ignore_eos", "maybe"),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", [""]),
        ("bad_words", [None]),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "[1"),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": float("inf")}),
        ("logit_bias", "nonsense"),
        ("seed", 2**64),
        ("seed", 1.5),
        ("logprobs", True),
        ("logprobs", 21),
        ("n", 2),
        ("priority", "high"),
        ("timeout_seconds", 0),
        ("timeout_seconds", float("inf")),
    ],
)
def test_absurd_values_are_refused_by_name(name, value):
    error = fail({name: value})
    assert error.code == "invalid_request"
    assert name in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("structured_outputs", "structured output"),
        ("guided_json", "structured output"),
        ("lora_name", "LoRA"),
        ("prompt_logprobs", "prompt"),
        ("use_beam_search", "beam"),
    ],
)
def test_what_is_not_supported_says_so(name, reason):
    error = fail({name: "x"})
    assert error.code == "invalid_request"
    assert name in error.message
    assert reason in error.message
    assert parse_options({name: None}, {}).params == SamplingParams()


def test_unsigned_seeds_pass():
    assert parse_options({"seed": 2**64 - 1}, {}).params.seed == 2**64 - 1


def test_priority_and_time_limit_are_not_sampling_params():
    parsed = parse_options({"priority": "3", "timeout_seconds": "2.5"}, {})
    assert (parsed.priority, parsed.timeout_seconds) == (3, 2.5)
    assert parse_options({}, {}).timeout_seconds is None


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000, '{"a": 1,}', "\x00"])
def test_broken_json_names_the_input(text):
    with pytest.raises(RequestError, match="sampling_parameters is not valid JSON"):
        parse_json("sampling_parameters", text)


def test_cache_salt_is_a_string_and_no_sampling_param():
    assert parse_options({"cache_salt": "tenant"}, {}).cache_salt == "tenant"
    assert parse_options({}, {}).cache_salt == ""
    assert "cache_salt" in fail({"cache_salt": 3}).message

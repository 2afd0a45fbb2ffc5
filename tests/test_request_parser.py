"""request_parser: tensors and parameters to a ClientRequest, in the dialect that clients already send."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from netra_backend.config import EngineConfig
from netra_backend.errors import RequestError
from netra_backend.request_parser import INPUTS, RequestParser
from netra_backend.tokenizer import SamplingDefaults


class LetterTokenizer:
    """One id per character; `encode` puts a 1 in front, as a checkpoint with a BOS token does."""

    vocab_size = 300
    default_sampling = SamplingDefaults(temperature=0.5, top_k=20)

    def encode(self, text):
        return [1, *self.encode_plain(text)]

    def encode_plain(self, text):
        return [ord(character) for character in text]

    def decode(self, token_ids):
        return "".join(chr(token_id) for token_id in token_ids)

    def apply_chat_template(self, messages, tools=None, template_kwargs=None):
        self.rendered = (messages, tools, template_kwargs)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def strings(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)


def flag(value):
    return np.array([value])


@pytest.fixture
def tokenizer():
    return LetterTokenizer()


@pytest.fixture
def parser(tokenizer):
    return RequestParser(tokenizer, EngineConfig(default_max_tokens=9))


def parse(parser, parameters=None, **tensors):
    return parser.parse(tensors, json.dumps(parameters or {}))


def fail(parser, parameters=None, **tensors):
    with pytest.raises(RequestError) as info:
        parse(parser, parameters, **tensors)
    return info.value


def test_text_is_encoded_with_special_tokens_and_messages_without(parser):
    assert parse(parser, text_input=strings("ab")).prompt_token_ids == (1, 97, 98)
    chat = parse(parser, messages=strings('[{"role": "u", "content": "a"}]'))
    assert chat.prompt_token_ids == tuple(map(ord, "<u>a"))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_input_ids_go_through_as_they_are(parser, dtype):
    assert parse(parser, input_ids=np.array([5, 6, 7], dtype)).prompt_token_ids == (5, 6, 7)


def test_input_ids_must_be_integers(parser):
    assert "input_ids" in fail(parser, input_ids=np.array([1.5])).message


def test_exactly_one_prompt(parser):
    assert "none" in fail(parser).message
    both = fail(parser, text_input=strings("a"), input_ids=np.array([1]))
    assert "text_input and input_ids" in both.message


def test_tools_and_template_arguments_reach_the_template(parser, tokenizer):
    parse(
        parser,
        messages=strings('[{"role": "u", "content": "a"}]'),
        tools=strings('[{"name": "t"}]'),
        chat_template_kwargs=strings('{"enable_thinking": false}'),
    )
    messages, tools, kwargs = tokenizer.rendered
    assert messages == [{"role": "u", "content": "a"}]
    assert (tools, kwargs) == ([{"name": "t"}], {"enable_thinking": False})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("messages", "[{"),
        ("tools", "{}"),
        ("tools", "nope"),
        ("chat_template_kwargs", "[]"),
        ("sampling_parameters", "[]"),
        ("sampling_parameters", '{"temperature": }'),
    ],
)
def test_broken_json_inputs_are_named(parser, name, text):
    tensors = {"messages": strings('[{"role": "u", "content": "a"}]'), name: strings(text)}
    assert name in fail(parser, **tensors).message


def test_defaults_request_over_deployment_over_checkpoint(tokenizer):
    config = EngineConfig(default_max_tokens=9, default_top_k=3)
    given = parse(RequestParser(tokenizer, config), {"max_tokens": 4}, text_input=strings("a"))
    assert given.params.max_tokens == 4
    assert given.params.top_k == 3
    assert given.params.temperature == 0.5
    assert given.params.top_p == 1.0


def test_greedy_and_unfiltered_can_be_deployment_defaults(tokenizer):
    config = EngineConfig(default_temperature=0.0, default_top_k=0, default_top_p=0.5)
    params = parse(RequestParser(tokenizer, config), text_input=strings("a")).params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 0.5)


def test_request_parameters_count_only_without_sampling_parameters(parser):
    parameters = {"max_tokens": "3", "id": "x", "priority": 2, "timeout": 5, "sequence_id": 1}
    assert parse(parser, parameters, text_input=strings("a")).params.max_tokens == 3
    given = parse(
        parser,
        {"max_tokens": 3, "whatever": 1},
        text_input=strings("a"),
        sampling_parameters=strings('{"max_tokens": "5", "priority": 4}'),
    )
    assert (given.params.max_tokens, given.priority) == (5, 4)


def test_unknown_parameter_is_named(parser):
    error = fail(parser, {"maxtokens": 3}, text_input=strings("a"))
    assert error.code == "unknown_parameter"
    assert "maxtokens" in error.message


def test_list_inputs_win_over_parameters(parser):
    given = parse(
        parser,
        {"stop": "x"},
        text_input=strings("a"),
        stop=strings("y", "z"),
        stop_token_ids=np.array([4, 5], np.int32),
        bad_words=strings("cat"),
    )
    assert given.params.stop == ("y", "z")
    assert given.params.stop_token_ids == (4, 5)
    assert given.params.bad_words == ("cat",)


def test_bad_words_are_banned_at_the_start_and_inside_a_text():
    class SpaceMergingTokenizer(LetterTokenizer):
        def encode_plain(self, text):
            words = {"cat": [10, 11], " cat": [12, 11], "7": [13], " 7": [14, 13]}
            return words[text]

    parser = RequestParser(SpaceMergingTokenizer(), EngineConfig())
    given = parse(parser, input_ids=np.array([1]), bad_words=strings(" cat", "7"))
    assert given.bad_word_ids == ((10, 11), (12, 11), (13,))


def test_plain_text_is_echoed_only_in_a_single_answer(parser):
    def echo(**tensors):
        return parse(parser, **tensors).options.echo

    chat = strings('[{"role": "u", "content": "a"}]')
    no = flag(False)
    assert echo(text_input=strings("ab")) == "ab"
    assert echo(text_input=strings("ab"), exclude_input_in_output=flag(True)) == ""
    assert echo(text_input=strings("ab"), stream=flag(True)) == ""
    assert echo(messages=chat) == ""
    assert echo(messages=chat, exclude_input_in_output=no) == "<u>a"
    assert echo(input_ids=np.array([97, 98])) == ""
    assert echo(input_ids=np.array([97, 98]), exclude_input_in_output=no) == "ab"


def test_a_stream_cannot_be_echoed(parser):
    error = fail(
        parser, text_input=strings("a"), stream=flag(True), exclude_input_in_output=flag(False)
    )
    assert "`exclude_input_in_output` = False is not allowed" in error.message


def test_every_flag_reaches_its_option(parser):
    names = [name for name, kind, _ in INPUTS if name.startswith("return_")]
    assert names
    for name in names:
        options = parse(parser, text_input=strings("a"), **{name: flag(True)}).options
        assert getattr(options, name.removeprefix("return_")) is True
        assert not parse(parser, text_input=strings("a"), **{name: flag(False)}).options.logprobs


def test_flags_may_come_as_request_parameters_and_inputs_win(parser):
    given = parse(parser, {"stream": True, "return_logprobs": "true"}, text_input=strings("a"))
    assert (given.options.stream, given.options.logprobs, given.options.echo) == (True, True, "")
    given = parse(parser, {"stream": True}, text_input=strings("a"), stream=flag(False))
    assert not given.options.stream
    assert "stream" in fail(parser, {"stream": "perhaps"}, text_input=strings("a")).message


def test_cumulative_logprob_asks_for_the_chosen_tokens_logprob(parser):
    asked = parse(parser, text_input=strings("a"), return_cumulative_logprob=flag(True))
    assert asked.params.logprobs == 0
    assert (
        parse(parser, text_input=strings("a"), return_logprobs=flag(True)).params.logprobs is None
    )


def test_images_and_wrong_shapes_and_bytes_are_refused(parser):
    assert "text only" in fail(parser, text_input=strings("a"), image=strings("")).message
    assert "one element" in fail(parser, text_input=strings("a", "b")).message
    assert "one element" in fail(parser, text_input=strings("a"), stream=np.array([])).message
    invalid = SimpleNamespace(array=np.array([b"\xff"], dtype=np.object_))
    assert "UTF-8" in fail(parser, text_input=invalid.array).message
    assert "string" in fail(parser, text_input=np.array([5])).message

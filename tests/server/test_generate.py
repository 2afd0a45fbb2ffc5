"""The dialect on a real server: prompts, streams, flags, over gRPC and HTTP."""

import json

import pytest
from server_tools import Server

pytestmark = pytest.mark.server

PROMPT = "the rain in spain"


def test_a_grpc_stream_gives_the_text_of_a_single_answer(idle: Server):
    single = idle.ask("netra", text_input=PROMPT, parameters={"max_tokens": 24})
    assert len(single.responses) == 1
    streamed = idle.ask("netra", text_input=PROMPT, stream=True, parameters={"max_tokens": 24})
    assert len(streamed.responses) > 5
    assert PROMPT + streamed.text == single.text
    assert [response.final for response in streamed.responses].count(True) == 1
    assert streamed.last.final


def test_http_gives_the_same_as_grpc(idle: Server):
    single = idle.ask("netra", text_input=PROMPT, parameters={"max_tokens": 24})
    body = idle.generate("netra", text_input=PROMPT, max_tokens=24)
    assert body["text_output"] == single.text
    events = list(idle.generate_stream("netra", text_input=PROMPT, max_tokens=24, stream=True))
    assert len(events) > 5
    assert PROMPT + "".join(event["text_output"] for event in events) == single.text


def test_a_single_answer_through_generate_stream_is_one_event(idle: Server):
    events = list(idle.generate_stream("netra", text_input=PROMPT, max_tokens=8))
    assert len(events) == 1
    assert events[0]["text_output"].startswith(PROMPT)


def test_the_prompt_is_echoed_only_as_the_dialect_says(idle: Server):
    def text(**tensors):
        return idle.ask("netra", text_input=PROMPT, parameters={"max_tokens": 8}, **tensors).text

    assert text() == PROMPT + text(exclude_input_in_output=True)
    assert text(exclude_input_in_output=False) == text()
    assert text(stream=True, exclude_input_in_output=True) == text(exclude_input_in_output=True)
    refused = idle.ask("netra", text_input=PROMPT, stream=True, exclude_input_in_output=False)
    assert "`exclude_input_in_output` = False is not allowed" in refused.last.error


def test_messages_are_rendered_with_the_chat_template(idle: Server):
    chat = [{"role": "user", "content": "hello"}]
    answer = idle.ask(
        "netra",
        messages=json.dumps(chat),
        return_num_input_tokens=True,
        parameters={"max_tokens": 8},
    )
    echoed = idle.ask(
        "netra",
        messages=json.dumps(chat),
        exclude_input_in_output=False,
        parameters={"max_tokens": 8},
    )
    rendered = echoed.text.removesuffix(answer.text)
    assert "hello" in rendered
    assert "user" in rendered
    plain = idle.ask(
        "netra",
        text_input=rendered,
        exclude_input_in_output=True,
        return_num_input_tokens=True,
        parameters={"max_tokens": 8},
    )
    assert plain.text == answer.text
    assert plain.last.outputs["num_input_tokens"] == answer.last.outputs["num_input_tokens"]


def test_input_ids_are_taken_as_they_are_and_context_matters(idle: Server):
    def ids(*token_ids):
        answer = idle.ask(
            "netra",
            input_ids=list(token_ids),
            return_logprobs=True,
            parameters={"max_tokens": 8, "logprobs": 0, "ignore_eos": True},
        )
        return answer.token_ids()

    first = ids(10, 20, 30, 40)
    assert len(first) == 8
    assert ids(10, 20, 30, 40) == first
    assert ids(10, 20, 30, 40, *first[:4])[:4] == first[4:]
    over_http = idle.generate("netra", input_ids=[10, 20, 30, 40], max_tokens=8, ignore_eos=True)
    text = idle.ask(
        "netra", input_ids=[10, 20, 30, 40], parameters={"max_tokens": 8, "ignore_eos": True}
    ).text
    assert over_http["text_output"] == text


def test_every_flag_adds_its_output_to_every_response(idle: Server):
    flags = {
        "return_finish_reason": ["finish_reason"],
        "return_cumulative_logprob": ["cumulative_logprob"],
        "return_logprobs": ["logprobs"],
        "return_num_input_tokens": ["num_input_tokens"],
        "return_num_output_tokens": ["num_output_tokens"],
        "return_num_cached_tokens": ["num_cached_tokens"],
        "return_perf_metrics": [
            "acceptance_rate",
            "total_draft_tokens",
            "total_accepted_draft_tokens",
        ],
    }
    for flag, names in flags.items():
        answer = idle.ask(
            "netra", text_input=PROMPT, stream=True, parameters={"max_tokens": 6}, **{flag: True}
        )
        for response in answer.responses:
            assert set(response.outputs) == {"text_output", *names}


def test_counts_logprobs_and_finish_reason_add_up(idle: Server):
    answer = idle.ask(
        "netra",
        text_input=PROMPT,
        stream=True,
        return_finish_reason=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        parameters={"max_tokens": 20, "logprobs": 2, "ignore_eos": True},
    )
    reasons = [response.outputs["finish_reason"] for response in answer.responses]
    assert reasons == ["None"] * (len(reasons) - 1) + ["length"]
    assert answer.total("num_output_tokens") == 20
    assert {response.outputs["num_input_tokens"] for response in answer.responses} != {0}
    positions = [
        position
        for response in answer.responses
        for position in json.loads(response.outputs["logprobs"]) or []
    ]
    assert len(positions) == 20
    chosen = [next(iter(position.values())) for position in positions]
    assert all(entry["rank"] == 1 for entry in chosen)
    assert all(len(position) == 2 for position in positions)
    total = sum(entry["logprob"] for entry in chosen)
    assert answer.last.outputs["cumulative_logprob"] == pytest.approx(total, rel=1e-3)


def test_sampling_parameters_as_json_or_as_plain_parameters_are_the_same(idle: Server):
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "top_k": 40, "ignore_eos": True}
    as_json = idle.ask("netra", text_input=PROMPT, sampling_parameters=json.dumps(options))
    as_strings = {name: str(value) for name, value in options.items()}
    from_strings = idle.ask("netra", text_input=PROMPT, parameters=as_strings)
    over_http = idle.generate("netra", text_input=PROMPT, **as_strings)
    assert as_json.text == from_strings.text == over_http["text_output"]
    other = idle.ask(
        "netra", text_input=PROMPT, sampling_parameters=json.dumps({**options, "seed": 6})
    )
    assert other.text != as_json.text


def test_reserved_words_of_the_protocol_are_ignored(idle: Server):
    body = idle.generate(
        "netra", text_input=PROMPT, max_tokens=4, id="7", priority=1, timeout=5, sequence_id=3
    )
    assert body["text_output"].startswith(PROMPT)
    assert body["id"] == "7"


def test_stop_lists_arrive_through_declared_inputs(idle: Server):
    def ask(**tensors):
        return idle.ask(
            "netra",
            input_ids=[10, 20, 30, 40],
            return_finish_reason=True,
            return_logprobs=True,
            parameters={"max_tokens": 12, "ignore_eos": True, "logprobs": 0},
            **tensors,
        )

    free = ask()
    token_ids = free.token_ids()
    assert free.last.outputs["finish_reason"] == "length"
    stopped = ask(stop_token_ids=[token_ids[5], 511])
    assert stopped.last.outputs["finish_reason"] == "stop"
    assert stopped.token_ids() == token_ids[: token_ids.index(token_ids[5]) + 1]
    cut = free.text[3:5]
    by_text = ask(stop=["never in it", cut])
    assert by_text.last.outputs["finish_reason"] == "stop"
    assert by_text.text == free.text[: free.text.index(cut)]
    first = json.loads(free.responses[0].outputs["logprobs"])[0][str(token_ids[0])]
    assert token_ids[0] not in ask(bad_words=[first["decoded_token"]]).token_ids()
    over_http = idle.generate(
        "netra", input_ids=[10, 20, 30, 40], max_tokens=12, ignore_eos=True, stop=["zzz", cut]
    )
    assert over_http["text_output"] == by_text.text


def test_sixty_four_streams_at_once_deliver_all_tokens_and_one_final_each(idle: Server):
    streams = [idle.stream() for _ in range(8)]
    lengths = {f"{s}-{r}": 8 + 3 * r + s for s in range(8) for r in range(8)}
    expected = {}
    for index, stream in enumerate(streams):
        for r in range(8):
            name = f"{index}-{r}"
            stream.ask(
                "netra",
                request_id=name,
                input_ids=[10 + index, 20 + r, 30],
                stream=True,
                return_num_output_tokens=True,
                parameters={"max_tokens": lengths[name], "ignore_eos": True},
            )
    for stream in streams:
        for name, answer in stream.answers(8).items():
            expected[name] = answer.text
            assert answer.total("num_output_tokens") == lengths[name]
            assert [response.final for response in answer.responses].count(True) == 1
        assert stream.is_silent()
        stream.close()
    assert set(expected) == set(lengths)
    for name in ("0-0", "3-5", "7-7"):
        index, r = map(int, name.split("-"))
        alone = idle.ask(
            "netra",
            input_ids=[10 + index, 20 + r, 30],
            parameters={"max_tokens": lengths[name], "ignore_eos": True},
        )
        assert alone.text == expected[name]

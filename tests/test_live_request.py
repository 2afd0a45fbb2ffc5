"""LiveRequest: text, tokens and logprobs as the client gets them, in whatever portions they
come."""

from __future__ import annotations

import random

import pytest
from scheduling import EOS, sequence
from simulated import WordTokenizer, simulate

from netra_backend.errors import RequestError
from netra_backend.live_request import LiveRequest
from netra_backend.request import FinishReason, RequestOutput, TokenLogprobs
from netra_backend.simulator import SimModel
from netra_backend.tokenizer import Detokenizer


@pytest.mark.parametrize("num_drafts", [0, 6])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_the_text(include: bool, num_drafts: int) -> None:
    """The string spans two tokens; what lies behind it is not delivered, and the sequence is
    freed."""
    simulated = simulate(model=SimModel(num_drafts=num_drafts, acceptance=1.0))
    simulated.add("free", 10, max_tokens=60, seed=3)
    simulated.run()
    tokens = simulated.tokens("free")
    stop = f"{tokens[20]}><{tokens[21]}"
    simulated.add("r", 10, max_tokens=60, seed=3, stop=(stop,), include_stop_str_in_output=include)
    while "r" not in simulated.outputs or not simulated.outputs["r"][-1].finished:
        simulated.step()
    simulated.assert_nothing_held()
    final = simulated.final("r")
    assert (final.finish_reason, final.error) == (FinishReason.STOP, None)
    full = "".join(f"<{token}>" for token in tokens)
    end = full.index(stop) + (len(stop) if include else 0)
    assert simulated.text("r") == full[:end]
    assert simulated.tokens("r") == tokens[:22]
    assert final.num_output_tokens == 22
    assert not simulated.step()


def test_stop_string_in_the_last_token() -> None:
    simulated = simulate()
    simulated.add("free", 10, max_tokens=5, seed=3)
    simulated.run()
    last = f"<{simulated.tokens('free')[-1]}>"
    simulated.add("r", 10, max_tokens=5, seed=3, stop=(last,))
    simulated.run()
    assert simulated.final("r").finish_reason is FinishReason.STOP
    assert simulated.text("r") == simulated.text("free").removesuffix(last)
    simulated.assert_nothing_held()


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_no_text(include: bool) -> None:
    simulated = simulate()
    simulated.add("free", 10, max_tokens=9, seed=3)
    simulated.run()
    token = simulated.tokens("free")[6]
    stops = {"stop_token_ids": (token,), "include_stop_str_in_output": include}
    simulated.add("r", 10, max_tokens=9, seed=3, **stops)
    simulated.run()
    assert simulated.final("r").finish_reason is FinishReason.STOP
    assert simulated.tokens("r") == simulated.tokens("free")[:7]
    shown = simulated.tokens("r")[: 7 if include else 6]
    assert simulated.text("r") == "".join(f"<{each}>" for each in shown)


def test_held_text_is_released_at_the_end() -> None:
    simulated = simulate()
    simulated.add("free", 10, max_tokens=5, seed=3)
    simulated.run()
    beginning = f"<{simulated.tokens('free')[-1]}>"
    simulated.add("r", 10, max_tokens=5, seed=3, stop=(beginning + "never",))
    simulated.run()
    assert simulated.text("r") == simulated.text("free")
    assert simulated.final("r").finish_reason is FinishReason.LENGTH


def outputs_in_portions(portions: list[int], **params: object) -> list[RequestOutput]:
    """Twelve tokens, delivered in `portions`, with log-probabilities."""
    seq = sequence(5, max_tokens=12, logprobs=0, **params)
    detokenizer = Detokenizer(WordTokenizer(), seq.request.params.stop)  # type: ignore[arg-type]
    live = LiveRequest(seq.request, detokenizer, seq)
    outputs = []
    for count in portions:
        for _ in range(count):
            position = seq.num_output_tokens
            seq.token_ids.append(100 + position)
            seq.logprobs.append(TokenLogprobs(100 + position, -0.5 - position, 1))
        if seq.num_tokens == seq.max_num_tokens:
            seq.finish_reason = FinishReason.LENGTH
        outputs.append(live.next_output(seq))
        if outputs[-1].finished:
            break
    return outputs


@pytest.mark.parametrize("stop", [(), ("7><108",), ("never",), ("<111>",)])
def test_sum_of_the_outputs_does_not_depend_on_the_portions(stop: tuple[str, ...]) -> None:
    rng = random.Random(0)
    single = outputs_in_portions([1] * 12, stop=stop)
    tokens = [token for output in single for token in output.token_ids]
    assert tokens == list(range(100, 109 if stop == ("7><108",) else 112))
    for _ in range(30):
        cuts = sorted(rng.sample(range(1, 12), rng.randint(0, 11)))
        portions = [b - a for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        outputs = outputs_in_portions(portions, stop=stop)
        assert "".join(o.text for o in outputs) == "".join(o.text for o in single)
        assert [token for o in outputs for token in o.token_ids] == tokens
        assert [entry.token_id for o in outputs for entry in o.logprobs] == tokens
        final, expected = outputs[-1], single[-1]
        assert final.num_output_tokens == expected.num_output_tokens == len(tokens)
        assert final.cumulative_logprob == expected.cumulative_logprob
        assert final.finish_reason is expected.finish_reason


def test_no_logprobs_no_sum() -> None:
    seq = sequence(5)
    live = LiveRequest(seq.request, Detokenizer(WordTokenizer()), seq)  # type: ignore[arg-type]
    seq.token_ids.append(EOS)
    seq.finish_reason = FinishReason.STOP
    output = live.next_output(seq)
    assert (output.cumulative_logprob, output.logprobs, output.text) == (None, (), "")
    assert output.token_ids == (EOS,)


def test_end_before_the_scheduler_knew_the_request() -> None:
    seq = sequence(5)
    live = LiveRequest(seq.request, Detokenizer(WordTokenizer()))  # type: ignore[arg-type]
    output = live.ended(FinishReason.ABORT, RequestError("cancelled", "gone"))
    assert (output.finished, output.num_prompt_tokens, output.num_output_tokens) == (True, 5, 0)
    assert str(output.error) == "[cancelled] gone"

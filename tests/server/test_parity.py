"""Greedy text through the real server is transformers' greedy text in float32, token for token."""

from pathlib import Path

import pytest
import torch
from server_tools import Answer, Server
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.server

NUM_TOKENS = 12
PROMPTS = [[10 + (7 * user + 3 * i) % 380 for i in range(3 + 13 * user)] for user in range(16)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Transformers' greedy continuation of every prompt, each alone and without a cache."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    continuations = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                logits = model(torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        continuations.append(ids[len(prompt) :])
    return continuations


def ask(stream, prompt: list[int], name: str) -> None:
    stream.ask(
        "netra",
        request_id=name,
        input_ids=prompt,
        stream=True,
        return_logprobs=True,
        parameters={"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0},
    )


def test_one_request_at_a_time(idle: Server, expected: list[list[int]]):
    with idle.stream() as stream:
        for index in (0, 5, 15):
            ask(stream, PROMPTS[index], "alone")
            assert stream.answer().token_ids() == expected[index]


def test_sixteen_requests_of_different_lengths_at_once(idle: Server, expected: list[list[int]]):
    with idle.stream() as stream:
        for index, prompt in enumerate(PROMPTS):
            ask(stream, prompt, str(index))
        answers: dict[str, Answer] = stream.answers(len(PROMPTS))
    for index, continuation in enumerate(expected):
        assert answers[str(index)].token_ids() == continuation, f"prompt {index}"

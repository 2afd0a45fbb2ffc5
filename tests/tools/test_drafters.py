"""The drafters' trainers: what they train is what the engine drafts with, training learns, and a run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from inline_engine import greedy, make_runner, random_prompts, run
from safetensors.torch import save_file

from checkpoints import VOCAB_SIZE, make_random_qwen
from netra_backend.batch import Batch, StepOutput
from netra_backend.model_runner import ModelRunner
from tools.drafters import collect, train
from tools.drafters.dflash import BLOCK, Dflash
from tools.drafters.eagle3 import Eagle3
from tools.drafters.target import Data, Target

PLACES = (1, 3, 4)
PROMPT_LEN, ANSWER_LEN = 60, 24


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen(tmp_path_factory.mktemp("qwen") / "stacked")


@pytest.fixture(scope="module")
def data(qwen: Path) -> Data:
    """Answers of the random target, and what was tapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "PLACES", PLACES)
        prompts = [tuple(p) for p in random_prompts([PROMPT_LEN] * 6, VOCAB_SIZE)]
        tokens, states = collect.answer(make_runner(qwen), prompts, ANSWER_LEN, 0.0)
    return Data(tokens, states)


def randomised(model: torch.nn.Module) -> None:
    """Weights that matter everywhere: fresh ones begin with small outputs."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(2 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def drafted(runner: ModelRunner, prompt: list[int], num_drafts: int) -> dict[int, list[int]]:
    """Number of tokens -> drafts after them."""
    found: dict[int, list[int]] = {}

    def after(batch: Batch, output: StepOutput) -> None:
        out = output.outputs[0]
        if out.draft_token_ids:
            found[batch.scheduled[0].seq.num_tokens + len(out.token_ids)] = out.draft_token_ids

    run(runner, [prompt], greedy(ANSWER_LEN), after=after, num_drafts=num_drafts)
    return found


def test_recorded_answers_are_the_engines_and_states_the_models(qwen: Path, data: Data) -> None:
    prompts = [row[:PROMPT_LEN].tolist() for row in data.tokens]
    plain = run(make_runner(qwen), prompts, greedy(ANSWER_LEN)).token_ids
    assert data.tokens[:, PROMPT_LEN:].tolist() == plain
    assert data.states.shape == (6, PROMPT_LEN + ANSWER_LEN - 1, 3 * 128)


def test_an_eagle3_head_guesses_in_the_engine_as_in_training(
    qwen: Path, data: Data, tmp_path: Path
) -> None:
    model = Eagle3(Target.load(qwen), PLACES, data.commonest(100))
    randomised(model)
    train.export(model, tmp_path)
    runner = make_runner(qwen, speculation="eagle3", drafter_checkpoint=str(tmp_path))
    tokens = data.tokens[:1].long()
    with torch.no_grad():
        first, second, *_ = (x[0].argmax(-1) for x in model(tokens, data.states[:1].float()))
    drafts = drafted(runner, tokens[0, :PROMPT_LEN].tolist(), 2)
    same = [model.vocabulary[first[n - 2]] == d[0] for n, d in drafts.items() if n - 2 < len(first)]
    assert len(same) > 10
    assert sum(same) >= len(same) - 1, "states were kept in 16 bit, so one may differ"
    # The second step of training reads the answer's token: comparable where the first guess was it.
    right = [n for n, d in drafts.items() if n < len(tokens[0]) and d[0] == tokens[0, n]]
    assert all(drafts[n][1] == model.vocabulary[second[n - 2]] for n in right if len(drafts[n]) > 1)


def test_a_dflash_block_is_guessed_in_the_engine_as_in_training(
    qwen: Path, data: Data, tmp_path: Path
) -> None:
    model = Dflash(Target.load(qwen), PLACES, mask_token_id=0)
    randomised(model)
    train.export(model, tmp_path)
    runner = make_runner(qwen, speculation="dflash", drafter_checkpoint=str(tmp_path))
    tokens = data.tokens[:1].long()
    drafts = drafted(runner, tokens[0, :PROMPT_LEN].tolist(), BLOCK - 1)
    anchors = torch.tensor([[n - 1 for n in drafts]])
    with torch.no_grad():
        guesses = model(tokens, data.states[:1].float(), anchors)[0].argmax(-1)
    pairs = [
        (a, b)
        for row, guess in zip(drafts.values(), guesses.tolist(), strict=True)
        for a, b in zip(row, guess, strict=False)
    ]
    assert len(pairs) > 60
    assert sum(a == b for a, b in pairs) > 0.95 * len(pairs), "states were kept in 16 bit"


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_training_learns_resumes_and_writes_what_loads(
    method: str,
    qwen: Path,
    data: Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "PLACES", PLACES)
    monkeypatch.setattr(train, "HELD_OUT", 2)
    (tmp_path / "data").mkdir()
    parts = {"tokens": data.tokens, "states": data.states}
    save_file(parts, tmp_path / "data" / "part-000.safetensors")
    out = tmp_path / method
    losses: list[float] = []

    def main(steps: int) -> None:
        command = [
            "train", method, "--checkpoint", str(qwen), "--data", str(tmp_path / "data"), "--out", str(out),
            "--steps", str(steps), "--rows", "2", "--prompt-len", str(PROMPT_LEN), "--draft-vocab", "100",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        train.main()

    model_class = {"eagle3": Eagle3, "dflash": Dflash}[method]
    whole = model_class.loss

    def noted(self: Eagle3 | Dflash, *args: object) -> object:
        loss, right = whole(self, *args)
        losses.append(loss.item())
        return loss, right

    monkeypatch.setattr(model_class, "loss", noted)
    main(20)
    assert len(losses) == 22  # one held-out pass before and one after
    main(30)
    assert len(losses) == 22 + 12, "the second run did not go on from the first"
    assert sum(losses[-8:-1]) < 0.8 * sum(losses[1:8])
    assert "held out, trained" in capsys.readouterr().out
    runner = make_runner(qwen, speculation="auto", drafter_checkpoint=str(out))
    assert runner.max_draft_tokens == {"eagle3": 4, "dflash": BLOCK - 1}[method]

"""MTP drafts against a plain chain that recomputes everything: a wrong MTP shows in no output, only in speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from inline_engine import greedy, make_runner, random_prompts, run
from random_drafters import Recorder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5MoeTextModel

from checkpoints import VOCAB_SIZE, make_fp8, make_random_mtp
from netra_backend.batch import Batch, ScheduledSequence, SequenceOutput, StepOutput
from netra_backend.errors import ConfigError
from netra_backend.forward_context import ForwardContext
from netra_backend.model_runner import ModelRunner
from netra_backend.scheduler import Scheduler
from netra_backend.spec.proposer import LookupFirst

NUM_DRAFTS = 5
LENGTHS = (2, 30, 61, 64, 100, 129)


class ReferenceChain:
    """The MTP chain from transformers' modules, without any cache."""

    def __init__(self, checkpoint: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        tensors = load_file(checkpoint / "model.safetensors")
        config = Qwen3_5MoeTextConfig.from_pretrained(checkpoint)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self.layer = Qwen3_5MoeTextModel(config).float().eval()
        mtp = {
            name.removeprefix("mtp."): tensor
            for name, tensor in tensors.items()
            if name.startswith("mtp.")
        }
        self.fc = mtp.pop("fc.weight")
        self.norms = {
            part: mtp.pop(f"pre_fc_norm_{part}.weight") for part in ("embedding", "hidden")
        }
        missing, surplus = self.layer.load_state_dict(mtp, strict=False)
        assert (missing, surplus) == (["embed_tokens.weight"], [])

    def _norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.norms[part])

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Guesses at what follows `tokens`, of which all but the last are computed."""
        embed = self.target.model.embed_tokens
        ids = torch.tensor([list(tokens)])
        hidden = self.target.model(ids[:, :-1], use_cache=False).last_hidden_state
        embedded = embed(ids[:, 1:])
        found: list[int] = []
        for _ in range(count):
            both = torch.cat((self._norm(embedded, "embedding"), self._norm(hidden, "hidden")), -1)
            out = self.layer(inputs_embeds=both @ self.fc.t(), use_cache=False).last_hidden_state
            found.append(int(self.target.lm_head(out[:, -1]).argmax()))
            hidden = torch.cat((hidden, out[:, -1:]), 1)
            embedded = torch.cat((embedded, embed(torch.tensor([[found[-1]]]))), 1)
        return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mtp(tmp_path_factory.mktemp("mtp") / "stacked")


@pytest.fixture(scope="module")
def chain(checkpoint: Path) -> ReferenceChain:
    return ReferenceChain(checkpoint)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return make_runner(checkpoint, speculation="mtp", num_draft_tokens=NUM_DRAFTS)


@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("batch", [1, 6])
def test_drafts_equal_the_plain_chain_whatever_was_accepted(
    budget: int, batch: int, runner: ModelRunner, chain: ReferenceChain
) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)[-batch:]
    plain = run(runner, prompts, greedy(20)).token_ids
    real = runner.proposer
    assert real is not None
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    recorder = Recorder(real, answers, NUM_DRAFTS, VOCAB_SIZE)
    runner.proposer = recorder
    try:
        result = run(runner, prompts, greedy(20), budget=budget, num_drafts=NUM_DRAFTS)
    finally:
        runner.proposer = real
    assert result.token_ids == plain
    assert result.num_accepted_tokens > 3 * batch
    assert len(recorder.seen) > 3 * batch
    for tokens, drafts in recorder.seen:
        assert drafts == chain.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


def test_drafts_cross_a_page_edge(runner: ModelRunner, chain: ReferenceChain) -> None:
    prompt = random_prompts([57], VOCAB_SIZE, seed=2)[0]
    seen: list[tuple[list[int], list[int]]] = []

    def after(batch: Batch, output: StepOutput) -> None:
        out = output.outputs[0]
        seen.append((batch.scheduled[0].seq.token_ids + out.token_ids, out.draft_token_ids))

    run(runner, [prompt], greedy(80), after=after, num_drafts=3)
    for tokens, drafts in seen[::5]:
        assert drafts == chain.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


def test_preempted_sequences_draft_as_before(runner: ModelRunner, chain: ReferenceChain) -> None:
    prompts = random_prompts([62, 63, 127, 128], VOCAB_SIZE)
    plain = run(runner, prompts, greedy(12)).token_ids
    seen: list[tuple[list[int], list[int]]] = []

    def after(batch: Batch, output: StepOutput) -> None:
        for item, out in zip(batch.scheduled, output.outputs, strict=True):
            if item.seq.num_preemptions and out.draft_token_ids:
                seen.append((item.seq.token_ids + out.token_ids, out.draft_token_ids))

    result = run(
        runner, prompts, greedy(12), num_pages=3, overcommit=True, after=after, num_drafts=2
    )
    assert result.token_ids == plain
    assert seen
    for tokens, drafts in seen[:8]:
        assert drafts == chain.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


class EverySecondLookup:
    """Finds (wrong) drafts for sequences of even length."""

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        lens = [
            item.seq.num_tokens + len(out.token_ids)
            for item, out in zip(items, outputs, strict=True)
        ]
        return [
            [1] * item.num_wanted_drafts if length % 2 == 0 else []
            for item, length in zip(items, lens, strict=True)
        ]

    def free(self, seq_ids: list[int]) -> None:
        pass


def test_lookup_goes_first_and_the_layer_follows_all_the_same(
    runner: ModelRunner, chain: ReferenceChain
) -> None:
    prompts = random_prompts([40, 61, 70], VOCAB_SIZE)
    plain = run(runner, prompts, greedy(16)).token_ids
    real = runner.proposer
    assert real is not None
    runner.proposer = LookupFirst(EverySecondLookup(), real)
    seen: list[tuple[list[int], list[int]]] = []

    def after(batch: Batch, output: StepOutput) -> None:
        for item, out in zip(batch.scheduled, output.outputs, strict=True):
            seen.append((item.seq.token_ids + out.token_ids, out.draft_token_ids))
            assert item.num_wanted_drafts == len(out.draft_token_ids)

    try:
        result = run(runner, prompts, greedy(16), after=after, num_drafts=3)
    finally:
        runner.proposer = real
    assert result.token_ids == plain
    for tokens, drafts in seen:
        looked_up = len(tokens) % 2 == 0
        right = [1] * len(drafts) if looked_up else chain.drafts(tokens, len(drafts))
        assert drafts == right, f"after {len(tokens)} tokens"


def test_a_corrupt_draft_cache_changes_no_token_and_heals_when_recomputed(
    checkpoint: Path, runner: ModelRunner, chain: ReferenceChain
) -> None:
    prompt = random_prompts([70], VOCAB_SIZE, seed=4)[0]
    plain = run(runner, [prompt], greedy(30)).token_ids
    seen: list[tuple[bool, list[int], list[int]]] = []

    def at_step(number: int, scheduler: Scheduler) -> None:
        if number == 6:
            for layer in runner._cache.draft_layers:
                layer.pages.fill_(float("nan"))
                layer.tails.fill_(float("nan"))
        if number == 12:
            scheduler._preempt(scheduler._running[0])

    def after(batch: Batch, output: StepOutput) -> None:
        item, out = batch.scheduled[0], output.outputs[0]
        if out.draft_token_ids:
            healthy = bool(item.seq.num_preemptions)
            seen.append((healthy, item.seq.token_ids + out.token_ids, out.draft_token_ids))

    result = run(runner, [prompt], greedy(30), at_step=at_step, after=after, num_drafts=2)
    assert result.token_ids == plain
    healed = [(tokens, drafts) for healthy, tokens, drafts in seen if healthy]
    assert healed
    for tokens, drafts in healed:
        assert drafts == chain.drafts(tokens, len(drafts))


def test_an_fp8_checkpoint_brings_its_mtp_layer(checkpoint: Path, tmp_path: Path) -> None:
    make_fp8(checkpoint, tmp_path / "fp8")
    runner = make_runner(tmp_path / "fp8", speculation="auto")
    prompts = random_prompts([30], VOCAB_SIZE)
    drafted = run(runner, prompts, greedy(20), num_drafts=2)
    assert drafted.num_draft_tokens > 0
    assert drafted.token_ids == run(runner, prompts, greedy(20)).token_ids


def test_missing_and_surplus_mtp_tensors_are_named(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["mtp.layers.0.self_attn.k_norm.weight"]
    tensors["mtp.layers.1.extra"] = torch.ones(1)
    for path in checkpoint.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        make_runner(tmp_path, speculation="mtp")
    assert "mtp.layers.0.self_attn.k_norm.weight is missing" in str(caught.value)
    assert "mtp.layers.1.extra is not part" in str(caught.value)


def test_memory_counts_the_extra_layer(checkpoint: Path, runner: ModelRunner) -> None:
    plain = make_runner(checkpoint)
    assert runner.plan.page_bytes == 2 * plain.plan.page_bytes  # one attention layer, one MTP layer
    assert runner.plan.total_bytes <= runner.plan.budget_bytes

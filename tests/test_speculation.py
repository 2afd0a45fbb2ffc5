"""Speculation is lossless: whatever is drafted, for whichever sequences, the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inline_engine import Reference, greedy, make_runner, random_prompts, run

from checkpoints import VOCAB_SIZE, make_random_llama, make_random_mtp, make_random_qwen
from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.engine import Engine
from netra_backend.forward_context import ForwardContext
from netra_backend.memory_plan import plain_kv_bytes, slot_layout, state_bytes, tail_rows
from netra_backend.model_runner import ModelRunner
from netra_backend.request import Request, RequestOutput, SamplingParams
from netra_backend.scheduler import Scheduler

MAX_DRAFTS = 8
NUM_TOKENS = 12
LENGTHS = (1, 3, 17, 40, 60, 62, 63, 64, 65, 70, 100, 121, 127, 128, 129, 130)


class ScriptedProposer:
    """Knows the right continuations; `script` says what to make of them for a draft position."""

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], script: Callable[[list[int]], list[int]]
    ) -> None:
        self._answers = answers
        self._script = script

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        return [self._propose(item, out) for item, out in zip(items, outputs, strict=True)]

    def _propose(self, item: ScheduledSequence, output: SequenceOutput) -> list[int]:
        seq = item.seq
        prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
        at = seq.num_output_tokens + len(output.token_ids)
        right = self._answers[prompt][at : at + item.num_wanted_drafts]
        return self._script(right)

    def free(self, seq_ids: Iterable[int]) -> None:
        pass


def wrong(token_id: int) -> int:
    return (token_id + 1) % VOCAB_SIZE


def right_up_to(position: int) -> Callable[[list[int]], list[int]]:
    return lambda right: (
        right[:position]
        + [wrong(t) for t in right[position : position + 1]]
        + right[position + 1 :]
    )


def junk(seed: int) -> Callable[[list[int]], list[int]]:
    """Right beginnings of random length, then noise, and of random length in all."""
    source = random.Random(seed)

    def script(right: list[int]) -> list[int]:
        keep = source.randint(0, len(right))
        noise = [source.randrange(VOCAB_SIZE) for _ in range(len(right) - keep)]
        return (right[:keep] + noise)[: source.randint(0, len(right))]

    return script


SCRIPTS: dict[str, Callable[[list[int]], list[int]]] = {
    "always right": lambda right: right,
    "always wrong": lambda right: [wrong(t) for t in right],
}


@contextmanager
def drafting(
    runner: ModelRunner,
    prompts: list[list[int]],
    answers: list[list[int]],
    script: Callable[[list[int]], list[int]],
) -> Iterator[None]:
    known = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
    before = runner.proposer
    runner.proposer = ScriptedProposer(known, script)
    try:
        yield
    finally:
        runner.proposer = before


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen(tmp_path_factory.mktemp("qwen") / "stacked")


@pytest.fixture(scope="module")
def runners(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    llama = make_random_llama(tmp_path_factory.mktemp("llama") / "plain")
    knobs = {"speculation": "ngram", "num_draft_tokens": MAX_DRAFTS}
    return {"qwen": make_runner(qwen, **knobs), "llama": make_runner(llama, **knobs)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, VOCAB_SIZE, seed=1)


@pytest.fixture(scope="module")
def answers(
    qwen: Path, runners: dict[str, ModelRunner], prompts: list[list[int]]
) -> dict[str, list[list[int]]]:
    """Of transformers for the hybrid; of plain decoding, which test_model_runner.py holds to it, for llama."""
    reference = Reference(qwen)
    return {
        "qwen": [reference.generate(prompt, NUM_TOKENS) for prompt in prompts],
        "llama": run(runners["llama"], prompts, greedy(NUM_TOKENS)).token_ids,
    }


@pytest.mark.parametrize("num_drafts", range(MAX_DRAFTS + 1))
def test_greedy_tokens_are_the_references_for_any_number_of_drafts(
    num_drafts: int,
    runners: dict[str, ModelRunner],
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
) -> None:
    with drafting(runners["qwen"], prompts, answers["qwen"], SCRIPTS["always right"]):
        result = run(
            runners["qwen"], prompts, greedy(NUM_TOKENS), budget=100, num_drafts=num_drafts
        )
    assert result.token_ids == answers["qwen"]
    assert result.num_accepted_tokens == result.num_draft_tokens
    assert (result.num_draft_tokens > 0) == (num_drafts > 0)
    assert max(result.draft_lens) == num_drafts


@pytest.mark.parametrize("architecture", ["qwen", "llama"])
@pytest.mark.parametrize("accepted", range(MAX_DRAFTS))
def test_every_count_of_accepted_drafts_leaves_the_right_state(
    architecture: str,
    accepted: int,
    runners: dict[str, ModelRunner],
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
) -> None:
    chosen = [2, 5, 7, 14]
    mine = [prompts[i] for i in chosen]
    right = [answers[architecture][i] for i in chosen]
    runner = runners[architecture]
    counts: set[int] = set()
    with drafting(runner, mine, right, right_up_to(accepted)):
        result = run(
            runner, mine, greedy(NUM_TOKENS), num_drafts=MAX_DRAFTS,
            after=lambda _batch, output: counts.update(o.num_accepted_tokens for o in output.outputs),
        )  # fmt: skip
    assert result.token_ids == right
    assert accepted in counts


@pytest.mark.parametrize("architecture", ["qwen", "llama"])
@pytest.mark.parametrize("batch", [1, 16])
def test_junk_of_ragged_lengths_changes_nothing(
    architecture: str,
    batch: int,
    runners: dict[str, ModelRunner],
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
) -> None:
    runner = runners[architecture]
    mine, right = prompts[-batch:], answers[architecture][-batch:]
    for seed in range(2):
        with drafting(runner, mine, right, junk(seed)):
            result = run(runner, mine, greedy(NUM_TOKENS), budget=100, num_drafts=MAX_DRAFTS)
        assert result.token_ids == right
        assert 0 < result.num_accepted_tokens < result.num_draft_tokens


def test_always_wrong_drafts_cost_tokens_of_nobody(
    runners: dict[str, ModelRunner], prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    with drafting(runners["qwen"], prompts, answers["qwen"], SCRIPTS["always wrong"]):
        result = run(runners["qwen"], prompts, greedy(NUM_TOKENS), num_drafts=3)
    assert result.token_ids == answers["qwen"]
    assert result.num_accepted_tokens == 0


def test_drafts_cross_every_place_of_a_page_edge(
    qwen: Path, runners: dict[str, ModelRunner]
) -> None:
    prompt = random_prompts([58], VOCAB_SIZE, seed=3)[0]
    right = Reference(qwen).generate(prompt, 80)
    for seed in range(3):
        with drafting(runners["qwen"], [prompt], [right], junk(seed)):
            result = run(runners["qwen"], [prompt], greedy(80), num_drafts=MAX_DRAFTS)
        assert result.token_ids == [right]


def test_preemption_between_drafts_changes_nothing(
    runners: dict[str, ModelRunner], prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    chosen = [5, 6, 12, 13]
    mine, right = ([x[i] for i in chosen] for x in (prompts, answers["qwen"]))
    with drafting(runners["qwen"], mine, right, junk(7)):
        result = run(
            runners["qwen"], mine, greedy(NUM_TOKENS), num_pages=3, overcommit=True, num_drafts=4
        )
    assert result.num_preemptions > 0
    assert result.token_ids == right


def test_aborts_and_arrivals_between_drafts_change_nobody_else(
    runners: dict[str, ModelRunner], prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    def at_step(number: int, scheduler: Scheduler) -> None:
        if number in (2, 4):
            scheduler.abort(f"r{number}")

    with drafting(runners["qwen"], prompts, answers["qwen"], junk(5)):
        result = run(
            runners["qwen"], prompts, greedy(NUM_TOKENS), at_step=at_step, num_drafts=5,
            max_num_seqs=6,
        )  # fmt: skip
    for index, (found, right) in enumerate(zip(result.token_ids, answers["qwen"], strict=True)):
        assert found == (right[: len(found)] if index in (2, 4) else right)


SEEDED = [
    SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, frequency_penalty=0.9, presence_penalty=0.4, seed=6,
                   max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.6, logit_bias={7: 3.0, 9: -4.0}, seed=7, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=NUM_TOKENS, logprobs=2),
    SamplingParams(temperature=0.5, min_tokens=6, stop_token_ids=tuple(range(VOCAB_SIZE)), seed=8,
                   max_tokens=NUM_TOKENS),
]  # fmt: skip


@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_any_sampling_parameters_give_the_same_with_and_without_drafts(
    num_drafts: int, runners: dict[str, ModelRunner], prompts: list[list[int]]
) -> None:
    runner, mine = runners["qwen"], prompts[4 : 4 + len(SEEDED)]
    plain = run(runner, mine, SEEDED)
    padded = [tokens + [5] * MAX_DRAFTS for tokens in plain.token_ids]
    with drafting(runner, mine, padded, junk(num_drafts)):
        drafted = run(runner, mine, SEEDED, num_drafts=num_drafts)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted_tokens > 0
    assert len(plain.token_ids[-1]) == 7, "the stop token counts once min_tokens precede it"


def test_max_tokens_is_kept_exactly_inside_a_window(
    runners: dict[str, ModelRunner], prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    mine, right = prompts[:8], answers["qwen"][:8]
    params = [greedy(1 + i) for i in range(8)]
    with drafting(runners["qwen"], mine, right, SCRIPTS["always right"]):
        result = run(runners["qwen"], mine, params, num_drafts=MAX_DRAFTS)
    assert result.token_ids == [tokens[: 1 + i] for i, tokens in enumerate(right)]


def test_a_budget_smaller_than_all_drafts_is_kept(
    runners: dict[str, ModelRunner], prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> None:
    rows: list[int] = []
    with drafting(runners["qwen"], prompts, answers["qwen"], SCRIPTS["always right"]):
        result = run(
            runners["qwen"], prompts, greedy(NUM_TOKENS), budget=64, num_drafts=MAX_DRAFTS,
            after=lambda batch, _output: rows.append(batch.num_tokens),
        )  # fmt: skip
    assert result.token_ids == answers["qwen"]
    assert max(rows) <= 64


def test_ngram_from_end_to_end(runners: dict[str, ModelRunner]) -> None:
    runner = runners["llama"]
    prompts = [[5, 6, 7, 8, 9] * 8, [3, 4] * 20, *random_prompts([30], VOCAB_SIZE)]
    plain = run(runner, prompts, greedy(40))
    drafted = run(runner, prompts, greedy(40), num_drafts=MAX_DRAFTS)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_draft_tokens > 0


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("method", ["ngram", "mtp", "ngram+mtp"])
def test_a_speculating_engine_gives_the_tokens_of_one_that_does_not(
    method: str, adaptive: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """How many drafts the controller asks for depends on measured time, so only fixed lengths are counted."""
    checkpoint = make_random_mtp(tmp_path_factory.mktemp("mtp") / "stacked")
    texts = ["to be or not to be, that is to be or not", "aaaaaaaaaaaa", "zq"]

    def answers(speculation: str) -> list[RequestOutput]:
        config = EngineConfig(
            checkpoint=str(checkpoint), num_threads=1, kv_cache_memory="64MiB", max_num_seqs=4,
            speculation=speculation, adaptive_drafts=adaptive,
        )  # fmt: skip
        engine = Engine.build(config, checkpoint)
        for index, text in enumerate(texts):
            ids = tuple(engine.tokenizer.encode(text))
            params = SamplingParams(temperature=0.4 * index, seed=index, max_tokens=40)
            engine.add(Request(str(index), ids, params, arrival_time=0.0))
        while engine.step():
            pass
        finals: dict[str, RequestOutput] = {}
        gathered: dict[str, list[int]] = {}
        while not engine.outputs.empty():
            output = engine.outputs.get()
            gathered.setdefault(output.request_id, []).extend(output.token_ids)
            finals[output.request_id] = output
        engine.shutdown(0.0)
        return [replace(finals[key], token_ids=tuple(gathered[key])) for key in sorted(finals)]

    plain, drafted = answers("none"), answers(method)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert [out.finish_reason for out in drafted] == [out.finish_reason for out in plain]
    assert adaptive or sum(out.num_draft_tokens for out in drafted) > 0
    assert all(out.num_draft_tokens >= out.num_accepted_tokens for out in drafted)


def build_engine(checkpoint: Path, **knobs: object) -> Engine:
    defaults: dict[str, object] = {
        "checkpoint": str(checkpoint), "num_threads": 1, "kv_cache_memory": "64MiB", "max_num_seqs": 4,
        "max_num_batched_tokens": 192, "prefix_checkpoint_interval": 64,
    }  # fmt: skip
    return Engine.build(EngineConfig(**(defaults | knobs)), checkpoint)  # type: ignore[arg-type]


def ask(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """The answer, and how many prompt tokens were found in the cache."""
    engine.add(Request(name, tuple(prompt), greedy(num_tokens), arrival_time=0.0))
    while engine.step():
        pass
    tokens: list[int] = []
    cached = 0
    while not engine.outputs.empty():
        output = engine.outputs.get()
        assert output.error is None
        tokens += output.token_ids
        cached = output.num_cached_tokens
    return tokens, cached


def test_prefix_hits_after_drafted_answers_give_the_tokens_of_a_cold_run(qwen: Path) -> None:
    """Prompts that end at every place of a page, answers that cross the next edge with drafts, second turns."""
    cold = build_engine(qwen, enable_prefix_caching=False)
    warm = build_engine(
        qwen, enable_prefix_caching=True, speculation="ngram", num_draft_tokens=MAX_DRAFTS,
        adaptive_drafts=False,
    )  # fmt: skip
    hits = 0
    for rest in (0, 1, 6, MAX_DRAFTS + 2):
        first = random_prompts([64 + rest], VOCAB_SIZE, seed=20 + rest)[0]
        answer, _ = ask(cold, f"a{rest}", first, 70)
        second = [*first, *answer, 7, 8, 9]
        follow_up, _ = ask(cold, f"b{rest}", second, 10)
        known = {tuple(first): answer, tuple(second): follow_up}
        warm._runner.proposer = ScriptedProposer(known, junk(rest))  # type: ignore[attr-defined]
        assert ask(warm, f"a{rest}", first, 70)[0] == answer
        for repeat in range(2):
            found, cached = ask(warm, f"b{rest}-{repeat}", second, 10)
            assert found == follow_up, f"prompt of {len(second)} tokens, {cached} of them cached"
            hits += cached > len(first)
        assert ask(warm, f"c{rest}", first, 70)[0] == answer
    assert hits > 0, "no second turn reused what was decoded with drafts"


def test_drafts_take_no_room_from_running_sequences() -> None:
    """On the target's shapes: conversations of 40K tokens that fit with 8 drafts, and without."""
    target = ModelConfig(
        model_type="qwen3_5_moe", vocab_size=248320, hidden_size=2048,
        layer_types=("linear_attention",) * 30 + ("full_attention",) * 10,
        num_attention_heads=16, num_kv_heads=2, head_dim=256, rms_norm_eps=1e-6,
        max_position_embeddings=262144, rope_theta=1e7, rotary_dim=64, tie_word_embeddings=False,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, conv_kernel=4,
    )  # fmt: skip

    def per_sequence(num_drafts: int) -> int:
        layout = slot_layout(target, num_drafts)
        tail = 10 * plain_kv_bytes(target, tail_rows(2 * num_drafts), 2)
        pages = 10 * plain_kv_bytes(target, 40960, 2)
        return tail + state_bytes(target, layout, 2, 4) + pages

    records = (
        state_bytes(target, slot_layout(target, 8), 2, 4)
        - state_bytes(target, slot_layout(target, 0), 2, 4)
    ) / 8
    columns = 30 * target.conv_channels * 2
    assert records - columns <= 0.4e6, "a draft costs more than its k, v, beta and g"
    assert per_sequence(8) / per_sequence(0) < 1.02


def test_unknown_methods_and_too_many_drafts_are_refused(qwen: Path) -> None:
    with pytest.raises(Exception, match="speculation='medusa'"):
        make_runner(qwen, speculation="medusa")
    with pytest.raises(Exception, match="num_draft_tokens=17"):
        make_runner(qwen, speculation="ngram", num_draft_tokens=17)
    with pytest.raises(Exception, match="0 MTP layers"):
        make_runner(qwen, speculation="mtp")

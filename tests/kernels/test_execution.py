"""The engine's kernel path with the kernels themselves: a tiny qwen3_5_moe with FP8 blocks, interpreted, against torch.

KernelRunner runs real batches of the real scheduler: prompts in chunks, decoding over a page edge, two sequences of
different length, drafts with ragged acceptance, MTP. (tests/test_kernel_runner.py has more cases, with references.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoding import decoding, fill_with_noise, pools
from inline_engine import greedy, make_runner, random_prompts, run
from kernel_checks import relative_error

from checkpoints import VOCAB_SIZE, make_fp8, make_random_mtp
from netra_backend import runners
from netra_backend.batch import Batch
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.gpu.device_ops import KERNELS, REFERENCES
from netra_backend.gpu.graphs import Bucket
from netra_backend.gpu.runner import KernelRunner
from netra_backend.request import Request

SIZES = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [6, 5, 5],
    },
}  # fmt: skip
"""FP8 wants heads of 128 channels; two layers are enough for both kinds."""

FP8_ERROR = 0.12
"""Bound of the relative error of logits: torch computes with rows that are not rounded to FP8, each product with
errors of 2-3 %; the two layers and the inner rounding of the experts add up to 6-9 %."""

INNER_ERROR = 0.06
"""The same between kernels and references: both round rows to FP8, only the kernels round inside an expert."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mtp(tmp_path_factory.mktemp("execution") / "plain", **SIZES)


@pytest.fixture(scope="module")
def fp8(plain: Path) -> Path:
    return make_fp8(plain, plain.parent / "fp8")


def kernel_runner(checkpoint, ops=KERNELS, **knobs):
    defaults = {"kv_cache_memory": "16MiB", "max_num_seqs": 4, "dtype": "float32", "kv_cache_dtype": "plain",
                "num_prefix_checkpoints": 2}  # fmt: skip
    config = EngineConfig(checkpoint=str(checkpoint), **(defaults | knobs))
    return KernelRunner(config, checkpoint, frozenset(), torch.device("cpu"), ops)


class Logits:
    """Every row of logits that a runner samples from, by (sequence, position).

    Given another runner's, tokens are chosen from those: both then compute the same contexts, whatever rounding does
    to a close decision.
    """

    def __init__(self, runner, forced=None):
        self.rows = {}
        self._sample, self._forced = runner._sampler.sample, forced
        runner._sampler.sample = self._note

    def _note(self, logits, items):
        keys = [
            (item.seq.seq_id, item.seq.num_tokens + row)
            for item in items
            for row in range(item.num_logits)
        ]
        self.rows |= dict(zip(keys, logits.clone(), strict=True))
        if self._forced:
            logits = torch.stack([self._forced.rows[key] for key in keys]) if keys else logits
        return self._sample(logits, items)

    def error(self, expected):
        """Relative error of all rows. Most have the same most likely token; where one has not, the two were closer
        than four times the error of the row.
        """
        assert self.rows.keys() == expected.rows.keys()
        mine, theirs = (
            torch.stack([x.rows[key] for key in sorted(x.rows)]) for x in (self, expected)
        )
        noise = (mine - theirs).square().mean(-1).sqrt()
        chosen = theirs.gather(1, mine.argmax(-1, keepdim=True))[:, 0]
        lead = theirs.amax(-1) - chosen
        assert (lead < 4 * noise).all()
        assert (lead > 0).sum() <= len(lead) // 4
        return relative_error(mine, theirs)


def start(runner, prompts, num_tokens, num_drafts=0, after=lambda *_: None):
    return run(runner, prompts, greedy(num_tokens), budget=64, max_num_seqs=4, num_drafts=num_drafts,
               after=after)  # fmt: skip


class RaggedDrafts:
    """Proposes the right tokens up to a position that changes from step to step and differs between sequences."""

    def __init__(self, answers, num_drafts):
        self._answers, self._num_drafts = answers, num_drafts

    def propose(self, items, outputs, context, hidden):
        drafts = []
        for item, output in zip(items, outputs, strict=True):
            seq = item.seq
            at = seq.num_output_tokens + len(output.token_ids)
            right = self._answers[seq.seq_id][at : at + item.num_wanted_drafts]
            keep = (seq.seq_id + at) % (self._num_drafts + 1)
            drafts.append(right[:keep] + [(t + 1) % VOCAB_SIZE for t in right[keep:]])
        return drafts

    def free(self, seq_ids):
        pass


def test_chunks_decoding_and_ragged_drafts_equal_torch(plain):
    """float32: a prompt in two chunks beside a short one, then drafts over the page edge; every token and logit."""
    prompts = random_prompts([66, 61], VOCAB_SIZE)
    reference = make_runner(plain, max_num_seqs=4)
    logits = Logits(reference)
    answers = start(reference, prompts, 9).token_ids
    runner = kernel_runner(plain, speculation="ngram", num_draft_tokens=2)
    runner.proposer = RaggedDrafts(answers, 2)
    mine, counts = Logits(runner), []
    result = start(
        runner,
        prompts,
        9,
        2,
        lambda _, out: counts.append([o.num_accepted_tokens for o in out.outputs]),
    )
    assert result.token_ids == answers
    assert any(len(set(c)) > 1 for c in counts), "acceptance was not ragged"
    committed = {key: row for key, row in mine.rows.items() if key in logits.rows}
    assert committed.keys() == logits.rows.keys()
    for key, row in committed.items():
        if mine.rows[key].argmax() == logits.rows[key].argmax():
            assert relative_error(row, logits.rows[key]) < 1e-4


def test_fp8_weights_follow_torch(fp8):
    """Logits within the bound of torch's, and the same greedy tokens but for decisions closer than the error."""
    prompts = random_prompts([66, 3], VOCAB_SIZE, seed=1)
    reference = make_runner(fp8, max_num_seqs=4)
    logits = Logits(reference)
    answers = start(reference, prompts, 6).token_ids
    runner = kernel_runner(fp8)
    mine = Logits(runner, forced=logits)
    assert start(runner, prompts, 6).token_ids == answers
    assert mine.error(logits) < FP8_ERROR


def test_mtp_over_quantised_pages_follows_the_references(fp8):
    """int8 pages, FP8 weights, drafts of the draft layer: kernels and references give the same tokens and drafts."""
    seen = []
    for ops in (KERNELS, REFERENCES):
        runner = kernel_runner(
            fp8, ops, speculation="mtp", num_draft_tokens=2, kv_cache_dtype="int8"
        )
        logits, drafts = Logits(runner, seen[0][2] if seen else None), []
        out = start(runner, random_prompts([66], VOCAB_SIZE), 4, 2,
                    lambda _, o, to=drafts: to.append([x.draft_token_ids for x in o.outputs]))  # fmt: skip
        seen.append((out.token_ids, drafts, logits))
    assert seen[0][:2] == seen[1][:2], "tokens or drafts differ"
    assert seen[1][2].error(seen[0][2]) < INNER_ERROR


def test_an_fp8_head_of_kernels_is_that_of_the_references(fp8):
    """Rows quantised and multiplied by the kernels, with a number of rows that fills no block."""
    hidden = torch.randn(3, 128)
    mine, expected = (
        kernel_runner(fp8, ops, lm_head_dtype="fp8")._model.logits(hidden)
        for ops in (KERNELS, REFERENCES)
    )
    assert relative_error(mine, expected) < 1e-5


def test_a_padded_bucket_gives_the_numbers_of_an_exact_fit(plain):
    """Rows, sequences, splits and page columns past those in use; a page is sealed. The draft layer follows."""
    runner = kernel_runner(plain, speculation="mtp", num_draft_tokens=2, max_model_len=320)
    items = [decoding(1, 1, [], 64, 0), decoding(2, 3, [5, 2], 30, 2)]
    items[0].seal_block_ids = [7]
    ids = torch.arange(40, 48, dtype=torch.int32)
    found = []
    for bucket in (None, Bucket(4, 3, 8)):
        before = fill_with_noise(runner)
        with torch.inference_mode():
            if bucket is None:
                hidden, _ = runner._forward(Batch(items), items)
                step = runner._current
            else:
                step = bucket.step(1, 5, torch.device("cpu"))
                runner._bring(step.groups[0], items, {})
                hidden = runner._model.forward(step, runner._caches, runner._states.layers)
                assert step.groups[0].shape.num_splits == 5
            drafted = runner._mtp._head(hidden, ids[: len(hidden)], step, runner._draft_caches[0])
        found.append([hidden[:4].clone(), drafted[:4].clone(), *(x.clone() for x in pools(runner))])
    for exact, padded in zip(*found, strict=True):
        assert relative_error(padded, exact) < 1e-5
    for old, new in zip(before, found[1][2:], strict=True):
        changed = {i for i in range(len(old)) if not torch.equal(old[i], new[i])}
        assert changed <= ({1, 3} if len(old) == runner.plan.num_slots else {7})


def test_a_prefix_hit_restores_the_checkpoint(plain, monkeypatch):
    """The prompt again: one page from the cache, its state from the checkpoint that the chunk left."""
    monkeypatch.setattr(
        runners, "make_runner",
        lambda config, path, eos: KernelRunner(config, path, eos, torch.device("cpu")),
    )  # fmt: skip
    engine = Engine.build(
        EngineConfig(
            checkpoint=str(plain),
            dtype="float32",
            max_num_seqs=2,
            kv_cache_memory="16MiB",
            kv_cache_dtype="plain",
        ),
        Path("/"),
    )
    prompt, seen = tuple(random_prompts([67], VOCAB_SIZE, seed=2)[0]), []
    for name in "ab":
        engine.add(Request(name, prompt, greedy(3), 0.0))
        while engine.step():
            pass
        outputs = [engine.outputs.get() for _ in range(engine.outputs.qsize())]
        seen.append([t for out in outputs for t in out.token_ids])
    assert max(out.num_cached_tokens for out in outputs) == 64
    assert seen[0] == seen[1] == start(make_runner(plain), [list(prompt)], 3).token_ids[0]

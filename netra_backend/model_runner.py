"""ModelRunner: one step on the device. Batch -> ForwardContext -> model -> Sampler -> StepOutput.

Owns the weights, the KV cache and the state pool; decides nothing about which sequences run. Everything in
`launch` follows the storage rules of sequence.py, so any schedule gives the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from netra_backend.batch import Batch, ScheduledSequence, SequenceOutput, StepOutput
from netra_backend.cache.codecs import choose_codec
from netra_backend.cache.host_cache import HostCache
from netra_backend.cache.kv_cache import KVCache
from netra_backend.cache.state_pool import StatePool
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.forward_context import build_context
from netra_backend.memory_plan import (
    MemoryPlan,
    opening_codec,
    plan_host,
    plan_memory,
    slot_layout,
)
from netra_backend.models.registry import load_model
from netra_backend.models.taps import Taps
from netra_backend.sampler import Sampler
from netra_backend.spec.drafting import make_proposer, plan_drafts

_OPENINGS_PER_SLOT = 4
"""First pages of conversations that prefix reuse may keep, per slot; each takes the room of two others at most."""

_CHECKPOINTS_PER_SEQUENCE = 4
"""A running conversation keeps its prompt's end and its answer's newest page; the others are history."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DeferredStep:
    """What of a step runs when it is waited for: on a CPU all of it, for what comes before `wait` would only be late."""

    compute: Callable[[], StepOutput]

    def wait(self) -> StepOutput:
        """Run it."""
        return self.compute()


class ModelRunner:
    """Loads a checkpoint and runs steps on a CPU; runners.py chooses the device. Raises ConfigError if the checkpoint
    cannot be loaded or nothing fits.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Path, eos_token_ids: frozenset[int]
    ) -> None:
        self._device = torch.device("cpu")
        # float32: most CPUs have no native 16-bit products (measured 20 times slower), and it is exact.
        dtype = torch.float32 if config.dtype == "auto" else DTYPES[config.dtype]
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.model_config = ModelConfig.from_file(checkpoint / "config.json")
        self._model = load_model(checkpoint, self.model_config, dtype, self._device)
        drafts = plan_drafts(config, checkpoint, self.model_config, self._device)
        self.max_draft_tokens = drafts.max_draft_tokens
        self.has_draft_cache = drafts.has_cache
        self.drafts_in_blocks = drafts.model_method == "dflash"
        self.tap_places = drafts.tap_places
        state_dtype = DTYPES[config.state_dtype]
        available = _available_bytes()
        codec = choose_codec(config, self.model_config, self._device)
        self.plan: MemoryPlan = plan_memory(
            self.model_config,
            budget_bytes=config.kv_cache_bytes(available),
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            element_bytes=dtype.itemsize,
            state_element_bytes=state_dtype.itemsize,
            max_draft_tokens=self.max_draft_tokens,
            num_checkpoints=num_checkpoints(config, self.model_config),
            checkpoint_element_bytes=DTYPES[config.prefix_checkpoint_dtype].itemsize,
            kv=replace(
                drafts.kv_layout(codec),
                opening_codec=opening_codec(codec),
                openings_per_slot=_OPENINGS_PER_SLOT if config.enable_prefix_caching else 1,
            ),
        )
        self.plan = plan_host(self.plan, config.host_cache_bytes(available))
        layout = slot_layout(self.model_config, self.max_draft_tokens)
        self._cache = KVCache(self.model_config, self.plan, dtype, self._device)
        self._states = StatePool(
            self.model_config,
            self.plan,
            layout,
            dtype,
            state_dtype,
            DTYPES[config.prefix_checkpoint_dtype],
            self._device,
        )
        slot_pools = self._cache.slot_pools + self._states.slot_pools
        self._host = HostCache(
            self._cache.page_pools, self._cache.opening_pools, slot_pools, self.plan
        )
        self._sampler = Sampler(self.model_config.vocab_size, eos_token_ids, self._device)
        self.proposer = make_proposer(
            drafts,
            checkpoint,
            self.model_config,
            self._model,
            self._cache,
            self.plan.max_model_len,
            dtype,
            self._device,
        )

    def launch(self, batch: Batch) -> DeferredStep:
        """Begin a step. Sequences are read, never changed."""
        return DeferredStep(partial(self._run, batch))

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        self._sampler.free(batch.freed_seq_ids)
        self._prepare_storage(batch)
        context, ordered = build_context(batch, self._device)
        taps = Taps(self.tap_places) if self.tap_places else None
        hidden = self._model.forward(context, self._cache, self._states, taps)
        results = self._sample(hidden, context.logit_rows, ordered)
        if self.proposer is not None:
            self.proposer.free(batch.freed_seq_ids)
            heard = taps.joined() if taps is not None else hidden
            drafts = self.proposer.propose(ordered, results, context, heard)
            for result, token_ids in zip(results, drafts, strict=True):
                result.draft_token_ids = token_ids
        outputs = in_batch_order(batch, ordered, results)
        return StepOutput(outputs, time.perf_counter() - started)

    def _prepare_storage(self, batch: Batch) -> None:
        """Bring, zero or restore the storage of sequences that start, take that of preempted ones, and seal
        the tails that are full.
        """
        self._host.move_in(batch.moves)
        if batch.restored:
            ids, targets = zip(*batch.restored, strict=True)
            self._states.restore(list(ids), list(targets))
        self._host.move_out(batch.moves)
        items = batch.scheduled
        fresh = [item.seq.slot for item in items if item.seq.num_computed_tokens == 0]
        if fresh:
            self._states.reset(fresh)
        sealing = [item for item in items if not item.is_chunk and item.seal_block_ids]
        if sealing:
            slots = [item.seq.slot for item in sealing]
            self._cache.seal_tails(slots, [item.seal_block_ids[0] for item in sealing])

    def _sample(
        self, hidden: torch.Tensor, logit_rows: torch.Tensor, items: list[ScheduledSequence]
    ) -> list[SequenceOutput]:
        if len(logit_rows) == 0:
            return [SequenceOutput() for _ in items]
        return self._sampler.sample(self._model.logits(hidden[logit_rows]), items)


def num_checkpoints(config: EngineConfig, model: ModelConfig) -> int:
    """Checkpoints of recurrent states that prefix reuse keeps."""
    if not config.enable_prefix_caching or not model.num_linear_layers:
        return 0
    return config.num_prefix_checkpoints or _CHECKPOINTS_PER_SEQUENCE * config.max_num_seqs


def in_batch_order(
    batch: Batch, ordered: list[ScheduledSequence], results: list[SequenceOutput]
) -> list[SequenceOutput]:
    """`results` of the items `ordered`, as `batch` lists its items."""
    by_id = {item.seq.seq_id: result for item, result in zip(ordered, results, strict=True)}
    return [by_id[item.seq.seq_id] for item in batch.scheduled]


def _available_bytes() -> int:
    """Bytes free for the pools once the weights are loaded."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("kv_cache_memory: cannot read the free memory; give it in bytes")

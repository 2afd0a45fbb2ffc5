"""KernelRunner: one step on a device through the operations of device_ops.py. The Runner of a GPU.

Owns weights, KV cache and recurrent states as the kernels keep them; decides nothing about which sequences run.
What model_runner.py is for torch: any schedule gives the same tokens. On a device the steps of short sequences are
replayed graphs (graphs.py).
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import torch

from netra_backend.batch import Batch, ScheduledSequence, StepOutput
from netra_backend.cache.codecs import choose_codec
from netra_backend.cache.kv_cache import KVCache
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.draw import DrawParams
from netra_backend.errors import ConfigError
from netra_backend.forward_context import ForwardContext
from netra_backend.gpu.device_ops import KERNELS, DeviceOps
from netra_backend.gpu.graphs import (
    Bucket,
    CudaRecorder,
    Recorder,
    Replay,
    StepGraph,
    StepGraphs,
    make_buckets,
    reserved_bytes,
    seq_counts,
)
from netra_backend.gpu.kernel_draw import KernelDraw
from netra_backend.gpu.layers import KernelCache
from netra_backend.gpu.models import KernelModel, KernelMtpHead
from netra_backend.gpu.mtp import KernelMtpProposer
from netra_backend.gpu.projection import Setting, WeightSource
from netra_backend.gpu.ring_states import RingStates
from netra_backend.gpu.step_inputs import (
    ColumnCopy,
    Group,
    GroupShape,
    StepInputs,
    group_of,
)
from netra_backend.memory_plan import (
    KVLayout,
    MemoryPlan,
    draft_codec,
    pages_for,
    plan_memory,
    ring_layout,
    ring_tail_rows,
)
from netra_backend.model_runner import DTYPES, DeferredStep, in_batch_order, num_checkpoints
from netra_backend.models.weights import Weights
from netra_backend.request import SamplingParams
from netra_backend.sampler import Sampler
from netra_backend.spec.drafting import LOOKUP_BEFORE_MODEL, DraftPlan, plan_drafts
from netra_backend.spec.ngram import NgramProposer
from netra_backend.spec.proposer import LookupFirst, Proposer
from netra_kernels.gated_delta_chunk import num_boundaries
from netra_kernels.kv_codec import page_layout

logger = logging.getLogger(__name__)

_METHODS = ("auto", "none", "ngram", "mtp", "ngram+mtp")


class KernelRunner:
    """Loads a checkpoint and runs steps. Raises ConfigError if it cannot be loaded or nothing fits.

    `ops` other than KERNELS, or another device than CUDA, is for tests; without a GPU kv_cache_memory is in bytes, and
    graphs are recorded by `recorder` only. `weights` stand in for the checkpoint's, of which only config.json is then read (bench/launches.py).
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Path,
        eos_token_ids: frozenset[int],
        device: torch.device,
        ops: DeviceOps = KERNELS,
        weights: WeightSource | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        _refuse_what_a_cpu_does(config)
        self.model_config = ModelConfig.from_file(checkpoint / "config.json")
        model_config = self.model_config
        dtype = torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype]
        self._device, self._ops, self._dtype = device, ops, dtype
        setting = Setting.of(model_config, ops, dtype, device, config.lm_head_dtype == "fp8")
        if weights is None:
            stored = Weights(checkpoint, dtype, device, model_config.fp8_block)
            self._model = KernelModel(stored, setting)
            stored.finish(KernelModel.ignored_weights)
        else:
            self._model = KernelModel(weights, setting)
        drafts = plan_drafts(config, checkpoint, model_config, device)
        self.max_draft_tokens = drafts.max_draft_tokens
        self.has_draft_cache = drafts.has_cache
        self.drafts_in_blocks = False
        self._max_logits = config.max_num_seqs * (1 + drafts.max_draft_tokens)
        recorder = recorder or recorder_of(config, device)
        sizes = (config.max_num_seqs, drafts.max_draft_tokens, config.max_num_batched_tokens)
        buckets = make_buckets(*sizes) if recorder else []
        head = self._load_head(drafts, checkpoint)  # before the free memory is measured
        self._allocate(config, buckets)
        self._draw = KernelDraw(ops.sample)
        self._sampler = Sampler(model_config.vocab_size, eos_token_ids, device, self._draw)
        self._current = StepInputs([], 0, torch.empty(0, dtype=torch.int64))
        self._mtp: KernelMtpProposer | None = None
        self.proposer = self._make_proposer(drafts, head)
        self._graphs = StepGraphs()
        if recorder is not None:
            self._record(recorder, buckets, config.max_num_seqs)
        if recorder is not None or device.type == "cuda":
            self._run_chunks(config.max_num_batched_tokens)

    def _allocate(self, config: EngineConfig, buckets: list[Bucket]) -> None:
        """Split the memory and make the pools."""
        model, drafts = self.model_config, self.max_draft_tokens
        state_dtype = DTYPES[config.state_dtype]
        saved_dtype = DTYPES[config.prefix_checkpoint_dtype]
        codec = choose_codec(config, model, self._device)
        layout = ring_layout(model, drafts)
        draft_layers = int(self.has_draft_cache)
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
        max_len = min(config.max_model_len or 2**31, model.max_position_embeddings)
        reserved = reserved_bytes(
            model, buckets, pages_for(max_len), self._dtype.itemsize, 1 + draft_layers
        )
        self.plan: MemoryPlan = plan_memory(
            model,
            budget_bytes=config.kv_cache_bytes(free),
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            element_bytes=self._dtype.itemsize,
            state_element_bytes=state_dtype.itemsize,
            max_draft_tokens=drafts,
            num_checkpoints=num_checkpoints(config, model),
            checkpoint_element_bytes=saved_dtype.itemsize,
            kv=KVLayout(codec, ring_tail_rows(drafts), draft_layers, draft_codec(codec)),
            slots=layout,
            reserved_bytes=reserved,
        )
        cache = KVCache(model, self.plan, self._dtype, self._device)
        shapes = (model.num_kv_heads, model.head_dim)
        own, draft = page_layout(codec, *shapes), page_layout(self.plan.kv.draft_codec, *shapes)
        self._caches = [KernelCache.of(layer, own) for layer in cache.layers]
        self._draft_caches = [KernelCache.of(layer, draft) for layer in cache.draft_layers]
        self._states = RingStates(
            model, self.plan, layout, self._dtype, state_dtype, saved_dtype, self._device
        )

    def _load_head(self, drafts: DraftPlan, checkpoint: Path) -> KernelMtpHead | None:
        if not drafts.has_cache:
            return None
        if self.model_config.num_mtp_layers != 1:
            raise ConfigError(
                f"speculation='mtp': the checkpoint has {self.model_config.num_mtp_layers} MTP layers"
            )
        weights = Weights(checkpoint, self._dtype, self._device, self.model_config.fp8_block)
        head = KernelMtpHead(weights, self._model)
        weights.finish(("model.", "lm_head.", "visual."))
        return head

    def _make_proposer(self, drafts: DraftPlan, head: KernelMtpHead | None) -> Proposer | None:
        if head is None:
            return NgramProposer() if drafts.with_lookup else None
        cache = self._draft_caches[0]
        mtp = self._mtp = KernelMtpProposer(head, self._model, cache, lambda: self._current)
        return LookupFirst(NgramProposer(LOOKUP_BEFORE_MODEL), mtp) if drafts.with_lookup else mtp

    @torch.inference_mode()
    def _record(self, recorder: Recorder, buckets: list[Bucket], max_num_seqs: int) -> None:
        """Record the steps of all buckets, and the draft layer's passes behind and after them."""
        heads, max_pages = self.model_config.num_kv_heads, pages_for(self.plan.max_model_len)
        mtp = self._mtp

        def forward(step: StepInputs) -> Replay:
            replay = recorder.record(
                partial(self._model.forward, step, self._caches, self._states.layers)
            )
            if mtp is not None:
                mtp.record_step(recorder, step, replay())
            return replay

        before = self._free_bytes()
        self._graphs.record(buckets, lambda b: b.step(heads, max_pages, self._device), forward)
        if mtp is not None:
            mtp.record_chains(recorder, seq_counts(max_num_seqs), max_pages)
        taken, planned = before - self._free_bytes(), self.plan.reserved_bytes
        logger.info("graphs took %d MiB of %d planned for steps", taken >> 20, planned >> 20)

    @torch.inference_mode()
    def _run_chunks(self, max_rows: int) -> None:
        """Run inert prompt chunks: with every power of two they meet all that launchers choose by sizes, and compile it.
        Draw from what they give.
        """
        started = time.perf_counter()
        sizes = [2**i for i in range(max_rows.bit_length()) if 2**i < max_rows] + [max_rows]
        for rows in sizes:
            for boundaries in {0, num_boundaries(rows) * bool(self.plan.num_checkpoints)}:
                shape = GroupShape(rows, 1, rows, 1, 1, 1, boundaries)
                group = Group(shape, self._device, is_chunks=True)
                group.fill([], 1, {})
                group.upload()
                step = StepInputs([group], 0, torch.empty(0, dtype=torch.int64))
                hidden = self._model.forward(step, self._caches, self._states.layers)
                if self._mtp is not None:
                    self._mtp.run_inert(step, hidden)
            logits = self._model.logits(hidden[: self._max_logits])
            seconds = time.perf_counter() - started
            logger.info("prompt chunks of %d rows of up to %d, %.0f s", rows, max_rows, seconds)
        anything = DrawParams.of(SamplingParams(), logits.shape[1], seed=0)
        self._draw(logits, logits, [0], [0], [anything])

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0

    @torch.inference_mode()
    def launch(self, batch: Batch) -> DeferredStep:
        """Begin a step: the device works on it from here on. Sequences are read, never changed."""
        started = time.perf_counter()
        ordered = sorted(batch.scheduled, key=lambda item: (item.is_chunk, item.seq.slot))
        hidden, logits = self._forward(batch, ordered)
        return DeferredStep(partial(self._finish, batch, ordered, hidden, logits, started))

    @torch.inference_mode()
    def _finish(
        self,
        batch: Batch,
        ordered: list[ScheduledSequence],
        hidden: torch.Tensor,
        logits: torch.Tensor,
        started: float,
    ) -> StepOutput:
        """Sample, and draft for the next step."""
        self._sampler.free(batch.freed_seq_ids)
        step = self._current
        results = self._sampler.sample(logits, ordered)
        if self.proposer is not None:
            self.proposer.free(batch.freed_seq_ids)
            rows = ForwardContext(step.token_ids(), step.token_ids(), None, [], step.logit_rows)
            drafts = self.proposer.propose(ordered, results, rows, hidden)
            for result, token_ids in zip(results, drafts, strict=True):
                result.draft_token_ids = token_ids
        outputs = in_batch_order(batch, ordered, results)
        return StepOutput(outputs, time.perf_counter() - started)

    def _forward(
        self, batch: Batch, ordered: list[ScheduledSequence]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states of all rows, and the logits to sample from."""
        graph = self._graphs.find(ordered)
        step = self._current = self._prepare(batch, ordered, graph)
        if graph is None:
            hidden = self._model.forward(step, self._caches, self._states.layers)
        else:
            hidden = graph.forward()
        return hidden, self._model.logits(hidden[step.logit_rows])

    def _prepare(
        self, batch: Batch, ordered: list[ScheduledSequence], graph: StepGraph | None
    ) -> StepInputs:
        """Bring states to where the step starts, and its inputs to the device: to where `graph` has them, if any."""
        starts = {item.seq.slot: item.seq.num_computed_tokens for item in ordered}
        for checkpoint_id, slot in batch.restored:
            self._states.restore(checkpoint_id, slot, starts[slot])
        absorbed = self._absorb(ordered)
        groups, copies, live_rows = [], [], graph.step.live_rows if graph else None
        for is_chunks in (False, True):
            items = [item for item in ordered if item.is_chunk == is_chunks]
            if items:
                heads = self.model_config.num_kv_heads
                group = (
                    graph.step.groups[0]
                    if graph
                    else group_of(items, heads, self._device, is_chunks)
                )
                self._bring(group, items, absorbed)
                groups.append(group)
                copies += _column_copies(items) if is_chunks else []
        rows = 0
        logit_rows: list[int] = []
        for item in ordered:
            rows += item.num_scheduled_tokens
            logit_rows += range(rows - item.num_logits, rows)
        picked = torch.tensor(logit_rows, dtype=torch.int64, device=self._device)
        return StepInputs(groups, rows, picked, copies, live_rows)

    def _bring(
        self, group: Group, items: list[ScheduledSequence], absorbed: dict[int, int]
    ) -> None:
        group.fill(items, self.plan.kv.tail_rows, absorbed)
        group.upload()

    def _absorb(self, ordered: list[ScheduledSequence]) -> dict[int, int]:
        """Absorb what must be in the states before the step: all records of chunks, and of short sequences those up
        to a checkpoint, which is then taken. Returns how many records of a slot are absorbed.
        """
        absorbed: dict[int, int] = {}
        if not self._states.layers:
            return absorbed
        chunks = [item for item in ordered if item.is_chunk and item.seq.num_replay_tokens]
        self._absorb_to([(item, item.seq.num_replay_tokens) for item in chunks], absorbed)
        for item in ordered:
            for count, checkpoint_id in [] if item.is_chunk else item.checkpoints:
                self._absorb_to([(item, count)], absorbed)
                seq = item.seq
                position = seq.num_computed_tokens - seq.num_replay_tokens + count
                for state in self._states.layers:
                    state.saved_states[checkpoint_id] = state.states[seq.slot].to(
                        state.saved_states.dtype
                    )
                    state.saved_columns[checkpoint_id] = state.columns_before(seq.slot, position)
        return absorbed

    def _absorb_to(
        self, targets: list[tuple[ScheduledSequence, int]], absorbed: dict[int, int]
    ) -> None:
        """Absorb each item's records up to the given count of them."""
        if not targets:
            return
        integers = []
        for item, count in targets:
            seq, done = item.seq, absorbed.get(item.seq.slot, 0)
            end = seq.num_computed_tokens - seq.num_replay_tokens + count
            integers.append((seq.slot, end, count - done))
            absorbed[seq.slot] = count
        inputs = Group.absorbing(integers, self._device)
        for layer, state in zip(self._model.recurrent_layers(), self._states.layers, strict=True):
            layer.absorb(inputs, state)


def recorder_of(config: EngineConfig, device: torch.device) -> Recorder | None:
    """What records steps on a device; None if they are launched one operation at a time."""
    return CudaRecorder(device) if device.type == "cuda" and config.enable_cuda_graphs else None


def _refuse_what_a_cpu_does(config: EngineConfig) -> None:
    """Raise ConfigError for knobs that only the torch runner has, before weights take their minutes."""
    if config.speculation not in _METHODS or config.drafter_checkpoint:
        raise ConfigError(
            f"speculation={config.speculation!r}, drafter_checkpoint={config.drafter_checkpoint!r}: draft "
            f"models of their own run on a CPU only so far; on a GPU use one of {', '.join(_METHODS)}"
        )
    if config.host_cache_bytes(2**40):
        raise ConfigError(
            f"host_cache_memory={config.host_cache_memory!r}: the kernels' rings do not move to the host "
            "yet; set it to 0"
        )


def _column_copies(items: list[ScheduledSequence]) -> list[ColumnCopy]:
    copies, row = [], 0
    for item in items:
        seq = item.seq
        copies += [
            ColumnCopy(seq.slot, seq.num_computed_tokens, row, stop, checkpoint_id)
            for stop, checkpoint_id in item.checkpoints
        ]
        row += item.num_scheduled_tokens
    return copies

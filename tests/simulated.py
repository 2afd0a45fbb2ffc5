"""What the control-plane tests share: an engine over a simulated model whose storage is checked.

`CheckedRunner` plays the device: it keeps pages, tails and states as lists of tokens, obeys the
rules of sequence.py and batch.py literally, the host tier's and the checkpoints' too, and fails if a
sequence's history is not what its tokens say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from netra_backend.batch import Batch, ScheduledSequence, StepOutput
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig
from netra_backend.cost_model import CostModel, StepCost
from netra_backend.engine import Engine, PendingStep
from netra_backend.metrics import Metrics
from netra_backend.prefix_cache import PrefixCache
from netra_backend.prefix_reuse import PrefixReuse
from netra_backend.request import Request, RequestOutput, SamplingParams
from netra_backend.scheduler import Scheduler
from netra_backend.sequence import PAGE_SIZE, TAIL_ROWS, Sequence
from netra_backend.simulator import SimModel, SimRunner, VirtualClock

COST = StepCost(
    step=5e-3,
    decode_row=1e-4,
    prompt_row=1e-4,
    context_token=1e-8,
    attention_pair=1e-9,
    logits_row=1e-5,
)
"""Roughly a small accelerator: a 512-token chunk takes 56 ms."""


class WordTokenizer:
    """Token i is the text "<i>"; the part of Tokenizer that Detokenizer needs."""

    eos_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return f"<{token_id}>".encode()

    def is_special(self, token_id: int) -> bool:
        """No token is."""
        return False


@dataclass(slots=True)
class Slot:
    """What a slot holds: unsealed rows, how many tokens its state has absorbed, how many are
    recorded."""

    tail: list[int] = field(default_factory=list)
    num_absorbed: int = 0
    num_recorded: int = 0


class CheckedRunner:
    """SimRunner behind an account of every page, tail row and recorded token."""

    def __init__(self, inner: SimRunner, max_rows: int, check: bool) -> None:
        self._inner = inner
        self._max_rows = max_rows
        self._check = check
        self.pages: dict[int, list[int]] = {}
        self.slots: dict[int, Slot] = {}
        self.host_pages: dict[int, list[int]] = {}
        self.host_slots: dict[int, Slot] = {}
        self.saved: dict[int, int] = {}
        self.freed: list[int] = []
        self.batches: list[list[tuple[str, int, int]]] = []

    def launch(self, batch: Batch) -> PendingStep:
        """Check what the step reads, write what it writes, give what the model says."""
        assert batch.scheduled
        assert batch.num_tokens <= self._max_rows
        seq_ids = [item.seq.seq_id for item in batch.scheduled]
        assert len(set(seq_ids)) == len(seq_ids)
        assert not set(batch.freed_seq_ids) & set(seq_ids)
        self.freed += batch.freed_seq_ids
        self.batches.append(
            [
                (
                    item.seq.request.request_id,
                    item.seq.num_computed_tokens,
                    item.num_scheduled_tokens,
                )
                for item in batch.scheduled
            ]
        )
        if self._check:
            self._copy(batch)
        for item in batch.scheduled if self._check else ():
            self._check_history(item.seq)
            self._save_states(item)
            if item.is_chunk:
                self._write_chunk(item)
            else:
                self._write_rows(item)
        return self._inner.launch(batch)

    def _copy(self, batch: Batch) -> None:
        """In, restored, out; what leaves a slot is gone from there."""
        moves = batch.moves
        for source, target in moves.pages_in:
            self.pages[target] = self.host_pages[source]
        for source, target in moves.slots_in:
            self.slots[target] = self.host_slots.pop(source)
        for checkpoint_id, slot in batch.restored:
            self.slots[slot] = Slot(num_absorbed=self.saved[checkpoint_id])
        for source, target in moves.pages_out:
            self.host_pages[target] = self.pages[source]
        for source, target in moves.slots_out:
            self.host_slots[target] = self.slots.pop(source)

    def _save_states(self, item: ScheduledSequence) -> None:
        seq = item.seq
        start = seq.num_computed_tokens - (0 if item.is_chunk else seq.num_replay_tokens)
        for count, checkpoint_id in item.checkpoints:
            assert (start + count) % PAGE_SIZE == 0
            self.saved[checkpoint_id] = start + count

    def _check_history(self, seq: Sequence) -> None:
        assert 0 <= seq.num_computed_tokens < seq.num_tokens
        if seq.num_computed_tokens == 0:
            assert not seq.block_table
            assert seq.num_replay_tokens == 0
            self.slots[seq.slot] = Slot()
        slot = self.slots[seq.slot]
        del slot.tail[seq.num_tail_tokens :]
        sealed = [token for page in seq.block_table for token in self.pages[page]]
        assert sealed + slot.tail == seq.token_ids[: seq.num_computed_tokens]
        assert slot.num_absorbed + seq.num_replay_tokens == seq.num_computed_tokens
        assert seq.num_replay_tokens <= slot.num_recorded
        slot.num_absorbed = seq.num_computed_tokens

    def _write_chunk(self, item: ScheduledSequence) -> None:
        seq, slot = item.seq, self.slots[item.seq.slot]
        end = seq.num_computed_tokens + item.num_scheduled_tokens
        assert item.num_scheduled_tokens > 1
        assert not item.draft_token_ids
        assert end <= seq.num_tokens
        assert item.num_logits == (end == seq.num_tokens)
        rows = slot.tail + seq.token_ids[seq.num_computed_tokens : end]
        assert len(item.seal_block_ids) == len(rows) // PAGE_SIZE
        self._seal(item.seal_block_ids, rows)
        slot.tail = rows[len(item.seal_block_ids) * PAGE_SIZE :]
        slot.num_absorbed, slot.num_recorded = end, 0

    def _write_rows(self, item: ScheduledSequence) -> None:
        seq, slot = item.seq, self.slots[item.seq.slot]
        assert item.num_scheduled_tokens == 1 + len(item.draft_token_ids)
        assert seq.num_uncomputed_tokens == 1
        assert item.num_logits == item.num_scheduled_tokens
        assert len(item.seal_block_ids) == (len(slot.tail) >= PAGE_SIZE)
        self._seal(item.seal_block_ids, slot.tail)
        del slot.tail[: len(item.seal_block_ids) * PAGE_SIZE]
        slot.tail += [seq.token_ids[-1], *item.draft_token_ids]
        assert len(slot.tail) <= TAIL_ROWS
        slot.num_recorded = item.num_scheduled_tokens

    def _seal(self, page_ids: list[int], rows: list[int]) -> None:
        for index, page_id in enumerate(page_ids):
            self.pages[page_id] = rows[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]


class Faulty(CheckedRunner):
    """Calls `fault` in step `at`: when it is launched, or when it is waited for."""

    def __init__(
        self, inner: CheckedRunner, at: int, fault: Callable[[], None], in_launch: bool
    ) -> None:
        self._checked = inner
        self._left = at
        self._fault = fault
        self._in_launch = in_launch
        self.batches = []

    def launch(self, batch: Batch) -> PendingStep:
        """As CheckedRunner, but for step `at`."""
        self._left -= 1
        pending = self._checked.launch(batch)
        if self._left:
            return pending
        if self._in_launch:
            self._fault()
            return pending
        return Late(pending, self._fault)


class Late:
    """A step in flight whose wait begins with `fault`."""

    def __init__(self, pending: PendingStep, fault: Callable[[], None]) -> None:
        self._pending = pending
        self._fault = fault

    def wait(self) -> StepOutput:
        """Call `fault`, then end the step."""
        self._fault()
        return self._pending.wait()


@dataclass(slots=True)
class Simulated:
    """An engine with everything that a test wants to look at."""

    engine: Engine
    scheduler: Scheduler
    blocks: BlockManager
    runner: CheckedRunner
    clock: VirtualClock
    model: SimModel
    host: BlockManager | None = None
    check: bool = True
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def add(self, request_id: str, num_prompt: int, deadline: float | None = None,
            priority: int = 0, num_shared: int = 0, **params: object) -> None:  # fmt: skip
        """Add a request that arrives now; its prompt is a function of its id behind `num_shared` tokens."""
        shared = (5 * i % 997 for i in range(min(num_shared, num_prompt)))
        own = ((hash_of(request_id) + 7 * i) % 997 for i in range(max(0, num_prompt - num_shared)))
        prompt = tuple(chain(shared, own))
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        request = Request(request_id, prompt, sampling, self.clock(), deadline, priority)
        self.engine.add(request)
        self.requests[request_id] = request

    def step(self) -> bool:
        """One step with every invariant checked before and after; collects outputs."""
        worked = self.engine.step()
        if self.check:
            self.scheduler.check()
        self.collect()
        return worked

    def run(self, max_steps: int = 100_000) -> int:
        """Step until nothing is live; returns how many steps that took."""
        for number in range(max_steps):
            if not self.step():
                return number
        raise AssertionError(f"still live after {max_steps} steps")

    def collect(self) -> None:
        """Sort the outputs by request; nothing may follow a final one."""
        while not self.engine.outputs.empty():
            output = self.engine.outputs.get()
            earlier = self.outputs.setdefault(output.request_id, [])
            assert not any(each.finished for each in earlier)
            earlier.append(output)

    def final(self, request_id: str) -> RequestOutput:
        """The last output of a finished request."""
        final = self.outputs[request_id][-1]
        assert final.finished
        return final

    def tokens(self, request_id: str) -> list[int]:
        """All tokens that came back."""
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def text(self, request_id: str) -> str:
        """All text that came back."""
        return "".join(output.text for output in self.outputs[request_id])

    def script(self, request_id: str, seed: int) -> list[int]:
        """The tokens that the simulated model says, up to the one that ends the request."""
        request = self.requests[request_id]
        seq = Sequence(
            0, request, list(request.prompt_token_ids), len(request.prompt_token_ids), seed
        )
        ends = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= self.model.eos_token_ids
        tokens: list[int] = []
        while len(tokens) < self.scheduler.limits.max_output(request):
            tokens.append(self.model.token(seq, seq.num_prompt_tokens + len(tokens)))
            if tokens[-1] in ends and len(tokens) > request.params.min_tokens:
                break
        return tokens

    def assert_nothing_held(self) -> None:
        """Every page and slot is back, on the host too."""
        for blocks in filter(None, (self.blocks, self.host)):
            assert blocks.num_used_pages == 0
            assert blocks.num_used_slots == 0
            blocks.check([])


def hash_of(text: str) -> int:
    """A small number that depends on the text alone."""
    return sum(ord(char) * (index + 1) for index, char in enumerate(text))


def simulate(
    config: EngineConfig | None = None,
    *,
    num_pages: int = 1000,
    max_model_len: int = 4096,
    model: SimModel | None = None,
    cost: StepCost = COST,
    check: bool = True,
    host: tuple[int, int] | None = None,
    num_checkpoints: int | None = None,
    has_openings: bool = False,
    wrap: Callable[[CheckedRunner], CheckedRunner] = lambda runner: runner,
) -> Simulated:
    """An engine in virtual time. Checks cost O(context) a step: `check=False` for huge prompts.

    host: pages and slots of the host tier. num_checkpoints: of prefix reuse on a hybrid model, None turns it off.
    has_openings: first pages are a class of their own.
    """
    from netra_backend.tokenizer import Detokenizer

    config = config or EngineConfig(max_num_seqs=8)
    model = model or SimModel()
    clock = VirtualClock()
    index = None if num_checkpoints is None else PrefixCache(num_checkpoints, True)
    blocks = _blocks((num_pages, config.max_num_seqs), index, has_openings)
    host_index = index and PrefixCache(0, needs_checkpoints=False)
    host_blocks = _blocks(host, host_index, has_openings) if host else None
    metrics = Metrics(max_model_len)
    scheduler = Scheduler(
        config,
        blocks,
        CostModel(),
        eos_token_ids=model.eos_token_ids,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        clock=clock,
        metrics=metrics,
        prefixes=index and PrefixReuse(blocks, index, "", 128, True),
        host=host_blocks,
    )
    inner = SimRunner(model, CostModel(cost), clock.advance)
    runner = CheckedRunner(inner, config.max_num_batched_tokens, check)
    tokenizer = WordTokenizer()

    def new_detokenizer(params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            tokenizer,  # type: ignore[arg-type]
            params.stop,
            params.skip_special_tokens,
            params.include_stop_str_in_output,
        )

    engine = Engine(
        config,
        wrap(runner),
        scheduler,
        tokenizer,  # type: ignore[arg-type]
        new_detokenizer,
        metrics,
        clock,
    )
    return Simulated(engine, scheduler, blocks, runner, clock, model, host_blocks, check)


def _blocks(sizes: tuple[int, int], index: PrefixCache | None, has_openings: bool) -> BlockManager:
    return BlockManager(*sizes, index, sizes[1] * has_openings)

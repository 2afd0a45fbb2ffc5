"""MemoryPlan: how one memory figure is split into pages, tails, state slots and checkpoints, and why.

Pure arithmetic on shapes, no torch and no device: the same solver serves start-up and bench/capacity.py.
Tensors are checked against these byte counts where they are allocated. There are separate pools for pages,
tails and states; a uniform page size would waste a third of the memory on hybrid models (kv-cache.md 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from netra_backend.config import ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.sequence import PAGE_SIZE, TAIL_ROWS

_FLOAT32_BYTES = 4
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How the keys or the values of a page are stored.

    scale_per: "token" (one float16 scale per token and head), "channel" (one per channel of the page) or ""
    (none). has_minimum: a float16 minimum beside each scale. is_rotated: Hadamard-rotated before coding.
    """

    code_bits: int
    scale_per: str
    has_minimum: bool
    is_rotated: bool


_INT8 = CodeFormat(8, "token", has_minimum=False, is_rotated=True)
_INT4_TOKEN = CodeFormat(4, "token", has_minimum=True, is_rotated=True)
_INT4_CHANNEL = CodeFormat(4, "channel", has_minimum=True, is_rotated=False)
_FP8 = CodeFormat(8, "", has_minimum=False, is_rotated=False)

PLAIN = "plain"
FORMATS: dict[str, tuple[CodeFormat, CodeFormat] | None] = {
    PLAIN: None,
    "int8": (_INT8, _INT8),
    "k8v4": (_INT8, _INT4_TOKEN),
    "int4": (_INT4_CHANNEL, _INT4_TOKEN),
    "fp8_e4m3": (_FP8, _FP8),
}
"""Codec name -> formats of keys and values; None stores elements of the compute type."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Bytes of one layer's page of a quantised codec: one block per KV head, without padding between them.

    A block is [K codes | V codes | K scales | K minima | V scales | V minima]; `ends[i]` is where part i
    ends. Codes are [PAGE_SIZE, head_dim]; eight 4-bit codes make a little-endian 32-bit word, nibble j of
    word w being channel w + j * head_dim / 8. The layout is that of kernels/netra_kernels/kv_codec.py.
    """

    num_kv_heads: int
    head_dim: int
    key: CodeFormat
    value: CodeFormat
    ends: tuple[int, ...]

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's block."""
        return self.ends[-1]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.num_kv_heads * self.head_bytes


def page_layout(codec: str, num_kv_heads: int, head_dim: int) -> PageLayout:
    """Layout of a quantised codec. Raises ConfigError for head sizes that are no power of two >= 16."""
    formats = FORMATS[codec]
    assert formats is not None, "plain pages have no byte layout"
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ConfigError(
            f"kv_cache_dtype={codec!r}: head size {head_dim} is no power of two from 16 on; use 'plain'"
        )
    sizes = [PAGE_SIZE * head_dim * part.code_bits // 8 for part in formats]
    for part in formats:
        count = {"token": PAGE_SIZE, "channel": head_dim, "": 0}[part.scale_per]
        sizes += [_SCALE_BYTES * count, _SCALE_BYTES * count * part.has_minimum]
    ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
    return PageLayout(num_kv_heads, head_dim, *formats, ends)


def layer_page_bytes(codec: str, model: ModelConfig, element_bytes: int) -> int:
    """Bytes of one sealed page of one attention layer."""
    if codec == PLAIN:
        return plain_kv_bytes(model, PAGE_SIZE, element_bytes)
    return page_layout(codec, model.num_kv_heads, model.head_dim).page_bytes


def bits_per_value(codec: str, model: ModelConfig, element_bytes: int) -> float:
    """Bits that a sealed key or value element takes, its share of scales included."""
    values = 2 * model.num_kv_heads * PAGE_SIZE * model.head_dim
    return 8 * layer_page_bytes(codec, model, element_bytes) / values


def draft_codec(codec: str) -> str:
    """The codec for a draft model's layers beside `codec`: never below 8 bits, for drafts are the first to
    suffer (kv-cache.md 2: public figures of acceptance with coarse draft caches).
    """
    return "int8" if codec in ("k8v4", "int4") else codec


def opening_codec(codec: str) -> str:
    """The codec for the first page of a sequence, "" for that of all others. The first token is a sink whose key
    lies far outside the others' range: 4-bit channels of its page would have no level left for them.
    """
    return "int8" if codec == "int4" else ""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a token's keys and values take: codec and unquantised tail of the model's attention layers, and of
    `num_draft_layers` more that a draft model keeps, which may use another codec, and have heads of its own
    (0: the model's). With an `opening_codec`, first pages of sequences are a pool of their own,
    `openings_per_slot` of them for each slot.
    """

    codec: str = PLAIN
    tail_rows: int = TAIL_ROWS
    num_draft_layers: int = 0
    draft_codec: str = PLAIN
    opening_codec: str = ""
    openings_per_slot: int = 1
    draft_kv_heads: int = 0
    draft_head_dim: int = 0

    def draft_shapes(self, model: ModelConfig) -> ModelConfig:
        """`model` with the key and value heads of the draft layers."""
        return replace(
            model,
            num_kv_heads=self.draft_kv_heads or model.num_kv_heads,
            head_dim=self.draft_head_dim or model.head_dim,
        )


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Shapes of what one running sequence owns besides its pages.

    `num_records` rows of k, v, beta and g wait for their absorption; the convolution keeps the columns that
    precede them too: conv_kernel - 1 + num_records.
    """

    num_records: int
    conv_columns: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Counts and bytes of the pools; `max_model_len` in tokens is what one conversation may reach.

    Bytes are of all layers: page_bytes per sealed page, opening_bytes per first page where those differ,
    tail_bytes and state_bytes per slot, checkpoint_bytes per recurrent-state checkpoint of prefix reuse; reserved_bytes
    are left for what steps compute.
    """

    num_pages: int
    num_slots: int
    max_model_len: int
    page_bytes: int
    tail_bytes: int
    state_bytes: int
    budget_bytes: int
    kv: KVLayout = KVLayout()
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    num_host_pages: int = 0
    num_host_slots: int = 0
    opening_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: tail and recurrent state."""
        return self.tail_bytes + self.state_bytes

    @property
    def num_opening_pages(self) -> int:
        """First pages with a pool of their own."""
        return self.num_slots * self.kv.openings_per_slot if self.kv.opening_codec else 0

    @property
    def num_host_opening_pages(self) -> int:
        """The same on the host: one per slot."""
        return self.num_host_slots if self.kv.opening_codec else 0

    @property
    def total_bytes(self) -> int:
        """Bytes that the pools and steps take."""
        pools = self.num_pages * self.page_bytes + self.num_slots * self.slot_bytes
        pools += self.num_opening_pages * self.opening_bytes + self.reserved_bytes
        return pools + self.num_checkpoints * self.checkpoint_bytes

    def plain_pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` needs besides its first one, if that has a pool of its own."""
        return max(1, pages_for(num_tokens) - bool(self.kv.opening_codec))

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the sealed pages of a sequence of `num_tokens`."""
        return self.plain_pages_for(num_tokens) * self.page_bytes + self.opening_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the host tier takes."""
        pages = self.num_host_pages * self.page_bytes + self.num_host_slots * self.slot_bytes
        return pages + self.num_host_opening_pages * self.opening_bytes

    @property
    def num_full_conversations(self) -> int:
        """Conversations of `max_model_len` tokens that fit at the same time."""
        return min(self.num_slots, self.num_pages // self.plain_pages_for(self.max_model_len))

    def describe(self) -> str:
        """The split in words, for the log."""
        parts = [
            f"{self.num_pages:,} {self.kv.codec} pages of {PAGE_SIZE} tokens "
            f"({_mib(self.num_pages * self.page_bytes)})",
            f"{self.num_slots} slots with a tail ({_mib(self.num_slots * self.tail_bytes)}) "
            f"and a recurrent state ({_mib(self.num_slots * self.state_bytes)})",
        ]
        if self.num_opening_pages:
            size = _mib(self.num_opening_pages * self.opening_bytes)
            parts.append(f"{self.num_opening_pages:,} {self.kv.opening_codec} first pages ({size})")
        if self.num_checkpoints:
            size = _mib(self.num_checkpoints * self.checkpoint_bytes)
            parts.append(f"{self.num_checkpoints} state checkpoints ({size})")
        if self.reserved_bytes:
            parts.append(f"steps and their graphs ({_mib(self.reserved_bytes)})")
        host = ""
        if self.num_host_slots:
            host = (
                f"; host: {_mib(self.host_bytes)}: {self.num_host_pages:,} pages and "
                f"{self.num_host_slots} slots for preempted sequences"
            )
        return (
            f"memory: {_mib(self.total_bytes)} of {_mib(self.budget_bytes)}: {', '.join(parts)}; "
            f"{self.num_full_conversations} conversations of {self.max_model_len:,} tokens fit{host}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def pages_for(num_tokens: int) -> int:
    """Pages that a sequence of `num_tokens` needs at most: its last token is never computed, and a page is
    filled when the token after it is.
    """
    return max(1, (num_tokens - 1) // PAGE_SIZE)


def tail_rows(max_draft_tokens: int) -> int:
    """Rows of a tail: a page of committed tokens and the drafts, in eights, TAIL_ROWS at most."""
    return min(TAIL_ROWS, PAGE_SIZE + -(-max_draft_tokens // 8) * 8)


def ring_tail_rows(max_draft_tokens: int) -> int:
    """The same where one launch seals a page, behind which as many drafts may wait, and writes a token and its drafts."""
    return tail_rows(2 * max_draft_tokens + 1)


def slot_layout(model: ModelConfig, max_draft_tokens: int) -> SlotLayout:
    """Rows that a slot keeps so that a rejected draft costs nothing: one token and its drafts."""
    num_records = 1 + max_draft_tokens
    return SlotLayout(num_records, max(0, model.conv_kernel - 1) + num_records)


def ring_layout(model: ModelConfig, max_draft_tokens: int) -> SlotLayout:
    """The same where rows are rings by position (the kernels'): the records being absorbed must not be those being
    written, and a prompt chunk must find its past in the columns while it leaves its own.
    """
    num_records, taps = 1 + max_draft_tokens, max(0, model.conv_kernel - 1)
    return SlotLayout(2 * num_records, max(2 * taps, taps + num_records))


def state_bytes(
    model: ModelConfig, layout: SlotLayout, element_bytes: int, state_element_bytes: int
) -> int:
    """Bytes of recurrent state per slot, all layers: states, conv columns, records (k, v; beta and g float32)."""
    heads, key_dim = model.linear_num_value_heads, model.linear_key_head_dim
    columns = layout.conv_columns * model.conv_channels * element_bytes
    vectors = model.linear_num_key_heads * key_dim + heads * model.linear_value_head_dim
    records = layout.num_records * (vectors * element_bytes + 2 * heads * _FLOAT32_BYTES)
    layers = model.num_linear_layers * (columns + records)
    return _recurrent_bytes(model, state_element_bytes) + layers


def checkpoint_bytes(model: ModelConfig, element_bytes: int, state_element_bytes: int) -> int:
    """Bytes of a copy of a committed state: the states and the convolution's window before the next token."""
    window = max(0, model.conv_kernel - 1) * model.conv_channels * element_bytes
    return _recurrent_bytes(model, state_element_bytes) + model.num_linear_layers * window


def _recurrent_bytes(model: ModelConfig, state_element_bytes: int) -> int:
    size = model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
    return model.num_linear_layers * size * state_element_bytes


def plain_kv_bytes(model: ModelConfig, num_tokens: int, element_bytes: int) -> int:
    """Bytes of unquantised K and V of `num_tokens` tokens in one layer."""
    return num_tokens * 2 * model.num_kv_heads * model.head_dim * element_bytes


def plan_memory(
    model: ModelConfig,
    *,
    budget_bytes: int,
    num_slots: int,
    max_model_len: int,
    element_bytes: int,
    state_element_bytes: int,
    max_draft_tokens: int,
    kv: KVLayout = KVLayout(),
    num_checkpoints: int = 0,
    checkpoint_element_bytes: int = _FLOAT32_BYTES,
    slots: SlotLayout | None = None,
    reserved_bytes: int = 0,
) -> MemoryPlan:
    """Split `budget_bytes`: slots (`slot_layout`'s by default), checkpoints and reserved bytes first, pages from the
    rest, never more than slots can use.

    `max_model_len` 0 means the model's own limit, lowered to what fits. Raises ConfigError that says what
    to lower when not even one conversation fits.
    """
    wanted_len = min(max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len}: the model was made for {model.max_position_embeddings} positions"
        )
    slots = slots or slot_layout(model, max_draft_tokens)
    layers, drafts = model.num_attention_layers, kv.num_draft_layers
    drafter = kv.draft_shapes(model)
    draft_page = draft_tail = 0
    if drafts:
        draft_page = drafts * layer_page_bytes(kv.draft_codec, drafter, element_bytes)
        draft_tail = drafts * plain_kv_bytes(drafter, kv.tail_rows, element_bytes)
    page = layers * layer_page_bytes(kv.codec, model, element_bytes) + draft_page
    tail = layers * plain_kv_bytes(model, kv.tail_rows, element_bytes) + draft_tail
    opening = 0
    if kv.opening_codec:
        opening = layers * layer_page_bytes(kv.opening_codec, model, element_bytes) + draft_page
    plan = MemoryPlan(
        num_pages=0,
        num_slots=num_slots,
        max_model_len=wanted_len,
        page_bytes=page,
        tail_bytes=tail,
        state_bytes=state_bytes(model, slots, element_bytes, state_element_bytes),
        budget_bytes=budget_bytes,
        kv=kv,
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=checkpoint_bytes(model, element_bytes, checkpoint_element_bytes),
        opening_bytes=opening,
        reserved_bytes=reserved_bytes,
    )
    num_pages = (budget_bytes - plan.total_bytes) // page
    needed = plan.plain_pages_for(wanted_len) if max_model_len else 1
    if num_pages < needed:
        raise ConfigError(_does_not_fit(plan, needed))
    model_len = min(wanted_len, (num_pages + bool(kv.opening_codec)) * PAGE_SIZE)
    num_pages = min(num_pages, num_slots * plan.plain_pages_for(model_len))
    return replace(plan, num_pages=num_pages, max_model_len=model_len)


def plan_host(plan: MemoryPlan, host_bytes: int) -> MemoryPlan:
    """`plan` with a host tier of `host_bytes`: as many pages per slot as on the device, which is what a
    preempted sequence holds on average when pages have run out. Raises ConfigError if not one page fits.
    """
    if host_bytes == 0:
        return plan
    pages_each = -(-plan.num_pages // plan.num_slots)
    slot_bytes = plan.slot_bytes + plan.opening_bytes
    num_slots = max(1, host_bytes // (slot_bytes + pages_each * plan.page_bytes))
    num_pages = (host_bytes - num_slots * slot_bytes) // plan.page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"host_cache_memory gives {host_bytes:,} bytes; a preempted sequence takes {slot_bytes:,} and "
            f"{plan.page_bytes:,} for each of its pages: raise it, or set it to 0 for no host tier"
        )
    return replace(plan, num_host_pages=num_pages, num_host_slots=num_slots)


def _does_not_fit(plan: MemoryPlan, needed: int) -> str:
    return (
        f"kv_cache_memory gives {plan.budget_bytes:,} bytes; {plan.num_slots} slots (max_num_seqs) take "
        f"{plan.num_slots * plan.slot_bytes:,} (tail {plan.tail_bytes:,} and state {plan.state_bytes:,} each), "
        f"{plan.num_checkpoints} checkpoints {plan.num_checkpoints * plan.checkpoint_bytes:,}, "
        f"{plan.num_opening_pages} first pages {plan.num_opening_pages * plan.opening_bytes:,}, steps {plan.reserved_bytes:,}, and "
        f"{needed} {plan.kv.codec} pages of {plan.page_bytes:,} bytes (max_model_len {plan.max_model_len}) do "
        "not fit into the rest: lower max_num_seqs or max_model_len, choose a smaller kv_cache_dtype, or raise kv_cache_memory"
    )

"""PrefixReuse: what a sequence takes from the prefix cache when it starts, and what it leaves there.

Knows tokens and positions; the index is prefix_cache.py's and the pages are the block manager's. A page is
findable from the step that filled it on, so requests share a prefix while the first one still runs. States are
copied at page boundaries only, from committed state only: at the end of a prompt, every `interval` tokens, and
at each page of an answer, where a conversation's newest copy replaces the one before.
"""

from __future__ import annotations

from collections.abc import Iterator

from netra_backend.batch import ScheduledSequence
from netra_backend.block_manager import BlockManager
from netra_backend.prefix_cache import PrefixCache, extend_keys, root_key
from netra_backend.sequence import PAGE_SIZE, Sequence


class PrefixReuse:
    """`salt` names what pages depend on besides tokens (model, codec); `interval` is in tokens."""

    def __init__(
        self, blocks: BlockManager, cache: PrefixCache, salt: str, interval: int, has_states: bool
    ) -> None:
        self._blocks = blocks
        self._cache = cache
        self._salt = salt
        self._interval = interval
        self._has_states = has_states
        self._rolling: dict[int, bytes] = {}  # seq_id -> key of the newest checkpoint of its answer
        self._saving: dict[int, list[tuple[int, int]]] = {}  # seq_id -> (position, checkpoint id)

    def start(self, seq: Sequence) -> int:
        """Give `seq` the pages of its longest usable prefix; the checkpoint to restore, or -1.

        At least one token is left to compute, since its logits are wanted.
        """
        hit = self._cache.match(self._chain(seq, (seq.num_tokens - 1) // PAGE_SIZE))
        self._blocks.share_pages(hit.page_ids)
        seq.block_table = hit.page_ids
        seq.num_computed_tokens = len(hit.page_ids) * PAGE_SIZE
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        return hit.checkpoint_id

    def keys(self, seq: Sequence, num_pages: int) -> list[bytes]:
        """Keys of the first pages of `seq`."""
        self._extend(seq, num_pages)
        return seq.page_keys[:num_pages]

    def _chain(self, seq: Sequence, num_pages: int) -> Iterator[bytes]:
        for index in range(num_pages):  # page by page: most chains break early
            self._extend(seq, index + 1)
            yield seq.page_keys[index]

    def _extend(self, seq: Sequence, num_pages: int) -> None:
        if len(seq.page_keys) < num_pages:
            root = root_key(self._salt, seq.request.cache_salt)
            extend_keys(seq.page_keys, root, seq.token_ids, num_pages)

    def plan(self, item: ScheduledSequence) -> None:
        """Say which states of the step are to be copied, before it runs."""
        if not self._has_states:
            return
        seq = item.seq
        if item.is_chunk:
            start = seq.num_computed_tokens
            positions = self._chunk_positions(start, start + item.num_scheduled_tokens, seq)
        elif item.seal_block_ids:
            # The first sealed page of a step that is no chunk ends where the state is absorbed up to.
            start = seq.num_computed_tokens - seq.num_replay_tokens
            positions = [(len(seq.block_table) + 1) * PAGE_SIZE]
        else:
            return
        for position in positions:
            checkpoint_id = self._cache.reserve_checkpoint()
            if checkpoint_id >= 0:
                item.checkpoints.append((position - start, checkpoint_id))
                self._saving.setdefault(seq.seq_id, []).append((position, checkpoint_id))

    def _chunk_positions(self, start: int, end: int, seq: Sequence) -> list[int]:
        step = self._interval
        positions = set(range((start // step + 1) * step, end + 1, step))
        # The same prompt again has to compute one token at least.
        last_page = (seq.num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        if start < last_page <= end:
            positions.add(last_page)
        return sorted(positions)

    def commit(self, item: ScheduledSequence) -> None:
        """Make the pages and states of a step findable, once it is done and `block_table` has its pages."""
        seq = item.seq
        if item.seal_block_ids:
            self._extend(seq, len(seq.block_table))
            first = len(seq.block_table) - len(item.seal_block_ids)
            for key, page_id in zip(seq.page_keys[first:], item.seal_block_ids, strict=False):
                self._cache.add_page(key, page_id)
        for position, checkpoint_id in self._saving.pop(seq.seq_id, ()):
            key = seq.page_keys[position // PAGE_SIZE - 1]
            self._cache.add_checkpoint(key, checkpoint_id)
            if not item.is_chunk:
                self._replace_rolling(seq, key, position)

    def _replace_rolling(self, seq: Sequence, key: bytes, position: int) -> None:
        previous = self._rolling.pop(seq.seq_id, None)
        if previous is not None:
            self._cache.drop_checkpoint(previous)
        if position % self._interval:
            self._rolling[seq.seq_id] = key

    def forget(self, seq: Sequence) -> None:
        """The sequence left: its newest checkpoint stays until it is evicted."""
        self._rolling.pop(seq.seq_id, None)

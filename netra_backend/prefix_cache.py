"""PrefixCache: which resident page or state checkpoint holds which prefix.

One key for both: the chained hash of a page, H(key of the page before, the page's tokens), salted once at the
root. Knows keys and ids only: not who references a page (block_manager.py) and not where a state lies. For a
hybrid model a prefix is only usable where a checkpoint of the recurrent state was taken, so a hit is the
longest chain of resident pages that ends at a checkpoint.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from hashlib import blake2b

from netra_backend.sequence import PAGE_SIZE

_KEY_BYTES = 16


def root_key(*salts: str) -> bytes:
    """Where a chain starts: model, codec, adapter and tenant decide whose pages may be shared."""
    return blake2b("\0".join(salts).encode(), digest_size=_KEY_BYTES).digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: TokenIds[int], num_pages: int) -> None:
    """Grow `keys`, the keys of the first pages of `token_ids`, to `num_pages` of them."""
    while len(keys) < num_pages:
        start = len(keys) * PAGE_SIZE
        tokens = array("q", token_ids[start : start + PAGE_SIZE])
        parent = keys[-1] if keys else root
        keys.append(blake2b(parent + tokens.tobytes(), digest_size=_KEY_BYTES).digest())


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Pages to share, and the checkpoint (-1: none needed) that holds the state at their end."""

    page_ids: list[int]
    checkpoint_id: int


class PrefixCache:
    """Index of pages and checkpoints; `num_checkpoints` 0 is a model without recurrent state."""

    def __init__(self, num_checkpoints: int, needs_checkpoints: bool) -> None:
        self._needs_checkpoints = needs_checkpoints
        self._pages: dict[bytes, int] = {}
        self._page_keys: dict[int, bytes] = {}
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._free_checkpoints = list(range(num_checkpoints))

    @property
    def num_pages(self) -> int:
        """Pages that can be found."""
        return len(self._pages)

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that can be found."""
        return len(self._checkpoints)

    def match(self, keys: Iterable[bytes]) -> PrefixHit:
        """The longest usable prefix among the pages with these chained `keys`."""
        page_ids: list[int] = []
        usable, checkpoint_key = 0, b""
        for key in keys:
            page_id = self._pages.get(key)
            if page_id is None:
                break
            page_ids.append(page_id)
            if not self._needs_checkpoints:
                usable = len(page_ids)
            elif key in self._checkpoints:
                usable, checkpoint_key = len(page_ids), key
        if not checkpoint_key:
            return PrefixHit(page_ids[:usable], -1)
        self._checkpoints.move_to_end(checkpoint_key)
        return PrefixHit(page_ids[:usable], self._checkpoints[checkpoint_key])

    def add_page(self, key: bytes, page_id: int) -> None:
        """Make a filled page findable, unless an equal one is already."""
        if key not in self._pages and page_id not in self._page_keys:
            self._pages[key] = page_id
            self._page_keys[page_id] = key

    def find_page(self, key: bytes) -> int | None:
        """The page with this key."""
        return self._pages.get(key)

    def has_page(self, page_id: int) -> bool:
        """Whether the page can be found."""
        return page_id in self._page_keys

    def drop_page(self, page_id: int) -> None:
        """Forget a page that is to be filled anew; its checkpoint is stranded, so it goes first."""
        key = self._page_keys.pop(page_id, None)
        if key is None:
            return
        del self._pages[key]
        checkpoint_id = self._checkpoints.pop(key, None)
        if checkpoint_id is not None:
            self._free_checkpoints.append(checkpoint_id)

    def reserve_checkpoint(self) -> int:
        """An id to save a state into, -1 if there are none: a free one, else the least recently used."""
        if not self._free_checkpoints and self._checkpoints:
            _, checkpoint_id = self._checkpoints.popitem(last=False)
            return checkpoint_id
        return self._free_checkpoints.pop() if self._free_checkpoints else -1

    def add_checkpoint(self, key: bytes, checkpoint_id: int) -> None:
        """Make a saved state findable at the end of the page with `key`; give the id back if it is useless."""
        if key in self._pages and key not in self._checkpoints:
            self._checkpoints[key] = checkpoint_id
        else:
            self._free_checkpoints.append(checkpoint_id)

    def drop_checkpoint(self, key: bytes) -> None:
        """Forget a checkpoint that a later one of the same conversation replaces."""
        checkpoint_id = self._checkpoints.pop(key, None)
        if checkpoint_id is not None:
            self._free_checkpoints.append(checkpoint_id)

    def check(self, num_checkpoints: int, num_reserved: int) -> None:
        """Assert that both directions agree and that no checkpoint is lost."""
        assert {page: key for key, page in self._pages.items()} == self._page_keys
        assert set(self._checkpoints) <= set(self._pages), "a stranded checkpoint"
        held = [*self._checkpoints.values(), *self._free_checkpoints]
        assert len(set(held)) == len(held) == num_checkpoints - num_reserved

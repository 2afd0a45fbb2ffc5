"""DraftPlan: which proposer a deployment has, and what the memory plan and the model must know of it.

Made before any weight is loaded, from the knobs and the checkpoints' shapes. Knows every proposer's needs, none
of their inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from netra_backend.cache.kv_cache import KVCache
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.memory_plan import KVLayout, draft_codec, tail_rows
from netra_backend.models.qwen3_5_moe import Qwen35Moe
from netra_backend.models.registry import Model
from netra_backend.spec.chain import ChainProposer
from netra_backend.spec.dflash import DflashProposer, load_dflash
from netra_backend.spec.drafter_config import MAX_BLOCK_SIZE, DrafterConfig
from netra_backend.spec.eagle3 import load_eagle3
from netra_backend.spec.mtp import has_mtp, load_mtp_head
from netra_backend.spec.ngram import NgramProposer
from netra_backend.spec.proposer import LookupFirst, Proposer

_DEFAULT_DRAFTS = {"ngram": 8, "mtp": 4, "eagle3": 4}

LOOKUP_BEFORE_MODEL = 4
"""Tokens of agreement from which a lookup is trusted more than a draft model (2.84 tokens a step with 4 drafts
on random excerpts of the standard library, 2.17 with MTP alone, 2.26 with lookups alone; small checkpoint).
"""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """model_method: "mtp", "eagle3", "dflash", or "" without a draft model; with_lookup: n-grams are looked up,
    first if there is a model too. `drafter` and its directory are those of eagle3 and dflash.
    """

    model_method: str = ""
    with_lookup: bool = False
    max_draft_tokens: int = 0
    drafter: DrafterConfig | None = None
    directory: Path = Path()

    @property
    def has_cache(self) -> bool:
        """Whether the proposer keeps keys and values."""
        return bool(self.model_method)

    @property
    def tap_places(self) -> tuple[int, ...]:
        """After how many of the target's layers the proposer wants its hidden states; () for the final ones."""
        return self.drafter.tap_places if self.drafter else ()

    def kv_layout(self, codec: str) -> KVLayout:
        """Pages and tails of the target and of the drafter. A chain runs ahead in the tails, a block does not."""
        drafter = self.drafter
        runs_ahead = self.has_cache and self.model_method != "dflash"
        return KVLayout(
            codec,
            tail_rows((2 if runs_ahead else 1) * self.max_draft_tokens),
            num_draft_layers=drafter.num_layers if drafter else int(self.has_cache),
            draft_codec=draft_codec(codec),
            draft_kv_heads=drafter.num_kv_heads if drafter else 0,
            draft_head_dim=drafter.head_dim if drafter else 0,
        )


def plan_drafts(
    config: EngineConfig, checkpoint: Path, model: ModelConfig, device: torch.device
) -> DraftPlan:
    """What `speculation`, `num_draft_tokens` and `drafter_checkpoint` ask for.

    Raises ConfigError for a drafter that is missing, not used, of another method, or not made for the model.
    """
    asked = config.speculation.split("+")
    wants_drafter = not {"eagle3", "dflash", "auto"}.isdisjoint(asked)
    drafter, directory = None, Path()
    if config.drafter_checkpoint:
        if not wants_drafter:
            raise ConfigError(
                f"drafter_checkpoint={config.drafter_checkpoint!r} is not used by "
                f"speculation={config.speculation!r}: choose eagle3, dflash or auto"
            )
        directory = Path(config.drafter_checkpoint)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"drafter_checkpoint={str(directory)!r}: no config.json there")
        drafter = DrafterConfig.from_directory(directory, model)
    if asked == ["auto"]:
        own = "mtp" if has_mtp(checkpoint, model, device) else "ngram"
        asked = [drafter.method if drafter else own]
    method = next((name for name in asked if name not in ("none", "ngram")), "")
    if method in ("eagle3", "dflash") and (drafter is None or drafter.method != method):
        found = f"that is a drafter for {drafter.method}" if drafter else "it is not set"
        raise ConfigError(
            f"speculation={config.speculation!r} needs drafter_checkpoint, the directory of such a "
            f"drafter; {found}"
        )
    return DraftPlan(
        method, "ngram" in asked, _most_drafts(config, asked[-1], drafter), drafter, directory
    )


def _most_drafts(config: EngineConfig, method: str, drafter: DrafterConfig | None) -> int:
    if method == "none":
        return 0
    if drafter is None or drafter.method != "dflash":
        return config.num_draft_tokens or _DEFAULT_DRAFTS[method]
    most = drafter.block_size - 1
    if config.num_draft_tokens > most:
        raise ConfigError(
            f"num_draft_tokens={config.num_draft_tokens}: the drafter's blocks of {drafter.block_size} hold "
            f"{most} drafts"
        )
    return config.num_draft_tokens or most


def make_proposer(
    plan: DraftPlan,
    checkpoint: Path,
    model_config: ModelConfig,
    model: Model,
    cache: KVCache,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Proposer | None:
    """Load what `plan` says; None if nothing is drafted. Raises ConfigError as the loaders do."""
    if not plan.has_cache:
        return NgramProposer() if plan.with_lookup else None
    proposer: Proposer
    if plan.drafter is None:
        if not isinstance(model, Qwen35Moe):
            raise ConfigError(f"speculation='mtp': {model_config.model_type} has no MTP layer")
        head = load_mtp_head(checkpoint, model_config, model, dtype, device)
        proposer = ChainProposer(head, cache.draft_layers[0])
    else:
        max_len = max_model_len + MAX_BLOCK_SIZE + 1
        proposer = _load_drafter(plan.directory, plan.drafter, model, cache, max_len, dtype, device)
    if plan.with_lookup:
        return LookupFirst(NgramProposer(LOOKUP_BEFORE_MODEL), proposer)
    return proposer


def _load_drafter(
    directory: Path,
    config: DrafterConfig,
    model: Model,
    cache: KVCache,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Proposer:
    try:
        if config.method == "eagle3":
            head = load_eagle3(directory, config, model, max_len, dtype, device)
            return ChainProposer(head, cache.draft_layers[0])
        drafter = load_dflash(directory, config, model, max_len, dtype, device)
        return DflashProposer(drafter, cache.draft_layers)
    except ConfigError as error:
        raise ConfigError(f"drafter_checkpoint={str(directory)!r}: {error}") from error

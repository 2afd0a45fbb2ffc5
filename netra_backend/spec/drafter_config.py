"""DrafterConfig: the shapes of a separate draft model (EAGLE-3 or DFlash), from its config.json, and its fit to a target.

Knows no torch and no weights. Two conventions for tapped layers meet here: EAGLE-3 counts the residual stream
before layer i, DFlash the output of layer i. `tap_places` counts layers that ran: 0 is the embedding.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netra_backend.config import ModelConfig
from netra_backend.errors import ConfigError

Json = Mapping[str, typing.Any]

MAX_BLOCK_SIZE = 16
"""One anchor and 15 drafts; num_draft_tokens goes no further."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies over the whole head; factor 1 is plain, more is YaRN (Peng et al., 2023)."""

    theta: float
    factor: float = 1.0
    original_len: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """What a block's rows see in one DFlash layer: the last `window` positions (0: all), and of the block
    itself everything, or with `causal` no later row.
    """

    window: int
    causal: bool


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Fields of the other method, and of parts that a checkpoint does not have, are 0, empty or False.

    method: "eagle3" or "dflash". draft_vocab_size: rows of an output head of its own, 0 without one.
    """

    method: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tap_places: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    block_size: int = 0
    mask_token_id: int = 0
    attentions: tuple[BlockAttention, ...] = ()
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float = 0.0

    @classmethod
    def from_directory(cls, directory: Path, target: ModelConfig) -> DrafterConfig:
        """Read a drafter's config.json. Raises ConfigError for what is missing, not supported or not made for
        `target`: hidden size, vocabulary, tapped layers.
        """
        path = directory / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"drafter_checkpoint: cannot read {path}: {error}") from error
        raw = {**raw, **raw.get("transformer_layer_config", {})}
        try:
            is_eagle = _method(raw, path) == "eagle3"
            config = _eagle3(raw, len(target.layer_types)) if is_eagle else _dflash(raw)
        except KeyError as error:
            raise ConfigError(
                f"drafter_checkpoint: {path}: {error.args[0]!r} is missing"
            ) from error
        config._check_fits(target)
        return config

    def _check_fits(self, target: ModelConfig) -> None:
        num_layers = len(target.layer_types)
        outside = [place for place in self.tap_places if not 0 <= place <= num_layers]
        pairs = (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        )
        problems = [
            f"{name} {mine} is not the target's {its}" for name, mine, its in pairs if mine != its
        ]
        if outside:
            problems.append(f"taps after layers {outside}, and the target has {num_layers} layers")
        if not 0 <= self.mask_token_id < target.vocab_size:
            problems.append(f"mask_token_id {self.mask_token_id} is no token of the target")
        if self.draft_vocab_size > target.vocab_size:
            problems.append(f"draft_vocab_size {self.draft_vocab_size} exceeds the vocabulary")
        if problems:
            raise ConfigError(
                f"drafter_checkpoint does not fit the checkpoint: {'; '.join(problems)}"
            )


def _method(raw: Json, path: Path) -> str:
    names = " ".join([*raw.get("architectures", []), str(raw.get("speculators_model_type", ""))])
    found = [method for method in ("eagle3", "dflash") if method in names.lower()]
    if len(found) != 1:
        raise ConfigError(
            f"drafter_checkpoint: {path}: architectures {names.strip()!r} name neither an EAGLE-3 head "
            "nor a DFlash drafter"
        )
    return found[0]


def _common(raw: Json) -> dict[str, typing.Any]:
    refused = {
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "quantization_config": raw.get("quantization_config"),
    }
    if any(refused.values()):
        raise ConfigError(
            "drafter_checkpoint uses options that are not supported: "
            + ", ".join(name for name, bad in refused.items() if bad)
        )
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    return {
        "hidden_size": hidden,
        "intermediate_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or hidden // heads,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope": _rope(raw),
        "target_hidden_size": raw.get("target_hidden_size") or hidden,
        "vocab_size": raw["vocab_size"],
    }


def _rope(raw: Json) -> Rope:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 1e6)
    if kind == "default":
        return Rope(theta)
    if kind != "yarn" or rope.get("mscale") or not rope.get("truncate", True):
        raise ConfigError(f"drafter_checkpoint: rope type {kind!r} with {rope} is not supported")
    factor = float(rope["factor"])
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(
        theta,
        factor=factor,
        original_len=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(rope.get("attention_factor") or usual),
    )


def _eagle3(raw: Json, num_target_layers: int) -> DrafterConfig:
    own = {**raw, **raw.get("eagle_config", {})}
    if raw.get("num_hidden_layers", 1) != 1:
        raise ConfigError(
            f"drafter_checkpoint: an EAGLE-3 head of {raw['num_hidden_layers']} layers is not supported"
        )
    if own.get("norm_before_fc") and own.get("fc_norm"):
        raise ConfigError("drafter_checkpoint: norm_before_fc and fc_norm exclude one another")
    usual = (2, num_target_layers // 2, num_target_layers - 3)
    taps = own.get("eagle_aux_hidden_state_layer_ids") or usual
    return DrafterConfig(
        method="eagle3",
        num_layers=1,
        tap_places=tuple(taps),
        draft_vocab_size=own.get("draft_vocab_size") or raw["vocab_size"],
        norm_before_residual=bool(own.get("norm_before_residual")),
        norm_before_fc=bool(own.get("norm_before_fc")),
        fc_norm=bool(own.get("fc_norm")),
        norm_output=bool(own.get("norm_output")),
        **_common(raw),
    )


def _dflash(raw: Json) -> DrafterConfig:
    own = {**raw, **raw.get("dflash_config", {})}
    if own.get("attention_sink_bias") or own.get("add_swa_attention_sink_bias"):
        raise ConfigError("drafter_checkpoint: attention sinks are not supported")
    block = own["block_size"]
    if not 2 <= block <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"drafter_checkpoint: block_size {block}, supported are 2 to {MAX_BLOCK_SIZE}"
        )
    if "aux_hidden_state_layer_ids" in own:  # the convention of the speculators library
        places = tuple(own["aux_hidden_state_layer_ids"])
    else:
        places = tuple(layer + 1 for layer in own["target_layer_ids"])
    num_layers = raw["num_hidden_layers"]
    has_head = own.get("draft_vocab_size") or 0
    return DrafterConfig(
        method="dflash",
        num_layers=num_layers,
        tap_places=places,
        draft_vocab_size=has_head if has_head != raw["vocab_size"] else 0,
        block_size=block,
        mask_token_id=own["mask_token_id"],
        attentions=tuple(_block_attention(own, layer) for layer in range(num_layers)),
        conv_kernel=own.get("conv_kernel_size") or 0,
        conv_group=own.get("conv_group_size") or 0,
        selector_rank=own.get("selector_rank") or 0,
        selector_top_k=own.get("selector_top_k") or 0,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        output_multiplier=float(own.get("output_multiplier") or 1.0),
        logit_softcap=float(own.get("final_logit_softcapping") or 0.0),
        **_common(raw),
    )


def _block_attention(own: Json, layer: int) -> BlockAttention:
    """A sliding layer is causal unless the config says otherwise, a full one is not (as in vLLM's qwen3_dflash)."""
    types = own.get("layer_types") or []
    listed = "sliding_attention" in types
    slides = types[layer] == "sliding_attention" if listed else bool(own.get("use_swa"))
    causal = own.get("causal", own.get("is_causal"))
    window = (own.get("swa_window_size") or own["sliding_window"]) if slides else 0
    return BlockAttention(window, (listed and slides) if causal is None else bool(causal))

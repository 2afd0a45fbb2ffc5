"""EngineConfig: every knob of a deployment, from config.pbtxt `parameters`; ModelConfig: a checkpoint's shapes.

Knows no server and no torch: it turns text into checked values. The defaults live here and nowhere
else; a test holds the shipped config.pbtxt to the same keys and values. Sizes that depend on the model
(how many pages fit) are worked out by memory_plan.py, not here.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from netra_backend.errors import ConfigError

_SPECULATIONS = (
    "none", "ngram", "mtp", "eagle3", "dflash", "ngram+mtp", "ngram+eagle3", "ngram+dflash", "auto",
)  # fmt: skip

_BYTE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_KV_CACHE_DTYPES = ("auto", "plain", "int8", "k8v4", "int4", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All knobs. Units are in the names; 0 or an empty value means "choose for me" where stated.

    Raises ConfigError that names the key, the value and what is accepted.
    """

    checkpoint: str = "../../checkpoints/netra-tiny"
    device: str = "auto"
    dtype: str = "auto"
    lm_head_dtype: str = "auto"
    num_threads: int = 0
    enable_cuda_graphs: bool = True
    seed: int = 0

    max_model_len: int = 0
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_partial_prompts: int = 3
    target_tpot_ms: float = 0.0

    kv_cache_dtype: str = "auto"
    kv_cache_memory: str = "0.5"
    host_cache_memory: str = "0"
    state_dtype: str = "float32"
    allow_fp8_without_qk_norm: bool = False
    enable_prefix_caching: bool = True
    prefix_checkpoint_interval: int = 2048
    num_prefix_checkpoints: int = 0
    prefix_checkpoint_dtype: str = "float32"

    speculation: str = "none"
    drafter_checkpoint: str = ""
    num_draft_tokens: int = 0
    adaptive_drafts: bool = True

    max_queued_requests: int = 1024
    max_queued_tokens: int = 0
    request_timeout_seconds: float = 0.0
    watchdog_seconds: float = 120.0

    default_max_tokens: int = 256
    default_temperature: float = -1.0
    default_top_p: float = 0.0
    default_top_k: int = -1

    max_responses_per_second: float = 1500.0
    response_interval_ms: float = 20.0
    cancel_poll_ms: float = 500.0
    early_response: bool = False
    metrics_interval_seconds: float = 1.0

    trace_file: str = ""

    def __post_init__(self) -> None:
        for name, valid, expected in self._checks():
            if not valid:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {expected}")

    def _checks(self) -> tuple[tuple[str, bool, str], ...]:
        return (
            ("checkpoint", bool(self.checkpoint), "a directory in Hugging Face layout"),
            ("device", self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
            ("dtype", self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
            ("lm_head_dtype", self.lm_head_dtype in ("auto", "fp8"), "auto (as dtype) or fp8"),
            ("num_threads", self.num_threads >= 0, "0 (all cores) or a count"),
            ("max_model_len", self.max_model_len >= 0, "0 (the model's limit) or a token count"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_num_batched_tokens", self.max_num_batched_tokens >= 64, "at least 64"),
            ("max_partial_prompts", self.max_partial_prompts >= 1, "at least 1"),
            ("target_tpot_ms", self.target_tpot_ms >= 0, "0 (none) or milliseconds"),
            ("kv_cache_dtype", self.kv_cache_dtype in _KV_CACHE_DTYPES, ", ".join(_KV_CACHE_DTYPES)),
            ("kv_cache_memory", _bytes_of(self.kv_cache_memory, 2**40) > 0,
             "a fraction below 1 or bytes, like 0.5 or 8GiB"),
            ("host_cache_memory", _bytes_of(self.host_cache_memory, 2**40) >= 0,
             "0 (none), a fraction below 1 or bytes, like 0.5 or 8GiB"),
            ("state_dtype", self.state_dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("speculation", self.speculation in _SPECULATIONS, " or ".join(_SPECULATIONS)),
            ("num_draft_tokens", 0 <= self.num_draft_tokens <= 16, "0 (choose for me) to 16"),
            ("prefix_checkpoint_interval",
             self.prefix_checkpoint_interval >= 64 and self.prefix_checkpoint_interval % 64 == 0,
             "a multiple of 64"),
            ("num_prefix_checkpoints", self.num_prefix_checkpoints >= 0, "0 (four per running request) or a count"),
            ("prefix_checkpoint_dtype", self.prefix_checkpoint_dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("max_queued_requests", self.max_queued_requests >= 0, "0 (no limit) or a count"),
            ("max_queued_tokens", self.max_queued_tokens >= 0, "0 (no limit) or a token count"),
            ("request_timeout_seconds", self.request_timeout_seconds >= 0, "0 (none) or seconds"),
            ("watchdog_seconds", self.watchdog_seconds > 0, "seconds"),
            ("default_max_tokens", self.default_max_tokens >= 1, "at least 1"),
            ("default_temperature", self.default_temperature >= 0 or self.default_temperature == -1,
             "-1 (the checkpoint's) or a temperature"),
            ("default_top_p", 0 <= self.default_top_p <= 1, "0 (the checkpoint's) or at most 1"),
            ("default_top_k", self.default_top_k >= -1, "-1 (the checkpoint's), 0 (off) or a count"),
            ("max_responses_per_second", self.max_responses_per_second > 0, "positive"),
            ("response_interval_ms", self.response_interval_ms >= 0, "milliseconds"),
            ("cancel_poll_ms", self.cancel_poll_ms > 0, "milliseconds"),
            ("metrics_interval_seconds", self.metrics_interval_seconds > 0, "seconds"),
        )  # fmt: skip

    def kv_cache_bytes(self, available_bytes: int) -> int:
        """Bytes for pages, tails and states, of `available_bytes` that are free once weights are loaded."""
        return _bytes_of(self.kv_cache_memory, available_bytes)

    def host_cache_bytes(self, available_bytes: int) -> int:
        """Bytes for preempted sequences, of `available_bytes` of host memory that are free then."""
        return _bytes_of(self.host_cache_memory, available_bytes)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> EngineConfig:
        """Make a config from config.pbtxt `parameters` (all strings).

        Raises ConfigError naming key, value and the known keys for an unknown key or a wrong type.
        """
        types = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, typing.Any] = {}
        for key, text in parameters.items():
            if key not in types:
                raise ConfigError(f"unknown parameter {key}={text!r}; known: {', '.join(known)}")
            try:
                values[key] = _PARSERS[types[key]](text)
            except ValueError as error:
                expected = types[key].__name__
                raise ConfigError(
                    f"{key}={text!r} is not a valid {expected}; known keys: {', '.join(known)}"
                ) from error
        return cls(**values)

    def checkpoint_path(self, model_directory: Path) -> Path:
        """The checkpoint directory; a relative one starts at the model's directory in the repository.

        Raises ConfigError if there is none.
        """
        path = (model_directory / self.checkpoint).resolve()
        if not (path / "config.json").is_file():
            raise ConfigError(f"checkpoint={self.checkpoint!r}: no config.json in {path}")
        return path

    def with_drafter_path(self, model_directory: Path) -> EngineConfig:
        """The same with `drafter_checkpoint`, if there is one, made absolute as checkpoint_path does."""
        if not self.drafter_checkpoint:
            return self
        path = (model_directory / self.drafter_checkpoint).resolve()
        return dataclasses.replace(self, drafter_checkpoint=str(path))


def _bytes_of(text: str, available_bytes: int) -> int:
    """A number with a unit, or without one as bytes, or below 1 as a fraction; -1 for anything else."""
    number, factor = text.strip(), 0
    for unit, size in _BYTE_UNITS.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), size
            break
    try:
        value = float(number)
        return int(value * (factor or (available_bytes if value < 1 else 1)))
    except (ValueError, OverflowError):
        return -1


def _parse_bool(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.strip().lower() not in values:
        raise ValueError(text)
    return values[text.strip().lower()]


_PARSERS: dict[type, Callable[[str], object]] = {
    str: str,
    int: int,
    float: float,
    bool: _parse_bool,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shapes of a checkpoint, read from its config.json (the text part of a multimodal one).

    `layer_types[i]` is "full_attention" or "linear_attention" (Gated DeltaNet). Sizes of parts that an
    architecture does not have are 0. `fp8_block` is the side of FP8 weight blocks, 0 without quantisation.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    conv_kernel: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    num_mtp_layers: int = 0
    fp8_block: int = 0
    has_qk_norm: bool = False

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep K and V."""
        return self.layer_types.count("full_attention")

    @property
    def num_linear_layers(self) -> int:
        """Layers that keep a recurrent state."""
        return self.layer_types.count("linear_attention")

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution of a Gated DeltaNet layer: q, k and v side by side."""
        return (
            2 * self.linear_num_key_heads * self.linear_key_head_dim
            + self.linear_num_value_heads * self.linear_value_head_dim
        )

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a config.json. Raises ConfigError for an architecture or an option that is not supported."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        text = raw.get("text_config", raw)
        model_type = str(text.get("model_type", raw.get("model_type"))).removesuffix("_text")
        if model_type not in _MODEL_TYPES:
            raise ConfigError(
                f"{path}: model_type {model_type!r}; supported: {', '.join(_MODEL_TYPES)}"
            )
        try:
            return _MODEL_TYPES[model_type](text, raw.get("quantization_config") or {})
        except KeyError as error:
            raise ConfigError(f"{path}: {error.args[0]!r} is missing") from error


Json = Mapping[str, typing.Any]


def _common(text: Json, quantization: Json) -> dict[str, typing.Any]:
    """Fields that all architectures share; refuses what would be computed wrongly in silence."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    block = quantization.get("weight_block_size") or [0, 0]
    refused = {
        "rope type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "attention_bias": bool(text.get("attention_bias")),
        "mlp_bias": bool(text.get("mlp_bias")),
        "hidden_act": text.get("hidden_act", "silu") != "silu",
        "quantization method": quantization.get("quant_method", "fp8") != "fp8",
        "weight_block_size": block[0] != block[1] or (bool(quantization) and block[0] == 0),
    }
    if any(refused.values()):
        raise ConfigError(
            "the checkpoint uses options that are not supported: "
            + ", ".join(name for name, bad in refused.items() if bad)
        )
    return {
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_kv_heads": text.get("num_key_value_heads", text["num_attention_heads"]),
        "head_dim": head_dim,
        "rms_norm_eps": text["rms_norm_eps"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_theta": float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0),
        "rotary_dim": int(head_dim * partial),
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        "fp8_block": block[0],
    }


def _llama(text: Json, quantization: Json) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        layer_types=("full_attention",) * text["num_hidden_layers"],
        intermediate_size=text["intermediate_size"],
        **_common(text, quantization),
    )


def _qwen3_5_moe(text: Json, quantization: Json) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3_5_moe",
        layer_types=tuple(text["layer_types"]),
        linear_num_key_heads=text["linear_num_key_heads"],
        linear_num_value_heads=text["linear_num_value_heads"],
        linear_key_head_dim=text["linear_key_head_dim"],
        linear_value_head_dim=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
        num_experts=text["num_experts"],
        num_experts_per_tok=text["num_experts_per_tok"],
        moe_intermediate_size=text["moe_intermediate_size"],
        shared_expert_intermediate_size=text["shared_expert_intermediate_size"],
        num_mtp_layers=text.get("mtp_num_hidden_layers", 0),
        has_qk_norm=True,
        **_common(text, quantization),
    )


_MODEL_TYPES: dict[str, Callable[[Json, Json], ModelConfig]] = {
    "llama": _llama,
    "qwen3_5_moe": _qwen3_5_moe,
}

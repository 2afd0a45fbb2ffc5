"""The least time of a step: what its launches must move and do, over what the device moves and does; and the same from
the model's shapes alone (`closed_form`), which knows no launch.

Knows a launch by its kernel's name and tensors, and what the load makes of them; not how anything is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from netra_backend.config import ModelConfig
from netra_backend.sequence import PAGE_SIZE
from step_load import Load

_FP8_PRODUCTS = ("_fp8_gemm_kernel", "_gate_up_kernel", "_down_kernel")


@dataclass(slots=True)
class Launch:
    """One launch: its tensors and constants as the launcher gave them."""

    name: str
    grid: tuple[int, ...]
    tensors: list[torch.Tensor]
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of a copy (read and write counted), bf16 operations per second, and how many times as many FP8 does."""

    bandwidth: float = 4.3e12
    flops: float = 790e12
    fp8_factor: float = 2.0

    def seconds(self, num_bytes: float, operations: float, fp8: bool = False) -> float:
        """The longer of moving and computing."""
        return max(
            num_bytes / self.bandwidth, operations / (self.flops * (self.fp8_factor if fp8 else 1))
        )


def cost(launch: Launch, config: ModelConfig, load: Load) -> tuple[float, float]:
    """Least bytes and operations. Pools count what the users own, experts those that random routing hits."""
    total, name = load.num_rows, launch.name
    sizes = [x.numel() * x.element_size() for x in launch.tensors]
    if name in ("_gate_up_kernel", "_down_kernel"):
        chosen = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** total
        weight = 1 + chosen * config.num_experts
        matrices = 2 if name == "_gate_up_kernel" else 1
        size = matrices * config.hidden_size * config.moe_intermediate_size
        return weight * size, 2.0 * total * (config.num_experts_per_tok + 1) * size
    if name in ("_history_kernel", "_local_kernel"):
        return _attention_cost(launch, config, load)
    if name in ("_gated_delta_rule_kernel", "_prepare_kernel", "_scan_kernel"):
        return _delta_cost(name, config, total, load.users)
    if name == "_causal_conv1d_kernel":
        return 4.0 * total * config.conv_channels, 2.0 * total * config.conv_channels * config.conv_kernel  # fmt: skip
    if name in ("_rope_kernel", "_merge_kernel", "embedding.default"):
        size = (config.num_attention_heads + 2 * config.num_kv_heads) * config.head_dim
        return 4.0 * total * size, 0.0
    if name in ("_seal_kernel", "_store_tail_kernel"):  # rows that are read and written once
        moved = total if load.is_chunk and name == "_seal_kernel" else 0
        return 4.0 * moved * 2 * config.num_kv_heads * config.head_dim, 0.0
    if name.startswith("_to_copy"):  # a product may write the type that is wanted
        return 0.0, 0.0
    if name == "_fp8_gemm_kernel":
        return sum(sizes[:5]), 2.0 * total * launch.tensors[2].numel()
    if name.startswith("mm"):
        return sum(sizes), 2.0 * launch.tensors[0].shape[0] * launch.tensors[1].numel()
    return float(sum(sizes)), 0.0


def _attention_cost(launch: Launch, config: ModelConfig, load: Load) -> tuple[float, float]:
    """History: the sealed pages once per user. Local: the tail and the new rows, half of them seen on average."""
    heads = 4.0 * load.num_rows * config.num_attention_heads * config.head_dim
    if launch.name == "_history_kernel":
        pages = next(x for x in launch.tensors if x.dtype == torch.uint8 or x.dim() == 5)
        page_bytes = pages[0].numel() * pages.element_size()
        return load.users * (load.context // PAGE_SIZE) * page_bytes, heads * load.context
    moved = load.users * (load.tail + load.rows) * 4.0 * config.num_kv_heads * config.head_dim
    return moved, heads * (load.tail + (load.rows + 1) / 2)


def _delta_cost(name: str, config: ModelConfig, rows: int, users: int) -> tuple[float, float]:
    """Decoding: float32 states are read and written. Chunks (all under the scan): q, k, v in, values out; per block
    of 64 tokens six products with the state's sizes.
    """
    heads, value = config.linear_num_value_heads, config.linear_value_head_dim
    key = config.linear_key_head_dim
    state = heads * key * value
    if name == "_gated_delta_rule_kernel":
        return users * state * 8.0, rows * 12.0 * state
    if name == "_prepare_kernel":
        return 0.0, 0.0
    moved = 2.0 * rows * (config.conv_channels + heads * value)
    return moved, rows * heads * 2.0 * (3 * 64 * key + 3 * key * value + 128 * value)


def seconds(launch: Launch, config: ModelConfig, load: Load, rates: Rates) -> float:
    """Least time of one launch."""
    return rates.seconds(*cost(launch, config, load), fp8=launch.name in _FP8_PRODUCTS)


def floor_seconds(launches: list[Launch], config: ModelConfig, load: Load, rates: Rates) -> float:
    """Least time of all launches, one after the other."""
    return sum(seconds(launch, config, load, rates) for launch in launches)


def closed_form(
    config: ModelConfig, load: Load, kv_bytes: float, rates: Rates, state_bytes: int = 4
) -> dict[str, float]:
    """Seconds of a decode step by part, without activations; kv_bytes: of a token in one attention layer.

    Weights are read once, of the experts those that independent random routing hits: E (1 - (1 - k / E)^T) for T rows,
    each padded to 16 rows of its own; attention rows per key/value head are padded to 16, past 32 to 64; a state is read
    and written. Everything is FP8 but router and output head (bf16). (The roofline model: Williams et al., 2009.)
    """
    hidden, rows, layers = config.hidden_size, load.num_rows, len(config.layer_types)
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    recurrent = hidden * (config.conv_channels + 2 * values + 2 * config.linear_num_value_heads)
    attention = hidden * (3 * queries + 2 * keys)
    expert = 3 * hidden * config.moe_intermediate_size
    dense = config.num_linear_layers * recurrent + config.num_attention_layers * attention
    dense += layers * (expert + hidden)  # the shared expert and its gate
    experts, chosen = config.num_experts, config.num_experts_per_tok
    hit = experts * (1 - (1 - chosen / experts) ** rows)
    padded = 2.0 * expert * max(rows * chosen, 16 * hit)
    group = load.rows * config.num_attention_heads // config.num_kv_heads
    group = -(-group // 64) * 64 if group > 32 else -(-group // 16) * 16
    cached = load.users * load.context * config.num_attention_layers
    state = values * config.linear_key_head_dim * config.num_linear_layers
    head = config.vocab_size * hidden
    return {
        "dense": rates.seconds(dense, 2.0 * dense * rows, fp8=True) + layers * hidden * experts * 2 / rates.bandwidth,
        "experts": rates.seconds(layers * hit * expert, layers * padded, fp8=True),
        "head": rates.seconds(2.0 * head, 2.0 * head * rows),
        "attention": rates.seconds(cached * kv_bytes, cached * 4.0 * group * keys),
        "state": load.users * state * 2.0 * state_bytes / rates.bandwidth,
    }  # fmt: skip

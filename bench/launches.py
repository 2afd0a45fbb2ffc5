"""Lists the launches of a decode step of the target model, from the real runner on a device without memory.

`python bench/launches.py --users 32 --drafts 3 --context 40960 config.json` runs KernelRunner's own forward pass on meta
tensors with a recorder in place of launches, and prints for one layer of each kind every launch with its grid, the bytes and
operations that any implementation moves and does, and the step's floor at --bandwidth and --flops. Knows no timing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from triton.runtime.jit import JITFunction

from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.gpu.runner import KernelRunner
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import PAGE_SIZE, Sequence

_NO_LAUNCH = ("empty", "view", "slice", "split", "select", "transpose", "t.default", "expand", "detach",
              "alias", "unsqueeze", "as_strided", "unflatten", "permute", "squeeze", "new_empty", "lift", "copy_")  # fmt: skip
"""aten operations that launch nothing (or, copy_, bring the step's integers: once, before the layers)."""


class MetaWeights:
    """Tensors without memory of whatever shape is asked for; FP8 where the published checkpoint has FP8."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight"

    def is_fp8(self, name: str) -> bool:
        quantised = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
        return name.endswith(quantised) and "in_proj_a" not in name and "in_proj_b" not in name

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device="meta")

    def get_fp8(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        return codes, torch.empty(blocks, device="meta")


@dataclass(slots=True)
class Launch:
    """One launch: its tensors and constants as the launcher gave them."""

    name: str
    grid: tuple[int, ...]
    tensors: list[torch.Tensor]
    constants: dict[str, Any]


class _Aten(TorchDispatchMode):
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not any(name.startswith(quiet) for quiet in _NO_LAUNCH):
            tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
            if any(x.device.type == "meta" for x in tensors):
                self._launches.append(Launch(name, (), tensors, {}))
        return out


@contextmanager
def recorder() -> Iterator[list[Launch]]:
    """Within the context nothing is launched; what would be is listed in order."""
    launches: list[Launch] = []
    stock = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        launches.append(Launch(self.__name__, tuple(grid), tensors, kwargs))

    JITFunction.run = run
    try:
        with _Aten(launches):
            yield launches
    finally:
        JITFunction.run = stock


@dataclass(frozen=True, slots=True)
class Load:
    """What the step serves: users with `rows` tokens each (one and its drafts) behind `context` tokens."""

    users: int
    rows: int
    context: int


def decode_batch(load: Load) -> Batch:
    """One decode step of every user, replaying as many tokens as it computes."""
    pages = load.context // PAGE_SIZE
    items = []
    for user in range(load.users):
        computed = pages * PAGE_SIZE + PAGE_SIZE // 2
        table = [user * pages + page for page in range(pages)]
        tokens = [0] * (computed + 1)
        seq = Sequence(user, Request(str(user), (0,), SamplingParams(), 0.0), tokens, computed, seed=0,
                       num_computed_tokens=computed, num_replay_tokens=load.rows, block_table=table, slot=user)  # fmt: skip
        items.append(ScheduledSequence(seq, load.rows, draft_token_ids=[0] * (load.rows - 1), num_logits=load.rows))  # fmt: skip
    return Batch(items)


def trace(config_file: Path, load: Load, codec: str = "int8") -> tuple[ModelConfig, list[Launch]]:
    """The launches of a decode step, by the runner itself."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(config_file.read_text())
        knobs = EngineConfig(
            checkpoint=folder, dtype="bfloat16", kv_cache_dtype=codec, kv_cache_memory=str(2**50), max_num_seqs=load.users,
            num_draft_tokens=load.rows - 1, speculation="ngram" if load.rows > 1 else "none", num_prefix_checkpoints=1,
        )  # fmt: skip
        device = torch.device("meta")
        runner = KernelRunner(
            knobs, directory, frozenset(), device, weights=MetaWeights(torch.bfloat16)
        )
        batch = decode_batch(load)
        with recorder() as launches:
            runner._forward(batch, batch.scheduled)
    return runner.model_config, launches


def cost(launch: Launch, config: ModelConfig, load: Load) -> tuple[float, float]:
    """Least bytes and operations. Pools count what the users own, experts those that random routing hits."""
    total = load.users * load.rows
    sizes = [x.numel() * x.element_size() for x in launch.tensors]
    if launch.name in ("_gate_up_kernel", "_down_kernel"):
        chosen = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** total
        weight = 1 + chosen * config.num_experts
        matrices = 2 if launch.name == "_gate_up_kernel" else 1
        size = matrices * config.hidden_size * config.moe_intermediate_size
        return weight * size, 2.0 * total * (config.num_experts_per_tok + 1) * size
    heads = 4.0 * total * config.num_attention_heads * config.head_dim
    if launch.name == "_history_kernel":
        pages = next(x for x in launch.tensors if x.dtype == torch.uint8)
        return load.users * (load.context // PAGE_SIZE) * pages[0].numel(), heads * load.context
    if launch.name == "_local_kernel":
        return load.users * PAGE_SIZE * 2 * config.num_kv_heads * config.head_dim, heads * PAGE_SIZE / 2  # fmt: skip
    if launch.name == "_gated_delta_rule_kernel":
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim  # fmt: skip
        return load.users * state * 8.0, total * 12.0 * state
    if launch.name == "_causal_conv1d_kernel":
        return 4.0 * total * config.conv_channels, 2.0 * total * config.conv_channels * config.conv_kernel  # fmt: skip
    if launch.name in ("_seal_kernel", "_rope_kernel", "_merge_kernel", "embedding.default"):
        size = (config.num_attention_heads + 2 * config.num_kv_heads) * config.head_dim
        return 0.0 if launch.name == "_seal_kernel" else 4.0 * total * size, 0.0
    if launch.name == "_fp8_gemm_kernel":
        weight = launch.tensors[2].numel()
        return sum(sizes[:5]), 2.0 * total * weight
    if launch.name.startswith("mm"):
        return sum(sizes), 2.0 * total * launch.tensors[1].numel()
    return float(sum(sizes)), 0.0


def layers(config: ModelConfig, launches: list[Launch]) -> list[tuple[str, list[Launch]]]:
    """(layer type, its launches): a layer begins with every second RMSNorm. What is outside is left out."""
    starts = [i for i, launch in enumerate(launches) if launch.name == "_rms_norm_kernel"]
    begins = starts[::2]  # two a layer, then the final one
    assert len(begins) == len(config.layer_types) + 1
    return [
        (kind, launches[begins[i] : begins[i + 1]]) for i, kind in enumerate(config.layer_types)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--context", type=int, default=40960)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s")
    parser.add_argument("--flops", type=float, default=790e12, help="bf16 operations/s; FP8 twice")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = Load(options.users, 1 + options.drafts, options.context)
    config, launches = trace(options.config, load)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    by_layer = layers(config, launches)
    for kind, own in by_layer:
        if kind not in seen:
            print(f"\n{kind}: {len(own)} launches\n| launch | grid | MB | GFLOP | floor us |\n|---|---|---|---|---|")  # fmt: skip
        for launch in own:
            num_bytes, operations = cost(launch, config, load)
            rate = options.flops * (2 if launch.name in ("_fp8_gemm_kernel", "_gate_up_kernel", "_down_kernel") else 1)  # fmt: skip
            floor = max(num_bytes / options.bandwidth, operations / rate)
            rows.append({"layer": kind, "launch": launch.name, "bytes": num_bytes, "operations": operations, "floor": floor})  # fmt: skip
            if kind not in seen:
                print(f"| {launch.name} | {launch.grid} | {num_bytes / 1e6:.2f} | {operations / 1e9:.2f} | {1e6 * floor:.2f} |")  # fmt: skip
        seen.add(kind)
    counts = Counter((kind, len(own)) for kind, own in by_layer)
    inside = sum(len(own) for _, own in by_layer)
    head = config.vocab_size * config.hidden_size * 2 / options.bandwidth
    floor = sum(row["floor"] for row in rows)
    print(f"\n{dict(counts)}; {inside} launches in layers, {len(launches) - inside} outside")
    print(f"floor {1e3 * floor:.2f} ms in layers + {1e3 * head:.2f} ms for a bf16 output head")
    if options.json:
        options.json.write_text(
            json.dumps({"load": [load.users, load.rows, load.context], "rows": rows})
        )


if __name__ == "__main__":
    main()

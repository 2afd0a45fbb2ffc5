"""Lists the launches of a step of the target model, from the real runner on a device without memory.

`python bench/launches.py --users 32 --drafts 3 --context 40960` runs KernelRunner's own forward pass on meta tensors with
a recorder in place of launches, and prints for one layer of each kind every launch with its grid, the bytes and
operations that any implementation moves and does, and the step's floor at --bandwidth and --flops. Knows no timing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from netra_backend.batch import Batch
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.gpu.runner import KernelRunner
from netra_backend.sequence import PAGE_SIZE
from netra_kernels.kv_codec import page_layout
from step_floor import Launch, Rates, closed_form, cost, floor_seconds, seconds
from step_load import Load, batch_of

TARGET = Path(__file__).parent / "qwen3.6-35b-a3b.config.json"
"""The shapes of Qwen3.6-35B-A3B with FP8 blocks."""

_NO_LAUNCH = ("empty", "view", "slice", "split", "select", "transpose", "t.default", "expand", "detach",
              "alias", "unsqueeze", "as_strided", "unflatten", "permute", "squeeze", "new_empty", "lift", "copy_")  # fmt: skip
"""aten operations that launch nothing (or, copy_, bring the step's integers: once, before the layers)."""


def is_fp8(name: str) -> bool:
    """Whether the published checkpoint has FP8 blocks under this name."""
    quantised = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    return name.endswith(quantised) and "in_proj_a" not in name and "in_proj_b" not in name


class MetaWeights:
    """Tensors without memory of whatever shape is asked for; FP8 where the published checkpoint has FP8."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight"

    def is_fp8(self, name: str) -> bool:
        return is_fp8(name)

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device="meta")

    def get_fp8(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        return codes, torch.empty(blocks, device="meta")


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
    # Interpreted kernels are objects of another class, which triton chooses by this variable.
    kind: Any = InterpretedFunction if os.environ.get("TRITON_INTERPRET") == "1" else JITFunction
    stock = kind.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        launches.append(Launch(self.__name__, tuple(grid), tensors, kwargs))

    kind.run = run
    try:
        with _Aten(launches):
            yield launches
    finally:
        kind.run = stock


def shape_runner(
    config_file: Path, max_num_seqs: int, num_drafts: int, codec: str = "int8"
) -> KernelRunner:
    """A KernelRunner whose tensors have shapes only: it takes steps of up to so many sequences and drafts."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(config_file.read_text())
        knobs = EngineConfig(
            checkpoint=folder, dtype="bfloat16", kv_cache_dtype=codec, kv_cache_memory=str(2**50), max_num_seqs=max_num_seqs,
            num_draft_tokens=num_drafts, speculation="ngram" if num_drafts else "none", num_prefix_checkpoints=1,
        )  # fmt: skip
        weights = MetaWeights(torch.bfloat16)
        return KernelRunner(knobs, directory, frozenset(), torch.device("meta"), weights=weights)


def record(runner: KernelRunner, batch: Batch) -> list[Launch]:
    """The launches of a step, by the runner itself."""
    with recorder() as launches:
        runner._forward(batch, batch.scheduled)
    return launches


def trace(config_file: Path, load: Load, codec: str = "int8") -> tuple[ModelConfig, list[Launch]]:
    """The launches of one step."""
    runner = shape_runner(config_file, load.users, 0 if load.is_chunk else load.rows - 1, codec)
    return runner.model_config, record(runner, batch_of(load, runner.model_config.vocab_size))


def layers(config: ModelConfig, launches: list[Launch]) -> list[tuple[str, list[Launch]]]:
    """(layer type, its launches): a layer begins with every second RMSNorm. What is outside is left out."""
    begins = _begins(config, launches)
    return [
        (kind, launches[begins[i] : begins[i + 1]]) for i, kind in enumerate(config.layer_types)
    ]


def outside(config: ModelConfig, launches: list[Launch]) -> list[Launch]:
    """What belongs to no layer: embedding, final norm, output head."""
    begins = _begins(config, launches)
    return launches[: begins[0]] + launches[begins[-1] :]


def _begins(config: ModelConfig, launches: list[Launch]) -> list[int]:
    starts = [i for i, launch in enumerate(launches) if launch.name == "_rms_norm_kernel"]
    begins = starts[::2]  # two a layer, then the final one
    assert len(begins) == len(config.layer_types) + 1
    return begins


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=TARGET, help="a config.json")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--chunk", type=int, help="tokens of a prompt chunk, instead of decoding")
    parser.add_argument("--context", type=int, default=40960)
    parser.add_argument("--bandwidth", type=float, default=Rates().bandwidth, help="bytes/s")
    parser.add_argument(
        "--flops", type=float, default=Rates().flops, help="bf16 operations/s; FP8 twice"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load, rates = Load(options.users, 1 + options.drafts, options.context), Rates(options.bandwidth, options.flops)  # fmt: skip
    if options.chunk:
        load = Load(1, options.chunk, options.context, is_chunk=True)
    config, launches = trace(options.config, load)
    rows: list[dict[str, Any]] = []
    by_layer = layers(config, launches)
    firsts = [by_layer[config.layer_types.index(kind)] for kind in dict.fromkeys(config.layer_types)]  # fmt: skip
    for kind, own in firsts:
        print(f"\n{kind}: {len(own)} launches\n| launch | grid | MB | GFLOP | floor us |\n|---|---|---|---|---|")  # fmt: skip
        for launch in own:
            (num_bytes, operations), floor = cost(launch, config, load), seconds(launch, config, load, rates)  # fmt: skip
            print(f"| {launch.name} | {launch.grid} | {num_bytes / 1e6:.2f} | {operations / 1e9:.2f} | {1e6 * floor:.2f} |")  # fmt: skip
    for kind, own in [*by_layer, ("outside", outside(config, launches))]:
        for launch in own:
            num_bytes, operations = cost(launch, config, load)
            rows.append({"layer": kind, "launch": launch.name, "bytes": num_bytes, "operations": operations,
                         "floor": seconds(launch, config, load, rates)})  # fmt: skip
    counts = Counter((kind, len(own)) for kind, own in by_layer)
    inside = sum(len(own) for _, own in by_layer)
    print(f"\n{dict(counts)}; {inside} launches in layers, {len(launches) - inside} outside")
    print(f"{load}: floor {1e3 * floor_seconds(launches, config, load, rates):.2f} ms")
    if not load.is_chunk:
        parts = closed_form(
            config,
            load,
            page_layout("int8", config.num_kv_heads, config.head_dim).page_bytes / PAGE_SIZE,
            rates,
        )
        shown = ", ".join(f"{name} {1e3 * part:.2f}" for name, part in parts.items())
        print(f"from the shapes alone {1e3 * sum(parts.values()):.2f} ms: {shown}")
    if options.json:
        options.json.write_text(json.dumps({"load": str(load), "rows": rows}))


if __name__ == "__main__":
    main()

"""What this machine can do at most: memory bandwidth and float32 products, to set beside results.

    python bench/gemm.py [--num-threads 2] [--json FILE]

Products stream their weights from memory, as a model does: each call takes the next of enough equal
matrices that no cache holds them all. Beside plain `linear` it times the same product with weights
packed once: for oneDNN, for MKL, and as halves for FBGEMM (float32 inside). Knows no model; the shapes are two
of SmolLM2-135M and a large square.
"""

from __future__ import annotations

import os

from netra_backend.openmp import SPIN_COUNT

# Read when OpenMP starts, which importing torch does.
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from tqdm import tqdm  # type: ignore[import-untyped]

import machine
from report import Metrics, Result, Row, format_value, table

SHAPES = {"576 -> 3072": (576, 3072), "576 -> 49152": (576, 49152), "2048 -> 2048": (2048, 2048)}
ROWS = (1, 8, 32, 512)
_BUFFER_BYTES = 2**28
_COLD_BYTES = 2**28
"""More than the last-level cache of the machines at hand (105 MB)."""

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | torch.ScriptObject
Product = Callable[[torch.Tensor, Any], torch.Tensor]
Pack = Callable[[torch.Tensor, int], Weight]


def seconds_per_call(call: Callable[[int], object], budget_seconds: float) -> float:
    """Median time of `call(number)` over as many calls as fit, five at least."""
    call(0)
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth(budget_seconds: float) -> Metrics:
    """Bytes per second of copying (read and written bytes both count) and of reading."""
    source = torch.ones(_BUFFER_BYTES // 4)
    target = torch.empty_like(source)
    copy = seconds_per_call(lambda _: target.copy_(source), budget_seconds)
    read = seconds_per_call(lambda _: source.sum(), budget_seconds)
    return {"copy_gb_s": 2 * _BUFFER_BYTES / copy / 1e9, "read_gb_s": _BUFFER_BYTES / read / 1e9}


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T"""
    return linear(x, weight)


def onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with a weight from `pack_onednn`."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def pack_onednn(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """The blocked layout that oneDNN wants for this number of rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def mkl(x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The same with a weight from `pack_mkl`."""
    packed, shape_of = weight
    result: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, shape_of, None, x.shape[0])
    return result


def pack_mkl(weight: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MKL's layout, as netra_backend.ops.Linear makes it for any number of rows; and a tensor of the weight's shape."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 512)
    return packed, weight.new_empty(1).expand(weight.shape)


def fbgemm(x: torch.Tensor, weight: torch.ScriptObject) -> torch.Tensor:
    """The same with a weight from `pack_halves`."""
    result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, weight)
    return result


def pack_halves(weight: torch.Tensor, rows: int) -> torch.ScriptObject:
    """Float16 in FBGEMM's layout, for any number of rows."""
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return packed


def product_seconds(
    shape: tuple[int, int], rows: int, product: Product, pack: Pack | None, budget_seconds: float
) -> float:
    """Median time of one product [rows, inputs] x [inputs, outputs] with weights from memory."""
    inputs, outputs = shape
    count = max(_COLD_BYTES // (4 * inputs * outputs), 2)
    plain_weights = (torch.randn(outputs, inputs).bfloat16().float() for _ in range(count))
    weights = [pack(weight, rows) if pack else weight for weight in plain_weights]
    x = torch.randn(rows, inputs)
    return seconds_per_call(lambda number: product(x, weights[number % count]), budget_seconds)


PRODUCTS: dict[str, tuple[Product, Pack | None]] = {
    "plain": (plain, None),
    "oneDNN packed": (onednn, pack_onednn),
    "MKL packed": (mkl, pack_mkl),
    "FBGEMM halves": (fbgemm, pack_halves),
}


@torch.inference_mode()
def measure(budget_seconds: float) -> list[Row]:
    """All rows: bandwidth, then each shape and number of rows."""
    rows = [Row("memory", "", bandwidth(budget_seconds))]
    points = [(name, count) for name in SHAPES for count in ROWS]
    for name, count in tqdm(points, desc="products", disable=None):
        inputs, outputs = SHAPES[name]
        metrics: Metrics = {}
        for label, (product, pack) in PRODUCTS.items():
            seconds = product_seconds(SHAPES[name], count, product, pack, budget_seconds)
            metrics[f"{label} gflop_s"] = 2 * count * inputs * outputs / seconds / 1e9
            metrics[f"{label} weights_per_ns"] = inputs * outputs / seconds / 1e9
        rows.append(Row(f"{count} rows", name, metrics))
    return rows


def show(rows: list[Row]) -> str:
    """Bandwidth in a line, products as a table."""
    memory, *others = rows
    copy, read = (format_value(memory.metrics[name]) for name in ("copy_gb_s", "read_gb_s"))
    names = list(others[0].metrics)
    lines = (
        [f"{row.workload}, {row.name}", *(format_value(row.metrics[name]) for name in names)]
        for row in others
    )
    headers = ["float32 product", *map(_unit, names)]
    return f"memory: copy {copy} GB/s, read {read} GB/s\n" + table(headers, lines)


def _unit(name: str) -> str:
    return name.replace("gflop_s", "GFLOP/s").replace("weights_per_ns", "weights/ns")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.5, help="per measured point")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    meter = machine.CpuMeter()
    rows = measure(arguments.seconds)
    use = meter.stop()
    others = "unknown" if use.other_cores is None else f"{use.other_cores:.2f}"
    print(show(rows))
    print(f"{arguments.num_threads} threads; others used {others} cores meanwhile")
    if arguments.json:
        conditions = {
            "machine": asdict(machine.describe(torch.__version__)),
            "num_threads": arguments.num_threads,
            "other_cores": use.other_cores,
        }
        Result("gemm", rows, conditions).save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

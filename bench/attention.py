"""Measures attention of one decoding token to its sealed history on a CPU, per KV codec and context length.

    python bench/attention.py [--contexts 4096 16384] [--num-threads 1] [--json FILE]

Two shapes: SmolLM2's (3 KV heads of 64, 3 queries each) and the target's (2 of 256, 8 queries each). Several
layers are read in turn, so that pages come from memory; codecs take turns within a repeat, so that a busy
machine slows all alike, and the shortest repeat counts. The floor is what reading the pages' bytes takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import machine
from netra_backend.cache.codecs import PlainCodec, make_codec
from netra_backend.memory_plan import FORMATS, PLAIN
from netra_backend.sequence import PAGE_SIZE
from netra_backend.torch_ops.attention import attend_groups, merge
from report import save, table

SHAPES = {"smollm2": (3, 3, 64), "target": (2, 8, 256)}
"""KV heads, query heads of each, head size."""


@dataclass(frozen=True, slots=True)
class Row:
    """One codec at one context length; microseconds and bytes are of one layer and one token."""

    shape: str
    context: int
    codec: str
    microseconds: float
    page_bytes: int
    floor_microseconds: float
    speed_against_plain: float


class Reader:
    """One codec's pages of some layers, and the attention of one decoding sequence to them."""

    def __init__(self, codec: str, shape: tuple[int, int, int], context: int, layers: int) -> None:
        heads, group, dim = shape
        self.codec = make_codec(codec, heads, dim, torch.float32, torch.device("cpu"))
        rows = torch.randn(2, context // PAGE_SIZE, heads, PAGE_SIZE, dim)
        sealed = self.codec.seal(rows[0], rows[1])
        self.layers = [sealed.clone() for _ in range(layers)]
        self.bytes = sealed.nbytes
        self._q = torch.randn(1, heads, group, dim)
        self._tail = torch.randn(1, heads, group, dim), torch.zeros(1, heads, group)

    def read(self) -> float:
        """Seconds per layer."""
        begun = time.perf_counter()
        for pages in self.layers:
            queries = self.codec.queries(self._q)
            if not isinstance(self.codec, PlainCodec):
                size = self.codec.group_pages(queries.shape[2])
                out, lse = attend_groups(self.codec, queries, pages.split(size))
            else:
                items = queries.expand(len(pages), -1, -1, -1)
                parts, part_lse = self.codec.attend(items, pages.unsqueeze(1))
                weights = part_lse.softmax(0).unsqueeze(-1)
                out, lse = (parts * weights).sum(0, keepdim=True), part_lse.logsumexp(0, True)
            merge(self.codec.restore(out), lse, *self._tail)
        return (time.perf_counter() - begun) / len(self.layers)


def read_bandwidth(repeats: int) -> float:
    """Bytes a second that the threads can read from memory."""
    block = torch.ones(2**25)
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - begun)
    return block.nbytes / best


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All shapes, contexts and codecs."""
    bandwidth = read_bandwidth(arguments.repeats)
    rows = []
    for name, shape in SHAPES.items():
        for context in arguments.contexts:
            layers = max(2, arguments.megabytes * 2**20 // (8 * shape[0] * shape[2] * context))
            readers = {c: Reader(c, shape, context, layers) for c in arguments.codec}
            best = dict.fromkeys(readers, float("inf"))
            for _ in range(arguments.repeats):
                for codec, reader in readers.items():
                    best[codec] = min(best[codec], reader.read())
            for codec, seconds in best.items():
                size = readers[codec].bytes
                floor = 1e6 * size / bandwidth
                against = best[PLAIN] / seconds
                rows.append(Row(name, context, codec, 1e6 * seconds, size, floor, against))
    return rows


def rows_table(rows: list[Row]) -> str:
    """Markdown."""
    headers = [
        "shape",
        "context",
        "codec",
        "us/layer",
        "byte floor us",
        "x floor",
        "speed of plain",
    ]
    lines = (
        [
            r.shape,
            str(r.context),
            r.codec,
            f"{r.microseconds:.0f}",
            f"{r.floor_microseconds:.0f}",
            f"{r.microseconds / r.floor_microseconds:.1f}",
            f"{r.speed_against_plain:.2f}",
        ]
        for r in rows
    )
    return table(headers, lines)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--codec", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--megabytes", type=int, default=96, help="plain pages of all layers read in turn"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.codec = list(dict.fromkeys([PLAIN, *arguments.codec]))
    torch.set_num_threads(arguments.num_threads)
    meter = machine.CpuMeter()
    with torch.inference_mode():
        rows = measure(arguments)
    use = meter.stop()
    print(rows_table(rows))
    if arguments.json:
        conditions = {
            "num_threads": arguments.num_threads,
            "repeats": arguments.repeats,
            "other_cores": use.other_cores,
            "machine": asdict(machine.describe(torch.__version__)),
        }
        save(arguments.json, "attention", rows, conditions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

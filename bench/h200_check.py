"""Settles on one GPU, in minutes, what cannot be settled without: are the kernels right, repeatable and fast?

`python bench/h200_check.py` on a machine with torch, triton and a Hopper GPU; nothing of the engine is needed.
Sections: numerics (every kernel against its reference on random inputs, then again bit by bit), timing (each kernel
next to its floor: bytes over the measured copy rate, operations over the measured matrix rate) and layers (the kernels
of one layer in a CUDA graph, times the model's layers). Prints one table, writes JSON. --dry-run: tiny shapes on the
CPU, with TRITON_INTERPRET=1. Does not know how the engine batches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from h200_work import TINY, Builder, Output, Shapes, Work
from netra_kernels import kv_codec


@dataclass(slots=True)
class Row:
    """A line of the report; times in milliseconds, NaN where a section did not look."""

    name: str
    error: float = float("nan")
    limit: float = float("nan")
    identical: bool | None = None
    ms: float = float("nan")
    floor_ms: float = float("nan")

    @property
    def ok(self) -> bool:
        """Right and repeatable, as far as it was looked at."""
        return (
            not (self.error >= self.limit)
            and self.identical is not False
            and self.error == self.error
        )


def numerics(b: Builder) -> Iterator[Work]:
    """Every kernel at the model's head and hidden sizes, on workloads that the references can follow."""
    dry = b.s is TINY
    tokens, few = (18, 2) if dry else (300, 7)
    codecs = ("int8",) if dry else kv_codec.CODECS
    yield b.norm(few)
    yield b.rope(few)
    yield b.router(few)
    yield b.sampling(few)
    yield from (b.seal(codec) for codec in codecs if codec != "plain")
    for codec in codecs:
        queries = (3,) if dry else (1, 4, 8, 16)
        yield from (b.attention(codec, 2, query, 64 * 3, 65) for query in queries)
        yield b.attention(codec, 1, tokens, 64 * 2, 9)
    yield from (b.delta_rule(2, query, replay, checked=True) for query, replay in ((1, 0), (4, 3)))
    yield from (b.delta_chunk(tokens, correlation) for correlation in (0.0, 0.9))
    yield b.conv(2, 3)
    yield b.conv(1, tokens)
    yield from (b.gemm(rows, b.s.hidden, 2 * b.s.hidden) for rows in (1, tokens))
    yield from (b.moe(n) for n in ((few,) if dry else (1, few, 10 * tokens)))


def timing(b: Builder) -> Iterator[Work]:
    """Each kernel of a step at the users, drafts and context of the benchmark."""
    s = b.s
    for users in s.users:
        for query in s.query_lens:
            yield from (b.attention(codec, users, query, s.context, 40) for codec in ("int8", "int4", "plain")
                        if codec != "plain" or users <= 64)  # fmt: skip
            yield b.delta_rule(users, query, query)
            yield b.moe(users * query)
            yield b.gemm(users * query, s.channels + s.value_heads * s.delta_dim, s.hidden)
            yield b.gemm(users * query, s.hidden, s.q_heads * s.head_dim)
    yield from (
        b.attention(codec, 1, s.chunk, s.context // 2, 0) for codec in ("int8", "int4", "plain")
    )
    yield b.delta_chunk(s.chunk, 0.0)
    yield b.conv(1, s.chunk)
    yield b.moe(s.chunk)
    yield b.norm(s.chunk)
    yield b.rope(s.chunk)


def layers(b: Builder) -> Iterator[tuple[str, list[tuple[int, Work]]]]:
    """(name, [(times per step, work)]): the kernels of all layers of one step."""
    s = b.s
    for users in s.users:
        for query in s.query_lens:
            rows, total = users * query, s.attention_layers + s.delta_layers
            width = s.q_heads * s.head_dim
            yield (
                f"decode users={users} query={query} context={s.context}",
                [
                    (2 * total, b.norm(rows)),
                    (total, b.router(rows)),
                    (total, b.moe(rows)),
                    (
                        s.delta_layers,
                        b.gemm(rows, s.channels + s.value_heads * s.delta_dim, s.hidden),
                    ),
                    (s.delta_layers, b.conv(users, query)),
                    (s.delta_layers, b.delta_rule(users, query, query)),
                    (total, b.gemm(rows, s.hidden, width)),
                    (
                        s.attention_layers,
                        b.gemm(rows, 2 * width + 2 * s.kv_heads * s.head_dim, s.hidden),
                    ),
                    (s.attention_layers, b.rope(rows)),
                    (s.attention_layers, b.attention("int8", users, query, s.context, 40)),
                ],
            )


def relative_error(actual: Output, expected: Output) -> float:
    """Largest relative root-mean-square error of the outputs; NaN if there is one."""
    errors = [
        ((a.double() - e.double()).pow(2).mean() / e.double().pow(2).mean().clamp(min=1e-30)).sqrt()
        for a, e in zip(actual, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of run(), launches hidden in a CUDA graph, caches cold of everything but what it re-reads."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(2**28, dtype=torch.int8, device=device)
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def machine_rates(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Bytes per second of a copy (read and write counted) and bf16 operations per second of a matrix product."""
    size = 2**20 if tiny else 2**32
    source = torch.empty(size, dtype=torch.int8, device=device)
    copy = 2 * size / (milliseconds(lambda: source.clone(), device) * 1e-3)
    n = 128 if tiny else 8192
    left = torch.randn(n, n, device=device).bfloat16()
    return copy, 2.0 * n**3 / (milliseconds(lambda: left @ left, device) * 1e-3)


def check(work: Work) -> Row:
    """Compare with the reference, then run again and compare bits."""
    assert work.reference is not None
    first = tuple(x.clone() for x in work.run())
    error, again = relative_error(first, work.reference()), work.run()
    identical = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return Row(work.name, error, work.limit, identical)


def measure(work: Work, device: torch.device, rates: tuple[float, float]) -> Row:
    """Time next to the floor; the FP8 matrix rate is taken as twice that of bf16."""
    operations = work.operations / (rates[1] * (2 if work.fp8 else 1))
    floor = 1e3 * max(work.num_bytes / rates[0], operations)
    return Row(work.name, ms=milliseconds(work.run, device), floor_ms=floor)


def sum_layers(
    name: str, parts: list[tuple[int, Work]], device: torch.device, rates: tuple[float, float]
) -> Row:
    """A step as the sum of its layers' kernels (embedding, head, sampling and gaps are not in it)."""
    rows = [(count, measure(work, device, rates)) for count, work in parts]
    return Row(
        name, ms=sum(c * r.ms for c, r in rows), floor_ms=sum(c * r.floor_ms for c, r in rows)
    )


def show(row: Row) -> None:
    verdict = (
        "" if row.error != row.error and row.identical is None else ("ok" if row.ok else "WRONG")
    )
    print(f"{row.name:62s} {row.error:10.2e} {row.ms:9.3f} {row.floor_ms:9.3f} {row.ms / row.floor_ms:7.2f} {verdict}",
          flush=True)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the chosen sections; the exit code is the number of kernels found wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="numerics,timing,layers")
    parser.add_argument("--users", default="", help="comma-separated, instead of 1,8,32,64,128,256")
    parser.add_argument("--seconds", type=float, default=400.0, help="start nothing new after this")
    parser.add_argument("--output", type=Path, default=Path("h200_check.json"))
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    shapes = TINY if options.dry_run else Shapes()
    if options.users:
        shapes = Shapes(users=tuple(int(n) for n in options.users.split(",")))
    device = torch.device("cpu" if options.dry_run else "cuda")
    torch.manual_seed(0)
    builder, rows = Builder(shapes, device), []
    rates = machine_rates(device, options.dry_run)
    print(f"copy {rates[0] / 1e12:.2f} TB/s, bf16 product {rates[1] / 1e12:.0f} TFLOP/s")
    print(f"{'':62s} {'error':>10s} {'ms':>9s} {'floor':>9s} {'ratio':>7s}")
    for section in options.sections.split(","):
        if section == "layers":
            jobs = (sum_layers(name, parts, device, rates) for name, parts in layers(builder))
        elif section == "timing":
            jobs = (measure(work, device, rates) for work in timing(builder))
        else:
            jobs = (check(work) for work in numerics(builder))
        for row in jobs:
            show(row)
            rows.append(row)
            if time.monotonic() > deadline:
                print(f"out of time in section {section}")
                break
        if time.monotonic() > deadline:
            break
    report = {"rates": rates, "rows": [asdict(row) for row in rows]}
    options.output.write_text(json.dumps(report, indent=1))
    return sum(not row.ok for row in rows if row.error == row.error or row.identical is not None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Settles on one GPU, in minutes, what cannot be settled without: are the kernels right, repeatable and fast?

`python bench/h200_check.py` on a machine with torch, triton, safetensors and a Hopper GPU; no server, no checkpoint.
Sections, in this order: numerics (every kernel against its reference on random inputs, then again bit by bit), steps
(the engine's runner on whole steps of the target, h200_steps.py), timing (each kernel next to its floor: bytes over the
measured copy rate, operations over the measured matrix rate) and layers (the kernels of one layer in a CUDA graph, times
the model's layers). Prints one table; the JSON is written row by row. What fails is a row that says so. --dry-run: tiny
shapes on the CPU, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from h200_compile import compile_ahead
from h200_report import Report, Row, attempt, machine_rates, milliseconds
from h200_steps import step_rows
from h200_work import TINY, Builder, Output, Shapes, Work
from netra_kernels import kv_codec
from step_floor import Rates

Make = Callable[[], Work]
"""Builds a workload; it may fail, as running it may."""


def numerics(b: Builder) -> Iterator[Make]:
    """Every kernel at the model's head and hidden sizes, on workloads that the references can follow."""
    dry = b.s is TINY
    tokens, few = (18, 2) if dry else (300, 7)
    codecs = ("int8",) if dry else kv_codec.CODECS
    yield from (partial(build, few) for build in (b.norm, b.quantize, b.rope, b.router, b.sampling))
    yield from (partial(b.seal, codec) for codec in codecs if codec != "plain")
    yield from (partial(b.rope_seal, codec) for codec in codecs)
    for codec in codecs:
        queries = (3,) if dry else (1, 4, 8, 16)
        yield from (partial(b.attention, codec, 2, query, 64 * 3, 65) for query in queries)
        yield partial(b.attention, codec, 1, tokens, 64 * 2, 9)
    yield from (partial(b.delta_rule, 2, query, replay, True) for query, replay in ((1, 0), (4, 3)))
    yield from (partial(b.delta_chunk, tokens, correlation) for correlation in (0.0, 0.9))
    yield partial(b.conv, 2, 3)
    yield partial(b.conv, 1, tokens)
    yield from (partial(b.gemm, rows, b.s.hidden, 2 * b.s.hidden) for rows in (1, tokens))
    yield from (partial(b.moe, n) for n in ((few,) if dry else (1, few, 10 * tokens)))


def timing(b: Builder) -> Iterator[Make]:
    """Each kernel of a step at the users, drafts and context of the benchmark."""
    s = b.s
    for users in s.users:
        for query in s.query_lens:
            yield from (partial(b.attention, codec, users, query, s.context, 40) for codec in ("int8", "int4", "plain")
                        if codec != "plain" or users <= 64)  # fmt: skip
            yield partial(b.delta_rule, users, query, query)
            yield partial(b.moe, users * query)
            yield partial(b.gemm, users * query, s.channels + s.value_heads * s.delta_dim, s.hidden)
            yield partial(b.gemm, users * query, s.hidden, s.q_heads * s.head_dim)
    yield from (
        partial(b.attention, codec, 1, s.chunk, s.context // 2, 0)
        for codec in ("int8", "int4", "plain")
    )
    yield partial(b.delta_chunk, s.chunk, 0.0)
    yield partial(b.conv, 1, s.chunk)
    yield from (partial(build, s.chunk) for build in (b.moe, b.norm, b.rope))


def layers(b: Builder) -> Iterator[tuple[str, list[tuple[int, Make]]]]:
    """(name, [(times per step, work)]): the kernels of all layers of one step."""
    s = b.s
    total, width = s.attention_layers + s.delta_layers, s.q_heads * s.head_dim
    for users in s.users:
        for query in s.query_lens:
            rows = users * query
            delta = (
                partial(b.gemm, rows, s.channels + s.value_heads * s.delta_dim, s.hidden),
                partial(b.conv, users, query),
                partial(b.delta_rule, users, query, query),
            )
            attention = (
                partial(b.gemm, rows, 2 * width + 2 * s.kv_heads * s.head_dim, s.hidden),
                partial(b.rope, rows),
                partial(b.attention, "int8", users, query, s.context, 40),
            )
            yield (
                f"decode users={users} query={query} context={s.context}",
                [
                    (2 * total, partial(b.norm, rows)),
                    (total, partial(b.moe, rows)),
                    (total, partial(b.gemm, rows, s.hidden, width)),
                    *((s.delta_layers, make) for make in delta),
                    *((s.attention_layers, make) for make in attention),
                ],
            )


def relative_error(actual: Output, expected: Output) -> float:
    """Largest relative root-mean-square error of the outputs; NaN if there is one."""
    errors = [
        ((a.double() - e.double()).pow(2).mean() / e.double().pow(2).mean().clamp(min=1e-30)).sqrt()
        for a, e in zip(actual, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def check(work: Work) -> Row:
    """Compare with the reference, then run again and compare bits."""
    assert work.reference is not None
    first = tuple(x.clone() for x in work.run())
    error, again = relative_error(first, work.reference()), work.run()
    identical = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return Row(work.name, error, work.limit, identical)


def measure(work: Work, device: torch.device, rates: Rates) -> Row:
    """Time next to the floor."""
    floor = 1e3 * rates.seconds(work.num_bytes, work.operations, work.fp8)
    ms, in_graph = milliseconds(work.run, device)
    return Row(work.name, ms=ms, floor_ms=floor, in_graph=in_graph)


def sum_layers(name: str, parts: list[tuple[int, Make]], device: torch.device, rates: Rates) -> Row:
    """A step as the sum of its layers' kernels (embedding, head, sampling and gaps are not in it)."""
    rows = [(count, measure(make(), device, rates)) for count, make in parts]
    return Row(
        name, ms=sum(c * r.ms for c, r in rows), floor_ms=sum(c * r.floor_ms for c, r in rows)
    )


def section_rows(section: str, b: Builder, rates: Rates, graphs: bool) -> Iterator[Row]:
    """The rows of one section, each as soon as it is there. KeyError for an unknown section."""
    if section == "steps":
        yield from step_rows(b.device, rates, b.s is TINY, graphs)
    elif section == "layers":
        for name, parts in layers(b):
            yield attempt(name, partial(sum_layers, name, parts, b.device, rates))
    else:
        works = {"numerics": numerics, "timing": timing}[section](b)
        judge = check if section == "numerics" else partial(measure, device=b.device, rates=rates)
        for make in works:
            yield attempt(described(make), lambda make=make: judge(make()))  # type: ignore[misc]


def described(make: Make) -> str:
    """A name for a workload that may never be built."""
    assert isinstance(make, partial)
    return f"{make.func.__name__}{make.args}"


def main(arguments: list[str]) -> int:
    """Run the chosen sections; the exit code is the number of rows that failed or were wrong, 100 at most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default="numerics,steps,timing,layers")
    parser.add_argument(
        "--users",
        default="",
        help="of timing and layers, comma-separated, instead of 1,8,32,64,128,256",
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="start nothing new after this")
    parser.add_argument("--output", type=Path, default=Path("h200_check.json"))
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="whole steps replay the runner's graphs: recording takes a while",
    )
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    shapes = TINY if options.dry_run else Shapes()
    if options.users:
        shapes = Shapes(users=tuple(int(n) for n in options.users.split(",")))
    device = torch.device("cpu" if options.dry_run else "cuda")
    torch.manual_seed(0)
    rates = machine_rates(device, options.dry_run)
    name = "cpu" if options.dry_run else torch.cuda.get_device_name()
    report = Report(options.output, name, rates)
    print(
        f"{name}: copy {rates.bandwidth / 1e12:.2f} TB/s, bf16 product {rates.flops / 1e12:.0f} TFLOP/s"
    )
    print(
        f"{'':62s} {'error':>10s} {'ms':>9s} {'floor':>9s} {'ratio':>7s} {'step ms':>9s} {'rows/s':>9s}"
    )
    if not options.dry_run:
        cores = len(os.sched_getaffinity(0))
        report.add(attempt("compiled ahead", partial(compile_ahead, cores)))
    for section in options.sections.split(","):
        started = time.monotonic()
        for row in section_rows(section, Builder(shapes, device), rates, options.graphs):
            report.add(row)
            if time.monotonic() > deadline:
                break
        out = " (out of time)" if time.monotonic() > deadline else ""
        print(f"section {section}: {time.monotonic() - started:.0f} s{out}", flush=True)
        if out:
            break
    return min(100, report.num_failures)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

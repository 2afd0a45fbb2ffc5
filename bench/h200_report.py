"""Rows of h200_check.py, how they are timed, and what happens to one that fails.

Knows CUDA graphs and events; not what is run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from step_floor import Rates

NAN = float("nan")


@dataclass(slots=True)
class Row:
    """A line of the report; times in milliseconds, NaN where a section did not look.

    ms: on the device, in a CUDA graph if `in_graph`; wall_ms: of a whole step of the runner, Python and sampling
    included. rows_per_s: computed tokens a second by `ms`. failure: first line of what was raised.
    """

    name: str
    error: float = NAN
    limit: float = NAN
    identical: bool | None = None
    ms: float = NAN
    floor_ms: float = NAN
    in_graph: bool | None = None
    wall_ms: float = NAN
    rows_per_s: float = NAN
    failure: str = ""

    @property
    def ok(self) -> bool:
        """It ran, and was right and repeatable as far as it was looked at."""
        looked = self.error == self.error or self.identical is not None
        right = self.error < self.limit and self.identical is not False
        return not self.failure and (right or not looked)


@dataclass(slots=True)
class Report:
    """All rows so far; the file is written after each, so that a run that is killed leaves what it found."""

    path: Path
    device: str
    rates: Rates
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Print the row and write the file."""
        self.rows.append(row)
        verdict = row.failure or ("" if row.ok and row.error != row.error else "ok" if row.ok else "WRONG")  # fmt: skip
        times = f"{row.ms:9.3f} {row.floor_ms:9.3f} {row.ms / row.floor_ms:7.2f}"
        step = (
            f" {row.wall_ms:9.2f} {row.rows_per_s:9.0f}" if row.rows_per_s == row.rows_per_s else ""
        )
        how = " (eager)" if row.in_graph is False else ""
        print(f"{row.name:62s} {row.error:10.2e} {times}{step}{how} {verdict}", flush=True)
        rates = {"bytes_per_s": self.rates.bandwidth, "bf16_per_s": self.rates.flops}
        content = {"device": self.device, "rates": rates, "rows": [asdict(r) for r in self.rows]}
        self.path.write_text(json.dumps(content, indent=1))

    @property
    def num_failures(self) -> int:
        """Rows that did not run or were wrong."""
        return sum(not row.ok for row in self.rows)


def attempt(name: str, make: Callable[[], Row]) -> Row:
    """make(), or a row that says why there is none: one kernel that fails must not end the run."""
    try:
        return make()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Row(name, failure=f"{type(error).__name__}: {lines[0]}")


def milliseconds(
    run: Callable[[], object], device: torch.device, repeats: int = 20
) -> tuple[float, bool]:
    """Median device time of run() and whether its launches were hidden in a CUDA graph; else they were made one by one.

    Caches are cold of everything but what it re-reads. On a CPU: the time of one call.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start), False
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return _timed(run, repeats, device), False
    return _timed(graph.replay, repeats, device), True


def _timed(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    flush = torch.empty(2**28, dtype=torch.int8, device=device)
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def machine_rates(device: torch.device, tiny: bool) -> Rates:
    """Measured: a copy, and a bf16 matrix product."""
    size = 2**20 if tiny else 2**32
    source = torch.empty(size, dtype=torch.int8, device=device)
    copy, _ = milliseconds(lambda: source.clone(), device)
    n = 128 if tiny else 8192
    left = torch.randn(n, n, device=device).bfloat16()
    product, _ = milliseconds(lambda: left @ left, device)
    return Rates(2 * size / (copy * 1e-3), 2.0 * n**3 / (product * 1e-3))

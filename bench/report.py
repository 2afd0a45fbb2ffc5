"""Results of the benchmarks as tables, side by side, and as a plot where matplotlib is installed.

Reads the JSON files that offline.py, load.py and peers.py write; knows only that each is a list of
rows with a name, a workload and metrics by name. Units are part of a metric's name.

    python bench/report.py RESULT.json [RESULT.json ...] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

Metrics = dict[str, float | None]

LABELS = {
    "ttft_ms": "TTFT ms",
    "cold_ttft_ms": "cold TTFT ms",
    "warm_ttft_ms": "warm TTFT ms",
    "times_sooner": "times sooner",
    "ttft_ms_p90": "TTFT p90",
    "ttft_ms_p99": "TTFT p99",
    "ttft_ms_max": "TTFT max",
    "tpot_ms": "ms/token",
    "tpot_ms_p99": "TPOT p99",
    "e2e_ms_p50": "E2E p50",
    "max_gap_ms_p99": "gap p99",
    "output_tokens_per_second": "out tok/s",
    "prompt_tokens_per_second": "prompt tok/s",
    "input_tokens_per_second": "in tok/s",
    "total_tokens_per_second": "total tok/s",
    "active_decoders": "decoding",
    "num_steps": "steps",
    "tokens_per_step": "tok/step",
    "acceptance": "accepted",
    "acceptance_length": "tok/verify",
    "num_failed": "failed",
    "same_tokens": "same tokens",
    "num_repeats": "repeats",
    "other_cores": "other CPU",
}
"""Metrics that a table shows, in this order; a file may hold more."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point: an engine on a workload, the medians of its repeats, and the repeats."""

    name: str
    workload: str
    metrics: Metrics
    repeats: list[Metrics] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """A result file; `conditions` is what is needed to repeat it: machine, settings, source."""

    kind: str
    rows: list[Row]
    conditions: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write as JSON, making the folder."""
        save(path, self.kind, self.rows, self.conditions)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a file that `save` wrote. Raises ValueError if it is something else."""
        content = json.loads(path.read_text())
        try:
            rows = [Row(**row) for row in content["rows"]]
            return cls(content["kind"], rows, content["conditions"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result file: {error!r}") from error


def save(path: Path, kind: str, rows: Iterable[Any], conditions: Mapping[str, Any]) -> None:
    """Write a result file of any dataclass's rows as JSON, making the folder."""
    document = {"kind": kind, "rows": [asdict(row) for row in rows], "conditions": conditions}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")


def medians(repeats: Sequence[Metrics]) -> Metrics:
    """The median of each metric over the repeats that have it."""
    names = dict.fromkeys(name for repeat in repeats for name in repeat)
    merged: Metrics = {}
    for name in names:
        values = [value for repeat in repeats if (value := repeat.get(name)) is not None]
        merged[name] = statistics.median(values) if values else None
    return merged


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values lie below (linear interpolation); None without any."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def format_value(value: float | None) -> str:
    """At most four significant digits, none of them an exponent."""
    if value is None:
        return "-"
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(headers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first left, the others right."""
    cells = [list(headers), *(list(line) for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headers))]

    def render(line: Sequence[str]) -> str:
        first, *others = line
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(render, [cells[0], rule, *cells[1:]]))


def rows_table(rows: Sequence[Row]) -> str:
    """The rows with the metrics that at least one of them has."""
    shown = [name for name in LABELS if any(row.metrics.get(name) is not None for row in rows)]
    headers = ["engine", "workload", *(LABELS[name] for name in shown)]
    lines = (
        [row.name, row.workload, *(format_value(row.metrics.get(name)) for name in shown)]
        for row in rows
    )
    return table(headers, lines)


def ratios_table(rows: Sequence[Row], base: str) -> str:
    """How many times better `base` is than each other engine on the same workload."""
    metrics = ("ttft_ms", "tpot_ms", "output_tokens_per_second", "prompt_tokens_per_second")
    own = {row.workload: row.metrics for row in rows if row.name == base}
    lines = []
    for row in rows:
        if row.name == base or row.workload not in own:
            continue
        values = [_advantage(own[row.workload], row.metrics, metric) for metric in metrics]
        lines.append([row.name, row.workload, *map(format_value, values)])
    return table(["engine", "workload", *(LABELS[metric] for metric in metrics)], lines)


def _advantage(own: Mapping[str, float | None], other: Metrics, metric: str) -> float | None:
    mine, theirs = own.get(metric), other.get(metric)
    if not mine or not theirs:
        return None
    return theirs / mine if metric.endswith("_ms") else mine / theirs


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Output tokens a second of each engine per workload as bars; False without matplotlib."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found]
    except ImportError:
        return False
    workloads = list(dict.fromkeys(row.workload for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    values = {(row.name, row.workload): row.metrics.get(_PLOTTED) for row in rows}
    figure = Figure(figsize=(2 + 1.6 * len(workloads), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        heights = [values.get((name, workload)) or 0.0 for workload in workloads]
        places = [index + number * width for index in range(len(workloads))]
        axes.bar(places, heights, width, label=name)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(workloads))], workloads)
    axes.set_ylabel("output tokens per second")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return True


_PLOTTED = "output_tokens_per_second"


def _read(path: Path, name_the_file: bool) -> list[Row]:
    rows = Result.load(path).rows
    if not name_the_file:
        return rows
    return [replace(row, name=f"{row.name} ({path.stem})") for row in rows]


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="result files")
    parser.add_argument("--base", help="row that the others are compared with (default: the first)")
    parser.add_argument("--plot", type=Path, help="write a PNG; needs matplotlib")
    arguments = parser.parse_args()
    rows = [row for path in arguments.files for row in _read(path, len(arguments.files) > 1)]
    if not rows:
        parser.error("no rows in these files")
    print(rows_table(rows))
    base = arguments.base or rows[0].name
    if len({row.name for row in rows}) > 1:
        print(f"\n{base} is better by this factor than\n{ratios_table(rows, base)}")
    if arguments.plot and not plot(rows, arguments.plot):
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

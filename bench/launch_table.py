"""Writes the launches of the target's decode steps, and their floors, into docs/kernels.md.

`python bench/launch_table.py docs/kernels.md` replaces what stands between the two marks of that file. The numbers are
those of launches.py; knows only their presentation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launches import TARGET, layers, outside, record, shape_runner
from netra_backend.sequence import PAGE_SIZE
from netra_kernels.kv_codec import page_layout
from step_floor import Rates, closed_form, cost, floor_seconds, seconds
from step_load import Load, batch_of

BEGIN, END = "<!-- launches -->", "<!-- end of launches -->"

_CONTEXT = 40960
_LOADS = [Load(users, rows, _CONTEXT) for users in (1, 32, 128) for rows in (1, 4)]


def tables(rates: Rates) -> str:
    """Every launch of a layer of each kind for each load, then all steps' floors."""
    runner = shape_runner(TARGET, max(load.users for load in _LOADS), 3)
    config = runner.model_config
    kv_bytes = page_layout("int8", config.num_kv_heads, config.head_dim).page_bytes / PAGE_SIZE
    found = [(load, record(runner, batch_of(load, config.vocab_size))) for load in _LOADS]
    lines = []
    for kind in dict.fromkeys(config.layer_types):
        place = config.layer_types.index(kind)
        own = [(load, layers(config, launches)[place][1]) for load, launches in found]
        lines += _table(f"{kind}, {len(own[0][1])} launches", own, config, rates)
    last = [(load, outside(config, launches)) for load, launches in found]
    lines += _table("outside the layers", last, config, rates)
    lines += [
        "| users x rows | launches | floor ms | from the shapes alone ms | part by part |",
        "|---|---|---|---|---|",
    ]
    for load, launches in found:
        parts = closed_form(config, load, kv_bytes, rates)
        shown = ", ".join(f"{name} {1e3 * part:.2f}" for name, part in parts.items())
        floor = floor_seconds(launches, config, load, rates)
        lines.append(f"| {load.users} x {load.rows} | {len(launches)} | {1e3 * floor:.2f} | {1e3 * sum(parts.values()):.2f} | {shown} |")  # fmt: skip
    return "\n".join(lines)


def _table(title: str, own: list, config: object, rates: Rates) -> list[str]:
    heads = [f"{load.users} x {load.rows}" for load, _ in own]
    lines = [
        f"| {title}: MB, GFLOP, floor us | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for index, first in enumerate(own[0][1]):
        cells = []
        for load, launches in own:
            assert launches[index].name == first.name, "the launches are the same for every load"
            num_bytes, operations = cost(launches[index], config, load)
            floor = seconds(launches[index], config, load, rates)
            cells.append(f"{num_bytes / 1e6:.1f}, {operations / 1e9:.2f}, {1e6 * floor:.1f}")
        lines.append(
            f"| {first.name.strip('_').removesuffix('_kernel')} | " + " | ".join(cells) + " |"
        )
    return [*lines, ""]


def replaced(text: str, content: str) -> str:
    """`text` with `content` between the marks. ValueError without them."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{content}\n{text[end:]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replaced(path.read_text(), tables(Rates())))

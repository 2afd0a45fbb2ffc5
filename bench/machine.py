"""What a measurement ran on: the machine in words, and how much of it others used meanwhile.

Reads /proc; knows nothing of engines. Where there is no /proc the shares are None, not zero.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that a number depends on."""

    cpu: str
    num_cpus: int
    vector_units: str
    memory_gib: float
    system: str
    python: str
    torch: str
    openmp_spin_count: str


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores in use over an interval: by this process with its children, and by everything else.

    `other_cores` includes what the hypervisor gave to its other guests (steal).
    """

    wall_seconds: float
    own_cores: float
    other_cores: float | None


def describe(torch_version: str = "") -> Machine:
    """This machine; `torch_version` is passed in so that nothing is imported for it."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return Machine(
        cpu=model[1] if model else platform.processor(),
        num_cpus=len(os.sched_getaffinity(0)),
        vector_units=" ".join(flag for flag in _VECTOR_FLAGS if flag in present),
        memory_gib=round(int(memory[1]) / 2**20, 1) if memory else 0.0,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch_version,
        openmp_spin_count=os.environ.get("GOMP_SPINCOUNT", ""),
    )


def without_paths(arguments: Mapping[str, object]) -> dict[str, object]:
    """Arguments for a result file: of a path only its last part, which says what it is."""
    return {
        name: value.name if isinstance(value, Path) else value for name, value in arguments.items()
    }


class CpuMeter:
    """Measures CpuUse from its construction to `stop()`."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = _own_seconds()
        self._busy = _busy_seconds()

    def stop(self) -> CpuUse:
        """Shares since the start."""
        wall = time.perf_counter() - self._wall
        own = _own_seconds() - self._own
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return CpuUse(wall, own / wall, None)
        # The kernel counts in ticks of 10 ms, so a small negative share is rounding.
        return CpuUse(wall, own / wall, max(busy - self._busy - own, 0.0) / wall)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    try:
        fields = [int(value) for value in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

"""Compiles what the launchers would launch, for sm_90, on a machine without a GPU; gates the machine code.

`capture()` puts a fake driver under triton and records every launch instead of running it: launchers are
called with meta tensors, so signature, specialisation and constants are exactly those of serving time.
Does not know the kernels (aot_cases.py does). `python -m netra_kernels.aot docs/kernels.md` rewrites the
table of that file for the running triton version. Compiling checks no limits, so `violations` does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 232_448
"""Shared memory that one program may take on sm_90 (227 KiB)."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]+)([.A-Z0-9_]*)", re.M
)


class _FakeUtils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": MAX_SHARED_BYTES,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }


class _FakeDriver:
    """As much of a driver as JITFunction.run needs to compile without a device."""

    utils = _FakeUtils()

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(slots=True)
class Launch:
    """One recorded launch: the compiled kernel and its grid."""

    name: str
    grid: tuple[int, ...]
    kernel: Any


@dataclass(slots=True)
class MachineCode:
    """What ptxas made of a kernel. stack_bytes > 0 or local accesses mean spilled registers."""

    name: str
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    opcodes: Counter[str] = field(default_factory=Counter)
    narrow_loads: int = 0


@contextmanager
def capture() -> Iterator[list[Launch]]:
    """Within the context, kernel launches compile for sm_90 and are recorded, none runs."""
    os.environ.setdefault(
        "TRITON_DEFAULT_FP_FUSION", "1"
    )  # unset, triton 3.9 warns and 3.10 changes it
    launches: list[Launch] = []
    stock_run, stock_driver = JITFunction.run, getattr(driver, "_active", None)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = stock_run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        launches.append(Launch(self.__name__, tuple(grid), kernel))
        return kernel

    driver.set_active(_FakeDriver())  # type: ignore[arg-type, unused-ignore]
    JITFunction.run = run  # type: ignore[method-assign, assignment, unused-ignore]
    try:
        yield launches
    finally:
        JITFunction.run = stock_run  # type: ignore[method-assign, unused-ignore]
        driver._active = stock_driver  # type: ignore[attr-defined, unused-ignore]


def inspect(launch: Launch) -> MachineCode:
    """Registers, stack, shared memory and opcodes of a compiled kernel, from its cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    matches = list(_OPCODE.finditer(text))
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    metadata = launch.kernel.metadata
    return MachineCode(
        name=launch.name,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=metadata.shared,
        opcodes=Counter(match.group(1) for match in matches),
        narrow_loads=sum(
            m.group(1) == "LDG" and bool(re.search(r"\.[US](8|16)\b", m.group(2))) for m in matches
        ),
    )


def violations(
    code: MachineCode, opcode: str | None = None, max_narrow_loads: int | None = None
) -> list[str]:
    """Why the kernel must not ship; an empty list means that it may."""
    found = []
    if code.shared_bytes > MAX_SHARED_BYTES:
        found.append(f"shared memory {code.shared_bytes} > {MAX_SHARED_BYTES}")
    spills = code.opcodes["STL"] + code.opcodes["LDL"]
    if code.stack_bytes or spills:
        found.append(f"spills: {code.stack_bytes} B of stack, {spills} local accesses")
    if opcode and not code.opcodes[opcode]:
        found.append(f"no {opcode} among {dict(code.opcodes)}")
    if max_narrow_loads is not None and code.narrow_loads > max_narrow_loads:
        found.append(
            f"{code.narrow_loads} loads of 8 or 16 bits, at most {max_narrow_loads} expected"
        )
    return found


_SHOWN = ("QGMMA", "HGMMA", "HMMA", "IMMA", "LDGSTS", "LDG", "I2F", "F2FP", "MUFU", "SHFL", "BAR")


def table(rows: list[tuple[str, MachineCode]]) -> str:
    """Markdown table, one row per shipped configuration."""
    lines = [
        "| configuration | kernel | warps | stages | registers | spill B | shared B | opcodes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, code in rows:
        opcodes = ", ".join(f"{name} {code.opcodes[name]}" for name in _SHOWN if code.opcodes[name])
        lines.append(
            f"| {case} | `{code.name}` | {code.num_warps} | {code.num_stages} | {code.registers} "
            f"| {code.stack_bytes} | {code.shared_bytes:,} | {opcodes} |"
        )
    return "\n".join(lines)


def replace_section(text: str, section: str) -> str:
    """`text` with the table of the running triton version replaced (or added at its end)."""
    begin, end = f"<!-- triton {triton.__version__} -->", f"<!-- end {triton.__version__} -->"
    block = f"{begin}\n{section}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n### triton {triton.__version__}\n\n{block}\n"
    head, rest = text.split(begin)
    return head + block + rest.split(end)[1]


def main(arguments: list[str]) -> None:
    """Compile every shipped configuration and rewrite the table in the file named on the command line."""
    from netra_kernels.aot_cases import CASES

    rows: list[tuple[str, MachineCode]] = []
    failures: list[str] = []
    for case in CASES:
        with capture() as launches:
            case.launch()
        for launch in launches:
            code = inspect(launch)
            rows.append((case.name, code))
            bad = violations(code, case.opcodes.get(launch.name), case.max_narrow_loads)
            failures += [f"{case.name}: {launch.name}: {reason}" for reason in bad]
            sys.stdout.write(table([(case.name, code)]).splitlines()[-1] + "\n")
            sys.stdout.flush()
    sys.stdout.write("\n".join(failures) + "\n")
    if arguments:
        path = Path(arguments[0])
        path.write_text(replace_section(path.read_text(), table(rows)))
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

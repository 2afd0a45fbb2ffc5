"""Two processes share this folder, because triton decides at import whether a kernel is interpreted.

`TRITON_INTERPRET=1 pytest tests/kernels` computes every kernel on the CPU with the repaired interpreter;
`pytest tests/kernels` (without it) compiles them for sm_90 and looks at the machine code. PYTHONPATH picks
another triton than the installed one: `python tests/kernels/triton_versions.py 3.6.0` prints a folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MACHINE_CODE_TESTS = {"test_aot.py", "test_h200_compile.py", "test_machine_code.py"}

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "kernels")]

if INTERPRETED:
    import interpreter_fix

    interpreter_fix.apply()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that belong to the other process."""
    name = collection_path.name
    if not name.startswith("test_"):
        return None
    return True if (name in MACHINE_CODE_TESTS) == INTERPRETED else None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)

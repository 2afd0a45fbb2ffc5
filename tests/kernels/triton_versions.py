"""`python triton_versions.py 3.6.0`: a folder that holds that triton, fetched on first use, for PYTHONPATH.

The kernels are proven with the installed version and with the one of the deployment machine; both cannot be
installed at once. Uses pip and the registry that pip is set up for; keeps the folder in .cache/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"


def folder(version: str) -> Path:
    """The folder of that version; raises CalledProcessError if pip cannot fetch it."""
    target = CACHE / f"triton-{version}"
    if not (target / f"triton-{version}.dist-info").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, str(target), f"triton=={version}"], check=True, stdout=sys.stderr)
    return target


if __name__ == "__main__":
    print(folder(sys.argv[1]))  # noqa: T201

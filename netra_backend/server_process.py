"""Finds a tritonserver and runs it: environment, private backend directory, log, health, clean
stop.

Knows the server as a program, nothing about models or knobs. The server in the nvidia-pytriton
wheel needs help that a container does not: its backend directory lacks the stub, and the stub,
which embeds Python, must find this interpreter's library and this environment's packages.
Invariant: after `stop` neither a process nor a file of the server is left, also in /dev/shm.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from netra_backend.errors import ConfigError

_SHM = Path("/dev/shm")
_ERROR_LINE = re.compile(r"^(?:[EF]\d{4} |error: |\S+: error while loading)")
_NOISE = ("CudaDriverHelper has not been initialized",)
_KEPT_LINES = 400


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the server listens."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver that can be started: program, environment, and backends (None: its own)."""

    program: Path
    environment: dict[str, str]
    backend_directory: Path | None


def find_server(workspace: Path) -> Installation:
    """The tritonserver on PATH, else the one in the nvidia-pytriton wheel, made ready in
    `workspace`.

    Raises ConfigError if there is neither, or none that fits this interpreter.
    """
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path), dict(os.environ), None)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no tritonserver on PATH and no nvidia-pytriton package: pip install 'netra[server]'"
        )
    return _prepare_wheel(Path(spec.origin).parent, workspace)


def _prepare_wheel(package: Path, workspace: Path) -> Installation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        known = sorted(path.name for path in (root / "python_backend_stubs").glob("*"))
        raise ConfigError(
            f"nvidia-pytriton has no stub for Python {version}, only for {', '.join(known)}"
        )
    backends = workspace / "backends"
    target = backends / "python"
    target.mkdir(parents=True)
    # Copied, not linked: the server refuses a backend library that resolves outside its directory.
    shutil.copy(root / "backends" / "python" / "libtriton_python.so", target)
    for source in (root / "backends" / "python" / "triton_python_backend_utils.py", stub):
        (target / source.name).symlink_to(source)
    libraries = workspace / "lib"
    libraries.mkdir()
    python_library = Path(sysconfig.get_config_var("LIBDIR") or "/", f"libpython{version}.so.1.0")
    if python_library.is_file():
        # Only this one library: its directory may hold others that must not shadow the system's.
        (libraries / python_library.name).symlink_to(python_library)
    return Installation(
        root / "bin" / "tritonserver",
        _wheel_environment([libraries, package.parent / "nvidia_pytriton.libs"]),
        backends,
    )


def _wheel_environment(libraries: list[Path]) -> dict[str, str]:
    """The stub takes its prefix, and so its packages, from the first python3 on PATH."""
    environment = dict(os.environ)
    binaries = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([binaries, environment.get("PATH", "")])
    known = [environment["LD_LIBRARY_PATH"]] if environment.get("LD_LIBRARY_PATH") else []
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, libraries), *known])
    return environment


class ServerProcess:
    """One running tritonserver in a session of its own, so that a terminal's Ctrl-C reaches only
    us.

    `on_line` is called with every line of its log, from another thread.
    """

    def __init__(
        self,
        installation: Installation,
        model_repository: Path,
        *,
        host: str,
        ports: Ports,
        arguments: Sequence[str] = (),
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        base = f"http://{_reachable(host)}"
        self._probes = (f"{base}:{ports.http}/v2/health/ready", f"{base}:{ports.metrics}/metrics")
        self.shm_prefix = f"netra-{os.getpid()}-{ports.http}-"
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        command = [str(installation.program), f"--model-repository={model_repository}"]
        if installation.backend_directory is not None:
            command.append(f"--backend-directory={installation.backend_directory}")
        command += [f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}"]
        command += _listen_arguments(host, ports)
        if not Path("/dev/nvidiactl").exists():
            command.append("--allow-gpu-metrics=false")
        self._process = subprocess.Popen(
            [*command, *arguments],
            env=installation.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def lines(self) -> list[str]:
        """The last lines of its log."""
        return list(self._lines)

    def exit_code(self) -> int | None:
        """None while it runs; 128 + n if signal n ended it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def is_ready(self) -> bool:
        """Whether every model is ready and the metrics, which come up last, are served."""
        return all(map(_answers, self._probes))

    def terminate(self) -> None:
        """Ask it to finish what is in flight and to exit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its stubs at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self, timeout_seconds: float) -> int:
        """Terminate, kill if that takes too long, remove what it left in /dev/shm; gives the exit
        code."""
        self.terminate()
        deadline = time.monotonic() + timeout_seconds
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        self._output.close()
        for path in _SHM.glob(f"{self.shm_prefix}*"):
            path.unlink(missing_ok=True)
        return self.exit_code() or 0

    def error_lines(self) -> list[str]:
        """The lines that say what went wrong, else the last ones."""
        lines = self.lines
        errors = [
            line for line in lines if _ERROR_LINE.match(line) and not any(n in line for n in _NOISE)
        ]
        return errors or lines[-20:]

    def _read(self) -> None:
        for line in self._output:
            self._lines.append(line.rstrip("\n"))
            self._on_line(line.rstrip("\n"))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _listen_arguments(host: str, ports: Ports) -> list[str]:
    named = (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics))
    return [
        argument
        for name, port in named
        for argument in (f"--{name}-address={host}", f"--{name}-port={port}")
    ]


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host

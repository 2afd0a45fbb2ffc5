"""`python -m netra_backend.serve`: serve a checkpoint through a real tritonserver.

Makes a temporary model repository with the wanted parameters, starts the server, shows what it is
doing until it is ready, prints the URLs and a call that streams, and stops it cleanly. Knows no
engine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from netra_backend.config import EngineConfig
from netra_backend.errors import ConfigError
from netra_backend.server_process import Ports, ServerProcess, find_server

_ROOT = Path(__file__).resolve().parents[1]
_LOG_LINE = re.compile(r'^[IWEF]\d{4} \S+ \d+ \S+\] "?netra_backend\.\w+: (.*?)"?$')
_CHECKPOINT = re.compile(
    r'^\s*parameters\s*{\s*key:\s*"checkpoint"\s*value\s*{\s*string_value:\s*"([^"]*)"', re.M
)
_LOADING = re.compile(r'\] "?loading: (\S+):\d+')
_HEARTBEAT_SECONDS = 10.0
_CLEAR = "\r\x1b[K"
_STOP_SECONDS = 45.0
"""More than the 30 s that the server itself gives requests in flight."""
_STOP_LOADING_SECONDS = 2.0
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the process's exit code."""
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="netra-serve-") as workspace:
            return _serve(options, Path(workspace))
    except ConfigError as error:
        sys.stderr.write(f"netra: {error}\n")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m netra_backend.serve", description=__doc__)
    add = parser.add_argument
    ports = Ports()
    add("--checkpoint", metavar="DIR", help="a model directory in Hugging Face layout")
    add("--model", choices=["smollm2"], help="fetch and convert a known small model instead")
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any parameter of config.pbtxt",
    )
    add("--model-repository", metavar="DIR", type=Path, default=_ROOT / "model_repository")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s; 0.0.0.0 for all)",
    )
    add("--http-port", type=int, default=ports.http, help="default: %(default)s")
    add("--grpc-port", type=int, default=ports.grpc, help="default: %(default)s")
    add("--metrics-port", type=int, default=ports.metrics, help="default: %(default)s")
    add("--log-verbose", action="store_true", help="show the whole log of the server")
    add("server_arguments", nargs="*", metavar="-- ARGUMENT", help="passed on to tritonserver")
    return parser


def _serve(options: argparse.Namespace, workspace: Path) -> int:
    overrides = _overrides(options)
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port)
    check_ports(options.host, ports)
    repository = workspace / "models"
    write_repository(options.model_repository, repository, overrides)
    installation = find_server(workspace)
    progress = _Progress(show_all=options.log_verbose)
    with _Signals() as signals:
        server = ServerProcess(
            installation,
            repository,
            host=options.host,
            ports=ports,
            arguments=options.server_arguments,
            on_line=progress.line,
        )
        ready = False
        try:
            ready = _wait_until_ready(server, progress, signals)
            if ready:
                sys.stdout.write(_banner(options.host, ports, progress.seconds(), repository))
                sys.stdout.flush()
                _wait_for_exit(server, signals)
        finally:
            code_by_itself = server.exit_code()
            # A server that still loads has nothing in flight and does not listen to signals.
            code = server.stop(_STOP_SECONDS if ready else _STOP_LOADING_SECONDS)
    if signals.count and not ready:
        return _INTERRUPTED
    if code_by_itself not in (None, 0) and not signals.count:
        reason = "\n  ".join(server.error_lines())
        sys.stderr.write(f"netra: the server ended with code {code}:\n  {reason}\n")
    return code


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    """The parameters given on the command line, checked as far as possible without loading
    anything."""
    overrides: dict[str, str] = {}
    for assignment in options.set:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE")
        overrides[key] = value
    if options.model and options.checkpoint:
        raise ConfigError("give --checkpoint or --model, not both")
    checkpoint = _fetch_smollm2() if options.model else options.checkpoint
    if checkpoint:
        overrides["checkpoint"] = str(checkpoint)
    if "checkpoint" in overrides:
        overrides["checkpoint"] = str(Path(overrides["checkpoint"]).expanduser().resolve())
    EngineConfig.from_parameters(overrides)
    return overrides


def _fetch_smollm2() -> Path:
    """SmolLM2-135M-Instruct, fetched and converted once into the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "netra" / "smollm2-135m-instruct"
    if (directory / "config.json").is_file():
        return directory
    tool = _ROOT / "tools" / "convert_smollm2.py"
    if not tool.is_file():
        raise ConfigError(f"--model smollm2 needs {tool.name} from a checkout of the project")
    if subprocess.run([sys.executable, str(tool), "--output", str(directory)]).returncode != 0:
        raise ConfigError("SmolLM2 could not be fetched or converted; the reason is above")
    return directory


def check_ports(host: str, ports: Ports) -> None:
    """Raises ConfigError that names every port which cannot be listened on."""
    named = {"--http-port": ports.http, "--grpc-port": ports.grpc, "--metrics-port": ports.metrics}
    if len(set(named.values())) < len(named):
        raise ConfigError(
            "the ports must differ: " + ", ".join(f"{k} {v}" for k, v in named.items())
        )
    busy = [f"{option} {port}" for option, port in named.items() if not _is_free(host, port)]
    if busy:
        raise ConfigError(f"cannot listen on {host}: in use or not allowed: {', '.join(busy)}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def write_repository(source: Path, target: Path, overrides: Mapping[str, str]) -> None:
    """Copy the model repository `source` to `target` and set `overrides` in each of its models.

    A relative checkpoint keeps its meaning. Raises ConfigError if there is no model or no
    checkpoint.
    """
    models = sorted(path.parent for path in source.resolve().glob("*/config.pbtxt"))
    if not models:
        raise ConfigError(f"--model-repository {source}: no MODEL/config.pbtxt in it")
    for model in models:
        copy = target / model.name
        shutil.copytree(model, copy, ignore=shutil.ignore_patterns("__pycache__"))
        text = (copy / "config.pbtxt").read_text()
        (copy / "config.pbtxt").write_text(text + _parameter_lines(model, text, overrides))


def _parameter_lines(model: Path, text: str, overrides: Mapping[str, str]) -> str:
    """Entries to append: of equal keys in a config.pbtxt the server takes the last."""
    matches = _CHECKPOINT.findall(text)
    stated = overrides.get("checkpoint") or (matches[-1] if matches else EngineConfig().checkpoint)
    checkpoint = (model / stated).resolve()
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"no checkpoint in {checkpoint}: give --checkpoint DIR or --model smollm2"
        )
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{_escape(value)}" }} }}\n'
        for key, value in {**overrides, "checkpoint": str(checkpoint)}.items()
    ]
    return "\n" + "".join(lines)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Signals:
    """Counts requests to stop while it is entered: the first means finish, the second means now."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Signals:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class _Progress:
    """Tells a person what the server is doing: one rewritten line on a terminal, else a line per
    phase."""

    def __init__(self, *, show_all: bool) -> None:
        self._show_all = show_all
        self._start = time.monotonic()
        self._phase = "starting the server"
        self._last_shown = -_HEARTBEAT_SECONDS
        self._rewrite = sys.stderr.isatty() and not show_all
        self.loading = True

    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._start

    def line(self, line: str) -> None:
        """One line of the server's log (called from the reading thread)."""
        loading, own = _LOADING.search(line), _LOG_LINE.match(line)
        if self._show_all:
            sys.stderr.write(line + "\n")
        elif own:
            sys.stderr.write(f"{_CLEAR if self._rewrite and self.loading else ''}  {own[1]}\n")
            self._last_shown = self.seconds()
        if loading and not own:
            self._phase = f"the server starts model {loading[1]}"
        elif own:
            self._phase = own[1]

    def tick(self) -> None:
        """Called a few times a second while loading."""
        if self._show_all:
            return
        if self._rewrite:
            sys.stderr.write(f"{_CLEAR}[{self.seconds():4.0f} s] {self._phase[:100]}")
            sys.stderr.flush()
        elif self.seconds() - self._last_shown >= _HEARTBEAT_SECONDS:
            self._last_shown = self.seconds()
            sys.stderr.write(f"[{self.seconds():4.0f} s] {self._phase}\n")

    def done(self) -> None:
        """Loading ended, one way or the other."""
        self.loading = False
        if self._rewrite:
            sys.stderr.write(_CLEAR)


def _wait_until_ready(server: ServerProcess, progress: _Progress, signals: _Signals) -> bool:
    try:
        while server.exit_code() is None and not signals.count:
            progress.tick()
            if server.is_ready():
                return True
            time.sleep(0.2)
        return False
    finally:
        progress.done()


def _wait_for_exit(server: ServerProcess, signals: _Signals) -> None:
    told = False
    while server.exit_code() is None:
        if signals.count and not told:
            told = True
            sys.stderr.write(
                "netra: stopping; requests in flight are finished (once more: at once)\n"
            )
            server.terminate()
        if signals.count > 1:
            server.kill()
        time.sleep(0.1)


def _banner(host: str, ports: Ports, seconds: float, repository: Path) -> str:
    shown = "127.0.0.1" if host == "0.0.0.0" else host
    model = sorted(path.name for path in repository.iterdir())[0]
    url = f"http://{shown}:{ports.http}"
    body = '{"text_input": "The capital of France is", "stream": true, "max_tokens": 64}'
    return (
        f"\nNetra is ready ({seconds:.0f} s).\n"
        f"  HTTP     {url}\n"
        f"  gRPC     {shown}:{ports.grpc}\n"
        f"  metrics  http://{shown}:{ports.metrics}/metrics\n\n"
        f"  curl -N {url}/v2/models/{model}/generate_stream -d '{body}'\n\n"
        "Ctrl-C stops it.\n"
    )


if __name__ == "__main__":
    sys.exit(main())

"""One real tritonserver for all tests of this directory, with the models they need.

Models are loaded on demand: `netra` answers token by token and has small limits; `plain` is the
python-based backend directory form, with early responses and everything else as shipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import ROOT, Server, free_ports, wait_until

from checkpoints import make_random_qwen
from netra_backend.serve import write_repository
from netra_backend.server_process import ServerProcess, find_server

SMALL = {
    "num_threads": "1",
    "kv_cache_memory": "128MiB",
    "max_model_len": "4096",
    "default_temperature": "0",
    "metrics_interval_seconds": "0.1",
    "cancel_poll_ms": "20",
}
TOKEN_BY_TOKEN = {
    "max_num_seqs": "16",
    "max_num_batched_tokens": "64",
    "max_queued_tokens": "10000",
    "max_responses_per_second": "1000000",
    "response_interval_ms": "0",
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random one: the tests' memory figures and lengths are made for it."""
    return make_random_qwen(tmp_path_factory.mktemp("checkpoint") / "random-qwen")


@pytest.fixture(scope="session")
def repository(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with every form of the model; tests may add to it."""
    directory = tmp_path_factory.mktemp("repository")
    shipped = ROOT / "model_repository"
    knobs = SMALL | {"checkpoint": str(checkpoint)}
    write_repository(shipped, directory, knobs | TOKEN_BY_TOKEN)
    write_repository(shipped, directory / "plain-form", knobs | {"early_response": "true"})
    (directory / "plain-form" / "netra").rename(directory / "plain")
    (directory / "plain-form").rmdir()
    config = directory / "plain" / "config.pbtxt"
    config.write_text(config.read_text().replace('backend: "python"', 'backend: "netra"'))
    (directory / "plain" / "1" / "model.py").unlink()
    return directory


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, with `netra` loaded."""
    workspace = tmp_path_factory.mktemp("server")
    installation = find_server(workspace)
    if installation.backend_directory is not None:
        backend = installation.backend_directory / "netra"
        backend.mkdir()
        shutil.copy(ROOT / "model_repository" / "netra" / "1" / "model.py", backend)
    ports = free_ports()
    arguments = ("--model-control-mode=explicit", "--load-model=netra", "--strict-readiness=false")
    process = ServerProcess(
        installation, repository, host="127.0.0.1", ports=ports, arguments=arguments
    )
    try:
        running = Server(process, ports)
        wait_until(
            lambda: process.is_ready() or process.exit_code() is not None, "the server is up"
        )
        assert process.exit_code() is None, "\n".join(process.error_lines())
        wait_until(lambda: running.is_model_ready("netra"), "the model is loaded")
        yield running
    finally:
        process.stop(timeout_seconds=45)


@pytest.fixture
def idle(server: Server) -> Iterator[Server]:
    """The server with nothing in flight, before the test and again after it: what leaks shows."""
    _wait_idle(server)
    yield server
    _wait_idle(server)


def _wait_idle(server: Server) -> None:
    gauges = (
        "netra:pages_used",
        "netra:slots_used",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "netra:queued_prompt_tokens",
    )
    for name in gauges:
        wait_until(lambda name=name: server.metric("netra", name) == 0, f"{name} is 0")


@pytest.fixture(scope="session")
def plain(server: Server) -> str:
    """Name of the model in backend directory form, loaded."""
    if not server.is_model_ready("plain"):
        answer = server.load("plain")
        assert "error" not in answer, answer
    return "plain"

"""serve and server_process without a server: what is checked, written and prepared before one starts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from netra_backend import serve, server_process
from netra_backend.errors import ConfigError
from netra_backend.serve import check_ports, main, write_repository
from netra_backend.server_process import Installation, Ports, ServerProcess, find_server

SHIPPED = Path(__file__).resolve().parents[1] / "model_repository"


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoints" / "some"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def free_ports():
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = Ports(*(probe.getsockname()[1] for probe in probes))
    for probe in probes:
        probe.close()
    return ports


def last_value(text, key):
    lines = [line for line in text.splitlines() if f'key: "{key}"' in line]
    return lines[-1].partition('string_value: "')[2].partition('" }')[0]


def test_overrides_are_appended_so_that_they_win(tmp_path, checkpoint):
    overrides = {"checkpoint": str(checkpoint), "max_num_seqs": "5", "trace_file": 'a "b"\\c'}
    write_repository(SHIPPED, tmp_path / "models", overrides)
    text = (tmp_path / "models" / "netra" / "config.pbtxt").read_text()
    assert text.startswith((SHIPPED / "netra" / "config.pbtxt").read_text())
    assert last_value(text, "max_num_seqs") == "5"
    assert last_value(text, "checkpoint") == str(checkpoint)
    assert '"a \\"b\\"\\\\c"' in text
    assert (tmp_path / "models" / "netra" / "1" / "model.py").is_file()


def test_a_relative_checkpoint_still_means_the_same_place(tmp_path, checkpoint):
    source = tmp_path / "source"
    (source / "netra").mkdir(parents=True)
    line = 'parameters { key: "checkpoint" value { string_value: "../../checkpoints/some" } }\n'
    (source / "netra" / "config.pbtxt").write_text(f'backend: "python"\n{line}')
    write_repository(source, tmp_path / "models", {})
    text = (tmp_path / "models" / "netra" / "config.pbtxt").read_text()
    assert last_value(text, "checkpoint") == str(checkpoint)


def test_a_missing_checkpoint_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match="--checkpoint DIR or --model smollm2"):
        write_repository(SHIPPED, tmp_path / "models", {"checkpoint": str(tmp_path / "none")})


def test_a_directory_without_models_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--model-repository"):
        write_repository(tmp_path, tmp_path / "models", {})


def test_busy_ports_are_all_named():
    ports = free_ports()
    check_ports("127.0.0.1", ports)
    with (
        socket.create_server(("127.0.0.1", ports.http)),
        socket.create_server(("127.0.0.1", ports.metrics)),
        pytest.raises(ConfigError) as info,
    ):
        check_ports("127.0.0.1", ports)
    assert f"--http-port {ports.http}" in str(info.value)
    assert f"--metrics-port {ports.metrics}" in str(info.value)
    assert "--grpc-port" not in str(info.value)


@pytest.mark.parametrize("ports", [Ports(8000, 8000, 8002), Ports(8000, 8001, 70000)])
def test_impossible_ports_are_refused(ports):
    with pytest.raises(ConfigError, match="port"):
        check_ports("127.0.0.1", ports)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "max_num_seqs"], "KEY=VALUE"),
        (["--set", "max_seqs=3"], "max_seqs"),
        (["--set", "dtype=int3"], "dtype"),
        (["--checkpoint", "a", "--model", "smollm2"], "not both"),
        (["--checkpoint", "/no/such/directory"], "/no/such/directory"),
    ],
)
def test_mistakes_on_the_command_line_cost_no_server_start(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(serve, "ServerProcess", None)
    monkeypatch.setattr(serve, "check_ports", lambda host, ports: None)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_smollm2_is_converted_once_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "netra" / "smollm2-135m-instruct"
    calls = []

    def run(command):
        calls.append(command)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(serve.subprocess, "run", run)
    assert serve._fetch_smollm2() == directory
    assert serve._fetch_smollm2() == directory
    assert [command[2:] for command in calls] == [["--output", str(directory)]]
    monkeypatch.setattr(serve.subprocess, "run", lambda c: subprocess.CompletedProcess(c, 1))
    shutil.rmtree(directory)
    with pytest.raises(ConfigError, match="could not be fetched"):
        serve._fetch_smollm2()


def test_a_server_on_path_is_taken_as_it_is(tmp_path, monkeypatch):
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = find_server(tmp_path / "workspace")
    assert (found.program, found.backend_directory) == (program, None)
    assert not (tmp_path / "workspace").exists()


def fake_wheel(tmp_path, monkeypatch, version=None):
    version = version or f"{sys.version_info.major}.{sys.version_info.minor}"
    root = tmp_path / "site" / "pytriton" / "tritonserver"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    for path in (
        stub,
        root / "bin" / "tritonserver",
        root / "backends" / "python" / "libtriton_python.so",
        root / "backends" / "python" / "triton_python_backend_utils.py",
        tmp_path / "site" / "pytriton" / "__init__.py",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(server_process.shutil, "which", lambda name: None)
    origin = str(tmp_path / "site" / "pytriton" / "__init__.py")
    spec = ModuleSpec("pytriton", None, origin=origin)
    monkeypatch.setattr(server_process.importlib.util, "find_spec", lambda name: spec)
    return root


def test_the_wheel_gets_a_backend_directory_with_the_stub_of_this_python(tmp_path, monkeypatch):
    root = fake_wheel(tmp_path, monkeypatch)
    found = find_server(tmp_path / "workspace")
    assert found.program == root / "bin" / "tritonserver"
    python = found.backend_directory / "python"
    assert {path.name for path in python.iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    }
    assert not (python / "libtriton_python.so").is_symlink()
    assert found.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    libraries = found.environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert str(tmp_path / "site" / "nvidia_pytriton.libs") in libraries


def test_a_wheel_without_a_matching_stub_says_which_it_has(tmp_path, monkeypatch):
    fake_wheel(tmp_path, monkeypatch, version="2.7")
    with pytest.raises(ConfigError, match=r"no stub for Python 3\.\d+, only for 2\.7"):
        find_server(tmp_path / "workspace")


def test_no_server_at_all_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(server_process.shutil, "which", lambda name: None)
    monkeypatch.setattr(server_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        find_server(tmp_path)


FAKE_SERVER = """#!{python}
import signal, sys, time
print("I1130 20:00:00.1 1 a.cc:1] loading", flush=True)
print("E1130 20:00:00.1 1 server.cc:241] CudaDriverHelper has not been initialized.", flush=True)
{body}
"""


def start(tmp_path, body, on_line=lambda line: None):
    program = tmp_path / "tritonserver"
    program.write_text(FAKE_SERVER.format(python=sys.executable, body=body))
    program.chmod(0o755)
    installation = Installation(program, dict(os.environ), None)
    return ServerProcess(
        installation, tmp_path, host="127.0.0.1", ports=free_ports(), on_line=on_line
    )


def wait_for_exit(server):
    while server.exit_code() is None:
        time.sleep(0.01)


def test_a_server_that_dies_leaves_its_code_and_its_error_lines(tmp_path):
    lines = []
    body = 'print("E1130 20:00:01.1 1 b.cc:2] the reason", flush=True); sys.exit(3)'
    server = start(tmp_path, body, lines.append)
    wait_for_exit(server)
    assert not server.is_ready()
    assert server.stop(5) == 3
    assert server.error_lines() == ["E1130 20:00:01.1 1 b.cc:2] the reason"]
    assert lines == server.lines


def test_without_error_lines_the_last_lines_are_shown(tmp_path):
    server = start(tmp_path, 'print("about to end", flush=True)')
    wait_for_exit(server)
    assert server.stop(5) == 0
    assert "about to end" in server.error_lines()


def test_stopping_asks_first_and_removes_what_is_left_in_shared_memory(tmp_path):
    body = 'signal.signal(15, lambda *_: sys.exit(0)); print("up", flush=True); time.sleep(60)'
    server = start(tmp_path, body)
    left = Path("/dev/shm") / f"{server.shm_prefix}region"
    left.write_bytes(b"x")
    while "up" not in server.lines:
        time.sleep(0.01)
    assert server.stop(30) == 0
    assert not left.exists()


def test_a_server_that_does_not_stop_is_killed(tmp_path):
    body = 'signal.signal(15, signal.SIG_IGN); print("up", flush=True); time.sleep(60)'
    server = start(tmp_path, body)
    while "up" not in server.lines:
        time.sleep(0.01)
    assert server.stop(0.2) == 128 + signal.SIGKILL

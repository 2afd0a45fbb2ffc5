"""Loading, unloading, stopping, and what is left behind."""

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from server_tools import GrpcStream, Server, free_ports, wait_until

pytestmark = pytest.mark.server


def shm_bytes(server: Server) -> int:
    """Memory that the server and its stubs hold in /dev/shm."""
    paths = list(Path("/dev/shm").glob(f"{server.process.shm_prefix}*"))
    assert paths
    return sum(path.stat().st_blocks * 512 for path in paths)


def test_shared_memory_stays_flat_over_twenty_thousand_chunks(idle: Server):
    """Chunks carry text of one token each: `netra` sends without coalescing."""

    def stream_chunks(wanted: int) -> int:
        count = 0
        while count < wanted:
            streams = [idle.stream() for _ in range(4)]
            for stream in streams:
                for r in range(4):
                    stream.ask(
                        "netra",
                        request_id=str(r),
                        input_ids=[10 + r],
                        stream=True,
                        parameters={
                            "max_tokens": 400,
                            "ignore_eos": True,
                            "skip_special_tokens": False,
                        },
                    )
            for stream in streams:
                count += sum(len(a.responses) for a in stream.answers(4).values())
                stream.close()
        return count

    warm = stream_chunks(2_000)
    before = shm_bytes(idle)
    assert warm + stream_chunks(18_000) >= 20_000
    assert shm_bytes(idle) <= before


def test_the_backend_directory_form_gives_the_same_text(server: Server, plain: str):
    request = {"input_ids": [10, 20, 30], "parameters": {"max_tokens": 16, "ignore_eos": True}}
    as_backend = server.ask(plain, **request)
    assert as_backend.text == server.ask("netra", **request).text
    streamed = server.ask(plain, stream=True, **request)
    assert streamed.text == as_backend.text
    assert streamed.responses[0].text == ""
    assert len(streamed.responses) < 17


def test_unloading_lets_streams_finish_and_refuses_new_ones(server: Server, plain: str):
    with server.stream() as stream:
        stream.ask(
            plain,
            input_ids=[10],
            stream=True,
            return_num_output_tokens=True,
            parameters={"max_tokens": 600, "ignore_eos": True},
        )
        first = stream.next()
        unloading = threading.Thread(target=server.unload, args=(plain,))
        unloading.start()
        wait_until(lambda: not server.is_model_ready(plain), "the model is being unloaded")
        assert "no available versions" in server.ask(plain, input_ids=[10]).last.error
        answer = stream.answer()
        assert answer.last.final
        counted = answer.total("num_output_tokens") + first.outputs["num_output_tokens"]
        assert counted == 600
        unloading.join()
    wait_until(lambda: server.states()[plain].startswith("UNAVAILABLE"), "the model is unloaded")
    assert server.load(plain) == {}
    assert server.ask(plain, input_ids=[10], parameters={"max_tokens": 2}).last.final


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('key: "max_seqs" value { string_value: "4" }', ["max_seqs", "known:", "max_num_seqs"]),
        ('key: "max_num_seqs" value { string_value: "x" }', ["max_num_seqs", "'x'", "int"]),
        ('key: "dtype" value { string_value: "int3" }', ["dtype", "int3", "bfloat16"]),
        ('key: "checkpoint" value { string_value: "/no/such" }', ["checkpoint", "/no/such"]),
        ('key: "kv_cache_memory" value { string_value: "1KiB" }', ["kv_cache_memory"]),
    ],
)
def test_a_wrong_configuration_fails_the_load_and_says_why(
    server: Server, repository: Path, line: str, words: list[str]
):
    model = repository / "wrong"
    shutil.copytree(repository / "netra", model)
    try:
        config = model / "config.pbtxt"
        config.write_text(f"{config.read_text()}\nparameters {{ {line} }}\n")
        error = server.load("wrong")["error"]
        assert all(word in error for word in words), error
        assert server.states()["wrong"].startswith("UNAVAILABLE")
        assert server.ask("netra", input_ids=[10], parameters={"max_tokens": 2}).last.final
    finally:
        shutil.rmtree(model)


@pytest.fixture
def own_server(repository: Path, server: Server, tmp_path: Path):
    """`make serve` as a user runs it, on the test's model repository."""
    source = tmp_path / "models"
    shutil.copytree(repository / "netra", source / "netra")
    ports = free_ports()
    command = [
        *(sys.executable, "-m", "netra_backend.serve"),
        *("--model-repository", str(source), "--set", "max_num_seqs=4"),
        *("--http-port", str(ports.http)),
        *("--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics)),
    ]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=None)
    try:
        yield process, ports, tmp_path / "log"
    finally:
        process.kill()
        process.wait()
        log.close()


def test_serve_says_when_it_is_ready_and_stops_cleanly_in_the_middle_of_a_stream(own_server):
    process, ports, log = own_server
    wait_until(
        lambda: "is ready" in log.read_text() or process.poll() is not None, "serve is ready"
    )
    assert process.poll() is None, log.read_text()
    assert (
        f"curl -N http://127.0.0.1:{ports.http}/v2/models/netra/generate_stream" in log.read_text()
    )
    with GrpcStream(f"127.0.0.1:{ports.grpc}") as stream:
        stream.ask(
            "netra",
            input_ids=[10],
            stream=True,
            return_num_output_tokens=True,
            parameters={"max_tokens": 500, "ignore_eos": True},
        )
        first = stream.next()
        process.send_signal(signal.SIGINT)
        answer = stream.answer()
    assert answer.last.final
    assert answer.total("num_output_tokens") + first.outputs["num_output_tokens"] == 500
    assert process.wait(60) == 0
    left = [path.name for path in Path("/dev/shm").glob(f"netra-{process.pid}-*")]
    assert left == []


def test_serve_shows_why_the_server_died(repository: Path, tmp_path: Path):
    source = tmp_path / "models"
    shutil.copytree(repository / "netra", source / "netra")
    config = source / "netra" / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "typo" value { string_value: "1" } }')
    ports = free_ports()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "netra_backend.serve", "--model-repository", str(source)),
            *("--http-port", str(ports.http), "--grpc-port", str(ports.grpc)),
            *("--metrics-port", str(ports.metrics)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "unknown parameter typo" in done.stderr
    assert "max_num_seqs" in done.stderr

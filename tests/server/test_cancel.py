"""Requests that end early, in every phase: pages, tails and slots are all given back.

Phases are told apart by the metrics. The model runs 16 requests: with 16 that decode for ever a further
one waits, and with 15 a long prompt is read in small pieces beside them.
"""

import contextlib
import json
import socket
import subprocess
import sys
import textwrap

import pytest
from server_tools import Server, wait_until

pytestmark = pytest.mark.server

LONG = [10 + i % 200 for i in range(3900)]
FOREVER = {"max_tokens": 4000, "ignore_eos": True}


def running(server: Server, model: str = "netra") -> float:
    return server.metric(model, "vllm:num_requests_running")


def waiting(server: Server, model: str = "netra") -> float:
    return server.metric(model, "vllm:num_requests_waiting")


def wait_for_load(server: Server, num_running: int, num_waiting: int, model: str = "netra") -> None:
    seen: list[float] = []

    def matches() -> bool:
        seen[:] = running(server, model), waiting(server, model)
        return seen == [num_running, num_waiting]

    wait_until(matches, lambda: f"{num_running} running, {num_waiting} waiting; seen {seen}")


@contextlib.contextmanager
def decoders(server: Server, count: int):
    """`count` requests that decode for as long as the block runs."""
    stream = server.stream()
    try:
        for index in range(count):
            stream.ask("netra", input_ids=[10 + index], stream=True, parameters=FOREVER)
        wait_for_load(server, count, 0)
        yield
        assert (running(server), waiting(server)) == (count, 0)
    finally:
        stream.cancel()


def test_cancelled_while_queued(idle: Server):
    with decoders(idle, 16):
        queued = idle.stream()
        queued.ask("netra", input_ids=LONG, stream=True, parameters=FOREVER)
        wait_for_load(idle, 16, 1)
        assert idle.metric("netra", "netra:queued_prompt_tokens") == len(LONG)
        queued.cancel()
        wait_for_load(idle, 16, 0)


def test_cancelled_in_the_middle_of_its_prompt(idle: Server):
    with decoders(idle, 15):
        pages = idle.metric("netra", "netra:pages_used")
        stream = idle.stream()
        stream.ask("netra", input_ids=LONG, stream=True, parameters=FOREVER)
        wait_until(
            lambda: idle.metric("netra", "netra:pages_used") > pages + 16, "a part of it is read"
        )
        assert stream.is_silent()
        stream.cancel()
        wait_for_load(idle, 15, 0)


def test_cancelled_while_decoding(idle: Server):
    stream = idle.stream()
    stream.ask("netra", input_ids=[10, 20], stream=True, parameters=FOREVER)
    assert stream.next().text
    before = idle.metric("netra", "vllm:generation_tokens_total")
    stream.cancel()
    wait_for_load(idle, 0, 0)
    assert idle.metric("netra", "vllm:generation_tokens_total") - before < 3900


def test_a_single_answer_is_cancelled_over_grpc_too(idle: Server):
    stream = idle.stream()
    stream.ask("netra", input_ids=[10, 20], parameters=FOREVER)
    wait_for_load(idle, 1, 0)
    stream.cancel()
    wait_for_load(idle, 0, 0)


CLIENT = """
    import sys, time
    sys.path[:0] = {path!r}
    from server_tools import GrpcStream
    stream = GrpcStream({url!r})
    for _ in range({count}):
        stream.ask("netra", input_ids={ids!r}, stream=True, parameters={parameters!r})
    print("asked", flush=True)
    while True:
        print("got", stream.next().error or "one", flush=True)
"""


@contextlib.contextmanager
def killed_client(server: Server, count: int, ids: list[int]):
    """A client process with `count` requests in flight; it is killed when the block ends."""
    code = textwrap.dedent(CLIENT).format(
        path=sys.path, url=server.grpc_url, count=count, ids=ids, parameters=FOREVER
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with client:
        try:
            assert client.stdout.readline() == "asked\n"
            yield client
        finally:
            client.kill()


def test_client_killed_while_one_prompt_is_read_and_another_waits(idle: Server):
    with decoders(idle, 15):
        with killed_client(idle, 2, LONG):
            wait_for_load(idle, 16, 1)
        wait_for_load(idle, 15, 0)


def test_client_killed_while_decoding(idle: Server):
    with killed_client(idle, 3, [10, 20, 30]) as client:
        for _ in range(5):
            assert client.stdout.readline() == "got one\n"
        wait_for_load(idle, 3, 0)
    wait_for_load(idle, 0, 0)


def http_stream(server: Server, model: str, **body) -> socket.socket:
    """An open generate_stream call, as a raw socket so that it can be dropped at any moment."""
    data = json.dumps({"stream": True, **FOREVER, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.ports.http), timeout=60)
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_http_connection_dropped_while_decoding(idle: Server):
    connection = http_stream(idle, "netra", input_ids=[10, 20])
    assert b"text_output" in connection.recv(65536) + connection.recv(65536)
    connection.close()
    wait_for_load(idle, 0, 0)


def test_an_early_response_shows_the_server_dropped_http_connections_before_any_text(
    server: Server, plain: str
):
    connection = http_stream(server, plain, input_ids=LONG)
    wait_for_load(server, 1, 0, plain)
    received = connection.recv(65536) + connection.recv(65536)
    assert b'"text_output":""' in received
    connection.close()
    wait_for_load(server, 0, 0, plain)


def test_the_clients_time_limit_ends_a_request(idle: Server):
    answer = idle.ask("netra", input_ids=[10], stream=True, parameters=FOREVER, timeout_us=300_000)
    assert "[timeout] " in answer.last.error
    assert len(answer.responses) > 1
    parameters = FOREVER | {"timeout_seconds": 0.3}
    assert "[timeout] " in idle.ask("netra", input_ids=LONG, parameters=parameters).last.error
    assert "[timeout] " in idle.generate("netra", input_ids=[10], **parameters)["error"]


def test_a_full_queue_refuses_at_once_and_recovers(idle: Server):
    """10,000 prompt tokens may wait: two of these prompts, and not a third."""
    with decoders(idle, 16):
        queued = idle.stream()
        for _ in range(3):
            queued.ask("netra", input_ids=LONG, parameters={"max_tokens": 1})
        refused = queued.next()
        assert "[queue_full] " in refused.error
        assert "max_queued_tokens 10000" in refused.error
        over_http = idle.generate("netra", input_ids=LONG, max_tokens=1)
        assert "[queue_full] " in over_http["error"]
        wait_for_load(idle, 16, 2)
        queued.cancel()
        wait_for_load(idle, 16, 0)
    answer = idle.ask("netra", input_ids=LONG, parameters={"max_tokens": 1})
    assert answer.last.final

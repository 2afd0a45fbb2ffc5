"""bench/load.py and its transports, without a tritonserver.

The servers are small ones made here: one speaks the gRPC protocol by tritonclient's own stubs, one
sends server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tqdm import tqdm  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import load
import report
import transport
import workload


class FakeTransport:
    """Answers at once, a token a chunk; `fails` says which requests fail."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.texts: list[str] = []
        self.lengths: list[int] = []
        self.num_open = 0
        self._fails = fails

    async def stream(self, text: str, output_len: int) -> AsyncIterator[transport.Chunk]:
        number = len(self.texts)
        self.texts.append(text)
        self.lengths.append(output_len)
        self.num_open += 1
        try:
            for index in range(output_len):
                await asyncio.sleep(0.0005)
                if number in self._fails:
                    raise transport.TransportError("refused")
                last = index == output_len - 1
                yield transport.Chunk(3, 1, "length" if last else "None")
        finally:
            self.num_open -= 1

    async def checkpoint(self) -> str:
        return "somewhere"

    async def close(self) -> None:
        pass


def make_plan(users: int, requests: int = 2) -> load.Plan:
    return load.Plan(users, requests, workload.Lengths(4, 4), 0.001, 30.0, 0)


PROMPTS = [workload.Prompt(f"p{i}", (1, 2, 3), "a") for i in range(40)]


class TestLoad:
    """The closed loop and the burst over a transport that needs no server."""

    def run(self, fake: FakeTransport, plan: load.Plan, burst: bool = False) -> report.Metrics:
        async def once() -> report.Metrics:
            loop = load.ClosedLoop(fake, PROMPTS, plan)
            return await load.one_window(loop, plan, burst, tqdm(disable=True))

        return asyncio.run(once())

    def test_users_are_measured_only_once_all_are_warm(self) -> None:
        fake = FakeTransport()
        metrics = self.run(fake, make_plan(users=5, requests=3))
        assert metrics["num_completed"] is not None
        assert metrics["num_completed"] >= 15
        assert metrics["num_failed"] == 0
        assert metrics["num_wrong_output_len"] == metrics["num_wrong_input_len"] == 0
        assert metrics["client_cores"] is not None
        assert set(fake.lengths[:5]) <= {1, 2, 3, 4}
        assert set(fake.lengths[-10:]) == {4}
        assert len(set(fake.texts)) == len(fake.texts)
        assert fake.num_open == 0

    def test_failures_are_counted_and_the_user_goes_on(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        metrics = self.run(FakeTransport(fails=range(6, 9)), make_plan(users=2, requests=8))
        assert metrics["num_failed"] == 3
        assert metrics["num_completed"] is not None
        assert metrics["num_completed"] >= 14
        assert "3 failed: refused" in capsys.readouterr().err

    def test_a_server_that_refuses_everything_is_an_error(self) -> None:
        with pytest.raises(transport.TransportError, match="refused"):
            self.run(FakeTransport(fails=range(999)), make_plan(users=1))

    def test_a_burst_is_one_request_per_user(self) -> None:
        fake = FakeTransport()
        metrics = self.run(fake, make_plan(users=6), burst=True)
        assert fake.lengths == [4] * 6
        assert metrics["num_completed"] == 6
        assert metrics["little_error"] == pytest.approx(0.0, abs=1e-6)

    def test_a_checkpoint_that_is_elsewhere_is_asked_for(self) -> None:
        with pytest.raises(transport.TransportError, match="--checkpoint"):
            load.find_checkpoint("nowhere/at/all", "netra")

    def test_command_line_against_a_server_that_is_not_there(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["load.py", "--http", "127.0.0.1:9", "--users", "1"])
        assert load.main() == 1
        assert capsys.readouterr().err.startswith("load: ClientConnectorError")


class TestHttpTransport:
    """Server-sent events as the server writes them."""

    @staticmethod
    def collect(events: list[bytes], status: int = 200) -> tuple[list[transport.Chunk], Any]:
        received: list[Any] = []

        async def answer(request: web.Request) -> web.StreamResponse:
            received.append(await request.json())
            response = web.StreamResponse(status=status)
            await response.prepare(request)
            for event in events:
                await response.write(event)
            return response

        async def talk() -> list[transport.Chunk]:
            application = web.Application()
            application.router.add_post("/v2/models/m/generate_stream", answer)
            runner = web.AppRunner(application)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            client = transport.HttpTransport(f"{host}:{port}", "m")
            try:
                return [chunk async for chunk in client.stream("hello", 7)]
            finally:
                await client.close()
                await runner.cleanup()

        return asyncio.run(talk()), received[0]

    def test_counts_and_request(self) -> None:
        event = b'data: {"finish_reason":"None","num_input_tokens":5,"num_output_tokens":2}\n\n'
        last = event.replace(b"None", b"length")
        chunks, body = self.collect([event[:30], event[30:] + last])
        assert chunks == [transport.Chunk(5, 2, "None"), transport.Chunk(5, 2, "length")]
        assert body["text_input"] == "hello"
        assert body["stream"] is True
        assert json.loads(body["sampling_parameters"]) == {
            "max_tokens": 7,
            "ignore_eos": True,
            "temperature": 0.0,
        }

    @pytest.mark.parametrize("prefix", [b"data: ", b""])
    def test_an_error_is_raised(self, prefix: bytes) -> None:
        with pytest.raises(transport.TransportError, match="queue_full"):
            self.collect([prefix + b'{"error":"[queue_full] no"}\n\n'], status=400)


class TestGrpcTransport:
    """The protocol by tritonclient's own stubs."""

    @staticmethod
    def collect(responses: list[Any]) -> tuple[list[transport.Chunk], Any, str]:
        import grpc
        from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

        received: list[Any] = []

        class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
            async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
                async for request in requests:
                    received.append(request)
                    for response in responses:
                        yield response

            async def ModelConfig(self, request: Any, context: Any) -> Any:
                value = model_config_pb2.ModelParameter(string_value="/c")
                config = model_config_pb2.ModelConfig(parameters={"checkpoint": value})
                return service_pb2.ModelConfigResponse(config=config)

        async def talk() -> tuple[list[transport.Chunk], str]:
            server = grpc.aio.server()
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            client = transport.GrpcTransport(f"127.0.0.1:{port}", "m")
            try:
                checkpoint = await client.checkpoint()
                return [chunk async for chunk in client.stream("hello", 7)], checkpoint
            finally:
                await client.close()
                await server.stop(None)

        chunks, checkpoint = asyncio.run(talk())
        return chunks, received[0], checkpoint

    @staticmethod
    def response(reason: bytes) -> Any:
        from tritonclient.grpc import service_pb2

        infer = service_pb2.ModelInferResponse(model_name="m")
        contents = {
            "text_output": b"\x01\0\0\0x",
            "finish_reason": len(reason).to_bytes(4, "little") + reason,
            "num_output_tokens": (2).to_bytes(4, "little"),
            "num_input_tokens": (300).to_bytes(4, "little"),
        }
        for name, content in contents.items():
            infer.outputs.add(name=name)
            infer.raw_output_contents.append(content)
        return service_pb2.ModelStreamInferResponse(infer_response=infer)

    def test_counts_and_request(self) -> None:
        chunks, request, checkpoint = self.collect([self.response(b"None"), self.response(b"stop")])
        assert chunks == [transport.Chunk(300, 2, "None"), transport.Chunk(300, 2, "stop")]
        assert request.model_name == "m"
        assert {tensor.name for tensor in request.inputs} >= {"text_input", "stream"}
        assert checkpoint == "/c"

    def test_an_error_is_raised(self) -> None:
        from tritonclient.grpc import service_pb2

        error = service_pb2.ModelStreamInferResponse(error_message="[queue_full] no")
        with pytest.raises(transport.TransportError, match="queue_full"):
            self.collect([error])

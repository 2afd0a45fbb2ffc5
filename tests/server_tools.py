"""What tests need to talk to a running server: gRPC streams, HTTP calls, metrics, model control."""

from __future__ import annotations

import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from netra_backend.request_parser import INPUTS
from netra_backend.server_process import Ports, ServerProcess

ROOT = Path(__file__).resolve().parents[1]

PATIENCE_SECONDS = 60.0
"""How long anything may take before a test gives up: generous, the machine is shared."""

_TYPES = {
    "TYPE_STRING": ("BYTES", np.object_),
    "TYPE_BOOL": ("BOOL", np.bool_),
    "TYPE_INT32": ("INT32", np.int32),
}
_KINDS = {name: data_type for name, data_type, _ in INPUTS}


@dataclass(frozen=True)
class Response:
    """One response of a gRPC stream; `error` is set instead of outputs when the request failed."""

    request_id: str = ""
    outputs: dict[str, Any] = field(default_factory=dict)
    final: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        return self.outputs.get("text_output", "")


@dataclass(frozen=True)
class Answer:
    """All responses of one request."""

    responses: list[Response]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def last(self) -> Response:
        return self.responses[-1]

    def total(self, name: str) -> int:
        return sum(int(response.outputs[name]) for response in self.responses)

    def token_ids(self) -> list[int]:
        """The chosen tokens, read from `logprobs` (asked for with return_logprobs and logprobs 0)."""
        assert not self.last.error, self.last.error
        entries = [json.loads(response.outputs["logprobs"]) or [] for response in self.responses]
        return [int(next(iter(position))) for entry in entries for position in entry]


class GrpcStream:
    """One bidirectional stream of one client; several requests may share it."""

    def __init__(self, url: str) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._received: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._client.start_stream(self._callback)

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self,
        model: str,
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        timeout_us: int | None = None,
        **tensors: Any,
    ) -> None:
        self._client.async_stream_infer(
            model,
            [to_input(name, value) for name, value in tensors.items()],
            request_id=request_id,
            parameters=parameters,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )

    def next(self) -> Response:
        return self._received.get(timeout=PATIENCE_SECONDS)

    def answer(self) -> Answer:
        """Responses up to the final one, of a stream with one request in flight."""
        responses = [self.next()]
        while not responses[-1].final and not responses[-1].error:
            responses.append(self.next())
        return Answer(responses)

    def answers(self, count: int) -> dict[str, Answer]:
        """Answers by request id, of `count` requests in flight that all succeed."""
        found: dict[str, list[Response]] = {}
        finals = 0
        while finals < count:
            response = self.next()
            assert not response.error, response.error
            found.setdefault(response.request_id, []).append(response)
            finals += response.final
        return {request_id: Answer(responses) for request_id, responses in found.items()}

    def is_silent(self) -> bool:
        """Whether nothing is left that was received and not read."""
        return self._received.empty()

    def cancel(self) -> None:
        """Cancel what is in flight.

        Not for a stream whose requests are done: tritonserver 2.51 then sometimes keeps the model
        referenced, with any backend, and unloading it never ends.
        """
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def close(self) -> None:
        """Wait for what is in flight and close the stream."""
        self._client.stop_stream(cancel_requests=False)
        self._client.close()

    def _callback(self, result: Any, error: Any) -> None:
        if error is not None:
            self._received.put(Response(error=str(error.message())))
            return
        message = result.get_response()
        outputs = {output.name: _plain(result.as_numpy(output.name)) for output in message.outputs}
        final = message.parameters["triton_final_response"].bool_param
        self._received.put(Response(message.id, outputs, final))


def to_input(name: str, value: Any) -> Any:
    """An input tensor of the declared type; an array goes as it is, for tests of wrong types."""
    if isinstance(value, np.ndarray):
        array = value
        kind = {"O": "BYTES", "b": "BOOL", "f": "FP32"}.get(array.dtype.kind)
        kind = kind or f"INT{8 * array.dtype.itemsize}"
    else:
        kind, dtype = _TYPES[_KINDS[name]]
        values = value if isinstance(value, list | tuple) else [value]
        array = np.array(values, dtype=dtype)
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _plain(array: np.ndarray) -> Any:
    assert array.shape == (1,)
    item = array[0]
    return item.decode() if isinstance(item, bytes) else item.item()


@dataclass
class Server:
    """A running server and its addresses."""

    process: ServerProcess
    ports: Ports

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def stream(self) -> GrpcStream:
        return GrpcStream(self.grpc_url)

    def ask(self, model: str, **request: Any) -> Answer:
        """One request on a stream of its own."""
        with self.stream() as stream:
            stream.ask(model, **request)
            return stream.answer()

    def generate(self, model: str, **body: Any) -> dict[str, Any]:
        """POST generate; an error comes back as {"error": text}."""
        return self._post(f"/v2/models/{model}/generate", body)

    def generate_stream(self, model: str, **body: Any) -> Iterator[dict[str, Any]]:
        """POST generate_stream; yields one object per event."""
        request = self._request(f"/v2/models/{model}/generate_stream", body)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                yield from _events(response)
        except urllib.error.HTTPError as error:
            with error:
                yield from _events(error)

    def load(self, model: str) -> dict[str, Any]:
        return self._post(f"/v2/repository/models/{model}/load", {})

    def unload(self, model: str) -> dict[str, Any]:
        return self._post(f"/v2/repository/models/{model}/unload", {})

    def states(self) -> dict[str, str]:
        """State of every model, with the reason if it has one."""
        entries = self._post("/v2/repository/index", {})
        return {e["name"]: f"{e.get('state', '')} {e.get('reason', '')}".strip() for e in entries}

    def is_model_ready(self, model: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/models/{model}/ready") as response:
                return response.status == 200
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def metric(self, model: str, name: str) -> float:
        """The value of one sample, by its name without labels or with extra ones like used."""
        url = f"http://127.0.0.1:{self.ports.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
            lines = response.read().decode().splitlines()
        found = [line for line in lines if line.startswith(name + "{") and f'"{model}"' in line]
        assert len(found) == 1, f"{name} of {model}: {found}"
        return float(found[0].rsplit(" ", 1)[1])

    def _request(self, path: str, body: Any) -> urllib.request.Request:
        return urllib.request.Request(self.http_url + path, data=json.dumps(body).encode())

    def _post(self, path: str, body: Any) -> Any:
        try:
            with urllib.request.urlopen(self._request(path, body), timeout=120) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
        return json.loads(text) if text else {}


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])


def free_ports() -> Ports:
    """Three ports that nobody listens on right now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    numbers = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return Ports(*numbers)


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Poll until `condition` holds; fails the test if that takes unreasonably long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            waited_for = what if isinstance(what, str) else what()
            raise AssertionError(f"not so after {PATIENCE_SECONDS:.0f} s: {waited_for}")
        time.sleep(0.02)

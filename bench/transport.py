"""Ways to send one streamed request to the server and read its chunks: gRPC and HTTP.

Both are asyncio clients that share their connections between users. They read the counts that the
server sends and no text, so that the client stays cheap; they measure nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np
import tritonclient.grpc.aio as grpcclient  # type: ignore[import-untyped]
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

_FLAGS = (
    "stream",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_finish_reason",
)


class TransportError(Exception):
    """The server refused or failed a request, or could not be reached; the message is its own."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream. `num_output_tokens` is what it adds."""

    num_input_tokens: int
    num_output_tokens: int
    finish_reason: str


class Transport(Protocol):
    """A connection to one model on one server."""

    def stream(self, text: str, output_len: int) -> AsyncIterator[Chunk]:
        """Chunks of the answer to `text`. Raises TransportError."""
        ...

    async def checkpoint(self) -> str:
        """The `checkpoint` knob of the model that is served. Raises TransportError."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


def sampling_parameters(output_len: int) -> str:
    """Greedy, with a forced length."""
    return json.dumps({"max_tokens": output_len, "ignore_eos": True, "temperature": 0.0})


class GrpcTransport:
    """tritonclient's gRPC streaming; a stream per request over one channel."""

    def __init__(self, address: str, model: str) -> None:
        self._client = grpcclient.InferenceServerClient(address)
        self._model = model

    async def stream(self, text: str, output_len: int) -> AsyncIterator[Chunk]:
        """See Transport."""
        request = {"model_name": self._model, "inputs": _grpc_inputs(text, output_len)}

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request

        responses = self._client.stream_infer(requests())
        try:
            async for result, error in responses:
                if error is not None:
                    raise TransportError(str(error))
                yield _grpc_chunk(result.get_response())
        except grpcclient.grpc.RpcError as error:
            raise TransportError(f"{error.code()}: {error.details()}") from error
        finally:
            responses.cancel()

    async def checkpoint(self) -> str:
        """See Transport."""
        try:
            answer = await self._client.get_model_config(self._model, as_json=True)
        except InferenceServerException as error:
            raise TransportError(str(error)) from error
        return _checkpoint(answer["config"])

    async def close(self) -> None:
        """See Transport."""
        await self._client.close()


class HttpTransport:
    """generate_stream over server-sent events; a connection per request, kept alive."""

    def __init__(self, address: str, model: str) -> None:
        self._url = f"http://{address}/v2/models/{model}"
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout
        )

    async def stream(self, text: str, output_len: int) -> AsyncIterator[Chunk]:
        """See Transport."""
        body: dict[str, object] = dict.fromkeys(_FLAGS, True)
        body |= {"text_input": text, "sampling_parameters": sampling_parameters(output_len)}
        try:
            async with self._session.post(f"{self._url}/generate_stream", json=body) as response:
                async for line in response.content:
                    if line.startswith((b"data:", b"{")):
                        yield _http_chunk(json.loads(line.removeprefix(b"data:")))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error

    async def checkpoint(self) -> str:
        """See Transport."""
        try:
            async with self._session.get(f"{self._url}/config") as response:
                config = await response.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error
        if "error" in config:
            raise TransportError(str(config["error"]))
        return _checkpoint(config)

    async def close(self) -> None:
        """See Transport."""
        await self._session.close()


def _grpc_inputs(text: str, output_len: int) -> list[grpcclient.InferInput]:
    strings = {"text_input": text, "sampling_parameters": sampling_parameters(output_len)}
    inputs = []
    for name, value in strings.items():
        inputs.append(grpcclient.InferInput(name, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    for name in _FLAGS:
        inputs.append(grpcclient.InferInput(name, [1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([True]))
    return inputs


def _grpc_chunk(response: Any) -> Chunk:
    contents = {
        output.name: content
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    return Chunk(
        int.from_bytes(contents.get("num_input_tokens", b""), "little"),
        int.from_bytes(contents.get("num_output_tokens", b""), "little"),
        contents.get("finish_reason", b"")[4:].decode(),  # after the string's length
    )


def _http_chunk(event: dict[str, Any]) -> Chunk:
    if "error" in event:
        raise TransportError(str(event["error"]))
    return Chunk(event["num_input_tokens"], event["num_output_tokens"], event["finish_reason"])


def _checkpoint(config: dict[str, Any]) -> str:
    try:
        return str(config["parameters"]["checkpoint"]["string_value"])
    except KeyError as error:
        raise TransportError("the model's configuration names no checkpoint") from error

"""A stand-in for `triton_python_backend_utils` and the server behind it, for tests of the adapter."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest


class TritonModelException(Exception):
    """As the server raises and expects it."""


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = (
        "internal",
        "invalid",
        "unavailable",
        "cancelled",
    )

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.error = error
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}


class Sender:
    """Refuses anything after the final response, as the server does."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.closed = False
        self.cancelled = False

    def send(self, response: InferenceResponse, flags: int) -> None:
        if self.closed:
            raise TritonModelException("Response sender has been closed.")
        self.responses.append(response)
        self.closed = bool(flags)

    def is_cancelled(self) -> bool:
        return self.cancelled


class InferenceRequest:
    def __init__(self, parameters: str = "", timeout_us: int = 0, **tensors: Any) -> None:
        self.sender = Sender()
        self._parameters, self._timeout_us = parameters, timeout_us
        self._inputs = [Tensor(name, array) for name, array in tensors.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self._timeout_us

    def request_id(self) -> str:
        return "client"

    def get_response_sender(self) -> Sender:
        return self.sender


class ModelConfig:
    """The object that auto_complete_config fills in."""

    def __init__(self, inputs: list[dict[str, Any]] | None = None) -> None:
        self.config: dict[str, Any] = {"input": list(inputs or []), "output": []}

    def as_dict(self) -> dict[str, Any]:
        return {key: list(value) for key, value in self.config.items() if isinstance(value, list)}

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.config["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.config["output"].append(tensor)

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.config |= policy

    def set_max_batch_size(self, size: int) -> None:
        self.config["max_batch_size"] = size


class MetricFamily:
    """Records every call; `calls` of a family are (labels, what was done, value)."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description
        self.name, self.kind = name, kind
        self.calls: list[tuple[tuple[tuple[str, str], ...], str, float]] = []
        self.buckets: list[float] | None = None

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:
        self.buckets = buckets
        return FakeMetric(self, tuple(sorted(labels.items())))


class FakeMetric:
    def __init__(self, family: MetricFamily, labels: tuple[tuple[str, str], ...]) -> None:
        self._family, self._labels = family, labels

    def increment(self, value: float) -> None:
        self._family.calls.append((self._labels, "increment", value))

    def set(self, value: float) -> None:
        self._family.calls.append((self._labels, "set", value))

    def observe(self, value: float) -> None:
        self._family.calls.append((self._labels, "observe", value))


class Logger:
    lines: ClassVar[list[tuple[str, str]]] = []

    log_error = staticmethod(lambda text: Logger.lines.append(("error", text)))
    log_warn = staticmethod(lambda text: Logger.lines.append(("warn", text)))
    log_info = staticmethod(lambda text: Logger.lines.append(("info", text)))
    log_verbose = staticmethod(lambda text: Logger.lines.append(("verbose", text)))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import triton_python_backend_utils` give this."""
    module = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.using_decoupled_model_transaction_policy = lambda config: config["decoupled"]
    for thing in (
        TritonModelException, TritonError, Tensor, InferenceResponse, MetricFamily, Logger,
    ):  # fmt: skip
        setattr(module, thing.__name__, thing)
    Logger.lines.clear()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.delitem(sys.modules, "netra_backend.adapter", raising=False)

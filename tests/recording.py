"""A Recorder for a CPU that repeats what a CUDA graph would repeat, and nothing else.

A recording is a list of operations with the very tensors and Python values that they were called with: of torch, and
of the table of kernels (or references), each as one. A replay does them again and puts the results where the first ones
lay. The recorded function is never called again, so a value that it read from Python, as from a step's sequences, is that
of the recording for ever, as it would be on a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from netra_backend.gpu.device_ops import DeviceOps
from netra_backend.gpu.graphs import Replay


@dataclasses.dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def repeat(self) -> None:
        _overwrite(self.result, self.function(*self.args, **self.kwargs))


def _overwrite(old: Any, new: Any) -> None:
    """Bring the tensors of a result to where those of an earlier one lie."""
    if isinstance(old, torch.Tensor):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, (tuple, list)):
        for mine, other in zip(old, new, strict=True):
            _overwrite(mine, other)
    elif dataclasses.is_dataclass(old):
        for field in dataclasses.fields(old):
            _overwrite(getattr(old, field.name), getattr(new, field.name))


class _Listener(TorchDispatchMode):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append(_Call(func, args, kwargs or {}, result))
        return result


class StrictRecorder:
    """`ops` is the table to build the runner with. Counts recordings and replays."""

    def __init__(self, ops: DeviceOps) -> None:
        self._calls: list[_Call] | None = None
        named = {field.name: getattr(ops, field.name) for field in dataclasses.fields(ops)}
        self.ops = DeviceOps(**{name: self._heard(op) for name, op in named.items()})
        self.num_recordings = self.num_replays = 0

    def _heard(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._calls is None:
                return op(*args, **kwargs)
            with _disable_current_modes():
                result = op(*args, **kwargs)
            self._calls.append(_Call(op, args, kwargs, result))
            return result

        return call

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """See Recorder."""
        work()
        calls = self._calls = []
        with _Listener(calls):
            output = work()
        self._calls = None
        self.num_recordings += 1

        def replay() -> torch.Tensor:
            self.num_replays += 1
            for call in calls:
                call.repeat()
            return output

        return replay

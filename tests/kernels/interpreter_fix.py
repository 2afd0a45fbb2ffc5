"""Makes triton's interpreter compute bf16 and fp8 as a GPU does, so that interpreted kernels can be judged.

The stock interpreter (3.6.0 and 3.9.0) is silently wrong there: bf16 `tl.dot` multiplies bit patterns,
float32 -> bf16 truncates, fp8 casts lose the carry of their rounding. Here bf16 and fp8 arithmetic is done
in float32 and rounded once, and every cast goes through torch (round to nearest even, saturating fp8).
Knows no kernel. `apply()` must run before a kernel module is imported; test_interpreter_fix.py proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_FP8_MAX = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_LOW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
_NP_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Handle = interpreter.TensorHandle


def _to_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    flat = np.ascontiguousarray(data).reshape(-1).view(_NP_BITS[data.dtype.itemsize]).copy()
    return torch.from_numpy(flat).view(_TORCH_DTYPES[dtype]).reshape(data.shape)


def _to_numpy(value: torch.Tensor) -> np.ndarray:
    size = value.element_size()
    bits = value.contiguous().view(_TORCH_BITS[size]).numpy()
    return bits.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])


def convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Bits of `data` (of triton dtype `source`) in dtype `target`, as unsigned integers."""
    value = _to_torch(data, source)
    if target in _FP8_MAX:  # cvt.rn.satfinite; NaN stays NaN
        value = value.float().clamp(-_FP8_MAX[target], _FP8_MAX[target])
    return _to_numpy(value.to(_TORCH_DTYPES[target])).reshape(data.shape)


def _as_float32(handle: Any) -> np.ndarray:
    dtype = handle.dtype.scalar
    return _to_torch(handle.data, dtype).float().numpy() if dtype in _LOW else handle.data


def _rounded(value: np.ndarray, dtype: Any) -> Any:
    return Handle(convert(np.asarray(value, np.float32), tl.float32, dtype), dtype)


def _fix_casts(builder: Any) -> None:
    stock_convert, stock_cast = interpreter._convert_float, builder.cast_impl

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source in _TORCH_DTYPES and target in _TORCH_DTYPES:
            return convert(data, source, target)
        return stock_convert(data, source, target, rounding)

    def cast_impl(self: Any, value: Any, target_type: Any) -> Any:
        source, target = value.dtype.scalar, target_type.scalar
        if (
            source in _TORCH_DTYPES
            and target in _TORCH_DTYPES
            and (source in _LOW or target in _LOW)
        ):
            data = convert(value.data, source, target)
            return Handle(data.view(interpreter._get_np_dtype(target)), target)
        if source in _LOW:
            value = Handle(_as_float32(value), tl.float32)
        if target in _LOW:
            return _rounded(value.data, target)
        return stock_cast(self, value, target_type)

    interpreter._convert_float = convert_float
    builder.cast_impl = cast_impl


def _fix_arithmetic(builder: Any) -> None:
    stock_binary, stock_unary = builder.binary_op, builder.unary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        with np.errstate(all="ignore"):
            if dtype not in _LOW:
                return stock_binary(self, lhs, rhs, op)
            out = op(_as_float32(lhs), _as_float32(rhs))
        return Handle(out, tl.int1) if out.dtype == np.bool_ else _rounded(out, dtype)

    def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        dtype = arg.dtype.scalar
        with np.errstate(all="ignore"):
            if dtype not in _LOW:
                return stock_unary(self, arg, op)
            return _rounded(op(_as_float32(arg)), dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        product = self.binary_op(x, y, np.multiply)
        return self.binary_op(product, z, np.add)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
        x, y = _as_float32(a), _as_float32(b)
        kind = np.float32 if x.dtype.kind == "f" else np.int32
        product = np.matmul(x.astype(kind), y.astype(kind)).astype(acc.data.dtype)
        return Handle(product + acc.data, acc.dtype.scalar)

    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.create_fma, builder.create_dot = create_fma, create_dot


def _fix_constants(builder: Any) -> None:
    def get_all_ones_value(self: Any, dtype: Any) -> Any:
        kind = interpreter._get_np_dtype(dtype)
        ones = True if kind == np.bool_ else (np.iinfo(kind).max if kind.kind == "u" else -1)
        return Handle(np.full(1, ones, dtype=kind), dtype.scalar)

    def get_bf16(self: Any, value: float) -> Any:
        return _rounded(np.array([value]), tl.bfloat16)

    builder.get_all_ones_value, builder.get_bf16 = get_all_ones_value, get_bf16
    stock_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        stock_patch(tensor, scope)
        # numpy >= 2.4 refuses int() of a one-element array; loop bounds rely on it
        tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])

    interpreter._patch_lang_tensor = patch_tensor


def _fix_speed() -> None:
    """The stock call re-patches triton.language at every device-function call (2-3x of the run time)."""
    seen: set[Any] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in seen:
            interpreter._patch_lang(self.fn)
            seen.add(self.fn)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def apply() -> None:
    """Patch the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    _fix_casts(builder)
    _fix_arithmetic(builder)
    _fix_constants(builder)
    _fix_speed()

"""Makes Triton's interpreter compute in bf16 and fp8 as a device does.

Triton 3.9 keeps bf16 and fp8 as integers of numpy and adds, compares and multiplies those; casts to
them truncate, and floats among a launch's arguments stay floats of Python. Here each operation
on such values is run in fp32, which holds them exactly, and its result is rounded to nearest even,
to the largest value where fp8 has no infinity: what a device's conversions do.

:func:`install` is for a process of its own: the interpreter is chosen when Triton is imported.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

NARROW = {
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
"""Types that numpy has not: torch's name, and what carries their bits."""
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def widened(bits: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """Return the fp32 values that the bits of a bf16 or fp8 array stand for."""
    dtype, carrier = NARROW[kind]
    signed = np.ascontiguousarray(bits, carrier).view(np.int16 if carrier is np.uint16 else carrier)
    return torch.from_numpy(signed).view(dtype).float().numpy().reshape(bits.shape)


def rounded(values: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """Return the bits of fp32 values, rounded to nearest even."""
    dtype, carrier = NARROW[kind]
    wide = torch.from_numpy(np.array(values, np.float32))
    if carrier is np.uint8:
        top = torch.finfo(dtype).max
        wide = wide.clamp(-top, top)
    signed = torch.int16 if carrier is np.uint16 else torch.uint8
    return wide.to(dtype).view(signed).numpy().view(carrier).reshape(np.shape(values))


def _wide(value: Any) -> Any:
    if isinstance(value, TensorHandle) and value.dtype.scalar in NARROW:
        return TensorHandle(widened(value.data, value.dtype.scalar), tl.float32)
    return value


def _in_fp32(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Run a builder's operation in fp32 where its floats are narrow; comparisons give truths."""

    def run(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        floats = [a.dtype.scalar for a in args if isinstance(a, TensorHandle)]
        floats = [kind for kind in floats if kind.is_floating()]
        out = method(self, *map(_wide, args))
        if any(callable(a) and a in COMPARISONS for a in args if isinstance(a, np.ufunc)):
            return TensorHandle(out.data, tl.int1)
        if floats and all(kind in NARROW for kind in floats) and out.dtype.scalar == tl.float32:
            return TensorHandle(rounded(out.data, floats[-1]), floats[-1])
        return out

    return run


def _cast(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, src: TensorHandle, to: tl.dtype, *more: Any) -> TensorHandle:
        source, aim = src.dtype.scalar, to.scalar
        if source not in NARROW and aim not in NARROW:
            return method(self, src, to, *more)
        wide = _wide(src)
        if aim not in NARROW:
            return TensorHandle(wide.data.astype(interpreter._get_np_dtype(aim)), aim)
        return TensorHandle(rounded(wide.data.astype(np.float32), aim), aim)

    return run


def _folded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Reduce or scan narrow values in fp32, each result rounded once."""

    def run(self: Any, given: Any) -> Any:
        if not any(x.dtype.scalar in NARROW for x in given):
            return apply(self, given)
        wide = tuple(self.to_tensor(_wide(x.handle).data, _wide(x.handle).dtype) for x in given)
        out = apply(self, wide)
        listed = list(out) if isinstance(out, tuple | list) else [out]
        for at, x in enumerate(given[: len(listed)]):
            if x.dtype.scalar in NARROW and listed[at].dtype.scalar == tl.float32:
                listed[at] = _narrowed(listed[at], x.dtype.scalar)
        return listed if isinstance(out, tuple | list) else listed[0]

    return run


def _narrowed(wide: tl.tensor, kind: tl.dtype) -> tl.tensor:
    block = tl.block_type(kind, wide.shape) if wide.type.is_block() else kind
    return tl.tensor(TensorHandle(rounded(wide.handle.data, kind), kind), block)


def _tf32(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return (kept & np.uint32(0xFFFFE000)).view(np.float32)


def _dot(_: Any, a: Any, b: Any, d: Any, precision: Any, __: Any) -> TensorHandle:
    """Return ``a @ b + d``, summed in fp32; fp32 operands are tf32 unless ``ieee`` is said."""
    x, y = _wide(a).data, _wide(b).data
    if a.dtype.scalar == tl.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32:
        x, y = _tf32(x), _tf32(y)
    out = np.matmul(x, y, dtype=d.data.dtype) + d.data
    return TensorHandle(out.astype(d.data.dtype), d.dtype.scalar)


def _argument(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return convert(arg)

    return run


def _once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Leave the language's modules patched: for each launch, and each call in it, is a quarter."""
    seen: set[int] = set()

    def run(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in seen:
            seen.add(id(names))
            patch(fn)
        return interpreter._LangPatchScope()

    return run


def install() -> None:
    """Mend the interpreter in this process."""
    np.seterr(all="ignore")  # Devices say nothing about infinities either.
    build = InterpreterBuilder
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_clampf"):
        setattr(build, name, _in_fp32(getattr(build, name)))
    for name in ("create_fabs", "create_erf", "create_rsqrt"):
        setattr(build, name, _in_fp32(getattr(build, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(build, name, _cast(getattr(build, name)))
    build.create_dot = _dot
    for folds in (ReduceOps, ScanOps):
        folds.apply_impl = _folded(folds.apply_impl)
    interpreter._implicit_cvt = _argument(interpreter._implicit_cvt)
    interpreter._patch_lang = _once(interpreter._patch_lang)

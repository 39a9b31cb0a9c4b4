"""What stands for Gluon in Triton's interpreter, which does not know it, as far as the walks token by token use it.

Layouts mean nothing, shared memory is an array that begins as NaN, and copies are made when somebody waits for them,
not before: whoever reads too early reads NaN or another token. `interpreted` puts this module in the place of
`kernels.gluon`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl


class SharedMemory:
    """What `gl.allocate_shared_memory` gives."""

    def __init__(self, dtype: Any, data: np.ndarray[Any, Any]) -> None:
        self.dtype, self.data, self.shape = dtype, data, data.shape

    def index(self, i: Any) -> SharedMemory:
        return SharedMemory(self.dtype, self.data[_integer(i)])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedMemory:
        first = _integer(start)
        where = [slice(None)] * self.data.ndim
        where[_integer(dim)] = slice(first, first + _integer(length))
        return SharedMemory(self.dtype, self.data[tuple(where)])

    def permute(self, order: Sequence[int]) -> SharedMemory:
        return SharedMemory(self.dtype, self.data.transpose(order))

    def reshape(self, shape: Sequence[Any]) -> SharedMemory:
        return SharedMemory(self.dtype, self.data.reshape([_integer(size) for size in shape]))

    def _reinterpret(self, dtype: Any, shape: Sequence[Any], layout: Any) -> SharedMemory:
        return self.reshape(shape)

    def store(self, value: Any) -> None:
        self.data[...] = value.handle.data

    def load(self, layout: Any) -> Any:
        from triton.runtime.interpreter import TensorHandle

        scalar = tl.core._unwrap_if_constexpr(self.dtype)
        return tl.tensor(TensorHandle(self.data.copy(), scalar), tl.block_type(scalar, list(self.shape)))


def _integer(x: Any) -> int:
    x = tl.core._unwrap_if_constexpr(x)
    return x if isinstance(x, int) else int(x.handle.data.item())


class Copies:
    """The functions of `ampere.async_copy`, in an order that is allowed and late."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def async_copy_global_to_shared(self, tile: SharedMemory, pointers: Any, mask: Any) -> None:
        def copy() -> None:
            tile.data[...] = tl.load(pointers, mask, 0.0).handle.data

        self.begun.append(copy)

    def commit_group(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait_group(self, outstanding: Any) -> None:
        done = len(self.groups) - _integer(outstanding)
        for group in self.groups[: max(done, 0)]:
            for copy in group:
                copy()
        self.groups = self.groups[max(done, 0) :]


def _allocate(dtype: Any, shape: Sequence[Any], layout: Any) -> SharedMemory:
    return SharedMemory(dtype, np.full([_integer(size) for size in shape], np.nan, _numpy(dtype)))


def _numpy(dtype: Any) -> Any:
    return {"fp32": np.float32, "fp64": np.float64}[tl.core._unwrap_if_constexpr(dtype).name]


def _no_layout(*_: Any) -> None:
    return None


jit, async_copy = triton.jit, Copies()
# Looked up when they are called: the interpreter puts its own in their places while it runs a kernel.
gl = SimpleNamespace(
    BlockedLayout=_no_layout,
    SliceLayout=_no_layout,
    SwizzledSharedLayout=_no_layout,
    NVMMADistributedLayout=_no_layout,
    DotOperandLayout=_no_layout,
    allocate_shared_memory=_allocate,
    convert_layout=lambda x, layout: x,
    zeros=lambda shape, dtype, layout: tl.zeros(shape, dtype),
    arange=lambda start, end, layout: tl.arange(start, end),
    join=lambda *arguments: tl.join(*arguments),
    load=lambda *arguments: tl.load(*arguments),
    permute=lambda *arguments: tl.permute(*arguments),
    reshape=lambda *arguments: tl.reshape(*arguments),
    store=lambda *arguments: tl.store(*arguments),
    sum=lambda *arguments: tl.sum(*arguments),
    where=lambda *arguments: tl.where(*arguments),
)


def constexpr_function(function: Any) -> Any:
    """Layouts are all that is computed by such functions."""
    return _no_layout


def mma_v2(x: Any, y: Any, total: Any, precision: Any) -> Any:
    return tl.dot(x, y, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def two_sums(a, b):  # type: ignore[no-untyped-def]
    return tl.sum(a, 1)[:, None], tl.sum(b, 1)[:, None]

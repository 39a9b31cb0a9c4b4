"""Launching a kernel with little Python: everything but its pointers is bound once.

Triton's own launcher binds and specialises some twenty arguments at each call, which takes longer than the smaller
kernels run. What a compiled kernel depends on is known here, so it is looked up by that and called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import MockTensor

# A tensor argument, or several that travel as one tuple.
Tensors = tuple[Tensor | tuple[Tensor | None, ...] | None, ...]
Dtypes = tuple[torch.dtype | tuple[torch.dtype | None, ...] | None, ...]
Made = TypeVar("Made")

# Compiled kernels by everything they depend on.
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}
# What was planned by shape; forgotten when there have been `MOST_SHAPES` of them.
_planned: dict[tuple[Any, ...], Any] = {}
MOST_SHAPES = 4096


def planned(key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """Return what was made for this key before, or make it."""
    known: Made | None = _planned.get(key)
    if known is None:
        if len(_planned) >= MOST_SHAPES:
            _planned.clear()
        _planned[key] = known = make()
    return known


class Launch:
    """One kernel on one grid, with everything bound but its tensors and the integers that change from call to call.

    Args:
        kernel: takes tensors, then `integers` numbers that it is not specialised for, then `constants`.
        dtypes: those of the tensors, in the same tuples.
        constants: strides, compile-time options: the same at every call.
    """

    __slots__ = ("constants", "device", "dtypes", "grid", "integers", "kernel", "key", "options", "ready")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        dtypes: Dtypes,
        integers: int,
        constants: tuple[Any, ...],
        warps: int,
        stages: int,
        device: torch.device,
    ) -> None:
        self.kernel, self.grid, self.dtypes, self.integers, self.constants = kernel, grid, dtypes, integers, constants
        self.options, self.device = {"num_warps": warps, "num_stages": stages}, device.index
        self.key = (id(kernel), self.device, dtypes, constants, warps, stages)
        self.ready: tuple[Any, ...] | None = None

    def __call__(self, tensors: Tensors, *integers: int) -> None:
        pointers: list[Any] = []
        bits = 0
        for x in tensors:
            if x is None:
                pointers.append(0)
            elif type(x) is tuple:
                group = [0 if y is None else y.data_ptr() for y in x]
                for pointer in group:
                    bits |= pointer
                pointers.append(tuple(group))
            else:
                pointer = x.data_ptr()  # type: ignore[union-attr]
                bits |= pointer
                pointers.append(pointer)
        # Off a 16-byte boundary another kernel has to run, which Triton's launcher finds.
        aligned = not bits & 15
        if self.ready is not None and aligned:
            run, function, metadata = self.ready
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            # No hooks: nobody who profiles gets in here, see `_bind`.
            everything = (*pointers, *integers, *self.constants)
            run(self.grid, 1, 1, stream, function, metadata, None, None, None, *everything)
            return
        compiled = _compiled.get(self.key) if aligned else None
        if compiled is not None:
            compiled[(self.grid, 1, 1)](*pointers, *integers, *self.constants)
            self._bind(compiled)
            return
        compiled = self.kernel[(self.grid,)](*tensors, *integers, *self.constants, **self.options)
        if aligned and isinstance(compiled, CompiledKernel):
            _compiled[self.key] = compiled
            self._bind(compiled)

    @property
    def known(self) -> bool:
        """Say whether the kernel was compiled in this process, for this shape or another."""
        return self.key in _compiled

    def compile(self) -> Any:
        """Have the kernel compiled and not run."""
        wrapped = [
            tuple(map(MockTensor.wrap_dtype, x)) if isinstance(x, tuple) else MockTensor.wrap_dtype(x)
            for x in self.dtypes
        ]
        return self.kernel.warmup(*wrapped, *[1] * self.integers, *self.constants, grid=(1,), **self.options)

    def _bind(self, compiled: Any) -> None:
        """Remember how to run a kernel without Triton's hooks, unless somebody hooked in."""
        from triton import knobs

        if not (getattr(knobs.runtime.launch_enter_hook, "calls", None) or self.device is None):
            self.ready = (compiled.run, compiled.function, compiled.packed_metadata)


def side_by_side(compile_all: Callable[[], Iterable[Any]]) -> None:
    """Have the kernels that are asked for compiled all at once; what fails will fail again when it is run."""
    try:
        from triton.runtime import driver
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return
    if active_mode.get() is not None:
        return

    def launcher(kernel: Any) -> None:
        """Some versions compile one in C for each kernel, and keep it on disk for whoever asks next."""
        kernel = kernel.future.result() if hasattr(kernel, "future") else kernel
        driver.active.launcher_cls(kernel.src, kernel.metadata)

    # The mode waits for its kernels at its end: what waits for them too has threads of its own.
    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(8) as waiting, AsyncCompileMode(pool, ignore_errors=True):
        for kernel in compile_all():
            waiting.submit(launcher, kernel)


def dtypes_of(tensors: Tensors) -> Dtypes:
    """Return the dtypes of tensors, in the same tuples."""
    return tuple([tuple(map(dtype_of, x)) if isinstance(x, tuple) else dtype_of(x) for x in tensors])


def dtype_of(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def kind_of(x: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return None if x is None else (x.dtype, x.stride())

"""Starting a kernel with little Python: everything but its pointers is bound once.

Triton's own launcher binds and specialises some forty arguments at each call, which takes longer than the smaller
kernels run. What a compiled kernel depends on is known here, so it is looked up by that and called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

Constants = dict[str, Any]

# Compiled kernels, and the values of their compile-time arguments, by everything they depend on.
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}
# What is kept by shape is forgotten when there have been so many shapes.
MOST_SHAPES = 4096


class Start:
    """One kernel on one grid, with everything bound but its pointers and the integers that change from call to call."""

    __slots__ = ("constants", "depends_on", "device", "found", "grid", "kernel", "pace", "strides")

    def __init__(
        self,
        kernel: Any,
        depends_on: tuple[Any, ...],
        grid: int,
        strides: tuple[int, ...],
        constants: Callable[[], Constants],
        pace: dict[str, int],
        device: torch.device,
    ) -> None:
        """`constants` are made when the kernel is compiled; `pace` are the compiler's options."""
        self.kernel, self.depends_on, self.grid, self.strides = kernel, (id(kernel), *depends_on), grid, strides
        self.constants, self.pace, self.device = constants, pace, device.index
        self.found: tuple[Any, ...] | None = None

    def __call__(self, tensors: Sequence[Tensor | None], *integers: int) -> None:
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if self.found is not None and not bits & 15:
            run, function, metadata, rest = self.found
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            # No hooks: nobody who profiles gets in here, see `_find`.
            run(self.grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *integers, *rest)
            return
        known = None if bits & 15 else _compiled.get(self.depends_on)
        if known is None:
            named = self.constants()
            count = len(tensors) + len(integers) + len(self.strides)
            values = tuple(named[name] for name in self.kernel.arg_names[count:])
            arguments = (*tensors, *integers, *self.strides, *values)
            result = self.kernel[(self.grid,)](*arguments, **self.pace)
            if not bits & 15 and isinstance(result, CompiledKernel):
                _compiled[self.depends_on] = result, values
                self._find(result, values)
            return
        compiled, values = known
        compiled[(self.grid, 1, 1)](*pointers, *integers, *self.strides, *values)
        self._find(compiled, values)

    @property
    def known(self) -> bool:
        """Whether the kernel was compiled in this process, for this shape or another."""
        return self.depends_on in _compiled

    def compile(self, kinds: Sequence[torch.dtype | None], *integers: int) -> Any:
        """The kernel for tensors of these dtypes, compiled and not run."""
        named = self.constants()
        values = (named[name] for name in self.kernel.arg_names[len(kinds) + len(integers) + len(self.strides) :])
        return self.kernel.warmup(*kinds, *integers, *self.strides, *values, grid=(1,), **self.pace)

    def _find(self, compiled: Any, values: tuple[Any, ...]) -> None:
        """Remember how to run a kernel without Triton's hooks, unless somebody hooked in."""
        from triton import knobs

        if not (getattr(knobs.runtime.launch_enter_hook, "calls", None) or self.device is None):
            self.found = (compiled.run, compiled.function, compiled.packed_metadata, (*self.strides, *values))


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


def paced(warps: int, stages: int) -> dict[str, int]:
    """The compiler's options for a launch."""
    return {"num_warps": warps, "num_stages": stages}


def kind_of(x: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return None if x is None else (x.dtype, x.stride())

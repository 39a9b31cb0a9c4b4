"""A separate process for what may take the GPU down, and where libraries tune their kernels for the sizes at hand."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

from fastweights.benchmarks.timing import in_one_line

# The time limit of a measurement in a separate process, tuning included, and compiling where that was not done ahead.
LIMIT_S = 90.0
COMPILING_LIMIT_S = 300.0
# What fla reads when it is imported: its own cache of what it tuned has neither the batch nor the length in its keys.
UNCACHED = {"FLA_CACHE_RESULTS": "0", "TILELANG_PRINT_ON_COMPILATION": "0"}


class SeparateProcess:
    """A process for what may crash the GPU's context or never end; a new one after each failure."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self.pool: ProcessPoolExecutor | None = None

    def begin(self, function: Callable[..., dict[str, Any]] = dict, *arguments: Any) -> Future[dict[str, Any]]:
        """Start a call there without waiting for it; the first one also starts the process and loads torch."""
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        return self.pool.submit(with_new_tuning, function, arguments)

    def __call__(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return what `function` returns there, or {"failure": why not}."""
        try:
            found = self.begin(function, *arguments).result(self.limit_s)
        except Exception as error:
            self.close()
            return {"failure": in_one_line(error)}
        if any(key.endswith("failure") for key in found):
            # What failed may have left the GPU's context unusable.
            self.close()
        return found

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                process.kill()
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None


def with_new_tuning(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Run in a separate process, where fla tunes itself for the sizes at hand: its cache would confuse them.

    Its keys have neither the batch nor the length of sequences. A configuration is judged by the median of 20 ms after
    5 of warming up, where Triton takes 100 after 25: that is what makes it a minute.
    """
    os.environ.update(UNCACHED)
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    if not isinstance(triton.testing.do_bench, partial):
        triton.testing.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)
    for thing in gc.get_objects():
        # Not `isinstance`, which asks objects what they are: some of them are proxies of what is gone.
        if issubclass(type(thing), Autotuner):
            thing.cache.clear()
    return function(*arguments)

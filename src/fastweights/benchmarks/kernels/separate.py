"""The separate processes of `bench kernels`, where libraries tune their kernels for the sizes at hand."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from fastweights.benchmarks.timing import in_one_line
from fastweights.common.separate import SeparateProcess

# The time limit of a measurement in a separate process, tuning included, and compiling where that was not done ahead.
LIMIT_S = 90.0
COMPILING_LIMIT_S = 300.0
# What fla reads when it is imported: its own cache of what it tuned has neither the batch nor the length in its keys.
UNCACHED = {"FLA_CACHE_RESULTS": "0", "TILELANG_PRINT_ON_COMPILATION": "0"}


class TuningProcess(SeparateProcess):
    """A process for measurements that may crash the GPU's context or never end; a new one after each failure."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        super().__init__(with_new_tuning)
        self.limit_s = limit_s

    def measure(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return what `function` returns there, or {"failure": why not}."""
        try:
            found: dict[str, Any] = self(function, *arguments, limit_s=self.limit_s)
        except Exception as error:
            found = {"failure": in_one_line(error)}
        if any(key.endswith("failure") for key in found):
            # What failed may have left the GPU's context unusable.
            self.end()
        return found


def with_new_tuning() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a call for which fla tunes itself anew: its cache would confuse sizes.

    Its keys have neither the batch nor the length of sequences. A configuration is judged by the median of 20 ms after
    5 of warming up, where Triton takes 100 after 25: that is what makes it a minute.
    """
    os.environ.update(UNCACHED)
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)

    def call(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        for thing in gc.get_objects():
            # Not `isinstance`, which asks objects what they are: some of them are proxies of what is gone.
            if issubclass(type(thing), Autotuner):
                thing.cache.clear()
        return function(*arguments)

    return call

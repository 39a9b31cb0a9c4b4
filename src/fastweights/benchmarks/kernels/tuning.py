"""Give libraries that tune their kernels processes of their own, to compile ahead and to be timed."""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fastweights.benchmarks.kernels.rivals import environment, named
from fastweights.benchmarks.kernels.rows import ROWS
from fastweights.benchmarks.timing import failure_noted, in_one_line
from fastweights.common.separate import SeparateProcess, side_by_side

# The time limit of a measurement in a separate process, tuning included, and compiling where that was not done ahead.
LIMIT_S = 90.0
COMPILING_LIMIT_S = 300.0
# The time limit of one process that compiles ahead.
AHEAD_LIMIT_S = 150.0
# What fla reads when it is imported: its own cache of what it tuned has neither the batch nor the length in its keys.
UNCACHED = {"FLA_CACHE_RESULTS": "0", "TILELANG_PRINT_ON_COMPILATION": "0"}


class TuningProcess(SeparateProcess):
    """A process for measurements that may crash the GPU's context or never end; a new one after each failure."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        super().__init__(with_new_tuning)
        self.limit_s = limit_s

    def measure(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return what `function` returns there, or {"failure": why not}."""
        found: dict[str, Any] = {}
        with failure_noted(found):
            found |= self(function, *arguments, limit_s=self.limit_s)
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


class Job(NamedTuple):
    """A share of the compiling for one rival at one row: the `part`-th of `parts`."""

    row: str
    dtype: str
    rival: str
    part: int
    parts: int


def compile_share(part: int, parts: int) -> None:
    """Let Triton's autotuner in this process run every `parts`-th configuration once, and time none."""
    from triton.runtime.autotuner import Autotuner

    judge = Autotuner._bench

    def once(call: Callable[[], object], quantiles: object = None) -> list[float]:
        call()
        return [0.0] * 3

    def run_or_pass(self: Any, *arguments: Any, config: Any, **meta: Any) -> Any:
        if self.configs.index(config) % parts != part:
            return [float("inf")] * 3
        self.__dict__["do_bench"] = once
        return judge(self, *arguments, config=config, **meta)

    Autotuner._bench = run_or_pass


def compile_ahead(
    jobs: Sequence[Job], processes: int, limit_s: float = AHEAD_LIMIT_S
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs side by side, each in a process of its own, and yield seconds of calls or why a job failed.

    What they compile stays in the caches on the disk. Nothing must be timed meanwhile.
    """
    workers = [SeparateProcess(_uncached, start_s=limit_s) for _ in range(min(processes, len(jobs)))]
    for job, found in side_by_side(workers, jobs, limit_s, can_continue=lambda found: False):
        yield job, {"failure": in_one_line(found)} if isinstance(found, Exception) else found


def summary(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what compiling for one rival at one row took: in all processes together, and in the longest."""
    results = list(results)
    seconds = [result["seconds"] for result in results if "seconds" in result]
    row = {"processes": len(results), "together_s": sum(seconds), "longest_s": max(seconds, default=0.0)}
    failures = {result["failure"] for result in results if "failure" in result}
    return row | ({"failure": "; ".join(sorted(failures))} if failures else {})


def _uncached() -> Callable[[Job], dict[str, Any]]:
    """Return `_compile`, in a process where libraries keep nothing of what they tune."""
    os.environ.update(UNCACHED)
    return _compile


def _compile(job: Job) -> dict[str, Any]:
    """Do a job in this process: call forward and backward, and forward alone, so that all of it gets compiled."""
    row = ROWS[job.row]
    rival = named(row, job.dtype, job.rival)
    leaves = rival.leaves(row, job.dtype)

    def both() -> None:
        y = rival.function(*leaves)
        torch.autograd.grad(y, leaves, torch.randn_like(y))

    def forward() -> None:
        with torch.no_grad():
            rival.function(*leaves)

    compile_share(job.part, job.parts)
    result: dict[str, Any] = {}
    with environment(rival.environment):
        start = time.perf_counter()
        # What is no choice of the autotuner's is compiled by every process: half of them begin with the other call.
        for step in (both, forward) if job.part % 2 == 0 else (forward, both):
            try:
                step()
                torch.cuda.synchronize()
            except Exception as error:
                result["failure"] = in_one_line(error)
    return result | {"seconds": time.perf_counter() - start}

"""Medians of times, on the GPU's clock or the host's, and what a benchmark writes down where something fails."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.common.cuda_graph import capture_after_warmup

Forward = Callable[[], Tensor]


def measure(forward: Forward, leaves: Sequence[Tensor], budget_ms: float) -> dict[str, Any]:
    """Return the median ms of forward and forward + backward, eager and as a graph, and bytes beside the inputs.

    `first_call_s` is the time of the first call in this process, with whatever was compiled before; `first_call.py`
    starts with empty caches. Where there is no backward pass, `both_failure` says so.
    """
    start = time.perf_counter()
    dy = torch.randn_like(forward().detach())

    def both() -> None:
        torch.autograd.grad(forward(), leaves, dy)

    def inference() -> None:
        with torch.no_grad():
            forward()

    result: dict[str, Any] = {}
    steps: dict[str, Callable[[], object]] = {"forward": inference}
    with failure_noted(result, "both_failure"):
        both()
        torch.cuda.synchronize()
        result["first_call_s"] = time.perf_counter() - start
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        torch.cuda.synchronize()
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        steps["both"] = both
    return result | eager_and_graph(steps, budget_ms)


def eager_and_graph(steps: dict[str, Callable[[], object]], budget_ms: float) -> dict[str, Any]:
    """Return the median ms of each step as `name_eager_ms` and `name_graph_ms`, or why it cannot be captured."""
    result: dict[str, Any] = {}
    for name, step in steps.items():
        result[f"{name}_eager_ms"] = median_ms(step, budget_ms)
        with failure_noted(result, f"{name}_graph_failure"):
            result[f"{name}_graph_ms"] = median_ms(capture_after_warmup(step, torch.device("cuda")), budget_ms)
    return result


def median_ms(step: Callable[[], object], budget_ms: float) -> float:
    """Return the median time of one step on the GPU's clock."""
    step()
    once = min(_timed_each(step, 2))
    for share in (0.5, 1.0):
        # An idle host and its clocks take some milliseconds to wake up: the first round is for that, and to find out
        # how many calls fit into the budget.
        once = statistics.median(_timed_each(step, max(5, min(200, int(share * budget_ms / max(once, 1e-3))))))
    return once


def _timed_each(step: Callable[[], object], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def kernel_times(step: Callable[[], object], count: int = 5, most: int = 40) -> list[dict[str, Any]]:
    """Return ms and calls of each kernel in one step, those that take the most time first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    # Calls of the driver are events too, of no time on the device.
    kernels = [
        {"name": event.key[:120], "ms": event.self_device_time_total / count / 1e3, "calls": event.count / count}
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])[:most]


def bandwidth() -> float:
    """Measure the bytes per second of a large copy, reads and writes counted."""
    x = torch.empty(2**29, dtype=torch.int16, device="cuda")
    y = torch.empty_like(x)
    return 2e3 * x.nbytes / median_ms(lambda: y.copy_(x), 50)


def median_seconds(function: Callable[[], object], repeats: int, device: str = "cpu") -> float:
    """Return the median of `seconds`, after one call to warm up."""
    return statistics.median([seconds(function, torch.device(device)) for _ in range(repeats + 1)][1:])


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call on the host's clock, until the device is done."""
    _wait(device)
    start = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attempt(function: Callable[..., dict[str, Any]], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return what the function returns, or {"failure": why not}, and give its memory back to the device."""
    result: dict[str, Any] = {}
    with failure_noted(result):
        result |= function(*arguments, **options)
    torch.cuda.empty_cache()
    return result


@contextmanager
def failure_noted(row: dict[str, Any], key: str = "failure") -> Iterator[None]:
    """Record an exception as an entry of `row`, so that the other measurements can still be made."""
    try:
        yield
    except Exception as error:
        row[key] = in_one_line(error)


def in_one_line(error: Exception) -> str:
    """Return the kind of an error and the beginning of its message."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split())[:400])))

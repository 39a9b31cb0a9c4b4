"""Times on the GPU's clock, eager and as CUDA graphs, and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[], Tensor]


def measure(make: Callable[[], tuple[Forward, Any]], budget_ms: float) -> dict[str, Any]:
    """Median ms of forward and forward + backward, eager and as a graph; bytes beside the inputs.

    `first_call_s` is the first here, with whatever was compiled before; `first_call.py` starts from nothing.
    """
    forward, leaves = make()
    start = time.perf_counter()
    dy = torch.randn_like(forward().detach())

    def both() -> None:
        torch.autograd.grad(forward(), leaves, dy)

    def inference() -> None:
        with torch.no_grad():
            forward()

    both()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return result | eager_and_graph({"forward": inference, "both": both}, budget_ms)


def eager_and_graph(steps: dict[str, Callable[[], object]], budget_ms: float) -> dict[str, Any]:
    """Median ms of each step, `name_eager_ms` and `name_graph_ms`; what cannot be captured is recorded as such."""
    result: dict[str, Any] = {}
    for name, step in steps.items():
        result[f"{name}_eager_ms"] = median_ms(step, budget_ms)
        try:
            result[f"{name}_graph_ms"] = median_ms(captured(step).replay, budget_ms)
        except Exception as error:
            result[f"{name}_graph_failure"] = short(error)
    return result


def median_ms(step: Callable[[], object], budget_ms: float) -> float:
    """Median time of one step on the GPU's clock."""
    step()
    once = min(_timed_each(step, 2))
    for share in (0.5, 1.0):
        # The threads of a host that was idle take some milliseconds to wake up, and so do its clocks: the first go is
        # for that, and for how many calls fit.
        found = _timed_each(step, max(5, min(200, int(share * budget_ms / max(once, 1e-3)))))
        once = statistics.median(found)
    return once


def _timed_each(step: Callable[[], object], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph, after three runs on a stream of its own, where autograd's nodes then belong."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph


def kernel_times(step: Callable[[], object], count: int = 5, most: int = 40) -> list[dict[str, Any]]:
    """Where a step's time goes: ms and calls of each kernel in one step, those that take the most first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    # Calls of the driver are events too, of no time on the device.
    found = [
        {"name": event.key[:120], "ms": event.self_device_time_total / count / 1e3, "calls": event.count / count}
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel["ms"])[:most]


def bandwidth() -> float:
    """Bytes per second of a large copy, reads and writes counted."""
    x = torch.empty(2**29, dtype=torch.int16, device="cuda")
    y = torch.empty_like(x)
    return 2e3 * x.nbytes / median_ms(lambda: y.copy_(x), 50)


def short(error: Exception) -> str:
    """One line of it."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else type(error).__name__

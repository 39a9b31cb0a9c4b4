"""CUDA graphs: kernels that are captured once and from then on launched together, on the same memory."""

from collections.abc import Callable
from typing import Any

import torch


def capture(work: Callable[[], Any], pool: Any = None, stream: torch.cuda.Stream | None = None) -> Callable[[], Any]:
    """Capture `work`; the function that comes back replays it, and returns what it returned, in the same memory."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = work()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"this cannot be captured as a CUDA graph: {reason}; leave graph out") from error

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def capture_after_warmup(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Capture `work`, which changes nothing but its results, after two runs of it on a stream of its own."""
    # What autocast keeps from one call to the next is not the graph's, and would be gone when it is replayed.
    precision = torch.autocast(
        "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
    )
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    with precision, torch.cuda.stream(side):
        # Kernels are compiled and checked, and libraries prepare themselves, before anything is captured.
        for _ in range(2):
            work()
        replay = capture(work, stream=side)
    here.wait_stream(side)
    return replay

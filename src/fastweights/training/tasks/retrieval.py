"""Training of many retrieval cells: one by one or in worker processes on the CPU, side by side on a GPU.

A cell computes the same numbers whichever way it runs on a CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

import torch

from fastweights.common.processes import in_processes
from fastweights.training.tasks.retrieval_cell import OnProgress, RetrievalConfig, RetrievalResult, train_cell
from fastweights.training.tasks.retrieval_cuda import train_cuda


def train(
    configs: Sequence[RetrievalConfig],
    *,
    device: str = "cpu",
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[RetrievalConfig, RetrievalResult]]:
    """Train every cell, and yield each result as soon as it is ready, in any order.

    Args:
        configs: the cells; order them by falling cost and the last of them will not keep the others waiting.
        device: "cpu" or a CUDA device.
        jobs: cells at a time: on the CPU in as many worker processes of one thread each, on a GPU in this process, each
            on its own stream.
        on_progress: told of every evaluation: config, step and loss.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs!r}")
    if torch.device(device).type == "cuda":
        yield from train_cuda(configs, device, jobs, on_progress)
        return

    def report(number: int, config: RetrievalConfig, step: int, loss: float) -> None:
        if on_progress is not None:
            on_progress(config, step, loss)

    with closing(in_processes(train_cell, configs, max(1, min(jobs, len(configs))), report)) as results:
        for number, result in results:
            yield configs[number], result

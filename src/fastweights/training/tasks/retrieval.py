"""Training of many retrieval cells: one by one or in worker processes on the CPU, side by side on a GPU.

A cell computes the same numbers whichever way it runs on a CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fastweights.training.tasks.retrieval_cell import OnProgress, RetrievalConfig, RetrievalResult, train_cell
from fastweights.training.tasks.retrieval_cuda import train_cuda

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


def train(
    configs: Sequence[RetrievalConfig],
    *,
    device: str = "cpu",
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[RetrievalConfig, RetrievalResult]]:
    """Train every cell, and yield each result as soon as it is there, in any order.

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
    elif jobs == 1 or len(configs) < 2:
        for config in configs:
            yield config, train_cell(config, on_progress)
    else:
        yield from _train_in_processes(configs, min(jobs, len(configs)), on_progress)


def _train_in_processes(
    configs: Sequence[RetrievalConfig], jobs: int, on_progress: OnProgress | None
) -> Iterator[tuple[RetrievalConfig, RetrievalResult]]:
    """Train on the CPU with `jobs` processes, none of which outlives this iterator."""
    # A fork would inherit PyTorch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    tasks: Queue[Any] = context.Queue()
    reports: Queue[Any] = context.Queue()
    for task in [*enumerate(configs), *[None] * jobs]:
        tasks.put(task)
    # Daemons, so that an interpreter that exits without closing the iterator ends them too.
    workers = [context.Process(target=_work, args=(tasks, reports, os.getpid()), daemon=True) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.start()
        left = len(configs)
        while left:
            index, report = _next(reports, workers)
            if isinstance(report, BaseException):
                raise report
            if isinstance(report, RetrievalResult):
                left -= 1
                yield configs[index], report
            elif on_progress is not None:
                on_progress(configs[index], *report)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()
        for each in (tasks, reports):
            each.cancel_join_thread()
            each.close()


def _next(reports: Queue[Any], workers: list[Any]) -> tuple[int, Any]:
    while True:
        try:
            return reports.get(timeout=1)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode]
            if dead:
                raise RuntimeError(f"a worker process ended with exit code {dead[0]}; was it out of memory?") from None


def _work(tasks: Queue[Any], reports: Queue[Any], parent: int) -> None:
    index = -1

    def progress(config: RetrievalConfig, step: int, loss: float) -> None:
        # A parent that was killed cannot end its workers.
        if os.getppid() != parent:
            os._exit(1)
        reports.put((index, (step, loss)))

    try:
        while (task := tasks.get()) is not None:
            index, config = task
            reports.put((index, train_cell(config, progress)))
    except KeyboardInterrupt:
        return
    except Exception as error:
        reports.put((index, error))

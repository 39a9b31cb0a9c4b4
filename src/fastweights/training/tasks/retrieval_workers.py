"""Cells in worker processes, one thread each; none outlives the iterator that started it."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastweights.training.tasks.retrieval import OnProgress, RetrievalConfig, RetrievalResult, train_cell

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


def train_in_processes(
    configs: Sequence[RetrievalConfig], jobs: int, on_progress: OnProgress | None
) -> Iterator[tuple[RetrievalConfig, RetrievalResult]]:
    """`train` on the CPU with `jobs` processes."""
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

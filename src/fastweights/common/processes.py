"""Work in several processes at a time, which end with the iterator that started them at the latest."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

import torch

from fastweights.common import provenance

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[..., None]
_PATIENCE_S = 60.0


def in_processes(
    work: Callable[[Task, Report], Result],
    tasks: Iterable[Task],
    jobs: int,
    on_report: Callable[..., None] = lambda number, *content: None,
) -> Generator[tuple[int, Result], None, None]:
    """Yield the number of each task and its result as soon as it is ready, in any order.

    Args:
        work: takes a task and a function that reports on it; a function of a module, or a `partial` of one.
        tasks: each is taken when a process is free for it.
        jobs: processes, each with its share of the cores, or 1 for work in this process. With the first error, all are
            asked to stop.
        on_report: told the number of a task and what its work reports.
    """
    if jobs == 1:
        for number, task in enumerate(tasks):
            yield number, work(task, partial(on_report, number))
        return
    # A fork would inherit PyTorch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    threads = max(1, provenance.cores() // jobs)
    waiting = enumerate(tasks)
    working: dict[Connection[Any, Any], int] = {}
    workers: list[tuple[Any, Connection[Any, Any]]] = []

    def begin(ours: Connection[Any, Any]) -> None:
        working.pop(ours, None)
        for number, task in waiting:
            working[ours] = number
            ours.send(task)
            return

    try:
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            # Daemons, so that an interpreter that exits without closing the iterator ends them too.
            worker = context.Process(target=_serve, args=(theirs, work, threads), daemon=True)
            worker.start()
            theirs.close()
            workers.append((worker, ours))
            begin(ours)
        while working:
            for ready in wait(list(working)):
                ours = cast("Connection[Any, Any]", ready)
                try:
                    what, *content = ours.recv()
                except EOFError:
                    raise RuntimeError("a worker process has died; was it out of memory?") from None
                if what == "failed":
                    raise content[0]
                number = working[ours]
                if what == "report":
                    on_report(number, *content)
                    continue
                begin(ours)
                yield number, content[0]
    finally:
        for worker, _ in workers:
            # Work that is asked to stop may save first.
            worker.terminate()
        for worker, ours in workers:
            worker.join(_PATIENCE_S)
            worker.kill()
            worker.join()
            ours.close()


def _serve(pipe: Connection[Any, Any], work: Callable[[Any, Report], Any], threads: int) -> None:
    # Ctrl-C is for the process that started this one, which then asks it to stop, once.
    if hasattr(os, "setsid"):
        os.setsid()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def report(*content: Any) -> None:
        pipe.send(("report", *content))

    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", work(task, report)))
        except Exception as error:
            # The other process may have stopped reading, and some errors cannot be pickled.
            with suppress(OSError):
                try:
                    pipe.send(("failed", error))
                except (TypeError, AttributeError):
                    pipe.send(("failed", RuntimeError(traceback.format_exc())))
            # The first error ends all work: there will be no next task to wait for.
            return

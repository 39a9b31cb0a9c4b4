"""Judge cases in other processes, so that one that crashes, hangs or ruins the GPU's context ends nothing else."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from fastweights.conformance.adapters import adapt, load
from fastweights.conformance.cases import CASES, Case
from fastweights.conformance.judge import ERROR, Bench, Row
from fastweights.conformance.problem import Recurrence

# For a process to import what it needs.
START_S = 300.0


class Job(NamedTuple):
    """What is judged, and by which inputs; see `adapt` and `Bench`."""

    target: str
    convention: str
    options: dict[str, Any]
    recurrence: Recurrence
    dtype: torch.dtype
    device: str
    seed: int
    head_size: int
    configurations: int | None = None


class _Worker:
    """A process, and the case that it is at."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, end = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(job, end), daemon=True)
        self.process.start()
        end.close()
        self.case: Case | None = None
        self.ready, self.deadline = False, time.monotonic() + START_S

    def begin(self, case: Case, limit_s: float) -> None:
        """Send a case to a process that is ready."""
        self.case, self.deadline = case, time.monotonic() + limit_s
        # If it ended just now, that shows when the answer is read.
        with suppress(OSError):
            self.connection.send(CASES.index(case))

    def end(self) -> str:
        """End it; say how it ended by itself, if it did."""
        self.connection.close()
        self.process.join(1)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def judge_apart(job: Job, cases: Sequence[Case], processes: int, limit_s: float) -> Iterator[Row]:
    """Yield the verdict on each case as it is found, by that many processes; none may take longer than the limit.

    Cases that need other kernels than those before them come first, so that processes do not compile the same at once.
    """
    waiting, workers = _spread(cases), list[_Worker]()
    try:
        while waiting or workers:
            while waiting and len(workers) < min(processes, len(waiting) + sum(w.case is not None for w in workers)):
                workers.append(_Worker(job))
            late = min(worker.deadline for worker in workers) - time.monotonic()
            ready = wait([worker.connection for worker in workers], max(0.0, min(late, 1.0)))
            for worker in list(workers):
                row, alive = _heard(worker, worker.connection in ready, limit_s)
                if not alive:
                    workers.remove(worker)
                    if not worker.ready:
                        raise RuntimeError(f"a process for the cases could not start: {row.note if row else ''}")
                elif worker.ready and worker.case is None:
                    if waiting:
                        worker.begin(waiting.pop(0), limit_s)
                    else:
                        workers.remove(worker)
                        worker.end()
                if row is not None and worker.ready:
                    yield row
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _heard(worker: _Worker, speaks: bool, limit_s: float) -> tuple[Row | None, bool]:
    """Return the verdict that a worker has come to, if any, and whether it can go on."""
    name = "" if worker.case is None else worker.case.name
    if not speaks:
        if time.monotonic() < worker.deadline:
            return None, True
        worker.process.kill()
        worker.end()
        return Row(name, ERROR, note=f"no answer in {limit_s:.0f} s"), False
    try:
        row, sane = worker.connection.recv()
    except (EOFError, OSError):
        return Row(name, ERROR, note=f"the process ended with {worker.end()}"), False
    worker.case, worker.ready = None, True
    if not sane:
        worker.end()
    return row, sane


def _spread(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with the first of each kind first, then the second of each kind, and so on."""
    seen, ranks = Counter[Any](), dict[str, int]()
    for case in cases:
        at = case.setting
        kind = (at.H, at.HV, at.K, at.V, at.state, at.lengths is None, case.wants_state, bool(case.gradients))
        ranks[case.name] = seen[kind]
        seen[kind] += 1
    return sorted(cases, key=lambda case: ranks[case.name])


def _work(job: Job, connection: Connection) -> None:
    """Judge the cases whose numbers come in, until there are no more or the GPU's context is gone."""
    sys.path.insert(0, "")
    if job.configurations is not None:
        tune_over(job.configurations)
    function = adapt(load(job.target), job.convention, job.recurrence, job.options)
    bench = Bench(job.recurrence, job.dtype, job.device, job.seed, job.head_size)
    connection.send((None, True))
    sane = True
    while sane:
        try:
            case = CASES[connection.recv()]
        except (EOFError, OSError):
            break
        try:
            (row,) = bench.judge(function, [case])
        except Exception as failure:
            # What a kernel did to the GPU's context may show only later, in what is ours.
            row = Row(case.name, ERROR, note=f"{type(failure).__name__}: {str(failure).splitlines()[0][:160]}")
        sane = _sane(job.device)
        connection.send((row, sane))
    connection.close()
    # Destructors of a context that is gone may hang.
    os._exit(0)


def _sane(device: str) -> bool:
    """Return whether the device still computes."""
    try:
        return bool((torch.ones(1, device=device) + 1).item() == 2)
    except RuntimeError:
        return False


def tune_over(configurations: int) -> None:
    """Let Triton's autotuner in this process choose among this many configurations of a kernel, evenly spaced."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs
    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)

    def some(self: Any, *arguments: Any) -> Any:
        configs = every(self, *arguments)
        return configs[:: -(-len(configs) // configurations)]

    Autotuner.prune_configs = some

"""`fastweights bench memory`: the gated delta rule on the CPU, beside what else computes it and the machine's own rate.

The rivals of a shape take turns, so that a busy moment of the machine is everybody's. Before each turn, the threads of
the one before get time to fall asleep: those of onnxruntime spin for a while and would slow down the next. Memory that
a call frees stays with the process, as in training: otherwise new pages for large outputs disturb what is measured,
except for onnxruntime, which keeps memory of its own.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fastweights.benchmarks.memory_rivals import RIVALS, SEED, Shape, steps
from fastweights.benchmarks.record import Out, Record, Repeats
from fastweights.benchmarks.timing import failure_noted, seconds
from fastweights.commands.options import AsJson
from fastweights.common.allocator import keep_freed_memory

SHAPES: list[Shape] = [(8, 256, 8, 16), (4, 512, 8, 32), (4, 1024, 8, 64), (1, 8192, 8, 64), (1, 2048, 16, 128)]
# The sides of the square matrices whose product gives the machine's rate: the best of them counts.
GEMM_SIDES = (512, 1024, 2048)
# How long a turn is, in which a short call is repeated, and after how much time a slow one gets no further turn.
TURN_S, ENOUGH_S = 0.1, 2.0
# Until the threads of a rival are asleep: without this wait, ours take up to 1.3 times as long after onnxruntime.
SLEEPY_S = 0.2


def own_flops(shape: Shape, backward: bool) -> int:
    """Count the operations of the recurrence as it is written, step by step; with gradients, three times as many."""
    B, T, H, D = shape
    return 6 * B * T * H * D * D * (3 if backward else 1)


def gemm_rates(repeats: int) -> dict[str, float]:
    """Measure the operations per second of products of large matrices, by type."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        best = 0.0
        for side in GEMM_SIDES:
            x = torch.rand(side, side).to(dtype)
            medians = (statistics.median(_turn(partial(torch.matmul, x, x))) for _ in range(repeats))
            best = max(best, 2 * side**3 / statistics.median(medians))
        rates[str(dtype).removeprefix("torch.")] = best
    return rates


def peak_bytes(step: Callable[[], object]) -> int | None:
    """Return the most memory that a call needs on top of what there is; None where the system does not say."""
    if sys.platform != "linux":
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure(shape: Shape, repeats: int, threads: int) -> list[dict[str, Any]]:
    """Return a row for each rival: seconds of forward and of forward + backward, and bytes on top of the inputs."""
    rows: list[dict[str, Any]] = []
    timed: list[tuple[dict[str, Any], str, Callable[[], object], list[float]]] = []
    for name, rival in RIVALS.items():
        if shape[1] > rival.longest:
            continue
        row: dict[str, Any] = {"rival": name, "shape": list(shape)}
        if missing := rival.missing():
            row["failure"] = f"not installed: {', '.join(missing)}"
        else:
            with failure_noted(row):
                for what, step in steps(rival, shape, threads).items():
                    row["peak_bytes"] = peak_bytes(step)
                    timed.append((row, what, step, []))
        rows.append(row)
    for _ in range(repeats):
        for _, _, step, medians in timed:
            if sum(medians) < ENOUGH_S:
                medians.append(statistics.median(_turn(step)))
    for row, what, _, medians in timed:
        row[what] = statistics.median(medians)
    return rows


def _turn(step: Callable[[], object]) -> list[float]:
    """Return the seconds of each call in one turn, without the first where there are several: it has cold caches."""
    time.sleep(SLEEPY_S)
    times: list[float] = []
    until = time.perf_counter() + TURN_S
    while not times or time.perf_counter() < until:
        times.append(seconds(step, torch.device("cpu")))
    return times[1:] or times


def run(out: Out = None, repeats: Repeats = 3, as_json: AsJson = False) -> None:
    """Compare the memory on the CPU with other libraries, in time and peak memory, and with the machine's own rate."""
    record, threads = Record("memory", "cpu", SEED, out, as_json), torch.get_num_threads()
    keep_freed_memory()
    rates = gemm_rates(repeats)
    record.add({"rival": "gemm", "flops_per_s": rates})
    for shape in SHAPES:
        record.console.print(f"measuring B, T, H, D = {shape}", style="dim")
        rows = measure(shape, repeats, threads)
        ours = rows[0]
        for row in rows:
            for what in ("forward", "forward_backward"):
                if what in row and what in ours:
                    row[f"{what}_over_cpu"] = row[what] / ours[what]
                    row[f"{what}_share_of_gemm"] = own_flops(shape, what != "forward") / row[what] / rates["float32"]
        record.add(*rows)
    columns = ("B, T, H, D", "", "forward ms", "over cpu", "both ms", "over cpu", "of GEMM", "MiB")
    table = Table(*columns, title=f"gated delta rule, {threads} threads; both: forward + backward")
    for row in record.rows:
        if "forward" in row:
            table.add_row(
                str(tuple(row["shape"])),
                row["rival"],
                *(text for what in ("forward", "forward_backward") for text in _cells(row, what)),
                _percent(row.get("forward_backward_share_of_gemm")),
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
            )
    failures = sorted({f"{row['rival']}: {row['failure']}" for row in record.rows if "failure" in row})
    billions = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in rates.items())
    record.finish(table, f"GEMM, billions of operations per second: {billions}", *failures)


def _cells(row: dict[str, Any], what: str) -> tuple[str, str]:
    if what not in row:
        return "", ""
    return f"{1e3 * row[what]:.2f}", f"{row[f'{what}_over_cpu']:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"

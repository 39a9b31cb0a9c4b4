"""`fastweights bench memory`: the chunked backend, the reference loop and the quadratic form, on the CPU.

Each measurement runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import fastweights as fw
from fastweights.benchmarks.kernels.rivals import delta_rule
from fastweights.benchmarks.record import Out, Record, Repeats
from fastweights.benchmarks.timing import median_seconds
from fastweights.commands.options import AsJson

Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

SHAPES = [(8, 256, 8, 16), (4, 1024, 8, 64), (1, 8192, 8, 64)]  # B, T, H, D = M
GROWTH = [(1, T, 8, 64) for T in (1024, 2048, 4096, 8192)]
SEED = 0


def quadratic(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Compute the delta rule over the whole sequence at once: one triangular system of T x T for each head."""
    q, k, v, beta = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), beta.transpose(1, 2).unsqueeze(-1)
    system = (beta * (k @ k.mT)).tril(-1)
    u = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
    y: Tensor = (q @ k.mT).tril() @ u
    return y.transpose(1, 2)


RIVALS: dict[str, Run] = {
    **{name: partial(delta_rule, name) for name in ("cpu", "chunked", "reference")},
    "quadratic": quadratic,
}


def peak_bytes() -> int:
    """Return the most memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def measure(rival: str, shape: tuple[int, int, int, int], repeats: int, threads: int) -> dict[str, Any]:
    """Return the median seconds of forward and of forward + backward, and the bytes on top of the inputs."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    B, T, H, D = shape
    q, k, v = (torch.rand(B, T, H, D) for _ in range(3))
    inputs = [fw.sum_normalize(q), fw.sum_normalize(k), v - 0.5, torch.rand(B, T, H)]
    run = RIVALS[rival]

    def forward() -> None:
        with torch.no_grad():
            run(*inputs)

    def both() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.autograd.grad(run(*leaves).sum(), leaves)

    before = peak_bytes()
    steps = {"forward": forward, "forward_backward": both}
    seconds = {name: median_seconds(step, repeats) for name, step in steps.items()}
    return {"rival": rival, "shape": list(shape), **seconds, "peak_bytes": peak_bytes() - before}


def run(out: Out = None, repeats: Repeats = 5, as_json: AsJson = False) -> None:
    """Compare the backends with each other and with the quadratic form on the CPU: time and peak memory."""
    record, threads = Record("memory", "cpu", SEED, out, as_json), torch.get_num_threads()
    cases = [(rival, shape) for shape in SHAPES for rival in RIVALS] + [("chunked", shape) for shape in GROWTH]
    for rival, shape in cases:
        record.console.print(f"measuring {rival} at B, T, H, D = {shape}", style="dim")
        # The slow ones are slow enough to be timed well by fewer runs.
        few = repeats if rival == "chunked" else min(repeats, 2)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            record.add(pool.submit(measure, rival, shape, few, threads).result())
    columns = ("B, T, H, D", "", "forward ms", "fwd + bwd ms", "peak MiB", "fwd + bwd over chunked")
    table = Table(*columns, title="delta rule, float32")
    ours = {tuple(row["shape"]): row["forward_backward"] for row in record.rows if row["rival"] == "chunked"}
    for row in record.rows:
        row["ratio_to_chunked"] = row["forward_backward"] / ours[tuple(row["shape"])]
        table.add_row(
            str(tuple(row["shape"])),
            row["rival"],
            f"{1e3 * row['forward']:.1f}",
            f"{1e3 * row['forward_backward']:.1f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['ratio_to_chunked']:.1f}",
        )
    record.finish(table)

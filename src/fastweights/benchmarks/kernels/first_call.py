"""How long the first call of a shape takes where nothing was compiled or checked before.

Each number is from a process of its own, with caches of its own that start empty. They get ready side by side (torch,
the GPU's context, inputs) and then make their call one after the other, as compiling takes every core it can get.
One more process before them compiles the Python modules to bytecode, which pip does when it installs a package.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastweights.benchmarks.kernels.rivals import environment
from fastweights.benchmarks.kernels.rows import DTYPES, ROWS, inputs_of, memory
from fastweights.benchmarks.timing import failure_noted
from fastweights.common.separate import SeparateProcess
from fastweights.ops.gpu.self_check import ENVIRONMENT

LIMIT_S = 60.0
# For the process that makes the bytecode, which imports everything without it.
SLOW_LIMIT_S = 180.0
# What each way adds to the environment. A third one, "from disk", is "checked" again with the caches it left.
WAYS: dict[str, dict[str, str]] = {"checked": {}, "unchecked": {ENVIRONMENT: "0"}}


def first_calls(names: Sequence[str], dtype: str) -> Iterator[dict[str, Any]]:
    """Time a forward and backward pass of each row: with the self-check, again from its caches, and without it."""
    rows: dict[str, dict[str, Any]] = {name: {"part": "first call", "name": name, "dtype": dtype} for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bytecode = f"{folder}/bytecode"
        made = _call(_started(names[0], dtype, f"{folder}/before", bytecode, {}), SLOW_LIMIT_S)
        waiting = [
            (name, way, _started(name, dtype, f"{folder}/{index}-{cache}", bytecode, WAYS.get(way, {})))
            for index, name in enumerate(names)
            for way, cache in (("checked", "checked"), ("from disk", "checked"), ("unchecked", "unchecked"))
        ]
        try:
            for name, way, process in waiting:
                rows[name][way] = {"without bytecode": made["failure"]} if "failure" in made else {}
                with failure_noted(rows[name][way]):
                    process.wait_until_ready()
            for name, way, process in waiting:
                if "failure" not in rows[name][way]:
                    rows[name][way] |= _call(process, LIMIT_S)
        finally:
            for _, _, process in waiting:
                process.end()
    yield from rows.values()


def _started(name: str, dtype: str, cache: str, bytecode: str, more: dict[str, str]) -> SeparateProcess:
    """Start a process with caches of its own."""
    caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": f"{cache}/home"}
    process = SeparateProcess(_prepared, name, dtype, start_s=SLOW_LIMIT_S)
    with environment({**caches, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": "", **more}):
        process.start()
    return process


def _call(process: SeparateProcess, limit_s: float) -> dict[str, Any]:
    """Let a process make its calls, and return what it measured, or why not."""
    found: dict[str, Any] = {}
    with failure_noted(found):
        found |= process(limit_s=limit_s)
    process.end()
    return found


def _prepared(name: str, dtype: str) -> Callable[[], dict[str, float]]:
    """Return a function that times the first call and the second."""
    row = ROWS[name]
    leaves = inputs_of(row, DTYPES[dtype])
    dy = torch.randn_like(leaves[2])
    torch.cuda.synchronize()

    def call() -> float:
        start = time.perf_counter()
        # Of a number, as in training: the gradient of a tensor imports PyTorch's symbolic shapes first.
        torch.autograd.grad((memory(row, "triton")(*leaves) * dy).sum(), leaves)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return lambda: {"first_s": call(), "second_s": call()}

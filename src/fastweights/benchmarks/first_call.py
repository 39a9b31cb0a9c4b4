"""How long the first call of a shape takes where nothing was compiled or checked before.

Each number is from a process of its own, with caches of its own that start empty. They get ready side by side (torch,
the GPU's context, inputs) and then make their call one after the other: compiling takes every core it can get.
Python modules come as bytecode, as they do where packages were installed by pip: one more process makes it before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastweights.benchmarks.gpu_timing import short
from fastweights.benchmarks.kernel_rivals import DTYPES, Shape, inputs, memory
from fastweights.ops.self_check import ENVIRONMENT

LIMIT_S = 60.0
# Of the process that makes the bytecode, which imports everything without it.
SLOW_LIMIT_S = 180.0
# What a way does to the environment; and one more, `from disk`, is `checked` once again with what that left.
WAYS: dict[str, dict[str, str]] = {"checked": {}, "unchecked": {ENVIRONMENT: "0"}}


def first_calls(shapes: dict[str, Shape], dtype: str) -> Iterator[dict[str, Any]]:
    """For each shape the seconds of a forward and backward pass: with the self-check, without it, and once more."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bytecode = f"{folder}/bytecode"
        before = _start(next(iter(shapes.values())), dtype, f"{folder}/before", bytecode, {})
        try:
            made = _go(before, SLOW_LIMIT_S)
        finally:
            before.kill()
            before.wait()
        waiting = [
            (name, way, _start(shape, dtype, f"{folder}/{index}-{cache}", bytecode, WAYS.get(way, {})))
            for index, (name, shape) in enumerate(shapes.items())
            for way, cache in (("checked", "checked"), ("from disk", "checked"), ("unchecked", "unchecked"))
        ]
        rows: dict[str, dict[str, Any]] = {
            name: {"part": "first call", "name": name, "dtype": dtype} for name in shapes
        }
        try:
            for _, _, process in waiting:
                assert process.stdout is not None
                process.stdout.readline()
            for name, way, process in waiting:
                rows[name][way] = {"without bytecode": made["failure"]} if "failure" in made else {}
                rows[name][way] |= _go(process, LIMIT_S)
        finally:
            for _, _, process in waiting:
                process.kill()
                process.wait()
        yield from rows.values()


def _start(shape: Shape, dtype: str, cache: str, bytecode: str, more: dict[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": f"{cache}/home", **more}
    environment |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "fastweights.benchmarks.first_call", dtype, *map(str, shape)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _go(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    """Let a process that waits make its call."""
    try:
        out, complaint = process.communicate("go\n", limit_s)
        if process.returncode:
            return {"failure": complaint.strip().splitlines()[-1][:160] if complaint.strip() else "it ended"}
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"failure": short(error)}


def _call(dtype: str, shape: Shape) -> None:
    """In a process of its own: wait for a line, then time the first call and the second."""
    leaves = [x.requires_grad_() for x in inputs(shape, DTYPES[dtype])]
    dy = torch.randn_like(leaves[2])
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        # Of a number, as in training: the gradient of a tensor imports PyTorch's symbolic shapes first.
        torch.autograd.grad((memory("triton", *leaves) * dy).sum(), leaves)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"first_s": seconds[0], "second_s": seconds[1]}))


def main(arguments: Sequence[str]) -> None:
    """`dtype B T H D M`."""
    dtype, *sizes = arguments
    B, T, H, D, M = map(int, sizes)
    _call(dtype, (B, T, H, D, M))


if __name__ == "__main__":
    main(sys.argv[1:])

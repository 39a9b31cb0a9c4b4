"""How long the first call of a shape takes where nothing was compiled or checked before.

Each number is from a process of its own, with caches of its own that start empty. They get ready side by side (torch,
the GPU's context, inputs) and then make their call one after the other, as compiling takes every core it can get.
One more process before them compiles the Python modules to bytecode, which pip does when it installs a package.
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

from fastweights.benchmarks.kernels.rows import DTYPES, ROWS, inputs_of, memory
from fastweights.benchmarks.timing import in_one_line
from fastweights.ops.gpu.self_check import ENVIRONMENT

LIMIT_S = 60.0
# For the process that makes the bytecode, which imports everything without it.
SLOW_LIMIT_S = 180.0
# What each way adds to the environment. A third one, "from disk", is "checked" again with the caches it left.
WAYS: dict[str, dict[str, str]] = {"checked": {}, "unchecked": {ENVIRONMENT: "0"}}


def first_calls(names: Sequence[str], dtype: str) -> Iterator[dict[str, Any]]:
    """Time a forward and backward pass of each row: with the self-check, again from its caches, and without it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bytecode = f"{folder}/bytecode"
        before = _launch(names[0], dtype, f"{folder}/before", bytecode, {})
        try:
            made = _let_call(before, SLOW_LIMIT_S)
        finally:
            before.kill()
            before.wait()
        waiting = [
            (name, way, _launch(name, dtype, f"{folder}/{index}-{cache}", bytecode, WAYS.get(way, {})))
            for index, name in enumerate(names)
            for way, cache in (("checked", "checked"), ("from disk", "checked"), ("unchecked", "unchecked"))
        ]
        rows: dict[str, dict[str, Any]] = {name: {"part": "first call", "name": name, "dtype": dtype} for name in names}
        try:
            for _, _, process in waiting:
                assert process.stdout is not None
                process.stdout.readline()
            for name, way, process in waiting:
                rows[name][way] = {"without bytecode": made["failure"]} if "failure" in made else {}
                rows[name][way] |= _let_call(process, LIMIT_S)
        finally:
            for _, _, process in waiting:
                process.kill()
                process.wait()
        yield from rows.values()


def _launch(name: str, dtype: str, cache: str, bytecode: str, more: dict[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": f"{cache}/home", **more}
    environment |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "fastweights.benchmarks.kernels.first_call", name, dtype]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _let_call(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    """Let a waiting process make its call, and return what it measured."""
    try:
        out, complaint = process.communicate("go\n", limit_s)
        if process.returncode:
            return {"failure": complaint.strip().splitlines()[-1][:160] if complaint.strip() else "it ended"}
        seconds: dict[str, Any] = json.loads(out.splitlines()[-1])
        return seconds
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"failure": in_one_line(error)}


def _call(name: str, dtype: str) -> None:
    """Wait for a line on stdin, then time the first call and the second, in a process of its own."""
    row = ROWS[name]
    leaves = inputs_of(row, DTYPES[dtype])
    dy = torch.randn_like(leaves[2])
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        # Of a number, as in training: the gradient of a tensor imports PyTorch's symbolic shapes first.
        torch.autograd.grad((memory(row, "triton")(*leaves) * dy).sum(), leaves)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"first_s": seconds[0], "second_s": seconds[1]}))


if __name__ == "__main__":
    _call(*sys.argv[1:])

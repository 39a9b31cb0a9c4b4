"""Backend `cpu`: the family's recurrence in C++, csrc/memory.cpp, built when first needed and kept in the user's cache.

The C++ knows PyTorch by its stable C interface only, from which it takes its threads. So one build takes seconds, and
tensors travel as addresses and strides. What a process finds in the cache is the very file that some process built, by
the sum at its end; anything else is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import family
from fastweights.ops.autograd import differentiable, direct, like_inputs, plain, wants_gradients
from fastweights.ops.backend import Backend
from fastweights.ops.problem import Problem

SOURCES = Path(__file__).parent / "csrc"
# As fast as -ffast-math here, without its assumption that nothing is ever NaN or infinite.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
# The features of each tensor, by the last letter of its name and of its gradient's: none for the coefficients.
SIZES = {"q": "D", "k": "D", "v": "M", "y": "M", "a": None, "e": None, "w": None}
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def chunk_length(D: int, M: int) -> int:
    """Tokens in a chunk: the work within a chunk grows with it, the states kept shrink."""
    return 32 if max(D, M) <= 32 else 48


class View(ctypes.Structure):
    """A tensor (B, T, H) or (B, T, H, ·) to the C++; all zero where there is none."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
    )

    @classmethod
    def of(cls, x: Tensor | None) -> View:
        """The view of x, whose last axis is contiguous."""
        if x is None:
            return cls()
        return cls(x.data_ptr(), *x.stride()[:3], KINDS[x.dtype], x.element_size())


class Call(ctypes.Structure):
    """One call to the C++: sizes, the bounds of the sequences in time, and tensors by name."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "H", "D", "M", "C", "packed")),
        ("bounds", ctypes.POINTER(ctypes.c_int64)),
        *((name, View) for name in ("q", "k", "v", "a", "e", "w", "y", "dy", "dq", "dk", "dv", "da", "de", "dw")),
        *((name, ctypes.c_void_p) for name in ("W", "W_end", "before", "dW_end", "dW_start", "after")),
    )


def _call(name: str, chunk: int, cu_seqlens: Tensor | None, views: dict[str, Tensor | None], **states: Any) -> None:
    """Run `name` of the library. The tensors are alive until it returns, because the caller holds them."""
    q, v = views["q"], views["v"]
    assert q is not None and v is not None
    (B, T, H, D), M = q.shape, v.shape[-1]
    bounds = [T * i for i in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    N, wide = len(bounds) - 1, states["before"].dtype
    call = Call(N, H, D, M, chunk, cu_seqlens is not None, (ctypes.c_int64 * len(bounds))(*bounds))
    # The C++ believes what it is told, so everything it will read or write through is checked here.
    if cu_seqlens is not None and (bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in pairwise(bounds))):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}, got {bounds[:20]}")
    if wide not in (torch.float32, torch.float64):
        raise TypeError(f"the state must be float32 or float64, got {wide}")
    for key, x in views.items():
        if x is None:
            continue
        size = SIZES[key[-1]]
        wanted = (B, T, H, *(() if size is None else (D,) if size == "D" else (M,)))
        if x.shape != wanted:
            raise ValueError(f"{key} must have shape {wanted} beside q {tuple(q.shape)}, got {tuple(x.shape)}")
        setattr(call, key, View.of(x))
    for key, x in states.items():
        if x is None:
            continue
        if x.shape[1:] != (H, D, M) or (key.startswith(("W", "dW")) and x.shape[0] != N) or x.dtype != wide:
            raise ValueError(f"{key} must be {wide} of shape {(N, H, D, M)}, got {x.dtype} {tuple(x.shape)}")
        setattr(call, key, x.data_ptr())
    if not library()[name](ctypes.byref(call), int(wide == torch.float64)):
        raise MemoryError(f"no memory for chunks of {chunk} steps at D = {D}, M = {M}")


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _number_of_chunks(q: Tensor, chunk: int, cu_seqlens: Tensor | None) -> int:
    """Chunks to keep a state for. With packed sequences the true number hangs on their lengths; this bounds it."""
    if cu_seqlens is None:
        return q.shape[0] * -(-q.shape[1] // chunk)
    return q.shape[1] // chunk + cu_seqlens.numel() - 1


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """y in `dtype`, the final W, and with `keep` the state before each chunk for the backward pass."""
    q, k, v, W = _rows(q), _rows(k), _rows(v), W.contiguous()
    y, W_end = v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape)
    before = W.new_empty((_number_of_chunks(q, chunk, cu_seqlens) if keep else 0, *W.shape[1:]))
    if cu_seqlens is not None:
        used = (cu_seqlens.diff() + chunk - 1).div(chunk, rounding_mode="floor").sum()
        before[int(used) :] = 0
    views = {"q": q, "k": k, "v": v, "a": a, "e": e, "w": w, "y": y}
    _call("fastweights_forward", chunk, cu_seqlens, views, W=W, W_end=W_end, before=before)
    return y, W_end, before


op = torch.library.custom_op("fastweights::cpu", forward, mutates_args=(), device_types="cpu")


@op.register_fake
def _(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, chunk):  # type: ignore[no-untyped-def]
    count = _number_of_chunks(q, chunk, cu_seqlens) if keep else 0
    return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), W.new_empty((count, *W.shape[1:]))


def backward(
    dy: Tensor,
    dW: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    before: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
) -> list[Tensor]:
    """Gradients of q, k, v, the coefficients that are there, and the initial W, in this order."""
    dy, q, k, v, dW = _rows(dy), _rows(q), _rows(k), _rows(v), None if dW is None else dW.to(before.dtype).contiguous()
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    dW_start = before.new_empty((N, *before.shape[1:]))
    # With fewer heads than threads the gradients of all states come first; then every chunk is on its own.
    few = N * q.shape[2] < torch.get_num_threads() and before.shape[0] > N
    views = {"dy": dy, "q": q, "k": k, "v": v, "a": a, "e": e, "w": w}
    named = [(name, views[name]) for name in ("q", "k", "v", "a", "e", "w")]
    grads = {f"d{name}": x.new_empty(x.shape) for name, x in named if x is not None}
    after = torch.empty_like(before) if few else None
    states = {"before": before, "dW_end": dW, "dW_start": dW_start, "after": after}
    _call("fastweights_backward", chunk, cu_seqlens, {**views, **grads}, **states)
    return [*grads.values(), dW_start]


backward_op = torch.library.custom_op("fastweights::cpu_backward", backward, mutates_args=(), device_types="cpu")


@backward_op.register_fake
def _(dy, dW, q, k, v, a, e, w, before, cu_seqlens, chunk):  # type: ignore[no-untyped-def]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    return [*like_inputs(q, k, v, a, e, w), before.new_empty((N, *before.shape[1:]))]


differentiable(op, backward_op)
_direct = direct(forward, backward, backward_op)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The recurrence in C++, as `ops.family.Recurrence` has it."""
    inputs = (q, k, v, a, e, w, W)
    keep = wants_gradients(*inputs)
    run = _direct if plain(*inputs, cu_seqlens) else op
    y, W, *_ = run(*inputs, cu_seqlens, dtype, keep, chunk_length(k.shape[-1], v.shape[-1]))
    return y, W


def _compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++", "c++"])), None)


def _cpu() -> str:
    """What -march=native looks at."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _path(compiler: str) -> Path:
    """Where the library for this machine, compiler and PyTorch is kept."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    content = [*sources, *FLAGS, compiler, version, platform.machine(), _cpu(), torch.__version__]
    name = hashlib.sha256("\n".join(content).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "fastweights" / "cpu" / f"{name}.so"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among all processes."""
    import fcntl  # not on every system, but wherever there is something to build

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _build(compiler: str, path: Path) -> None:
    """Compile to `path`, which is either not there or whole, whenever the process stops."""
    torch_home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-I{torch_home / 'include'}", str(SOURCES / "memory.cpp"), "-o", str(built)]
        command += [f"-L{torch_home / 'lib'}", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        content = built.read_bytes()
        built.write_bytes(content + hashlib.sha256(content).digest())
        built.replace(path)


@cache
def library() -> ctypes.CDLL:
    """The library; built where no process on this machine has done so."""
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    path = _path(compiler)
    if _intact(path):
        return ctypes.CDLL(str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _intact(path):
                _build(compiler, path)
            return ctypes.CDLL(str(path))
    except OSError:
        # Nowhere to keep it, or to run it from: for this process only.
        with tempfile.TemporaryDirectory() as folder:
            _build(compiler, Path(folder) / path.name)
            return ctypes.CDLL(str(Path(folder) / path.name))


@cache
def _failure() -> str | None:
    """Why there is no library. Says it aloud once: with a compiler at hand, nobody expects the slower way."""
    try:
        library()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        reason = f"the C++ could not be built: {error}"
        warnings.warn(f"{reason}\n'auto' takes the backend 'chunked' instead.", stacklevel=2)
        return reason
    return None


@cache
def _unavailable() -> str | None:
    if sys.platform != "linux":
        return f"it is built on Linux only, this is {sys.platform}"
    if _compiler() is None:
        return "there is no C++ compiler (g++ or clang++, or the one that CXX names)"
    return None


def unavailable() -> str | None:
    """Why it cannot run on this machine, as far as one can tell without building it."""
    return _unavailable()


def failure() -> str | None:
    """Why it could not be built; builds it where nobody did."""
    return _failure()


# Both ask the machine, not the problem, so `torch.compile` may take their answers for constants. This is all that
# `torch.compiler.assume_constant_result` does, after importing the compiler, which takes a second.
for _function in (unavailable, failure):
    vars(_function)["_dynamo_marked_constant"] = True


def refuses(problem: Problem) -> str | None:
    """Why it is not for this problem."""
    if problem.rule.coefficients is None:
        return f"rule {problem.rule.name!r} is outside the family W = aW - e(aWk)k^T + w v k^T"
    if problem.q.device.type != "cpu":
        return f"it runs on the CPU, the tensors are on {problem.q.device}"
    return failure()


BACKEND = Backend(
    name="cpu",
    description="C++ in chunks of time, all threads: rules of the family, tensors on the CPU, O(T/C) states kept",
    run=lambda problem: family.run(problem, recurrence),
    refuses=refuses,
    unavailable=unavailable,
)

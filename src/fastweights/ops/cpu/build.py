"""The library of backend `cpu`: the one that came in the wheel, or one built here and kept in the user's cache.

A wheel has a library for every level of processors in `compiler`. Without it, as in a checkout, the library is built
for this very processor at first use. What a process finds in the cache is the very file that some process built, by
the checksum at its end; anything else is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from fastweights.common.files import locked, remove_stale_temporaries
from fastweights.ops.cpu.compiler import NATIVE, SOURCES, Level, compile_library, find_compiler, flags, levels
from fastweights.ops.cpu.views import KINDS

ENVIRONMENT = "FASTWEIGHTS_CPU_LEVEL"
SHIPPED = Path(__file__).parent / "lib"

# A build that takes longer says so.
PATIENCE_S = 2.0


def _cpu() -> list[bytes]:
    """Return what -march=native looks at; nothing where Linux does not say."""
    file = Path("/proc/cpuinfo")
    lines = file.read_bytes().splitlines() if file.exists() else []
    return sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))})


@cache
def runnable() -> dict[str, Level]:
    """Return the levels that this machine can run, by name, the best of a wheel's first, and `native`."""
    features = {os.fsdecode(word) for line in _cpu() for word in line.split()}
    return {level.name: level for level in (*levels(), NATIVE) if level.features <= features}


def _shipped(level: Level) -> Path | None:
    path = SHIPPED / f"{level.name}.so"
    return path if path.exists() else None


def selected() -> tuple[Level, Path | None]:
    """Return the level to run, and its library where it came with the package."""
    here = runnable()
    if wanted := os.environ.get(ENVIRONMENT):
        if wanted not in here:
            raise ValueError(f"{ENVIRONMENT} must be one of {', '.join(here)} on this machine, got {wanted!r}")
        return here[wanted], _shipped(here[wanted])
    return next(((level, path) for level in here.values() if (path := _shipped(level))), (NATIVE, None))


def _path(compiler: str, level: Level) -> Path:
    """Return where the library for this machine and compiler is kept."""
    # Bytes all along: neither the locale nor the compiler has to know UTF-8.
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in sorted(SOURCES.rglob("*.*"))]
    names = [os.fsencode(x) for x in (*flags(level), compiler, platform.machine())]
    name = hashlib.sha256(b"\n".join([*sources, *names, version, *_cpu()])).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "fastweights" / "cpu" / f"{name}.so"


@contextmanager
def _announced() -> Iterator[None]:
    """Say what takes so long, once, on standard error; nothing where it is quick."""
    note = "fastweights: building the C++ backend for this machine, which is needed once and may take a minute\n"
    timer = threading.Timer(PATIENCE_S, lambda: sys.stderr.write(note))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _build(compiler: str, level: Level, path: Path) -> None:
    """Compile to `path`, which is either not there or complete, whenever the process stops."""
    remove_stale_temporaries(path.parent)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=path.parent) as folder:
        built = Path(folder) / path.name
        compile_library(compiler, level, built)
        content = built.read_bytes()
        built.write_bytes(content + hashlib.sha256(content).digest())
        built.replace(path)


def _load(path: Path) -> ctypes.CDLL:
    """Load the library, and hand PyTorch's threads to it."""
    library, pytorch = ctypes.CDLL(str(path)), ctypes.CDLL(torch._C.__file__)
    library.fastweights_threads(pytorch.torch_parallel_for, pytorch.torch_get_num_threads)
    return library


@cache
def library() -> ctypes.CDLL:
    """Return the library; build it where none came with the package and no process on this machine has done so."""
    level, shipped = selected()
    if shipped:
        return _load(shipped)
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    path = _path(compiler, level)
    if _intact(path):
        return _load(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _announced(), locked(path.with_suffix(".lock")):
            if not _intact(path):
                _build(compiler, level, path)
            return _load(path)
    except OSError:
        # Nowhere to keep it, or to run it from: for this process only.
        with tempfile.TemporaryDirectory() as folder, _announced():
            _build(compiler, level, Path(folder) / path.name)
            return _load(Path(folder) / path.name)


@cache
def _failure() -> str | None:
    """Return why there is no library, and warn once: with a compiler at hand, nobody expects the slower way."""
    try:
        library()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        reason = f"the C++ could not be built or loaded: {error}"
        warnings.warn(f"{reason}\n'auto' takes the backend 'chunked' instead.", stacklevel=2)
        return reason
    return None


@cache
def _unavailable() -> str | None:
    if sys.platform != "linux":
        return f"it is built on Linux only, this is {sys.platform}"
    if selected()[1] is None and find_compiler() is None:
        return "there is no C++ compiler (g++ or clang++, or the one that CXX names)"
    return None


def origin() -> str | None:
    """Describe the library in a few words, without building it; None where there is none."""
    if unavailable():
        return None
    level, shipped = selected()
    if shipped:
        return f"level {level.name}, came with the package"
    built = _intact(_path(find_compiler() or "", level))
    return f"level {level.name}, {'built on this machine' if built else 'to be built at first use'}"


def unavailable() -> str | None:
    """Return why it cannot run on this machine, as far as one can tell without building it."""
    return _unavailable()


def failure() -> str | None:
    """Return why it could not be built or loaded; build it where nobody did."""
    return _failure()


def refuses_tensors(*tensors: torch.Tensor | None) -> str | None:
    """Return why the C++ cannot take these tensors: where they are, what they hold, or that there is no C++."""
    for x in tensors:
        if x is not None and x.device.type != "cpu":
            return f"it runs on the CPU, a tensor is on {x.device}"
        if x is not None and x.dtype not in KINDS:
            return f"it takes {', '.join(map(str, KINDS))}, a tensor is {x.dtype}"
    return unavailable() or failure()


# Both ask the machine, not the problem, so `torch.compile` may take their answers for constants. This is all that
# `torch.compiler.assume_constant_result` does, after importing the compiler, which takes a second.
for _function in (unavailable, failure):
    vars(_function)["_dynamo_marked_constant"] = True

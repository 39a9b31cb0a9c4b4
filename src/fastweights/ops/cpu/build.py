"""The C++ of backend `cpu`, csrc/: the compiler, the build, and the user's cache that keeps it.

The C++ knows PyTorch by its stable C interface only, so one build takes seconds. What a process finds in the cache is
the very file that some process built, by the checksum at its end; anything else is built again.
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
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from fastweights.common.files import remove_stale_temporaries

SOURCES = Path(__file__).parent / "csrc"
# As fast as -ffast-math here, without its assumption that nothing is ever NaN or infinite.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)


# A build that takes longer says so.
PATIENCE_S = 2.0


def _compiler() -> str | None:
    """Return the C++ compiler: $CXX, or the first of the usual names."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++", "c++"])), None)


def _cpu() -> bytes:
    """Return what -march=native looks at."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def _path(compiler: str) -> Path:
    """Return where the library for this machine, compiler and PyTorch is kept."""
    # Bytes all along: neither the locale nor the compiler has to know UTF-8.
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    names = [os.fsencode(x) for x in (*FLAGS, compiler, platform.machine(), torch.__version__)]
    name = hashlib.sha256(b"\n".join([*sources, *names, version, _cpu()])).hexdigest()[:24]
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock that one process at a time can have."""
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
    """Compile to `path`, which is either not there or complete, whenever the process stops."""
    torch_home = Path(torch.__file__).parent
    remove_stale_temporaries(path.parent)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=path.parent) as folder:
        built = Path(folder) / path.name
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        command = [compiler, *FLAGS, f"-I{torch_home / 'include'}", *sources, "-o", str(built)]
        command += [f"-L{torch_home / 'lib'}", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, env={**os.environ, "TMPDIR": folder})
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
        content = built.read_bytes()
        built.write_bytes(content + hashlib.sha256(content).digest())
        built.replace(path)


@cache
def library() -> ctypes.CDLL:
    """Return the library; build it where no process on this machine has done so."""
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    path = _path(compiler)
    if _intact(path):
        return ctypes.CDLL(str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _announced(), _locked(path.with_suffix(".lock")):
            if not _intact(path):
                _build(compiler, path)
            return ctypes.CDLL(str(path))
    except OSError:
        # Nowhere to keep it, or to run it from: for this process only.
        with tempfile.TemporaryDirectory() as folder, _announced():
            _build(compiler, Path(folder) / path.name)
            return ctypes.CDLL(str(Path(folder) / path.name))


@cache
def _failure() -> str | None:
    """Return why there is no library, and warn once: with a compiler at hand, nobody expects the slower way."""
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
    """Return why it cannot run on this machine, as far as one can tell without building it."""
    return _unavailable()


def failure() -> str | None:
    """Return why it could not be built; build it where nobody did."""
    return _failure()


# Both ask the machine, not the problem, so `torch.compile` may take their answers for constants. This is all that
# `torch.compiler.assume_constant_result` does, after importing the compiler, which takes a second.
for _function in (unavailable, failure):
    vars(_function)["_dynamo_marked_constant"] = True

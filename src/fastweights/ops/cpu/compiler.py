"""The compiler of csrc/, and the levels of processors for which a wheel has a library each.

It imports nothing beyond Python's own modules: `hatch_build.py` loads this file to build a wheel, in an environment
without fastweights and without PyTorch. The C++ needs nothing of PyTorch either, see csrc/threads.h.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "csrc"
# As fast as -ffast-math here, without its assumption that nothing is ever NaN or infinite.
FLAGS = (
    *("-std=c++17", "-O3"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)


class Level(NamedTuple):
    """What a library is compiled for, and what the processor must have to run it, in the words of /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()

    def extended(self, name: str, features: str) -> Level:
        """The same with further features, which the compiler spells almost as Linux does."""
        more = features.split()
        flags = [f"-m{feature.replace('avx512_', 'avx512')}" for feature in more]
        return Level(name, (*self.flags, *flags), self.features | {*more})


NATIVE = Level("native", ("-march=native",))
BASELINE = Level("baseline", ("-march=x86-64",))
AVX2 = BASELINE.extended("avx2", "avx2 fma f16c")
AVX512 = AVX2.extended("avx512", "avx512f avx512bw avx512cd avx512dq avx512vl")
AVX512_BF16 = AVX512.extended("avx512_bf16", "avx512_bf16")
NEON = Level("neon", ("-march=armv8-a",))
# By platform, the best first.
LEVELS = {"linux-x86_64": (AVX512_BF16, AVX512, AVX2, BASELINE), "linux-aarch64": (NEON,)}


def levels() -> tuple[Level, ...]:
    """Return the levels of a wheel for this platform; none where there is no such wheel."""
    return LEVELS.get(sysconfig.get_platform(), ())


def find_compiler() -> str | None:
    """Return the C++ compiler: $CXX, or the first of the usual names."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++", "c++"])), None)


def flags(level: Level) -> list[str]:
    """Return all flags for a level; those of $CXXFLAGS come last and win."""
    return [*FLAGS, *level.flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def compile_library(compiler: str, level: Level, output: Path) -> None:
    """Compile the library for a level."""
    exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
    run_compiler(compiler, [*flags(level), "-fPIC"], ["-shared", exports], output)


def run_compiler(
    compiler: str, options: Sequence[str], linking: Sequence[str], output: Path, more: Sequence[Path] = ()
) -> None:
    """Compile all sources and `more`, side by side, and link them with further options."""
    # memory.cpp takes longest; backwards by name, it is among the first.
    sources = [*more, *sorted(SOURCES.rglob("*.cpp"), reverse=True)]
    with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=output.parent) as folder:
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]

        def run(*arguments: str) -> None:
            command = [compiler, *options, *arguments]
            completed = subprocess.run(command, capture_output=True, env={**os.environ, "TMPDIR": folder})
            if completed.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{completed.stderr.decode(errors='replace')[-2000:]}")

        def compile_one(source: Path, compiled: str) -> None:
            run(f"-I{SOURCES}", "-c", str(source), "-o", compiled)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        run(*objects, *linking, "-o", str(output))

"""The library of the C++ backend: which one runs, how it is built, kept and loaded."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastweights.ops.backends import EXECUTABLES
from fastweights.ops.cpu import backend as cpu
from fastweights.ops.cpu import build
from fastweights.ops.cpu import compiler as compilation
from fastweights.ops.cpu.compiler import SOURCES, find_compiler, levels
from tests.ops.calls import random_call, refusal, relative_error
from tests.ops.test_cpu_backend import everything, expected, problem

CACHES = (build.library, build._failure, build._unavailable, build.runnable)

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture
def forgotten():
    """A process that knows nothing of compilers and libraries yet, and forgets what the test lets it learn."""
    for function in CACHES:
        function.cache_clear()
    # What was prepared for a call keeps the library that it was prepared with.
    EXECUTABLES.clear()
    yield
    for function in CACHES:
        function.cache_clear()


@pytest.fixture
def compiler(tmp_path, monkeypatch, forgotten):
    """The real compiler under a name that keeps a list of its builds, and an empty cache."""
    builds, script = tmp_path / "builds", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\ncase "$*" in *memory.cpp*) echo >> {builds};; esac\nexec {find_compiler()} "$@"\n')
    script.chmod(0o755)
    builds.touch()
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXXFLAGS", "-O0")
    return lambda: len(builds.read_text().splitlines())


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """Compile at once, in place of the sources of the backend, one that can do nothing but be loaded."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "memory.cpp").write_text('extern "C" void fastweights_threads(void*, void*) {}\n')
    (folder / "exports.map").write_bytes((SOURCES / "exports.map").read_bytes())
    for module in (build, compilation):
        monkeypatch.setattr(module, "SOURCES", folder)
    return folder


def test_built_once_and_again_where_the_file_is_broken(compiler, small_sources):
    library = Path(build.library()._name)
    assert compiler() == 1
    for broken, builds in ((None, 1), (lambda x: x[:-1000], 2), (lambda x: b"", 3)):
        if broken is not None:
            # A new file in place of the old one, which this process still runs from.
            content = library.read_bytes()
            library.unlink()
            library.write_bytes(broken(content))
        build.library.cache_clear()
        assert build.library()._name == str(library)
        assert compiler() == builds
        assert build.failure() is None


@pytest.mark.slow
def test_several_processes_build_once(compiler, small_sources):
    code = f"""
from pathlib import Path
from fastweights.ops.cpu import build, compiler
build.SOURCES = compiler.SOURCES = Path({str(small_sources)!r})
assert build.failure() is None
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert compiler() == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_nowhere_to_keep_it(compiler, small_sources, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert build.failure() is None
    assert compiler() == 1


def test_a_cache_that_is_no_folder(monkeypatch, tmp_path, request):
    """Built for this process only: here by a compiler that gives a copy of what was built before."""
    built, script = build.library()._name, tmp_path / "compiler"
    request.getfixturevalue("forgotten")
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nfor output; do :; done\ncp "{built}" "$output"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.failure() is None and build.library()._name != built
    call = random_call("delta")
    assert relative_error(everything(call), expected(call)) < 1e-12


def test_without_a_compiler(monkeypatch, forgotten):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "there is no C++ compiler" in cpu.BACKEND.unavailable()


def test_asking_whether_it_can_run_builds_nothing(compiler):
    assert cpu.BACKEND.unavailable() is None
    assert compiler() == 0


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch, forgotten):
    """A compiler that fails, in words that are not UTF-8, after half a second; returns the folder of the cache."""
    script = tmp_path / "compiler"
    no = r"printf 'no such flag \377\n'"
    script.write_text(f'#!/bin/sh\n{no}; [ "$1" = --version ] && exit 0\nsleep 0.5; {no} >&2; exit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastweights" / "cpu"


def test_a_build_that_fails_is_said_once_and_refused(broken_compiler):
    with pytest.warns(UserWarning, match="no such flag") as warned:
        reason = refusal(cpu.BACKEND, problem())
    assert len(warned) == 1
    assert "could not be built" in reason
    assert refusal(cpu.BACKEND, problem()) == reason


@pytest.mark.parametrize(("patience", "lines"), [(0.1, 1), (60.0, 0)])
def test_a_build_that_takes_long_says_so_once(broken_compiler, patience, lines, monkeypatch, capsys):
    monkeypatch.setattr(build, "PATIENCE_S", patience)
    with pytest.warns(UserWarning, match="could not be built"):
        build.failure()
    assert capsys.readouterr().err.count("building the C++ backend") == lines


def test_what_killed_builds_left_is_removed_after_a_day(broken_compiler):
    left = [broken_compiler / name for name in (".yesterday.tmp", ".today.tmp")]
    for folder in left:
        folder.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 60 * 60
    os.utime(left[0], (two_days_ago, two_days_ago))
    with pytest.warns(UserWarning, match="could not be built"):
        build.failure()
    assert [folder.exists() for folder in left] == [False, True]


def test_a_locale_without_utf8():
    """The sources are UTF-8, whatever the locale, and the library is the same."""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "from fastweights.ops.cpu import build; print(build.library()._name)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == build.library()._name


@pytest.fixture
def level(request, monkeypatch, forgotten):
    """Run one level. Its library is not optimised as in a wheel, because four are a lot to compile for a test."""
    if request.param not in build.runnable():
        pytest.skip("this processor cannot run it")
    if request.param != "native":
        monkeypatch.setenv("CXXFLAGS", "-O0")
    monkeypatch.setenv(build.ENVIRONMENT, request.param)
    return request.param


@pytest.mark.parametrize("level", [level.name for level in levels()], indirect=True)
def test_every_level_agrees_with_the_reference(level):
    """On one, two and more threads than heads, which share out the work in other ways but change no bit."""
    assert f"level {level}," in build.origin()
    for rule, shape in (("gated_delta", (1, 70, 3, 17, 33)), ("gated_delta log per key", (2, 50, 1, 20, 5))):
        call = random_call(rule, "attention", *shape)
        exact = expected(call)
        assert relative_error(everything(call), exact) < 1e-12
        call = call.to(torch.float32)
        results = []
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            results.append(everything(call))
        assert relative_error(results[0], exact) < 1e-5
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("level", ["native", *(level.name for level in levels())], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_converted_as_pytorch_does(level, dtype):
    """Every number, and floats between all of them, subnormal and infinite ones and NaN among them."""

    def passed_on(v, dtype):
        """What a memory of one key gives back for v, one number a column."""
        one, W = v.new_ones(1, 1, 1, 1), torch.zeros(1, 1, 1, v.shape[-1])
        return cpu.forward((one, one, v, None, None, None), W, None, False, dtype, False, 1)[0]

    every = torch.arange(-(2**15), 2**15).to(torch.int16)[None, None, None].view(dtype)
    torch.testing.assert_close(passed_on(every, torch.float32), every.float(), rtol=0, atol=0, equal_nan=True)
    between = (torch.arange(2**15, dtype=torch.int64) * 131071 - 2**31).to(torch.int32).view(torch.float32)
    halfway = (every.float().flatten()[1:] + every.float().flatten()[:-1]) / 2
    for wide in (between, halfway):
        found = passed_on(wide[None, None, None], dtype)[0, 0, 0]
        torch.testing.assert_close(found, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_a_level_that_this_machine_cannot_run(monkeypatch, forgotten):
    monkeypatch.setenv(build.ENVIRONMENT, "avx1024")
    with pytest.raises(ValueError, match=r"FASTWEIGHTS_CPU_LEVEL must be one of .*native on this.*got 'avx1024'"):
        random_call("delta").run("cpu")


def test_a_forked_process_does_not_wait_for_threads_it_has_not():
    """PyTorch's threads stay behind in the parent, and its OpenMP would wait for them."""
    code = """
import os, signal, torch
from tests.ops.calls import random_call
from tests.ops.test_cpu_backend import everything
torch.set_num_threads(2)
call = random_call("gated_delta", None, 2, 20, 2, 5, 3)
before = everything(call)
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)  # ends the process, and the test with it
os._exit(not all(torch.equal(a, b) for a, b in zip(before, everything(call))))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0

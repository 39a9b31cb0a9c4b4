"""The wheel: with the C++ backend compiled for every level of processors, or its sources where there is no compiler."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from fastweights.ops.cpu import build
from fastweights.ops.cpu.compiler import find_compiler, levels

ROOT = Path(__file__).parents[1]


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """Builds the wheel as pip does."""
    monkeypatch.chdir(ROOT)
    return lambda: zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path)))


def members(archive, ending):
    return {Path(name).name for name in archive.namelist() if name.endswith(ending)}


@pytest.fixture
def one_level(monkeypatch, tmp_path):
    """A compiler that compiles the level that runs here, quickly; for the others, which take as long, empty files."""
    script, needs = tmp_path / "compiler", next(iter(build.runnable().values())).flags[-1]
    script.write_text(
        f"""#!/bin/sh
case "$*" in
  *{needs}*|*-shared*) exec {find_compiler()} "$@";;
esac
for output; do :; done
exec {find_compiler()} -x c++ -c /dev/null -o "$output"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("CXXFLAGS", "-O0")


@pytest.mark.skipif(not levels() or find_compiler() is None, reason="no compiler, or no levels on this platform")
def test_runs_without_a_compiler(wheel, one_level, tmp_path):
    with wheel() as archive:
        platform = sysconfig.get_platform().replace("-", "_")
        assert archive.filename.endswith(f"-py3-none-{platform}.whl")
        assert members(archive, ".so") == {f"{level.name}.so" for level in levels()}
        archive.extractall(tmp_path / "site")
    code = """
import torch, fastweights as fw
from fastweights.ops.cpu import build
level, path = build.selected()
assert path and path.is_relative_to(fw.__path__[0]) and level == next(iter(build.runnable().values()))
q, k, v, beta = torch.rand(1, 60, 2, 5), torch.rand(1, 60, 2, 5) / 5, torch.randn(1, 60, 2, 3), torch.rand(1, 60, 2)
ours, exact = (fw.fast_weight_memory(q, k, v, beta=beta, backend=name)[0] for name in ("cpu", "reference"))
torch.testing.assert_close(ours, exact)
print(build.origin())
"""
    nothing = tmp_path / "nothing"
    alone = {"PATH": str(nothing), "XDG_CACHE_HOME": str(nothing), "PYTHONPATH": str(tmp_path / "site")}
    environment = {name: x for name, x in os.environ.items() if name not in ("CXX", build.ENVIRONMENT)} | alone
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("came with the package\n") and not nothing.exists()


@pytest.mark.parametrize(("name", "value", "why"), [("PATH", "", "no C++ compiler"), ("CXX", "false", "false -std")])
def test_has_the_sources_where_they_cannot_be_compiled(name, value, why, wheel, monkeypatch, capfd):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(name, value)
    with wheel() as archive:
        assert archive.filename.endswith("-py3-none-any.whl")
        assert not members(archive, ".so") and "memory.cpp" in members(archive, ".cpp")
        # What else must be inside: the model `demo`, the licence, the mark of a typed package.
        assert {"weights.safetensors", "LICENSE", "py.typed"} <= {Path(name).name for name in archive.namelist()}
        (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        about = message_from_bytes(archive.read(metadata))
        assert about["License-Expression"] == "MIT" and "torch<3,>=2.10" in about.get_all("Requires-Dist")
    said = "".join(capfd.readouterr())
    if levels():
        assert "will be built at first use" in said and why in said

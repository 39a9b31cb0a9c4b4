"""The shape of the package: imports point one way, public names are documented, the README's code runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastweights as fw

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fastweights"
# Each may import from itself and from those before it.
ORDER = [
    "common",
    "ops",
    "feature_maps",
    "layers",
    "models",
    "data",
    "inference",
    "training",
    "experiments",
    "report",
    "benchmarks",
    "commands",
    "cli",
]


def imported(path):
    """Parts of the package that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("fastweights."):
                yield name.split(".")[1]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    assert part in ORDER
    above = [name for name in imported(path) if ORDER.index(name) > ORDER.index(part)]
    assert not above, f"{part} must not import from {above}"


@pytest.mark.parametrize("name", fw.__all__)
def test_public_names_exist_and_are_documented(name):
    assert name == "__version__" or getattr(fw, name).__doc__


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'delta_net'"):
        _ = fw.delta_net


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_python_in_documents_runs(document):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert blocks or document != "README.md"
    for block in blocks:
        exec(compile(block, document, "exec"), {})


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example):
    # One thread: the tests run beside each other, and two threads on a busy core wait for one another.
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=240, env=one_thread)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_torch():
    code = "import sys, fastweights.cli; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

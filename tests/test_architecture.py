"""The shape of the package: imports point one way, and public names are documented."""

import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import fastweights as fw
from tests.import_graph import cycles, imports, module_name

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fastweights"
SUFFIXES = {".py", ".cpp", ".h"}
MOST_FILES, MOST_LINES = 14, 400
# Each may import from itself and from those before it.
ORDER = [
    "common",
    "ops",
    "compat",
    "conformance",
    "feature_maps",
    "layers",
    "models",
    "data",
    "inference",
    "onnx",
    "training",
    "huggingface",
    "experiments",
    "report",
    "probe",
    "commands",
    "look",
    "benchmarks",
    "cli",
    "__main__",
]


PATHS = {module_name(path, SOURCE): path for path in sorted(SOURCE.rglob("*.py"))}
PUBLIC = [name for name in fw.__all__ if name != "__version__"]
HOMES = {name: getattr(getattr(fw, name), "__module__", f"fastweights.{name}") for name in PUBLIC}
MODULES = [name for name in PATHS if name != "fastweights"]
# Being removed; nothing may be added.
KNOWN_FULL_FOLDERS: dict[str, int] = {}
KNOWN_LONG_FILES: dict[str, int] = {}


@cache
def imported(module):
    """What a module of the package imports of it."""
    path = PATHS[module]
    return sorted(imports(path.read_text(), module, path.name == "__init__.py", PATHS, HOMES))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    part = module.split(".")[1]
    above = [name for name in imported(module) if ORDER.index(name.split(".")[1]) > ORDER.index(part)]
    assert not above, f"{part} must not import from {above}"


def test_there_are_no_import_cycles():
    assert not cycles({module: imported(module) for module in MODULES})


@pytest.mark.parametrize(
    "code",
    [
        "import fastweights.ops.rules",
        "import fastweights.ops.rules as rules",
        "from fastweights.ops import rules",
        "from fastweights.ops.rules import list_rules",
        "from fastweights import update_rule",
        "import fastweights as fw\nfw.update_rule('delta')",
        "import fastweights\nfastweights.ops.rules.list_rules()",
        "from ..ops import rules",
        "from ..ops.rules import list_rules",
        "from . import softmax",
        "def f():\n    from fastweights.ops.rules import list_rules",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fastweights.ops.rules",
        "TABLE = {'rules': 'fastweights.ops.rules:list_rules'}",
    ],
)
def test_every_kind_of_import_is_seen(code):
    found = imports(code, "fastweights.layers.relative", False, PATHS, HOMES)
    if code == "from . import softmax":
        assert found == {"fastweights.layers.softmax"}
    else:
        assert found == {"fastweights.ops.rules", "fastweights.ops"}


def test_other_strings_and_the_version_are_no_imports():
    code = "import fastweights\nprint(fastweights.__version__, 'see fastweights.ops.rules', 'fastweights.cli:main()')"
    assert imports(code, "fastweights.common.files", False, PATHS, HOMES) == set()


def test_cycles_are_found_whatever_their_length():
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["f", "d"], "f": []}
    assert sorted(cycles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_no_folder_has_more_than_14_files():
    files = Counter(str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.suffix in SUFFIXES)
    assert not {folder: n for folder, n in files.items() if n > KNOWN_FULL_FOLDERS.get(folder, MOST_FILES)}


def test_no_file_has_more_than_400_lines():
    lines = {
        str(path.relative_to(SOURCE)): path.read_text().count("\n")
        for path in SOURCE.rglob("*")
        if path.suffix in SUFFIXES
    }
    assert not {path: n for path, n in lines.items() if n > KNOWN_LONG_FILES.get(path, MOST_LINES)}


@pytest.mark.parametrize("name", fw.__all__)
def test_public_names_exist_and_are_documented(name):
    assert name == "__version__" or getattr(fw, name).__doc__


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'delta_net'"):
        _ = fw.delta_net


def test_importing_the_package_does_not_import_torch():
    code = "import sys, fastweights.cli; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

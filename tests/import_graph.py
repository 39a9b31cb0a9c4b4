"""Which module of the package imports which, read from the source: every kind of import, wherever it stands.

Imports inside functions and under `TYPE_CHECKING` count like any other, and so do relative imports. `fw.name` after
`import fastweights as fw` counts as an import of the module that defines the name, and a string that names a module as
an import of that module: tables of modules to import later consist of such strings.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = "fastweights"
MODULE_STRING = re.compile(rf"({PACKAGE}(?:\.\w+)+)(?::\w+)?")


def module_name(path: Path, source: Path) -> str:
    """Return the dotted name of the module at `path`, where `source` is the folder of the package."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join([PACKAGE, *parts]).removesuffix(".__init__")


def imports(code: str, module: str, is_package: bool, modules: Iterable[str], homes: Mapping[str, str]) -> set[str]:
    """Return the modules of the package that the source `code` of `module` imports.

    `modules` are all modules of the package; `homes` says which of them defines each name that `fastweights` exports.
    Importing `a.b` runs `a` first, so the packages around an imported module count too, except those around `module`.
    """
    known = set(modules)
    tree = ast.parse(code)
    found: set[str] = set()
    nicknames = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == PACKAGE
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(node, module, is_package)
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                found.add(submodule if submodule in known else origin)
                if origin == PACKAGE and alias.name in homes:
                    found.add(homes[alias.name])
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in nicknames:
                found.add(homes.get(rest, f"{PACKAGE}.{rest}"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = MODULE_STRING.fullmatch(node.value)
            found |= {named[1]} if named else set()
    around = {package for name in found for package in _packages(name)} - set(_packages(module))
    # The root package only passes on names that other modules define.
    return {name for name in found | around if name in known} - {PACKAGE, module}


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return every group of modules in which each can be reached from each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                groups.append(sorted(stack[start:]))
            del stack[start:]

    for name in graph:
        if name not in index:
            visit(name)
    return groups

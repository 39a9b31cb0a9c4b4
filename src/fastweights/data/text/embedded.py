"""A corpus that needs no download: the English documentation that comes with every Python.

It is made of the language reference behind `help()` and the docstrings of the standard library. Modules are read, not
imported, so that none can open a window or a browser. One Python version always gives the same text.
"""

import ast
import inspect
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fastweights.data.manifest import SPLITS, DataError, Report

MODULES = """
    __future__ _collections_abc _pydecimal _pyio _strptime _threading_local abc argparse ast asyncio base64 bdb
    bisect bz2 cProfile calendar cmd code codecs codeop collections colorsys compileall concurrent configparser
    contextlib copy copyreg csv ctypes curses dataclasses datetime dbm difflib dis doctest email enum
    filecmp fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip
    hashlib heapq hmac html http imaplib importlib inspect io ipaddress json keyword linecache locale logging lzma
    mailbox mimetypes modulefinder multiprocessing netrc ntpath numbers operator optparse os pathlib pdb pickle
    pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc queue
    quopri random re reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil site smtplib socket
    socketserver sqlite3 ssl stat statistics string subprocess symtable sysconfig tabnanny tarfile tempfile textwrap
    threading timeit tokenize tomllib trace traceback tracemalloc turtle types typing unittest urllib uuid venv
    warnings wave weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
""".split()  # noqa: SIM905, a list literal would take a line for each
# A word, a number, or a run of one sign: "=====" is one token.
_TOKEN = re.compile(r"\w+|([^\w\s])\1*")
_PARAGRAPH = re.compile(r"\n\s*\n")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts(report: Report, spaced: bool = True) -> dict[str, list[str]]:
    """Return the documents of each split; whole documents are held out, and repeated paragraphs left out.

    Each paragraph is one line with a space between words and signs, or with `spaced` False as it was written. Both
    ways have the same paragraphs in the same splits.
    """
    documents: dict[str, str] = {}
    sizes: dict[str, int] = {}
    seen = set()
    for name, paragraphs, fraction in _documents():
        report("reading the documentation of Python", fraction)
        # The topics of the reference quote each other, and what is tested must not be in the training text.
        kept = [(line, raw) for raw in paragraphs if (line := _tokenise(raw)) and line not in seen]
        lines = [line for line, _ in kept]
        seen.update(lines)
        if lines:
            document = "\n".join([f" = {_tokenise(name)} = ", "", *lines, "", ""])
            sizes[name] = len(document)
            written = "\n\n".join([f"= {name} =", *(raw.rstrip() for _, raw in kept)])
            documents[name] = document if spaced else f"{written}\n\n\n"
    held_out = _hold_out(sizes)
    chosen: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name, document in documents.items():
        chosen[held_out.get(name, "train")].append(document)
    if not all(chosen.values()):
        raise DataError("this Python carries no documentation: neither pydoc_data nor the standard library's sources")
    return chosen


def _hold_out(sizes: dict[str, int]) -> dict[str, str]:
    """Choose a sixteenth of the text each for valid and test, in documents drawn by the hash of their names."""
    total, held = sum(sizes.values()), dict.fromkeys(SPLITS[1:], 0)
    chosen = {}
    for name in sorted(sizes, key=lambda name: zlib.crc32(name.encode())):
        split = next((split for split in held if held[split] < total / 16), None)
        # One long document would be most of its split.
        if split is not None and sizes[name] < total / 64:
            chosen[name] = split
            held[split] += sizes[name]
    return chosen


def _tokenise(text: str) -> str:
    return " ".join(match.group() for match in _TOKEN.finditer(text))


def _documents() -> Iterator[tuple[str, list[str], float]]:
    """Yield name, paragraphs and share of the work done for each topic and module, in the order of their names."""
    # Some distributions leave the reference out; the docstrings are then the corpus.
    with suppress(ImportError):
        from pydoc_data.topics import topics

        for name, content in sorted(topics.items()):
            yield f"reference: {name}", _PARAGRAPH.split(content), 0.0
    library = Path(sysconfig.get_path("stdlib"))
    for number, module in enumerate(MODULES):
        for path in _files(library, module):
            name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
            yield name, _docstrings(path), number / len(MODULES)


def _files(library: Path, module: str) -> list[Path]:
    if (library / f"{module}.py").is_file():
        return [library / f"{module}.py"]
    paths = (library / module).rglob("*.py")
    return sorted(path for path in paths if not {"test", "tests"} & set(path.relative_to(library).parts))


def _docstrings(path: Path) -> list[str]:
    """Return the paragraphs of the docstrings of a module, its classes and its functions, in their order."""
    with warnings.catch_warnings():
        # What the compiler thinks of the standard library is not our user's concern.
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes())
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    docstrings = (ast.get_docstring(node, clean=False) for node in nodes)
    return [paragraph for doc in docstrings if doc for paragraph in _PARAGRAPH.split(inspect.cleandoc(doc))]

"""Aligned files of two languages: which there are in a folder, what each is for, and their pairs of lines.

A set is two files that differ in the language at the end of their names: `train.en` and `train.de`, packed or not, or
WMT's `newstest2014-deen-src.en.sgm` and `newstest2014-deen-ref.de.sgm`.
"""

import html
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from fastweights.data.manifest import DataError
from fastweights.data.sources import UNPACK, Progress, Source, text

_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
_SIDE = re.compile(r"[-.](src|ref)$")
# The first that a set's name fits decides its use; None is for sets that are no part of any.
_USES: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"newstest2013"), "valid"),
    (re.compile(r"newstest2014"), "test"),
    (re.compile(r"news-?(test|syscomb)\d+"), None),
    (re.compile(r"(^|[^a-z])train"), "train"),
    (re.compile(r"(^|[^a-z])(valid|val|dev)"), "valid"),
    (re.compile(r"(^|[^a-z])test"), "test"),
)


class Pair(NamedTuple):
    """One line of each language, with its number in the files, from 1."""

    number: int
    source: str
    target: str


class FileSet(NamedTuple):
    """The two files of a set."""

    source: Path
    target: Path


def language_of(path: Path) -> tuple[str, str]:
    """Return the name of a file's set and the language at its end: ("train", "en") for `train.en.gz`."""
    name = path.name
    for suffix in (*UNPACK, ".sgm", ".sgml"):
        name = name.removesuffix(suffix)
    stem, _, language = name.rpartition(".")
    return _SIDE.sub("", stem), language


def find_sets(folder: Path, languages: tuple[str, str]) -> tuple[dict[str, FileSet], dict[str, str]]:
    """Find the sets of files in a folder by name, and what those of one language alone lack."""
    by_name: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.iterdir()):
        name, language = language_of(path)
        if name and language in languages and path.is_file():
            by_name.setdefault(name, {}).setdefault(language, []).append(path)
    sets, halves = {}, {}
    for name, sides in by_name.items():
        missing = [language for language in languages if language not in sides]
        if missing:
            halves[name] = f"{next(iter(sides.values()))[0]} has no counterpart {name}.{missing[0]} in {folder}"
        else:
            sets[name] = FileSet(_one(sides[languages[0]], "src"), _one(sides[languages[1]], "ref"))
    return sets, halves


def _one(paths: list[Path], side: str) -> Path:
    """Return the only file, or the one for this direction where WMT has two files of one language."""
    if len(paths) == 1:
        return paths[0]
    fitting = [path for path in paths if f"-{side}." in path.name]
    if len(fitting) != 1:
        raise DataError(f"there is more than one file for one set and language: {', '.join(map(str, paths))}; keep one")
    return fitting[0]


def sort_sets(sets: dict[str, FileSet]) -> dict[str, list[str]]:
    """Name the sets for train, valid and test. Those of no known use are for training if none is named so."""
    uses: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    others = []
    for name in sets:
        use = next((use for pattern, use in _USES if pattern.search(name.lower())), "other")
        if use == "other":
            others.append(name)
        elif use is not None:
            uses[use].append(name)
    return uses if uses["train"] else uses | {"train": others}


def named_set(path: Path, folder: Path, languages: tuple[str, str]) -> FileSet:
    """Find the set that an option names: by a path without the language, one of its files, or a name in `folder`."""
    reasons: list[str] = []
    for place in dict.fromkeys((path.parent, folder / path.parent)):
        if place.is_dir():
            sets, halves = find_sets(place, languages)
            for name in (path.name, language_of(path)[0]):
                if name in sets:
                    return sets[name]
                reasons += [halves[name]] if name in halves else []
    raise DataError((reasons or [f"there are no files {path}.{languages[0]} and {path}.{languages[1]}"])[0])


def read_pairs(files: FileSet, progress: Progress) -> Iterator[Pair]:
    """Read the lines of two files side by side, without white space at their ends."""
    number, lines = 0, zip_longest(_lines(files.source, progress), _lines(files.target, lambda fraction: None))
    for number, (source, target) in enumerate(lines, start=1):
        if source is None or target is None:
            short, long = files if source is None else files[::-1]
            ends = f"{short} ends after line {number - 1:,} and {long} continues"
            raise DataError(f"{ends}: the two are not aligned; obtain them again")
        yield Pair(number, source, target)
    if not number:
        raise DataError(f"{files.source} and {files.target} are empty")


def _lines(path: Path, progress: Progress) -> Iterator[str]:
    if ".sgm" in path.name:
        for segment in _SEGMENT.findall("".join(text(Source(path), progress))):
            yield " ".join(html.unescape(segment).split())
        return
    blocks = (block for _, block in Source(path).blocks(progress))
    lines = (line for block in blocks for line in block.removesuffix(b"\n").split(b"\n"))
    for number, line in enumerate(lines, start=1):
        yield decode_line(line, number, path)


def decode_line(line: bytes, number: int, name: object) -> str:
    """Decode a line, without white space at its ends; the first may begin with a byte order mark."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise DataError(f"{name} is not UTF-8: 0x{wrong:02x} in line {number:,}: {error.reason}") from None

"""Aligned files of two languages: which there are in a folder, what each is for, and their pairs of lines.

A set is two files that differ in the language at the end of their names: `train.en` and `train.de`, packed or not, or
WMT's `newstest2014-deen-src.en.sgm` and `newstest2014-deen-ref.de.sgm`.
"""

from __future__ import annotations

import bz2
import gzip
import html
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from fastweights.data.manifest import DataError

_OPEN: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# What unpacking raises: gzip and bz2 have no errors but those of the system.
_DAMAGE = (EOFError, lzma.LZMAError, zlib.error, OSError)
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
Progress = Callable[[float], None]


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
    for suffix in (*_OPEN, ".sgm", ".sgml"):
        name = name.removesuffix(suffix)
    stem, _, language = name.rpartition(".")
    return _SIDE.sub("", stem), language


def find_sets(folder: Path, languages: tuple[str, str]) -> dict[str, FileSet]:
    """Find the sets of files in a folder by name, without those of one language alone, as of WMT's other pairs."""
    return {
        name: FileSet(_one(sides[languages[0]], "src"), _one(sides[languages[1]], "ref"))
        for name, sides in _sides(folder, languages).items()
        if len(sides) == 2
    }


def one_sided(folder: Path, languages: tuple[str, str]) -> dict[str, str]:
    """Say what the sets of one language alone lack, by their names."""
    missing = {}
    for name, sides in _sides(folder, languages).items():
        for language, other in (languages, languages[::-1]):
            if language not in sides:
                missing[name] = f"{sides[other][0]} has no counterpart {name}.{language} in {folder}"
    return missing


def _sides(folder: Path, languages: tuple[str, str]) -> dict[str, dict[str, list[Path]]]:
    """Find the files of each set by language, of those two that are there."""
    sets: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.iterdir()):
        name, language = language_of(path)
        if name and language in languages and path.is_file():
            sets.setdefault(name, {}).setdefault(language, []).append(path)
    return sets


def _one(paths: list[Path], side: str) -> Path:
    """Return the one file, or of WMT's two for one language that which is written for this direction."""
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
            sets = find_sets(place, languages)
            for name in (path.name, language_of(path)[0]):
                if name in sets:
                    return sets[name]
            halves = one_sided(place, languages)
            reasons += [halves[name] for name in (path.name, language_of(path)[0]) if name in halves]
    raise DataError((reasons or [f"there are no files {path}.{languages[0]} and {path}.{languages[1]}"])[0])


def read_pairs(files: FileSet, progress: Progress) -> Iterator[Pair]:
    """Read the lines of two files side by side, without white space at their ends."""
    source, target = _lines(files.source, progress), _lines(files.target, lambda fraction: None)
    number = 0
    while True:
        left, right = next(source, None), next(target, None)
        if left is None or right is None:
            break
        number += 1
        yield Pair(number, left, right)
    if left is not None or right is not None:
        short, long = (files.source, files.target) if left is None else (files.target, files.source)
        raise DataError(
            f"{short} ends after line {number:,} and {long} continues: the two are not aligned; obtain them again"
        )
    if not number:
        raise DataError(f"{files.source} and {files.target} are empty")


def _lines(path: Path, progress: Progress) -> Iterator[str]:
    if ".sgm" in path.name:
        yield from _segments(path)
        return
    size, number = path.stat().st_size, 0
    with path.open("rb") as raw:
        try:
            # Only \n ends a line: other signs that Python takes for ends stand inside lines of the crawled corpora.
            for number, line in enumerate(_unpacked(raw, path), start=1):
                yield decode_line(line, number, path)
                if number % 4096 == 0:
                    progress(raw.tell() / size)
        except _DAMAGE as error:
            raise DataError(f"{path} is damaged or cut short after line {number:,} ({error})") from None


def decode_line(line: bytes, number: int, name: object) -> str:
    """Decode a line, without white space at its ends; the first may begin with a byte order mark."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise DataError(f"{name} is not UTF-8: 0x{wrong:02x} in line {number:,}: {error.reason}") from None


def _segments(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        try:
            text = _unpacked(raw, path).read().decode()
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise DataError(f"{path} is not UTF-8 in line {line:,}: {error.reason}") from None
        except _DAMAGE as error:
            raise DataError(f"{path} is damaged or cut short ({error})") from None
    for segment in _SEGMENT.findall(text):
        yield " ".join(html.unescape(segment).split())


def _unpacked(raw: IO[bytes], path: Path) -> Any:
    return _OPEN[path.suffix](raw) if path.suffix in _OPEN else raw

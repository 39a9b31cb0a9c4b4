"""Where text comes from: files in a folder or a zip archive, read in blocks, or a download the user asked for."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from fastweights.data.manifest import DataError, Report, silent

BLOCK = 1 << 22


@dataclass(frozen=True)
class Source:
    """A file, or a member of a zip archive."""

    path: Path
    member: str | None = None

    @property
    def label(self) -> str:
        return str(self.path) if self.member is None else f"{self.member} in {self.path}"

    @property
    def size(self) -> int:
        if self.member is None:
            return self.path.stat().st_size
        with zipfile.ZipFile(self.path) as archive:
            return archive.getinfo(self.member).file_size

    def read(self, size: int = BLOCK) -> Iterator[bytes]:
        """Read the content, `size` bytes at a time."""
        try:
            if self.member is None:
                with self.path.open("rb") as file:
                    yield from _pieces(file, size)
            else:
                with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                    yield from _pieces(file, size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{self.label} is damaged or cut short ({error}); obtain the archive again") from None


CorpusFiles = dict[str, list[Source]]
"""The files of a corpus by split, and for sentence pairs by split and language: "train", or "train.en"."""


@dataclass(frozen=True)
class CorpusRequest:
    """What to prepare; the options are those of `fastweights data`."""

    source: Path | None = None
    valid: Path | None = None
    test: Path | None = None
    tokens: str = "words"
    min_count: int = 1
    vocabulary_size: int | None = None
    source_language: str = "en"
    target_language: str = "de"
    pairs: int = 0
    held_out: int = 0
    highest: int = 0
    report: Report = silent

    def progress(self, split: str) -> Callable[[float], None]:
        """Return what takes the fraction of a split that has been read."""
        return lambda fraction: self.report(f"reading {split}", fraction)


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    while piece := file.read(size):
        yield piece


def find(source: Path, names: Sequence[str], obtain: str) -> list[Source]:
    """Find the files of these names in a folder, one folder further down, or anywhere in a zip archive."""
    if not source.exists():
        raise DataError(f"there is no {source}; {obtain}")
    if source.is_dir():
        matches = {name: [Source(path) for path in _in_folder(source, name)] for name in names}
        holds = sorted(path.name for path in source.iterdir())
    else:
        members = _members(source, obtain)
        matches = {name: [Source(source, m) for m in members if PurePosixPath(m).name == name] for name in names}
        holds = members
    for name, places in matches.items():
        if not places:
            listing = ", ".join(holds[:8]) + (", …" if len(holds) > 8 else "") or "nothing"
            raise DataError(f"there is no {name} in {source}, which holds {listing}; {obtain}")
        if len(places) > 1:
            raise DataError(f"{name} is there more than once: {', '.join(place.label for place in places)}; name one")
        if not places[0].size:
            raise DataError(f"{places[0].label} is empty; {obtain}")
    return [matches[name][0] for name in names]


def _in_folder(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_file():
        return [folder / name]
    return sorted(path for path in folder.glob(f"*/{name}") if path.is_file())


def _members(path: Path, obtain: str) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX")]
    except zipfile.BadZipFile:
        size = path.stat().st_size
        what = "is empty" if not size else f"({size:,} bytes) is not a zip archive, or one that was cut short"
        raise DataError(f"{path} {what}; {obtain}") from None


def blocks(source: Source) -> Iterator[bytes]:
    """Read the content, cut where a line ends, or at a space where a line is longer than a block."""
    rest = b""
    for piece in source.read():
        data = rest + piece
        cut = data.rfind(b"\n") + 1 or data.rfind(b" ") + 1
        if cut:
            yield data[:cut]
        rest = data[cut:]
    if rest:
        yield rest


def text(source: Source, report: Callable[[float], None], start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Read lines `start` to `stop` of a UTF-8 file, many at a time; the last ends like the others."""
    size, offset, line = source.size, 0, 0
    ended = True
    for block in blocks(source):
        lines = block.count(b"\n")
        chosen, skipped = _lines(block, start - line, None if stop is None else stop - line)
        if chosen:
            try:
                decoded = chosen.decode()
            except UnicodeDecodeError as error:
                where = skipped + error.start
                raise DataError(
                    f"{source.label} is not UTF-8: byte {offset + where:,} (0x{block[where]:02x}), in line "
                    f"{line + block[:where].count(10) + 1:,}: {error.reason}; convert it, or obtain it again if it "
                    "was cut short"
                ) from None
            if offset + skipped == 0:
                decoded = decoded.removeprefix("\ufeff")
            yield decoded
            ended = decoded.endswith("\n")
        offset += len(block)
        line += lines
        report(offset / size)
        if stop is not None and line >= stop:
            break
    if not ended:
        yield "\n"


def _lines(block: bytes, start: int, stop: int | None) -> tuple[bytes, int]:
    """Return lines `start` to `stop` of a block, counted from its first, and how many bytes come before them."""
    lines = block.count(b"\n")
    if start <= 0 and (stop is None or stop > lines):
        return block, 0
    if start > lines:
        return b"", 0
    cut = block.split(b"\n")
    before = sum(len(line) + 1 for line in cut[: max(start, 0)])
    after = len(block) if stop is None or stop > lines else sum(len(line) + 1 for line in cut[:stop])
    return block[before:after], before


def count_lines(source: Source) -> int:
    """Count the lines of a file, a last one without an end among them."""
    lines, last = 0, b"\n"
    for piece in source.read():
        lines += piece.count(b"\n")
        last = piece[-1:]
    return lines + (last != b"\n")


class Hub(NamedTuple):
    """A dataset of the Hugging Face hub, and how to write one of its splits to `folder` as the files of the corpus."""

    dataset: str
    configuration: str
    write: Callable[[Iterable[Any], str, Path], None]

    @property
    def name(self) -> str:
        return f"{self.dataset} {self.configuration}"


def fetch(hub: Hub, folder: Path, obtain: str, report: Report) -> None:
    """Write the files of a dataset of the Hugging Face hub into `folder`."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(f"without --source it is fetched with `pip install 'fastweights[data]'`; or {obtain}") from None
    report(f"fetching {hub.name} from the Hugging Face hub", 0.0)
    try:
        dataset = load_dataset(hub.dataset, hub.configuration)
    except Exception as error:
        # The library reports being off line in many ways, and none of them is a fault of this program.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{hub.name} could not be fetched from the Hugging Face hub ({reason}); {obtain}") from None
    for split, theirs in (("train", "train"), ("valid", "validation"), ("test", "test")):
        hub.write(dataset[theirs], split, folder)


def write_wikitext(rows: Iterable[Any], split: str, folder: Path) -> None:
    """Write the official file of a split from the rows of Salesforce/wikitext."""
    with (folder / f"wiki.{split}.tokens").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(row["text"].rstrip("\n") + "\n" for row in rows)


def write_wmt(rows: Iterable[Any], split: str, folder: Path) -> None:
    """Write aligned files of a split from the rows of wmt/wmt14, each a sentence in two languages."""
    files: dict[str, IO[str]] = {}
    with ExitStack() as stack:
        for row in rows:
            for language, sentence in row["translation"].items():
                if language not in files:
                    path = folder / f"{split}.{language}"
                    files[language] = stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                files[language].write(sentence.replace("\n", " ") + "\n")

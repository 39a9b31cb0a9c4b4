"""Where text comes from: files in a folder or a zip archive, packed or not, or a download the user asked for."""

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from fastweights.data.manifest import DataError, Report, silent
from fastweights.data.tokenizer import Tokenizer

BLOCK = 1 << 22
UNPACK: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
Progress = Callable[[float], None]


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

    @contextmanager
    def _open(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Open the content, unpacked, and what it is unpacked from, whose place says how much was read."""
        try:
            with ExitStack() as stack:
                if self.member is None:
                    raw: IO[bytes] = stack.enter_context(self.path.open("rb"))
                else:
                    archive = stack.enter_context(zipfile.ZipFile(self.path))
                    raw = stack.enter_context(archive.open(self.member))
                yield UNPACK[self.path.suffix](raw) if self.path.suffix in UNPACK else raw, raw
        except (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, OSError) as error:
            # gzip and bz2 report damage as an OSError, which then has no number of the system.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{self.label} is damaged or cut short ({error}); obtain it again") from None

    def blocks(
        self, progress: Progress = lambda fraction: None, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Read lines `start` to `stop`, which \\n alone ends, many at a time, and where in the file these begin."""
        size = self.size
        with self._open() as (file, raw):
            place, left = sum(map(len, islice(file, start))), None if stop is None else stop - start
            while lines := file.readlines(BLOCK)[:left]:
                block = b"".join(lines)
                yield place, block
                place += len(block)
                left = None if left is None else left - len(lines)
                progress(raw.tell() / size)


CorpusFiles = dict[str, list[Source]]
"""The files of a corpus by split, and for sentence pairs by split and language: "train", or "train.en"."""


@dataclass(frozen=True)
class CorpusRequest:
    """What to prepare; the options are those of `fastweights data`."""

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

    def progress(self, stage: str) -> Progress:
        """Begin a stage, and return what takes the fraction of it that is done."""
        self.report(stage, 0.0)
        return partial(self.report, stage)


@dataclass
class Built:
    """What was written into a folder: tokens by `tokenizer`, and what the manifest says of each split, less checksums.

    Sentence pairs have `languages`. `content` is the SHA-256 of all that was read, where counts do not tell a corpus.
    """

    tokenizer: Tokenizer
    splits: dict[str, dict[str, Any]]
    languages: tuple[str, str] | None = None
    content: str = ""

    @property
    def unit(self) -> str:
        """What the splits are counted in."""
        return "tokens" if self.languages is None else "pairs"


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


def text(
    source: Source, progress: Progress = lambda fraction: None, start: int = 0, stop: int | None = None
) -> Iterator[str]:
    """Read lines `start` to `stop` of a UTF-8 file, many at a time; the last ends like the others."""
    line = start
    for place, block in source.blocks(progress, start, stop):
        try:
            decoded = block.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.label} is not UTF-8: byte {place + error.start:,} (0x{block[error.start]:02x}), in line "
                f"{line + block.count(10, 0, error.start) + 1:,}: {error.reason}; convert it, or obtain it again if "
                "it was cut short"
            ) from None
        # Only the last line of a file may be without an end.
        yield (decoded if place else decoded.removeprefix("\ufeff")) + "\n" * (not block.endswith(b"\n"))
        line += block.count(10)


def count_lines(source: Source) -> int:
    """Count the lines of a file, a last one without an end among them."""
    return sum(block.count(10) + (not block.endswith(b"\n")) for _, block in source.blocks())


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

"""Token files from text: one pass over the training text gives both the vocabulary and the tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastweights.data.manifest import SPLITS, TYPE_CODES, DataError, Report, checksum
from fastweights.data.sources import CorpusRequest, Source
from fastweights.data.tokenizer import (
    EOS,
    UNKNOWN,
    ByteTokenizer,
    CharacterTokenizer,
    PieceTokenizer,
    Tokenizer,
    WordTokenizer,
    split_lines,
    split_words,
)

_CHUNK = 1 << 20
# Pieces of --tokens bpe where nobody says how many.
PIECES = 8_192

Texts = Callable[[str], Iterable[str]]
"""Gives the text of a split in parts that cut no line, as often as it is asked."""


@dataclass
class Counts:
    """Tokens of a split; those that are `<unk>`, and those of them that stand for a word outside the vocabulary.

    `text_bytes` and `characters` are of the text in UTF-8, None where it is not known.
    """

    tokens: int = 0
    unknown: int = 0
    out_of_vocabulary: int = 0
    text_bytes: int | None = None
    characters: int | None = None

    def add_text(self, text: str) -> None:
        """Count the bytes and characters of a text."""
        self.text_bytes = (self.text_bytes or 0) + len(text.encode())
        self.characters = (self.characters or 0) + len(text)


@dataclass
class Built:
    """What was written into the folder: `train.bin`, `valid.bin`, `test.bin`."""

    tokenizer: Tokenizer
    splits: dict[str, Counts] = field(default_factory=dict)
    # SHA-256 of all that was read, where counts do not tell one corpus from another.
    content: str = ""

    @property
    def dtype(self) -> str:
        return dtype_for(self.tokenizer.size)

    @property
    def lack(self) -> str | None:
        """What is too little to learn from."""
        few = ((split, counts.tokens) for split, counts in self.splits.items() if counts.tokens < 2)
        return next((f"{split} has {n} tokens, too few to predict one from another" for split, n in few), None)

    def describe(self, folder: Path) -> dict[str, Any]:
        """Return what the manifest says of the splits and their files."""
        entries = {}
        for split in SPLITS:
            file = f"{split}.bin"
            counts = {name: count for name, count in asdict(self.splits[split]).items() if count is not None}
            entries[split] = {"file": file, **counts, **checksum(folder / file)}
        return {"splits": entries}


def dtype_for(size: int) -> str:
    """Return the smallest type that holds every number of a vocabulary."""
    return "uint16" if size <= 1 << 16 else "uint32"


def build_text(texts: Texts, folder: Path, request: CorpusRequest) -> Built:
    """Build with the tokens that the request asks for; what has to be learned comes from the training text alone."""
    size, min_count = request.vocabulary_size, request.min_count
    if request.tokens == "words":
        return build_words(texts, folder, request.report, min_count, size)
    tokenizer: Tokenizer = ByteTokenizer()
    if request.tokens == "characters":
        tokenizer = CharacterTokenizer.train(texts("train"), size, min_count)
    elif request.tokens == "bpe":
        size = size or PIECES

        def lines() -> Iterator[str]:
            for text in texts("train"):
                yield from split_lines(text)
            # The library merges pairs when it has read all, and says nothing while it does.
            request.report(f"merging to {size:,} pieces", 0.0)

        tokenizer = PieceTokenizer.train(lines(), size, min_count)
    return Built(tokenizer, {split: write_text(texts(split), tokenizer, folder / f"{split}.bin") for split in SPLITS})


def build_words(texts: Texts, folder: Path, report: Report, min_count: int = 1, max_words: int | None = None) -> Built:
    """Build from words between white space; `<eos>` ends a line.

    The vocabulary comes from the training text: `<eos>`, then the words by frequency, of equally frequent ones the
    first seen first. Words that fall to a limit become `<unk>`, which stands second if the text has none of its own.
    """
    if max_words is not None and max_words < 2:
        raise DataError(f"--vocabulary-size must be at least 2, got {max_words}: {EOS} and {UNKNOWN} are two words")
    # A new word gets the next number when it is looked up, without a line of Python for each token.
    index: defaultdict[str, int] = defaultdict()
    index.default_factory = index.__len__
    _ = index[EOS]
    counts: Counter[int] = Counter()
    train = Counts()
    seen = folder / "train.seen"
    with seen.open("wb") as file:
        for text in texts("train"):
            train.add_text(text)
            numbers = array("I", map(index.__getitem__, split_words(text)))
            counts.update(numbers)
            numbers.tofile(file)
    words = list(index)
    tokenizer = WordTokenizer(_choose(words, counts, min_count, max_words))
    built = Built(tokenizer, {"train": train})
    table = tokenizer.numbers(words)
    lost = sum(counts[number] for number, word in enumerate(words) if word not in tokenizer)
    train.tokens = total = counts.total()
    own = counts[index[UNKNOWN]] if UNKNOWN in index else 0
    train.unknown, train.out_of_vocabulary = own + lost, lost
    _renumber(seen, folder / "train.bin", table, TYPE_CODES[built.dtype], lambda n: report("writing train", n / total))
    seen.unlink()
    for split in SPLITS[1:]:
        built.splits[split] = write_text(texts(split), tokenizer, folder / f"{split}.bin")
    return built


def _choose(words: list[str], counts: Counter[int], min_count: int, max_words: int | None) -> list[str]:
    # Python's sort keeps the order of equals, which is that of first appearance.
    ranked = sorted(range(1, len(words)), key=counts.__getitem__, reverse=True)
    kept = [words[number] for number in ranked if counts[number] >= min_count]
    limit = len(words) + 1 if max_words is None else max_words
    chosen = [EOS, *kept][:limit]
    return chosen if UNKNOWN in chosen else [EOS, UNKNOWN, *kept][:limit]


def _renumber(source: Path, target: Path, table: list[int], code: str, progress: Callable[[int], None]) -> None:
    """Write the numbers in `source` as `table` has them."""
    total, done = source.stat().st_size // 4, 0
    with source.open("rb") as old, target.open("wb") as new:
        while done < total:
            numbers = array("I")
            numbers.fromfile(old, min(total - done, _CHUNK))
            array(code, map(table.__getitem__, numbers)).tofile(new)
            done += len(numbers)
            progress(done)


def write_text(texts: Iterable[str], tokenizer: Tokenizer, path: Path) -> Counts:
    """Write a text with a tokenizer that is there already."""
    counts, code = Counts(), TYPE_CODES[dtype_for(tokenizer.size)]
    with path.open("wb") as file:
        for text in texts:
            numbers = tokenizer.encode(text)
            counts.tokens += len(numbers)
            counts.add_text(text)
            if tokenizer.unknown is not None:
                unknown = numbers.count(tokenizer.unknown)
                counts.unknown += unknown
                counts.out_of_vocabulary += unknown - split_words(text).count(UNKNOWN)
            array(code, numbers).tofile(file)
    return counts


def build_bytes(source: Source, folder: Path, report: Report) -> Built:
    """Build from bytes as they are: the first 90 % for training, 5 % and 5 % to validate and test."""
    built, size, content = Built(ByteTokenizer()), source.size, hashlib.sha256()
    ends = dict(zip(SPLITS, (size * 90 // 100, size * 95 // 100, size), strict=True))
    files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    try:
        place = 0
        for piece in source.read():
            content.update(piece)
            for split in SPLITS:
                part = piece[: max(ends[split] - place, 0)]
                piece, place = piece[len(part) :], place + len(part)
                # Each byte becomes the low half of a little-endian uint16.
                wide = bytearray(2 * len(part))
                wide[::2] = part
                files[split].write(wide)
            report("reading", place / size)
    finally:
        for file in files.values():
            file.close()
    starts = (0, *ends.values())
    sizes = {split: ends[split] - start for split, start in zip(SPLITS, starts, strict=False)}
    built.splits = {split: Counts(size, text_bytes=size) for split, size in sizes.items()}
    built.content = content.hexdigest()
    return built


def build_ids(ids: Path, words: Path, texts: Texts, folder: Path, report: Report) -> Built:
    """Build from a .npy file of numbers into a vocabulary file for training, and from text for valid and test."""
    import numpy as np

    try:
        tokenizer = WordTokenizer.load(words.read_bytes())
        numbers = np.load(ids, mmap_mode="r")
    except (UnicodeDecodeError, DataError) as error:
        raise DataError(f"{words} is not a vocabulary, one word a line in UTF-8: {error}") from None
    except (ValueError, EOFError) as error:
        raise DataError(f"{ids} is not a whole .npy file: {error}") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise DataError(f"{ids} holds {numbers.dtype} of shape {numbers.shape}; token numbers are integers (N,)")
    built = Built(tokenizer, {"train": Counts(int(numbers.size))})
    wide = np.dtype(built.dtype)
    with (folder / "train.bin").open("wb") as file:
        for start in range(0, numbers.size, _CHUNK):
            part = numbers[start : start + _CHUNK]
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= tokenizer.size:
                raise DataError(
                    f"{ids} holds the number {low if low < 0 else high}; {words} has words 0 … {tokenizer.size - 1}"
                )
            if tokenizer.unknown is not None:
                built.splits["train"].unknown += int((part == tokenizer.unknown).sum())
            file.write(part.astype(wide).tobytes())
            report("reading train", start / numbers.size)
    for split in SPLITS[1:]:
        built.splits[split] = write_text(texts(split), tokenizer, folder / f"{split}.bin")
    return built

"""Token files from text: one pass over the training text gives both the vocabulary and the tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastweights.data.manifest import SPLITS, TYPE_CODES, DataError, Report, checksum
from fastweights.data.sources import Source
from fastweights.data.text.vocabulary import EOS, UNKNOWN, ByteVocabulary, Vocabulary, WordVocabulary, split_words

_CHUNK = 1 << 20


@dataclass
class Counts:
    """Tokens of a split; those that are `<unk>`, and those of them that stand for a word outside the vocabulary."""

    tokens: int = 0
    unknown: int = 0
    out_of_vocabulary: int = 0


@dataclass
class Built:
    """What was written into the folder: `train.bin`, `valid.bin`, `test.bin`."""

    vocabulary: Vocabulary
    splits: dict[str, Counts] = field(default_factory=dict)
    # SHA-256 of all that was read, where counts do not tell one corpus from another.
    content: str = ""

    @property
    def dtype(self) -> str:
        return dtype_for(self.vocabulary)

    @property
    def lack(self) -> str | None:
        """What is too little to learn from."""
        few = ((split, counts.tokens) for split, counts in self.splits.items() if counts.tokens < 2)
        return next((f"{split} has {n} tokens, too few to predict one from another" for split, n in few), None)

    def describe(self, folder: Path) -> dict[str, Any]:
        """Return what the manifest says of the splits and their files."""
        names = {split: f"{split}.bin" for split in SPLITS}
        entries = {s: {"file": name, **asdict(self.splits[s]), **checksum(folder / name)} for s, name in names.items()}
        return {"splits": entries}


def dtype_for(vocabulary: Sized) -> str:
    """Return the smallest type that holds every number."""
    return "uint16" if len(vocabulary) <= 1 << 16 else "uint32"


def build_words(
    texts: Mapping[str, Iterable[str]], folder: Path, report: Report, min_count: int = 1, max_words: int | None = None
) -> Built:
    """Build from words between white space; `texts` has each split in pieces that cut no word, `<eos>` ends a line.

    The vocabulary comes from the training text: `<eos>`, then the words by frequency, of equally frequent ones the
    first seen first. Words that fall to a limit become `<unk>`, which stands second if the text has none of its own.
    """
    # A new word gets the next number when it is looked up, without a line of Python for each token.
    index: defaultdict[str, int] = defaultdict()
    index.default_factory = index.__len__
    _ = index[EOS]
    counts: Counter[int] = Counter()
    seen = folder / "train.seen"
    with seen.open("wb") as file:
        for text in texts["train"]:
            numbers = array("I", map(index.__getitem__, split_words(text)))
            counts.update(numbers)
            numbers.tofile(file)
    words = list(index)
    vocabulary = WordVocabulary(_choose(words, counts, min_count, max_words))
    built = Built(vocabulary)
    table = vocabulary.numbers(words)
    lost = sum(counts[number] for number, word in enumerate(words) if word not in vocabulary)
    total = counts.total()
    own = counts[index[UNKNOWN]] if UNKNOWN in index else 0
    built.splits["train"] = Counts(total, own + lost, lost)
    _renumber(seen, folder / "train.bin", table, TYPE_CODES[built.dtype], lambda n: report("writing train", n / total))
    seen.unlink()
    for split in SPLITS[1:]:
        built.splits[split] = write_text(texts[split], vocabulary, folder / f"{split}.bin")
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


def write_text(texts: Iterable[str], vocabulary: WordVocabulary, path: Path) -> Counts:
    """Write a text with a vocabulary that is there already."""
    counts, code = Counts(), TYPE_CODES[dtype_for(vocabulary)]
    with path.open("wb") as file:
        for text in texts:
            words = split_words(text)
            numbers = vocabulary.numbers(words)
            counts.tokens += len(numbers)
            if vocabulary.unknown is not None:
                unknown = numbers.count(vocabulary.unknown)
                counts.unknown += unknown
                counts.out_of_vocabulary += unknown - words.count(UNKNOWN)
            array(code, numbers).tofile(file)
    return counts


def build_bytes(source: Source, folder: Path, report: Report) -> Built:
    """Build from bytes as they are: the first 90 % for training, 5 % and 5 % to validate and test."""
    built, size, content = Built(ByteVocabulary()), source.size, hashlib.sha256()
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
    built.splits = {split: Counts(ends[split] - start) for split, start in zip(SPLITS, starts, strict=False)}
    built.content = content.hexdigest()
    return built


def build_ids(ids: Path, words: Path, texts: Mapping[str, Iterable[str]], folder: Path, report: Report) -> Built:
    """Build from a .npy file of numbers into a vocabulary file for training, and from text for valid and test."""
    import numpy as np

    try:
        vocabulary = WordVocabulary.load(words.read_bytes())
        numbers = np.load(ids, mmap_mode="r")
    except (UnicodeDecodeError, DataError) as error:
        raise DataError(f"{words} is not a vocabulary, one word a line in UTF-8: {error}") from None
    except (ValueError, EOFError) as error:
        raise DataError(f"{ids} is not a whole .npy file: {error}") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise DataError(f"{ids} holds {numbers.dtype} of shape {numbers.shape}; token numbers are integers (N,)")
    built = Built(vocabulary, {"train": Counts(int(numbers.size))})
    wide = np.dtype(built.dtype)
    with (folder / "train.bin").open("wb") as file:
        for start in range(0, numbers.size, _CHUNK):
            part = numbers[start : start + _CHUNK]
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= len(vocabulary):
                raise DataError(
                    f"{ids} holds the number {low if low < 0 else high}; {words} has words 0 … {len(vocabulary) - 1}"
                )
            if vocabulary.unknown is not None:
                built.splits["train"].unknown += int((part == vocabulary.unknown).sum())
            file.write(part.astype(wide).tobytes())
            report("reading train", start / numbers.size)
    for split in SPLITS[1:]:
        built.splits[split] = write_text(texts[split], vocabulary, folder / f"{split}.bin")
    return built

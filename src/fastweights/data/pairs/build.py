"""Sentence pairs to files: a shared vocabulary, the numbers of each language, and where each sentence begins.

OUT/train.en.bin   train.de.bin         token numbers of all sentences, uint16 or uint32, without specials
OUT/train.en.starts  train.de.starts    uint64: where each sentence begins, and where the last one ends
OUT/valid.en  valid.de  test.en …       the lines as they were read, which scores are computed on
OUT/tokenizer.json                      see `bpe`
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fastweights.data.manifest import SPLITS, TYPE_CODES, DataError, checksum
from fastweights.data.pairs.bpe import PairTokenizer
from fastweights.data.pairs.files import FileSet, Pair, Progress, find_sets, named_set, one_sided, read_pairs, sort_sets
from fastweights.data.sources import CorpusFiles, CorpusRequest, Source
from fastweights.data.text.build import dtype_for

_CHUNK = 1 << 14
SIDES = ("source", "target")
Pairs = Callable[[str, Progress], Iterator[Pair]]


@dataclass
class PairCounts:
    """Pairs of a split and the tokens of each side; training pairs that were left out because a side is empty."""

    pairs: int = 0
    left_out: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class BuiltPairs:
    """What was written into the folder."""

    tokenizer: PairTokenizer
    languages: tuple[str, str]
    splits: dict[str, PairCounts] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return dtype_for(self.tokenizer.size)

    @property
    def lack(self) -> str | None:
        """What is too little to learn from."""
        empty = (split for split, counts in self.splits.items() if not counts.pairs)
        return next((f"{split} has no pair of lines with something in both languages" for split in empty), None)

    def describe(self, folder: Path) -> dict[str, Any]:
        """Return what the manifest says of the splits and their files."""
        splits = {split: self._entry(split, counts, folder) for split, counts in self.splits.items()}
        return {"layout": "pairs", "languages": list(self.languages), "splits": splits}

    def _entry(self, split: str, counts: PairCounts, folder: Path) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for side, language, tokens in zip(SIDES, self.languages, counts.tokens, strict=True):
            files[side] = {"tokens": tokens, **_file(folder, f"{split}.{language}.bin")}
            files[f"{side}_starts"] = _file(folder, f"{split}.{language}.starts")
            if split != "train":
                files[f"{side}_text"] = _file(folder, f"{split}.{language}")
        return {"pairs": counts.pairs, "left_out": counts.left_out, "files": files}


def _file(folder: Path, name: str) -> dict[str, Any]:
    return {"file": name, **checksum(folder / name)}


def find_pairs(request: CorpusRequest, obtain: str) -> CorpusFiles:
    """Find the files of each split and language, as `train.en`: by the names of the files, or by --valid and --test."""
    folder, languages = request.source, (request.source_language, request.target_language)
    assert folder is not None
    if languages[0] == languages[1]:
        raise DataError(f"source and target language are both {languages[0]!r}")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; {obtain}")
    sets, halves = find_sets(folder, languages), one_sided(folder, languages)
    if halves:
        request.report(f"left out, being in one language only: {', '.join(sorted(halves))}", 0.0)
    uses = {split: [sets[name] for name in names] for split, names in sort_sets(sets).items()}
    for split, named in (("valid", request.valid), ("test", request.test)):
        if named is not None:
            uses[split] = [named_set(named, folder, languages)]
        elif len(uses[split]) > 1:
            names = ", ".join(sorted(files.source.name for files in uses[split]))
            raise DataError(f"{folder} has {names} for {split}; name one of them with --{split}")
    held = [files for split in SPLITS[1:] for files in uses[split]]
    uses["train"] = [files for files in uses["train"] if files not in held]
    for split in SPLITS[:2]:
        if not uses[split]:
            holds = ", ".join(sorted(sets)) or f"no two files that end in .{languages[0]} and .{languages[1]}"
            hint = "" if split == "train" else " (or name it with --valid)"
            known = "; ".join([holds, *halves.values()])
            raise DataError(f"{folder} has nothing for {split}{hint}, it holds {known}; {obtain}")
    return {
        f"{split}.{language}": [Source(files[side]) for files in uses[split]]
        for split in SPLITS
        for side, language in enumerate(languages)
        if uses[split]
    }


def build_from_files(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> BuiltPairs:
    """Read the files that were found, once for the vocabulary and once more for the numbers."""
    languages = (request.source_language, request.target_language)
    splits = [split for split in SPLITS if f"{split}.{languages[0]}" in sources]

    def read(split: str, progress: Progress) -> Iterator[Pair]:
        sides = [sources[f"{split}.{language}"] for language in languages]
        sets = [FileSet(source.path, target.path) for source, target in zip(*sides, strict=True)]
        for number, files in enumerate(sets):
            part = _part(progress, number, len(sets))
            for pair in read_pairs(files, part):
                if pair.source and pair.target:
                    yield pair
                elif split == "train":
                    yield pair._replace(source="", target="")
                else:
                    empty = files.target if pair.source else files.source
                    raise DataError(f"{empty} has nothing in line {pair.number:,}; {split} must be whole to be scored")

    return build_pairs(read, splits, languages, folder, request)


def _part(progress: Progress, number: int, count: int) -> Progress:
    """Return progress in part `number` of `count` as progress in the whole."""
    return lambda fraction: progress((number + fraction) / count)


def build_pairs(
    read: Pairs, splits: list[str], languages: tuple[str, str], folder: Path, request: CorpusRequest
) -> BuiltPairs:
    """Write the pairs that `read` gives for each split; a pair of empty lines is one to leave out."""
    size = request.vocabulary_size
    assert size is not None
    built = BuiltPairs(PairTokenizer.train(_texts(read, size, request), size), languages)
    for split in splits:
        progress = partial(request.report, f"writing {split}")
        progress(0.0)
        built.splits[split] = _write(read(split, progress), split, built, folder)
    return built


def _texts(read: Pairs, size: int, request: CorpusRequest) -> Iterator[str]:
    """Yield both sides of the training pairs, for the vocabulary."""
    request.progress("train")(0.0)
    for pair in read("train", request.progress("train")):
        if pair.source:
            yield from pair[1:]
    # The library merges pairs when it has read all, and says nothing while it does.
    request.report(f"merging to {size:,} pieces", 0.0)


def _write(pairs: Iterator[Pair], split: str, built: BuiltPairs, folder: Path) -> PairCounts:
    counts, code = PairCounts(), TYPE_CODES[built.dtype]
    with ExitStack() as stack:

        def create(suffix: str) -> list[Any]:
            paths = [folder / f"{split}.{language}{suffix}" for language in built.languages]
            return [stack.enter_context(path.open("wb")) for path in paths]

        numbers, starts = create(".bin"), create(".starts")
        texts = create("") if split != "train" else []
        for file in starts:
            array("Q", [0]).tofile(file)
        while chunk := list(islice(pairs, _CHUNK)):
            kept = [pair[1:] for pair in chunk if pair.source]
            counts.pairs += len(kept)
            counts.left_out += len(chunk) - len(kept)
            for side, lines in enumerate(zip(*kept, strict=True)):
                rows = built.tokenizer.encode_batch(lines)
                ends = array("Q")
                for row in rows:
                    array(code, row).tofile(numbers[side])
                    counts.tokens[side] += len(row)
                    ends.append(counts.tokens[side])
                ends.tofile(starts[side])
                if texts:
                    texts[side].write("".join(f"{line}\n" for line in lines).encode())
    return counts

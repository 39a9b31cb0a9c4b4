"""Sentence pairs to files: a shared vocabulary, the numbers of each language, and where each sentence begins.

OUT/train.en.bin   train.de.bin         token numbers of all sentences, uint16 or uint32, without specials
OUT/train.en.starts  train.de.starts    uint64: where each sentence begins, and where the last one ends
OUT/valid.en  valid.de  test.en …       the lines as they were read, which scores are computed on
OUT/tokenizer.json                      see `bpe`
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from fastweights.data.manifest import SPLITS, TYPE_CODES, DataError
from fastweights.data.pairs.bpe import PairTokenizer
from fastweights.data.pairs.files import FileSet, Pair, find_sets, named_set, read_pairs, sort_sets
from fastweights.data.sources import Built, CorpusFiles, CorpusRequest, Progress, Source

_CHUNK = 1 << 14
SIDES = ("source", "target")
Pairs = Callable[[str, Progress], Iterator[Pair]]


def find_pairs(folder: Path, request: CorpusRequest, obtain: str) -> CorpusFiles:
    """Find the files of each split and language, as `train.en`: by the names of the files, or by --valid and --test."""
    languages = (request.source_language, request.target_language)
    if languages[0] == languages[1]:
        raise DataError(f"source and target language are both {languages[0]!r}")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; {obtain}")
    sets, halves = find_sets(folder, languages)
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


def build_from_files(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> Built:
    """Read the files that were found, once for the vocabulary and once more for the numbers."""
    languages = (request.source_language, request.target_language)
    splits = [split for split in SPLITS if f"{split}.{languages[0]}" in sources]

    def read(split: str, progress: Progress) -> Iterator[Pair]:
        sides = [sources[f"{split}.{language}"] for language in languages]
        sets = [FileSet(source.path, target.path) for source, target in zip(*sides, strict=True)]
        for number, files in enumerate(sets):

            def report(fraction: float, before: int = number) -> None:
                progress((before + fraction) / len(sets))

            for pair in read_pairs(files, report):
                if pair.source and pair.target:
                    yield pair
                elif split == "train":
                    yield pair._replace(source="", target="")
                else:
                    empty = files.target if pair.source else files.source
                    raise DataError(f"{empty} has nothing in line {pair.number:,}; {split} must be whole to be scored")

    return build_pairs(read, splits, languages, folder, request)


def build_pairs(
    read: Pairs, splits: list[str], languages: tuple[str, str], folder: Path, request: CorpusRequest
) -> Built:
    """Write the pairs that `read` gives for each split; a pair of empty lines is one to leave out."""

    def training_text() -> Iterator[str]:
        for pair in read("train", request.progress("reading train")):
            if pair.source:
                yield from pair[1:]
        # The library merges pairs when it has read all, and says nothing while it does.
        request.report("making the vocabulary", 0.0)

    tokenizer = PairTokenizer.train(training_text(), request.vocabulary_size)
    entries = {}
    for split in splits:
        pairs = read(split, request.progress(f"writing {split}"))
        entries[split] = _write(pairs, split, tokenizer, languages, folder)
    return Built(tokenizer, entries, languages)


def _write(
    pairs: Iterator[Pair], split: str, tokenizer: PairTokenizer, languages: tuple[str, str], folder: Path
) -> dict[str, Any]:
    """Write a split, and return what the manifest says of it: training pairs with an empty side are `left_out`."""
    total, left_out, tokens, code = 0, 0, [0, 0], TYPE_CODES[tokenizer.dtype]
    with ExitStack() as stack:

        def create(suffix: str) -> list[Any]:
            paths = [folder / f"{split}.{language}{suffix}" for language in languages]
            return [stack.enter_context(path.open("wb")) for path in paths]

        numbers, starts = create(".bin"), create(".starts")
        texts = create("") if split != "train" else []
        for file in starts:
            array("Q", [0]).tofile(file)
        while chunk := list(islice(pairs, _CHUNK)):
            kept = [pair[1:] for pair in chunk if pair.source]
            total += len(kept)
            left_out += len(chunk) - len(kept)
            for side, lines in enumerate(zip(*kept, strict=True)):
                rows = tokenizer.encode_batch(lines)
                ends = array("Q", accumulate(map(len, rows), initial=tokens[side]))[1:]
                ends.tofile(starts[side])
                tokens[side] = ends[-1]
                array(code, chain.from_iterable(rows)).tofile(numbers[side])
                if texts:
                    texts[side].write("".join(f"{line}\n" for line in lines).encode())
    files: dict[str, Any] = {}
    for name, language, count in zip(SIDES, languages, tokens, strict=True):
        files[name] = {"file": f"{split}.{language}.bin", "tokens": count}
        files[f"{name}_starts"] = {"file": f"{split}.{language}.starts"}
        if texts:
            files[f"{name}_text"] = {"file": f"{split}.{language}"}
    return {"pairs": total, "left_out": left_out, "files": files}

"""Token files from text: once through the training text for the vocabulary, and once through all for the tokens."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from fastweights.data.manifest import SPLITS, TYPE_CODES, DataError
from fastweights.data.sources import Built, CorpusFiles, CorpusRequest, Progress, count_lines, text
from fastweights.data.tokenizer import TOKENIZERS, UNKNOWN, ByteTokenizer, Tokenizer, WordTokenizer, split_words

_CHUNK = 1 << 20

Read = Callable[[str, Progress], Iterable[str]]
"""Gives the text of a split in parts that cut no line, as often as it is asked."""


def build_files(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> Built:
    """Build from files of text; where there are none for valid and test, the last tenth of the lines is for them."""
    if "valid" in sources:
        return build_text(_whole(sources), folder, request)
    counts = [count_lines(source) for source in sources["train"]]
    total = sum(counts)
    if total < 20:
        raise DataError(f"lines in the text: {total}, too few to split 90/5/5; give --valid and --test files")
    bounds = dict(zip(SPLITS, pairwise(_ends(total)), strict=True))

    def read(split: str, progress: Progress) -> Iterator[str]:
        start, stop = bounds[split]
        for source, lines in zip(sources["train"], counts, strict=True):
            if start < lines and stop > 0:
                yield from text(source, progress, max(start, 0), min(stop, lines))
            start, stop = start - lines, stop - lines

    return build_text(read, folder, request)


def _whole(sources: CorpusFiles) -> Read:
    return lambda split, progress: chain.from_iterable(text(source, progress) for source in sources[split])


def _ends(total: int) -> tuple[int, ...]:
    """Return where train, valid and test begin and end: at 90 and 95 %."""
    return (0, total * 90 // 100, total * 95 // 100, total)


def build_text(read: Read, folder: Path, request: CorpusRequest) -> Built:
    """Build with the tokens that the request asks for; what has to be learned comes from the training text alone."""

    def training_text() -> Iterator[str]:
        yield from read("train", request.progress("reading train"))
        # The libraries say nothing from here on.
        request.report("making the vocabulary", 0.0)

    kind = TOKENIZERS[request.tokens]
    tokenizer = kind.train(training_text(), request.vocabulary_size, request.min_count)
    return Built(tokenizer, {split: _write(split, read, tokenizer, folder, request) for split in SPLITS})


def _write(split: str, read: Read, tokenizer: Tokenizer, folder: Path, request: CorpusRequest) -> dict[str, Any]:
    """Write a split; count its tokens, how many are `<unk>`, and how many of these stand for another word."""
    counts, code = Counter[str](), TYPE_CODES[tokenizer.dtype]
    with (folder / f"{split}.bin").open("wb") as file:
        for part in read(split, request.progress(f"writing {split}")):
            if isinstance(tokenizer, WordTokenizer):
                words = split_words(part)
                numbers = tokenizer.numbers(words)
                unknown = 0 if tokenizer.unknown is None else numbers.count(tokenizer.unknown)
                counts.update(unknown=unknown, out_of_vocabulary=unknown - words.count(UNKNOWN))
            else:
                numbers = tokenizer.encode(part)
            array(code, numbers).tofile(file)
            counts.update(tokens=len(numbers), text_bytes=len(part.encode()), characters=len(part))
    return _entry(split, **counts)


def _entry(split: str, tokens: int = 0, **counts: int) -> dict[str, Any]:
    """Return what the manifest says of a split; the size of its text is left out where it is not known."""
    return {"file": f"{split}.bin", "tokens": tokens, "unknown": 0, "out_of_vocabulary": 0, **counts}


def build_bytes(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> Built:
    """Build from bytes as they are: the first 90 % for training, 5 % and 5 % to validate and test."""
    import numpy as np

    content = b"".join(block for _, block in sources["train"][0].blocks(request.progress("reading")))
    built = Built(ByteTokenizer(), {}, content=hashlib.sha256(content).hexdigest())
    for split, (start, stop) in zip(SPLITS, pairwise(_ends(len(content))), strict=True):
        part = np.frombuffer(content, np.uint8)[start:stop]
        part.astype(built.tokenizer.dtype).tofile(folder / f"{split}.bin")
        built.splits[split] = _entry(split, len(part), text_bytes=len(part))
    return built


def build_ids(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> Built:
    """Build from a .npy file of numbers into a vocabulary file for training, and from text for valid and test."""
    import numpy as np

    ids, words = sources["train"][0].path, sources["vocabulary"][0].path
    try:
        tokenizer = WordTokenizer.load(words.read_bytes())
        numbers = np.load(ids, mmap_mode="r")
    except (UnicodeDecodeError, DataError) as error:
        raise DataError(f"{words} is not a vocabulary, one word a line in UTF-8: {error}") from None
    except (ValueError, EOFError) as error:
        raise DataError(f"{ids} is not a whole .npy file: {error}") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise DataError(f"{ids} holds {numbers.dtype} of shape {numbers.shape}; token numbers are integers (N,)")
    unknown, progress = 0, request.progress("reading train")
    with (folder / "train.bin").open("wb") as file:
        for start in range(0, numbers.size, _CHUNK):
            part = numbers[start : start + _CHUNK]
            wrong = part[(part < 0) | (part >= tokenizer.size)]
            if len(wrong):
                raise DataError(f"{ids} holds the number {wrong[0]}; {words} has words 0 … {tokenizer.size - 1}")
            if tokenizer.unknown is not None:
                unknown += int((part == tokenizer.unknown).sum())
            part.astype(tokenizer.dtype).tofile(file)
            progress(start / numbers.size)
    splits = {split: _write(split, _whole(sources), tokenizer, folder, request) for split in SPLITS[1:]}
    return Built(tokenizer, {"train": _entry("train", int(numbers.size), unknown=unknown), **splits})

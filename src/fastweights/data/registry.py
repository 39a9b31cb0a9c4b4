"""The corpora that can be prepared: how to find the files of each and build it. To add one, add a row to CORPORA."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.data.manifest import SPLITS, DataError
from fastweights.data.pairs import numbers
from fastweights.data.pairs.build import build_from_files, find_pairs
from fastweights.data.sources import (
    Built,
    CorpusFiles,
    CorpusRequest,
    Hub,
    Source,
    find,
    write_wikitext,
    write_wmt,
)
from fastweights.data.text import embedded
from fastweights.data.text.build import build_bytes, build_files, build_ids, build_text


class Official(NamedTuple):
    """The counts of a published corpus: tokens, or the least and most pairs, as copies of it were cleaned differently.

    `words` is the size of the vocabulary, and `content` the SHA-256 of all that is read, where they tell a corpus.
    """

    name: str
    words: int | None
    train: int | tuple[int, int]
    valid: int | tuple[int, int]
    test: int | tuple[int, int]
    content: str = ""

    def differences(self, built: Built) -> list[str]:
        """Say in what a corpus that was built differs."""
        wrong = []
        counts = {f"{built.unit} in {split}": built.splits.get(split, {}).get(built.unit, 0) for split in SPLITS}
        counts = {"in the vocabulary": built.tokenizer.size, **counts}
        for (what, count), bounds in zip(counts.items(), self[1:5], strict=True):
            low, high = bounds if isinstance(bounds, tuple) else (bounds or count, bounds or count)
            if not low <= count <= high:
                wrong.append(f"{count:,} {what}, not {low:,}" + (f" to {high:,}" if high > low else ""))
        if built.content != self.content:
            wrong.append(f"SHA-256 {built.content}, not {self.content}")
        return wrong


@dataclass(frozen=True)
class CorpusKind:
    """A corpus that can be prepared: how to find its files, how to build it from them, and where they can be had.

    `find` is None where it needs no files. `needs` are the packages beyond the core installation that it is built with.
    A text of the user's own is `named_by_out`, the folder it is written to; other corpora after their files.
    """

    what: str
    obtain: str
    find: Callable[[Path, CorpusRequest, str], CorpusFiles] | None
    build: Callable[[CorpusFiles, Path, CorpusRequest], Built]
    official: Official | None = None
    hub: Hub | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    named_by_out: bool = False


def _find_wikitext(source: Path, request: CorpusRequest, obtain: str) -> CorpusFiles:
    files = find(source, [f"wiki.{split}.tokens" for split in SPLITS], obtain)
    return {split: [file] for split, file in zip(SPLITS, files, strict=True)}


def _find_enwik8(source: Path, request: CorpusRequest, obtain: str) -> CorpusFiles:
    if source.is_file() and source.suffix != ".zip":
        return {"train": [_file(source, obtain)]}
    return {"train": find(source, ["enwik8"], obtain)}


def _find_text(source: Path, request: CorpusRequest, obtain: str) -> CorpusFiles:
    if source.is_dir():
        train = [Source(path) for path in sorted(source.glob("*.txt")) if path.stat().st_size]
        if not train:
            raise DataError(f"there is no .txt file with anything in it in {source}; {obtain}")
    else:
        train = [_file(source, obtain)]
    if (request.valid is None) != (request.test is None):
        raise DataError("give both --valid and --test, or neither to have the last tenth of the lines cut off for them")
    if request.valid is None or request.test is None:
        return {"train": train}
    return {"train": train, "valid": [_file(request.valid, obtain)], "test": [_file(request.test, obtain)]}


def _find_ids(source: Path, request: CorpusRequest, obtain: str) -> CorpusFiles:
    if not source.is_dir():
        raise DataError(f"{source} is not a folder; {obtain}")
    ids = sorted(source.glob("train*.npy"))
    words = [path for name in ("vocab.txt", "vocabulary.txt") if (path := source / name).is_file()]
    if len(ids) != 1 or len(words) != 1:
        raise DataError(f"{source} has {len(ids)} files train*.npy and {len(words)} vocabularies; {obtain}")
    files = {"train": [Source(ids[0])], "vocabulary": [Source(words[0])]}
    for split, named in (("valid", request.valid), ("test", request.test)):
        files[split] = [_file(named or source / f"wiki.{split}.tokens", obtain)]
    return files


def _file(path: Path, obtain: str) -> Source:
    if not path.is_file():
        raise DataError(f"there is no file {path}; {obtain}")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty; {obtain}")
    return Source(path)


def _build_embedded(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> Built:
    texts = embedded.texts(request.report, spaced=request.tokens == "words")
    return build_text(lambda split, progress: texts[split], folder, request)


PUBLISHED_SETS = {
    "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b": "WikiText-103",
    "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9": "WikiText-103",
    "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8": "WikiText-2",
    "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0": "WikiText-2",
}
"""SHA-256 of a published wiki.valid.tokens or wiki.test.tokens -> its corpus: others are scored on them too."""

_TOKENS = {"tokens": "words", "min_count": 1, "vocabulary_size": None}
_FILES = {"valid": None, "test": None}
_LANGUAGES = {"source_language": "en", "target_language": "de"}


def _wikitext(name: str, words: int, tokens: int) -> CorpusKind:
    """Describe one of the corpora of Merity et al., which share their validation and test set."""
    configuration = f"{name.lower()}-v1"
    return CorpusKind(
        f"{name}, words",
        "give a folder or zip archive with its wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens: "
        f"{configuration}.zip of Merity et al. (2016), in copies on the web, or the Hugging Face dataset "
        f"Salesforce/wikitext, configuration {configuration}",
        _find_wikitext,
        build_files,
        official=Official(name, words, tokens, 217_646, 245_569),
        hub=Hub("Salesforce/wikitext", configuration, write_wikitext),
    )


CORPORA: dict[str, CorpusKind] = {
    "wikitext103": _wikitext("WikiText-103", 267_735, 103_227_021),
    "wikitext2": _wikitext("WikiText-2", 33_278, 2_088_628),
    "enwik8": CorpusKind(
        "the first 100 million bytes of Wikipedia, bytes",
        "give the file enwik8, its zip archive or a folder with it: http://mattmahoney.net/dc/enwik8.zip",
        _find_enwik8,
        build_bytes,
        official=Official(
            "enwik8",
            256,
            90_000_000,
            5_000_000,
            5_000_000,
            content="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        ),
    ),
    "text": CorpusKind(
        "any plain text in UTF-8, in words, byte pairs, characters or bytes",
        "give a text file, plain or packed (.gz, .xz, .bz2), or a folder of .txt files",
        _find_text,
        build_files,
        options=_TOKENS | _FILES,
        named_by_out=True,
    ),
    "ids": CorpusKind(
        "token numbers with their vocabulary, words",
        "give a folder with one train*.npy of integers, vocab.txt with one word a line, and wiki.valid.tokens and "
        "wiki.test.tokens (or --valid and --test)",
        _find_ids,
        build_ids,
        options=_FILES,
    ),
    "embedded": CorpusKind(
        "the English documentation that comes with Python, in words, byte pairs, characters or bytes; needs no files",
        "leave --source out",
        None,
        _build_embedded,
        options=_TOKENS | {"min_count": 3},
    ),
    "wmt14": CorpusKind(
        "WMT14 English-German, sentence pairs",
        "give a folder with the files of europarl-v7, commoncrawl and news-commentary-v9 for de-en, newstest2013 and "
        "newstest2014 (statmt.org/wmt14/translation-task.html), or the Hugging Face dataset wmt/wmt14, de-en",
        find_pairs,
        build_from_files,
        official=Official("WMT14 en-de", None, (3_900_000, 4_600_000), (3_000, 3_000), (2_737, 3_003)),
        hub=Hub("wmt/wmt14", "de-en", write_wmt),
        options=_FILES | {"vocabulary_size": 32_000},
    ),
    "parallel": CorpusKind(
        "aligned files of two languages, sentence pairs",
        "give a folder with files like train.en and train.de, valid.en and valid.de (.gz, .xz and .sgm too)",
        find_pairs,
        build_from_files,
        options=_FILES | _LANGUAGES | {"vocabulary_size": 32_000},
    ),
    "numbers": CorpusKind(
        "English number words to German ones, sentence pairs; needs no files",
        "leave --source out",
        None,
        numbers.build,
        options={"pairs": 20_000, "held_out": 500, "highest": 999, "vocabulary_size": 400},
        needs=("num2words",),
    ),
}

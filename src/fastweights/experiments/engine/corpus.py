"""The text that language models learn from: the embedded corpus, or a prepared one that the command line names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastweights.data.manifest import EMBEDDED
from fastweights.experiments.engine.experiment import BadInput, Given, Request

if TYPE_CHECKING:
    from fastweights.data.text.corpus import Corpus

SPLITS = ("valid", "test")


@dataclass(frozen=True, kw_only=True)
class Text:
    """The corpus a table needs at its full scale."""

    name: str
    words: int
    kind: str

    @property
    def remedy(self) -> str:
        return f"`fastweights data {self.kind} --source DIR --out data/{self.kind}`, then --data data/{self.kind}"


WIKITEXT103 = Text(name="WikiText-103", words=267_735, kind="wikitext103")
WIKITEXT2 = Text(name="WikiText-2", words=33_278, kind="wikitext2")


def take(text: Text) -> Callable[[str, Request], Given]:
    """`Experiment.take`: the embedded corpus at scales smoke and small, and a corpus like `text` at the others."""

    def take(scale: str, request: Request) -> Given:
        if scale in ("smoke", "small"):
            if request.data:
                raise BadInput(f"--data is for scales paper and code; scale {scale} learns from Python's documentation")
            folder = _embedded()
        else:
            folder = _folder_of(text, scale, request.data)
        corpus = identify(folder)
        return Given({"corpus": corpus, "set": dict(request.settings)}, folder)

    return take


def _embedded() -> Path:
    from fastweights.data.prepare import prepare

    prepare("embedded", None, EMBEDDED)
    return EMBEDDED


def _folder_of(text: Text, scale: str, folders: Sequence[Path]) -> Path:
    from fastweights.data.manifest import DataError, read_manifest

    need = f"scale {scale} needs {text.name}, or a corpus of as many words ({text.words:,})"
    if not folders:
        raise BadInput(f"{need}: {text.remedy}")
    found = []
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is None:
            missing = "was not finished or is something else" if folder.is_dir() else "does not exist"
            raise DataError(f"there is no corpus in {folder}, which {missing}; {text.remedy}")
        words = manifest["vocabulary"]["size"]
        if words == text.words:
            return folder
        found.append(f"{folder} has {words:,} ({manifest['name']})")
    raise BadInput(f"{need}; {', '.join(found)}: {text.remedy}")


def identify(folder: Path) -> dict[str, Any]:
    """The corpus as it stands in a cell's configuration: which text it is, wherever it lies."""
    from fastweights.data.text.corpus import Corpus

    corpus = Corpus.load(folder)
    manifest = corpus.manifest
    name = "Python's documentation" if manifest["kind"] == "embedded" else manifest["name"]
    return {"name": honest(name, manifest), "words": len(corpus.vocabulary), "fingerprint": corpus.fingerprint}


def honest(name: str, manifest: Mapping[str, Any]) -> str:
    """The name of a corpus, with a word of warning where it has that of a published one and is not that."""
    from fastweights.data.registry import CORPORA

    published = [_letters(row.official.name) for row in CORPORA.values() if row.official]
    claims = any(known in _letters(name) for known in published)
    return f"{name} (not the official corpus)" if claims and not manifest["official"] else name


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def corpus_of(config: Mapping[str, Any], data: Path | None) -> Corpus:
    """The text of a cell, which must be the one it is named after."""
    from fastweights.data.text.corpus import Corpus, TokenStream

    assert data is not None
    corpus = Corpus.load(data)
    if corpus.fingerprint != config["corpus"]["fingerprint"]:
        raise BadInput(f"the corpus in {data} was changed while it was being used")
    if config["excerpt"] is None:
        return corpus
    train, valid, test = (TokenStream(corpus.split(s).tokens[: config["excerpt"]]) for s in ("train", *SPLITS))
    return replace(corpus, train=train, valid=valid, test=test)

"""The text that language models learn from: the embedded corpus, or a prepared one that the command line names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fastweights.data.manifest import EMBEDDED, DataError, absence, read_manifest
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.data.registry import CORPORA
from fastweights.data.text.corpus import Corpus, TokenStream
from fastweights.experiments.engine.experiment import BadInput, CellInputs, UserInput

SPLITS = ("valid", "test")
Loaded = TypeVar("Loaded", Corpus, ParallelCorpus)


@dataclass(frozen=True, kw_only=True)
class RequiredCorpus:
    """The corpus a table needs at its full scale."""

    name: str
    words: int
    kind: str

    @property
    def remedy(self) -> str:
        return f"`fastweights data {self.kind} --source DIR --out data/{self.kind}`, then --data data/{self.kind}"


WIKITEXT103 = RequiredCorpus(name="WikiText-103", words=267_735, kind="wikitext103")
WIKITEXT2 = RequiredCorpus(name="WikiText-2", words=33_278, kind="wikitext2")


def inputs_from(
    own: Callable[[], Path],
    learns: str,
    find: Callable[[str, Sequence[Path]], Path],
    identify: Callable[[Path], Mapping[str, Any]],
) -> Callable[[str, UserInput], CellInputs]:
    """Return an `Experiment.make_inputs`: the package's `own` data at scales smoke and small, elsewhere the user's."""

    def make_inputs(scale: str, given: UserInput) -> CellInputs:
        if scale in ("smoke", "small") and given.data:
            raise BadInput(f"--data is for scales paper and code and for stand-ins; scale {scale} learns {learns}")
        folder = own() if scale in ("smoke", "small") else find(scale, given.data)
        return CellInputs({"corpus": identify(folder), "set": dict(given.settings)}, folder)

    return make_inputs


def _embedded() -> Path:
    prepare("embedded", None, EMBEDDED)
    return EMBEDDED


def _folder_of(scale: str, folders: Sequence[Path]) -> Path:
    required = WIKITEXT2 if scale == "wikitext2" else WIKITEXT103
    need = f"scale {scale} needs {required.name}, or a corpus of as many words ({required.words:,})"
    if not folders:
        raise BadInput(f"{need}: {required.remedy}")
    found = []
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is None:
            raise DataError(f"there is no corpus in {absence(folder)}; {required.remedy}")
        words = manifest["vocabulary"]["size"]
        if words == required.words:
            return folder
        found.append(f"{folder} has {words:,} ({manifest['name']})")
    raise BadInput(f"{need}; {', '.join(found)}: {required.remedy}")


def identify(folder: Path) -> dict[str, Any]:
    """Return what a cell's configuration says of the corpus: which text it is, wherever it is stored."""
    corpus = Corpus.load(folder)
    manifest = corpus.manifest
    name = "Python's documentation" if manifest["kind"] == "embedded" else manifest["name"]
    return {
        "name": name_with_warning(name, manifest),
        "words": corpus.tokenizer.size,
        "fingerprint": corpus.fingerprint,
    }


make_inputs = inputs_from(lambda: _embedded(), "from Python's documentation", _folder_of, identify)
"""The `Experiment.make_inputs` of language models."""


def name_with_warning(name: str, manifest: Mapping[str, Any]) -> str:
    """Return the name of a corpus, with a warning where it is named after a published one that it is not."""
    published = [_letters(row.official.name) for row in CORPORA.values() if row.official]
    claims = any(known in _letters(name) for known in published)
    return f"{name} (not the official corpus)" if claims and not manifest["official"] else name


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def load_corpus(kind: type[Loaded], config: Mapping[str, Any], data: Path | None) -> Loaded:
    """Load the corpus of a cell; a BadInput if it is not the one that the cell names."""
    assert data is not None
    corpus = kind.load(data)
    if corpus.fingerprint != config["corpus"]["fingerprint"]:
        raise BadInput(f"the corpus in {data} was changed while it was being used")
    return corpus


def corpus_of(config: Mapping[str, Any], data: Path | None) -> Corpus:
    """Load the text of a cell, or the excerpt of it that the cell learns from."""
    corpus = load_corpus(Corpus, config, data)
    if config["excerpt"] is None:
        return corpus
    train, valid, test = (TokenStream(corpus.split(s).tokens[: config["excerpt"]]) for s in ("train", *SPLITS))
    return replace(corpus, train=train, valid=valid, test=test)

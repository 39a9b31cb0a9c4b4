"""Folders that models were trained in, read back: configuration, weights, tokenizer and corpus.

    run = LanguageRun.open("runs/tiny-delta")
    model, checkpoint = run.load("best")

Reading changes nothing in the folder, which may be in training at the same time.
"""

import hashlib
import json
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from fastweights.common.files import write_atomically
from fastweights.common.provenance import PACKAGE
from fastweights.common.tables import check_types
from fastweights.data.pairs.bpe import PairTokenizer
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.text.corpus import Corpus
from fastweights.data.tokenizer import TOKENIZERS, Tokenizer
from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.models.translation import TranslationModel
from fastweights.models.translation_config import TranslationModelConfig
from fastweights.training.runs.checkpoint import Checkpoint, CheckpointError, load_weights
from fastweights.training.runs.folder import RunError

# The trained model that comes with the package.
DEMO = PACKAGE / "demo"


@dataclass(frozen=True)
class SavedRun:
    """What training left in `folder`; subclasses say for which task.

    Attributes:
        model: configuration of the model.
        task, about: what the folder's `config.json` says of the task and of where the run was made.
        classes: of a subclass: those of configuration, model and corpus.
        tokenizers, checksum: of a subclass: kinds of tokenizers, and where the configuration has the checksum of one.
    """

    folder: Path
    model: Any
    task: dict[str, Any]
    about: dict[str, Any]

    name: ClassVar[str]
    what: ClassVar[str]
    command: ClassVar[str]
    without_corpus: ClassVar[str] = ""
    classes: ClassVar[tuple[Any, Any, Any]]
    tokenizers: ClassVar[tuple[type[Tokenizer], ...]]
    checksum: ClassVar[str]

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the configuration; RunError where the folder holds no run of this task."""
        task, about = _configuration(folder, cls.command)
        folder = find_run(folder)
        if task["name"] != cls.name:
            raise RunError(f"{folder} holds a run of the task {task['name']!r}, not of {cls.what}")
        path = folder / "config.json"
        if "model" not in task:
            raise RunError(f"{path} cannot be used by this version: it names no model")
        try:
            return cls(folder, cls.classes[0].from_dict(task["model"]), task, about)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} cannot be used by this version: {error}") from None

    def load(self, which: str = "best", device: str | torch.device = "cpu") -> tuple[Any, Checkpoint]:
        """Return the model in evaluation mode, and the checkpoint that its weights are from.

        Raises:
            CheckpointError: there are no weights for it, or one is NaN or infinite and with it all that it computes.
        """
        model = self.classes[1](self.model)
        try:
            checkpoint = load_weights(model, self.folder, which)
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f"the weights in {self.folder} are not those of its config.json: {error}") from None
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():
                other = "last" if which == "best" else "best"
                raise CheckpointError(
                    f"{name} in {checkpoint.folder} is not finite; try --checkpoint {other}, or train again with a "
                    "lower --lr and --fresh"
                )
        return model.to(device).eval(), checkpoint

    @property
    def _shown(self) -> str:
        """The name by which a user knows the folder."""
        return "demo" if self.folder == DEMO else str(self.folder)

    def corpus(self, data: Path | str | None = None) -> Any:
        """Return the corpus it was trained on, from where it was then or from `data`."""
        if data is None and "data" not in self.about:
            raise RunError(
                f"{self._shown} does not come with the corpus it was trained on; say with --data where that is"
                f"{self.without_corpus}"
            )
        folder = Path(data) if data is not None else Path(self.about["data"])
        corpus = self.classes[2].load(folder)
        difference = self._difference(corpus)
        if difference is not None:
            raise RunError(
                f"{folder} is not what {self._shown} was trained on: {difference}; say with --data where that is"
            )
        return corpus

    def tokenizer(self, data: Path | str | None = None) -> Any:
        """Return the tokenizer, from the copy in the run's folder, or from its corpus where there is none."""
        for kind in self.tokenizers if data is None else ():
            path = self.folder / kind.file
            content = path.read_bytes() if path.is_file() else b""
            # A copy that has changed is not the one of the training.
            if hashlib.sha256(content).hexdigest() == self._trained_on(self.checksum):
                return kind.load(content)
        return self.corpus(data).tokenizer

    @abstractmethod
    def _difference(self, corpus: Any) -> str | None:
        """Say in what a corpus differs from that of the training."""

    def _trained_on(self, key: str) -> Any:
        """Return what the configuration says of the corpus, None where it does not."""
        return self.task.get("corpus", {}).get(key)


@dataclass(frozen=True)
class LanguageRun(SavedRun):
    """What training left in `folder` for a `LanguageTask`."""

    name = "language"
    what = "a language model"
    command = "train lm"
    without_corpus = ", or score a text of your own with --text FILE"
    classes = (LanguageModelConfig, LanguageModel, Corpus)
    tokenizers, checksum = tuple(TOKENIZERS.values()), "vocabulary_sha256"

    @property
    def segment(self) -> int:
        """Words in a segment of training."""
        return int(self.task["segment"])

    @property
    def documents(self) -> str:
        """The documents at whose beginnings it forgets, a name from `data.text.documents`."""
        return str(self.task.get("documents", "none"))

    @property
    def carried(self) -> bool:
        """Whether the state was carried from segment to segment."""
        return bool(self.task["context"] == "carried")

    def _difference(self, corpus: Corpus) -> str | None:
        before = self._trained_on("fingerprint")
        return None if corpus.fingerprint == before else f"its fingerprint is {corpus.fingerprint}, not {before}"


@dataclass(frozen=True)
class TranslationRun(SavedRun):
    """What training left in `folder` for a `TranslationTask`; any corpus of the same tokenizer can be its own."""

    name = "translation"
    what = "a translation model"
    command = "train mt"
    classes = (TranslationModelConfig, TranslationModel, ParallelCorpus)
    tokenizers, checksum = (PairTokenizer,), "tokenizer_sha256"

    def _difference(self, corpus: ParallelCorpus) -> str | None:
        same = corpus.tokenizer.sha256 == self._trained_on("tokenizer_sha256")
        return None if same else "it has another tokenizer"


def find_run(run: Path | str) -> Path:
    """Return the folder of a run; "demo" is the model of the package, unless there is a run of that name."""
    return DEMO if str(run) == "demo" and not Path("demo", "config.json").exists() else Path(run)


def task_of(run: Path | str) -> str:
    """Return the name of the task that a run was trained for; RunError where there is no run."""
    return str(_configuration(run, "train lm")[0]["name"])


def _configuration(run: Path | str, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `config.json` says of the task and of where the run was made."""
    folder = find_run(run)
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_bytes())
        task, about = stored["task"], stored.get("about", {})
        check_types({"corpus": {}, **task, "about": about}, {"name": str, "corpus": dict, "about": dict})
    except OSError:
        if folder.is_file():
            raise RunError(f"{folder} is a file, and a run is a folder of `fastweights {command}`") from None
        missing = "holds no run" if folder.is_dir() else "does not exist"
        demo = "; 'demo' names the language model that comes with the package" if command == "train lm" else ""
        raise RunError(f"{folder} {missing}; `fastweights {command} --out {folder}` trains one there{demo}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not the configuration of a run ({error!r})") from None
    return task, about


def keep_tokenizer(folder: Path, tokenizer: Tokenizer, fresh: bool = False) -> None:
    """Copy the tokenizer beside a run, which can then be used where its corpus is not.

    A copy that exists already belongs to the run in the folder, unless `fresh` says that this run is moved away.
    """
    try:
        if fresh or not (folder / tokenizer.file).exists():
            write_atomically(folder / tokenizer.file, tokenizer.dump())
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None

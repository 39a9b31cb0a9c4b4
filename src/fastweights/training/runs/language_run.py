"""A folder that a language model was trained in, read back: its configuration, weights, vocabulary and corpus."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fastweights.data.text.corpus import Corpus
from fastweights.data.text.vocabulary import VOCABULARIES, Vocabulary
from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.training.runs.checkpoint import Checkpoint
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.run import configured, keep_beside, load_model, read_run


@dataclass(frozen=True)
class LanguageRun:
    """What `train` left in `folder` for a `LanguageTask`."""

    folder: Path
    model: LanguageModelConfig
    task: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the configuration; RunError where the folder holds no run of a language model."""
        folder = Path(folder)
        task, about = read_run(folder, "language", "a language model", "train lm")
        return cls(folder, configured(LanguageModelConfig, folder, task["model"]), task, about)

    @property
    def segment(self) -> int:
        """Words in a segment of training."""
        return int(self.task["segment"])

    @property
    def documents(self) -> str:
        """The documents at whose beginnings it forgets, a name from `data.documents`."""
        return str(self.task.get("documents", "none"))

    @property
    def carried(self) -> bool:
        """Whether the state was carried from segment to segment."""
        return bool(self.task["context"] == "carried")

    def load(self, which: str = "best", device: str | torch.device = "cpu") -> tuple[LanguageModel, Checkpoint]:
        """The model in evaluation mode, and the checkpoint that its weights are from."""
        return load_model(LanguageModel(self.model), self.folder, which, device)

    def corpus(self, data: Path | str | None = None) -> Corpus:
        """The corpus it was trained on, from where it was then or from `data`."""
        folder = Path(data) if data is not None else Path(self.about.get("data", "data"))
        corpus = Corpus.load(folder)
        if corpus.fingerprint != self.task["corpus"]["fingerprint"]:
            raise RunError(
                f"{folder} is not the corpus that {self.folder} was trained on (fingerprint {corpus.fingerprint}, not "
                f"{self.task['corpus']['fingerprint']}); say with --data where that one is"
            )
        return corpus

    def vocabulary(self, data: Path | str | None = None) -> Vocabulary:
        """The words, from the copy in the run's folder, or from its corpus where there is none."""
        for kind in VOCABULARIES.values():
            path = self.folder / kind.file
            if data is None and path.is_file():
                content = path.read_bytes()
                if hashlib.sha256(content).hexdigest() == self.task["corpus"]["vocabulary_sha256"]:
                    return kind.load(content)
        return self.corpus(data).vocabulary


def keep_vocabulary(folder: Path, corpus: Corpus, fresh: bool = False) -> None:
    """Copy the vocabulary beside the run, which can then be used where its corpus is not."""
    keep_beside(folder, corpus.vocabulary.file, corpus.vocabulary.dump(), fresh)

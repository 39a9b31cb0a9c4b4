"""A folder that a translation model was trained in, read back: its configuration, weights, tokenizer and corpus."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fastweights.data.pairs.corpus import ParallelCorpus, Tokenizer
from fastweights.models.translation import TranslationModel
from fastweights.models.translation_config import TranslationModelConfig
from fastweights.training.runs.checkpoint import Checkpoint
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.run import configured, keep_beside, load_model, read_run


@dataclass(frozen=True)
class TranslationRun:
    """What `train` left in `folder` for a `TranslationTask`."""

    folder: Path
    model: TranslationModelConfig
    task: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the configuration; RunError where the folder holds no run of a translation model."""
        folder = Path(folder)
        task, about = read_run(folder, "translation", "a translation model", "train mt")
        return cls(folder, configured(TranslationModelConfig, folder, task["model"]), task, about)

    def load(self, which: str = "best", device: str | torch.device = "cpu") -> tuple[TranslationModel, Checkpoint]:
        """The model in evaluation mode, and the checkpoint that its weights are from."""
        return load_model(TranslationModel(self.model), self.folder, which, device)

    def corpus(self, data: Path | str | None = None) -> ParallelCorpus:
        """The corpus it was trained on, from where it was then; or one of the same tokenizer in `data`."""
        folder = Path(data) if data is not None else Path(self.about.get("data", "data"))
        corpus = ParallelCorpus.load(folder)
        if corpus.tokenizer.sha256 != self.task["corpus"]["tokenizer_sha256"]:
            raise RunError(
                f"{folder} has another tokenizer than {self.folder} was trained with; say with --data where its corpus "
                "is"
            )
        return corpus

    def tokenizer(self, data: Path | str | None = None) -> Tokenizer:
        """The tokenizer, from the copy in the run's folder, or from its corpus where there is none."""
        path = self.folder / Tokenizer.file
        if data is None and path.is_file():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == self.task["corpus"]["tokenizer_sha256"]:
                return Tokenizer.load(content)
        return self.corpus(data).tokenizer


def keep_tokenizer(folder: Path, corpus: ParallelCorpus, fresh: bool = False) -> None:
    """Copy the tokenizer beside the run, which can then be used where its corpus is not."""
    keep_beside(folder, corpus.tokenizer.file, corpus.tokenizer.dump(), fresh)

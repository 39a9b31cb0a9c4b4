"""`fastweights.load`: a trained model with its tokenizer, ready for text.

lm = fastweights.load("runs/quick-delta")
print(lm.generate("The list is", tokens=100, temperature=0.7))

mt = fastweights.load("runs/mt-quick-linear")
print(mt.translate(["two, three"]))
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from fastweights.data.pairs.bpe import PairTokenizer
from fastweights.data.tokenizer import Tokenizer
from fastweights.inference.sample import Sampling, generate
from fastweights.inference.stream import SlidingWindow, Stream, open_reader
from fastweights.inference.translate import translate
from fastweights.models.language_model import LanguageModel
from fastweights.models.translation import TranslationModel
from fastweights.training.runs.checkpoint import Checkpoint
from fastweights.training.runs.saved import LanguageRun, TranslationRun, task_of


class TrainedLanguageModel:
    """A language model as training left it.

    Attributes:
        model: the model in evaluation mode.
        tokenizer: `encode` and `decode` for the model's tokens.
        run: the configuration it was trained with.
        checkpoint: where its weights are from, with the step and the scores of its validation.
    """

    def __init__(self, run: LanguageRun, tokenizer: Tokenizer, model: LanguageModel, checkpoint: Checkpoint) -> None:
        self.run, self.tokenizer, self.model, self.checkpoint = run, tokenizer, model, checkpoint

    @classmethod
    def load(
        cls,
        run: Path | str,
        checkpoint: str = "best",
        device: str | torch.device = "cpu",
        data: Path | str | None = None,
    ) -> Self:
        """Load the model of a run; the tokenizer is that of `data` where the run has no copy of its own."""
        opened = LanguageRun.open(run)
        return cls(opened, opened.tokenizer(data), *opened.load(checkpoint, device))

    def stream(self) -> Stream:
        """Open a stream that takes text or token numbers, in parts of any size, and keeps no more than a state.

        Raises:
            ValueError: the positions of this model are counted back from the end of a window, so it cannot stream.
        """
        return Stream(self.model, tokenizer=self.tokenizer)

    def reader(self) -> Stream | SlidingWindow:
        """Open a stream where the model can read without end, or else a window on its last tokens."""
        return open_reader(self.model, self.run.segment, self.run.carried)

    def generate(
        self,
        prompt: str = "",
        tokens: int = 100,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Return the prompt and what the model adds to it: the text that `fastweights generate` prints.

        Args:
            prompt: the beginning of the text; "" for a new line.
            tokens: how many to add.
            temperature: below 1 more predictable; 0 takes the most likely token.
            top_k: draw from the k likeliest tokens only.
            top_p: draw from the fewest tokens that together reach this probability.
            seed: the same seed gives the same text.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        return "".join(self.stream_text(self.reader(), prompt, tokens, sampling, seed))

    def stream_text(
        self, reader: Stream | SlidingWindow, prompt: str, tokens: int, sampling: Sampling, seed: int = 0
    ) -> Iterator[str]:
        """Yield the text of `generate` as it comes."""
        begin = self.tokenizer.encode(prompt)
        # Before the first word of a line stands the end of another.
        new = generate(reader, begin or self.tokenizer.encode("\n"), tokens, sampling, seed)
        return self.tokenizer.stream(itertools.chain(begin, new))


class TrainedTranslationModel:
    """A translation model as training left it; its attributes are those of `TrainedLanguageModel`."""

    def __init__(
        self, run: TranslationRun, tokenizer: PairTokenizer, model: TranslationModel, checkpoint: Checkpoint
    ) -> None:
        self.run, self.tokenizer, self.model, self.checkpoint = run, tokenizer, model, checkpoint

    @classmethod
    def load(cls, run: Path | str, checkpoint: str = "best", device: str | torch.device = "cpu") -> Self:
        """Load the model of a run."""
        opened = TranslationRun.open(run)
        return cls(opened, opened.tokenizer(), *opened.load(checkpoint, device))

    def translate(self, lines: Sequence[str], *, beam: int = 4, length_penalty: float = 0.6) -> list[str]:
        """Return the translation of each line, "" for an empty one: what `fastweights translate` prints."""
        if isinstance(lines, str):
            raise TypeError(f"lines must be a list of lines, got one text; for one line give [{lines[:20]!r}]")
        return translate(self.model, self.tokenizer, lines, beam=beam, length_penalty=length_penalty)


def load(run: Path | str, *, checkpoint: str = "best", device: str | torch.device = "cpu") -> Any:
    """Load a trained model with its tokenizer.

    Args:
        run: the folder of a run of `fastweights train`, what `fastweights export run` made of one, or "demo" for the
            language model that comes with the package.
        checkpoint: "best" by validation, or "last".
        device: where the model is put.

    Returns:
        A `TrainedLanguageModel` (`generate`, `stream`) or a `TrainedTranslationModel` (`translate`).

    Raises:
        RunError: there is no run of either kind.
        CheckpointError: its weights cannot be used.
    """
    classes = {TranslationRun.name: TrainedTranslationModel}
    return classes.get(task_of(run), TrainedLanguageModel).load(run, checkpoint, device)

"""Training a language model on a corpus, as the loop wants it.

corpus = Corpus.load("data/wikitext2")
task, config = assemble(corpus, preset="tiny", mixer="delta", steps=500)
train(task, config, "runs/tiny-delta")
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from fastweights.common.tables import check_name, look_up
from fastweights.data.text.corpus import Corpus, Segment, Segments, ShuffledSegments
from fastweights.data.text.documents import DOCUMENTS, mark_documents
from fastweights.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState, check_forgets
from fastweights.models.presets import CONTEXTS, MIXER_CHOICES, PRESETS, training_recipe
from fastweights.training.engine.config import Fields, TrainingConfig, TrainingPlan, check_positive, plan_training
from fastweights.training.engine.task import LossOutcome, Task
from fastweights.training.tasks.evaluate import EVAL_BATCH, Protocol, check_carried, measure

# What the corpus or the arguments of `assemble` decide.
_DECIDED = {"vocab_size": "follows from the corpus", "mixer": "has its own option", "rule": "has its own option"}
_READING = {"segment": int, "batch_size": int, "eval_batch": int, "documents": str, "order": str}
FIELDS = Fields(LanguageModelConfig, _READING, _DECIDED)
ORDERS = ("stream", "shuffled")
_USUAL = {"context": "limited", "order": "stream", "documents": "none", "eval_batch": EVAL_BATCH}


def check_reading(context: str, order: str) -> None:
    """Refuse a context or an order that does not exist, or that do not go together."""
    check_name(CONTEXTS, context, "context")
    check_name(ORDERS, order, "order")
    if (context, order) == ("carried", "shuffled"):
        raise ValueError(
            "context 'carried' continues the segment before, and order 'shuffled' leaves none; take order 'stream', "
            "or models of limited context alone"
        )


@dataclass(eq=False)
class LanguageTask(Task):
    """The next word of a corpus: its training text in `batch_size` rows, read in order, `segment` words at a time.

    With order "shuffled" the segments of a step come from everywhere in the text instead, as `seed` has it.

    With context "carried" each segment continues the state of the one before, without gradient, and an epoch begins
    with none; with "limited" every segment stands alone. With `documents` other than "none" a model with fast weights
    also forgets where one of them begins, see `data.documents`. Validation reads the validation text in order in
    `eval_batch` rows, and gives "loss" (nats a word) and "ppl".
    """

    model: LanguageModelConfig
    corpus: Corpus
    _: KW_ONLY
    segment: int
    batch_size: int
    context: str = "limited"
    eval_batch: int = EVAL_BATCH
    documents: str = "none"
    order: str = "stream"
    seed: int = 0

    def __post_init__(self) -> None:
        check_reading(self.context, self.order)
        look_up(DOCUMENTS, self.documents, "kind of documents")
        self.carried = self.context == "carried"
        self._check()
        # Layers refuse what a configuration cannot know, such as the options of a feature map.
        with torch.device("meta"):
            self.n_parameters = LanguageModel(self.model).n_parameters
        tokenizer, streams = self.corpus.tokenizer, {"train": self.corpus.train, "valid": self.corpus.valid}
        self._streams = {split: mark_documents(stream, tokenizer, self.documents) for split, stream in streams.items()}
        self._segments: dict[tuple[int, int], Segments | ShuffledSegments] = {}
        self._check_cut("train", self._cut)
        self._check_cut("valid", lambda: self._streams["valid"].segments(self.eval_batch, self.segment))

    def _check_cut(self, split: str, cut: Callable[[], object]) -> None:
        try:
            cut()
        except ValueError as error:
            raise ValueError(f"the {split} text of {self.corpus.folder}: {error}") from None

    def _check(self) -> None:
        model, words = self.model, self.corpus.tokenizer.size
        if model.vocab_size != words:
            raise ValueError(f"the model has vocab_size {model.vocab_size:,}, the corpus {words:,} words")
        if self.documents != "none":
            check_forgets(model)
        if self.carried:
            check_carried(model)
            if model.feature_map == "favor" and model.feature_map_options.get("redraw", True):
                raise ValueError(
                    "feature map 'favor' draws new features for each segment, with which the state of the one before "
                    "cannot be read; set feature_map_options = {'redraw': false}, or take limited context"
                )
        elif model.mixer == "relative" and model.mem_len:
            raise ValueError(
                f"mixer 'relative' (xl) remembers {model.mem_len} words, and with context 'limited' there are none; "
                "take context 'carried', or mem_len 0 for its relative positions alone"
            )

    def build(self) -> LanguageModel:
        """Return the model with fresh weights."""
        return LanguageModel(self.model)

    def place(self, device: torch.device) -> None:
        """Bring the texts to the device; in the memory of the host they stay mapped from their files."""
        if device.type != "cpu":
            self._streams = {split: stream.to(device) for split, stream in self._streams.items()}
            self._segments = {}

    def _cut(self, rank: int = 0, world: int = 1) -> Segments | ShuffledSegments:
        stream = self._streams["train"]
        if self.order == "shuffled":
            return stream.shuffled(self.batch_size, self.segment, seed=self.seed, rank=rank, world=world)
        return stream.segments(self.batch_size, self.segment, rank=rank, world=world)

    def batch(self, index: int, rank: int, world: int) -> Segment:
        """Return the segment of that number in the rows of this process."""
        if (rank, world) not in self._segments:
            self._segments[rank, world] = self._cut(rank, world)
        segment = self._segments[rank, world].batch_at(index)
        # Where nothing is carried an epoch begins like any other segment, also for a captured update.
        return segment._replace(starts_epoch=segment.starts_epoch and self.carried)

    def loss(self, model: nn.Module, batch: Segment, carry: LanguageModelState | None) -> LossOutcome:
        """Return the mean of -log p over the words of a segment."""
        assert isinstance(model, LanguageModel)
        nll, state = model.loss(batch.inputs, batch.targets, None if batch.starts_epoch else carry, batch.starts)
        return LossOutcome(nll.mean(), {"tokens": nll.numel()}, state if self.carried else None)

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks: the rest is the softmax, in kernels of its own, and a few additions."""
        assert isinstance(model, LanguageModel)
        return list(model.blocks)

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Measure loss and perplexity by segments, close to and a little above those of the paper's protocols."""
        assert isinstance(model, LanguageModel)
        how = Protocol(name="segment", segment=self.segment, batch=self.eval_batch, carry=self.carried)
        perplexity = measure(model, self._streams["valid"], how)
        return {"loss": perplexity.loss, "ppl": perplexity.ppl}

    def describe(self) -> dict[str, Any]:
        """Describe the model, the cutting of the text, and which text it is, wherever it lies."""
        vocabulary = self.corpus.manifest["vocabulary"]
        return {
            "name": "language",
            "model": self.model.to_dict(),
            **{name: getattr(self, name) for name in ("context", "segment", "batch_size", "eval_batch", "documents")},
            "corpus": {"fingerprint": self.corpus.fingerprint, "vocabulary_sha256": vocabulary["sha256"]},
            **({} if self.order == "stream" else {"order": self.order, "seed": self.seed}),
        }


def plan(
    words: int,
    *,
    preset: str = "small",
    mixer: str = "delta",
    rule: str | None = None,
    context: str | None = None,
    **settings: Any,
) -> TrainingPlan[LanguageModelConfig]:
    """Take a preset of `models.presets` for a vocabulary, with any field of model, task or training changed by name.

    What is not given follows from what is: see `plan_training`; also Transformer-XL remembers as many words as a
    segment has, and random features stand still where a state is carried.
    """
    look_up(PRESETS, preset, "preset")
    model, task, training = FIELDS.sort(settings)
    recipe = training_recipe(preset, mixer, rule)
    usual = {name: recipe.pop(name) for name in ("context", *FIELDS.task) if name in recipe}
    if mixer == "xl" and "segment" in task:
        model.setdefault("mem_len", task["segment"])
    task = {**_USUAL, **usual, **task, **({} if context is None else {"context": context})}
    check_reading(task["context"], task["order"])
    check_positive(task, "segment", "batch_size")
    if task["context"] == "carried" and model.get("feature_map", MIXER_CHOICES[mixer].feature_map) == "favor":
        model["feature_map_options"] = {"redraw": False, **model.get("feature_map_options", {})}
    config = PRESETS[preset](mixer, rule=rule, context=task["context"], vocab_size=words, **model)
    return TrainingPlan(config, task, plan_training(recipe, training, eval_every=4000, log_every=200))


def assemble(corpus: Corpus, **choice: Any) -> tuple[LanguageTask, TrainingConfig]:
    """Make the task and the configuration that `plan` chooses for a corpus."""
    model, task, training = plan(corpus.tokenizer.size, **choice)
    return LanguageTask(model, corpus, seed=training.seed, **task), training

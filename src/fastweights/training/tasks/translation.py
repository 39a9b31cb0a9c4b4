"""Training a translation model on sentence pairs, as the loop wants it.

corpus = ParallelCorpus.load("data/wmt14")
task, config = assemble_translation(corpus, preset="base", attention="dpfp", nu=2)
train(task, config, "runs/base-dpfp")
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from fastweights.common.tables import look_up
from fastweights.common.tree import map_tensors, to_device
from fastweights.data.pairs.corpus import PairBatch, ParallelCorpus
from fastweights.inference.translate import translate
from fastweights.models.translation import TranslationModel
from fastweights.models.translation_config import ATTENTIONS, POSITIONS, TranslationModelConfig
from fastweights.models.translation_presets import PRESETS, RECIPES
from fastweights.training.engine.config import Fields, TrainingConfig, TrainingPlan, check_positive, plan_training
from fastweights.training.engine.task import LossOutcome, Score, Task
from fastweights.training.tasks.bleu import Bleu, bleu, require_sacrebleu

# Sentences of the validation set that a validation translates, by greedy search.
BLEU_SENTENCES = 500
BLEU_BEAM = 1
_TASK = {
    "max_tokens": int,
    "max_length": int,
    "label_smoothing": float,
    "bleu_sentences": int,
    "bleu_beam": int,
}
FIELDS = Fields(TranslationModelConfig, _TASK, {"vocab_size": "follows from the corpus"})


@dataclass(eq=False)
class TranslationTask(Task):
    """The target sentence of each pair, token by token, given the source and the target so far.

    Validation gives "loss" (nats a token, without label smoothing), "ppl", and "bleu" of the first `bleu_sentences`
    of the validation set, decoded with `bleu_beam` beams; the best checkpoint is the one with the highest BLEU, or
    with 0 sentences the one with the lowest loss.

    Args:
        max_tokens: size of a batch on either side, padding included, over all processes.
        max_length: training pairs with more tokens on a side are left out.
        label_smoothing: share of the target's probability that is spread over all tokens.
        seed: of the order of the pairs.
    """

    many_shapes = True

    model: TranslationModelConfig
    corpus: ParallelCorpus
    _: KW_ONLY
    max_tokens: int
    max_length: int | None = None
    label_smoothing: float = 0.1
    bleu_sentences: int = BLEU_SENTENCES
    bleu_beam: int = BLEU_BEAM
    seed: int = 0

    def __post_init__(self) -> None:
        words = self.corpus.tokenizer.size
        if self.model.vocab_size != words:
            raise ValueError(f"the model has vocab_size {self.model.vocab_size:,}, the corpus {words:,}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.bleu_sentences < 0 or self.bleu_beam < 1:
            got = f"got {self.bleu_sentences} and {self.bleu_beam}"
            raise ValueError(f"bleu_sentences must be at least 0 and bleu_beam at least 1, {got}")
        if self.bleu_sentences:
            # Now and not after hours of training.
            require_sacrebleu()
        self.score = Score("bleu", higher_is_better=True) if self.bleu_sentences else Score("loss")
        # Layers refuse what a configuration cannot know.
        with torch.device("meta"):
            self.n_parameters = TranslationModel(self.model).n_parameters
        try:
            pairs = self.corpus.split("train")
            self._train = pairs.batches(self.max_tokens, seed=self.seed, max_length=self.max_length, shuffle=True)
        except ValueError as error:
            raise ValueError(f"the train pairs of {self.corpus.folder}: {error}") from None
        self._device = torch.device("cpu")

    @property
    def batches_per_epoch(self) -> int:
        """Batches of training in one pass through the pairs."""
        return len(self._train)

    @property
    def left_out(self) -> int:
        """Training pairs that are too long."""
        return self._train.left_out

    def build(self) -> TranslationModel:
        """Return the model with fresh weights."""
        return TranslationModel(self.model)

    def place(self, device: torch.device) -> None:
        """Note where batches go: they are made on the host, in memory that a GPU can copy from while it computes."""
        self._device = device

    def batch(self, index: int, rank: int, world: int) -> PairBatch:
        """Return this process' pairs of the batch of that number."""
        pairs = self._train.batch_at(index, rank, world)
        return map_tensors(torch.Tensor.pin_memory, pairs) if self._device.type == "cuda" else pairs

    def loss(self, model: nn.Module, batch: PairBatch, carry: None) -> LossOutcome:
        """Return the mean over the target tokens of the loss with label smoothing; "nll" is that without."""
        smoothed, nll, tokens = self._losses(model, batch, self.label_smoothing)
        return LossOutcome(smoothed / tokens.clamp(min=1), {"tokens": tokens, "nll": nll / tokens.clamp(min=1)})

    def _losses(
        self, model: nn.Module, batch: PairBatch, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return sums over the target tokens, and their number."""
        assert isinstance(model, TranslationModel)
        both = model.loss(batch.source, batch.source_mask, batch.target_in, batch.target_out, smoothing)
        smoothed, nll = ((losses * batch.target_mask).sum() for losses in both)
        return smoothed, nll.detach(), batch.target_mask.sum()

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of encoder and decoder: the rest is embeddings and the loss, in kernels of its own."""
        assert isinstance(model, TranslationModel)
        return [*model.encoder, *model.decoder]

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss of the whole validation set, and BLEU of its beginning."""
        assert isinstance(model, TranslationModel)
        pairs, device = self.corpus.split("valid"), model.embedding.weight.device
        longest = int(max(pairs.lengths("source").max(), pairs.lengths("target").max())) + 1
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # Room for the longest, whatever the budget of training.
        for batch in pairs.batches(max(self.max_tokens, longest + 8), shuffle=False):
            _, nll, tokens = self._losses(model, to_device(batch, device), 0.0)
            total += torch.stack([nll.double(), tokens.double()])
        nll_sum, count = total.tolist()
        scores = {"loss": nll_sum / count, "ppl": float(torch.tensor(nll_sum / count).double().exp())}
        if self.bleu_sentences:
            scores["bleu"] = self._bleu(model).score
        return scores

    def _bleu(self, model: TranslationModel) -> Bleu:
        pairs, count = self.corpus.split("valid"), self.bleu_sentences
        translations = translate(model, self.corpus.tokenizer, pairs.sources[:count], beam=self.bleu_beam)
        return bleu(translations, pairs.targets[:count])

    def describe(self) -> dict[str, Any]:
        """Describe the model, the batches, and which pairs they are, wherever they lie."""
        return {
            "name": "translation",
            "model": self.model.to_dict(),
            **{name: getattr(self, name) for name in (*_TASK, "seed")},
            "corpus": {"fingerprint": self.corpus.fingerprint, "tokenizer_sha256": self.corpus.tokenizer.sha256},
        }


def plan_translation(
    tokens: int, *, preset: str = "base", attention: str = "softmax", **settings: Any
) -> TrainingPlan[TranslationModelConfig]:
    """Take a preset of `models.translation_presets` for a vocabulary; any field of model, task or training by name.

    The same attention is in all three positions, unless `encoder`, `decoder` or `cross` say otherwise. What is not
    given follows from what is: see `plan_training`; also a run with fewer than a tenth of the preset's steps keeps the
    Performer's features as first drawn: so few updates are too few to learn from features that change with each.
    """
    recipe = dict(look_up(RECIPES, preset, "preset"))
    look_up(ATTENTIONS, attention, "attention")
    model, task, training = FIELDS.sort(settings)
    usual = {name: recipe.pop(name) for name in FIELDS.task if name in recipe}
    task = {**usual, "bleu_sentences": BLEU_SENTENCES, "bleu_beam": BLEU_BEAM, **task}
    check_positive(task, "max_tokens", "max_length")
    config = plan_training(recipe, training, eval_every=2000, log_every=100)
    if config.steps < recipe["steps"] // 10 and "performer" in {model.get(place, attention) for place in POSITIONS}:
        model = {"redraw": False, **model}
    return TrainingPlan(PRESETS[preset](attention, vocab_size=tokens, **model), task, config)


def assemble_translation(corpus: ParallelCorpus, **choice: Any) -> tuple[TranslationTask, TrainingConfig]:
    """Make the task and the configuration that `plan_translation` chooses for a corpus."""
    model, task, training = plan_translation(corpus.tokenizer.size, **choice)
    return TranslationTask(model, corpus, seed=training.seed, **task), training

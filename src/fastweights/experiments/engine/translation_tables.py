"""How the models of Table 1 are trained and scored: the pairs they learn from, the cells, training, BLEU.

A cell is named by everything that decides its numbers: the model and its training in full, how it is decoded, and which
pairs it learned from, by name and fingerprint. Each model is scored at the checkpoint with the highest validation BLEU,
without averaging checkpoints [App. E].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.data.manifest import NUMBERS, layout, read_manifest, sets
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.experiments.engine import runner
from fastweights.experiments.engine.corpora import inputs_from, load_corpus, name_with_warning
from fastweights.experiments.engine.experiment import BadInput, Scale, storable
from fastweights.inference.translate import translate
from fastweights.models.translation_config import POSITIONS, TranslationModelConfig, idle_fields
from fastweights.training.engine.config import TrainingConfig
from fastweights.training.runs.saved import TranslationRun, keep_tokenizer
from fastweights.training.tasks.bleu import bleu
from fastweights.training.tasks.translation import FIELDS, TranslationTask, plan_translation

INPUTS = ("corpus", "set")
SPLITS = ("valid", "test")
STORED = runner.stored(
    {"pieces": int}, {"valid?": {"bleu": float}, "test?": {"bleu": float}, "samples?": [(str, str, str)]}
)
SAMPLES = 3
"""Translations that are kept to be read: of the test set, or without one of the validation set."""

REMEDY = "`fastweights data wmt14 --out data/wmt14` (or `data parallel --source DIR`), then --data data/wmt14"


@dataclass(frozen=True)
class TranslationColumn:
    """A column of the table.

    Args:
        attention: in all three positions.
        multiple: d_dot / d_key, for maps that have a choice: 1, 4 and 8 are the paper's 64, 256 and 512.
    """

    label: str
    attention: str
    multiple: int = 1

    def choice(self, d_key: int) -> dict[str, Any]:
        """Return the hyper-parameter that gives this d_dot, as in Table 6."""
        d_dot = self.multiple * d_key
        return {"performer": {"features": d_dot // 2}, "dpfp": {"nu": self.multiple // 2}}.get(self.attention, {})


MODELS = {
    "softmax": TranslationColumn("Standard", "softmax"),
    "linear": TranslationColumn("Linear", "linear"),
    "performer-1": TranslationColumn("Performer, d_dot = d_key", "performer", 1),
    "performer-4": TranslationColumn("Performer, d_dot = 4 d_key", "performer", 4),
    "performer-8": TranslationColumn("Performer, d_dot = 8 d_key", "performer", 8),
    "dpfp-2": TranslationColumn("DPFP, d_dot = 4 d_key", "dpfp", 4),
    "dpfp-4": TranslationColumn("DPFP, d_dot = 8 d_key", "dpfp", 8),
}


@dataclass(frozen=True, kw_only=True)
class TranslationScale(Scale):
    """A scale of the table, whose sizes are values of d_model.

    Args:
        presets: of `models.translation_presets`, by d_model.
        settings: fields of `training.translation.plan_translation` that differ from the preset's.
        beam, length_penalty: of the search that is scored.
        sentences: the most that are scored of each split, for a run that only shows that everything works.
    """

    presets: Mapping[int, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    beam: int = 4
    length_penalty: float = 0.6
    sentences: int | None = None


def _numbers() -> Path:
    prepare("numbers", None, NUMBERS)
    return NUMBERS


def _folder_of(scale: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is not None and layout(manifest) == "pairs":
            return folder
    given = f"; {', '.join(map(str, folders))} holds none" if folders else ""
    raise BadInput(f"scale {scale} needs sentence pairs, the paper's are WMT14{given}: {REMEDY}")


def identify(folder: Path) -> dict[str, Any]:
    """Return what a cell's configuration says of the corpus: which pairs they are, wherever they are stored."""
    corpus = ParallelCorpus.load(folder)
    names = {"numbers": "number words"}
    name = names.get(corpus.manifest["kind"], corpus.manifest["name"])
    languages = "-".join(corpus.manifest["languages"])
    name = name if name.endswith(languages) else f"{name}, {languages}"
    return {
        "name": name_with_warning(name, corpus.manifest),
        "pieces": corpus.tokenizer.size,
        "fingerprint": corpus.fingerprint,
    }


make_inputs = inputs_from(lambda: _numbers(), "to translate number words", _folder_of, identify)


def configure(
    scales: Mapping[str, TranslationScale], *place: Any, corpus: Mapping[str, Any], set: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the whole configuration of the cell at `place` (scale, model, size, seed) in a table with those scales."""
    scale, model, size, seed = place
    at, row = scales[scale], MODELS[model]
    if size not in at.presets:
        known = ", ".join(f"{width} ({preset})" for width, preset in at.presets.items())
        raise ValueError(f"at scale {scale} d_model is one of {known}, got {size}")
    runner.check_settings(FIELDS, set)
    _check_used(model, set)
    shared = {"preset": at.presets[size], "attention": row.attention, **at.settings, "seed": seed, **set}
    d_key = plan_translation(corpus["pieces"], **shared).model.d_head
    found = plan_translation(corpus["pieces"], **{**row.choice(d_key), **shared})
    return runner.cell_config(
        place,
        {"corpus": corpus, "set": set},
        found.training,
        rule="none" if row.attention == "softmax" else found.model.rule,
        d_dot=found.model.d_dot(row.attention),
        network=storable(found.model.to_dict()),
        batches=storable(found.task),
        decoding={"beam": at.beam, "length_penalty": at.length_penalty, "sentences": at.sentences},
    )


def _check_used(model: str, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for a setting that this model does not use, with the models that do."""

    def idle(row: TranslationColumn) -> dict[str, str]:
        return idle_fields(*(settings.get(position, row.attention) for position in POSITIONS))

    for name, use in idle(MODELS[model]).items():
        if name in settings:
            able = ",".join(other for other, row in MODELS.items() if name not in idle(row))
            remedy = f"--models {able}" if able else "leave it out"
            raise ValueError(f"{name} is for {use}, which {model} has not: {remedy}")


def build(config: Mapping[str, Any], data: Path | None) -> tuple[TranslationTask, TrainingConfig]:
    """Return the task and the training of a cell."""
    model, corpus = TranslationModelConfig.from_dict(config["network"]), load_corpus(ParallelCorpus, config, data)
    settings = runner.training_of(config, log_every=min(100, max(1, config["steps"] // 50)))
    return TranslationTask(model, corpus, seed=config["seed"], **config["batches"]), settings


def score(config: Mapping[str, Any], folder: Path, data: Path | None, device: str) -> dict[str, Any]:
    """Measure BLEU of the best checkpoint on the validation set, and on the test set where there is one."""
    model, checkpoint = TranslationRun.open(folder).load("best", device)
    corpus = load_corpus(ParallelCorpus, config, data)
    keep_tokenizer(folder, corpus.tokenizer)
    found: dict[str, Any] = {"parameters": model.n_parameters, "best_step": checkpoint.step}
    found["sets"] = sets(corpus.manifest)
    samples: list[Any] = []
    for split in (split for split in SPLITS if split in corpus.splits):
        measure = partial(_translate, model, corpus, split, config["decoding"], device)
        found[split] = runner.read_or_measure(folder / "eval" / f"{split}-table1.json", measure)
        samples = found[split].pop("samples")
    return {**found, "samples": samples}


def _translate(model: Any, corpus: ParallelCorpus, split: str, how: Mapping[str, Any], device: str) -> dict[str, Any]:
    pairs, count = corpus.split(split), how["sentences"]
    sources, references = pairs.sources[:count], pairs.targets[:count]
    search = {"beam": how["beam"], "length_penalty": how["length_penalty"]}
    hypotheses = translate(model, corpus.tokenizer, sources, **search, device=device)
    found = bleu(hypotheses, references)
    right = sum(map(str.__eq__, hypotheses, references)) / len(references)
    samples = list(zip(sources, references, hypotheses, strict=True))[:SAMPLES]
    score = {"bleu": found.score, "exact": right, "sentences": len(sources), "signature": found.signature}
    return {**score, "samples": samples}


run = runner.runner(build, score)

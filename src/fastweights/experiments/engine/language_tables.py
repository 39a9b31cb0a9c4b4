"""What the language-model tables share: the models, the text they learn from, training and evaluation.

A cell of these tables is named by everything that decides its numbers: the model and its training in full, the protocol
of its evaluation, and which text it is, by name and fingerprint. Equal cells of several tables are trained once.

Each model is evaluated at the checkpoint with the lowest segment-wise validation loss, as in the released code. Models
with limited context are scored by a sliding window, of which each position but those of the first window sees at least
L - stride words; those with carried context in one go through the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.data.manifest import sets
from fastweights.data.text.corpus import Corpus
from fastweights.data.text.documents import mark_documents
from fastweights.experiments.engine import runner
from fastweights.experiments.engine.corpora import SPLITS, WIKITEXT103, corpus_of, make_inputs
from fastweights.experiments.engine.experiment import Experiment, Plot, Scale, storable
from fastweights.experiments.engine.perplexity import Shown, paper_entry, table
from fastweights.experiments.engine.shape import Shape
from fastweights.models.language_model import LanguageModel, LanguageModelConfig, check_forgets
from fastweights.training.engine.config import TrainingConfig
from fastweights.training.runs.saved import LanguageRun
from fastweights.training.tasks import evaluate
from fastweights.training.tasks.language import FIELDS, LanguageTask, plan

INPUTS = ("corpus", "set")
_SCORE: Shape = {"ppl": float | None}
_SCORES: Shape = {"valid": _SCORE, "test": _SCORE, "state_size?": int, "mem_len?": int}
STORED = runner.stored({"words": int}, {**_SCORES, "evaluations?": [_SCORES]})


@dataclass(frozen=True)
class LanguageRow:
    """A row of the tables: its label, and what it is to `training.language.plan`.

    Args:
        wide: random features with m = d_head, so that d_dot = 2 d_head as in DPFP-1 [App. D.3].
    """

    label: str
    choice: Mapping[str, Any]
    wide: bool = False


MODELS = {
    "transformer": LanguageRow("Transformer", {"mixer": "transformer"}),
    "linear": LanguageRow("Linear Transformer", {"mixer": "linear"}),
    "delta": LanguageRow("Delta Network", {"mixer": "delta"}),
    "performer": LanguageRow("Performer, sum", {"mixer": "performer"}),
    "performer-delta": LanguageRow("Performer, delta", {"mixer": "performer", "rule": "delta"}),
    "delta-norm": LanguageRow("positions, attention norm.", {"mixer": "delta", "normalization": "both"}),
    "delta-nopos-norm": LanguageRow(
        "no positions, attention norm.", {"mixer": "delta", "normalization": "both", "positions": "none"}
    ),
    "delta-nopos": LanguageRow("no positions, no attention norm.", {"mixer": "delta", "positions": "none"}),
    "linear-carried": LanguageRow("Linear Transformer", {"mixer": "linear", "context": "carried"}),
    "linear-carried-nonorm": LanguageRow(
        "Linear Transformer, no attention norm.", {"mixer": "linear", "context": "carried", "normalization": "none"}
    ),
    "delta-carried": LanguageRow("Delta Network", {"mixer": "delta", "context": "carried"}),
    "xl": LanguageRow("Transformer-XL", {"mixer": "xl"}),
    "performer-wide": LanguageRow("Performer, sum", {"mixer": "performer"}, wide=True),
    "performer-wide-delta": LanguageRow("Performer, delta", {"mixer": "performer", "rule": "delta"}, wide=True),
    "dpfp-1": LanguageRow("DPFP-1, sum", {"mixer": "dpfp"}),
    "dpfp-1-delta": LanguageRow("DPFP-1, delta", {"mixer": "dpfp", "rule": "delta"}),
}


@dataclass(frozen=True, kw_only=True)
class LanguageScale(Scale):
    """A scale of language models, whose sizes are values of d_model.

    Args:
        seeds: the authors' one; the paper has one run of each model.
        presets: of `models.presets`, by d_model.
        settings: fields of `training.language.plan` that differ from the preset's.
        stride: of the sliding window.
        memories: memory and segment of Transformer-XL at evaluation, the last as in training [App. F].
        rows: rows of text read side by side with carried context. The paper reads one; more lose the context at their
            beginnings.
        excerpt: the most words of each split, for a run that only shows that everything works.
    """

    seeds: tuple[int, ...] = (1111,)
    cost: str = ""
    presets: Mapping[int, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    stride: int = 1
    memories: tuple[tuple[int, int], ...] = ((15, 1), (64, 64), (128, 128), (384, 384))
    rows: int = 1
    excerpt: int | None = None


SMOKE = LanguageScale(
    sizes=(16,),
    presets={16: "tiny"},
    settings={"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "segment": 16, "batch_size": 4, "eval_batch": 4}
    | {"steps": 4, "eval_every": 2},
    stride=16,
    memories=((3, 1), (16, 16)),
    rows=8,
    excerpt=600,
    note="Four steps of training on 600 words: a check that everything runs, not a result.",
    decides=False,
)
SMALL = LanguageScale(
    sizes=(64,),
    presets={64: "tiny"},
    settings={"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 256, "segment": 64, "batch_size": 16, "steps": 300},
    stride=32,
    # A memory of 7 and a segment of 1 hold as many numbers as the fast weights: (7 + 1) x 2 x 64 = 4 x 16 x 16.
    memories=((7, 1), (16, 16), (32, 32), (64, 64)),
    rows=32,
    note="A model of 2 layers with D = 64 and L = 64, trained for 300 steps (0.3 M words) on the documentation that "
    "comes with Python in place of WikiText-103. It shows that the models learn, not how they compare when they are "
    "trained as in the paper.",
    decides=False,
)
PAPER = LanguageScale(sizes=(128, 256), presets={128: "small", 256: "medium"})
CODE = replace(
    PAPER,
    settings={"first_step_full": True},
    note="As the released code does it: the very first update takes the full learning rate.",
)
PROTOCOL = {"paper": PAPER, "code": CODE}
"""Tables 2 to 5 as in the paper, in both sizes: the protocol that other trainings are compared with."""

WIKIPEDIA = LanguageScale(
    sizes=(128,),
    presets={128: "small"},
    # Five passes over 104 million words in steps of 96 x 256.
    settings={"steps": 21_000, "precision": "bf16-mixed"},
    stride=8,
    label="the paper's recipe",
    cost="6 min a model and 21,000 steps on an H200 with --set compile=default --set graph=true",
    note="A small part of the paper's training in its small configuration: bfloat16 products, evaluated with a sliding "
    "window that moves on by 8 words, with carried context in one go. The text wikipedia-100m is other articles of "
    "Wikipedia in the format of WikiText-103, with as many words in its vocabulary. Models trained on it are scored on "
    "WikiText-103's own validation and test sets: none of their articles are in it, and 0.5 % of their words are "
    "outside its vocabulary and stand as <unk>.",
    decides=False,
)
STAND_INS = {
    "wikipedia-fast": replace(
        WIKIPEDIA,
        presets={128: "small-fast"},
        label="a faster recipe",
        note="The recipe is small-fast, the same for every model and chosen by short trainings of the Delta Network "
        f"and their validation perplexity: test is the cleaner column. {WIKIPEDIA.note}",
    ),
    "wikipedia": WIKIPEDIA,
    "wikitext2": LanguageScale(
        sizes=(128,),
        presets={128: "tiny"},
        settings={"steps": 3600},
        stride=64,
        label="a tiny model",
        cost="15 min a model on 2 cores",
        note="4 layers, D = 128, L = 128, 3600 steps of 2048 words (3.5 epochs of WikiText-2), evaluated with a "
        "sliding window that moves on by 64 words: learning on real text within the hour on two CPU cores.",
        decides=False,
    ),
}
"""Other data and budgets of Tables 2 to 5, each in one size."""


def labels(*names: str) -> dict[str, str]:
    """Return the `Experiment.models` of a table with these rows."""
    return {name: MODELS[name].label for name in names}


def configure(
    scales: Mapping[str, LanguageScale], *place: Any, corpus: Mapping[str, Any], set: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the whole configuration of the cell at `place` (scale, model, size, seed) in a table with those scales."""
    scale, model, size, seed = place
    at, row = scales[scale], MODELS[model]
    runner.check_settings(FIELDS, set)
    choice = {"preset": at.presets[size], **row.choice, **at.settings, "seed": seed, **set}
    found = plan(corpus["words"], **choice)
    if row.wide:
        wide = {"m": found.model.d_model // found.model.n_heads}
        found = plan(corpus["words"], **{"feature_map_options": wide, **choice})
    task = found.task
    if task["documents"] != "none":
        check_forgets(found.model)
    rule = found.model.rule if found.model.mixer == "fast_weight" else "none"
    # Named only where they are not the default: older cells keep their names.
    usual = {"documents": "none", "order": "stream"}
    return runner.cell_config(
        place,
        {"corpus": corpus, "set": set},
        found.training,
        rule=rule,
        **{name: task[name] for name in ("segment", "batch_size", "eval_batch", "context")},
        excerpt=at.excerpt,
        network=storable(found.model.to_dict()),
        evaluations=_evaluations(at, found.model.mixer, task["context"]),
        **{name: task[name] for name, value in usual.items() if task[name] != value},
    )


def _evaluations(at: LanguageScale, mixer: str, context: str) -> list[dict[str, Any]]:
    """Return how the trained model is scored; the last score is the one that counts."""
    if context == "limited":
        return [{"name": "sliding", "stride": at.stride}]
    carried = {"name": "carried", "batch": at.rows}
    if mixer != "relative":
        return [carried]
    return [{**carried, "mem_len": memory, "segment": segment} for memory, segment in at.memories]


def build(config: Mapping[str, Any], data: Path | None) -> tuple[LanguageTask, TrainingConfig]:
    """Return the task and the training of a cell."""
    corpus, network = corpus_of(config, data), LanguageModelConfig.from_dict(config["network"])
    task = LanguageTask(network, corpus, eval_batch=config["eval_batch"], **batching(config))
    return task, runner.training_of(config, log_every=min(200, max(1, config["steps"] // 50)))


def batching(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the text of a cell is cut for training, as `LanguageTask` takes it."""
    names = ("segment", "batch_size", "context", "documents", "order", "seed")
    return {name: config[name] for name in names if name in config}


def score(config: Mapping[str, Any], folder: Path, data: Path | None, device: str) -> dict[str, Any]:
    """Measure the perplexities of the best checkpoint."""
    run = LanguageRun.open(folder)
    model, checkpoint = run.load("best", device)
    corpus = corpus_of(config, data)
    found = [_evaluate(config, model, corpus, folder, options, device) for options in config["evaluations"]]
    about = {"parameters": model.n_parameters, "best_step": checkpoint.step, "sets": sets(corpus.manifest)}
    return {**found[-1], **about, "evaluations": found if len(found) > 1 else []}


def _evaluate(
    config: Mapping[str, Any],
    model: LanguageModel,
    corpus: Corpus,
    folder: Path,
    options: Mapping[str, Any],
    device: str,
) -> dict[str, Any]:
    how = evaluate.protocol(**options, model=model.config, trained_segment=config["segment"], device=device)
    found: dict[str, Any] = {"mem_len": how.mem_len} if how.mem_len is not None else {}

    def measure(split: str) -> dict[str, Any]:
        stream = mark_documents(corpus.split(split), corpus.tokenizer, config.get("documents", "none"))
        result = evaluate.measure(model, stream, how)
        return {"loss": result.loss, "ppl": result.ppl, "tokens": result.tokens}

    for split in SPLITS:
        found[split] = runner.read_or_measure(folder / "eval" / f"{split}-{how.slug}.json", partial(measure, split))
    if how.mem_len is not None:
        model.set_memory(how.mem_len, how.clamp_len)
    return {**found, "state_size": model.state_size(how.segment)}


run = runner.runner(build, score)


PLOT = Plot(kind="perplexity", x_label="training steps", y_label="validation perplexity", log_y=True)

_WORDS_OF_A_PASS = {"wikipedia-100m": ("Wikipedia", 103_800_000)}
_NUMBERS: dict[float, str] = {1: "one pass", 2: "two passes", 3: "three passes", 4: "four passes", 5: "five passes"}
_ENOUGH = "wikipedia-fast", 5
"""A scale, and from how many passes over its text on it decides the order of models."""


def describe(config: Mapping[str, Any]) -> str:
    """Say how long a model was trained on which text: in passes over it where its length is known."""
    name, passes = config["corpus"]["name"], _passes(config)
    if passes is None:
        return f"{name}, {config['steps']:,} steps"
    return f"{_NUMBERS.get(passes) or f'{passes:g} passes'} of {_WORDS_OF_A_PASS[name][0]}"


def _passes(config: Mapping[str, Any]) -> float | None:
    """Return the passes over the text, to a tenth; None where its length is not known."""
    name = config["corpus"]["name"]
    if name not in _WORDS_OF_A_PASS:
        return None
    return round(config["steps"] * config["segment"] * config["batch_size"] / _WORDS_OF_A_PASS[name][1], 1)


def long_enough(config: Mapping[str, Any]) -> bool:
    """Return whether a model was trained long enough to be compared with others of the same training."""
    scale, least = _ENOUGH
    return config["scale"] == scale and (_passes(config) or 0) >= least


def experiment(
    models: Mapping[str, str],
    numbers: Mapping[int, Mapping[str, Shown]],
    costs: tuple[str, str, str],
    small_note: str = "",
    compared: tuple[str, str] | None = None,
    **rest: Any,
) -> Experiment:
    """Return a table of language models.

    Args:
        numbers: the paper's perplexities, by d_model and model.
        costs: at scale smoke, at scale small and at full scale.
        small_note: what the note on scale small says of this table alone.
        compared: two models whose difference over training is drawn as well.
    """
    smoke, small, full = costs
    scales = {
        "smoke": replace(SMOKE, cost=smoke),
        "small": replace(SMALL, cost=small, note=f"{SMALL.note} {small_note}".strip()),
        **STAND_INS,
        "code": replace(CODE, sizes=tuple(numbers), cost=full),
        "paper": replace(PAPER, sizes=tuple(numbers), cost=full),
    }
    shared: dict[str, Any] = {
        "run": run,
        "plot": replace(PLOT, compared=compared),
        "paper": lambda config: paper_entry(numbers.get(config["size"], {}).get(config["model"])),
        "table": table(models, numbers),
        "make_inputs": make_inputs,
        "inputs": INPUTS,
        "stored": STORED,
        "fields": FIELDS,
        "needs": ("lightning_fabric",),
        "formerly": tuple(STAND_INS),
        "size_name": "D",
        "paper_corpus": WIKITEXT103.name,
        "configure": partial(configure, scales),
        "configure_as_paper": partial(configure, PROTOCOL),
        "describe": describe,
        "decided_by": f"{_NUMBERS[_ENOUGH[1]]} over Wikipedia (scale {_ENOUGH[0]}), or WikiText-103 at scale paper",
        "long_enough": long_enough,
        "fixed_sizes": True,
    }
    return Experiment(models=models, scales=scales, **{**shared, **rest})

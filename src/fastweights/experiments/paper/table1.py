"""Table 1: the φ functions in Vaswani's Transformer, English to German [Sec. 6.2, App. E].

The paper varies d_dot alone: with d_key = 64, the Performer has 64, 256 and 512 and DPFP 256 and 512. The models here
are named after d_dot / d_key, so that smaller ones have the same proportions. Sizes are d_model: 1024 is the paper's
"big", 512 the "base" of Vaswani et al., which the paper has not.

    fastweights reproduce table1 --scale paper --sizes 512 --data data/europarl-de-en --set steps=20000

trains "base" on any sentence pairs; the page and every cell say which they were.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastweights.experiments.engine import translation_tables
from fastweights.experiments.engine.experiment import (
    FULL,
    NOT_RUN,
    CellRecord,
    Claim,
    Experiment,
    Plot,
    Results,
    Table,
)
from fastweights.experiments.engine.perplexity import all_hold, all_of
from fastweights.experiments.engine.translation_tables import MODELS, SPLITS, TranslationScale, configure
from fastweights.training.tasks.translation import FIELDS

Pair = tuple[float, float]
"""BLEU on validation and test set."""

PAPER: dict[str, Pair] = {
    "softmax": (26.6, 27.7),
    "linear": (25.5, 26.8),
    "performer-1": (24.2, 24.4),
    "performer-4": (24.9, 25.3),
    "performer-8": (26.7, 27.7),
    "dpfp-2": (26.2, 26.9),
    "dpfp-4": (26.2, 27.1),
}
LABELS = {name: model.label for name, model in MODELS.items()}
ENOUGH = 95.0
"""BLEU from which number words count as learned; their translation has one right answer."""

AS_GOOD = 0.5
"""BLEU within which one model is as good as another."""

LONG = {"updates": 20_000, "tokens": 8_000}
"""From how many updates, of how many tokens, on a training decides the order of models of any size."""

TITLES = {"europarl-de-en, en-de": "Europarl"}
SIZE = 1024
"""d_model of the paper's models."""

PAPER_SCALE = TranslationScale(
    sizes=(SIZE,),
    presets={1024: "big", 512: "base"},
    settings={"precision": "bf16-mixed", "bleu_sentences": 3000},
    cost="weeks on one GPU; --sizes 512 is the smaller `base`",
    note="Only cells trained on WMT14 with D = 1024 can be compared with the paper's BLEU; what the models learned "
    "from is said in the table. φ is in all three attentions, with the sum rule and attention normalisation. "
    "Ours, where the paper says nothing: a rate of 5e-4, bfloat16 products, the checkpoint with the best BLEU by "
    "greedy search, and beam 4 with a length penalty of 0.6 after Wu et al. The Performer's features are drawn "
    "anew for each batch, but only once in a training of less than a tenth of the preset's updates.",
)
SCALES = {
    "smoke": TranslationScale(
        sizes=(16,),
        presets={16: "tiny"},
        settings={"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "max_tokens": 200}
        | {"steps": 4, "eval_every": 2, "bleu_sentences": 4},
        sentences=4,
        cost="10 s",
        note="Four steps of training: a check that everything runs, not a result.",
        decides=False,
    ),
    "small": TranslationScale(
        sizes=(64,),
        presets={64: "tiny"},
        settings={"steps": 500, "eval_every": 250, "bleu_sentences": 100},
        sentences=200,
        cost="2 min on 2 cores",
        note="Number words in place of WMT14: lists of English numbers to German ones, scored on numbers that never "
        "came up in training. Two layers each with D = 64 and d_key = 16. BLEU is not comparable with the paper's: a "
        "number is right or wrong, models that have learned the task end near 100, and after 500 updates their order "
        "says how fast they learn, not how well they translate.",
        decides=False,
    ),
    "code": replace(
        PAPER_SCALE, cost="weeks on one GPU", note="The authors' translation code was never released: as scale paper."
    ),
    "paper": PAPER_SCALE,
}


def bleu(record: CellRecord, split: str) -> float | None:
    """Return the BLEU of a cell; 0 where its training diverged, None where there is no such split."""
    if "diverged_at" in record.metrics:
        return 0.0
    found = record.metrics.get(split)
    return None if found is None else float(found["bleu"])


def mean_bleu(results: Results, model: str) -> dict[str, float]:
    """Return the mean over the seeds on each split, at the largest size that all models were run at."""
    records = results.of(model, _size(results))
    found = {split: [bleu(record, split) for record in records] for split in SPLITS}
    complete = {split: [v for v in values if v is not None] for split, values in found.items()}
    return {split: sum(values) / len(values) for split, values in complete.items() if values}


def _size(results: Results) -> int | None:
    models = [model for model in MODELS if results.of(model)]
    shared = results.sizes(*models) if models else []
    return max(shared or results.sizes(), default=None)


def show(values: Mapping[str, float]) -> str:
    return " / ".join(f"{values[split]:.1f}" for split in SPLITS if split in values)


def _paper(*models: str) -> str:
    return " against ".join(show(dict(zip(SPLITS, PAPER[model], strict=True))) for model in models)


def _higher(results: Results, model: str, other: str, text: str, margin: float = 0.0) -> Claim:
    """Judge that `model` has at least the BLEU of `other` less `margin` on every split; more without a margin."""
    ours, theirs = mean_bleu(results, model), mean_bleu(results, other)
    shared = [split for split in SPLITS if split in ours and split in theirs]
    if not shared:
        return Claim(text, NOT_RUN, _paper(model, other), None)
    leads = [ours[split] - theirs[split] + margin for split in shared]
    ahead = all(lead > 0 or (lead == 0 and margin > 0) for lead in leads)
    return Claim(text, f"{show(ours)} against {show(theirs)}", _paper(model, other), ahead)


def claims(results: Results) -> list[Claim]:
    rising = [("performer-4", "performer-1"), ("performer-8", "performer-4")]
    return [
        all_of(
            [_higher(results, model, "linear", "") for model in ("dpfp-2", "dpfp-4")],
            "DPFP has a higher BLEU than Linear, with either ν",
        ),
        _higher(results, "dpfp-2", "performer-4", "DPFP has a higher BLEU than the Performer at d_dot = 4 d_key"),
        all_of([_higher(results, *pair, "") for pair in rising], "The Performer's BLEU rises with its d_dot"),
        _higher(
            results,
            "performer-8",
            "softmax",
            f"With d_dot = 8 d_key the Performer is as good as the standard Transformer (within {AS_GOOD} BLEU)",
            AS_GOOD,
        ),
        _best(results),
    ]


def _best(results: Results) -> Claim:
    """Judge the test set alone: on the paper's validation set the largest Performer is 0.1 ahead of softmax."""
    text, paper = "No model has a higher test BLEU than the standard Transformer", "27.7, shared with the Performer"
    tests = {model: mean_bleu(results, model).get("test") for model in MODELS}
    ours = tests.pop("softmax")
    rivals = {model: value for model, value in tests.items() if value is not None}
    if ours is None or not rivals:
        return Claim(text, NOT_RUN, paper, None)
    highest = max(rivals, key=rivals.__getitem__)
    found = f"{ours:.1f} against {rivals[highest]:.1f} of {LABELS[highest]}"
    return Claim(text, found, paper, all_hold([ours >= rivals[highest], *[None] * (len(tests) - len(rivals))]))


def table(results: Results) -> Table:
    """Return a row for each model and size, with its corpus, and for number words whether it learned them."""
    names = {record.config["corpus"]["name"] for record in results.records}
    numbers = any(name.startswith("number words") for name in names)
    header = ("model", "D", "d_dot", "pairs", "validation", "test", "paper, validation", "paper, test", "parameters")
    rows = []
    for record in results.records:
        config, values = record.config, {split: bleu(record, split) for split in SPLITS}
        ours = ["" if value is None else f"{value:.1f}" for value in values.values()]
        size = "" if config["size"] == SIZE else f" (D = {SIZE})"
        theirs = [f"{value:.1f}{size}" for value in PAPER[config["model"]]]
        parameters = record.metrics.get("parameters")
        count = "diverged" if parameters is None else f"{parameters / 1e6:.2f} M"
        learned = [_learned(values["test"])] if numbers else []
        about = (LABELS[config["model"]], str(config["size"]), str(config["d_dot"]), config["corpus"]["name"])
        rows.append((*about, *ours, *theirs, count, *learned))
    return Table(header + ((f"learned (BLEU of at least {ENOUGH:g})",) if numbers else ()), tuple(rows))


def _learned(value: float | None) -> str:
    return "" if value is None else "yes" if value >= ENOUGH else "no"


def configure_as_paper(scale: str, model: str, size: int, seed: int, **given: Any) -> Mapping[str, Any]:
    """Return the cell of the paper, which has one size."""
    return configure(SCALES, scale, model, SIZE, seed, **given)


def paper(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the paper's BLEU on WMT14 with D = 1024, whatever this cell learned from."""
    return dict(zip(SPLITS, PAPER[config["model"]], strict=True))


def describe(config: Mapping[str, Any]) -> str:
    """Say how long a model was trained on which pairs."""
    name = config["corpus"]["name"]
    return f"{TITLES.get(name, name)}, {config['steps']:,} updates"


def long_enough(config: Mapping[str, Any]) -> bool:
    """Return whether a model was trained long enough to be compared with others of the same training."""
    tokens = config["batches"]["max_tokens"] * config["training"]["accumulate"]
    return config["scale"] in FULL and config["steps"] >= LONG["updates"] and tokens >= LONG["tokens"]


EXPERIMENT = Experiment(
    name="table1",
    title="φ functions in machine translation",
    where="Table 1, Sec. 6.2",
    statement="The Performer is as good as the basic Transformer when the number of samples m is large enough. Our "
    "DPFP model outperforms the Linear Transformer as well as the Performer when d_dot is relatively small; providing "
    "a good trade-off between simplicity and performance.",
    models=LABELS,
    scales=SCALES,
    configure=partial(configure, SCALES),
    configure_as_paper=configure_as_paper,
    run=translation_tables.run,
    claims=claims,
    plot=Plot(kind="learning", x_label="training steps", y_label="validation BLEU"),
    paper=paper,
    table=table,
    make_inputs=translation_tables.make_inputs,
    inputs=translation_tables.INPUTS,
    fields=FIELDS,
    stored=translation_tables.STORED,
    needs=("lightning_fabric", "sacrebleu"),
    paper_corpus="WMT14 en-de",
    describe=describe,
    decided_by=f"{LONG['updates']:,} updates of {LONG['tokens']:,} tokens at scale paper, with any size and pairs",
    long_enough=long_enough,
    measure="BLEU",
    size_name="D",
)

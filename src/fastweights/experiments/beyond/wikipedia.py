"""Tables 2 to 5 in the small configuration with fewer words, on any text of that vocabulary. Not in the paper.

WikiText-103's training set is not always to be had. Any corpus with a vocabulary of as many words will do; it is named
with the results, and its numbers stand beside the paper's without replacing them. All models have the same budget of
words and the paper's recipe, shortened: the cosine falls to 0 at the last step. The paper has the rows of Tables 3 and
4 in the medium configuration only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastweights.experiments.engine import language_tables
from fastweights.experiments.engine.experiment import Claim, Results
from fastweights.experiments.engine.language_tables import LanguageScale
from fastweights.experiments.engine.perplexity import Pair, Shown, against, best_of, lower, show_pair
from fastweights.experiments.paper import table2, table3, table4, table5

RULES = language_tables.labels(
    "transformer", "linear", "delta", "performer", "performer-delta", "dpfp-1", "dpfp-1-delta"
)
ABLATION = {name: f"Delta Network, {label}" for name, label in table3.LABELS.items() if name not in RULES}
CARRIED = {name: f"{table4.LABELS[name]}, carried context" for name in ("linear-carried", "delta-carried")}
LABELS = {**RULES, **ABLATION, **CARRIED}
SMALL: dict[str, Pair] = {name: {**table5.PAPER, **table2.PAPER[128]}[name] for name in RULES}
MEDIUM: dict[str, Shown] = {
    name: pair for name, pair in {**table3.PAPER, **table4.SHOWN}.items() if name in (*ABLATION, *CARRIED)
}
PAPER: dict[int, Mapping[str, Shown]] = {128: SMALL, 256: MEDIUM}
# Five passes over 104 million words in steps of 96 x 256.
FULL = LanguageScale(presets={128: "small"}, settings={"steps": 21_000, "precision": "bf16-mixed"}, stride=8)
COSTS = ("5 s", "6 min on 2 cores", "6 min a model on an H200 with --set compile=default --set graph=true")
NOTE = (
    "A small part of the paper's training, on the text that is named with the table: 21,000 steps where it has "
    "500,000, or what --set steps says; bfloat16 products; evaluated with a sliding window that moves on by 8 words, "
    "with carried context in one go. With one seed and so little training, models closer than 1 % are not told apart. "
    "The text wikipedia-100m is other articles of Wikipedia in the format of WikiText-103, with as many words in its "
    "vocabulary: models trained on it are scored on WikiText-103's own validation and test sets. None of their "
    "articles are in it, and 0.5 % of their words are outside its vocabulary and stand as <unk>."
)
STATEMENT = (
    "Not in the paper. On WikiText-103 its Tables 2 and 5 find that the delta rule improves on the sum rule with every "
    "feature map, and that the Transformer has the lowest perplexity. Tables 3 and 4, medium configuration, find that "
    "the delta rule does best without positions and attention normalisation, and that it improves where context is not "
    "truncated, which breaks the sum rule."
)


def claims(results: Results) -> list[Claim]:
    pairs = {
        "ELU + 1": ("delta", "linear"),
        "Performer": ("performer-delta", "performer"),
        "DPFP-1": ("dpfp-1-delta", "dpfp-1"),
    }
    medium = (*table3.claims(results), table4.sum_breaks(results), table4.delta_improves(results))
    return [
        *(
            is_lower(results, *pair, f"{label}: the delta rule has a lower perplexity than the sum rule")
            for label, pair in pairs.items()
        ),
        transformer_is_best(results, RULES),
        *(replace(claim, paper=f"medium: {claim.paper} on WikiText-103") for claim in medium),
    ]


def is_lower(results: Results, model: str, other: str, text: str) -> Claim:
    return lower(results, model, other, text, f"{against({128: SMALL}, model, other)} on WikiText-103")


def transformer_is_best(results: Results, labels: Mapping[str, str]) -> Claim:
    theirs = f"{show_pair(SMALL['transformer'])} on WikiText-103"
    return best_of(results, "transformer", labels, "The Transformer has the lowest perplexity", theirs)


SCALES = language_tables.scales((128,), COSTS, FULL, NOTE)
EXPERIMENT = language_tables.experiment(
    name="wikipedia",
    title="Small configuration with a small part of the training",
    where="not in the paper; in the manner of Tables 2 to 5",
    statement=STATEMENT,
    models=LABELS,
    scales=SCALES,
    claims=claims,
    numbers=PAPER,
)

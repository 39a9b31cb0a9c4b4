"""WikiText-2 with the `tiny` preset: learning on real text within the hour on two CPU cores. Not in the paper.

Four models, the same seed and steps. The claims are what the paper finds on WikiText-103 with models of 44 M parameters
and a thousand times the training; whether they show in so small a run is what the results say. One seed, 5 M parameters
and 3.5 epochs cannot tell models apart that are a few per cent from each other.
"""

from __future__ import annotations

from fastweights.experiments.beyond import wikipedia
from fastweights.experiments.engine import language_tables
from fastweights.experiments.engine.corpora import WIKITEXT2
from fastweights.experiments.engine.experiment import Claim, Results
from fastweights.experiments.engine.language_tables import LanguageScale

LABELS = language_tables.labels("transformer", "linear", "delta", "dpfp-1-delta")
FULL = LanguageScale(presets={128: "tiny"}, settings={"steps": 3600}, stride=64)
SCALES = language_tables.scales(
    (128,),
    ("2 s", "1 min on 2 cores", "1 h on 2 cores"),
    FULL,
    note="Not in the paper: 4 layers, D = 128, L = 128, 3600 steps of 2048 words (3.5 epochs of WikiText-2), evaluated "
    "with a sliding window that moves on by 64 words. It shows that the models learn real text, not how they compare "
    "when trained to the end: with one seed and so little training, models closer than 1 % are not told apart, and "
    "a few per cent may be chance.",
)
STATEMENT = (
    "Not in the paper. Its Table 2 finds on WikiText-103 that the delta rule improves on the sum rule and that the "
    "Transformer stays ahead of both; App. D.3 that DPFP-1 with the delta rule comes closest to it."
)


def claims(results: Results) -> list[Claim]:
    return [
        wikipedia.is_lower(results, "delta", "linear", "The delta rule has a lower perplexity than the sum rule"),
        wikipedia.is_lower(results, "dpfp-1-delta", "delta", "DPFP-1 with the delta rule improves on ELU + 1"),
        wikipedia.transformer_is_best(results, LABELS),
    ]


EXPERIMENT = language_tables.experiment(
    name="wikitext2",
    title="Small language models on WikiText-2",
    where="not in the paper; in the manner of Table 2",
    statement=STATEMENT,
    models=LABELS,
    scales=SCALES,
    claims=claims,
    corpus=WIKITEXT2,
)

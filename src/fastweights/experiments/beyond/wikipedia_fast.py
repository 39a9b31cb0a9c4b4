"""The models of `wikipedia` with the recipe `small-fast`: the same words, learned faster. Not in the paper.

One recipe for every model, chosen by short trainings of the Delta Network alone; `models/presets.py` has it.
"""

from __future__ import annotations

from dataclasses import replace

from fastweights.experiments.beyond import wikipedia
from fastweights.experiments.engine import language_tables

FULL = replace(wikipedia.FULL, presets={128: "small-fast"})
NOTE = (
    "The recipe is not the paper's but small-fast, the same for every model and chosen by short trainings of the "
    f"Delta Network and their validation perplexity: test is the cleaner column. {wikipedia.NOTE}"
)
SMALL_NOTE = "At this scale the recipe is that of all tables."

EXPERIMENT = language_tables.experiment(
    name="wikipedia-fast",
    title="Small configuration with a faster recipe",
    where="not in the paper; in the manner of Tables 2 to 5",
    statement=wikipedia.STATEMENT,
    models=wikipedia.LABELS,
    scales=language_tables.scales((128,), wikipedia.COSTS, FULL, NOTE, SMALL_NOTE),
    claims=wikipedia.claims,
    numbers=wikipedia.PAPER,
)

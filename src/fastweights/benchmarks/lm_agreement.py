"""`fastweights bench lm-agreement`: is the fast way of training the plain one, over hundreds and thousands of updates?

Two short trainings of the same model in each way of `bench lm`, each with its own warm-up of a tenth of its updates and
its cosine to 0, from the same weights and with the same batches:

losses       the first losses, one by one, without dropout, whose masks differ from way to way; they may differ by
             `AGREEMENT`.
perplexity   validation perplexity, by segments, at the end of a training with dropout; it may differ by `ENDING`.

By default "torch", float32 without any kernel of ours, against "fast".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fastweights.benchmarks import lm
from fastweights.benchmarks.lm import AGREEMENT, MODELS, SEED, WAYS
from fastweights.benchmarks.record import Record
from fastweights.common.tables import look_up
from fastweights.data.text.corpus import Corpus
from fastweights.models.presets import RECIPES

# The relative difference that perplexities may have.
ENDING = 1e-2
# Points of each curve.
POINTS = 40


def perplexities(
    corpus: Corpus, size: str, model: str, ways: Sequence[str], device: str, steps: int, **changes: Any
) -> dict[str, Any]:
    """Train for `steps` in each way, and compare the perplexities at the end; the losses on the way are kept too."""
    trained: dict[str, Any] = {}
    for way in ways:
        learner = lm.make(corpus, size, model, way, device, steps=steps, **changes)
        curve, start = [], time.perf_counter()
        while learner.step < steps:
            learner.advance()
            if learner.step % -(-steps // POINTS) == 0 or learner.step == steps:
                curve.append([learner.step, learner.read()["loss"]])
        spent = time.perf_counter() - start
        trained[way] = {"training_curve": curve, "valid": learner.validate(), "train_s": round(spent, 1)}
        del learner
        lm.tidy(device)
    exact = [trained[ways[0]]["valid"]["ppl"]]
    off = {way: lm.furthest([trained[way]["valid"]["ppl"]], exact) for way in ways[1:]}
    return {"ways": trained, "largest_difference": off, "agree": all(x <= ENDING for x in off.values())}


def run(
    out: Path | None,
    size: str,
    model: str,
    ways: Sequence[str],
    folder: Path,
    device: str,
    losses: int,
    steps: int,
    changes: Mapping[str, Any],
    as_json: bool = False,
) -> bool:
    """Compare first losses, then perplexities. False where the ways do not agree."""
    look_up(RECIPES, size, "size")
    look_up(MODELS, model, "model")
    for way in ways:
        look_up(WAYS, way, "way of training")
    if len(set(ways)) < 2:
        raise ValueError(f"two ways of training can be compared, not {','.join(ways)}; they are {', '.join(WAYS)}")
    record, corpus = Record("lm-agreement", device, SEED, out, as_json), Corpus.load(folder)
    row: dict[str, Any] = {"size": size, "model": model, "data": corpus.manifest["name"], "changes": dict(changes)}
    row |= {"ways": list(ways), "tolerance": {"losses": AGREEMENT, "perplexity": ENDING}, "agree": None}
    where = (corpus, size, model, ways, device)
    record.console.print(f"{size} {model}, on {corpus.manifest['name']}: the first {losses} losses", style="dim")
    row["losses"] = {"count": losses, **lm.agreement(*where, losses, steps=losses, **changes)}
    record.add(row)
    record.console.print(f"validation perplexity after {steps} updates", style="dim")
    row["perplexity"] = {"steps": steps, **perplexities(*where, steps, **changes)}
    row["agree"] = row["losses"]["agree"] and row["perplexity"]["agree"]
    record.finish(_table(row))
    return bool(row["agree"])


def _table(row: Mapping[str, Any]) -> Table:
    losses, ending = row["losses"], row["perplexity"]
    table = Table(
        "", "first loss", f"loss {losses['count']}", "differ by", f"perplexity {ending['steps']}", "differs by"
    )
    for way in row["ways"]:
        off = (part["largest_difference"].get(way) for part in (losses, ending))
        first, last = (f"{value:.2%}" if value is not None else "-" for value in off)
        found = losses["losses"][way]
        table.add_row(
            way, f"{found[0]:.4f}", f"{found[-1]:.4f}", first, f"{ending['ways'][way]['valid']['ppl']:.2f}", last
        )
    return table

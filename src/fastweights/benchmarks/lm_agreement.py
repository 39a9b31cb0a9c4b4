"""`fastweights bench lm-agreement`: is the fast way of training the plain one, over hundreds and thousands of updates?

Two short trainings of the same model in each way of `bench lm`, each with its own warm-up of a tenth of its updates and
its cosine to 0, from the same weights and with the same batches:

losses       the first losses, one by one, without dropout, whose masks differ from way to way; they may differ by
             `AGREEMENT`.
perplexity   validation perplexity, by segments, at the end of a training with dropout; it may differ by `ENDING`.

By default "torch", float32 without any kernel of ours, against "fast".
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastweights.benchmarks import lm
from fastweights.benchmarks.lm import AGREEMENT, MODELS, SEED, WAYS, Gpu
from fastweights.benchmarks.record import Out, Record
from fastweights.commands.options import AsJson, chosen_names, input_errors, option
from fastweights.common.tables import look_up
from fastweights.data.text.corpus import Corpus
from fastweights.experiments.engine.runner import start_afresh
from fastweights.models.presets import PRESETS

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
        start_afresh(device)
    exact = [trained[ways[0]]["valid"]["ppl"]]
    off = {way: lm.furthest([trained[way]["valid"]["ppl"]], exact) for way in ways[1:]}
    return {"ways": trained, "largest_difference": off, "agree": all(x <= ENDING for x in off.values())}


@input_errors((ValueError, ImportError, OSError))
def run(
    corpus: Annotated[Path, option("A prepared corpus.")],
    out: Out = None,
    size: Annotated[str, option(f"One of {', '.join(PRESETS)}.")] = "small",
    model: Annotated[str, option(f"One of {', '.join(MODELS)}.")] = "delta",
    ways: Annotated[
        str, option(f"Ways of training, from {', '.join(WAYS)}; others should learn what the first learns.")
    ] = "torch,fast",
    device: Gpu = "cuda",
    losses: Annotated[int, typer.Option(min=1, help="First losses to compare, without dropout.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Updates before perplexities are compared.")] = 2000,
    batch: Annotated[int | None, typer.Option(min=1, help="Segments in a step.", show_default="the size's")] = None,
    lr: Annotated[float | None, option("Learning rate.", "the size's")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare fast training with plain training: the first losses, and perplexity after a short training."""
    lm.check_device(device, "bench lm-agreement", "--size tiny --ways torch,plain")
    look_up(PRESETS, size, "size")
    look_up(MODELS, model, "model")
    compared = chosen_names(WAYS, ways, "way of training")
    if len(set(compared)) < 2:
        raise ValueError(f"two ways of training can be compared, not {ways}; they are {', '.join(WAYS)}")
    record, text = Record("lm-agreement", device, SEED, out, as_json), Corpus.load(corpus)
    given = {"batch_size": batch, "lr": lr}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    row: dict[str, Any] = {"size": size, "model": model, "data": text.manifest["name"], "changes": changes}
    row |= {"ways": compared, "tolerance": {"losses": AGREEMENT, "perplexity": ENDING}, "agree": None}
    where = (text, size, model, compared, device)
    record.console.print(f"{size} {model}, on {text.manifest['name']}: the first {losses} losses", style="dim")
    row["losses"] = {"count": losses, **lm.agreement(*where, losses, steps=losses, **changes)}
    record.add(row)
    record.console.print(f"validation perplexity after {steps} updates", style="dim")
    row["perplexity"] = {"steps": steps, **perplexities(*where, steps, **changes)}
    row["agree"] = row["losses"]["agree"] and row["perplexity"]["agree"]
    record.finish(_table(row))
    if not row["agree"]:
        raise typer.Exit(1)


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

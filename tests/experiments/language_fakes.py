"""Results of the language-model tables, made up."""

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import CellRecord, Results

CORPORA = {
    "smoke": {"name": "Python's documentation", "words": 5693, "fingerprint": "a"},
    "paper": {"name": "WikiText-103", "words": 267_735, "fingerprint": "b"},
    "wikipedia": {"name": "wikipedia-100m", "words": 267_735, "fingerprint": "c"},
    "wikipedia-fast": {"name": "wikipedia-100m", "words": 267_735, "fingerprint": "c"},
    "wikitext2": {"name": "WikiText-2", "words": 33_278, "fingerprint": "d"},
}


def given(name, scale, **settings):
    if name == "speed":
        return {"set": settings, "device": "cpu"}
    return {"corpus": CORPORA.get({"small": "smoke"}.get(scale, scale), CORPORA["paper"]), "set": settings}


def cells(name, scale="paper", **settings):
    return EXPERIMENTS[name].cells(scale, None, given(name, scale, **settings))


def record(cell, metrics):
    return CellRecord(
        metrics=metrics,
        wall_s=1.0,
        config=cell.config,
        paper=cell.paper,
        commit="abc",
        hardware="a CPU",
        versions={"torch": "2"},
    )


def metrics(valid, test, **more):
    """Of a trained model; None where it diverged."""
    curve = {"curve": [[10, 6.0], [20, 5.0]], "last_loss": 5.0, "best_loss": 5.0, "steps": 20}
    if valid is None:
        return {**curve, "diverged_at": 20}
    scores = {"valid": {"loss": 3.0, "ppl": valid, "tokens": 9}, "test": {"loss": 3.0, "ppl": test, "tokens": 9}}
    return {**curve, **scores, "parameters": 1_000_000, "state_size": 131_072, "evaluations": [], **more}


def results(name, perplexities, scale="paper", more=None, **settings):
    """Results from {model: (valid, test)} at every size, or {(model, size): ...}."""
    found = []
    for cell in cells(name, scale, **settings):
        model, size = cell.config["model"], cell.config["size"]
        pair = perplexities.get((model, size), perplexities.get(model))
        if pair is not None:
            found.append(record(cell, metrics(*pair, **(more or {}).get(model, {}))))
    return Results(found)


def verdicts(name, found):
    return [claim.holds for claim in EXPERIMENTS[name].claims(found)]

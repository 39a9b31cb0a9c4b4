"""A page of results that took no training."""

from types import SimpleNamespace

import pytest

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Selection
from fastweights.experiments.engine.store import Store
from fastweights.experiments.engine.sweep import sweep
from fastweights.report.build import build
from tests.experiments import language_fakes
from tests.experiments.fakes import Training
from tests.experiments.test_store import Silent

LONG = "Donaudampfschifffahrts" * 12
FIGURES = ("fig1", "fig2", "fig3", "fig5")
EUROPARL = {"name": "europarl-de-en, en-de", "pieces": 32_000, "fingerprint": "e"}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Four figures at scale small, Table 1 on other pairs and Table 4 on another text, with what makes pages wide."""
    store = Store(tmp_path_factory.mktemp("out"))
    with pytest.MonkeyPatch.context() as patch:
        Training(patch)
        for name in FIGURES:
            experiment = EXPERIMENTS[name]
            sweep(experiment, experiment.cells("small", Selection(seeds=(1, 2))), store, Silent())
    table1 = EXPERIMENTS["table1"]
    for cell in table1.cells("paper", None, {"corpus": EUROPARL, "set": {"steps": 2000, "norm": "pre"}}):
        scores = {"valid": {"bleu": 6.0}, "test": {"bleu": 5.0}, "samples": [("A source", "Ein Ziel", LONG)]}
        measured = {"curve": [[1000, 4.0], [2000, 6.0]], "memory_bytes": 524_300_288, "tokens_per_s": 18_976.6}
        store.save("table1", language_fakes.record(cell, {**scores, **measured, "parameters": 60_487_680}))
    for cell in language_fakes.cells("table4", "wikipedia-fast"):
        level = 9.0 if cell.config["model"] == "linear-carried" else 4.3
        curve = [[800, level + 1], [1600, level + 0.3], [2400, level]]
        store.save("table4", language_fakes.record(cell, {**language_fakes.metrics(70.0, 71.0), "curve": curve}))
    path, chapters = build(store)
    return SimpleNamespace(store=store, path=path, chapters={c.experiment.name: c for c in chapters})

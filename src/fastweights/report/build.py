"""Everything that is made from stored results: `results.json`, the plots and the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fastweights.common.files import write_atomically
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import NOT_RUN, Claim, Experiment, Results
from fastweights.experiments.engine.store import Store


@dataclass(frozen=True)
class Chapter:
    """One experiment of the page; without results it has no scale, no figure, and claims that are not run.

    `others` are the same experiment with other settings or other data, with the claims that these can judge.
    """

    experiment: Experiment
    scale: str | None
    results: Results
    claims: list[Claim]
    svg: bytes | None
    others: list[Chapter] = field(default_factory=list)


def build(store: Store, loss: str = "best_loss") -> tuple[Path, list[Chapter]]:
    """Write plots and page for what the store holds; the page's path and its chapters."""
    from fastweights.report.figures import draw
    from fastweights.report.html import page

    chapters = []
    for experiment in EXPERIMENTS.values():
        scale, records = store.current(experiment)
        results = Results(records, loss)
        svg = None
        others = []
        if scale:
            store.assemble(experiment, scale)
            files = draw(experiment, results)
            for kind, content in files.items():
                write_atomically(store.folder(experiment.name) / f"{experiment.name}.{kind}", content)
            svg = files["svg"]
            others = [_other(experiment, scale, Results(group, loss)) for group in store.groups(experiment, scale)[1:]]
        chapters.append(Chapter(experiment, scale, results, experiment.judge(scale, results), svg, others))
    path = store.out / "index.html"
    write_atomically(path, page(chapters).encode())
    return path, chapters


def _other(experiment: Experiment, scale: str, results: Results) -> Chapter:
    from fastweights.report.figures import draw

    judged = [claim for claim in experiment.judge(scale, results) if claim.ours != NOT_RUN]
    return Chapter(experiment, scale, results, judged, draw(experiment, results)["svg"])

"""Everything that is made from stored results: `results.json`, the plots and the page."""

from pathlib import Path

from fastweights.common.files import write_atomically
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import NOT_RUN, Experiment, Results
from fastweights.experiments.engine.store import Store
from fastweights.report.chapter import Chapter
from fastweights.report.drawing import draw, draw_files
from fastweights.report.page import page


def build(store: Store, loss: str = "best_loss") -> tuple[Path, list[Chapter]]:
    """Write plots and page for what the store holds; return the page's path and its chapters."""
    chapters = [_chapter(store, experiment, loss) for experiment in EXPERIMENTS.values()]
    path = store.out / "index.html"
    write_atomically(path, page(chapters).encode())
    return path, chapters


def _chapter(store: Store, experiment: Experiment, loss: str) -> Chapter:
    scale, records = store.current(experiment)
    results = Results(records, loss)
    claims = experiment.judge(scale, results)
    if scale is None:
        return Chapter(experiment, None, results, claims, None)
    store.assemble(experiment, scale)
    for kind, content in draw_files(experiment, results).items():
        write_atomically(store.folder(experiment.name) / f"{experiment.name}.{kind}", content)
    groups = enumerate(store.others(experiment, scale), 1)
    others = [_other(experiment, Results(group, loss), f"{experiment.name}-{number}") for number, group in groups]
    return Chapter(experiment, scale, results, claims, draw(experiment, results, experiment.name), others)


def _other(experiment: Experiment, results: Results, key: str) -> Chapter:
    scale = results.records[0].config["scale"]
    judged = [claim for claim in experiment.judge(scale, results) if claim.ours != NOT_RUN]
    return Chapter(experiment, scale, results, judged, draw(experiment, results, key))

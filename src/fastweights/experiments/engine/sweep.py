"""Running the cells of an experiment that are not known yet, and keeping each as soon as it is done."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from fastweights.common import provenance
from fastweights.experiments.engine.experiment import Cell, Experiment, Record, Setup, given_of
from fastweights.experiments.engine.store import Store


class Watcher(Protocol):
    """What the sweep tells while it runs."""

    def begin(self, experiment: Experiment, known: Sequence[Cell], missing: Sequence[Cell]) -> None: ...
    def step(self, cell: Cell, step: int, loss: float) -> None: ...
    def done(self, record: Record) -> None: ...


def sweep(
    experiment: Experiment,
    cells: Sequence[Cell],
    store: Store,
    watcher: Watcher,
    *,
    device: str = "cpu",
    jobs: int | None = None,
    data: Path | None = None,
    keep: bool = False,
    force: bool = False,
    trained: set[str] | None = None,
) -> None:
    """Make every cell known to the store.

    Args:
        data: where the experiment's data lie.
        keep: leave the folders of finished cells, with their weights.
        force: run the cells again even if they are known, and from the beginning.
        trained: slugs run since the command began, added to here: `force` leaves them alone.
    """
    trained = set() if trained is None else trained
    scale, given = cells[0].config["scale"], given_of(cells[0].config, experiment.given)
    store.clear_temporaries(experiment.name)
    own, anywhere = store.known(experiment.name), store.known_anywhere()
    usable = {slug: record for slug, record in anywhere.items() if not force or slug in trained}
    known = [cell for cell in cells if cell.slug in usable]
    missing = [cell for cell in cells if cell.slug not in usable]
    for cell in known:
        if cell.slug not in own:
            store.save(experiment.name, usable[cell.slug])
    watcher.begin(experiment, known, missing)
    try:
        if missing:
            folder = store.folder(experiment.name) / "runs"
            how: dict[str, Any] = {"jobs": jobs, "data": data, "keep": keep, "force": force}
            setup = Setup(device=device, on_progress=watcher.step, folder=folder, **how)
            with closing(experiment.run(missing, setup)) as outcomes:
                for cell, outcome in outcomes:
                    record = Record(
                        metrics=outcome.metrics,
                        wall_s=outcome.wall_s,
                        config=cell.config,
                        paper=cell.paper,
                        commit=provenance.commit(),
                        hardware=provenance.hardware(device),
                        versions=provenance.versions(),
                    )
                    store.save(experiment.name, record)
                    trained.add(cell.slug)
                    watcher.done(record)
    finally:
        # Also when interrupted: what is done is then as complete as it can be.
        store.assemble(experiment, scale, given)

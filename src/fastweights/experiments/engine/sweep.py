"""Running the cells of an experiment that have no result yet, and storing each as soon as it is done."""

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

from fastweights.common import provenance
from fastweights.experiments.engine.experiment import BadInput, Cell, CellRecord, Experiment, Setup, inputs_of
from fastweights.experiments.engine.store import Store


class Watcher(Protocol):
    """What a sweep reports to while it runs."""

    def begin(self, experiment: Experiment, known: Sequence[Cell], missing: Sequence[Cell]) -> None: ...
    def step(self, cell: Cell, step: int, loss: float) -> None: ...
    def done(self, record: CellRecord) -> None: ...


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
    finished: set[str] | None = None,
    shared: bool = False,
) -> None:
    """Run the cells that the store does not have yet, and store each result.

    Args:
        data: where the experiment's data lie.
        keep: leave the folders of finished cells, with their weights.
        force: run the cells again even if they are known, and from the beginning.
        finished: slugs of cells that this command has already trained, to which others are added; `force` does not
            repeat them.
        shared: other processes are writing to the same folder, so what looks left behind by a killed one stays.
    """
    finished = set() if finished is None else finished
    scale, given = cells[0].config["scale"], inputs_of(cells[0].config, experiment.inputs)
    if not shared:
        store.clear_temporaries(experiment.name)
    if unreadable := store.assembled(experiment.name).unreadable:
        raise BadInput(unreadable[0])
    own, anywhere = store.known(experiment.name), store.known_anywhere()
    wanted = {cell.slug for cell in cells if not force or cell.slug in finished}
    usable = {
        slug: record
        for slug, record in {**anywhere, **own}.items()
        if slug in wanted and store.is_complete(experiment, record)
    }
    known = [cell for cell in cells if cell.slug in usable]
    missing = [cell for cell in cells if cell.slug not in usable]
    for cell in known:
        if cell.slug not in own:
            store.save(experiment.name, usable[cell.slug])
    watcher.begin(experiment, known, missing)
    try:
        if missing:
            folder = store.folder(experiment.name) / "runs"
            setup = Setup(device, watcher.step, folder, jobs, data, keep, force)
            with closing(experiment.run(missing, setup)) as outcomes:
                for cell, outcome in outcomes:
                    about = {"config": cell.config, "paper": cell.paper, **provenance.origin(device)}
                    record = CellRecord(outcome.metrics, outcome.wall_s, **about)
                    _save(store, experiment.name, record)
                    finished.add(cell.slug)
                    watcher.done(record)
    except BaseException:
        # Also when interrupted: what is done is then as complete as it can be. What went wrong first is what is told.
        with suppress(OSError):
            store.assemble(experiment, scale, given)
        raise
    store.assemble(experiment, scale, given)


def _save(store: Store, name: str, record: CellRecord) -> None:
    """Store a cell that has been trained; on a full disk, keep it elsewhere and raise an OSError that says where."""
    try:
        store.save(name, record)
    except OSError as error:
        folder, place = store.folder(name) / "cells", store.rescue(record)
        kept = f"It is kept in {place}: free some space, move it to {folder}" if place else "No other folder took it"
        raise OSError(
            f"{record.slug} has been trained, but cannot be written to {folder}: {error.strerror or error}. {kept} and "
            "run the same command again, which trains only what is missing."
        ) from None

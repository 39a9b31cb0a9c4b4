"""Experiments that need no training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastweights.experiments.engine.experiment import (
    About,
    Cell,
    CellOutcome,
    CellOutcomes,
    Experiment,
    Judge,
    Scale,
    Setup,
)

Measure = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def measured(
    about: About, models: Mapping[str, str], scales: Mapping[str, Scale], measure: Measure, claims: Judge, **rest: Any
) -> Experiment:
    """Return an experiment whose cells are measured one after the other, without training or anything to select."""

    def run(cells: Sequence[Cell], setup: Setup) -> CellOutcomes:
        return one_by_one(cells, measure)

    how: dict[str, Any] = {"run": run, "fixed_sizes": True, "selectable": False}
    return Experiment(**about._asdict(), models=models, scales=scales, claims=claims, **how, **rest)


def one_by_one(cells: Sequence[Cell], measure: Measure) -> CellOutcomes:
    """Measure cells by their configurations, and yield each with its outcome."""
    for cell in cells:
        start = time.perf_counter()
        yield cell, CellOutcome(measure(cell.config), time.perf_counter() - start)

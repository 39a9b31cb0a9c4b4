"""Claims and results as rows, for the terminal and for the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from fastweights.experiments.engine.experiment import NOT_RUN, Claim, Experiment, Results


def format_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_loss(value: float | None) -> str:
    return "NaN" if value is None or math.isnan(value) else f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"


def losses(experiment: Experiment, results: Results) -> list[list[str]]:
    """Return a header and a row for each S with mean losses and half ranges; with one size, a row for each cell."""
    models = [model for model in experiment.models if results.of(model)]
    if len(results.sizes()) < 2 or not any(results.loss in record.metrics for record in results.records):
        return _runs(experiment, results)
    rows = [[experiment.size_name, *(experiment.models[model] for model in models)]]
    for size in results.sizes():
        entries = [_spread(results.values(model, size)) for model in models]
        rows.append([str(size), *entries])
    return rows


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = format_loss(sum(values) / len(values))
    return mean if len(values) == 1 or mean == "NaN" else f"{mean} ± {format_loss((max(values) - min(values)) / 2)}"


def _runs(experiment: Experiment, results: Results) -> list[list[str]]:
    found = [item for record in results.records for item in record.metrics.items()]
    scalars = list(dict.fromkeys(name for name, value in found if not isinstance(value, (list, dict))))
    sized = len(results.sizes()) > 1
    names = [name.replace("_", " ").replace("bleu", "BLEU") for name in scalars]
    rows = [["model", *([experiment.size_name] if sized else []), "seed", *names, "seconds"]]
    for record in results.records:
        config, metrics = record.config, record.metrics
        size = [str(config["size"])] if sized else []
        shown = [_scalar(metrics[name]) if name in metrics else "" for name in scalars]
        rows.append([experiment.models[config["model"]], *size, str(config["seed"]), *shown, f"{record.wall_s:.1f}"])
    return rows


def _scalar(value: object) -> str:
    return format_loss(value) if isinstance(value, float | None) else str(value)


def tally(claims: Sequence[Claim]) -> str:
    """Return the number of each verdict, as in "7 hold, 1 fails, 2 not run"."""
    counts = Counter(claim.verdict for claim in claims)
    plural = {"holds": "hold", "fails": "fail"}
    found = [(counts[verdict], verdict) for verdict in ("holds", "fails", "undecided", NOT_RUN) if counts[verdict]]
    return ", ".join(f"{count} {plural.get(verdict, verdict) if count > 1 else verdict}" for count, verdict in found)

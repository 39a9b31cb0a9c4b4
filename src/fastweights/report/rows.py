"""Claims and results as rows, for the terminal and for the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from fastweights.experiments.engine.experiment import BEYOND_SCALE, NOT_RUN, Claim, Experiment, Results
from fastweights.report.chapter import Chapter


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
    order = ("holds", "fails", "undecided", BEYOND_SCALE, NOT_RUN)
    found = [(counts[verdict], verdict) for verdict in order if counts[verdict]]
    return ", ".join(f"{count} {plural.get(verdict, verdict) if count > 1 else verdict}" for count, verdict in found)


def summary(chapters: Sequence[Chapter], most: int = 24) -> list[str]:
    """Return a line for all chapters, one for each, and one for each statement that fails while there is room."""
    places = [chapter.experiment.where.split(",")[0].split(" (")[0] for chapter in chapters]
    labels = [chapter.label for chapter in chapters]
    claims = [claim for chapter in chapters for claim in chapter.claims]
    room = most - 1 - len(chapters)
    lines = [f"Of {len(claims)} statements of the paper, {tally(claims)}."]
    for place, label, chapter in zip(places, labels, chapters, strict=True):
        needs = next((f" (needs {c.needs})" for c in chapter.claims if c.verdict == BEYOND_SCALE), "")
        verdicts = f"{tally(chapter.claims)}{needs}"
        lines.append(f"{place:{max(map(len, places))}}  {label:{max(map(len, labels))}}  {verdicts}")
        fails = [f"  fails: {claim.text} ({claim.ours})" for claim in chapter.claims if claim.holds is False]
        lines += fails[: max(0, room)]
        room -= len(fails)
    return lines

"""Claims and results as rows, for the terminal and for the page."""

from collections import Counter
from collections.abc import Sequence

from fastweights.common.formatting import format_loss, format_number
from fastweights.experiments.engine.experiment import BEYOND_SCALE, NOT_RUN, Claim, Experiment, Results
from fastweights.report.chapter import Chapter


def result_rows(experiment: Experiment, results: Results) -> list[list[str]]:
    """Return a header and rows: mean loss and half range for each size, or each cell where there is one size."""
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
    names = [_column(name) for name in scalars]
    rows = [["model", *([experiment.size_name] if sized else []), "seed", *names, "seconds"]]
    for record in results.records:
        config, metrics = record.config, record.metrics
        size = [str(config["size"])] if sized else []
        shown = [_scalar(name, metrics[name]) if name in metrics else "" for name in scalars]
        seconds = format_number(round(record.wall_s, 1))
        rows.append([experiment.models[config["model"]], *size, str(config["seed"]), *shown, seconds])
    return rows


def _column(name: str) -> str:
    name = name.removesuffix("_bytes").replace("_per_s", "/s").removesuffix("_s")
    return name.replace("_", " ").replace("bleu", "BLEU")


def _scalar(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / 2**20:,.0f} MiB"
    return format_number(value)


def tally(claims: Sequence[Claim]) -> str:
    """Return the number of each verdict, as in "7 hold, 1 fails, 2 not run"."""
    return ", ".join(text for text, _ in tallies(claims))


def tallies(claims: Sequence[Claim]) -> list[tuple[str, bool | None]]:
    """Return the number of each verdict in words, and what it says of the statements."""
    counts = Counter(claim.verdict for claim in claims)
    plural = {"holds": "hold", "fails": "fail"}
    order = {"holds": True, "fails": False, "undecided": None, BEYOND_SCALE: None, NOT_RUN: None}
    return [
        (f"{counts[verdict]} {plural.get(verdict, verdict) if counts[verdict] > 1 else verdict}", holds)
        for verdict, holds in order.items()
        if counts[verdict]
    ]


def summary(chapters: Sequence[Chapter], most: int = 24) -> list[str]:
    """Return a line for all chapters, one for each, and one for each statement that fails while there is room."""
    names = [chapter.name for chapter in chapters]
    labels = [chapter.label for chapter in chapters]
    claims = [claim for chapter in chapters for claim in chapter.claims]
    left = most - 1 - len(chapters)
    lines = [f"Of {len(claims)} statements of the paper, {tally(claims)}."]
    for name, label, chapter in zip(names, labels, chapters, strict=True):
        needs = next((f" (needs {c.needs})" for c in chapter.claims if c.verdict == BEYOND_SCALE), "")
        verdicts = f"{tally(chapter.claims)}{needs}"
        lines.append(f"{name:{max(map(len, names))}}  {label:{max(map(len, labels))}}  {verdicts}")
        fails = [f"  fails: {claim.text} ({claim.ours})" for claim in chapter.claims if claim.holds is False]
        lines += fails[: max(0, left)]
        left -= len(fails)
    return lines

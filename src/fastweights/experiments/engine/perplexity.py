"""How perplexities are judged and shown: which model is lower on both texts, and the paper's numbers next to ours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fastweights.experiments.engine.corpora import SPLITS
from fastweights.experiments.engine.experiment import FULL, NOT_RUN, CellRecord, Claim, Results, Table

Pair = tuple[float, float]
"""Validation and test perplexity."""

Shown = Pair | str
"""What the paper gives: two numbers, or one bound for both."""

PAPER_HEADER = ("paper, validation", "paper, test")

CLOSE = 0.02
"""Perplexities that differ by less than this share need several seeds to be told apart."""

SEEDS = 3
"""Seeds of each model that are enough for that."""

MORE_SEEDS = f"{SEEDS} seeds of each model, as the difference is below {CLOSE:.0%}"


def ppl(record: CellRecord, split: str) -> float:
    """Return the perplexity of a cell; infinite where its training diverged."""
    value = (record.metrics.get(split) or {}).get("ppl")
    return math.inf if value is None else float(value)


def mean(results: Results, model: str, size: int) -> Pair | None:
    """Return the means over the seeds on both texts, None without any."""
    records = results.of(model, size)
    if not records:
        return None
    valid, test = (sum(ppl(record, split) for record in records) / len(records) for split in SPLITS)
    return valid, test


def show(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def show_pair(pair: Pair | None) -> str:
    return "" if pair is None else " / ".join(map(show, pair))


def is_lower(ours: Pair, theirs: Pair) -> bool:
    """Return whether ours is lower on both texts, never so where it diverged."""
    return all(a < b for a, b in zip(ours, theirs, strict=True))


def is_close(results: Results, models: Sequence[str], size: int, ours: Pair, theirs: Pair) -> bool:
    """Return whether two pairs are so close that these models need more seeds to be told apart.

    The paper's own protocol has one run of each model.
    """
    if any(record.config["scale"] in FULL for record in results.records):
        return False
    seeds = min(len({record.config["seed"] for record in results.of(model, size)}) for model in models)
    return seeds < SEEDS and any(abs(a - b) < CLOSE * max(a, b) for a, b in zip(ours, theirs, strict=True))


def lower(results: Results, model: str, other: str, text: str, paper: str) -> Claim:
    """Judge that `model` is lower than `other` on both texts at every size.

    That is undecided while sizes are missing, and where the two are close and have too few seeds.
    """
    compared = {}
    for size in results.sizes():
        ours, theirs = mean(results, model, size), mean(results, other, size)
        if ours and theirs:
            compared[size] = (ours, theirs)
    if not compared:
        return Claim(text, NOT_RUN, paper, None)
    close = [size for size, pair in compared.items() if is_close(results, (model, other), size, *pair)]
    verdicts = [None if size in close else is_lower(*pair) for size, pair in compared.items()]
    missing = len(results.sizes()) - len(compared)
    holds = all_hold(verdicts + [None] * missing)
    return Claim(text, _by_size(compared), paper, holds, MORE_SEEDS if close else "")


def differences(results: Results, model: str, other: str) -> dict[int, float]:
    """Return by how much the validation loss of `model` was above that of `other`, at each step that both have.

    Each is the mean over its seeds.
    """
    curves = [
        [{step: loss for step, loss in record.metrics["curve"] if loss is not None} for record in results.of(name)]
        for name in (model, other)
    ]
    if not all(curves):
        return {}
    steps = sorted(set.intersection(*(set(curve) for group in curves for curve in group)))
    ours, theirs = ({step: fmean(curve[step] for curve in group) for step in steps} for group in curves)
    return {step: ours[step] - theirs[step] for step in steps}


def delta_is_lower(
    results: Results, paper: Mapping[int, Mapping[str, Pair]], pairs: Mapping[str, tuple[str, str]]
) -> list[Claim]:
    """Judge for each feature map that its model with the delta rule is lower than that with the sum rule."""
    text = "the delta rule has a lower perplexity than the sum rule"
    return [lower(results, *pair, f"{name}: {text}", against(paper, *pair)) for name, pair in pairs.items()]


def _by_size(pairs: Mapping[int, tuple[Pair, Pair]]) -> str:
    """Return the perplexities of two models, with the size where there are several."""
    found = {size: f"{show_pair(ours)} against {show_pair(theirs)}" for size, (ours, theirs) in pairs.items()}
    return "; ".join(f"D = {size}: {entry}" if len(found) > 1 else entry for size, entry in found.items())


def all_hold(verdicts: Sequence[bool | None]) -> bool | None:
    """Return whether all hold: False if one fails, None if one is undecided."""
    return False if False in verdicts else None if None in verdicts else True


def against(paper: Mapping[int, Mapping[str, Pair]], model: str, other: str) -> str:
    """Return the paper's numbers of the two models, as a text."""
    return _by_size({size: (row[model], row[other]) for size, row in paper.items()})


def table(labels: Mapping[str, str], paper: Mapping[int, Mapping[str, Shown]]) -> Callable[[Results], Table]:
    """Return an `Experiment.table`: a row for each size and model, with our perplexities and the paper's.

    Where the paper has no such model of that size, the smallest it has stands there with its size.
    """

    def table(results: Results) -> Table:
        header = ("model", "D", "validation", "test", *(PAPER_HEADER if paper else ()), "parameters")
        rows = []
        for size in results.sizes():
            for model, label in labels.items():
                ours = mean(results, model, size)
                if ours is None:
                    continue
                known = sorted(at for at, row in paper.items() if model in row)
                at = size if size in known or not known else known[0]
                theirs = paper.get(at, {}).get(model)
                parameters = results.of(model, size)[0].metrics.get("parameters")
                count = "" if parameters is None else f"{parameters / 1e6:.2f} M"
                beside = paper_numbers(theirs, size, at)
                rows.append((label, str(size), *map(show, ours), *(beside if paper else ()), count))
        return Table(header, tuple(rows))

    return table


def paper_numbers(pair: Shown | None, size: int, theirs: int) -> tuple[str, str]:
    """Return the paper's numbers for a row of ours, with their size where it differs."""
    if pair is None:
        return ("", "")
    shown = (pair, pair) if isinstance(pair, str) else map(show, pair)
    valid, test = (value + ("" if size == theirs else f" (D = {theirs})") for value in shown)
    return valid, test


def all_of(claims: Sequence[Claim], text: str) -> Claim:
    """Judge these claims together; undecided while one is, unless another fails."""
    ran = [claim.ours for claim in claims if claim.ours != NOT_RUN]
    paper = "; ".join(claim.paper for claim in claims)
    return Claim(text, "; ".join(ran) or NOT_RUN, paper, all_hold([claim.holds for claim in claims]), _needs(claims))


def _needs(claims: Iterable[Claim]) -> str:
    """Return what the first of these claims needs to be decided; empty where none is known."""
    return next((claim.needs for claim in claims if claim.needs), "")


def paper_entry(pair: Shown | None) -> dict[str, Any] | None:
    """Return the `Experiment.paper` of a pair of perplexities."""
    if pair is None or isinstance(pair, str):
        return None if pair is None else dict.fromkeys(SPLITS, pair)
    return dict(zip(SPLITS, pair, strict=True))


def best_of(results: Results, model: str, labels: Mapping[str, str], text: str, paper: str) -> Claim:
    """Judge that `model` is lower than the others on both texts at every size; undecided while some are missing."""
    claims = {other: lower(results, model, other, text, paper) for other in labels if other != model}
    ran = [other for other, claim in claims.items() if claim.ours != NOT_RUN]
    if not ran:
        return Claim(text, NOT_RUN, paper, None)
    mine = "; ".join(show_pair(mean(results, model, size)) for size in results.sizes(model))
    pairs = [
        (labels[other], mean(results, model, size), mean(results, other, size))
        for other in ran
        for size in results.sizes(model, other)
    ]
    rivals = [f"{show_pair(b)} of {label}" for label, a, b in pairs if a and b and not is_lower(a, b)]
    ours = f"{mine} against {', '.join(rivals)}" if rivals else f"{mine}, lowest of {len(ran) + 1}"
    return Claim(text, ours, paper, all_hold([claim.holds for claim in claims.values()]), _needs(claims.values()))

"""How perplexities are judged and shown: which model is lower, and ours beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fastweights.experiments.base import NOT_RUN, Claim, Record, Results, Table
from fastweights.experiments.language import SPLITS

Pair = tuple[float, float]
"""Validation and test perplexity."""


def ppl(record: Record, split: str) -> float:
    """Perplexity of a cell; infinite where its training diverged."""
    value = (record.metrics.get(split) or {}).get("ppl")
    return math.inf if value is None else float(value)


def mean(results: Results, model: str, size: int) -> Pair | None:
    """Mean over the seeds on both texts, None without any."""
    records = results.of(model, size)
    if not records:
        return None
    valid, test = (sum(ppl(record, split) for record in records) / len(records) for split in SPLITS)
    return valid, test


def show(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def show_pair(pair: Pair | None) -> str:
    return "" if pair is None else " / ".join(map(show, pair))


def lower(results: Results, model: str, other: str, text: str, paper: str) -> Claim:
    """`model` has the lower perplexity than `other` on both texts at every size; undecided while sizes are missing."""
    compared = {}
    for size in results.sizes():
        ours, theirs = mean(results, model, size), mean(results, other, size)
        if ours and theirs:
            compared[size] = (ours, theirs)
    if not compared:
        return Claim(text, NOT_RUN, paper, None)
    wins = [all(a < b for a, b in zip(*pair, strict=True)) for pair in compared.values()]
    found = [f"{show_pair(ours)} against {show_pair(theirs)}" for ours, theirs in compared.values()]
    if len(compared) > 1:
        found = [f"D = {size}: {entry}" for size, entry in zip(compared, found, strict=True)]
    missing = len(results.sizes()) - len(compared)
    holds = False if not all(wins) else None if missing else True
    return Claim(text, "; ".join(found), paper, holds)


def against(paper: Mapping[int, Mapping[str, Pair]], model: str, other: str) -> str:
    """The paper's pair of numbers for such a claim."""
    found = [f"{show_pair(row[model])} against {show_pair(row[other])}" for row in paper.values()]
    return "; ".join(
        f"D = {size}: {entry}" if len(paper) > 1 else entry for size, entry in zip(paper, found, strict=True)
    )


def table(labels: Mapping[str, str], paper: Callable[[str, int], Pair | None]) -> Callable[[Results], Table]:
    """`Experiment.table`: a row for each model and size, validation and test perplexity, ours and the paper's."""

    def table(results: Results) -> Table:
        header = ("model", "D", "validation", "test", "paper, validation", "paper, test", "parameters")
        rows = []
        for size in results.sizes():
            for model, label in labels.items():
                ours = mean(results, model, size)
                if ours is None:
                    continue
                theirs = paper(model, size)
                parameters = results.of(model, size)[0].metrics.get("parameters")
                count = "" if parameters is None else f"{parameters / 1e6:.2f} M"
                shown = [show(value) for value in (*ours, *(theirs or ()))]
                rows.append((label, str(size), *shown, *[""] * (4 - len(shown)), count))
        return Table(header, tuple(rows))

    return table


def lower_in_all(results: Results, pairs: Sequence[tuple[str, str]], text: str, paper: str) -> Claim:
    """`lower` for every pair of models; undecided while some are missing and none was lost."""
    claims = [lower(results, *pair, text, paper) for pair in pairs]
    ran = [claim for claim in claims if claim.ours != NOT_RUN]
    if not ran:
        return Claim(text, NOT_RUN, paper, None)
    verdicts = [claim.holds for claim in claims]
    holds = False if False in verdicts else None if None in verdicts else True
    return Claim(text, "; ".join(claim.ours for claim in ran), paper, holds)


def entry(pair: Pair | None) -> dict[str, float] | None:
    """`Experiment.paper` of a pair of perplexities."""
    return None if pair is None else dict(zip(SPLITS, pair, strict=True))


def best_of(results: Results, model: str, others: Sequence[str], text: str, paper: str) -> Claim:
    """`model` is lower than each of `others`, on both texts, at every size; undecided while some are missing."""
    claims = {other: lower(results, model, other, text, paper) for other in others}
    ran = {other: claim for other, claim in claims.items() if claim.ours != NOT_RUN}
    if not ran:
        return Claim(text, NOT_RUN, paper, None)
    lost = [other for other, claim in ran.items() if claim.holds is False]
    mine = "; ".join(show_pair(mean(results, model, size)) for size in results.sizes(model))
    if lost:
        rivals = ", ".join(
            f"{show_pair(mean(results, other, size))} of {other}"
            for other in lost
            for size in results.sizes(model, other)
        )
        return Claim(text, f"{mine} against {rivals}", paper, False)
    ours = f"{mine}, lowest of {len(ran) + 1}"
    decided = all(claim.holds for claim in claims.values())
    return Claim(text, ours, paper, True if decided else None)

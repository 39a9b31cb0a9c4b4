"""What the page shows of one experiment."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastweights.experiments.engine.experiment import Claim, Experiment, Results


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

"""What the page shows of one experiment."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastweights.experiments.engine.experiment import NOT_RUN, Claim, Experiment, Results


@dataclass(frozen=True)
class Chapter:
    """One experiment of the page; without results it has no scale, no figure, and claims that are not run.

    `others` are the same experiment at other scales, with other settings or other data, with the claims about them.
    """

    experiment: Experiment
    scale: str | None
    results: Results
    claims: list[Claim]
    svg: bytes | None
    others: list[Chapter] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Say what the results are: their scale, or their data and training where those are not the scale's own."""
        return self.experiment.label(self.results.records) if self.scale else NOT_RUN

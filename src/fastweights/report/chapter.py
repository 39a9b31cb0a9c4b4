"""What the page shows of one experiment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fastweights.experiments.engine.experiment import NOT_RUN, Claim, Experiment, Results
from fastweights.report.drawing import Drawing

_SCALES = {
    "paper": "full scale",
    "code": "full scale, by the released code",
    "small": "small scale",
    "smoke": "a check that everything runs",
}


@dataclass(frozen=True)
class Chapter:
    """One experiment of the page; without results it has no scale, no drawing, and claims that are not run.

    `others` are the same experiment at other scales, with other settings or other data, with the claims about them.
    """

    experiment: Experiment
    scale: str | None
    results: Results
    claims: list[Claim]
    drawing: Drawing | None
    others: list[Chapter] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name the results by their scale, or by their data and training where those are not the scale's own."""
        if self.scale is None:
            return NOT_RUN
        label = self.experiment.label(self.results.records)
        return _SCALES.get(label, label)

    @property
    def is_full(self) -> bool:
        """Return whether the results have the paper's data and training."""
        return self.scale is not None and self.experiment.is_full(self.results.records)

    @property
    def number(self) -> str:
        """Return the paper's number, as in "Figure 2", or else its section; empty for what is not in the paper."""
        found = re.match(r"(Figure|Table) \d+|(Sec|App)\. [A-Z\d.]*\w", self.experiment.where)
        return found[0] if found else ""

    @property
    def name(self) -> str:
        return self.number or self.experiment.title

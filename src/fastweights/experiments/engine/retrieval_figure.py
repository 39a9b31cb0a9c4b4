"""What the figures of associative retrieval have in common, as experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights.experiments.engine import retrieval
from fastweights.experiments.engine.experiment import Experiment, Scale
from fastweights.experiments.engine.shape import CURVE, Shape

STORED: Shape = {
    "config": {"d_key": int},
    "metrics": {"best_loss": float | None, "last_loss": float | None, "steps": int, "curve": CURVE},
}
SMOKE = Scale(
    sizes=(4, 8),
    options={"d_key": 4, "max_steps": 20, "eval_every": 10},
    cost="5 s",
    note="Twenty steps of training: a check that everything runs, not a result.",
    decides=False,
)


def figure(setting: int, *, scales: Mapping[str, Scale], **rest: Any) -> Experiment:
    """Return the experiment of a figure in that setting of the paper (1: Sec. 6.1.1, 2: Sec. 6.1.2)."""
    configure = retrieval.configure(setting, scales)
    return Experiment(scales=scales, configure=configure, run=retrieval.run, stored=STORED, **rest)

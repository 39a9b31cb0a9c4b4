"""What figures and tables are called, and how results are worded."""

import re

import pytest

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Results
from tests.experiments.fakes import record


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if re.fullmatch(r"(fig|table)\d", name)])
def test_figures_and_tables_have_the_papers_numbers(name):
    kind = "Figure" if name.startswith("fig") else "Table"
    assert EXPERIMENTS[name].where.startswith(f"{kind} {name[-1]}, ")


def test_a_winner_at_every_size_is_told_in_words():
    losses = {"dpfp-1-delta": 0.01, "dpfp-1-sum": 0.1}
    results = Results([record(model, size, loss) for model, loss in losses.items() for size in (20, 40)])
    assert EXPERIMENTS["fig5"].claims(results)[0].ours == "at all 2 values of S"


def test_one_component_is_told_in_words():
    fig1 = EXPERIMENTS["fig1"]
    (cell,) = fig1.cells("smoke")
    ((_, outcome),) = fig1.run([cell], None)
    made = record("dpfp-1", 8, 0.0)
    object.__setattr__(made, "metrics", outcome.metrics)
    assert fig1.claims(Results([made]))[0].ours == "exactly one at 64 points"

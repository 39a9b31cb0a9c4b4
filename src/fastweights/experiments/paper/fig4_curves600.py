"""The figure of App. D.1: learning curves at S = 600, setting 1.

Its cells are the largest ones of Figure 2 (`fig2_capacity`), which also names the places where text and code differ.
"""

import math
from itertools import pairwise

from fastweights.experiments.engine import retrieval
from fastweights.experiments.engine.experiment import Claim, Plot, Results
from fastweights.experiments.engine.retrieval import FAILURE, at_one_size, beats, d_dot, figure, not_run, show
from fastweights.experiments.paper import fig2_capacity

BY_LIMIT = "The final losses fall as the capacity grows"
ALL_FAIL = f"Every φ with d_dot < S fails (loss above {FAILURE})"
SCALES = at_one_size(
    fig2_capacity.SCALES,
    max,
    ("3 s", "1 min on 2 cores", "1 min on an H200", "1 min on an H200"),
    note="S = 120 in place of 600 and d_key 16 in place of 64; at most 3000 steps.",
    decides=(BY_LIMIT, ALL_FAIL),
)
BY_CAPACITY = ("linear", "dpfp-1", "dpfp-2", "dpfp-3")


def claims(results: Results) -> list[Claim]:
    rivals = [model for model in retrieval.SETTING_1 if model != "softmax"]
    return [
        ordered_by_capacity(results),
        beyond_capacity_all_fail(results),
        beats(results, "softmax", rivals, "Softmax ends lowest", "lowest"),
    ]


def ordered_by_capacity(results: Results) -> Claim:
    text = BY_LIMIT
    paper = " > ".join(retrieval.SETTING_1[model].split(" (")[0] for model in BY_CAPACITY)
    losses = {model: results.mean(model, results.sizes(model)[0]) for model in BY_CAPACITY if results.of(model)}
    ours = ", ".join(f"{retrieval.SETTING_1[model].split(' (')[0]} {show(loss)}" for model, loss in losses.items())
    if len(losses) < 2:
        return not_run(text, paper)
    values = list(losses.values())
    falls = all(worse > better for worse, better in pairwise(values))
    # A missing model leaves the order of the others: enough to refute the claim, not to confirm it.
    return Claim(text, ours, paper, falls if len(losses) == len(BY_CAPACITY) or not falls else None)


def beyond_capacity_all_fail(results: Results) -> Claim:
    text, paper = ALL_FAIL, "all linear memories fail when S > d_dot"
    runs = [record for record in results.records if (d_dot(record.config) or math.inf) < record.config["size"]]
    if not runs:
        return not_run(text, paper)
    losses = {record.config["model"]: results.mean(record.config["model"], record.config["size"]) for record in runs}
    solved = [f"{retrieval.SETTING_1[model]} {show(loss)}" for model, loss in losses.items() if loss <= FAILURE]
    ours = f"not {', '.join(solved)}" if solved else f"all {len(losses)} fail"
    return Claim(text, ours, paper, not solved)


EXPERIMENT = figure(
    1,
    SCALES,
    name="fig4",
    title="Learning curves beyond capacity",
    where="Figure 4, App. D.1 (setting 1, S = 600)",
    statement="Learning curves with 600 unique keys and values, more than linear attention and DPFP can hold. What the "
    "paper says of capacity then puts their final losses in the order of d_dot, with softmax below them all.",
    models=retrieval.SETTING_1,
    claims=claims,
    plot=Plot(kind="curves", x_label="training steps", y_label="evaluation loss"),
    fixed_sizes=True,
    paper=fig2_capacity.paper,
)

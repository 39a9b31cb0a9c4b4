"""Figure 3: learning curves of the update rules at S = 20, sequences of 40 pairs, setting 2 [Sec. 6.1.2].

Its cells are the smallest ones of App. D.2 (`fig5_capacity2`), which also names the places where text and code differ.
"""

from __future__ import annotations

from dataclasses import replace

from fastweights.experiments.engine import retrieval
from fastweights.experiments.engine.experiment import Claim, Plot, Results
from fastweights.experiments.engine.retrieval import TARGET, beats, not_run, show
from fastweights.experiments.engine.retrieval_figure import figure
from fastweights.experiments.paper import fig5_capacity2

MODELS = ("dpfp-1-sum", "dpfp-1-delta", "schlag2021", "schlag2021-dpfp")
COSTS = {"smoke": "2 s", "small": "1 min on 2 cores", "code": "2 min on 2 cores", "paper": "2 min on 2 cores"}
NOTES = {"small": "At most 2000 steps of training."}
# The size of the paper where the sister figure has it; otherwise, at scale smoke, its smallest.
SCALES = {
    name: replace(
        scale,
        sizes=(20 if 20 in scale.sizes else scale.sizes[0],),
        cost=COSTS[name],
        note=NOTES.get(name, scale.note),
    )
    for name, scale in fig5_capacity2.SCALES.items()
}
NEAR = 3
STATEMENT = "The delta rule outperforms all other variants. As expected, the sum rule fails."


def claims(results: Results) -> list[Claim]:
    return [
        solves(results),
        stays_near(results, "dpfp-1-sum", 0.1),
        *(
            beats(results, "dpfp-1-delta", [other], f"The delta rule beats {label}", "lower throughout")
            for other, label in fig5_capacity2.OTHER_RULES.items()
        ),
    ]


def solves(results: Results) -> Claim:
    text, paper = f"The delta rule solves the task (loss ≤ {TARGET})", f"≤ {TARGET}"
    sizes = results.sizes("dpfp-1-delta")
    if not sizes:
        return not_run(text, paper)
    loss = results.mean("dpfp-1-delta", sizes[0])
    steps = max(record.metrics["steps"] for record in results.of("dpfp-1-delta", sizes[0]))
    return Claim(text, f"{show(loss)} after {steps} steps", paper, loss <= TARGET)


def stays_near(results: Results, model: str, level: float) -> Claim:
    """Judge that a loss is within a factor NEAR of a level that can only be read off the figure's log axis."""
    text, paper = f"The sum rule stays near {level}", f"near {level}"
    sizes = results.sizes(model)
    if not sizes:
        return not_run(text, paper)
    loss = results.mean(model, sizes[0])
    return Claim(text, show(loss), paper, level / NEAR <= loss <= level * NEAR)


EXPERIMENT = figure(
    2,
    name="fig3",
    title="Learning curves of the update rules",
    where="Figure 3, Sec. 6.1.2 (setting 2, S = 20, L = 40)",
    statement=STATEMENT,
    models={model: retrieval.SETTING_2[model] for model in MODELS},
    scales=SCALES,
    claims=claims,
    plot=Plot(kind="curves", x_label="training steps", y_label="evaluation loss", log_y=True, y_range=(5e-4, 100)),
    fixed_sizes=True,
)

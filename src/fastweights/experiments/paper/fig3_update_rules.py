"""Figure 3: learning curves of the update rules at S = 20, sequences of 40 pairs, setting 2 [Sec. 6.1.2].

Its cells are the smallest ones of App. D.2 (`fig5_capacity2`), which also names the places where text and code differ.
"""

from fastweights.experiments.engine import retrieval
from fastweights.experiments.engine.experiment import Claim, Plot, Results
from fastweights.experiments.engine.retrieval import TARGET, at_one_size, beats, figure, not_run, show
from fastweights.experiments.paper import fig5_capacity2

MODELS = ("dpfp-1-sum", "dpfp-1-delta", "schlag2021", "schlag2021-dpfp")
SOLVES = f"The delta rule solves the task (loss ≤ {TARGET})"
SUM_LEVEL = 0.1
SUM_STAYS = f"The sum rule stays near {SUM_LEVEL}"
BEATS = {other: f"The delta rule beats {label}" for other, label in fig5_capacity2.OTHER_RULES.items()}
SCALES = at_one_size(
    fig5_capacity2.SCALES,
    # The size of the paper where the sister figure has it; otherwise, at scale smoke, its smallest.
    lambda sizes: 20 if 20 in sizes else sizes[0],
    ("2 s", "1 min on 2 cores", "2 min on 2 cores", "2 min on 2 cores"),
    note="At most 2000 steps of training.",
    # The rules of Schlag (2021) learn for longer than that.
    decides=(SOLVES, SUM_STAYS, BEATS["dpfp-1-sum"]),
)
NEAR = 3
"""By which factor a loss may miss a level that can only be read off the figure's logarithmic axis."""


def claims(results: Results) -> list[Claim]:
    return [
        loss_between(results, "dpfp-1-delta", 0, TARGET, SOLVES, f"≤ {TARGET}"),
        loss_between(results, "dpfp-1-sum", SUM_LEVEL / NEAR, SUM_LEVEL * NEAR, SUM_STAYS, f"near {SUM_LEVEL}"),
        *(beats(results, "dpfp-1-delta", [other], text, "lower throughout") for other, text in BEATS.items()),
    ]


def loss_between(results: Results, model: str, least: float, most: float, text: str, paper: str) -> Claim:
    """Judge that the loss of a model ends between two numbers."""
    if not results.of(model):
        return not_run(text, paper)
    size = results.sizes(model)[0]
    loss = results.mean(model, size)
    steps = max(record.metrics["steps"] for record in results.of(model, size))
    return Claim(text, f"{show(loss)} after {steps} steps", paper, least <= loss <= most)


EXPERIMENT = figure(
    2,
    SCALES,
    name="fig3",
    title="Learning curves of the update rules",
    where="Figure 3, Sec. 6.1.2 (setting 2, S = 20, L = 40)",
    statement="The delta rule outperforms all other variants. As expected, the sum rule fails.",
    models={model: retrieval.SETTING_2[model] for model in MODELS},
    claims=claims,
    plot=Plot(kind="curves", x_label="training steps", y_label="evaluation loss", log_y=True, y_range=(5e-4, 100)),
    fixed_sizes=True,
)

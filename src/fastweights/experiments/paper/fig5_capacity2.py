"""The figure of App. D.2: update rules over the number of keys, setting 2 [Sec. 6.1.2].

S keys and S values are drawn with replacement into a sequence of 2 S pairs, so keys are assigned new values; the
latest one is asked for.

Where the paper's text and its released code differ, beyond what `fig2_capacity` names, scale `paper` follows the code,
which drew the figures; an option of `RetrievalConfig` has the text's way:

- Evaluation sequences have length S; the text can be read as 2 S, the length in training (`eval_length`).
- Schlag (2021) trains with batches of 128 and a learning rate of 1e-4; the text has 32 and Adam's default for all
  (`batch`, `lr`).
"""

from fastweights.experiments.engine import retrieval
from fastweights.experiments.engine.experiment import Claim, Plot, Results, Scale
from fastweights.experiments.engine.retrieval import CODE_NOTE, CODE_OPTIONS, SMOKE, beats, figure

SIZES = tuple(range(20, 201, 20))
SCALES = {
    "smoke": SMOKE,
    "small": Scale(
        sizes=(10, 20),
        options={"max_steps": 2000},
        cost="1 min on 2 cores",
        note="S = 10 and 20 in place of 20 to 200, and at most 2000 steps of training.",
        decides=False,
    ),
    "code": Scale(sizes=SIZES, options=CODE_OPTIONS, cost="3 min on an H200", note=CODE_NOTE),
    "paper": Scale(sizes=SIZES, cost="2 min on an H200"),
}
OTHER_RULES = {
    "dpfp-1-sum": "the sum rule",
    "schlag2021": "Schlag (2021)",
    "schlag2021-dpfp": "Schlag (2021) with DPFP",
}


def claims(results: Results) -> list[Claim]:
    return [
        beats(results, "dpfp-1-delta", [other], f"DPFP-1 with the delta rule beats {label} at every S", "at every S")
        for other, label in OTHER_RULES.items()
    ]


EXPERIMENT = figure(
    2,
    SCALES,
    name="fig5",
    title="Update rules and the number of keys",
    where="Figure 5, App. D.2 (setting 2)",
    statement="In all problems, with different sequence lengths and numbers of unique keys, the delta rule outperforms "
    "all other approaches. FAVOR+ with the delta rule resulted in not-a-number and was left out; here a key whose "
    "features underflow is not written, so it trains and is shown.",
    models=retrieval.SETTING_2,
    claims=claims,
    plot=Plot(kind="scatter", x_label="number of unique keys S", y_label="loss", log_y=True, y_range=(1e-4, 1e3)),
)

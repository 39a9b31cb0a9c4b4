"""Table 2: the delta rule against the sum rule with limited context [Sec. 6.3].

Segments of L words, each alone; a sliding window of L words moved word by word for the numbers. Two configurations:
small (D = 128, L = 256) and medium (D = 256, L = 384). For Performers m = 8 and 16, so that their capacity is that of
ELU + 1.

What the paper leaves out and its released code shows is in every cell: blocks with LayerNorm after the residual sum,
reversed sinusoidal positions, a beta for each head, and what is read from fast weights times 1/sqrt(d_head). The
paper's "40 M parameters" are 44 M. Scale `code` also repeats that the first update takes the full rate.
"""

from fastweights.experiments.engine import language_tables
from fastweights.experiments.engine.experiment import Claim, Results
from fastweights.experiments.engine.perplexity import Pair, best_of, delta_is_lower

PAPER: dict[int, dict[str, Pair]] = {
    128: {
        "transformer": (33.0, 34.1),
        "linear": (37.1, 38.3),
        "delta": (34.1, 35.5),
        "performer": (39.0, 39.6),
        "performer-delta": (36.1, 37.2),
    },
    256: {
        "transformer": (27.9, 29.6),
        "linear": (31.1, 33.0),
        "delta": (29.7, 31.5),
        "performer": (32.2, 33.8),
        "performer-delta": (30.0, 31.8),
    },
}
LABELS = language_tables.labels(*PAPER[128])


def claims(results: Results) -> list[Claim]:
    pairs = {"ELU + 1": ("delta", "linear"), "Performer": ("performer-delta", "performer")}
    best = "The Transformer has the lowest perplexity"
    return [
        *delta_is_lower(results, PAPER, pairs),
        best_of(results, "transformer", LABELS, best, "33.0 / 34.1; 27.9 / 29.6"),
    ]


EXPERIMENT = language_tables.experiment(
    LABELS,
    PAPER,
    ("2 s", "1 min on 2 cores", "12.3 G words each small model, 8.6 G each medium one"),
    name="table2",
    title="Update rules in language models",
    where="Table 2, Sec. 6.3 (limited context)",
    statement="In both configurations, our update rule provides convincing improvements over the sum update rule.",
    claims=claims,
)

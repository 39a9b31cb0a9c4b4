"""BLEU as sacreBLEU computes it, on text as people write it [Post 2018]."""

from collections.abc import Sequence
from typing import NamedTuple


class Bleu(NamedTuple):
    """A score from 0 to 100, and what one needs to know to compare it with another."""

    score: float
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """Compute BLEU of translations, one reference each, of whole lines as they were before any tokenisation."""
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations cannot be scored against {len(references)} references")
    if not hypotheses:
        raise ValueError("there is nothing to score")
    metric = require_sacrebleu().BLEU()
    bleu_score = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(float(bleu_score.score), str(metric.get_signature()))


def require_sacrebleu():  # type: ignore[no-untyped-def]
    """Return the module with the metric, or raise an ImportError that says how to get it."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise ImportError(f"BLEU takes sacreBLEU ({error}); install it with: pip install 'fastweights[mt]'") from None
    return metrics

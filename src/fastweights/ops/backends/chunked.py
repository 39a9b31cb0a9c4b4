"""Backend `chunked`: the family's recurrence by `ops.chunked`."""

from fastweights.ops import chunked, family
from fastweights.ops.backend import Backend
from fastweights.ops.problem import Problem


def _refuses(problem: Problem) -> str | None:
    if problem.rule.coefficients is None:
        return f"rule {problem.rule.name!r} is outside the family W = aW - e(aWk)k^T + w v k^T"
    return None


BACKEND = Backend(
    name="chunked",
    description="matrix products in chunks of time, plain PyTorch: rules of the family, any device, O(T/C) states kept",
    run=lambda problem: family.run(problem, chunked.recurrence),
    refuses=_refuses,
)

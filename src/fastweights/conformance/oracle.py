"""The oracle, the plain loop over time in float64, and how exact a result can be expected to be."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.conformance.adapters import adapt
from fastweights.conformance.problem import Function, Problem, Recurrence
from fastweights.ops.memory import fast_weight_memory

# Results by name: o, state, and the gradients dq, dk, ...
Results = dict[str, Tensor]

# A tolerance is this many times the error that rounding alone explains.
SAFETY = 16.0
# What is smaller than this share of the largest result of its kind is measured by that.
LEAST = 1e-3


def oracle(recurrence: Recurrence) -> Function:
    """Return the recurrence as a plain loop over time, in the dtype of its inputs."""
    return adapt(fast_weight_memory, "fastweights", recurrence, {"backend": "reference"})


def errors(found: Results, exact: Results) -> dict[str, float]:
    """Return how far each result is off: the largest distance of two vectors by the largest length of an exact one.

    Vectors are along the last axis. NaN and infinity count as infinitely far.
    """
    lengths = {name: x.double().norm(dim=-1).amax().item() for name, x in exact.items()}
    floors = {
        kind: LEAST * max((x for name, x in lengths.items() if (name in ("o", "state")) == kind), default=0)
        for kind in (True, False)
    }
    off = {}
    for name, x in found.items():
        distance = (x.double() - exact[name].double()).norm(dim=-1).amax().item()
        error = distance / (max(lengths[name], floors[name in ("o", "state")]) or 1.0)
        off[name] = error if error < float("inf") else float("inf")
    return off


def tolerances(solve: Callable[[Problem], Results], problem: Problem, exact: Results) -> dict[str, float]:
    """Return the error that is allowed for each result.

    `SAFETY` times the largest of three: the unit roundoff of q's dtype; how far the exact results move when q, k, v,
    gates and state are each rounded once more; how far they move when the oracle itself computes in that dtype.
    """
    dtype = problem.q.dtype
    roundoff = torch.finfo(dtype).eps / 2
    generator = torch.Generator().manual_seed(0)

    def rounded(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return x.double() * (1 + roundoff * signs.to(x.device))

    moved = errors(solve(problem.mapped(rounded)), exact)
    computed = errors(solve(problem), exact)
    return {name: SAFETY * max(roundoff, moved[name], computed[name]) for name in exact}

"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastweights.ops.problem import Problem

# q, k, v, beta, decay, W, in_place -> y, W
Again = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool], tuple[Tensor, Tensor]]


def _always() -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """`run` computes (y, W, z). `refuses` says why a problem is not for it, `unavailable` why the machine is not.

    `again`, where there is one, gives for a problem that was run the shortest way to run others of the same shapes,
    strides and dtypes, or None: W is None for zeros there.
    """

    name: str
    description: str
    run: Callable[[Problem], tuple[Tensor, Tensor, Tensor | None]]
    refuses: Callable[[Problem], str | None]
    unavailable: Callable[[], str | None] = _always
    again: Callable[[Problem], Again | None] | None = None

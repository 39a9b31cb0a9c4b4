"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastweights.ops.problem import Problem


def _always() -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """`run` computes (y, W, z). `refuses` says why a problem is not for it, `unavailable` why the machine is not."""

    name: str
    description: str
    run: Callable[[Problem], tuple[Tensor, Tensor, Tensor | None]]
    refuses: Callable[[Problem], str | None]
    unavailable: Callable[[], str | None] = _always

"""The tensors of one call, drawn at random and made hard: what a case asks for, and what a function is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.common.tables import look_up


@dataclass(frozen=True)
class Recurrence:
    """What a function computes.

    Attributes:
        rule: its name in `fast_weight_memory`.
        decays: whether the memory fades, by a log decay for each head or for each key channel.
        beta: whether it has step sizes.
    """

    rule: str
    decays: Literal["no", "head", "key"]
    beta: bool


RECURRENCES = {
    "kda": Recurrence("gated_delta", "key", True),
    "gated_delta": Recurrence("gated_delta", "head", True),
    "delta": Recurrence("delta", "no", True),
    "simple_gla": Recurrence("decay", "head", False),
    "gla": Recurrence("decay", "key", False),
    "linear": Recurrence("sum", "no", False),
}
# Parts of functions' names that tell; the first that fits counts.
_TELLING = {"kda": "kda", "gated_delta": "gated_delta", "gdn": "gated_delta", "delta": "delta"}
_TELLING |= {"simple_gla": "simple_gla", "gla": "gla", "linear_att": "linear"}


def recurrence_of(name: str, given: str | None) -> str:
    """Return the recurrence that was given, or else the one that a function's name tells of."""
    if given is not None:
        look_up(RECURRENCES, given, "recurrence")
        return given
    for part, recurrence in _TELLING.items():
        if part in name:
            return recurrence
    raise ValueError(f"the name {name!r} does not tell what it computes; say it with --rule: {', '.join(RECURRENCES)}")


@dataclass(frozen=True)
class Problem:
    """The tensors of one call, in fla's layouts.

    q, k (B, T, H, K), v (B, T, HV, V), g the log decay (B, T, HV) or (B, T, HV, K), beta (B, T, HV), state the initial
    one (N, HV, K, V), bounds (N + 1,) of sequences packed along T, mask (B, T) False for padding. Queries are to be
    scaled by K^-0.5.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    state: Tensor | None = None
    bounds: Tensor | None = None
    mask: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that a result can be differentiated by."""
        return {name: x for name, x in vars(self).items() if x is not None and x.is_floating_point()}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return the same with every tensor of `inputs` changed."""
        return replace(self, **{name: change(x) for name, x in self.inputs.items()})

    def rows(self, rows: slice | Tensor) -> Problem:
        """Return the same with these rows of the batch only; not for packed sequences."""
        return replace(self, **{name: x[rows] for name, x in vars(self).items() if x is not None})

    def tokens(self, start: int, end: int) -> Problem:
        """Return the same with a stretch of time only."""
        timed = {name: x for name, x in vars(self).items() if x is not None and name not in ("state", "bounds")}
        return replace(self, **{name: x[:, start:end] for name, x in timed.items()})


# o (B, T, HV, V), and the final state (N, HV, K, V) where it is asked for.
Found = tuple[Tensor, Tensor | None]
Function = Callable[[Problem, bool], Found]

HEAD_SIZE = 16


@dataclass(frozen=True)
class Setting:
    """What is drawn. Where a field is None it is drawn at random, or as in most models.

    Attributes:
        K: the size of a key; None for the one that all cases have that are about something else.
        V: the size of a value, if it is another.
        log_decay: one number for all tokens; "mixed" for -100 at every fourth token and -0.001 elsewhere.
        beta: one number for all tokens.
        keys: "unit" for random directions of length 1, "zero", or "equal" for one direction at all tokens.
        state: whether there is an initial state.
        lengths: of sequences that are packed along T.
        masked: whether some tokens are padding, at both ends and in between.
        strided: whether tensors are views that are not contiguous.
    """

    B: int = 2
    T: int = 70
    H: int = 2
    HV: int | None = None
    K: int | None = None
    V: int | None = None
    log_decay: float | Literal["mixed"] | None = None
    beta: float | None = None
    keys: Literal["unit", "zero", "equal"] = "unit"
    state: bool = False
    lengths: tuple[int, ...] | None = None
    masked: bool = False
    strided: bool = False

    def draw(
        self, recurrence: Recurrence, dtype: torch.dtype, device: str, seed: int, head_size: int = HEAD_SIZE
    ) -> Problem:
        """Return the tensors: q, k and v in `dtype`, the others in float32 at least."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.promote_types(dtype, torch.float32)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        B, T = (self.B, self.T) if self.lengths is None else (1, sum(self.lengths))
        K = self.K or head_size
        H, HV, V = self.H, self.HV or self.H, self.V or K
        k = {"zero": torch.zeros(B, T, H, K), "equal": normal(B, 1, H, K).expand(B, T, H, K)}.get(
            self.keys, normal(B, T, H, K)
        )
        drawn: dict[str, Tensor] = {"q": normal(B, T, H, K), "k": F.normalize(k.double(), dim=-1)}
        drawn = {name: x.to(dtype) for name, x in {**drawn, "v": normal(B, T, HV, V)}.items()}
        if recurrence.decays != "no":
            # From 0.001 to 4, most about 0.1.
            g = -(normal(B, T, HV, *([K] if recurrence.decays == "key" else [])) * 1.5 - 2).exp()
            if self.log_decay == "mixed":
                g = torch.full_like(g, -1e-3)
                g[:, ::4] = -100.0
            elif self.log_decay is not None:
                g = torch.full_like(g, self.log_decay)
            drawn["g"] = g.to(wide)
        if recurrence.beta:
            beta = normal(B, T, HV).sigmoid()
            drawn["beta"] = (beta if self.beta is None else torch.full_like(beta, self.beta)).to(wide)
        if self.state:
            drawn["state"] = normal(B if self.lengths is None else len(self.lengths), HV, K, V).to(wide)
        problem = Problem(**{name: x.to(device) for name, x in drawn.items()})
        if self.strided:
            problem = problem.mapped(_strided)
        if self.lengths is not None:
            bounds = torch.tensor([0, *accumulate(self.lengths)], device=device)
            problem = replace(problem, bounds=bounds)
        if self.masked:
            kept = torch.rand(B, T, generator=generator) < 0.8
            kept[:, : T // 8] = kept[0, -T // 8 :] = False
            problem = replace(problem, mask=kept.to(device))
        return problem


def _strided(x: Tensor) -> Tensor:
    """Return the same numbers in memory of another order, with gaps."""
    gaps = x.new_zeros(*reversed(x.shape), 2)
    view = gaps[..., 0].permute(*reversed(range(x.dim())))
    return view.copy_(x)

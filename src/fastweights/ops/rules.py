"""The update rules: how one step of key, value and gates changes the fast weights.

Shapes of one step: W (B, H, D, M), k (B, H, D), v (B, H, M), gates (B, H, 1). `D` is the paper's d_dot, `M` its
d_value; W is stored key-major, so the paper's `W k` reads `k @ W` here. `read(W, k)` is the value that the memory holds
under k, Eq. 20, or Eq. 27 under attention normalisation.

A rule is one entry of `RULES`: its step in plain PyTorch and, where it belongs to the family

    W_t = a_t W_{t-1} - e_t (a_t W_{t-1} k_t) k_t^T + w_t v_t k_t^T,

the coefficients (a, e, w) from which every fast backend computes it. To add a rule, add a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.common.tables import look_up

Read = Callable[[Tensor, Tensor], Tensor]


class Coefficients(NamedTuple):
    """Per-step (a, e, w) of the family; None stands for a = 1, e = 0, w = 1."""

    decay: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """One update rule. `gates` names the per-step, per-head inputs it takes beside q, k and v."""

    name: str
    source: str
    description: str
    gates: tuple[str, ...]
    step: Callable[..., Tensor]
    coefficients: Callable[..., Coefficients] | None = None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def accumulator(self, **gates: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(a, c) of the accumulator z_t = a_t z_{t-1} + c_t k_t of attention normalisation, Eqs. 18 and 26.

        A rule that only adds weighs the key in z as it weighs the value in W, so that the weights of its read-out sum
        to one. A rule that also removes counts each key once, as the paper does for the delta rule.
        """
        if self.coefficients is None:
            return None, None
        a, e, w = self.coefficients(**gates)
        return a, w if e is None else None


RULES: dict[str, Rule] = {}


def _rule(
    name: str,
    source: str,
    gates: tuple[str, ...] = (),
    coefficients: Callable[..., Coefficients] | None = None,
    options: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter the decorated step function into `RULES`."""

    def enter(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        description = (step.__doc__ or "").splitlines()[0]
        RULES[name] = Rule(name, source, description, gates, step, coefficients, options or {})
        return step

    return enter


def update_rule(rule: str | Rule, **options: str) -> Rule:
    """The rule of that name, with its options set: `update_rule("fwp1991", sigma="identity")`."""
    found = rule if isinstance(rule, Rule) else look_up(RULES, rule, "rule")
    for option, value in options.items():
        if option not in found.options:
            raise ValueError(f"rule {found.name!r} has no option {option!r} (options: {list(found.options)})")
        look_up(dict.fromkeys(found.options[option]), value, f"{option} of rule {found.name!r}")
    return replace(found, step=partial(found.step, **options)) if options else found


def list_rules() -> dict[str, str]:
    """Name and one-line description of every update rule."""
    return {name: f"{rule.description} [{rule.source}]" for name, rule in RULES.items()}


def outer(k: Tensor, v: Tensor) -> Tensor:
    """The paper's v ⊗ k, key-major: (..., D), (..., M) -> (..., D, M)."""
    return k.unsqueeze(-1) * v.unsqueeze(-2)


@_rule("sum", "Eq. 17", coefficients=lambda: Coefficients())
def sum_rule(W: Tensor, k: Tensor, v: Tensor, read: Read) -> Tensor:
    """W + v ⊗ k: purely additive, the linear Transformer."""
    return W + outer(k, v)


@_rule("delta", "Eq. 24", ("beta",), lambda beta: Coefficients(erase=beta, write=beta))
def delta_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor) -> Tensor:
    """W + beta (v - v_bar) ⊗ k, v_bar = W k: replaces what is stored under k, the Delta Network."""
    v_bar = read(W, k)
    return W + outer(k, beta * (v - v_bar))


@_rule("gated", "App. B, Peng et al. 2021", ("beta",), lambda beta: Coefficients(decay=1 - beta, write=beta))
def gated_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor) -> Tensor:
    """(1 - beta) W + beta v ⊗ k: forgets everything a little to write one thing."""
    return (1 - beta).unsqueeze(-1) * W + outer(k, beta * v)


@_rule(
    "gated_delta",
    "Yang et al. 2025",
    ("beta", "decay"),
    lambda beta, decay: Coefficients(decay=decay, erase=beta, write=beta),
)
def gated_delta_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor, decay: Tensor) -> Tensor:
    """The delta rule on a memory that first fades: W <- decay W, then W + beta (v - v_bar) ⊗ k."""
    W = decay.unsqueeze(-1) * W
    return W + outer(k, beta * (v - read(W, k)))


@_rule("decay", "Sun et al. 2023", ("decay",), lambda decay: Coefficients(decay=decay))
def decay_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, decay: Tensor) -> Tensor:
    """decay W + v ⊗ k: the sum rule on a memory that fades (RetNet)."""
    return decay.unsqueeze(-1) * W + outer(k, v)


@_rule("schlag2021", "Sec. 6.1.2, Schlag et al. 2021", ("beta",))
def schlag2021_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor) -> Tensor:
    """The fast weight memory of 2021: a delta step, then W / max(1, ||W||_F)."""
    W = delta_rule(W, k, v, read, beta)
    # The norm's gradient at W = 0 is undefined; below norm 1 nothing is divided, so 1 can stand in there.
    squared = W.square().sum((-2, -1), keepdim=True)
    return W / torch.where(squared > 1, squared, 1).sqrt()


@_rule("fwp1991", "Eqs. 1-3", options={"sigma": ("tanh", "identity")})
def fwp1991_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, sigma: str = "tanh") -> Tensor:
    """sigma(W + v ⊗ k): the fast weight programmer of 1991; sigma is "tanh" (default) or "identity"."""
    W = W + outer(k, v)
    return W.tanh() if sigma == "tanh" else W

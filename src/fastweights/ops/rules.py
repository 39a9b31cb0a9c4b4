"""The update rules: how one step of key, value and gates changes the fast weights.

Shapes of one step: W (B, H, D, M), k (B, H, D), v (B, H, M), gates (B, H, 1) or (B, H, D). `D` is the paper's d_dot,
`M` its d_value; W is stored key-major, so the paper's `W k` reads `k @ W` here. `read(W, k)` is the value that the
memory holds under k, Eq. 20, or Eq. 27 under attention normalisation.

A rule is one entry of `RULES`: its step in plain PyTorch and, where it belongs to the family

    W_t = a_t W_{t-1} - e_t (a_t W_{t-1} k_t) k_t^T + w_t v_t k_t^T,

the coefficients (a, e, w) from which every fast backend computes it. To add a rule, decorate such a function with
`register_rule`, here or in a module of your own: layers, the command line and the tests take its gates from its entry.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastweights.common.tables import check_name, look_up

Read = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Gate:
    """One per-step input of a rule beside q, k and v, between 0 and 1.

    Attributes:
        name: what `fast_weight_memory` calls it.
        idle: the value at which the gate leaves the memory as it is; padding gets it.
        per: "head" for one number a head, (B, T, H), or "key" for one a key channel, (B, T, H, D).
        bias: where the logits start in a layer, from the first head to the last; None for no bias.
        fades: whether it multiplies the memory. Such a gate may be given per head or, unless the rule also erases or
            writes by it, per key channel, and instead of it its natural logarithm under the name `log_NAME`.
    """

    name: str
    idle: float
    per: Literal["head", "key"] = "head"
    bias: tuple[float, float] | None = None
    fades: bool = False


BETA = Gate("beta", idle=0.0)
# Memories that at first last from about ten to a few hundred steps, one span per head.
DECAY = Gate("decay", idle=1.0, bias=(2.0, 6.0), fades=True)

FEEDBACK = Gate("feedback", idle=1.0, bias=(1.0, 1.0))


class Coefficients(NamedTuple):
    """Per-step (a, e, w) of the family; None stands for a = 1, e = 0, w = 1. `decay` alone may be per key channel."""

    decay: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """A gate that is a coefficient of a rule or, as `complement`, one minus it."""

    gate: str
    complement: bool = False

    def __rsub__(self, other: object) -> "Source":
        return Source(self.gate, not self.complement) if other == 1 else NotImplemented


# The source of a coefficient that is anything else.
COMPUTED = Source("computed from gates")


class Sources(NamedTuple):
    """Where a rule has its (a, e, w) from; None stands for 1, 0 and 1."""

    decay: Source | None
    erase: Source | None
    write: Source | None
    tied: bool  # whether w is e

    @classmethod
    def of(cls, coefficients: Callable[..., Coefficients], gates: tuple[Gate, ...]) -> "Sources":
        """Find out what a rule's coefficients are, by computing them from names, or else from numbers."""
        names = [gate.name for gate in gates]
        try:
            found: Any = coefficients(**{name: Source(name) for name in names})
            a, e, w = (x if x is None or isinstance(x, Source) else COMPUTED for x in found)
        except Exception:
            # A function need not compute with names, and may raise anything where it cannot.
            numbers = {name: torch.ones(()) for name in names}
            found = coefficients(**numbers)
            known = [(None, None), *((x, Source(name)) for name, x in numbers.items())]
            a, e, w = (next((source for x, source in known if x is y), COMPUTED) for y in found)
        return cls(a, e, w, tied=e is not None and found[1] is found[2])


def _in_erase_or_write(coefficients: Callable[..., Coefficients], gates: tuple[Gate, ...]) -> Iterator[str]:
    """Yield the gates that e or w depend on: where such a gate has two channels, so have they."""
    for gate in gates:
        numbers = {x.name: torch.ones(2 if x is gate else 1, device="cpu") for x in gates}
        if any(x is not None and x.numel() > 1 for x in coefficients(**numbers)[1:]):
            yield gate.name


@dataclass(frozen=True, eq=False)
class Rule:
    """One update rule; there is one object for each name and choice of options, also after pickling."""

    name: str
    source: str
    description: str
    gates: tuple[Gate, ...]
    step: Callable[..., Tensor]
    coefficients: Callable[..., Coefficients] | None = None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chosen: tuple[tuple[str, str], ...] = ()
    sources: Sources = field(init=False)
    heads_only: frozenset[str] = field(init=False)  # the gates that e or w depend on

    def __post_init__(self) -> None:
        of = (self.coefficients, self.gates) if self.coefficients else (Coefficients, ())
        object.__setattr__(self, "sources", Sources.of(*of))
        object.__setattr__(self, "heads_only", frozenset(_in_erase_or_write(*of)))
        for gate in self.gates:
            if gate.per == "key" and gate.name in self.heads_only:
                raise ValueError(
                    f"rule {self.name!r} erases or writes by {gate.name}, a gate per key channel; only a decay can be "
                    'that: make the gate one with per="head", or multiply keys by it before the call'
                )

    @property
    def gate_names(self) -> tuple[str, ...]:
        """The names of its gates, in order."""
        return tuple(gate.name for gate in self.gates)

    @property
    def logarithms(self) -> dict[str, str]:
        """The names under which gates may be given as natural logarithms, and the names of those gates."""
        return {f"log_{gate.name}": gate.name for gate in self.gates if gate.fades}

    @property
    def idle(self) -> dict[str, float]:
        """The value of each gate, and of each logarithm, that leaves the memory as it is."""
        values = {gate.name: gate.idle for gate in self.gates}
        return {**values, **{log: math.log(values[name]) for log, name in self.logarithms.items()}}

    def gates_from(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gates themselves, if some are given as logarithms."""
        logs = self.logarithms
        return {logs.get(name, name): x.exp() if name in logs else x for name, x in gates.items()}

    @property
    def only_adds(self) -> bool:
        """Whether it never removes what is stored under a key, so that its read-out can be a weighted mean."""
        return self.coefficients is not None and self.sources.erase is None

    def accumulator(self, **gates: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return (a, c) of the accumulator z_t = a_t z_{t-1} + c_t k_t of attention normalisation, Eqs. 18 and 26.

        A rule that only adds weighs the key in z as it weighs the value in W, so that the weights of its read-out sum
        to one. A rule that also removes counts each key once, as the paper does for the delta rule.
        """
        if self.coefficients is None:
            return None, None
        a, e, w = self.coefficients(**gates)
        return a, w if e is None else None

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        if self.name in RULES and update_rule(self.name, **dict(self.chosen)) is self:
            return _unpickled, (self.name, self.chosen)
        return super().__reduce_ex__(protocol)


RULES: dict[str, Rule] = {}
_Step = Callable[..., Tensor]


def register_rule(
    name: str,
    source: str,
    gates: tuple[Gate, ...] = (),
    coefficients: Callable[..., Coefficients] | None = None,
    options: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[_Step], _Step]:
    """Enter the decorated step function as the rule `name`, for every layer, backend and command.

    Args:
        name: what `rule=` takes.
        source: the equation or paper it is from.
        gates: the rule's gates, in the order in which a layer projects them; see `Gate`.
        coefficients: from the gates to (a, e, w) of the family, where the rule belongs to it; without them the rule
            runs on the backend `reference` only.
        options: names of further keyword arguments of the step function, and their possible values.
    """

    def enter(step: _Step) -> _Step:
        if name in RULES:
            raise ValueError(f"there is a rule {name!r} already, from {RULES[name].source}; choose another name")
        description = (step.__doc__ or "").partition("\n")[0]
        RULES[name] = Rule(name, source, description, gates, step, coefficients, options or {})
        return step

    return enter


@cache
def _with_options(name: str, *chosen: tuple[str, str]) -> Rule:
    """Return the one object for a rule with these options."""
    rule = RULES[name]
    return replace(rule, step=partial(rule.step, **dict(chosen)), chosen=chosen)


def _unpickled(name: str, chosen: tuple[tuple[str, str], ...]) -> Rule:
    return update_rule(name, **dict(chosen))


def update_rule(rule: str | Rule, **options: str) -> Rule:
    """Return the rule of that name with its options set: `update_rule("fwp1991", sigma="identity")`."""
    base = rule if isinstance(rule, Rule) else look_up(RULES, rule, "rule")
    if not options:
        return base
    for option, value in options.items():
        if option not in base.options:
            raise ValueError(f"rule {base.name!r} has no option {option!r} (options: {list(base.options)})")
        check_name(base.options[option], value, f"{option} of rule {base.name!r}")
    return _with_options(base.name, *sorted({**dict(base.chosen), **options}.items()))


def list_rules() -> dict[str, str]:
    """Return name and one-line description of every update rule."""
    return {name: f"{rule.description} [{rule.source}]" for name, rule in RULES.items()}


def outer(k: Tensor, v: Tensor) -> Tensor:
    """Compute the paper's v ⊗ k, key-major: (..., D), (..., M) -> (..., D, M)."""
    return k.unsqueeze(-1) * v.unsqueeze(-2)


@register_rule("sum", "Eq. 17", coefficients=lambda: Coefficients())
def sum_rule(W: Tensor, k: Tensor, v: Tensor, read: Read) -> Tensor:
    """W + v ⊗ k: purely additive, the linear Transformer."""
    return W + outer(k, v)


@register_rule("delta", "Eq. 24", (BETA,), lambda beta: Coefficients(erase=beta, write=beta))
def delta_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor) -> Tensor:
    """W + beta (v - v_bar) ⊗ k, v_bar = W k: replaces what is stored under k, the Delta Network."""
    v_bar = read(W, k)
    return W + outer(k, beta * (v - v_bar))


@register_rule("gated", "App. B, Peng et al. 2021", (BETA,), lambda beta: Coefficients(decay=1 - beta, write=beta))
def gated_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor) -> Tensor:
    """(1 - beta) W + beta v ⊗ k: forgets everything a little to write one thing."""
    return (1 - beta).unsqueeze(-1) * W + outer(k, beta * v)


@register_rule(
    "gated_delta",
    "Yang et al. 2025",
    (BETA, DECAY),
    lambda beta, decay: Coefficients(decay=decay, erase=beta, write=beta),
)
def gated_delta_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor, decay: Tensor) -> Tensor:
    """The delta rule on a memory that first fades: W <- decay W, then W + beta (v - v_bar) ⊗ k; per key, KDA."""
    W = decay.unsqueeze(-1) * W
    return W + outer(k, beta * (v - read(W, k)))


@register_rule(
    "comba",
    "Hu et al. 2025",
    (BETA, DECAY, FEEDBACK),
    lambda beta, decay, feedback: Coefficients(decay=decay, erase=beta * feedback, write=beta),
)
def comba_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor, decay: Tensor, feedback: Tensor) -> Tensor:
    """W <- decay W, then W + beta (v - feedback v_bar) ⊗ k: gated delta that takes back a share of v_bar only."""
    W = decay.unsqueeze(-1) * W
    return W + outer(k, beta * (v - feedback * read(W, k)))


@register_rule("decay", "Sun et al. 2023", (DECAY,), lambda decay: Coefficients(decay=decay))
def decay_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, decay: Tensor) -> Tensor:
    """decay W + v ⊗ k: the sum rule on a memory that fades (RetNet; with decays per key, gated linear attention)."""
    return decay.unsqueeze(-1) * W + outer(k, v)


@register_rule("schlag2021", "Sec. 6.1.2, Schlag et al. 2021", (BETA,))
def schlag2021_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor) -> Tensor:
    """The fast weight memory of 2021: a delta step, then W / max(1, ||W||_F)."""
    W = delta_rule(W, k, v, read, beta)
    # The norm's gradient at W = 0 is undefined; below norm 1 nothing is divided, so 1 can stand in there.
    squared = W.square().sum((-2, -1), keepdim=True)
    return W / torch.where(squared > 1, squared, 1).sqrt()


@register_rule("fwp1991", "Eqs. 1-3", options={"sigma": ("tanh", "identity")})
def fwp1991_rule(W: Tensor, k: Tensor, v: Tensor, read: Read, sigma: str = "tanh") -> Tensor:
    """sigma(W + v ⊗ k): the fast weight programmer of 1991; sigma is "tanh" (default) or "identity"."""
    W = W + outer(k, v)
    return W.tanh() if sigma == "tanh" else W

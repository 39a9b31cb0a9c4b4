"""A memory over time: its state after every write, how W is filled, and what is still readable."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.memory import check, fast_weight_memory
from fastweights.ops.normalization import divides
from fastweights.ops.rules import Rule, update_rule
from fastweights.ops.spec import Inputs
from fastweights.ops.state import FastWeightState
from fastweights.probe.reading import recall


def states(
    k: Tensor,
    v: Tensor,
    *,
    rule: str | Rule = "delta",
    normalization: str | None = None,
    state: FastWeightState | None = None,
    **gates: Tensor | None,
) -> Iterator[FastWeightState]:
    """Yield the state after each write of keys (B, T, H, D) and values (B, T, H, M), by any rule."""
    rule = update_rule(rule)
    taken = {name: gate for name, gate in gates.items() if gate is not None}
    W, z = (None, None) if state is None else (state.W, state.z)
    check(Inputs(rule, k, k, v, taken, W, z, attention=divides(normalization)))
    for t in range(k.shape[1]):
        now = slice(t, t + 1)
        given: Any = {name: gate[:, now] for name, gate in taken.items()}
        call: Any = {"rule": rule, "normalization": normalization, "state": state, "backend": "reference", **given}
        _, state = fast_weight_memory(k[:, now], k[:, now], v[:, now], **call)
        yield state


def spectrum(state: FastWeightState) -> Tensor:
    """Return the singular values of W, the largest first, (B, H, min(D, M))."""
    return torch.linalg.svdvals(state.W)


def effective_rank(state: FastWeightState) -> Tensor:
    """Return the effective rank of W, (B, H): exp of the entropy of its singular values (Roy and Vetterli 2007).

    It is r where r singular values are equal and the others 0; it is 0 for an empty memory.
    """
    return _effective_rank(spectrum(state))


def _effective_rank(values: Tensor) -> Tensor:
    total = values.sum(-1, keepdim=True)
    shares = values / torch.where(total > 0, total, 1)
    return torch.special.entr(shares).sum(-1).exp().where(total.squeeze(-1) > 0, 0.0)


class Spectra(NamedTuple):
    """How W is filled after each write.

    Attributes:
        values: its singular values, (B, T, H, min(D, M)).
        effective_rank: (B, T, H), see `effective_rank`.
        norm: its Frobenius norm, (B, T, H).
    """

    values: Tensor
    effective_rank: Tensor
    norm: Tensor


def spectra(k: Tensor, v: Tensor, **call: Any) -> Spectra:
    """Compute singular values, effective rank and norm of W after each write; arguments as for `states`."""
    values = torch.stack([spectrum(state) for state in states(k, v, **call)], 1)
    return Spectra(values, _effective_rank(values), values.norm(dim=-1))


@dataclass(frozen=True, eq=False)
class Retention:
    """How well everything written so far is still read, after each write.

    Attributes:
        error: (B, H, T, S), after write t, the relative error of the value of write s; infinite for s > t.
        bound: up to which error a value counts as readable.
    """

    error: Tensor
    bound: float

    @property
    def readable(self) -> Tensor:
        """Whether the value of write s is still readable after write t, (B, H, T, S)."""
        return self.error <= self.bound

    @property
    def count(self) -> Tensor:
        """How many values are readable after each write, (B, H, T)."""
        return self.readable.sum(-1)

    @property
    def age(self) -> Tensor:
        """The age in writes of the oldest value that is readable after write t, (B, H, T); 0 for the one just written.

        It is -1 where none is.
        """
        T = self.error.shape[-1]
        first = torch.where(self.readable, torch.arange(T, device=self.error.device), T).amin(-1)
        ages = torch.arange(T, device=self.error.device) - first
        return torch.where(first < T, ages, -1)


def retention(k: Tensor, v: Tensor, *, bound: float = 0.5, **call: Any) -> Retention:
    """Read all that was written so far after each write, and compare; other arguments as for `states`.

    A value whose key was given another value later is compared with the value it had, so that it counts as lost.
    """
    if not bound > 0:
        raise ValueError(f"bound must be above 0, got {bound}")
    rows = []
    for t, state in enumerate(states(k, v, **call)):
        n = state.W.shape[1] // k.shape[2]
        keys = k[:, : t + 1].repeat_interleave(n, 2)
        error = recall(state, keys, v[:, : t + 1]).error
        assert error is not None
        later = error.new_full((error.shape[0], k.shape[1] - t - 1, error.shape[2]), torch.inf)
        rows.append(torch.cat([error, later], 1))
    return Retention(torch.stack(rows, 1).permute(0, 3, 1, 2), bound)

"""From which writes a read comes: every y_t as an exact sum over the steps that wrote it.

A rule of the family is linear in the memory, W_t = A_t W_{t-1} + w_t k_t v_t^T with A_t = (I - e_t k_t k_t^T) diag(a_t)
(key-major), so that

    y_t = q_t A_t ... A_1 W_0 + sum_s w_s (q_t A_t ... A_{s+1} k_s) v_s.

The factors in brackets are computed for all reads at once, from the last step back to the first. Attention
normalisation divides by numbers that depend on keys and gates alone, so that it stays a sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.ops.family import coefficients_of, outside
from fastweights.ops.memory import check
from fastweights.ops.normalization import divides, safe_divide
from fastweights.ops.product import one_write_per_step, writes_per_token
from fastweights.ops.rules import Rule, update_rule
from fastweights.ops.spec import Inputs
from fastweights.ops.state import FastWeightState

BY = {"value": "what is left of each value", "write": "what each step changed"}


@dataclass(frozen=True, eq=False)
class Attribution:
    """Reads as sums over writes: y_t = initial_t + sum over s of weights_ts stored_s.

    Attributes:
        weights: (B, H, T, S), how much of what step s stored is in read t; 0 for later steps.
        stored: (B, H, S, M), what each step stored: its value, or its change of the memory.
        initial: (B, H, T, M), what comes from the state before the first step.
    """

    weights: Tensor
    stored: Tensor
    initial: Tensor

    @property
    def parts(self) -> Tensor:
        """The part that each write has in each read, (B, H, T, S, M)."""
        return self.weights.unsqueeze(-1) * self.stored.unsqueeze(2)

    @property
    def y(self) -> Tensor:
        """The reads themselves, (B, T, H, M): the sum of all parts."""
        return (self.initial + self.weights @ self.stored).transpose(1, 2)

    @property
    def shares(self) -> Tensor:
        """The share of each write in each read, (B, H, T, S): its part's length along y over the length of y.

        They sum to 1 where nothing comes from the initial state. A negative one points away from what was read.
        """
        y = self.y.transpose(1, 2)
        along = torch.einsum("bhtm,bhsm->bhts", y, self.stored)
        return safe_divide(self.weights * along, y.square().sum(-1, keepdim=True))


def attribute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: str | Rule = "delta",
    normalization: str | None = None,
    state: FastWeightState | None = None,
    by: str = "value",
    **gates: Tensor | None,
) -> Attribution:
    """Split what `fast_weight_memory` reads with q into the writes that it comes from, exactly.

    Covered are the rules of the family (`sum`, `delta`, `gated`, `gated_delta`, `comba`, `decay`, and your own with
    coefficients), with decays per head or key channel, with attention normalisation, from any state, and with several
    writes a token. Other rules are refused: where W is squashed (`fwp1991`) or rescaled by its norm (`schlag2021`), a
    read is no sum over writes.

    Arguments are those of `fast_weight_memory`, and `by`. With `by="value"` a weight says how much of the value v_s is
    left in the read: one that was overwritten has weight 0. With `by="write"` a part is what a step changed: under the
    delta rule, an overwriting step counts as the new value less the old one, which stays with the step that wrote it.
    """
    look_up(BY, by, "by")
    inputs = _family_inputs(q, k, v, rule, normalization, state, gates)
    n = k.shape[1] // q.shape[1]
    memory = _Memory(inputs)
    reads = torch.arange(n - 1, memory.k.shape[2], n, device=q.device)
    queries = memory.q[:, :, n - 1 :: n]
    stored, erase, write = (memory.v, memory.e, memory.w) if by == "value" else (memory.changes(), None, None)
    weights, rest = _weights(queries, reads, memory.k, memory.a, erase, write)
    initial = rest @ memory.W
    if memory.totals is not None:
        total = (queries * memory.totals[:, :, n - 1 :: n]).sum(-1, keepdim=True)
        weights, initial = safe_divide(weights, total), safe_divide(initial, total)
    return Attribution(weights, stored, initial)


def interference(
    keys: Tensor,
    queries: Tensor | None = None,
    *,
    rule: str | Rule = "sum",
    normalization: str | None = None,
    **gates: Tensor | None,
) -> Tensor:
    """Compute how much of each value every key returns once all S keys have been written, (B, H, S, S).

    Entry [i, j] is the factor of the value of key j in what a read with key i returns: k_i·k_j for the sum rule. Where
    keys do not interfere this is the identity matrix (for keys of length 1, and beta = 1). `queries` (B, N, H, D) read
    in place of the keys, for (B, H, N, S).
    """
    queries = keys if queries is None else queries
    if queries.dim() != 4 or queries.shape[0] != keys.shape[0] or queries.shape[2:] != keys.shape[2:]:
        raise ValueError(
            f"queries must have shape (B, N, H, D) to go with keys {tuple(keys.shape)}, got {tuple(queries.shape)}"
        )
    memory = _Memory(_family_inputs(keys, keys, torch.zeros_like(keys[..., :1]), rule, normalization, None, gates))
    reads, last = queries.transpose(1, 2).to(memory.k.dtype), keys.shape[1] - 1
    at = torch.full((queries.shape[1],), last, device=keys.device)
    weights, _ = _weights(reads, at, memory.k, memory.a, memory.e, memory.w)
    if memory.totals is None:
        return weights
    return safe_divide(weights, (reads * memory.totals[:, :, -1:]).sum(-1, keepdim=True))


def _family_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: str | Rule,
    normalization: str | None,
    state: FastWeightState | None,
    gates: dict[str, Tensor | None],
) -> Inputs:
    """Return a call of a rule of the family that has been checked, one step for each write."""
    rule = update_rule(rule)
    reason = outside(rule)
    if reason is not None:
        raise ValueError(f"{reason}, so that its reads are no sums over writes; use a rule of the family")
    taken = {name: gate for name, gate in gates.items() if gate is not None}
    W, z = (None, None) if state is None else (state.W, state.z)
    inputs = Inputs(rule, q, k, v, taken, W, z, attention=divides(normalization))
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == 4 and writes_per_token(inputs) > 1:
        inputs = one_write_per_step(inputs)
    check(inputs)
    return inputs.expanded()


class _Memory:
    """A call as its recurrence: tensors (B, H, S, ...) and coefficients of every step, after normalisation.

    a is (B, H, S, D) or (B, H, S, 1), e and w are (B, H, S, 1); None stands for 1, 0 and 1. `totals` (B, H, S, D) are
    the accumulators z after every step, None without attention normalisation.
    """

    def __init__(self, inputs: Inputs) -> None:
        dtype = inputs.state_dtype
        self.q, self.k, self.v = (x.to(dtype).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        found = coefficients_of(inputs.rule, inputs.gates, False, dtype)
        self.a, self.e, self.w = (None if c is None else _steps(c) for c in found)
        self.W, z = inputs.initial_state()
        self.totals: Tensor | None = None
        if z is None:
            return
        counted = self.k if self.w is None or self.e is not None else self.w * self.k
        totals, recalled = [], []
        for s in range(self.k.shape[2]):
            z = z if self.a is None else self.a[:, :, s] * z
            recalled.append((z * self.k[:, :, s]).sum(-1, keepdim=True))
            z = z + counted[:, :, s]
            totals.append(z)
        self.totals = torch.stack(totals, 2)
        self.e = None if self.e is None else safe_divide(self.e, torch.stack(recalled, 2))

    def changes(self) -> Tensor:
        """Return what every step adds to the memory under its key, (B, H, S, M): w v - e v_bar."""
        W, changes = self.W, []
        for s in range(self.k.shape[2]):
            k, v = self.k[:, :, s], self.v[:, :, s]
            W = W if self.a is None else self.a[:, :, s].unsqueeze(-1) * W
            change = v if self.w is None else self.w[:, :, s] * v
            if self.e is not None:
                change = change - self.e[:, :, s] * (k.unsqueeze(-2) @ W).squeeze(-2)
            W = W + k.unsqueeze(-1) * change.unsqueeze(-2)
            changes.append(change)
        return torch.stack(changes, 2)


def _steps(c: Tensor) -> Tensor:
    """Return coefficients (B, S, H) or (B, S, H, D) as (B, H, S, 1) or (B, H, S, D)."""
    return (c if c.dim() == 4 else c.unsqueeze(-1)).transpose(1, 2)


def _weights(
    queries: Tensor, at: Tensor, k: Tensor, a: Tensor | None, e: Tensor | None, w: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the weight of every step in reads (B, H, N, D) after steps `at` (N,), and what they read the start with.

    Going back one step turns what reads W_s into what reads W_{s-1}: g A_s.
    """
    g, columns = queries, []
    for s in reversed(range(k.shape[2])):
        seen = (at >= s).unsqueeze(-1)
        hit = (g * k[:, :, s : s + 1]).sum(-1, keepdim=True).masked_fill(~seen, 0)
        columns.append(hit if w is None else w[:, :, s : s + 1] * hit)
        before = g if e is None else g - e[:, :, s : s + 1] * hit * k[:, :, s : s + 1]
        before = before if a is None else a[:, :, s : s + 1] * before
        g = torch.where(seen, before, g)
    return torch.cat(columns[::-1], -1), g

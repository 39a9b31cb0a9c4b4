"""From which writes a read comes: every y_t as an exact sum over the steps that wrote it.

A rule of the family is linear in the values that it writes, also under attention normalisation, which divides by
numbers that depend on keys and gates alone. So the weights of all steps in a read are what a memory of the same keys
and gates returns where the values are unit vectors, another one at each step.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastweights.common.tables import look_up
from fastweights.ops import reference
from fastweights.ops.family import coefficients_of, outside
from fastweights.ops.memory import check
from fastweights.ops.normalization import divides, safe_divide
from fastweights.ops.product import one_write_per_step, writes_per_token
from fastweights.ops.rules import RULES, Rule, update_rule
from fastweights.ops.spec import Inputs
from fastweights.ops.state import FastWeightState
from fastweights.probe.reading import recall

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
    if by == "value":
        stored, weights_and_rest = inputs.v, reference.run(_with_unit_values(inputs))[0]
    else:
        stored, weights_and_rest = _split_by_writes(inputs)
    n = k.shape[1] // q.shape[1]
    sizes = [stored.shape[1], stored.shape[3]]
    weights, initial = weights_and_rest[:, n - 1 :: n].transpose(1, 2).split(sizes, -1)
    return Attribution(weights, stored.transpose(1, 2), initial)


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
    inputs = _family_inputs(keys, keys, torch.zeros_like(keys[..., :1]), rule, normalization, None, gates)
    _, W, z = reference.run(_with_unit_values(inputs))
    return recall(FastWeightState(W[..., :-1], z), queries).value.transpose(1, 2)


def _family_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: str | Rule,
    normalization: str | None,
    state: FastWeightState | None,
    gates: dict[str, Tensor | None],
) -> Inputs:
    """Return a call of a rule of the family that has been checked, each write a step, all in the dtype of states."""
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
    inputs = inputs.expanded()
    wide = inputs.state_dtype
    return replace(inputs, q=inputs.q.to(wide), k=inputs.k.to(wide), v=inputs.v.to(wide))


def _with_unit_values(inputs: Inputs) -> Inputs:
    """Return the call with one more channel of values for each step, before the others: 1 at that step, 0 elsewhere.

    Its reads are the weight of each step and, in the channels that were there before, what is left of the initial
    state: values are 0 there.
    """
    S, M = inputs.v.shape[1], inputs.v.shape[3]
    units = torch.eye(S, S + M, dtype=inputs.v.dtype, device=inputs.v.device)[None, :, None]
    W, z = inputs.initial_state()
    return replace(inputs, v=units.expand(*inputs.v.shape[:3], -1), W=pad(W, (S, 0)), z=z)


def _split_by_writes(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return what every step adds to the memory under its key, (B, S, H, M), and reads as of `_with_unit_values`.

    A step adds w v - e v_bar, and what was added only fades.
    """
    ones = torch.ones_like(inputs.v[..., 0])
    a, e, w = coefficients_of(inputs.rule, inputs.gates, False, inputs.v.dtype)
    a, w = (ones if c is None else c for c in (a, w))
    W, z = inputs.initial_state()
    added = w.unsqueeze(-1) * inputs.v
    if e is not None:
        # v_bar is what a key reads just before it is written: the key after it, of the memory that a step leaves.
        keys = inputs.k * (a if a.dim() == 4 else a.unsqueeze(-1))
        first = recall(FastWeightState(W, z), keys[:, :1]).value
        later = reference.run(replace(inputs, q=keys.roll(-1, 1)))[0][:, :-1]
        added = added - e.unsqueeze(-1) * torch.cat([first, later], 1)
    fading = replace(inputs, rule=RULES["decay"], gates={"decay": a}, W=W, z=None, attention=False)
    y = reference.run(_with_unit_values(fading))[0]
    if z is None:
        return added, y
    counted = w if e is None else ones
    total = reference.run(replace(fading, v=counted.unsqueeze(-1), W=z.unsqueeze(-1)))[0]
    return added, safe_divide(y, total)

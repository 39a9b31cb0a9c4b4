"""Several writes a token, as in DeltaProduct: a token has n keys and values, and one query that reads after the last.

The memory fades once a token and is then written n times. That is the same recurrence over n times as many steps, of
which the first of a token fades and the last is read. By the delta rule, a token then applies a product of n
Householder matrices (Siems et al. 2025).
"""

from dataclasses import replace

import torch
from torch import Tensor

from fastweights.ops.spec import Executable, Inputs

# The logit of an open gate: its sigmoid is 1 in every dtype.
_OPEN = 40.0


def writes_per_token(inputs: Inputs) -> int:
    """Return how many keys there are for each query; 1 where their lengths do not fit together."""
    T, steps = inputs.q.shape[1], inputs.k.shape[1] if inputs.k.dim() == 4 else 0
    return steps // T if T and steps and steps % T == 0 else 1


def one_write_per_step(inputs: Inputs) -> Inputs:
    """Return the same call with one step for each write; the query reads at the last step of its token."""
    n, T, rule = writes_per_token(inputs), inputs.q.shape[1], inputs.rule
    gates = {}
    for name, x in inputs.gates.items():
        gate = rule.logarithms.get(name, name)
        if not any(gate == other.name and other.fades for other in rule.gates):
            gates[name] = x
            continue
        if x.shape[1] != T:
            raise ValueError(
                f"{name} must have T = {T} tokens, as q has: the memory fades once a token, got {x.shape[1]}"
            )
        logits = inputs.features.logits and name not in rule.logarithms
        gates[name] = _at_first_step(n, x, _OPEN if logits else rule.idle[name])
    mask, starts, bounds = inputs.mask, inputs.starts, inputs.cu_seqlens
    q = inputs.q.unsqueeze(2)
    return replace(
        inputs,
        q=torch.cat([torch.zeros_like(q.expand(-1, -1, n - 1, -1, -1)), q], 2).flatten(1, 2),
        gates=gates,
        cu_seqlens=None if bounds is None else bounds * n,
        mask=None if mask is None else mask.repeat_interleave(n, 1),
        starts=None if starts is None else _at_first_step(n, starts, False),
    )


def _at_first_step(n: int, x: Tensor, filler: float) -> Tensor:
    """Return x (B, T, ...) at the first of every n steps (B, n T, ...), and `filler` at the others."""
    x = x.unsqueeze(2)
    return torch.cat([x, torch.full_like(x, filler).expand(-1, -1, n - 1, *x.shape[3:])], 2).flatten(1, 2)


def on_single_writes(run: Executable) -> Executable:
    """Return what runs calls of several writes a token on an executable for single writes."""

    def run_steps(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        n = writes_per_token(inputs)
        y, W, z = run(one_write_per_step(inputs))
        return y[:, n - 1 :: n], W, z

    return run_steps

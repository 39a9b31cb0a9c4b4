"""Texts in one row kept apart for all values: what is NaN or infinite in one does not reach the next past its start.

Kernels multiply a chunk's tokens all at once, and empty the memory with a decay of 0; but 0 · NaN is NaN. So calls with
`starts` run on zeros in place of what is not finite, and every token and state that depends on it is NaN afterwards.
All of it happens on the device, and only calls with `starts` pay for it. What is not finite, and what depends on it,
has gradients of 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastweights.ops.causality import fill_tokens, reached, spoilt_states, spoilt_tokens
from fastweights.ops.family import LOG_OF_ZERO
from fastweights.ops.spec import Executable, Inputs


def contain(run: Executable) -> Executable:
    """Return what runs calls with `starts` so that nothing that is not finite passes one."""

    def run_contained(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v, (W, z) = inputs.q, inputs.k, inputs.v, inputs.initial_state()
        # A logarithm of minus infinity is a decay of 0.
        logs = inputs.rule.logarithms
        gates = {name: x.clamp(min=LOG_OF_ZERO) if name in logs else x for name, x in inputs.gates.items()}
        unread, spoilt = spoilt_tokens(q), spoilt_tokens(k, v, *gates.values())
        lost = spoilt_states(W) if z is None else spoilt_states(W) | spoilt_states(z.unsqueeze(-1))
        y, W, z = run(
            replace(
                inputs,
                q=fill_tokens(q, unread),
                k=fill_tokens(k, spoilt),
                v=fill_tokens(v, spoilt),
                gates={name: fill_tokens(gate, spoilt) for name, gate in gates.items()},
                W=W.masked_fill(lost[..., None, None], 0),
                z=None if z is None else z.masked_fill(lost.unsqueeze(-1), 0),
            )
        )
        depends, lost = _dependents(inputs, spoilt, lost)
        nan = float("nan")
        y = y.masked_fill((depends | unread).unsqueeze(-1), nan)
        W = W.masked_fill(lost[..., None, None], nan)
        return y, W, None if z is None else z.masked_fill(lost.unsqueeze(-1), nan)

    return run_contained


def _dependents(inputs: Inputs, spoilt: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens (B, T, H) and final states (N, H) depend on spoilt tokens and on lost initial states.

    The first token of a sequence stands for its initial state, unless a text starts there.
    """
    starts, bounds = inputs.starts, inputs.cu_seqlens
    assert starts is not None
    if bounds is None:
        first = torch.zeros_like(starts).index_fill(1, torch.zeros(1, dtype=torch.long, device=starts.device), True)
        from_state = first.unsqueeze(-1) & lost.unsqueeze(1)
        ends = None
    else:
        T, filled, bounds = starts.shape[1], bounds.diff() > 0, bounds.long()
        # Sequences without tokens have their place after the last token.
        at = bounds[:-1].where(filled, T)
        first = torch.zeros(1, T + 1, dtype=torch.bool, device=starts.device).index_fill(1, at, True)[:, :-1]
        from_state = lost.new_zeros(T + 1, lost.shape[1]).index_copy(0, at, lost)[None, :-1]
        ends = (bounds[1:] - 1).clamp(min=0)
    walls = (starts | first).unsqueeze(-1)
    depends = reached(spoilt | from_state & ~starts.unsqueeze(-1), walls)
    return depends, depends[:, -1] if ends is None else depends[0, ends].where(filled.unsqueeze(-1), lost)

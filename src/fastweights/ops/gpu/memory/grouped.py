"""The walks there and back for any call: as they are, or over groups of chunks side by side (see docs/kernels.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu.memory.kernels.group_scan import scan_groups
from fastweights.ops.gpu.memory.kernels.options import Options
from fastweights.ops.gpu.memory.launcher import Launch
from fastweights.ops.gpu.memory.plan import Gradients, plan
from fastweights.ops.gpu.memory.strides import Gates, addressable, addressable_inputs
from fastweights.ops.gpu.memory.variants import Variant, group_length, power_of_two


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    W: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    wide: torch.dtype,
    tied: bool,
    keep: bool,
    config: Variant,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return y, the final W, with `keep` chunks' states and inverses and tokens' errors, and groups' transitions."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    length = group_length(q.shape[1], cu_seqlens, config)
    how = (dtype, wide, tied, config, features)
    if length == 0:
        walks = plan(q, k, v, gates, N, cu_seqlens, *how)
        walks.compile_ahead(keep)
        return *walks.forward((q, k, v, *gates), W, cu_seqlens, keep), None
    with torch.cuda.device_of(q):
        B, T, H, R = q.shape
        D = features.size(R)
        assert config.prepared, "the first walk forms no inverses that others could use"
        bounds = _bounds(B, T, length, q.device)
        inputs = q, k, v, a, e, w = addressable_inputs((q, k, v, *gates))
        groups = bounds.numel() - 1
        # What each group makes of no state, and of every unit vector.
        nothing = v.new_zeros(D).expand(*q.shape[:3], D)
        unit = torch.eye(D, dtype=wide, device=q.device).expand(groups, H, D, D).contiguous()
        walks = plan(q, k, v, (a, e, w), groups, bounds, *how, grouped=True)
        walks.compile_ahead(keep)
        _, changes, _, inverses, _ = walks.forward(inputs, None, bounds, False, read=False)
        square = plan(q, k, nothing, (a, e, w), groups, bounds, *how, grouped=True)
        _, transitions, *_ = square.forward((q, k, nothing, a, e, w), unit, bounds, False, False, inverses)
        starts = _scan(B, transitions, changes, W, back=False)
        # The last walk takes the most memory.
        del changes, unit
        y, W_end, states, inverses, errors = walks.forward(inputs, starts, bounds, keep, inverses=inverses)
        return y, _one_of_each(B, W_end, -1), states, inverses, errors, transitions


def backward(
    dy: Tensor,
    dW_end: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    states: Tensor,
    inverses: Tensor,
    errors: Tensor,
    transitions: Tensor | None,
    cu_seqlens: Tensor | None,
    wide: torch.dtype,
    tied: bool,
    wants_state: bool,
    config: Variant,
    features: Features = PLAIN,
) -> Gradients:
    """Return the gradients of q, k, v, the gates and, if it is wanted, the initial W."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    length = group_length(q.shape[1], cu_seqlens, config)
    how = (dy.dtype, wide, tied, config, features)
    kept = (states, inverses, errors)
    if length == 0:
        walks = plan(q, k, v, gates, N, cu_seqlens, *how)
        dq, dk, dv, da, de, dw, dW = walks.backward((q, k, v, *gates), dy, dW_end, kept, cu_seqlens, wants_state)
        return dq, dk, dv, (da, de, dw), dW
    assert transitions is not None
    with torch.cuda.device_of(q):
        B, T, *_ = q.shape
        bounds = _bounds(B, T, length, q.device)
        dy = addressable(dy)
        inputs = q, k, v, a, e, w = addressable_inputs((q, k, v, *gates))
        walks = plan(q, k, v, (a, e, w), bounds.numel() - 1, bounds, *how, grouped=True)
        # What each group makes of no gradient, then the gradients between groups, then everything.
        *_, changes = walks.walk_back(inputs, dy, None, *kept, bounds, True, only_state=True)[0]
        assert changes is not None
        ends = _scan(B, transitions, changes, dW_end, back=True)
        del changes
        found, left = walks.walk_back(inputs, dy, ends, *kept, bounds, wants_state)
        # What is left takes the most memory.
        del ends
        dq, dk, dv, grads, dW = walks.finish(found, left)
        return dq, dk, dv, grads, None if dW is None else _one_of_each(B, dW, 0)


def _bounds(B: int, T: int, length: int, device: torch.device) -> Tensor:
    """Return where groups of `length` tokens begin and end, with all sequences in a row."""
    groups = -(-T // length)
    n = torch.arange(B * groups + 1, device=device, dtype=torch.int32)
    return n // groups * T + n % groups * length


def _one_of_each(B: int, states: Tensor, group: int) -> Tensor:
    """Return the states of one group of each sequence."""
    return states.unflatten(0, (B, -1))[:, group].clone(memory_format=torch.contiguous_format)


def _scan(B: int, transitions: Tensor, changes: Tensor, initial: Tensor | None, back: bool) -> Tensor:
    """Compute the state before each group, or with `back` the gradient of the state after it."""
    groups, H, D, M = changes.shape
    states = torch.empty_like(changes)
    block, wide, device = min(16, power_of_two(M)), changes.dtype, changes.device
    precision = "ieee" if wide == torch.float64 else "tf32x3"
    options = Options(H=H, R=D, D=D, M=M, block_D=power_of_two(D), block_M=block, precision=precision)
    programs, stages = B * H * -(-M // block), 3 if D <= 64 else 2
    scan = Launch(scan_groups, programs, (wide, wide, wide, wide), 2, (back, options), 4, stages, device)
    begin = changes if initial is None else initial.contiguous()
    scan((transitions, changes, begin, states), groups // B, int(initial is not None))
    return states

"""The walks there and back for any call: as they are, or over groups of chunks side by side (see docs/kernels.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.ops.causality import Tokens
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu.launcher import Launch
from fastweights.ops.gpu.memory.kernels.forward import scan_groups
from fastweights.ops.gpu.memory.kernels.options import Options
from fastweights.ops.gpu.memory.plan import How, Plan, plan
from fastweights.ops.gpu.memory.strides import addressable, addressable_tokens
from fastweights.ops.gpu.memory.variants import Variant, group_length, power_of_two
from fastweights.ops.operator import Gradients, Kept


def plan_walks(
    tokens: Tokens,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    back: bool,
    tied: bool,
    variant: Variant,
    features: Features = PLAIN,
) -> Plan | Groups:
    """Return how to walk through sequences like these, with y in `dtype`; `back` says that gradients will follow."""
    q, how = tokens[0], (dtype, tied, variant, features)
    if length := group_length(q.shape[1], cu_seqlens, variant):
        return Groups(length, how)
    walks = plan(tokens, q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, cu_seqlens, how)
    walks.compile_ahead(back)
    return walks


class Groups:
    """How to walk through groups of `length` tokens of each sequence side by side; `how` is what `plan` takes."""

    def __init__(self, length: int, how: How) -> None:
        self.length, self.how = length, how

    def forward(
        self, tokens: Tokens, W: Tensor | None, cu_seqlens: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return y, the final W, with `keep` chunks' states, tiles and tokens' errors, and groups' transitions."""
        with torch.cuda.device_of(tokens[0]):
            bounds, walks, tokens = self._walks(tokens)
            walks.compile_ahead(keep)
            q, k, v, a, e, w = tokens
            B, T, (groups, H, D, _), wide = q.shape[0], q.shape[1], walks.buffers.state.shape, walks.buffers.state.dtype
            # What each group makes of no state, and of every unit vector.
            nothing = v.new_zeros(D).expand(B, T, H, D)
            unit = torch.eye(D, dtype=wide, device=q.device).expand(groups, H, D, D).contiguous()
            _, changes, _, tiles, _ = walks.forward(tokens, None, bounds, False, read=False)
            empty = (q, k, nothing, a, e, w)
            square = plan(empty, groups, bounds, self.how, grouped=True)
            _, transitions, *_ = square.forward(empty, unit, bounds, False, False, tiles)
            starts = _scan(B, transitions, changes, W, back=False)
            # The last walk takes the most memory.
            del changes, unit
            y, W_end, states, tiles, errors = walks.forward(tokens, starts, bounds, keep, tiles=tiles)
            return y, _one_of_each(B, W_end, -1), states, tiles, errors, transitions

    def backward(
        self, tokens: Tokens, dy: Tensor, dW_end: Tensor | None, kept: Kept, cu_seqlens: Tensor | None, wants_dW: bool
    ) -> Gradients:
        """Return the gradients of q, k, v, a, e, w and, if it is wanted, the initial W."""
        B, transitions = tokens[0].shape[0], kept[3]
        with torch.cuda.device_of(dy):
            bounds, walks, tokens = self._walks(tokens)
            dy = addressable(dy)
            # What each group makes of no gradient, then the gradients between groups, then everything.
            *_, changes = walks.walk_back(tokens, dy, None, kept, bounds, True, only_state=True)()
            assert changes is not None
            ends = _scan(B, transitions, changes, dW_end, back=True)
            del changes
            finish = walks.walk_back(tokens, dy, ends, kept, bounds, wants_dW)
            # What is left takes the most memory.
            del ends
            *grads, dW = finish()
            return *grads, None if dW is None else _one_of_each(B, dW, 0)

    def _walks(self, tokens: Tokens) -> tuple[Tensor, Plan, Tokens]:
        """Return where groups begin and end, the plan of their walks, and the tokens as kernels can read them."""
        tokens = addressable_tokens(tokens)
        B, T, *_ = tokens[0].shape
        bounds = _bounds(B, T, self.length, tokens[0].device)
        return bounds, plan(tokens, bounds.numel() - 1, bounds, self.how, grouped=True), tokens


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

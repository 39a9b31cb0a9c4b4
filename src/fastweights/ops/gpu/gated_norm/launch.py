"""Launches the kernels of the gated norm: one forward, two back.

What follows from shapes, strides and dtypes is worked out once, in a `Plan`. Triton is imported when the first is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.gpu.device import use_device_of
from fastweights.ops.gpu.heads import readable, token_stride

Tensors = Sequence[Any]

# Entries of a program at a time, and its warps.
ENTRIES, WARPS = 2048, 4
# How many programs the backward pass has at most, each with a sum of its own.
PROGRAMS = 2048
# The programs that add up sums: their columns, how many sums at a time, and warps.
ADDED, AT_ONCE, ADDING_WARPS = 16, 256, 4


def forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor]:
    """Return y."""
    return (_plan(tensors, settings).forward(tensors),)


def backward(grads: Tensors, tensors: Tensors, settings: Tensors) -> Tensors:
    """Return the gradients of x, weight and gate."""
    return _plan(tensors, settings).backward(grads[0], tensors)


def _plan(tensors: Tensors, settings: Tensors) -> Plan:
    from fastweights.ops.gpu.launcher import kind_of, planned

    x, weight, gate = tensors
    key = (Plan, x.shape, kind_of(x), weight.dtype, kind_of(gate), x.device, *settings)
    return planned(key, lambda: Plan(tensors, settings))


class Plan:
    """How calls with these shapes, strides, dtypes and settings are launched."""

    def __init__(self, tensors: Tensors, settings: Tensors) -> None:
        from fastweights.ops.gpu.gated_norm.kernels import normalize
        from fastweights.ops.gpu.launcher import Launch, dtype_of

        x, weight, gate = tensors
        self.shape, self.settings, self.device = x.shape, settings, x.device
        self.count = x.shape[:3].numel()
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.dtypes = (x.dtype, weight.dtype, dtype_of(gate))
        self.rows = (token_stride(readable(x)), 0 if gate is None else token_stride(readable(gate)))
        options, programs = self._split(0, None)
        constants = (self.count, options)
        self.normalize = Launch(normalize, programs, (*self.dtypes, x.dtype), 0, constants, WARPS, 1, x.device)

    def _split(self, dy_row: int, most: int | None) -> tuple[Any, int]:
        """Return what a kernel is compiled for, and how many programs it has, `most` of them."""
        import triton.language as tl
        from triton import next_power_of_2

        from fastweights.ops.gpu.gated_norm.kernels import Options

        (_, _, H, M), (opening, eps, scale) = self.shape, self.settings
        block = next_power_of_2(M)
        heads = max(1, min(ENTRIES // block, next_power_of_2(self.count)))
        turns = 1 if most is None else next_power_of_2(-(-self.count // (heads * most)))
        options = Options(
            H=H,
            M=M,
            silu=opening == "silu",
            eps=eps,
            scale=scale,
            x_row=self.rows[0],
            gate_row=self.rows[1],
            dy_row=dy_row,
            heads=heads,
            turns=turns,
            block=block,
            acc=tl.float64 if self.wide == torch.float64 else tl.float32,
        )
        return options, -(-self.count // (heads * turns))

    def forward(self, tensors: Tensors) -> Tensor:
        """Return y."""
        x, weight, gate = _prepared(tensors)
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        with use_device_of(x):
            self.normalize((x, weight, gate, y))
        return y

    def backward(self, dy: Tensor, tensors: Tensors) -> Tensors:
        """Return the gradients of x, weight and gate."""
        from fastweights.ops.gpu.launcher import planned

        x, weight, gate = _prepared(tensors)
        dy = readable(dy)
        row = token_stride(dy)
        walk, add, programs = planned((self, row), lambda: self._back(row))
        dx, d_weight = torch.empty(self.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)
        d_gate = None if gate is None else torch.empty(self.shape, dtype=gate.dtype, device=x.device)
        parts = torch.empty((programs, 1, self.shape[3]), dtype=self.wide, device=x.device)
        with use_device_of(x):
            walk((dy, x, weight, gate, dx, d_gate, parts))
            add((parts, d_weight, None), programs)
        return dx, d_weight, d_gate

    def _back(self, dy_row: int) -> tuple[Any, Any, int]:
        """Return the two launches of the backward pass, and how many programs the first has."""
        from fastweights.ops.gpu.common import add_parts
        from fastweights.ops.gpu.gated_norm.kernels import normalize_gradients
        from fastweights.ops.gpu.launcher import Launch

        dtype, weight, gate = self.dtypes
        options, programs = self._split(dy_row, PROGRAMS)
        dtypes, constants = (dtype, *self.dtypes, dtype, gate, self.wide), (self.count, options)
        walk = Launch(normalize_gradients, programs, dtypes, 0, constants, WARPS, 1, self.device)
        M = self.shape[3]
        added = (M, 1, AT_ONCE, ADDED)
        add = Launch(add_parts, -(-M // ADDED), (self.wide, weight, None), 1, added, ADDING_WARPS, 1, self.device)
        return walk, add, programs


def _prepared(tensors: Tensors) -> Tensors:
    """Return x, weight and gate as the kernels read them."""
    x, weight, gate = tensors
    return readable(x), weight.contiguous(), None if gate is None else readable(gate)

"""Launches the kernels of the short convolution: one forward, two back, and none of them waits for the host.

What follows from shapes, strides and dtypes is worked out once, in a `Plan`. Triton is imported when the first is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.gpu.device import use_device_of

Tensors = Sequence[Any]


class Split(NamedTuple):
    """How many channels a program has, tokens at a time, and warps."""

    channels: int
    block: int
    warps: int


FORWARD, BACKWARD = Split(512, 8, 4), Split(128, 4, 1)
# A program goes through this many tokens; through fewer where there would not be as many programs as `PROGRAMS`.
LONGEST, SHORTEST, PROGRAMS = 128, 32, 4096
# The programs that add up sums: their channels, how many sums at a time, and warps.
ADDED, AT_ONCE, ADDING_WARPS = 64, 32, 4


def forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor, Tensor]:
    """Return y and what is carried on."""
    return _plan(tensors, settings).forward(tensors)


def backward(grads: Tensors, tensors: Tensors, settings: Tensors) -> Tensors:
    """Return the gradients of x, weight, bias and recent."""
    return _plan(tensors, settings).backward(grads, tensors)


def _plan(tensors: Tensors, settings: Tensors) -> Plan:
    from fastweights.ops.gpu.launcher import dtype_of, planned

    x, weight, bias, recent, _, bounds, starts = tensors
    packed = None if bounds is None else (bounds.dtype, bounds.numel())
    shapes = (x.shape, x.stride(), x.dtype, x.device, weight.shape[1], weight.dtype, dtype_of(bias))
    key = (Plan, *shapes, recent is None, packed, starts is None, *settings)
    return planned(key, lambda: Plan(tensors, settings))


class Plan:
    """How calls with these shapes, strides and dtypes are launched."""

    def __init__(self, tensors: Tensors, settings: Tensors) -> None:
        from fastweights.ops.gpu.launcher import Launch, dtype_of
        from fastweights.ops.gpu.short_convolution.kernels import convolve

        x, weight, bias, recent, _, bounds, starts = tensors
        (self.B, self.T, self.C), self.taps, (self.silu,) = x.shape, weight.shape[1], settings
        self.N = self.B if bounds is None else bounds.numel() - 1
        self.packed, self.device = bounds is not None, x.device
        self.wide = torch.promote_types(x.dtype, torch.float32)
        recents = None if recent is None else x.dtype
        marks = (dtype_of(bounds), None if starts is None else torch.uint8)
        self.inputs = (x.dtype, weight.dtype, dtype_of(bias), recents, *marks)
        self.x_row, self.x_rows = _strides(_readable(x))
        options, _, programs = self._split(FORWARD, self.C)
        dtypes, constants = (self.inputs, x.dtype, x.dtype), (self.T, self.N, self.x_rows, options)
        self.convolve = Launch(convolve, programs, dtypes, 0, constants, FORWARD.warps, 1, x.device)

    def _split(self, how: Split, dy_row: int) -> tuple[Any, int, int]:
        """Return what a kernel is compiled for, and how many tiles and programs it has."""
        import triton.language as tl
        from triton import next_power_of_2

        from fastweights.ops.gpu.short_convolution.texts import Options

        channels = min(how.channels, next_power_of_2(self.C))
        groups, tile = -(-self.C // channels), SHORTEST
        while tile < LONGEST and self.B * self.T * groups >= 2 * tile * PROGRAMS:
            tile *= 2
        tiles = self.B * -(-self.T // tile)
        options = Options(
            taps=self.taps,
            silu=self.silu,
            packed=self.packed,
            C=self.C,
            x_row=self.x_row,
            dy_row=dy_row,
            channels=channels,
            tile=tile,
            block=how.block,
            window=next_power_of_2(how.block + self.taps - 1),
            acc=tl.float64 if self.wide == torch.float64 else tl.float32,
        )
        return options, tiles, (tiles + self.N) * groups

    def forward(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return y and what is carried on."""
        x, *_ = inputs = _prepared(tensors)
        y = torch.empty((self.B, self.T, self.C), dtype=x.dtype, device=x.device)
        recent_end = torch.empty((self.N, self.taps - 1, self.C), dtype=x.dtype, device=x.device)
        with use_device_of(x):
            self.convolve((inputs, y, recent_end))
        return y, recent_end

    def backward(self, grads: Tensors, tensors: Tensors) -> Tensors:
        """Return the gradients of x, weight, bias and recent."""
        from fastweights.ops.gpu.launcher import planned

        x, weight, bias, recent, *_ = inputs = _prepared(tensors)
        dy = x.new_zeros(x.shape) if grads[0] is None else _readable(grads[0])
        ends = None if grads[1] is None else grads[1].contiguous()
        strides = _strides(dy)
        walk, add, tiles = planned((self, strides, ends is None), lambda: self._back(strides, ends is not None))
        dx = torch.empty((self.B, self.T, self.C), dtype=x.dtype, device=x.device)
        parts = torch.empty((tiles, self.taps + (bias is not None), self.C), dtype=self.wide, device=x.device)
        d_weight, d_bias, d_recent = (None if t is None else torch.empty_like(t) for t in (weight, bias, recent))
        with use_device_of(x):
            walk((dy, ends, inputs, dx, d_recent, parts))
            add((parts, d_weight, d_bias), tiles)
        return dx, d_weight, d_bias, d_recent, None, None, None

    def _back(self, strides: tuple[int, int], carried: bool) -> tuple[Any, Any, int]:
        """Return the two launches of the backward pass, and the number of tiles; `carried`: what is has a gradient."""
        from fastweights.ops.gpu.common import add_parts
        from fastweights.ops.gpu.launcher import Launch
        from fastweights.ops.gpu.short_convolution.kernels import convolve_gradients

        dtype, weight, bias, recents, *_ = self.inputs
        options, tiles, programs = self._split(BACKWARD, strides[0])
        dtypes = (dtype, dtype if carried else None, self.inputs, dtype, recents, self.wide)
        constants = (self.T, self.N, self.x_rows, strides[1], options)
        walk = Launch(convolve_gradients, programs, dtypes, 0, constants, BACKWARD.warps, 1, self.device)
        groups = -(-self.C // ADDED) * (self.taps + (bias is not None))
        added = (self.C, self.taps, AT_ONCE, ADDED)
        add = Launch(add_parts, groups, (self.wide, weight, bias), 1, added, ADDING_WARPS, 1, self.device)
        return walk, add, tiles


def _prepared(tensors: Tensors) -> tuple[Any, ...]:
    """Return all but the mask, as the kernels read them."""
    x, weight, bias, recent, _, bounds, starts = tensors
    weight, bias, recent, bounds = (t if t is None else t.contiguous() for t in (weight, bias, recent, bounds))
    return _readable(x), weight, bias, recent, bounds, None if starts is None else starts.contiguous().view(torch.uint8)


def _readable(x: Tensor) -> Tensor:
    """Return x (B, T, C) with adjacent channels, and batches that are a number of tokens apart."""
    batch, token, channel = x.stride()
    in_line = x.shape[1] == 1 or (token > 0 and batch % token == 0)
    return x if channel == 1 and in_line else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    """Return how many entries it is from a token to the next, and how many tokens from a batch to the next."""
    batch, token, _ = x.stride()
    return (batch, 1) if x.shape[1] == 1 else (token, batch // token)

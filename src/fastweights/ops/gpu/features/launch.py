"""Launches the kernels of feature maps and norms: one for queries and one for keys, each way.

What follows from shapes, strides and dtypes is worked out once, in a `Plan`. Triton is imported when the first is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu.device import use_device_of
from fastweights.ops.gpu.heads import readable, token_stride
from fastweights.ops.normalization import L2_EPS

Tensors = Sequence[Any]

# Entries of a program, and its warps.
ENTRIES, WARPS = 2048, 4


def forward(tensors: Tensors, settings: Tensors) -> tuple[Any, ...]:
    """Return phi of queries and keys; None for those that are None."""
    return tuple(None if x is None else plan.forward(x) for x, plan in _plans(tensors, settings))


def backward(grads: Tensors, tensors: Tensors, settings: Tensors) -> Tensors:
    """Return the gradients of queries and keys; None for those without a gradient of what became of them."""
    pairs = zip(_plans(tensors, settings), grads, strict=True)
    return [*(None if dphi is None else plan.backward(dphi, x) for (x, plan), dphi in pairs), None]


def norm_of(features: Features) -> str:
    """Name the norm that features are divided by."""
    return "sum" if features.sum else "l2" if features.l2 else "none"


def _plans(tensors: Tensors, settings: Tensors) -> list[tuple[Any, Any]]:
    """Return queries and keys with the plan for each."""
    from fastweights.ops.gpu.launcher import kind_of, planned

    description, dtype = settings[0].description, settings[2]
    pairs: list[tuple[Any, Any]] = []
    for x, scale in ((tensors[0], description.scale), (tensors[1], 1.0)):
        features = description._replace(scale=scale)
        if x is None:
            pairs.append((None, None))
            continue
        key = (Plan, x.shape, kind_of(x), x.device, features, dtype)
        pairs.append((x, planned(key, partial(Plan, x, features, dtype))))
    return pairs


class Plan:
    """How heads of this shape, strides and dtype go through these features, which are to be in `dtype`."""

    def __init__(self, x: Tensor, features: Features, dtype: torch.dtype) -> None:
        from fastweights.ops.gpu.features.kernels import map_heads
        from fastweights.ops.gpu.launcher import Launch

        self.shape, self.dtypes, self.device, self.features = x.shape, (x.dtype, dtype), x.device, features
        self.row, self.count = token_stride(readable(x)), x.shape[:3].numel()
        options, programs = self._split(0)
        self.map = Launch(map_heads, programs, self.dtypes, 0, (self.count, options), WARPS, 1, x.device)

    def _split(self, dphi_row: int) -> tuple[Any, int]:
        """Return what a kernel is compiled for, and how many programs it has."""
        import triton.language as tl
        from triton import next_power_of_2

        from fastweights.ops.gpu.features.kernels import Options

        H, M = self.shape[2:]
        block = next_power_of_2(M)
        heads = max(1, min(ENTRIES // block, next_power_of_2(self.count)))
        wide = torch.promote_types(torch.promote_types(*self.dtypes), torch.float32)
        options = Options(
            H=H,
            M=M,
            map=self.features.map,
            norm=norm_of(self.features),
            scale=self.features.scale,
            eps=L2_EPS,
            x_row=self.row,
            dphi_row=dphi_row,
            heads=heads,
            block=block,
            acc=tl.float64 if wide == torch.float64 else tl.float32,
        )
        return options, -(-self.count // heads)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        x = readable(x)
        phi = torch.empty(self.shape, dtype=self.dtypes[1], device=x.device)
        with use_device_of(x):
            self.map((x, phi))
        return phi

    def backward(self, dphi: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of x."""
        from fastweights.ops.gpu.launcher import planned

        x, dphi = readable(x), readable(dphi)
        row = token_stride(dphi)
        back = planned((self, row), lambda: self._back(row))
        dx = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        with use_device_of(x):
            back((dphi, x, dx))
        return dx

    def _back(self, dphi_row: int) -> Any:
        from fastweights.ops.gpu.features.kernels import map_heads_gradients
        from fastweights.ops.gpu.launcher import Launch

        options, programs = self._split(dphi_row)
        raw, mapped = self.dtypes
        dtypes, constants = (mapped, raw, raw), (self.count, options)
        return Launch(map_heads_gradients, programs, dtypes, 0, constants, WARPS, 1, self.device)

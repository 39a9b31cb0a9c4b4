"""Launches the kernels of the softmax with label smoothing: losses, and the gradient of the logits.

Triton is imported when they first run. N rows of V logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops.gpu.device import use_device_of

# Logits of a row that a program has at a time, and its warps.
BLOCK, WARPS = 4096, 8


class Losses(NamedTuple):
    """Float32, (N,) each: the losses with label smoothing and without, and the log-sum-exps of the logits."""

    smoothed: Tensor
    nll: Tensor
    totals: Tensor


def forward(logits: Tensor, targets: Tensor, smoothing: float) -> Losses:
    """Compute the losses of targets (N,) under logits (N, V), both contiguous."""
    from fastweights.ops.gpu.label_smoothing.kernels import row_losses

    N, V = logits.shape
    losses = Losses(*(logits.new_empty(N, dtype=torch.float32) for _ in Losses._fields))
    with use_device_of(logits):
        row_losses[(N,)](logits, targets, *losses, V, SMOOTHING=smoothing, BLOCK=BLOCK, num_warps=WARPS)
    return losses


def backward(
    d_smoothed: Tensor, d_nll: Tensor | None, logits: Tensor, targets: Tensor, totals: Tensor, smoothing: float
) -> Tensor:
    """Compute the gradient of the logits (N, V) under those of the two losses (N,), of which one may be missing."""
    from fastweights.ops.gpu.label_smoothing.kernels import row_gradients

    d_logits = torch.empty_like(logits)
    d_smoothed = d_smoothed.contiguous()
    both = d_smoothed if d_nll is None else d_nll.contiguous()
    options = {"SMOOTHING": smoothing, "BOTH": d_nll is not None, "BLOCK": BLOCK, "num_warps": WARPS}
    with use_device_of(logits):
        row_gradients[(len(logits),)](logits, targets, totals, d_smoothed, both, d_logits, logits.shape[1], **options)
    return d_logits
